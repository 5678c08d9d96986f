"""One server and one browser for all tests of this package.

Imports what needs Selenium only where it is used: without it, the test modules are skipped when
they import ``browsing``, but this module must still load.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from api_servers import TIMEOUT, ServerThread, seconds_until
from chromium import headless

from eagle_fsd import EagleFSD
from eagle_fsd.chat.config import AnswerOptions, Limits
from eagle_fsd.chat.serve.api import api_app, api_error
from eagle_fsd.chat.serve.guard import Access, Guard
from eagle_fsd.chat.web.page import add_page, page_settings
from eagle_fsd.cli.serve import BUNDLED_NAME, EXAMPLES
from eagle_fsd.utils.chat_templates import load_chat_template

KEY = "0123456789abcdef"

if TYPE_CHECKING:
    from .browsing import ControlledBackend, PageObject


@pytest.fixture(scope="session")
def server() -> Iterator[tuple[ControlledBackend, str, str]]:
    """The page's backend, and the URLs of two servers; the second one requires a key."""
    from .browsing import ControlledBackend, InventedTokens

    model = EagleFSD.from_pretrained()
    model.acceptance = model.acceptance.updated(threshold=0.2, min_ratio=0.0)
    template, limits = load_chat_template(model.tokenizer), Limits(max_body=200_000)
    backend = ControlledBackend(model, template, limits, [BUNDLED_NAME])
    InventedTokens(backend)
    app = api_app(backend)
    add_page(app, page_settings(backend, AnswerOptions(), EXAMPLES))
    access = Access(keys=(KEY,), page=True)
    open_to_all, keyed = (
        ServerThread(Guard(app)),
        ServerThread(Guard(app, access, error_body=api_error)),
    )
    yield backend, open_to_all.url, keyed.url
    open_to_all.stop()
    keyed.stop()
    backend.close()


@pytest.fixture(scope="session")
def driver() -> Iterator[Any]:
    """A browser in which the page must work without internet access."""
    with headless("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1") as chrome:
        yield chrome


@pytest.fixture
def backend(server: tuple[ControlledBackend, str, str], driver: Any) -> ControlledBackend:
    """The backend in its initial state, without answers in progress."""
    controlled = server[0]
    driver.get("about:blank")
    controlled.reset()
    assert seconds_until(lambda: not controlled.active) < TIMEOUT
    controlled.reset()
    return controlled


@pytest.fixture
def page(
    driver: Any, server: tuple[ControlledBackend, str, str], backend: ControlledBackend
) -> PageObject:
    """The page, not loaded yet."""
    from .browsing import PageObject

    return PageObject(driver, server[1], backend)
