"""Appearance: colors, layout, and escaping."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from eagle_fsd import EagleFSD
from eagle_fsd.cli.serve import EXAMPLES

from .browsing import MARKS, NARROW, WIDE, ActionChains, PageObject, Token

pytestmark = MARKS
ORIGINS = ("exact", "fuzzy", "target")
HOSTILE = "<script>window.hacked=1</script><img src=x onerror='window.hacked=2'><b>bold</b>"
BOTH = pytest.mark.parametrize(
    ("size", "dark"), [(WIDE, False), (NARROW, True)], ids=["wide and light", "narrow and dark"]
)


#: Texts and borders whose contrast with the colors behind them is below WCAG's AA level.
ILLEGIBLE = """
const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
const parse = (color) => {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = color;
  canvas.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
  return [r, g, b, a / 255];
};
const over = ([r, g, b, a], below) => [r, g, b].map((part, i) => part * a + below[i] * (1 - a));
const luminance = (color) => {
  const [r, g, b] = color.map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const backdrop = (element) => {
  if (!element) return [255, 255, 255];
  const color = parse(getComputedStyle(element).backgroundColor);
  return color[3] === 1 ? color.slice(0, 3) : over(color, backdrop(element.parentElement));
};
const shown = (element) =>
  element.checkVisibility({opacityProperty: true}) && element.getClientRects().length;
const faded = (element) =>
  element && (getComputedStyle(element).opacity < 1 || faded(element.parentElement));
const judged = [];
const judge = (element, color, text) => {
  const behind = backdrop(element);
  const both = [over(parse(color), behind), behind].map(luminance).sort();
  const full = (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
  const ratio = faded(element) ? 0 : full;
  judged.push([ratio, text.trim().slice(0, 40)]);
};
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const {parentElement: element, data} = walker.currentNode;
  if (data.trim() && shown(element)) judge(element, getComputedStyle(element).color, data);
}
const fields = document.querySelectorAll("textarea, input:not([type=range], [type=radio])");
for (const element of fields) {
  if (!shown(element)) continue;
  judge(element, getComputedStyle(element).color, element.value);
  if (element.placeholder)
    judge(element, getComputedStyle(element, "::placeholder").color, element.placeholder);
}
for (const element of document.querySelectorAll("#fsd-box textarea, #fsd-buttons button:enabled")) {
  const color = parse(getComputedStyle(element).borderTopColor);
  const both = [over(color, backdrop(element.parentElement)), backdrop(element.parentElement)];
  const [dim, bright] = both.map(luminance).sort((a, b) => a - b);
  judged.push([((bright + 0.05) / (dim + 0.05)) * 1.5, `border of ${element.textContent}`]);
}
return [judged.length, judged.filter(([ratio]) => ratio < 4.5)];
"""


@BOTH
def test_all_text_has_contrast(page: PageObject, size: tuple[int, int], dark: bool) -> None:
    """Text is legible before, while and after a message is answered.

    Origins differ in color and underline, and controls have visible borders.
    """

    def check(least: int) -> None:
        page.wait_until(  # colors fade in
            lambda: (
                not page.execute("return document.getAnimations().some(a => a.transitionProperty)")
            )
        )
        count, illegible = page.execute(ILLEGIBLE)
        assert illegible == []
        assert count >= least

    def styles(name: str) -> set[str]:
        return {
            page.find(f"#fsd-live .fsd-answer .fsd-{origin}").value_of_css_property(name)
            for origin in ORIGINS
        }

    page.open(size, dark)
    surface = page.find("#fsd-chat").value_of_css_property("background-color")
    assert (sum(map(int, re.findall(r"\d+", surface)[:3])) < 200) == dark
    check(20)
    divergences = [10**-exponent for exponent in (5, 4, 3, 2, 1, 0)]
    page.backend.fixed = [
        Token(number, f" {origin} {value}", origin, value, 0.5, [("word", 0.5)])
        for number, value in enumerate(divergences)
        for origin in ORIGINS
    ]
    page.backend.endless = True
    page.ask(wait=False)
    page.wait_until(lambda: page.find_all("#fsd-live .fsd-flips"))
    page.execute("document.querySelector('#fsd-live .fsd-token').focus()")
    check(60)
    assert len(styles("background-color")) == len(styles("text-decoration-style")) == 3
    page.find("#fsd-by-divergence").click()
    check(60)
    backgrounds = {
        token.value_of_css_property("background-color")
        for token in page.find_all("#fsd-live .fsd-token")
    }
    assert len(backgrounds) >= len(divergences) - 2  # both ends of the scale are cut off
    page.backend.endless, page.backend.error = False, "out of memory"
    page.wait_until(lambda: page.find_all("#fsd-live .fsd-error"))
    page.find("#fsd-send").click()
    check(60)
    page.backend.error = ""
    page.find("#fsd-by-origin").click()
    page.compare()
    page.wait_for_verdict("identical")
    check(100)


@BOTH
def test_text_is_readable_and_labels_are_no_buttons(
    page: PageObject, size: tuple[int, int], dark: bool
) -> None:
    """An inspected token is described beside the chat, with words for ``js``."""
    page.backend.fixed = [Token(1, " word", "fuzzy", 0.1, 0.5, [(" word", 0.5)])]
    page.open(size, dark)
    page.ask()
    page.execute("document.querySelector('#fsd-live .fsd-token').focus()")
    inspector, buttons = page.find("#fsd-inspector"), page.find("#fsd-buttons").rect
    top, bottom = inspector.rect["y"], inspector.rect["y"] + inspector.rect["height"]
    assert 0 <= top < bottom <= size[1]
    assert bottom <= buttons["y"] or size == WIDE
    for described in (inspector, page.find("figcaption"), page.find("#fsd-divergence-info")):
        assert re.search("js[,:] Jensen-Shannon", described.text)
    small, buttonlike = page.execute(
        """
        const styles = (selector) => [...document.querySelectorAll(selector)]
          .filter((element) => element.checkVisibility() && element.innerText.trim())
          .map((element) => [element.innerText.slice(0, 40), getComputedStyle(element)]);
        return [
          styles("#fsd-page *").filter(([, style]) => parseFloat(style.fontSize) < 12),
          styles(".fsd-legend *, .fsd-control label, .fsd-author").filter(([, style]) =>
            style.cursor === "pointer" || style.boxShadow !== "none"
            || [style.borderTopWidth, style.borderRadius, style.padding].some((w) => w !== "0px")),
        ].map((found) => found.map(([text]) => text));
        """
    )
    assert (small, buttonlike) == ([], [])


@BOTH
def test_comparison_appears_in_the_chat(
    page: PageObject, size: tuple[int, int], dark: bool
) -> None:
    page.open(size, dark)
    page.ask()
    page.execute("document.querySelector('#fsd-chat').scrollTop = 0")
    page.find("#fsd-compare-button").location_once_scrolled_into_view  # noqa: B018
    page.compare()
    page.wait_for_comparison()

    def visible(selector: str) -> bool:
        """Return whether some of an element is inside both the chat and the window."""
        return page.execute(
            """
            const chat = document.querySelector("#fsd-chat").getBoundingClientRect();
            const box = document.querySelector(arguments[0]).getBoundingClientRect();
            const top = Math.max(box.top, chat.top, 0);
            return Math.min(box.bottom, chat.bottom, window.innerHeight) - top >= 20;
            """,
            selector,
        )

    page.wait_until(lambda: visible(".fsd-verdict"))
    assert visible(".fsd-column:last-child")
    assert size == NARROW or visible(".fsd-column:first-child")
    # The next message replaces it.
    page.ask("And now?")
    assert page.find_all(".fsd-comparison") == []


def test_html_in_messages_is_not_interpreted(page: PageObject) -> None:
    page.backend.fixed = [
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
        "#fsd-chat, #fsd-inspector",
    )
    assert injected == 0


@BOTH
def test_answers_do_not_move_what_is_used(
    page: PageObject, size: tuple[int, int], dark: bool
) -> None:
    """Answers do not move the buttons, and a filled inspector does not move the tokens."""
    word = " something"
    page.backend.reply(*[word] * 300)
    page.open(size, dark)

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
    top = [(word, 0.5), (word, 0.25), (word, 0.25)]
    page.backend.fixed = [Token(1, word, "fuzzy", 0.1, 0.5, top)]
    page.ask()
    page.compare()
    page.wait_for_verdict("identical")
    token, buttons = page.find("#fsd-comparison-box .fsd-token"), positions()
    place = token.rect
    page.execute("arguments[0].focus({preventScroll: true})", token)
    inspector = page.find("#fsd-inspector")
    assert "something" in inspector.text
    assert (token.rect, positions()) == (place, buttons)
    hidden = "return arguments[0].scrollHeight - arguments[0].clientHeight"
    assert page.execute(hidden, inspector) <= 0


def test_requested_content_scrolls_into_view(page: PageObject) -> None:
    page.open(NARROW)
    page.backend.reply(*(f" word {number}" for number in range(150)))
    chat = "const chat = document.querySelector('#fsd-chat');"

    def below() -> int:
        return page.execute(chat + "return chat.scrollHeight - chat.scrollTop - chat.clientHeight;")

    page.ask("Long")
    page.execute(chat + "chat.scrollTop = 0;")
    page.wait_until(lambda: below() > 100)
    page.ask("And again")
    page.wait_until(lambda: below() < 2)
    # Streaming does not scroll a user who has scrolled up.
    page.backend.pause = 0.1
    page.ask("Slowly", wait=False)
    page.wait_until(lambda: page.find("#fsd-live .fsd-question").text == "Slowly")
    page.wait_until(lambda: 10 < len(page.find_all("#fsd-live .fsd-token")) < 140)
    page.execute(chat + "chat.scrollTop = 0;")
    page.backend.pause = 0.0
    page.wait_for_answer()
    assert below() > 100


def test_narrow_page_fits_its_width(page: PageObject) -> None:
    """A narrow page does not scroll sideways, and the threshold is on its first screen."""
    page.open(NARROW)
    assert page.horizontal_overflow() <= 0
    slider = page.find("#fsd-threshold input[type=range]").rect
    assert page.execute("return scrollY") == 0
    assert slider["y"] + slider["height"] < NARROW[1]
    page.backend.fixed = [
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
    order = [page.find(f"#{name}").rect["y"] for name in ("fsd-chat", "fsd-box", "fsd-threshold")]
    assert order == sorted(order)
    left, right = (column.rect for column in page.find_all(".fsd-column"))
    assert right["y"] >= left["y"] + left["height"]


@pytest.mark.skipif(
    "EAGLE_FSD_SCREENSHOTS" not in os.environ, reason="EAGLE_FSD_SCREENSHOTS names no folder"
)
def test_screenshots_for_the_documentation(page: PageObject) -> None:
    """Take docs/web-*.png with EAGLE_FSD_SCREENSHOTS=docs on an idle machine."""
    folder = Path(os.environ["EAGLE_FSD_SCREENSHOTS"])
    acceptance = EagleFSD.from_pretrained().acceptance
    speedups = {}
    for name, size, dark, question in (
        ("warm-up", WIDE, False, EXAMPLES[0]),
        ("wide", WIDE, False, EXAMPLES[0]),
        ("dark", WIDE, True, EXAMPLES[0]),
        ("narrow", NARROW, False, EXAMPLES[1]),
        ("compare", WIDE, False, EXAMPLES[1]),
    ):
        page.open(size, dark)
        page.set_slider("threshold", f"{acceptance.threshold}")
        page.set_slider("min-ratio", f"{acceptance.min_ratio}")
        page.ask(question)
        page.wait_until(lambda: page.find(".fsd-speedup b").text.endswith("x"))
        speedups[name] = float(page.find(".fsd-speedup b").text.removesuffix("x"))
        if name == "warm-up":
            continue
        if name == "compare":
            page.compare()
            page.wait_for_comparison()
        elif name == "dark":  # colored by divergence, with a lower T
            page.find("#fsd-by-divergence").click()
            page.set_slider("threshold", "0.001")
            page.wait_until(lambda: page.find_all(".fsd-bar.fsd-flip"))
        elif name == "wide":
            page.execute("document.querySelector('#fsd-live .fsd-fuzzy').focus()")
        page.execute("scrollTo(0, 0)")
        path = folder / f"web-{name}.png"
        assert page.driver.save_screenshot(str(path))
        assert path.stat().st_size < 400_000
    for one, other in (("wide", "dark"), ("narrow", "compare")):  # two pictures of each answer
        ratio = speedups[one] / speedups[other]
        assert 0.85 < ratio < 1.18, f"the machine is not idle: {speedups}"
