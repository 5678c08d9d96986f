"""One server and one browser for all tests of this package.

Imports what needs Gradio or Selenium only where it is used: without them, the test modules are
skipped when they import ``browsing``, but this module must still load.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from api_servers import ServerThread

from eagle_fsd import EagleFSD
from eagle_fsd.chat.backend import LocalBackend
from eagle_fsd.chat.config import Limits
from eagle_fsd.chat.serve.guard import Guard
from eagle_fsd.cli.serve import BUNDLED_NAME, EXAMPLES
from eagle_fsd.utils.chat_templates import load_chat_template

if TYPE_CHECKING:
    from .browsing import ControlledBackend, PageObject


@pytest.fixture(scope="session")
def server() -> Iterator[tuple[ControlledBackend, str]]:
    """The page's backend and its URL."""
    from eagle_fsd.chat.web.app import page_app

    from .browsing import ControlledBackend

    model = EagleFSD.from_pretrained()
    model.acceptance = model.acceptance.updated(threshold=0.2, min_ratio=0.0)
    limits = Limits(max_body=200_000)
    pair = LocalBackend(model, load_chat_template(model.tokenizer), limits, BUNDLED_NAME)
    backend = ControlledBackend(pair)
    app = page_app(backend, examples=EXAMPLES)
    thread = ServerThread(Guard(app, max_body=limits.max_body), on_stop=app.close)
    yield backend, thread.url
    thread.stop()
    pair.close()


@pytest.fixture(scope="session")
def driver() -> Iterator[Any]:
    """Selenium's driver of a headless Chromium."""
    from chromium import CHROMIUM, DRIVER
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        # The page must work without internet access.
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        chrome = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield chrome
    chrome.quit()


@pytest.fixture
def backend(server: tuple[ControlledBackend, str], driver: Any) -> ControlledBackend:
    """The backend in its initial state, without answers in progress."""
    from .browsing import TIMEOUT

    controlled = server[0]
    driver.get("about:blank")
    controlled.reset()
    deadline = time.monotonic() + TIMEOUT
    while controlled.active:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    controlled.reset()
    return controlled


@pytest.fixture
def page(
    driver: Any, server: tuple[ControlledBackend, str], backend: ControlledBackend
) -> PageObject:
    """The page, not loaded yet."""
    from .browsing import PageObject

    return PageObject(driver, server[1], backend)
