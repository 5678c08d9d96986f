"""A backend under the tests' control, and a page object for headless Chromium."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from importlib.util import find_spec
from typing import Any

import chromium
import pytest
from api_servers import QUESTION

if find_spec("gradio") is None:  # its import takes seconds
    pytest.skip("the web page needs Gradio: the extra [web]", allow_module_level=True)
pytest.importorskip("selenium.webdriver", reason="the browser is driven by Selenium")
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from eagle_fsd.chat.backend import HEARTBEAT_INTERVAL, BackendError, LocalBackend, Token, Update

#: Marks of every module in this package.
MARKS = [
    *chromium.MARKS,
    pytest.mark.slow,
    # About Gradio 6; the page is pinned to Gradio 5.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

#: Seconds to wait for anything on a busy machine.
TIMEOUT = 60
WIDE, NARROW = (1400, 900), (400, 800)


class ControlledBackend:
    """The bundled pair, or fixed answers in its place; records its requests.

    ``pause`` seconds pass before each token of fixed answers; 0 sends them at once. Answers with
    the drafter end with an ``error``, or never.
    """

    def __init__(self, pair: LocalBackend) -> None:
        self.pair, self.about = pair, pair.about
        self.active = 0  # answers in progress
        self.reset()

    def reset(self) -> None:
        """Restore the initial behavior and forget the requests."""
        self.answer: list[Token] | None = None  # of every request; default: the pair's own
        self.pause = 0.0
        self.endless = False
        self.error = ""
        self.requests: list[tuple[dict[str, Any], str]] = []

    def reply(self, *texts: str, **behavior: Any) -> None:
        """Answer with tokens of these texts; ``behavior`` sets attributes."""
        self.answer = [Token(number, text, "exact") for number, text in enumerate(texts)]
        vars(self).update(behavior)

    async def stream(
        self, params: Mapping[str, Any], client: str = "", method: str = "fsd"
    ) -> AsyncGenerator[Update, None]:
        self.requests.append((dict(params), method))
        self.active += 1
        try:
            tokens = self.answer
            stats: Mapping[str, float] = {"tokens_per_second": 50.0, "tau": 2.5}
            stats = {**stats, "steps": 2, "fuzzy_tokens": 1}
            if tokens is None:
                source = self.pair.stream(params, client, method)
                updates = [update async for update in source]
                tokens = [token for update in updates for token in update.tokens]
                stats = updates[-1].stats
            step = 1 if self.pause else len(tokens)
            for start in range(0, len(tokens), step):
                await asyncio.sleep(self.pause)
                new = tokens[start : start + step]
                yield Update(new, {**stats, "tokens": start + len(new)})
            while self.endless and method == "fsd":
                await asyncio.sleep(HEARTBEAT_INTERVAL)
                yield Update()
            if self.error and method == "fsd":
                raise BackendError(self.error)
            yield Update((), {**stats, "tokens": len(tokens)}, "stop")
        finally:
            self.active -= 1


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
        box = self.find("#fsd-box textarea")
        box.send_keys(message)
        pressed = -math.inf

        def sent() -> bool:
            # Gradio ignores Enter until it has received the end of the previous event, which is
            # not visible on the page.
            nonlocal pressed
            if self.find_all("#fsd-live .fsd-question:not([data-old])"):
                return True
            if time.monotonic() - pressed > 1:
                pressed = time.monotonic()
                box.send_keys(Keys.ENTER)
            return False

        self.wait_until(sent)
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
        """Choose a divergence by typing its name."""
        field = self.find("#fsd-divergence input")
        field.click()
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(name, Keys.ENTER)

    def horizontal_overflow(self) -> int:
        """Return by how many pixels the page is wider than the window."""
        return self.execute("return document.documentElement.scrollWidth - window.innerWidth")
