"""The files and settings of the web page; tests/chat/browser shows them in Chromium."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from api_servers import ServerThread

from eagle_fsd import AcceptanceConfig
from eagle_fsd.chat.config import AnswerOptions, Limits
from eagle_fsd.chat.serve.api import api_app, api_error
from eagle_fsd.chat.serve.guard import Access, Guard
from eagle_fsd.chat.web.page import add_page, page_settings
from eagle_fsd.utils.options import OptionsError

KEY = {"authorization": "Bearer 0123456789abcdef"}


def backend(acceptance: AcceptanceConfig, **limits: Any) -> Any:
    """Return what the page needs of a backend."""
    values = {"names": ["pair"], "default_acceptance": acceptance, "limits": Limits(**limits)}
    return SimpleNamespace(**values, queue=None)


PAIR = backend(AcceptanceConfig(threshold=0.2), max_new_tokens=300)


@pytest.fixture(scope="module")
def page() -> Iterator[httpx.Client]:
    app = api_app(PAIR)
    add_page(app, page_settings(PAIR, AnswerOptions(), ["What?"]))
    access = Access(keys=("0123456789abcdef",), page=True)
    server = ServerThread(Guard(app, access, error_body=api_error))
    yield server.http
    server.stop()


def test_files_are_static_and_settings_need_the_key(page: httpx.Client) -> None:
    for path, kind in (("/", "html"), ("/page.css", "css"), ("/page.js", "javascript")):
        reply = page.get(path)
        assert reply.status_code == page.head(path).status_code == 200
        assert reply.headers["content-type"] == f"text/{kind}; charset=utf-8"
        assert "://" not in reply.text
        assert "HTML" not in reply.text  # text is never parsed
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self'; connect-src" in policy
        assert "unsafe" not in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
    refused = page.get("/page.json")
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"].startswith("Bearer ")
    assert "pair" not in refused.text
    assert page.get("/page.json", headers=KEY).json()["examples"] == ["What?"]
    for path in (
        *("/page.py", "/page.js/", "/..\\page.py", f"/{'x' * 300}"),
        *("/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd"),
    ):
        assert page.get(path, headers=KEY).status_code == 404


def test_settings_are_the_servers() -> None:
    """The slider needs a finite threshold; a rule of the server's has none of the controls."""
    found = page_settings(PAIR, AnswerOptions(top_p=0.5, seed=3, temperature=0.5))
    controls = {control["name"]: control for control in found["controls"]}
    assert {name: item["value"] for name, item in controls.items()} == {
        "threshold": 0.2,
        "divergence": "js",
        "min_ratio": 0.0,
        "temperature": 0.5,
        "max_new_tokens": 300,
    }
    assert [controls[name]["max"] for name in ("threshold", "max_new_tokens")] == [0.5, 300]
    assert (found["params"]["top_p"], found["params"]["seed"]) == (0.5, 3)
    assert "max_new_tokens" not in found["params"]
    for acceptance, value in ((AcceptanceConfig(threshold=0.9), 0.9), (AcceptanceConfig(), 0.5)):
        found = page_settings(backend(acceptance), AnswerOptions())
        assert found["controls"][0]["max"] == value
    lossless = backend(AcceptanceConfig(), lossless=True)
    for item in (backend(AcceptanceConfig(rule="margin")), lossless):
        found = page_settings(item, AnswerOptions())
        assert [control["enabled"] for control in found["controls"]] == [False] * 3 + [True] * 2
    endless = backend(AcceptanceConfig(threshold=math.inf))
    with pytest.raises(OptionsError, match="threshold must be finite for the web page's slider;"):
        page_settings(endless, AnswerOptions())
