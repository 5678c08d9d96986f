"""Helpers for ASGI applications: responses in parts, and disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")
#: Bytes of a response that are written at once.
PART_BYTES = 1 << 16


class ClosingStream(StreamingResponse):
    """A streamed response whose source is closed when the client disconnects.

    Otherwise a source that waits for its output to be sent would be closed by the garbage
    collector, and keep working until then. ``first`` is sent before what the source yields.
    """

    def __init__(
        self,
        source: AsyncGenerator[bytes, None],
        media_type: str,
        headers: Mapping[str, str] | None = None,
        first: bytes = b"",
    ) -> None:
        super().__init__(self._parts(), headers=headers, media_type=media_type)
        self.source, self.first = source, first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the body; see the ASGI specification for the arguments."""
        async with aclosing(self.source):
            await super().__call__(scope, receive, send)

    async def _parts(self) -> AsyncIterator[bytes]:
        yield self.first
        async for part in self.source:
            yield part


def parted_response(
    body: bytes, media_type: str, headers: Mapping[str, str] | None = None
) -> StreamingResponse:
    """Return a response that is written in parts, so that others can be sent in between."""

    async def parts() -> AsyncIterator[bytes]:
        for begin in range(0, len(body), PART_BYTES):
            yield body[begin : begin + PART_BYTES]
            await asyncio.sleep(0)

    length = {"content-length": str(len(body))}
    return StreamingResponse(parts(), headers={**(headers or {}), **length}, media_type=media_type)


async def until_disconnected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result | None:
    """Await work, but cancel it and return None if the client disconnects.

    The body of the request must have been read.
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
