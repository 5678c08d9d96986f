"""Keyboard and pointer: focus, token inspection, shortcuts."""

from __future__ import annotations

import time

from eagle_fsd.cli.serve import EXAMPLES

from .browsing import BASELINE_DELAY, MARKS, NARROW, QUESTION, ActionChains, Keys, PageObject

pytestmark = MARKS


def test_inspector_describes_tokens(page: PageObject) -> None:
    """Pointer and keyboard open the inspector, Escape closes it, and an answer is one Tab stop."""
    page.open()
    page.ask()
    fuzzy = page.find("#fsd-live .fsd-fuzzy")
    assert "Divergence (js, Jensen-Shannon): 0." in fuzzy.get_attribute("title")
    assert "(T = 0.2)" in fuzzy.get_attribute("title")
    inspector = page.find("#fsd-inspector")
    assert inspector.rect["height"] == 0
    ActionChains(page.driver).move_to_element(fuzzy).perform()
    assert inspector.text == fuzzy.get_attribute("title")
    tokens = page.find_all("#fsd-live .fsd-token:not([hidden])")
    assert [token.get_attribute("tabindex") for token in tokens].count("0") == 1
    # The answer is the third Tab stop before the message box: colors, export, answer.
    page.find("#fsd-box textarea").click()
    for _ in range(3):
        page.press_with_shift(Keys.TAB)
    assert page.driver.switch_to.active_element == tokens[0]
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert page.driver.switch_to.active_element == tokens[2]
    assert inspector.text == tokens[2].get_attribute("title")
    assert tokens[2].value_of_css_property("outline-style") == "solid"
    page.press(Keys.END)
    assert page.driver.switch_to.active_element == tokens[-1]
    assert inspector.rect["height"] > 0
    page.press(Keys.ESCAPE)
    assert inspector.rect["height"] == 0
    assert page.driver.switch_to.active_element == tokens[-1]
    page.press(Keys.ARROW_LEFT)
    assert inspector.text == tokens[-2].get_attribute("title")
    page.find("#fsd-clear").click()
    page.wait_until(lambda: inspector.rect["height"] == 0)


def test_arrow_keys_move_between_lines(page: PageObject) -> None:
    page.backend.reply(*(f" word{number % 7 * '!'}" for number in range(80)))
    page.open()
    page.ask("Long")
    tokens = page.find_all("#fsd-live .fsd-token")
    page.execute("arguments[0].focus()", tokens[5])

    def focused() -> dict[str, int]:
        return page.driver.switch_to.active_element.rect

    def center(rect: dict[str, int]) -> float:
        return rect["x"] + rect["width"] / 2

    start = focused()
    page.press(Keys.ARROW_DOWN)
    below = focused()
    assert start["y"] < below["y"] < start["y"] + 2 * start["height"]
    assert abs(center(below) - center(start)) < start["width"]
    page.press(Keys.ARROW_DOWN)
    assert focused()["y"] > below["y"]
    page.press(Keys.ARROW_UP, Keys.ARROW_UP)
    assert focused()["y"] == start["y"]
    page.press(Keys.ARROW_UP)  # there is no line above
    assert focused()["y"] == start["y"]


def test_keyboard_alone_is_sufficient(page: PageObject) -> None:
    """Ask, inspect, recolor, move the slider, export, compare and start over without a pointer."""

    def tab_to(selector: str, back: bool = False) -> None:
        for _ in range(60):
            if page.execute("return document.activeElement.matches(arguments[0])", selector):
                return
            (page.press_with_shift if back else page.press)(Keys.TAB)
        raise AssertionError(f"Tab does not reach {selector}")

    page.open(NARROW)
    page.press(QUESTION, Keys.ENTER)
    page.wait_for_answer()
    page.wait_until(lambda: page.find(".fsd-speedup b").text.endswith("x"))
    tab_to("#fsd-live .fsd-token", back=True)
    page.press(Keys.ARROW_RIGHT)
    assert "Divergence" in page.find("#fsd-inspector").text
    page.press(Keys.ESCAPE)
    tab_to(".fsd-export")
    tab_to("#fsd-by-origin")
    page.press(Keys.ARROW_RIGHT)
    assert page.execute("return document.querySelector('#fsd-by-divergence').checked")
    tab_to("#fsd-threshold input[type=range]")
    page.press(Keys.HOME)
    page.wait_until(lambda: "At T = 0," in page.find(".fsd-flips").text)
    assert "may flip:" in page.find(".fsd-flips").text
    tab_to("#fsd-compare-button", back=True)
    page.press(Keys.ENTER)
    page.wait_for_verdict("identical")
    tab_to("#fsd-clear")
    page.press(Keys.ENTER)
    page.wait_until(lambda: page.find_all("#fsd-chat .fsd-answer") == [])
    tab_to("#fsd-examples button", back=True)
    page.press(Keys.ENTER)
    page.wait_until(lambda: page.find("#fsd-box textarea").get_attribute("value") == EXAMPLES[-1])


def test_chat_works_by_keyboard(page: PageObject) -> None:
    """Send with Enter, add a line with Shift+Enter, stop with Escape, and send again.

    Escape closes the inspector first.
    """
    page.backend.reply("So", " far", endless=True)
    page.open()
    page.press("two")
    page.press_with_shift(Keys.ENTER)
    page.press("lines", Keys.ENTER)
    page.wait_until(lambda: "So far" in page.find("#fsd-live .fsd-answer").text)
    assert page.find("#fsd-live .fsd-question").text == "two\nlines"
    page.execute("document.querySelector('#fsd-live .fsd-token').focus()")
    assert page.find("#fsd-inspector").text
    page.press(Keys.ESCAPE)
    assert not page.find("#fsd-inspector").text
    time.sleep(0.5)
    assert page.backend.active == 1
    page.press(Keys.ESCAPE)
    page.wait_until(lambda: "Stopped" in page.find("#fsd-live .fsd-note").text)
    page.wait_until(lambda: page.backend.active == 0)
    assert page.execute("return document.activeElement.tagName") == "TEXTAREA"
    # The partial answer stays, also after the time of the baseline.
    time.sleep(2 * BASELINE_DELAY)
    assert "So far" in page.find("#fsd-live .fsd-answer").text
    assert page.find("#fsd-stats").text
    page.backend.endless = False
    page.press("more", Keys.ENTER)
    page.wait_until(lambda: page.find("#fsd-live .fsd-question").text == "more")
    page.wait_for_answer()
    assert len(page.find_all("#fsd-log .fsd-answer")) == 1


def test_examples_fill_the_message_box(page: PageObject) -> None:
    page.backend.reply("43")
    page.open(NARROW)
    box = page.find("#fsd-box textarea")
    hidden = "return arguments[0].scrollHeight - arguments[0].clientHeight"
    assert page.execute(hidden, box) <= 0  # the placeholder fits
    page.find("#fsd-examples button").click()
    assert page.driver.switch_to.active_element == box
    page.wait_until(lambda: box.get_attribute("value") == EXAMPLES[0])
    page.press(Keys.ENTER)
    page.wait_for_answer()
    assert page.find("#fsd-live .fsd-question").text == EXAMPLES[0]
    for button in ("send", "clear"):
        page.find(f"#fsd-{button}").click()
        assert page.driver.switch_to.active_element == box
