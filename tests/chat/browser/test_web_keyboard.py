"""The page by keyboard and pointer: where the focus is, and what it tells."""

from __future__ import annotations

import time

from eagle_fsd.chat.backend import Token
from eagle_fsd.chat.web.page import SETTLE
from eagle_fsd.cli.demo import EXAMPLES

from .browsing import MARKS, NARROW, ActionChains, Keys, Watched, Window

pytestmark = MARKS


def test_what_is_known_of_a_token(window: Window) -> None:
    """By pointer, and by keyboard: one stop of Tab, then arrows."""
    window.open()
    window.ask()
    fuzzy = window.one("#fsd-live .fsd-fuzzy")
    assert "js divergence 0." in fuzzy.get_attribute("title")
    assert "(T = 0.2)" in fuzzy.get_attribute("title")
    inspector = window.one("#fsd-inspector")
    ActionChains(window.driver).move_to_element(fuzzy).perform()
    assert inspector.text == fuzzy.get_attribute("title")
    tokens = window.all("#fsd-live .fsd-token")
    assert [token.get_attribute("tabindex") for token in tokens].count("0") == 1
    # From the message box backwards the answer is the next stop.
    window.one("#fsd-box textarea").click()
    ActionChains(window.driver).key_down(Keys.SHIFT).send_keys(Keys.TAB).key_up(
        Keys.SHIFT
    ).perform()
    assert window.driver.switch_to.active_element == tokens[0]
    window.keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert window.driver.switch_to.active_element == tokens[2]
    assert inspector.text == tokens[2].get_attribute("title")
    assert tokens[2].value_of_css_property("outline-style") == "solid"
    window.keys(Keys.END)
    assert window.driver.switch_to.active_element == tokens[-1]


def test_keyboard_alone(window: Window, backend: Watched) -> None:
    """Send with Enter, a new line with Shift+Enter, stop with Escape, and again."""
    backend.said, backend.endless = [Token(1, "So", "exact"), Token(2, " far", "target")], True
    window.open()
    window.keys("two")
    ActionChains(window.driver).key_down(Keys.SHIFT).send_keys(Keys.ENTER).key_up(
        Keys.SHIFT
    ).perform()
    window.keys("lines", Keys.ENTER)
    window.until(lambda: "So far" in window.one("#fsd-live .fsd-answer").text)
    assert window.one("#fsd-live .fsd-said").text == "two\nlines"
    window.keys(Keys.ESCAPE)
    window.until(lambda: "stopped" in window.one("#fsd-live .fsd-note").text)
    window.until(lambda: backend.open == 0)
    assert window.script("return document.activeElement.tagName") == "TEXTAREA"
    # What was said stays: also after plain decoding would have been measured.
    time.sleep(2 * SETTLE)
    assert "So far" in window.one("#fsd-live .fsd-answer").text
    assert window.one("#fsd-figures-box").text
    backend.endless = False
    window.keys("more", Keys.ENTER)
    window.until(lambda: window.one("#fsd-live .fsd-said").text == "more")
    window.answered()
    assert len(window.all("#fsd-log .fsd-answer")) == 1
    # Every control can be reached, and shows that it is.
    reached = set()
    wanted = {"fsd-send", "fsd-stop", "fsd-compare-button", "fsd-clear", "fsd-threshold"}
    wanted |= {"fsd-divergence", "fsd-min-ratio", "fsd-temperature"}
    for _ in range(60):
        window.keys(Keys.TAB)
        reached.add(
            window.script(
                "return document.activeElement.closest('[id^=fsd-]:not(#fsd-page)')?.id ?? ''"
            )
        )
        if wanted <= reached:
            break
    assert wanted <= reached


def test_an_answer_leaves_the_focus_where_it_is(window: Window, backend: Watched) -> None:
    """Whoever sets a number while an answer comes goes on doing so when it ends."""
    window.open()
    backend.said, backend.pause = [Token(number, " word", "exact") for number in range(10)], 0.05
    window.ask(wait=False)
    window.until(lambda: "word" in window.one("#fsd-live .fsd-answer").text)
    window.one("#fsd-threshold input[type=number]").click()
    window.answered()
    window.until(lambda: backend.asked[-1][1] and backend.open == 0)  # measured, too
    time.sleep(SETTLE)
    assert window.script("return document.activeElement.type") == "number"


def test_an_example_waits_for_enter(window: Window, backend: Watched) -> None:
    window.open(NARROW)
    box = window.one("#fsd-box textarea")
    hidden = "return arguments[0].scrollHeight - arguments[0].clientHeight"
    assert window.script(hidden, box) <= 0  # what stands in the empty box has room
    window.one("#fsd-examples button").click()
    assert window.driver.switch_to.active_element == box
    window.until(lambda: box.get_attribute("value") == EXAMPLES[0])
    window.keys(Keys.ENTER)
    window.answered()
    assert window.one("#fsd-live .fsd-said").text == EXAMPLES[0]
    window.one("#fsd-send").click()
    assert window.driver.switch_to.active_element == box
    window.until(lambda: "say something first" in window.one("#fsd-live .fsd-notice").text)
    window.one("#fsd-clear").click()
    assert window.driver.switch_to.active_element == box
