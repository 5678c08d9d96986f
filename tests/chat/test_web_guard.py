"""What Gradio's application is asked. Gradio itself is not needed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse

from eagle_fsd.chat.serve.guard import Guard
from eagle_fsd.chat.web.guard import PageApp

JOIN, JSON = "/gradio_api/queue/join", {"content-type": "application/json"}
HTML = """<!doctype html><html><head>
<meta property="og:image" content="https://image.example/picture.jpg"
/>
<link rel="preconnect" href="https://fonts.example" crossorigin="anonymous" />
<script
    src="https://cdn.example/script.js"
    async
></script>
<link rel="manifest" href="/manifest.json" />
<script type="module" crossorigin src="./assets/index.js"></script>
<script>window.settings = {"about": "https://inline.example"};</script>
</head><body><a href="https://link.example">a link</a></body></html>"""


@pytest.fixture
def guard() -> Guard:
    app = FastAPI()

    @app.get("/")
    async def index(request: Request) -> HTMLResponse:
        assert "accept-encoding" not in request.headers
        return HTMLResponse(HTML)

    @app.api_route("/{path:path}", methods=["GET", "POST", "PUT"])
    async def anything(path: str, request: Request) -> dict[str, Any]:
        return {"path": path, "bytes": len(await request.body())}

    return Guard(PageApp(app, {3: 2}), max_body=1000)


def call(app: Guard, method: str, path: str, **options: Any) -> httpx.Response:
    async def request() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **options)

    return asyncio.run(request())


def test_only_routes_of_the_page_are_allowed(guard: Guard) -> None:
    for path in ("/config", "/assets/index.js", "/gradio_api/queue/data?session_hash=x"):
        assert call(guard, "GET", path).status_code == 200
    for method, path in (
        ("GET", "/gradio_api/file=/etc/passwd"),
        ("GET", "/gradio_api/file/etc/passwd"),
        ("GET", "/file=/etc/passwd"),
        ("GET", "/gradio_api/proxy=https://other.example"),
        ("POST", "/gradio_api/upload"),
        ("POST", "/gradio_api/run/predict"),
        ("POST", "/gradio_api/api/predict"),
        ("POST", "/gradio_api/call/send"),
        ("POST", "/gradio_api/component_server"),
        ("GET", "/gradio_api/queue/join"),
        ("POST", "/"),
        ("PUT", "/gradio_api/queue/join"),
        ("GET", "/monitoring"),
        ("GET", "/gradio_api/deep_link"),
    ):
        assert call(guard, method, path).status_code == 404
    # The page has the guard of all servers.
    assert call(guard, "GET", "/", headers={"host": "evil.example"}).status_code == 421


def join(**changes: Any) -> dict[str, Any]:
    """Return what the page sends for an event."""
    return {"fn_index": 3, "data": [None, "text"], "session_hash": "abc123", **changes}


def test_events_are_validated(guard: Guard) -> None:
    """Gradio would answer some of them with an internal error that shows a traceback."""
    assert call(guard, "POST", JOIN, json=join()).status_code == 200
    for changes in (
        *({"fn_index": index} for index in (-1, 2, None, "3", 3.0, True, 10**30, [])),
        *({"data": data} for data in (None, [], {}, "ab", [1], [1, 2, 3], [1, {}], [[], 1])),
        *({"session_hash": session} for session in (None, "", 1, "../x", "x" * 65, [])),
        {"extra": "\ud800"},
    ):
        body = json.dumps(join(**changes)).encode()
        for path in (JOIN, f"{JOIN}/"):
            assert call(guard, "POST", path, content=body, headers=JSON).status_code == 400
    for body in (b"[]", b"{", b"null", b"\xff", b'{"session_hash": NaN}', b"1"):
        for path in (JOIN, "/gradio_api/cancel", "/gradio_api/reset"):
            assert call(guard, "POST", path, content=body, headers=JSON).status_code == 400
    for length, status in ((1000, 200), (1001, 413)):
        body = json.dumps(join()).encode().ljust(length)
        assert call(guard, "POST", JOIN, content=body, headers=JSON).status_code == status


def test_external_elements_are_removed(guard: Guard) -> None:
    reply = call(guard, "GET", "/", headers={"accept-encoding": "br"})
    for removed in ("image.example", "fonts.example", "cdn.example", "manifest.json"):
        assert removed not in reply.text
    for kept in ("./assets/index.js", "https://inline.example", "https://link.example"):
        assert kept in reply.text
    assert "connect-src 'self'" in reply.headers["content-security-policy"]
    assert int(reply.headers["content-length"]) == len(reply.content)
