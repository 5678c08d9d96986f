"""How the page looks: colours, places, widths, and nothing that runs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from eagle_fsd import EagleFSD
from eagle_fsd.chat.backend import Token
from eagle_fsd.chat.web.page import SETTLE
from eagle_fsd.cli.demo import EXAMPLES

from .browsing import MARKS, NARROW, WIDE, ActionChains, Watched, WebElement, Window

pytestmark = MARKS
ORIGINS = ("exact", "fuzzy", "target")
NASTY = "<script>window.hacked=1</script><img src=x onerror='window.hacked=2'><b>bold</b>"


def colours(window: Window, element: WebElement) -> tuple[list[int], list[int]]:
    """What a token's letters and what lies behind them look like."""
    found = window.script(
        "const s = getComputedStyle(arguments[0]); return [s.color, s.backgroundColor];", element
    )
    letters, behind = (
        [float(part) for part in colour[colour.index("(") + 1 : -1].split(",")] for colour in found
    )
    assert len(letters) == len(behind) == 3, "neither is transparent"
    return letters, behind


def contrast(one: list[int], other: list[int]) -> float:
    """WCAG's contrast ratio."""

    def luminance(colour: list[int]) -> float:
        parts = [value / 255 for value in colour]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        return sum(weight * v for weight, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    bright, dim = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_tokens_are_coloured_legibly(window: Window, dark: bool) -> None:
    window.open(dark=dark)
    window.ask()
    paper = window.script("return getComputedStyle(document.querySelector('#fsd-chat')).background")
    assert (sum(map(int, paper[4 : paper.index(")")].split(", "))) < 200) == dark
    seen, lines = set(), set()
    for origin in ORIGINS:
        token = window.one(f"#fsd-live .fsd-answer .fsd-{origin}")
        letters, behind = colours(window, token)
        assert contrast(letters, behind) >= 4.5
        seen.add((*letters, *behind))
        lines.add(token.value_of_css_property("text-decoration-style"))
    assert len(seen) == 3
    assert len(lines) == 3  # not by colour alone


def test_markup_is_shown_and_not_executed(window: Window, backend: Watched) -> None:
    backend.said = [
        Token(1, NASTY, "exact", 0.1, 0.5, [(NASTY, 0.5)]),
        Token(2, '" onmouseover="window.hacked=3', "fuzzy", 0.1, 0.5, [('"><script>', 0.5)]),
    ]
    window.open()
    window.ask(NASTY)
    assert window.one("#fsd-live .fsd-said").text == NASTY
    tokens = window.all("#fsd-live .fsd-token")
    assert tokens[0].text == NASTY
    for token in tokens:
        ActionChains(window.driver).move_to_element(token).perform()
    assert "<script>" in window.one("#fsd-inspector").text
    window.one("#fsd-compare-button").click()
    window.until(lambda: "The same 2" in window.one(".fsd-verdict").text)
    window.ask("And again")  # the first exchange moves up
    assert NASTY in window.one("#fsd-log").text
    time.sleep(0.3)
    assert window.script("return window.hacked === undefined")
    inside = "#fsd-chat, #fsd-compared, #fsd-inspector"
    found = window.script(
        "return [...document.querySelectorAll(arguments[0])].flatMap("
        "part => [...part.querySelectorAll('script, img, b, [onerror], [onmouseover]')]).length",
        inside,
    )
    assert found == 0


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_an_answer_moves_no_button(window: Window, backend: Watched, size: tuple[int, int]) -> None:
    """Nobody is to press Stop where it was."""
    backend.said = [Token(number, " word", "exact") for number in range(300)]
    window.open(size)
    names = ("stop", "send", "clear", "compare-button")

    def places() -> list[dict[str, int]]:
        return [window.one(f"#fsd-{name}").rect for name in names]

    before = places()
    window.ask("Short")
    assert places() == before
    window.one("#fsd-send").click()
    window.until(lambda: "say something first" in window.one("#fsd-live .fsd-notice").text)
    assert places() == before
    window.one("#fsd-clear").click()
    window.until(lambda: window.all("#fsd-live .fsd-answer") == [])
    assert places() == before


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_telling_of_a_token_moves_nothing(
    window: Window, backend: Watched, size: tuple[int, int]
) -> None:
    """What is told stands above the comparison: the pointer is to stay on its token."""
    word = " something"
    backend.said = [Token(1, word, "fuzzy", 0.1, 0.5, [(word, 0.5), (word, 0.25), (word, 0.25)])]
    window.open(size)
    window.ask()
    window.one("#fsd-compare-button").click()
    window.until(lambda: "The same 1" in window.one(".fsd-verdict").text)
    token = window.one("#fsd-compared .fsd-token")
    before = token.rect
    window.script("arguments[0].focus({preventScroll: true})", token)
    inspector = window.one("#fsd-inspector")
    assert "something" in inspector.text
    assert token.rect == before
    hidden = "return arguments[0].scrollHeight - arguments[0].clientHeight"
    assert window.script(hidden, inspector) <= 0


def test_what_was_asked_for_comes_into_view(window: Window, backend: Watched) -> None:
    window.open(NARROW)
    backend.said = [Token(number, f" word {number}", "exact") for number in range(150)]
    chat = "const chat = document.querySelector('#fsd-chat');"

    def beneath() -> int:
        return window.script(
            chat + "return chat.scrollHeight - chat.scrollTop - chat.clientHeight;"
        )

    window.ask("Long")
    window.script(chat + "chat.scrollTop = 0;")
    window.until(lambda: beneath() > 100)
    window.ask("And again")
    window.until(lambda: beneath() < 2)
    # Who looks back while an answer comes is left alone.
    backend.pause = 0.05
    window.ask("Slowly", wait=False)
    window.until(lambda: window.one("#fsd-live .fsd-said").text == "Slowly")
    window.until(lambda: 10 < len(window.all("#fsd-live .fsd-token")) < 100)
    window.script(chat + "chat.scrollTop = 0;")
    window.answered()
    assert beneath() > 100
    # A comparison begins in view, and so does the next one.
    backend.pause = 0.0
    inside = (
        "const box = document.querySelector('#fsd-compared').getBoundingClientRect();"
        "return box.height > 0 && box.top < window.innerHeight - 50;"
    )
    for _ in range(2):
        window.script("scrollTo(0, 0); document.querySelector('#fsd-compare-button').click()")
        window.until(lambda: window.script(inside))
        window.until(lambda: "The same" in window.one(".fsd-verdict").text)
        time.sleep(SETTLE)  # gradio takes no second click before it has told of the end


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_four_hundred_pixels_wide(window: Window, backend: Watched, dark: bool) -> None:
    window.open(NARROW, dark)
    assert window.overflow() <= 0
    backend.said = [
        Token(1, "long" * 60, "exact", 0.1, 0.5, [("long" * 60, 0.9)]),
        Token(2, " word", "fuzzy", 0.1, 0.5),
    ]
    window.ask("unbreakable" * 40)
    window.one("#fsd-compare-button").click()
    window.until(lambda: "The same 2" in window.one(".fsd-verdict").text)
    window.script("document.querySelector('#fsd-live .fsd-token').focus()")
    assert window.overflow() <= 0
    inside = window.script(
        """
        return [...document.querySelectorAll("#fsd-page *")].filter(part => {
          const box = part.getBoundingClientRect();
          return box.width > 0 && box.height > 0 && box.right > window.innerWidth + 1;
        }).map(part => part.outerHTML.slice(0, 100));
        """
    )
    assert inside == []
    chat, slider = window.one("#fsd-chat").rect, window.one("#fsd-threshold").rect
    assert slider["y"] > chat["y"] + chat["height"]
    left, right = (column.rect for column in window.all(".fsd-column"))
    assert right["y"] >= left["y"] + left["height"]


def test_nothing_comes_from_elsewhere(window: Window) -> None:
    window.driver.get_log("browser")
    window.open()
    window.ask()
    names = window.script("return performance.getEntriesByType('resource').map(item => item.name)")
    assert len(names) > 10
    assert [name for name in names if not name.startswith(window.address)] == []
    linked = window.script(
        "return [...document.querySelectorAll('[src], link[href]')]"
        ".map(part => part.src ?? part.href)"
    )
    assert [
        name for name in linked if not name.startswith((window.address, "data:", "about:"))
    ] == []
    complaints = [item for item in window.driver.get_log("browser") if item["level"] == "SEVERE"]
    assert complaints == []


@pytest.mark.slow
def test_pictures_for_the_documentation(window: Window, tmp_path: Path) -> None:
    """Written where the environment's EAGLE_FSD_PICTURES says: ``docs``, on an idle machine."""
    folder = Path(os.environ.get("EAGLE_FSD_PICTURES", tmp_path))
    settings = EagleFSD.from_pretrained().settings
    for name, size, dark, question in (
        ("wide", WIDE, False, EXAMPLES[0]),
        ("dark", WIDE, True, EXAMPLES[0]),
        ("narrow", (400, 900), False, EXAMPLES[1]),
        ("compare", (1280, 1000), False, EXAMPLES[1]),
    ):
        window.open(size, dark)
        window.number("threshold", f"{settings.threshold}")
        window.number("min-ratio", f"{settings.min_ratio}")
        window.ask(question)
        window.until(lambda: " x" in window.one(".fsd-factor b").text)
        if name == "compare":
            window.one("#fsd-compare-button").click()
            window.until(lambda: len(window.all(".fsd-column .fsd-answer[aria-busy=false]")) == 2)
            window.one(".fsd-compare").location_once_scrolled_into_view  # noqa: B018
        else:
            window.script("document.querySelector('#fsd-live .fsd-fuzzy').focus()")
        if name == "narrow":
            window.script("scrollTo(0, 0)")
        path = folder / f"web-{name}.png"
        assert window.driver.save_screenshot(str(path))
        assert path.stat().st_size < 400_000
