"""The ASGI middleware in front of Gradio's server. Gradio itself is not needed."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse

from eagle_fsd.chat.web.guard import PageGuard

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
def guard() -> PageGuard:
    app = FastAPI()

    @app.get("/")
    async def index(request: Request) -> HTMLResponse:
        assert "accept-encoding" not in request.headers
        return HTMLResponse(HTML)

    @app.api_route("/{path:path}", methods=["GET", "POST", "PUT"])
    async def anything(path: str, request: Request) -> dict[str, Any]:
        return {"path": path, "bytes": len(await request.body())}

    return PageGuard(app, 1000)


def call(app: PageGuard, method: str, path: str, **options: Any) -> httpx.Response:
    async def request() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://page") as client:
            return await client.request(method, path, **options)

    return asyncio.run(request())


@pytest.mark.parametrize(
    "path",
    ["/config", "/theme.css", "/assets/index.js", "/gradio_api/queue/data?session_hash=x"],
)
def test_routes_of_the_page_are_allowed(guard: PageGuard, path: str) -> None:
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
def test_other_gradio_routes_return_404(guard: PageGuard, method: str, path: str) -> None:
    assert call(guard, method, path).status_code == 404


def test_oversized_bodies_return_413(guard: PageGuard) -> None:
    join = "/gradio_api/queue/join"
    assert call(guard, "POST", join, content=b"x" * 1000).json()["bytes"] == 1000
    rejected = call(guard, "POST", join, content=b"x" * 1001)
    assert rejected.status_code == 413
    assert "1000 bytes" in rejected.json()["detail"]


def test_external_elements_are_removed(guard: PageGuard) -> None:
    reply = call(guard, "GET", "/", headers={"accept-encoding": "br"})
    for removed in ("image.example", "fonts.example", "cdn.example", "manifest.json"):
        assert removed not in reply.text
    for kept in ("./assets/index.js", "https://inline.example", "https://link.example"):
        assert kept in reply.text
    assert "connect-src 'self'" in reply.headers["content-security-policy"]
    assert int(reply.headers["content-length"]) == len(reply.content)
