"""Appearance: colors, layout, escaping, and no requests to other hosts."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from eagle_fsd import EagleFSD
from eagle_fsd.chat.backend import Token
from eagle_fsd.chat.web.page import BASELINE_DELAY
from eagle_fsd.cli.demo import EXAMPLES

from .browsing import (
    MARKS,
    NARROW,
    WIDE,
    ActionChains,
    ControlledBackend,
    PageObject,
    WebElement,
)

pytestmark = MARKS
ORIGINS = ("exact", "fuzzy", "target")
HOSTILE = "<script>window.hacked=1</script><img src=x onerror='window.hacked=2'><b>bold</b>"
SIZES = pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
SCHEMES = pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])


def colors(page: PageObject, element: WebElement) -> tuple[list[float], list[float]]:
    """Return the red, green and blue parts of an element's text and background color."""
    styles = page.execute(
        "const s = getComputedStyle(arguments[0]); return [s.color, s.backgroundColor];", element
    )
    text, background = (
        [float(part) for part in color[color.index("(") + 1 : -1].split(",")] for color in styles
    )
    assert len(text) == len(background) == 3, "a color is transparent"
    return text, background


def contrast(one: list[float], other: list[float]) -> float:
    """Return WCAG's contrast ratio of two colors."""

    def luminance(color: list[float]) -> float:
        parts = [value / 255 for value in color]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        return sum(weight * v for weight, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    bright, dim = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


@SCHEMES
def test_token_colors_are_legible_and_distinct(page: PageObject, dark: bool) -> None:
    page.open(dark=dark)
    page.ask()
    surface = page.execute(
        "return getComputedStyle(document.querySelector('#fsd-chat')).background"
    )
    assert (sum(map(int, surface[4 : surface.index(")")].split(", "))) < 200) == dark
    palettes, underlines = set(), set()
    for origin in ORIGINS:
        token = page.find(f"#fsd-live .fsd-answer .fsd-{origin}")
        text, background = colors(page, token)
        assert contrast(text, background) >= 4.5
        palettes.add((*text, *background))
        underlines.add(token.value_of_css_property("text-decoration-style"))
    assert len(palettes) == 3
    assert len(underlines) == 3  # color is not the only cue


def test_html_in_messages_is_not_interpreted(page: PageObject, backend: ControlledBackend) -> None:
    backend.answer = [
        Token(1, HOSTILE, "exact", 0.1, 0.5, [(HOSTILE, 0.5)]),
        Token(2, '" onmouseover="window.hacked=3', "fuzzy", 0.1, 0.5, [('"><script>', 0.5)]),
    ]
    page.open()
    page.ask(HOSTILE)
    assert page.find("#fsd-live .fsd-question").text == HOSTILE
    tokens = page.find_all("#fsd-live .fsd-token")
    assert tokens[0].text == HOSTILE
    for token in tokens:
        ActionChains(page.driver).move_to_element(token).perform()
    assert "<script>" in page.find("#fsd-inspector").text
    page.compare()
    page.wait_for_verdict("identical (2 tokens)")
    page.ask("And again")  # moves the first exchange into the log
    assert HOSTILE in page.find("#fsd-log").text
    time.sleep(0.3)
    assert page.execute("return window.hacked === undefined")
    injected = page.execute(
        "return [...document.querySelectorAll(arguments[0])].flatMap(part =>"
        " [...part.querySelectorAll('script, img, b, [onerror], [onmouseover]')]).length",
        "#fsd-chat, #fsd-comparison-box, #fsd-inspector",
    )
    assert injected == 0


@SIZES
def test_answers_do_not_move_the_buttons(
    page: PageObject, backend: ControlledBackend, size: tuple[int, int]
) -> None:
    backend.answer = [Token(number, " word", "exact") for number in range(300)]
    page.open(size)

    def positions() -> list[dict[str, int]]:
        names = ("stop", "send", "clear", "compare-button")
        return [page.find(f"#fsd-{name}").rect for name in names]

    before = positions()
    page.ask("Short")
    assert positions() == before
    page.find("#fsd-send").click()
    page.wait_until(lambda: "Enter a message first" in page.find("#fsd-live .fsd-error").text)
    assert positions() == before
    page.find("#fsd-clear").click()
    page.wait_until(lambda: page.find_all("#fsd-live .fsd-answer") == [])
    assert positions() == before


@SIZES
def test_inspecting_a_token_does_not_move_it(
    page: PageObject, backend: ControlledBackend, size: tuple[int, int]
) -> None:
    """The inspector is above the comparison whose tokens are pointed at."""
    word = " something"
    backend.answer = [Token(1, word, "fuzzy", 0.1, 0.5, [(word, 0.5), (word, 0.25), (word, 0.25)])]
    page.open(size)
    page.ask()
    page.compare()
    page.wait_for_verdict("identical")
    token = page.find("#fsd-comparison-box .fsd-token")
    before = token.rect
    page.execute("arguments[0].focus({preventScroll: true})", token)
    inspector = page.find("#fsd-inspector")
    assert "something" in inspector.text
    assert token.rect == before
    hidden = "return arguments[0].scrollHeight - arguments[0].clientHeight"
    assert page.execute(hidden, inspector) <= 0


def test_requested_content_scrolls_into_view(page: PageObject, backend: ControlledBackend) -> None:
    page.open(NARROW)
    backend.answer = [Token(number, f" word {number}", "exact") for number in range(150)]
    chat = "const chat = document.querySelector('#fsd-chat');"

    def below() -> int:
        return page.execute(chat + "return chat.scrollHeight - chat.scrollTop - chat.clientHeight;")

    page.ask("Long")
    page.execute(chat + "chat.scrollTop = 0;")
    page.wait_until(lambda: below() > 100)
    page.ask("And again")
    page.wait_until(lambda: below() < 2)
    # Streaming does not scroll a user who has scrolled up.
    backend.pause = 0.02
    page.ask("Slowly", wait=False)
    page.wait_until(lambda: page.find("#fsd-live .fsd-question").text == "Slowly")
    page.wait_until(lambda: 10 < len(page.find_all("#fsd-live .fsd-token")) < 100)
    page.execute(chat + "chat.scrollTop = 0;")
    page.wait_for_answer()
    assert below() > 100
    # A comparison scrolls into view, also an identical one.
    backend.pause = 0.0
    visible = (
        "const box = document.querySelector('#fsd-comparison-box').getBoundingClientRect();"
        "return box.height > 0 && box.top < window.innerHeight - 50;"
    )
    for _ in range(2):
        page.execute("scrollTo(0, 0); document.querySelector('#fsd-compare-button').click()")
        page.wait_until(lambda: page.execute(visible))
        page.wait_for_verdict("identical")
        time.sleep(BASELINE_DELAY)  # Gradio ignores clicks until the event has ended


@SCHEMES
def test_narrow_page_fits_its_width(
    page: PageObject, backend: ControlledBackend, dark: bool
) -> None:
    page.open(NARROW, dark)
    assert page.horizontal_overflow() <= 0
    backend.answer = [
        Token(1, "long" * 60, "exact", 0.1, 0.5, [("long" * 60, 0.9)]),
        Token(2, " word", "fuzzy", 0.1, 0.5),
    ]
    page.ask("unbreakable" * 40)
    page.compare()
    page.wait_for_verdict("identical (2 tokens)")
    page.execute("document.querySelector('#fsd-live .fsd-token').focus()")
    assert page.horizontal_overflow() <= 0
    outside = page.execute(
        """
        return [...document.querySelectorAll("#fsd-page *")].filter(element => {
          const box = element.getBoundingClientRect();
          return box.width > 0 && box.height > 0 && box.right > window.innerWidth + 1;
        }).map(element => element.outerHTML.slice(0, 100));
        """
    )
    assert outside == []
    chat, slider = page.find("#fsd-chat").rect, page.find("#fsd-threshold").rect
    assert slider["y"] > chat["y"] + chat["height"]
    left, right = (column.rect for column in page.find_all(".fsd-column"))
    assert right["y"] >= left["y"] + left["height"]


def test_page_requests_no_other_host(page: PageObject) -> None:
    page.driver.get_log("browser")
    page.open()
    page.ask()
    requested = page.execute(
        "return performance.getEntriesByType('resource').map(entry => entry.name)"
    )
    assert len(requested) > 10
    assert [url for url in requested if not url.startswith(page.address)] == []
    linked = page.execute(
        "return [...document.querySelectorAll('[src], link[href]')]"
        ".map(element => element.src ?? element.href)"
    )
    allowed = (page.address, "data:", "about:")
    assert [url for url in linked if not url.startswith(allowed)] == []
    errors = [entry for entry in page.driver.get_log("browser") if entry["level"] == "SEVERE"]
    assert errors == []


@pytest.mark.slow
def test_screenshots_for_the_documentation(page: PageObject, tmp_path: Path) -> None:
    """Take docs/web-*.png with EAGLE_FSD_SCREENSHOTS=docs on an idle machine."""
    folder = Path(os.environ.get("EAGLE_FSD_SCREENSHOTS", tmp_path))
    acceptance = EagleFSD.from_pretrained().acceptance
    for name, size, dark, question in (
        ("wide", WIDE, False, EXAMPLES[0]),
        ("dark", WIDE, True, EXAMPLES[0]),
        ("narrow", (400, 900), False, EXAMPLES[1]),
        ("compare", (1280, 1200), False, EXAMPLES[1]),
    ):
        page.open(size, dark)
        page.set_slider("threshold", f"{acceptance.threshold}")
        page.set_slider("min-ratio", f"{acceptance.min_ratio}")
        page.ask(question)
        page.wait_until(lambda: page.find(".fsd-speedup b").text.endswith("x"))
        if name == "compare":
            page.compare()
            page.wait_for_comparison()
            page.find(".fsd-comparison").location_once_scrolled_into_view  # noqa: B018
        else:
            page.execute("document.querySelector('#fsd-live .fsd-fuzzy').focus()")
        if name == "narrow":
            page.execute("scrollTo(0, 0)")
        path = folder / f"web-{name}.png"
        assert page.driver.save_screenshot(str(path))
        assert path.stat().st_size < 250_000
