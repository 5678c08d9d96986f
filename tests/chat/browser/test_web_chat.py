"""Chatting on the page: answers, comparisons, new chats, leaving."""

from __future__ import annotations

import time
from itertools import pairwise

from eagle_fsd.chat.backend import Token
from eagle_fsd.chat.web.page import SETTLE

from .browsing import MARKS, PATIENCE, QUESTION, By, Keys, Watched, Window

pytestmark = MARKS


def test_an_answer_streams_with_its_figures(window: Window, backend: Watched) -> None:
    window.open()
    backend.pause = 0.06
    window.script(
        """
        window.states = [];
        new MutationObserver(() => {
          const answer = document.querySelector("#fsd-live .fsd-answer");
          const tokens = document.querySelector(".fsd-figures tbody tr:nth-child(3) td");
          if (answer) states.push([answer.ariaBusy, answer.textContent, tokens.textContent]);
        }).observe(document.body, {childList: true, subtree: true, characterData: true});
        """
    )
    window.ask()
    whole = window.answered()
    assert "Mia" not in whole
    assert "####" in whole
    states = window.script("return states")
    busy = [text for busy, text, _ in states if busy == "true"]
    grown = sorted(set(busy), key=len)
    assert len(grown) > 10
    assert all(later.startswith(earlier) for earlier, later in pairwise([*grown, whole]))
    counted = {int(tokens) for busy, _, tokens in states if busy == "true" and tokens.isdigit()}
    assert len(counted) > 10
    # Plain decoding's follow: of the same prompt, measured, and one token a pass.
    factor = window.until(lambda: " x" in window.one(".fsd-factor b").text)
    assert factor
    rows = window.script(
        "return [...document.querySelectorAll('.fsd-figures tbody td:last-child')]"
        ".map(cell => cell.textContent)"
    )
    assert float(rows[0]) > 0
    assert rows[1] == "1.00"
    (answered, _), (measured, plain) = backend.asked
    assert plain
    assert measured["prompt"] == answered["prompt"]
    assert window.one("#fsd-box textarea").get_attribute("value") == ""


def test_sliders_act(window: Window, backend: Watched) -> None:
    window.open()
    window.number("threshold", "0.4")
    window.number("min-ratio", "0.25")
    window.number("temperature", "0.5")
    window.number("max-new-tokens", "20")
    ratio = window.one("#fsd-min-ratio input[type=range]")
    ratio.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    divergence = window.one("#fsd-divergence input")
    divergence.click()
    divergence.send_keys(Keys.CONTROL, "a")
    divergence.send_keys("tv", Keys.ENTER)
    window.ask()
    params, _ = backend.asked[0]
    chosen = {name: params["fsd"][name] for name in ("threshold", "divergence", "min_ratio")}
    assert chosen == {"threshold": 0.4, "divergence": "tv", "min_ratio": 0.27}
    assert (params["temperature"], params["max_new_tokens"]) == (0.5, 20)
    assert "T = 0.4" in window.one("#fsd-live .fsd-note").text
    window.number("threshold", "0")
    window.ask()
    assert (
        backend.asked[-1][0]["fsd"]["threshold"] == 0
        or backend.asked[-2][0]["fsd"]["threshold"] == 0
    )
    assert window.all("#fsd-live .fsd-answer .fsd-fuzzy") == []
    bounds = [
        window.one(f"#fsd-{name} input[type=range]").get_attribute("max")
        for name in ("threshold", "min-ratio", "temperature", "max-new-tokens")
    ]
    assert bounds == ["0.5", "1", "2", "4096"]


def test_compare_marks_where_they_part(window: Window) -> None:
    window.open()
    window.number("threshold", "0.5")
    window.one("#fsd-box textarea").send_keys(QUESTION)
    window.one("#fsd-compare-button").click()
    done = ".fsd-column .fsd-answer[aria-busy=false]"
    window.until(lambda: len(window.all(done)) == 2)
    exact, fsd = window.all(done)
    sides = [
        [
            token.get_attribute("textContent")
            for token in side.find_elements(By.CSS_SELECTOR, ".fsd-token")
        ]
        for side in (exact, fsd)
    ]
    place = next(at for at, (one, other) in enumerate(zip(*sides, strict=False)) if one != other)
    for side, tokens in zip((exact, fsd), sides, strict=True):
        marked = side.find_elements(By.CSS_SELECTOR, ".fsd-token.fsd-parts")
        assert [token.get_attribute("textContent") for token in marked] == [tokens[place]]
    verdict = window.one(".fsd-verdict").text
    assert verdict.startswith(f"They part at token {place + 1}:")
    assert exact.find_elements(By.CSS_SELECTOR, ".fsd-fuzzy") == []
    assert fsd.find_elements(By.CSS_SELECTOR, ".fsd-fuzzy")
    assert [title.text for title in window.all(".fsd-column h3")] == [
        "Exact (T = 0)",
        "FSD (T = 0.5, js)",
    ]
    # Side by side, and in view.
    assert exact.rect["y"] == fsd.rect["y"]
    assert exact.rect["x"] + exact.rect["width"] < fsd.rect["x"]
    # The question stays in the box: it was not sent.
    assert window.one("#fsd-box textarea").get_attribute("value") == QUESTION
    window.number("threshold", "0")
    window.one("#fsd-compare-button").click()
    window.until(lambda: "The same" in window.one(".fsd-verdict").text)
    assert window.all(".fsd-parts") == []


def test_a_new_chat(window: Window, backend: Watched) -> None:
    window.open()
    window.ask()
    window.ask("Hello!")
    assert len(window.all("#fsd-chat .fsd-answer")) == 2
    window.one("#fsd-clear").click()
    window.until(lambda: window.all("#fsd-chat .fsd-answer") == [])
    window.ask("Hello!")
    assert len(window.all("#fsd-chat .fsd-answer")) == 1


def test_a_new_chat_while_plain_decoding_is_measured(window: Window, backend: Watched) -> None:
    """gradio draws an event's last view again when it ends: no figures of the old chat."""
    backend.said = [Token(number, f" {number}", "exact") for number in range(50)]
    window.open()
    window.ask("Count")
    backend.pause = 0.1
    window.until(lambda: " x" in window.one(".fsd-factor b").text)
    window.one("#fsd-clear").click()
    window.until(lambda: window.all("#fsd-chat .fsd-answer") == [])
    window.until(lambda: backend.open == 0)
    time.sleep(SETTLE)
    assert window.one(".fsd-factor b").text == "-"


def test_a_question_comes_back_unless_something_new_was_typed(
    window: Window, backend: Watched
) -> None:
    backend.said, backend.broken = [Token(1, "So", "exact")], True
    window.open()
    box = window.one("#fsd-box textarea")
    window.ask("The question")
    window.until(lambda: box.get_attribute("value") == "The question")
    assert window.all(".fsd-caret") == []
    backend.pause = 3.0  # time enough to type
    window.one("#fsd-send").click()
    window.until(lambda: box.get_attribute("value") == "")
    box.send_keys("My next one")
    window.until(lambda: len(window.all("#fsd-chat .fsd-note")) == 2)
    window.until(lambda: window.all(".fsd-caret") == [])
    time.sleep(SETTLE)
    assert box.get_attribute("value") == "My next one"


def test_coming_back_again_and_again(window: Window, backend: Watched) -> None:
    """A browser has six connections for a server, and may keep pages that were left."""
    for _ in range(8):
        begun = time.monotonic()
        window.open()
        window.driver.get("about:blank")
        assert time.monotonic() - begun < PATIENCE / 3


def test_leaving_the_page_ends_the_decoding(window: Window, backend: Watched) -> None:
    backend.said, backend.endless = [Token(1, "So", "exact")], True
    window.open()
    window.ask(wait=False)
    window.until(lambda: "So" in window.one("#fsd-live .fsd-answer").text)
    assert backend.open == 1
    left = time.monotonic()
    window.driver.get("about:blank")
    window.until(lambda: backend.open == 0)
    assert time.monotonic() - left < 10
