"""The guard in front of every server, without a server."""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from eagle_fsd.chat.serve import guard as guard_module
from eagle_fsd.chat.serve.guard import Access, Guard, api_keys

KEY = "0123456789abcdef"
JSON = {"content-type": "application/json"}
#: Address that a connection was made to.
SERVER = ("192.0.2.7", 8000)


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the request's path and client, and the body of a POST request."""
    if scope["path"] == "/fail":
        raise RuntimeError("/home/somebody/secret.py")
    body = await Request(scope, receive).body() if scope["method"] == "POST" else b""
    client = scope["state"]["client"]
    response = JSONResponse({"path": scope["path"], "body": body.decode(), "client": client})
    await response(scope, receive, send)


def call(guard: Guard, method: str = "GET", path: str = "/", **options: Any) -> httpx.Response:
    """Send a request to a guard as if the connection was made to SERVER."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await guard({**scope, "server": SERVER}, receive, send)

    async def request() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **options)

    return asyncio.run(request())


def test_names_of_the_server_are_trusted() -> None:
    """A page of another site can resolve its own name to this machine (DNS rebinding)."""
    for host in (
        *("localhost", "LOCALHOST:8000", "127.0.0.1:8000", "127.0.0.5", "[::1]:8000", "localhost."),
        *("192.0.2.7:8000", "chat.example:443", socket.gethostname()),
    ):
        guard = Guard(echo, Access(("Chat.example",)))
        assert call(guard, headers={"host": host}).status_code == 200, host
    for host in (
        *("evil.example", "localhost.evil.example", "evil@localhost", "localhost/", "192.0.2.8"),
        *("127.0.0.1.evil.example", "[::2]", "", "localhost:port", "0.0.0.0", "2130706433"),
    ):
        response = call(Guard(echo), headers={"host": host})
        assert response.status_code == 421, host
        assert "--trusted-hosts" in response.json()["detail"]


def test_other_sites_are_refused() -> None:
    guard = Guard(echo, Access(("chat.example",)))
    for host, origin, status in (
        ("localhost:8000", "http://localhost:8000", 200),
        ("[::1]:8000", "http://[::1]:8000", 200),
        ("chat.example", "https://chat.example", 200),  # behind a TLS proxy
        ("chat.example:443", "https://chat.example", 200),
        ("localhost:8000", "http://localhost:3000", 403),
        ("localhost:8000", "http://127.0.0.1:8000", 403),
        ("localhost:8000", "https://evil.example", 403),
        ("localhost:8000", "null", 403),
        ("localhost:8000", "http://[", 403),
        ("localhost:8000", "", 403),
    ):
        for method in ("GET", "POST"):
            response = call(guard, method, headers={"host": host, "origin": origin})
            assert response.status_code == status, origin


def test_bodies_are_json() -> None:
    guard = Guard(echo)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        response = call(guard, "POST", content=b"{}", headers={"content-type": kind})
        assert response.status_code == 415

    async def chunks() -> AsyncIterator[bytes]:
        yield b"{}"

    assert call(guard, "POST", content=chunks()).status_code == 415  # of unknown length
    assert call(guard, "POST", content=chunks(), headers=JSON).json()["body"] == "{}"
    kind = {"content-type": "Application/JSON; charset=utf-8"}
    assert call(guard, "POST", content=b"{}", headers=kind).json()["body"] == "{}"
    # FastChat's own requests without a body have no content type.
    assert call(guard, "POST").status_code == 200


def test_keys_are_checked_before_the_body_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_FSD_API_KEYS", f" first, ,{KEY},")
    assert api_keys() == ("first", KEY)
    guard = Guard(echo, Access(keys=api_keys()), max_body=4)
    for value in ("", "Bearer", "Bearer firs", "Bearer first!", f"Basic {KEY}", KEY, "Bearer é"):
        headers = {**JSON, "authorization": value.encode()}
        response = call(guard, "POST", content=b"too large", headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"].startswith("Bearer ")
    for key in ("first", KEY):
        headers = {**JSON, "authorization": f"bearer {key}"}
        assert call(guard, "POST", content=b"{}", headers=headers).status_code == 200
    assert call(guard, path="/health").status_code == 200
    assert call(guard, path="/metrics").status_code == 401
    monkeypatch.delenv("EAGLE_FSD_API_KEYS")
    assert api_keys() == ()


def test_files_of_a_page_need_no_key() -> None:
    """The page asks for it; a Basic challenge would make the browser ask before."""
    guard = Guard(echo, Access(keys=(KEY,), page=True))
    for path in ("/", "/page.css", "/page.js"):
        assert call(guard, path=path).is_success
        assert call(guard, "POST", path, json={}).status_code == 401
        assert call(Guard(echo, Access(keys=(KEY,))), path=path).status_code == 401
    for path in ("/page.json", "/v1/models", "/page.js/"):
        response = call(guard, path=path)
        assert response.status_code == 401
        assert response.headers["www-authenticate"].startswith("Bearer realm=")
        assert call(guard, path=path, auth=("anybody", KEY)).status_code == 200
        assert call(guard, path=path, headers={"authorization": f"Bearer {KEY}"}).is_success
        assert call(guard, path=path, auth=("anybody", "other")).status_code == 401
    for value in (b"Basic " + base64.b64encode(KEY.encode()), b"Basic \xff"):
        headers = {"authorization": value}
        assert call(guard, path="/page.json", headers=headers).status_code == 401


def test_requests_have_an_identifier(caplog: pytest.LogCaptureFixture) -> None:
    """Responses repeat a usable identifier, even if refused or failed, and show no traceback."""
    for given, kept in (("abc-1", True), ("x" * 200, False), ("a b", False), ("", False)):
        for path in ("/", "/fail"):
            reply = call(Guard(echo), path=path, headers={"x-request-id": given})
            assert (reply.headers["x-request-id"] == given) == kept
    refused = call(Guard(echo, Access(keys=(KEY,))), headers={"x-request-id": "abc"})
    assert (refused.status_code, refused.headers["x-request-id"]) == (401, "abc")
    assert reply.status_code == 500
    assert reply.json() == {"detail": "the request failed"}
    assert "secret.py" in caplog.text


def test_pages_of_allowed_origins_may_send_requests() -> None:
    """Browsers first ask with OPTIONS, without the key."""
    site = "https://chat.example"
    guard = Guard(echo, Access(keys=(KEY,), origins=(site,)))
    wanted = "authorization, content-type, x-stainless-os"  # as OpenAI's client for browsers does
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": wanted}
    asked = call(guard, "OPTIONS", headers={**preflight, "origin": site})
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == site
    assert asked.headers["access-control-allow-headers"] == wanted
    key = {"authorization": f"Bearer {KEY}"}
    assert call(guard, headers={"origin": site}).status_code == 401
    reply = call(guard, "POST", json={}, headers={**key, "origin": site})
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == site
    assert "x-eagle-fsd-acceptance" in reply.headers["access-control-expose-headers"]
    for other in ("https://evil.example", "http://chat.example", "null"):
        for method, headers, status in (("OPTIONS", preflight, 400), ("GET", key, 403)):
            reply = call(guard, method, headers={**headers, "origin": other})
            assert reply.status_code == status
            assert "access-control-allow-origin" not in reply.headers


def test_a_client_is_the_owner_of_a_key_or_an_address() -> None:
    """An invented key makes no new client, and neither do several headers."""
    for guard, client in (
        (Guard(echo), "127.0.0.1"),
        (Guard(echo, Access(keys=("first", KEY))), KEY),
    ):
        headers = {"authorization": f"Bearer {KEY}"}
        assert call(guard, headers=headers).json()["client"] == client
        assert call(guard, auth=("anybody", KEY)).json()["client"] == client
        assert call(guard, path="/health").json()["client"] == "127.0.0.1"
        for name in ("authorization", "host", "origin", "content-type"):
            twice = [(name, "Bearer first"), (name, f"Bearer {KEY}")]
            assert call(guard, headers=twice).status_code == 400


def test_bodies_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(echo, max_body=10)
    assert call(guard, "POST", content=b'"12345678"', headers=JSON).status_code == 200
    response = call(guard, "POST", content=b'"123456789"', headers=JSON)
    assert response.status_code == 413
    assert "10 bytes" in response.json()["detail"]

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x"

    assert call(guard, "POST", content=endless(), headers=JSON).status_code == 413

    async def silent() -> AsyncIterator[bytes]:
        await asyncio.sleep(60)
        yield b""

    monkeypatch.setattr(guard_module, "BODY_TIMEOUT", 0.05)
    assert call(guard, "POST", content=silent(), headers=JSON).status_code == 408
