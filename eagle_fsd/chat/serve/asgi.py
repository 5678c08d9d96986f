"""Types and helpers for ASGI applications."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, MutableMapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import StreamingResponse

Result = TypeVar("Result")
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


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
