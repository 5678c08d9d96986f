"""What stands before gradio's server: the page's own routes alone, bounded, and nothing outside.

gradio serves files by path, takes uploads and fetches from other machines; a page of text and
sliders needs none of it. Its page also names fonts and a script elsewhere, which are taken out.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from eagle_fsd.chat.serve.api.replies import Message, Receive, Send, send_json

#: Everything the page asks for; gradio's other routes are not there.
READ = re.compile(
    r"/|/config/?|/theme\.css|/favicon\.ico|/(assets|static|svelte)/.*"
    r"|/gradio_api/(info/?|app_id/?|theme\.css|startup-events|queue/data|heartbeat/[\w-]+)"
)
WRITE = re.compile(r"/gradio_api/(queue/join/?|cancel|reset/?)")

#: Elements of the page that name another machine, or a manifest, which only an installed page has.
OUTSIDE = re.compile(
    rb"<(?:script|link|meta)\b[^>]*(?:\bhttps?://|\"manifest\")[^>]*>(?:\s*</script>)?",
    re.IGNORECASE,
)

#: gradio's page has scripts and styles in it, and makes functions from text.
POLICY = (
    b"default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval';"
    b" style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:;"
    b" connect-src 'self'; object-src 'none'; base-uri 'self'; form-action 'self';"
    b" frame-ancestors 'none'"
)


class PageGuard:
    """ASGI middleware around gradio's application.

    Args:
        max_body: Bytes of a request at most.
        close: Ends the connections that the application keeps open.
    """

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        max_body: int,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.app, self.max_body, self.close = app, max_body, close

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http" or not self._known(scope):
            if scope["type"] == "http":
                await send_json(send, 404, {"detail": "Not Found"})
            return  # a web socket that nobody accepts is closed
        if scope["method"] == "POST":
            bounded = await self._bounded(receive)
            if bounded is None:
                message = f"the request is larger than {self.max_body} bytes"
                await send_json(send, 413, {"detail": message})
                return
            receive = bounded
        if scope["path"] == "/":
            # Uncompressed, or there is nothing to find in it.
            headers = [item for item in scope["headers"] if item[0] != b"accept-encoding"]
            scope, send = {**scope, "headers": headers}, _Cleaned(send)
        await self.app(scope, receive, send)

    @staticmethod
    def _known(scope: Message) -> bool:
        allowed = {"GET": READ, "HEAD": READ, "POST": WRITE}.get(scope["method"])
        return allowed is not None and allowed.fullmatch(scope["path"]) is not None

    async def _bounded(self, receive: Receive) -> Receive | None:
        """The request's body, read; None: it is too large."""
        data, more = b"", True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                break
            data += message.get("body", b"")
            if len(data) > self.max_body:
                return None
            more = message.get("more_body", False)
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": data, "more_body": False}

        return replay


class _Cleaned:
    """A ``send`` that takes other machines out of the page."""

    def __init__(self, send: Send) -> None:
        self.send, self.start, self.body = send, None, b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.start = message
            return
        self.body += message.get("body", b"")
        if message.get("more_body"):
            return
        body = OUTSIDE.sub(b"", self.body)
        headers = [item for item in self.start["headers"] if item[0] != b"content-length"]
        headers += [
            (b"content-length", str(len(body)).encode()),
            (b"content-security-policy", POLICY),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
        ]
        await self.send({**self.start, "headers": headers})
        await self.send({"type": "http.response.body", "body": body, "more_body": False})
