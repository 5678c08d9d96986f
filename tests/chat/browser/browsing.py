"""A page of the program in headless Chromium, and a model behind it that is watched."""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest

pytest.importorskip("gradio", reason="the web page needs gradio: the extra [web]")
pytest.importorskip("selenium.webdriver", reason="the browser is driven by selenium")
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from eagle_fsd.chat.backend import BackendError, LocalBackend, Token, Update

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
#: Of every module here.
MARKS = [
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="no chromium and chromedriver on the PATH"
    ),
    # What gradio 6 will not have; the page is pinned to 5.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

#: Seconds that a busy machine may take for anything.
PATIENCE = 60
QUESTION = "Mia has 8 apples at home. Then she gives 3 apples to Tom. How many apples are left?"
WIDE, NARROW = (1280, 900), (400, 800)


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
            "document.querySelectorAll('#fsd-live .fsd-said, #fsd-live .fsd-answer').forEach("
            "part => part.dataset.old = 'yes')"
        )
        box = self.one("#fsd-box textarea")
        box.send_keys(message)
        pressed = -math.inf

        def sent() -> bool:
            # gradio takes no Enter before the browser has heard that the last event has ended,
            # and nothing on the page tells.
            nonlocal pressed
            if self.all("#fsd-live .fsd-said:not([data-old])"):
                return True
            if time.monotonic() - pressed > 1:
                pressed = time.monotonic()
                box.send_keys(Keys.ENTER)
            return False

        self.until(sent)
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
