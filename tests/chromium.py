"""A headless Chromium for tests of pages."""

from __future__ import annotations

import shutil

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
