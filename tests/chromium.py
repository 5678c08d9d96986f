"""A headless Chromium for tests of pages."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
#: Marks of every module that uses it.
MARKS = [
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not on the PATH"
    ),
]


@contextmanager
def headless(*arguments: str) -> Iterator[Any]:
    """Yield Selenium's driver of a browser with further arguments."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    common = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu")
    for argument in (*common, *arguments):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        chrome = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    try:
        yield chrome
    finally:
        chrome.quit()
