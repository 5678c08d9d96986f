"""Chatting on the page: answers, comparisons, new chats, leaving."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from .browsing import (
    BASELINE_DELAY,
    MARKS,
    NARROW,
    NONE,
    QUESTION,
    ActionChains,
    By,
    Keys,
    PageObject,
    Token,
)
from .conftest import KEY

pytestmark = MARKS


def test_answers_stream_with_their_stats(page: PageObject, tmp_path: Path) -> None:
    """The focus stays where it is, the console shows no errors, and the answer can be saved."""
    behavior = {"behavior": "allow", "downloadPath": str(tmp_path)}
    page.driver.execute_cdp_cmd("Page.setDownloadBehavior", behavior)
    page.driver.get_log("browser")
    page.open()
    page.backend.pause = 0.03
    page.execute(
        """
        window.states = [];
        new MutationObserver(() => {
          const answer = document.querySelector("#fsd-live .fsd-answer");
          const tokens = document.querySelector(".fsd-stats tbody tr:nth-child(3) td");
          if (answer) states.push([answer.ariaBusy, answer.textContent, tokens.textContent]);
        }).observe(document.body, {childList: true, subtree: true, characterData: true});
        """
    )
    page.ask(wait=False)
    page.find("#fsd-threshold input[type=number]").click()
    complete = page.wait_for_answer()
    assert "Mia" not in complete
    assert "####" in complete
    states = page.execute("return states")
    partial = sorted({text for busy, text, _ in states if busy == "true"}, key=len)
    assert len(partial) > 10
    assert all(later.startswith(earlier) for earlier, later in pairwise([*partial, complete]))
    counts = {int(tokens) for busy, _, tokens in states if busy == "true" and tokens.isdigit()}
    assert len(counts) > 10
    # The autoregressive baseline follows.
    page.backend.pause = 0.0
    page.wait_until(lambda: page.find(".fsd-speedup b").text.endswith("x"))
    speed, tau = page.execute(
        "return [...document.querySelectorAll('.fsd-stats tbody td:last-child')]"
        ".map(cell => cell.textContent)"
    )[:2]
    assert float(speed) > 0
    assert tau == "1.00"
    (answered, _), (measured, method) = page.backend.requests
    assert method == "ar"
    assert measured["messages"] == answered["messages"]
    assert page.find("#fsd-box textarea").get_attribute("value") == ""
    # A screen reader reads the answer once it is complete.
    answer = page.find("#fsd-live .fsd-answer").get_attribute("textContent")
    assert page.find("#fsd-announcement").get_attribute("textContent").startswith(answer)
    assert page.execute("return document.activeElement.type") == "number"
    errors = [entry for entry in page.driver.get_log("browser") if entry["level"] == "SEVERE"]
    assert errors == []
    page.find(".fsd-export").click()
    file = tmp_path / "eagle-fsd-answer.json"
    page.wait_until(file.exists)
    exported = json.loads(file.read_text(encoding="utf-8"))
    assert exported["answer"] == complete
    assert "".join(token["text"] for token in exported["tokens"]) == complete
    assert {token["origin"] for token in exported["tokens"]} == {"exact", "fuzzy", "target"}


def test_controls_set_the_request(page: PageObject) -> None:
    page.open()
    page.set_slider("threshold", "0.4")
    page.set_slider("min-ratio", "0.25")
    page.set_slider("temperature", "0.5")
    page.set_slider("max-new-tokens", "20")
    page.find("#fsd-min-ratio input[type=range]").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    page.choose_divergence("tv")
    page.ask()
    params, _ = page.backend.requests[0]
    acceptance = {name: params["fsd"][name] for name in ("threshold", "divergence", "min_ratio")}
    assert acceptance == {"threshold": 0.4, "divergence": "tv", "min_ratio": 0.27}
    assert (params["temperature"], params["max_new_tokens"]) == (0.5, 20)
    assert "T = 0.4" in page.find("#fsd-live .fsd-note").text
    page.set_slider("threshold", "0")
    page.ask()
    thresholds = [params["fsd"].get("threshold") for params, _ in page.backend.requests]
    assert 0 in thresholds[-2:]  # the last request may be the baseline's
    assert page.find_all("#fsd-live .fsd-answer .fsd-fuzzy") == []
    maxima = [
        page.find(f"#fsd-{name} input[type=range]").get_attribute("max")
        for name in ("threshold", "min-ratio", "temperature", "max-new-tokens")
    ]
    assert maxima == ["0.5", "1", "2", "4096"]


def test_compare_marks_the_first_difference(page: PageObject) -> None:
    page.open()
    page.set_slider("threshold", "0.5")
    page.find("#fsd-box textarea").send_keys(QUESTION)
    page.compare()
    exact, fsd = page.wait_for_comparison()

    def texts(selector: str) -> list[list[str]]:
        return [
            [
                token.get_attribute("textContent")
                for token in answer.find_elements(By.CSS_SELECTOR, selector)
            ]
            for answer in (exact, fsd)
        ]

    left, right = texts(".fsd-token")
    index = next(i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    assert texts(".fsd-token.fsd-differs") == [[left[index]], [right[index]]]
    page.wait_for_verdict(f"First difference at token {index + 1}:")
    assert texts(".fsd-fuzzy")[0] == []
    assert texts(".fsd-fuzzy")[1]
    assert [title.text for title in page.find_all(".fsd-column h3")] == [
        "Exact (T = 0)",
        "FSD (T = 0.5, js)",
    ]
    # The answers are side by side.
    assert exact.rect["y"] == fsd.rect["y"]
    assert exact.rect["x"] + exact.rect["width"] < fsd.rect["x"]
    # The question was not sent.
    assert page.find("#fsd-box textarea").get_attribute("value") == QUESTION
    page.set_slider("threshold", "0")
    page.compare()
    page.wait_for_verdict("identical")
    assert page.find_all(".fsd-differs") == []
    page.choose_divergence("kl")
    page.compare()
    page.wait_for_verdict("identical")
    titles = [
        [token.get_attribute("title") for token in answer.find_elements(By.CSS_SELECTOR, "[title]")]
        for answer in page.wait_for_comparison()
    ]
    assert titles[0] == titles[1]
    assert any("kl, Kullback-Leibler" in title for title in titles[0])


def test_nothing_describes_the_previous_answer(page: PageObject) -> None:
    """Sending a message or a comparison clears the statistics and the inspector."""
    page.open()
    for action in (lambda: page.ask("Second", wait=False), page.compare):
        page.backend.reply("Mia", " has", " 43", endless=False)
        page.ask("First")
        page.wait_until(lambda: page.find(".fsd-speedup b").text.endswith("x"))
        page.backend.reply(endless=True)
        page.execute("document.querySelector('#fsd-live .fsd-token').focus()")
        assert "“Mia”" in page.find("#fsd-inspector").text
        action()
        page.wait_until(lambda: page.backend.active == 1)
        assert page.find("#fsd-inspector").text == ""
        values = [cell.text for cell in page.find_all("#fsd-stats td")]
        assert (len(values), set(values)) == (10, {NONE})
        assert "x" not in page.find(".fsd-speedup b").text
        page.find("#fsd-clear").click()
        page.wait_until(lambda: page.backend.active == 0)


def test_stop_is_enabled_only_while_it_works(page: PageObject) -> None:
    page.backend.reply("So", endless=True)
    page.open()
    stop = page.find("#fsd-stop")
    assert not stop.is_enabled()
    assert stop.value_of_css_property("cursor") == "not-allowed"
    for ask in (lambda: page.ask(wait=False), page.compare):
        ask()
        page.wait_until(lambda: page.backend.active == 1 and stop.is_enabled())
        stop.click()
        page.wait_until(lambda: page.backend.active == 0 and not stop.is_enabled())
        assert page.execute("return document.activeElement.tagName") == "TEXTAREA"
    page.backend.endless = False
    page.ask("More")
    page.wait_until(lambda: page.backend.requests[-1][1] == "ar" and page.backend.active == 0)
    page.wait_until(lambda: not stop.is_enabled())


def test_strip_shows_the_tokens_that_would_flip(page: PageObject) -> None:
    """The line follows the slider in the browser, without a request."""
    page.backend.fixed = [
        Token(1, "one", "exact", 0.01),
        Token(2, " two", "fuzzy", 0.15),
        Token(3, " three", "target", 0.3),
        Token(4, " four", "fuzzy", 0.05),
        Token(5, " five", "target"),
        Token(6, " six", "exact", 0.4),
    ]
    page.open()
    page.set_slider("threshold", "0.2")
    page.ask()
    page.wait_until(lambda: page.backend.requests[-1][1] == "ar" and page.backend.active == 0)
    page.wait_until(lambda: page.find(".fsd-speedup b").text.endswith("x"))
    count = "return performance.getEntriesByType('resource').length"
    before, requests = page.execute(count), len(page.backend.requests)
    line = (
        "return parseFloat(getComputedStyle(document.querySelector('.fsd-bars'), '::after').bottom)"
    )
    heights = []
    for threshold, flipped in (
        ("0", ["two", "four"]),
        ("0.05", ["two", "four"]),  # a divergence must be below T
        ("0.1", ["two"]),
        ("0.2", []),
        ("0.5", ["three", "six"]),
    ):
        page.set_slider("threshold", threshold)
        page.wait_until(lambda: f"At T = {threshold}," in page.find(".fsd-flips").text)  # noqa: B023
        assert [item.text.strip() for item in page.find_all(".fsd-token.fsd-flip")] == flipped
        assert len(page.find_all(".fsd-bar.fsd-flip")) == len(flipped)
        assert all(word in page.find(".fsd-flips").text for word in flipped)
        heights.append(page.execute(line))
    assert heights == sorted(heights)
    assert heights[0] == 0 < heights[1]
    # The arrow keys of the slider move the line as well.
    page.find("#fsd-threshold input[type=range]").send_keys(Keys.ARROW_LEFT)
    page.wait_until(lambda: "At T = 0.495," in page.find(".fsd-flips").text)
    page.find("#fsd-threshold .reset-button").click()
    page.wait_until(lambda: "At T = 0.2, no token" in page.find(".fsd-flips").text)
    # Bars stand for tokens.
    ActionChains(page.driver).move_to_element(page.find_all(".fsd-bar")[2]).perform()
    assert "“ three”" in page.find("#fsd-inspector").text
    assert page.execute(count) == before
    assert len(page.backend.requests) == requests
    # Values of another divergence cannot be compared.
    page.choose_divergence("tv")
    page.wait_until(lambda: "The strip shows js" in page.find(".fsd-flips").text)
    assert page.find_all(".fsd-flip") == []


def test_strip_has_no_line_if_another_rule_decodes(page: PageObject) -> None:
    """The settings that the page fetches name the rule."""
    source = """
        const original = window.fetch;
        window.fetch = async (url, ...rest) => {
            const reply = await original(url, ...rest);
            if (!String(url).endsWith("page.json")) return reply;
            return Response.json({...(await reply.json()), rule: "margin", label: "margin 0.8"});
        };
    """
    command = "Page.addScriptToEvaluateOnNewDocument"
    script = page.driver.execute_cdp_cmd(command, {"source": source})
    page.backend.fixed = [Token(1, "one", "exact", 0.01), Token(2, " two", "fuzzy", 0.15)]
    try:
        page.open()
        page.ask()
        page.wait_until(lambda: len(page.find_all(".fsd-bar")) == 2)
    finally:
        page.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)
    content = "return getComputedStyle(document.querySelector('.fsd-bars'), '::after').content"
    assert page.execute(content) == "none"
    assert page.find(".fsd-flips").text == ""


def test_strip_of_a_long_answer_scrolls(page: PageObject) -> None:
    page.backend.fixed = [Token(number, " word", "fuzzy", 0.01) for number in range(300)]
    page.open(NARROW)
    page.ask()
    assert page.horizontal_overflow() <= 0
    widths = "const strip = arguments[0]; return [strip.scrollWidth, strip.clientWidth];"
    scrolled, shown = page.execute(widths, page.find(".fsd-scroll"))
    assert scrolled == 600 > shown
    bar = page.find(".fsd-bar")
    assert bar.value_of_css_property("background-image").startswith("linear-gradient")
    assert bar.value_of_css_property("background-color") == "rgba(0, 0, 0, 0)"


def test_new_chat_removes_the_messages(page: PageObject) -> None:
    """A new chat cancels the baseline of the last answer."""
    page.backend.reply(*map(str, range(50)))
    page.open()
    page.ask("Hello!")
    page.ask("Count")
    assert len(page.find_all("#fsd-chat .fsd-answer")) == 2
    page.backend.pause = 0.1
    page.wait_until(lambda: page.find(".fsd-speedup b").text.endswith("x"))
    page.find("#fsd-clear").click()
    page.wait_until(lambda: page.find_all("#fsd-chat .fsd-answer") == [])
    page.wait_until(lambda: page.backend.active == 0)
    time.sleep(BASELINE_DELAY)
    assert page.find(".fsd-speedup b").text == NONE
    page.backend.pause = 0.0
    page.ask("Hello!")
    assert len(page.find_all("#fsd-chat .fsd-answer")) == 1


def test_failed_questions_return_to_the_empty_box(page: PageObject) -> None:
    page.backend.reply("So", error="out of memory")
    page.open()
    box = page.find("#fsd-box textarea")
    page.ask("The question")
    page.wait_until(lambda: box.get_attribute("value") == "The question")
    assert page.find_all(".fsd-caret") == []
    page.backend.pause = 1.5  # time to type
    page.find("#fsd-send").click()
    page.wait_until(lambda: box.get_attribute("value") == "")
    box.send_keys("My next one")
    page.wait_until(lambda: len(page.find_all("#fsd-chat .fsd-note")) == 2)
    page.wait_until(lambda: page.find_all(".fsd-caret") == [])
    time.sleep(BASELINE_DELAY)
    assert box.get_attribute("value") == "My next one"


def test_page_asks_for_a_key(page: PageObject, server: tuple[Any, ...]) -> None:
    """It is sent in a header, also after the page is loaded again."""
    page.backend.reply("So")
    page.driver.get(server[2])
    field = page.find("#fsd-key input")
    for key, reason in (("wrong", "requires a key"), (KEY, "not valid")):
        page.wait_until(lambda: reason in page.find("#fsd-key-reason").text)  # noqa: B023
        field.send_keys(key, Keys.ENTER)
    for _ in range(2):
        page.wait_until(lambda: page.find("#fsd-threshold input"))
        page.wait_until(lambda: not page.find("#fsd-key").is_displayed())
        page.ask()
        page.driver.get(server[2])
    assert KEY not in page.driver.current_url


def test_long_chats_are_shortened(page: PageObject) -> None:
    page.open()
    page.set_slider("max-new-tokens", "4")
    box = page.find("#fsd-box textarea")
    for _ in range(2):  # about 1,500 tokens each; the context has 2,048
        page.execute("arguments[0].value = 'apples '.repeat(1500)", box)
        page.ask("")
    assert "2 oldest messages dropped" in page.find("#fsd-live .fsd-note").text
    page.execute("arguments[0].value = 'apples '.repeat(2800)", box)
    page.ask("", wait=False)
    page.wait_until(lambda: "no room for an answer" in page.find("#fsd-live .fsd-error").text)
    assert len(page.find_all(".fsd-error")) == 1


def test_leaving_the_page_cancels_the_decoding(page: PageObject) -> None:
    page.backend.reply("So", endless=True)
    page.open()
    page.ask(wait=False)
    page.wait_until(lambda: "So" in page.find("#fsd-live .fsd-answer").text)
    assert page.backend.active == 1
    left = time.monotonic()
    page.driver.get("about:blank")
    page.wait_until(lambda: page.backend.active == 0)
    assert time.monotonic() - left < 10
