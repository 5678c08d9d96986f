"""Restrict Gradio's server to what the page needs.

Gradio serves files by path, accepts uploads and fetches from other hosts; a page of text and
sliders needs none of that. Gradio's HTML also refers to fonts and a script on other hosts, which
are removed.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import FastAPI, Request

from eagle_fsd.chat.request_body import RequestError, read_json
from eagle_fsd.chat.serve.asgi import Message, Receive, Send, replay_body
from eagle_fsd.chat.serve.connections import connection_limit
from eagle_fsd.chat.serve.guard import RefusedError

#: Routes that the page requests; all others answer with status 404.
GET_ROUTES = re.compile(
    r"/|/config/?|/theme\.css|/favicon\.ico|/(assets|static|svelte)/[\w ./-]{1,200}"
    r"|/gradio_api/(info/?|app_id/?|theme\.css|startup-events|queue/data|heartbeat/[\w-]{1,64})"
)
POST_ROUTES = re.compile(r"/gradio_api/(queue/join/?|cancel|reset/?)")
#: Events of the page are sent to this route.
JOIN_ROUTE = "/gradio_api/queue/join"
#: Routes whose responses end when the visitor leaves.
STREAM_ROUTES = re.compile(r"/gradio_api/(queue/data|heartbeat/.*)")
#: How many such responses a client may have, and the seconds after which one ends.
MAX_STREAMS, STREAM_TIMEOUT = 16, 3600.0
#: Identifies a visitor's page.
SESSION = re.compile(r"[\w-]{1,64}")
ROUTES = {"GET": GET_ROUTES, "HEAD": GET_ROUTES, "POST": POST_ROUTES}

#: Elements that refer to another host, or to the manifest of an installable app.
EXTERNAL_ELEMENTS = re.compile(
    rb"<(?:script|link|meta)\b[^>]*(?:\bhttps?://|\"manifest\")[^>]*>(?:\s*</script>)?",
    re.IGNORECASE,
)

#: Gradio needs inline scripts and styles, and compiles functions from strings.
CONTENT_SECURITY_POLICY = (
    b"default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval';"
    b" style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:;"
    b" connect-src 'self'; object-src 'none'; base-uri 'self'; form-action 'self';"
    b" frame-ancestors 'none'"
)


class PageApp:
    """Gradio's application, restricted to the requests of the page.

    ``events`` holds the number of inputs of each event by its index; Gradio answers other events
    with an internal error. ``close`` ends the connections that Gradio keeps open for each page, at
    most :data:`MAX_STREAMS` for each client and half of all connections. Requests that are refused
    raise RefusedError.
    """

    def __init__(
        self, app: FastAPI, events: Mapping[int, int], close: Callable[[], None] = lambda: None
    ) -> None:
        self.app, self.events, self.close = app, events, close
        self._streams: Counter[str] = Counter()

    def lifespan(self, _: Any) -> AbstractAsyncContextManager[Any]:
        """Return a context in which Gradio can handle requests."""
        return self.app.router.lifespan_context(self.app)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle a connection; see the ASGI specification for the arguments."""
        if scope["type"] == "http":
            path, pattern = scope["path"], ROUTES.get(scope["method"])
            if pattern is None or pattern.fullmatch(path) is None:
                raise RefusedError(404, "Not Found")
            if scope["method"] == "POST":
                body = await Request(scope, receive).body()
                self._check_body(path, body)
                receive = replay_body(body, receive)
            if path == "/":
                # The HTML is edited, so it must not be compressed.
                headers = [item for item in scope["headers"] if item[0] != b"accept-encoding"]
                scope, send = {**scope, "headers": headers}, _HtmlFilter(send)
            if STREAM_ROUTES.fullmatch(path):
                await self._stream(scope, receive, send)
                return
        await self.app(scope, receive, send)

    async def _stream(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle a request whose response may last as long as the visitor stays."""
        client = scope["state"]["client"]
        full = self._streams.total() >= connection_limit() // 2
        if full or self._streams[client] >= MAX_STREAMS:
            raise RefusedError(429, "too many pages are open")
        self._streams[client] += 1
        try:
            await asyncio.wait_for(self.app(scope, receive, send), STREAM_TIMEOUT)
        except asyncio.TimeoutError:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._streams[client] -= 1
            self._streams += Counter()  # forgets clients without any

    def _check_body(self, path: str, body: bytes) -> None:
        try:
            values = read_json(body)
        except RequestError as error:
            raise RefusedError(400, str(error)) from error
        session = values.get("session_hash")
        if not isinstance(session, str) or not SESSION.fullmatch(session):
            raise RefusedError(400, "session_hash is invalid")
        if path.rstrip("/") != JOIN_ROUTE:
            return
        index, data = values.get("fn_index"), values.get("data")
        if type(index) is not int or index not in self.events:
            raise RefusedError(400, "fn_index is not an event of this page")
        if not isinstance(data, list) or len(data) != self.events[index]:
            raise RefusedError(400, f"data must be a list of {self.events[index]} values")
        if any(isinstance(item, (list, dict)) for item in data):
            raise RefusedError(400, "data must not contain lists or objects")


class _HtmlFilter:
    """An ASGI ``send`` that removes external elements and adds security headers."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.start: Message = {}
        self.body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.start = message
            return
        self.body += message.get("body", b"")
        if message.get("more_body"):
            return
        body = EXTERNAL_ELEMENTS.sub(b"", self.body)
        headers = [item for item in self.start["headers"] if item[0] != b"content-length"]
        headers += [
            (b"content-length", str(len(body)).encode()),
            (b"content-security-policy", CONTENT_SECURITY_POLICY),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
        ]
        await self.send({**self.start, "headers": headers})
        await self.send({"type": "http.response.body", "body": body, "more_body": False})
