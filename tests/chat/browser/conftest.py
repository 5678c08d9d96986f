"""One browser and one page for all tests here.

What they need is imported where it is used: where there is no gradio or no selenium, the modules
that import ``browsing`` are skipped, and this one is not.
"""

from __future__ import annotations

import socket
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from eagle_fsd import EagleFSD
from eagle_fsd.chat.backend import LocalBackend
from eagle_fsd.chat.config import Limits
from eagle_fsd.cli.demo import BUNDLED_NAME, EXAMPLES
from eagle_fsd.utils.chat_templates import chat_format

if TYPE_CHECKING:
    from .browsing import Watched, Window


@pytest.fixture(scope="package")
def served() -> Iterator[tuple[Watched, str]]:
    """The page over a watched pair, and its address."""
    from eagle_fsd.chat.web.app import page_app, page_server

    from .browsing import Watched

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


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    from selenium import webdriver

    from .browsing import CHROMIUM, DRIVER

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


@pytest.fixture
def backend(served: tuple[Watched, str], browser: Any) -> Watched:
    """As new, and nothing on its way from the page before."""
    from .browsing import PATIENCE

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
    from .browsing import Window

    return Window(browser, served[1])
