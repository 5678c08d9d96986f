"""The web page in headless Chromium."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

gradio = pytest.importorskip("gradio", reason="the web page needs gradio: the extra [web]")
webdriver = pytest.importorskip("selenium.webdriver", reason="the browser is driven by selenium")
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.remote.webelement import WebElement  # noqa: E402

from eagle_fsd import EagleFSD  # noqa: E402
from eagle_fsd.chat.options import Limits  # noqa: E402
from eagle_fsd.chat.web import page_app, page_server  # noqa: E402
from eagle_fsd.chat.web_backend import BackendError, LocalBackend, Token, Update  # noqa: E402
from eagle_fsd.chat.web_page import SETTLE  # noqa: E402
from eagle_fsd.cli.demo import BUNDLED_NAME, EXAMPLES  # noqa: E402
from eagle_fsd.model.prompts import chat_format  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="no chromium and chromedriver on the PATH"
    ),
    # What gradio 6 will not have; the page is pinned to 5.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

#: Seconds that a busy machine may take for anything.
PATIENCE = 60
QUESTION = "Mia has 8 apples at home. Then she gives 3 apples to Tom. How many apples are left?"
NASTY = "<script>window.hacked=1</script><img src=x onerror='window.hacked=2'><b>bold</b>"
WIDE, NARROW = (1280, 900), (400, 800)
ORIGINS = ("exact", "fuzzy", "target")


class Watched:
    """The bundled pair, or what it is told to say; remembers what was asked.

    Attributes:
        said: In the place of the pair's answers.
        pause: Seconds before each token; 0: they come at once.
        endless, broken: Whether answers go on, silently, or break off; plain decoding does not.
        open: Answers on their way.
    """

    def __init__(self, pair: LocalBackend) -> None:
        self.pair, self.about = pair, pair.about
        self.open = 0
        self.reset()

    def reset(self) -> None:
        self.said: list[Token] | None = None
        self.pause = 0.0
        self.endless = self.broken = False
        self.asked: list[tuple[dict[str, Any], bool]] = []

    async def stream(self, params: Mapping[str, Any], plain: bool = False) -> AsyncIterator[Update]:
        self.asked.append((dict(params), plain))
        self.open += 1
        try:
            figures: Mapping[str, float] = {}
            if self.said is None:
                found = [update async for update in self.pair.stream(params, plain)]
                tokens = [token for update in found for token in update.tokens]
                figures = found[-1].figures
            else:
                tokens = self.said
                figures = {"tokens_per_second": 50.0, "tau": 2.5, "steps": 2, "fuzzy_tokens": 1}
            at_once = 1 if self.pause else len(tokens)
            for place in range(0, len(tokens), at_once):
                await asyncio.sleep(self.pause)
                new = tokens[place : place + at_once]
                yield Update(new, {**figures, "tokens": place + len(new)})
            while self.endless and not plain:
                await asyncio.sleep(0.02)
                yield Update()
            if self.broken and not plain:
                raise BackendError("broken off")
            yield Update((), {**figures, "tokens": len(tokens)}, "stop")
        finally:
            self.open -= 1


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Watched, str]]:
    """The page over a watched pair, and its address."""
    model = EagleFSD.from_pretrained()
    settings = replace(model.settings, threshold=0.2, min_ratio=0.0)
    model.settings = settings
    pair = LocalBackend(model, chat_format(model.tokenizer), Limits(max_body=200_000), BUNDLED_NAME)
    backend = Watched(pair)
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = page_server(page_app(backend, examples=EXAMPLES))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield backend, f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join(10)
    pair.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        # The page is to work on a machine that reaches no other.
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


class Window:
    """A fresh page."""

    def __init__(self, driver: Any, address: str) -> None:
        self.driver, self.address = driver, address

    def open(self, size: tuple[int, int] = WIDE, dark: bool = False) -> Window:
        shape = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", shape)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get(self.address)
        self.until(lambda: self.one("#fsd-box textarea").is_displayed())
        self.until(lambda: self.script("return document.activeElement.tagName") == "TEXTAREA")
        return self

    def until(self, found: Callable[[], Any]) -> Any:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                if result := found():
                    return result
            except Exception:  # what is drawn anew is gone for a moment
                if time.monotonic() > end:
                    raise
            assert time.monotonic() < end, "the page does not get there"
            time.sleep(0.02)

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def script(self, source: str, *arguments: Any) -> Any:
        return self.driver.execute_script(source, *arguments)

    def keys(self, *keys: str) -> None:
        """What a person types, wherever the focus is."""
        ActionChains(self.driver).send_keys(*keys).perform()

    def ask(self, message: str = QUESTION, wait: bool = True) -> None:
        self.script(
            "document.querySelectorAll('#fsd-live .fsd-answer').forEach("
            "answer => answer.dataset.old = 'yes')"
        )
        self.one("#fsd-box textarea").send_keys(message, Keys.ENTER)
        if wait:
            self.answered()

    def answered(self) -> str:
        """The newest answer once it is complete."""
        selector = "#fsd-live .fsd-answer[aria-busy=false]:not([data-old])"
        return self.until(lambda: self.one(selector).get_attribute("textContent"))

    def number(self, name: str, value: str) -> None:
        """Set a slider by its number, by keyboard alone."""
        field = self.one(f"#fsd-{name} input[type=number]")
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(value, Keys.TAB)

    def overflow(self) -> int:
        """Pixels that the page is wider than the window."""
        return self.script("return document.documentElement.scrollWidth - window.innerWidth")


@pytest.fixture
def backend(served: tuple[Watched, str], browser: Any) -> Watched:
    """As new, and nothing on its way from the page before."""
    found = served[0]
    browser.get("about:blank")
    found.reset()
    until = time.monotonic() + PATIENCE
    while found.open:
        assert time.monotonic() < until
        time.sleep(0.02)
    found.reset()
    return found


@pytest.fixture
def window(browser: Any, served: tuple[Watched, str], backend: Watched) -> Window:
    return Window(browser, served[1])


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
    backend.pause = 1.0
    window.one("#fsd-send").click()
    window.until(lambda: box.get_attribute("value") == "")
    box.send_keys("My next one")
    window.until(lambda: len(window.all("#fsd-chat .fsd-note")) == 2)
    window.until(lambda: window.all(".fsd-caret") == [])
    time.sleep(SETTLE)
    assert box.get_attribute("value") == "My next one"


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


def test_requests_past_the_page_are_checked(served: tuple[Watched, str], backend: Watched) -> None:
    """gradio's protocol, spoken by a program."""
    address = served[1]
    with httpx.Client(base_url=address, trust_env=False, timeout=PATIENCE) as client:
        config = client.get("/config").json()
        send = config["dependencies"]
        place = next(item["id"] for item in send if len(item["inputs"]) == 7)

        def call(*values: Any) -> str:
            data = {"data": [None, *values], "fn_index": place, "session_hash": "program"}
            assert client.post("/gradio_api/queue/join", json=data).status_code == 200
            found = ""
            url = "/gradio_api/queue/data?session_hash=program"
            with client.stream("GET", url) as reply:
                for line in reply.iter_lines():
                    found += line
                    if "process_completed" in line:
                        break
            return found

        # gradio refuses the first of these itself, the page the rest.
        for values, words in (
            (("Hello", 0.9, "js", 0, 0, 9), "greater than maximum value 0.5"),
            (("Hello", 0.1, "js", 0, 0, 10**9), "greater than maximum value 4096"),
            (("Hello", [1], "js", 0, 0, 9), '"success":false'),
            (("Hello", 0.1, "nothing", 0, 0, 9), '"success":false'),
            (("Hello", False, "js", 0, 0, 9), "threshold must be a number"),
            (("Hello", 0.1, "js", 0, 0, 2.5), "max_new_tokens must be a whole number"),
            (("x" * 30_000, 0.1, "js", 0, 0, 9), "characters at most"),
        ):
            assert words in call(*values)
        assert backend.asked == []
        large = {"data": ["x" * 300_000], "fn_index": place, "session_hash": "program"}
        assert client.post("/gradio_api/queue/join", json=large).status_code == 413
        for path in ("/gradio_api/file=/etc/hostname", "/gradio_api/upload", "/monitoring"):
            assert client.get(path).status_code == 404
        assert client.post("/gradio_api/upload", files={"files": b"x"}).status_code == 404


def test_many_wait_and_may_stop(served: tuple[Watched, str], backend: Watched) -> None:
    """gradio runs so many events at once: those who wait are not to keep out who stops."""
    many = 50
    backend.said, backend.endless = [Token(1, "So", "exact")], True
    with httpx.Client(base_url=served[1], trust_env=False, timeout=PATIENCE) as client:
        events = client.get("/config").json()["dependencies"]
        send = next(item["id"] for item in events if len(item["inputs"]) == 7)
        stop = next(
            item["id"] for item in events if len(item["inputs"]) == 1 and not item["outputs"]
        )

        def join(event: int, visitor: int, *values: Any) -> None:
            data = {"data": [None, *values], "fn_index": event, "session_hash": f"many{visitor}"}
            assert client.post("/gradio_api/queue/join", json=data).status_code == 200

        def until(waiting: int) -> None:
            end = time.monotonic() + PATIENCE
            while backend.open != waiting:
                assert time.monotonic() < end, f"{backend.open} wait, not {waiting}"
                time.sleep(0.05)

        try:
            for visitor in range(many):
                join(send, visitor, "Hello", 0.1, "js", 0, 0, 9)
            until(many)
            for visitor in range(many):
                join(stop, visitor)
            until(0)
        finally:
            backend.endless = False


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
