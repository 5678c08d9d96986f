"""Types and helpers for ASGI applications."""

from __future__ import annotations

import asyncio
import json
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    MutableMapping,
    Sequence,
)
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import StreamingResponse

Result = TypeVar("Result")
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class ClientDisconnectedError(Exception):
    """The client closed the connection before its request was complete."""


class ClosingStream(StreamingResponse):
    """A streamed response whose source is closed when the client disconnects.

    Otherwise a source that waits for its output to be sent would be closed by the garbage
    collector, and go on working until then.

    Args:
        source: The parts of the body.
        media_type: Content type.
    """

    def __init__(self, source: AsyncGenerator[bytes, None], media_type: str) -> None:
        super().__init__(source, media_type=media_type)
        self.source = source

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Send the body; see the ASGI specification for the arguments."""
        async with aclosing(self.source):
            await super().__call__(scope, receive, send)


async def send_json(
    send: Send,
    status: int,
    body: dict[str, Any],
    extra_headers: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    """Send a complete JSON response.

    Args:
        send: The ASGI ``send`` of the request.
        status: HTTP status.
        body: The response.
        extra_headers: Headers beside the content's type and length.
    """
    data = json.dumps(body, ensure_ascii=False).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
    headers += extra_headers
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data, "more_body": False})


async def body_chunks(receive: Receive) -> AsyncIterator[bytes]:
    """Iterate over a request body as it arrives.

    Args:
        receive: The ASGI ``receive`` of the request.

    Raises:
        ClientDisconnectedError: The client disconnected before the end of the body.
    """
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        yield message.get("body", b"")
        more = message.get("more_body", False)


def replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that delivers a body that has already been read.

    Args:
        body: The body.
        receive: Called after the body has been delivered.
    """
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay


async def until_disconnected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result | None:
    """Await work, but cancel it if the client disconnects.

    Args:
        receive: The ASGI ``receive`` of the request, whose body has been read.
        work: The work.

    Returns:
        The result, or None if the client disconnected.
    """

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
