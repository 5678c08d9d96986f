"""ASGI middleware that restricts Gradio's server to what the page needs.

Gradio serves files by path, accepts uploads and fetches from other hosts; a page of text and
sliders needs none of that. Gradio's HTML also refers to fonts and a script on other hosts, which
are removed.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from eagle_fsd.chat.serve.asgi import (
    App,
    ClientDisconnectedError,
    Message,
    Receive,
    Send,
    body_chunks,
    replay_body,
    send_json,
)

#: Routes that the page requests; all others answer with status 404.
GET_ROUTES = re.compile(
    r"/|/config/?|/theme\.css|/favicon\.ico|/(assets|static|svelte)/.*"
    r"|/gradio_api/(info/?|app_id/?|theme\.css|startup-events|queue/data|heartbeat/[\w-]+)"
)
POST_ROUTES = re.compile(r"/gradio_api/(queue/join/?|cancel|reset/?)")

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


class PageGuard:
    """ASGI middleware around Gradio's application.

    Args:
        app: Gradio's application.
        max_body: Maximum size of a request body in bytes.
        close: Ends the connections that the application keeps open.
    """

    def __init__(
        self,
        app: App,
        max_body: int,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.app, self.max_body, self.close = app, max_body, close

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle a connection; see the ASGI specification for the arguments."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # not accepting a WebSocket closes it
        if not _is_allowed(scope["method"], scope["path"]):
            await send_json(send, 404, {"detail": "Not Found"})
            return
        if scope["method"] == "POST":
            body = b""
            try:
                async for chunk in body_chunks(receive):
                    body += chunk
                    if len(body) > self.max_body:
                        message = f"the request is larger than {self.max_body} bytes"
                        await send_json(send, 413, {"detail": message})
                        return
            except ClientDisconnectedError:
                return
            receive = replay_body(body, receive)
        if scope["path"] == "/":
            # The HTML is edited, so it must not be compressed.
            headers = [item for item in scope["headers"] if item[0] != b"accept-encoding"]
            scope, send = {**scope, "headers": headers}, _HtmlFilter(send)
        await self.app(scope, receive, send)


def _is_allowed(method: str, path: str) -> bool:
    routes = {"GET": GET_ROUTES, "HEAD": GET_ROUTES, "POST": POST_ROUTES}.get(method)
    return routes is not None and routes.fullmatch(path) is not None


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
