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


@pytest.mark.parametrize(
    "path",
    ["/config", "/theme.css", "/assets/index.js", "/gradio_api/queue/data?session_hash=x"],
)
def test_routes_of_the_page_are_allowed(guard: Guard, path: str) -> None:
    assert call(guard, "GET", path).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
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
    ],
)
def test_other_gradio_routes_return_404(guard: Guard, method: str, path: str) -> None:
    assert call(guard, method, path).status_code == 404


def join(**changes: Any) -> dict[str, Any]:
    """Return what the page sends for an event."""
    return {"fn_index": 3, "data": [None, "text"], "session_hash": "abc123", **changes}


def test_oversized_bodies_return_413(guard: Guard) -> None:
    kind, size = {"content-type": "application/json"}, len(json.dumps(join()))
    for length in (1000, 1001):
        body = json.dumps(join()).encode() + b" " * (length - size)
        reply = call(guard, "POST", "/gradio_api/queue/join", content=body, headers=kind)
        if length == 1000:
            assert reply.json()["bytes"] == 1000
        else:
            assert reply.status_code == 413
            assert "1000 bytes" in reply.json()["detail"]


@pytest.mark.parametrize(
    "changes",
    [
        *({"fn_index": index} for index in (-1, 2, None, "3", 3.0, True, 10**30, [])),
        *({"data": data} for data in (None, [], {}, "ab", [1], [1, 2, 3], [1, {}], [[], 1])),
        *({"session_hash": session} for session in (None, "", 1, "../x", "x" * 65, [])),
        {"extra": "\ud800"},
    ],
)
def test_events_are_validated(guard: Guard, changes: dict[str, Any]) -> None:
    """Gradio would answer some of them with an internal error that shows a traceback."""
    path = "/gradio_api/queue/join"
    assert call(guard, "POST", path, json=join()).status_code == 200
    kind = {"content-type": "application/json"}
    body = json.dumps(join(**changes)).encode()
    reply = call(guard, "POST", path, content=body, headers=kind)
    assert reply.status_code == 400
    assert call(guard, "POST", path + "/", content=body, headers=kind).status_code == 400


@pytest.mark.parametrize("body", [b"[]", b"{", b"null", b"\xff", b'{"session_hash": NaN}', b"1"])
def test_bodies_are_json_objects(guard: Guard, body: bytes) -> None:
    kind = {"content-type": "application/json"}
    for path in ("queue/join", "cancel", "reset"):
        reply = call(guard, "POST", f"/gradio_api/{path}", content=body, headers=kind)
        assert reply.status_code == 400


def test_foreign_pages_are_refused(guard: Guard) -> None:
    """The page has the guard of all servers."""
    origin = {"origin": "https://evil.example"}
    path = "/gradio_api/queue/join"
    assert call(guard, "POST", path, json=join(), headers=origin).status_code == 403
    assert call(guard, "GET", "/", headers={"host": "evil.example"}).status_code == 421


def test_external_elements_are_removed(guard: Guard) -> None:
    reply = call(guard, "GET", "/", headers={"accept-encoding": "br"})
    for removed in ("image.example", "fonts.example", "cdn.example", "manifest.json"):
        assert removed not in reply.text
    for kept in ("./assets/index.js", "https://inline.example", "https://link.example"):
        assert kept in reply.text
    assert "connect-src 'self'" in reply.headers["content-security-policy"]
    assert int(reply.headers["content-length"]) == len(reply.content)
