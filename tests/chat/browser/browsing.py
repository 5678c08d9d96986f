"""A backend under the tests' control, and a page object for headless Chromium."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import chromium
import pytest
from api_servers import QUESTION

pytest.importorskip("selenium.webdriver", reason="the browser is driven by Selenium")
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.select import Select

from eagle_fsd.chat.backend import LocalBackend
from eagle_fsd.chat.decode_queue import DecodingError, JobUpdate
from eagle_fsd.chat.session import AnswerRequest, token_usage
from eagle_fsd.chat.text import Piece
from eagle_fsd.model.step import TokenDetail
from eagle_fsd.model.verify import Origin

#: Marks of every module in this package.
MARKS = [*chromium.MARKS, pytest.mark.slow]

#: Seconds to wait for anything on a busy machine.
TIMEOUT = 60
#: Seconds between an answer and its baseline.
BASELINE_DELAY = 0.5
#: Shown where there is no number.
NONE = "—"
WIDE, NARROW = (1400, 900), (400, 800)


@dataclass(frozen=True)
class Token:
    """A token of a fixed answer; ``top`` are texts with their probabilities."""

    id: int
    text: str
    origin: str
    divergence: float | None = None
    probability: float = 0.5
    top: Sequence[tuple[str, float]] = ()


class ControlledBackend(LocalBackend):
    """The bundled pair, or fixed answers in its place; records its requests.

    ``pause`` seconds pass before each token of fixed answers; 0 sends them at once. Answers with
    the drafter end with an ``error``, or never.
    """

    active = 0  # answers in progress

    def reset(self) -> None:
        """Restore the initial behavior and forget the requests."""
        self.fixed: list[Token] | None = None  # answer to every request; default: the pair's own
        self.pause = 0.0
        self.endless = False
        self.error = ""
        self.requests: list[tuple[dict[str, Any], str]] = []

    def reply(self, *texts: str, **behavior: Any) -> None:
        """Answer with tokens of these texts; ``behavior`` sets attributes."""
        self.fixed = [Token(number, text, "exact") for number, text in enumerate(texts)]
        vars(self).update(behavior)

    async def answer(
        self,
        params: Mapping[str, Any],
        client: str = "",
        method: str = "fsd",
        admitted: bool = False,
    ) -> AsyncGenerator[tuple[AnswerRequest, JobUpdate], None]:
        self.requests.append((dict(params), method))
        self.active += 1
        try:
            found: Any = None
            if self.fixed is None:
                answer = super().answer(params, client, method, admitted)
                updates = [item async for item in answer]
                request, found = updates[-1]
                pieces = [piece for _, update in updates for piece in update.pieces]
            else:
                request = await self.read(params, client)
                pieces = [self.piece(token) for token in self.fixed]
            stats = {"tau": 2.5, "steps": 2, "tokens_per_second": 50.0, "dropped_messages": 0}
            stats |= {"fuzzy_tokens": 1, "exact_tokens": 1, "target_tokens": 1}
            stats = found.stats if found else stats

            def update(start: int, end: int, reason: str | None = None) -> JobUpdate:
                return JobUpdate(pieces[start:end], token_usage(9, end), reason, stats)

            step = 1 if self.pause else max(1, len(pieces))
            for start in range(0, len(pieces), step):
                await asyncio.sleep(self.pause)
                yield request, update(start, start + step)
            while self.endless and method == "fsd":
                await asyncio.sleep(0.05)
            if self.error and method == "fsd":
                raise DecodingError(self.error)
            yield request, update(len(pieces), len(pieces), "stop")
        finally:
            self.active -= 1

    def piece(self, token: Token) -> Piece:
        """Return a token of an answer; its alternatives get ids that no token has."""
        top = [(self.invent(text), math.log(value)) for text, value in token.top]
        detail = TokenDetail(math.log(token.probability), token.divergence, top)
        return Piece(token.text, token.id, Origin[token.origin.upper()], detail)

    def invent(self, text: str) -> int:
        """Return the id of a new token with this text."""
        id_ = 10**6 + len(self.invented)
        self.invented[id_] = text
        return id_


class InventedTokens:
    """A decoder of the pair's tokens and of invented ones."""

    def __init__(self, backend: ControlledBackend) -> None:
        self.own, self.invented = backend.tokens, {}
        backend.tokens, backend.invented = self, self.invented

    def text(self, token: int) -> str:
        return self.invented.get(token) or self.own.text(token)

    def bytes(self, token: int) -> bytes:
        return self.text(token).encode()


class PageObject:
    """The page in a browser, which Selenium drives."""

    def __init__(self, driver: Any, address: str, backend: ControlledBackend) -> None:
        self.driver, self.address, self.backend = driver, address, backend

    def open(self, size: tuple[int, int] = WIDE, dark: bool = False) -> None:
        """Load the page anew, in a window of the given size."""
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get(self.address)
        self.wait_until(lambda: self.find("#fsd-box textarea").is_displayed())
        focused = "return document.activeElement.tagName"
        self.wait_until(lambda: self.execute(focused) == "TEXTAREA")
        self.wait_until(lambda: self.find("#fsd-threshold input"))

    def wait_until(self, condition: Callable[[], Any]) -> Any:
        """Return the first true value of ``condition``."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            try:
                if result := condition():
                    return result
            except Exception:  # elements disappear while they are rendered again
                if time.monotonic() > deadline:
                    raise
            assert time.monotonic() < deadline, "timeout"
            time.sleep(0.02)

    def find(self, selector: str) -> WebElement:
        """Return the first element that matches a CSS selector."""
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def find_all(self, selector: str) -> list[WebElement]:
        """Return all elements that match a CSS selector."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def execute(self, script: str, *arguments: Any) -> Any:
        """Run JavaScript and return its result."""
        return self.driver.execute_script(script, *arguments)

    def press(self, *keys: str) -> None:
        """Type into the focused element."""
        ActionChains(self.driver).send_keys(*keys).perform()

    def press_with_shift(self, key: str) -> None:
        """Press a key together with Shift."""
        ActionChains(self.driver).key_down(Keys.SHIFT).send_keys(key).key_up(Keys.SHIFT).perform()

    def ask(self, message: str = QUESTION, wait: bool = True) -> None:
        """Send a message with Enter, and wait for its answer."""
        self.execute(
            "document.querySelectorAll('#fsd-live .fsd-question, #fsd-live .fsd-answer').forEach("
            "element => element.dataset.old = 'true')"
        )
        self.find("#fsd-box textarea").send_keys(message, Keys.ENTER)
        self.wait_until(lambda: self.find_all("#fsd-live .fsd-question:not([data-old])"))
        if wait:
            self.wait_for_answer()

    def wait_for_answer(self) -> str:
        """Return the text of the newest answer once it is complete."""
        selector = "#fsd-live .fsd-answer[aria-busy=false]:not([data-old])"
        return self.wait_until(lambda: self.find(selector).get_attribute("textContent"))

    def compare(self) -> None:
        """Click Compare."""
        self.find("#fsd-compare-button").click()

    def wait_for_comparison(self) -> list[WebElement]:
        """Return both answers of a comparison once they are complete."""
        selector = ".fsd-column .fsd-answer[aria-busy=false]"
        self.wait_until(lambda: len(self.find_all(selector)) == 2)
        return self.find_all(selector)

    def wait_for_verdict(self, text: str) -> None:
        """Wait until the sentence above the comparison contains ``text``."""
        self.wait_until(lambda: text in self.find(".fsd-verdict").text)

    def set_slider(self, name: str, value: str) -> None:
        """Set a slider by typing into its number field."""
        field = self.find(f"#fsd-{name} input[type=number]")
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(value, Keys.TAB)

    def choose_divergence(self, name: str) -> None:
        """Choose a divergence from the list."""
        Select(self.find("#fsd-divergence select")).select_by_visible_text(name)

    def horizontal_overflow(self) -> int:
        """Return by how many pixels the page is wider than the window."""
        return self.execute("return document.documentElement.scrollWidth - window.innerWidth")
