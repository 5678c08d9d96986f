"""Read request bodies within bounds on size, time and nesting."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterable
from typing import Any

#: Maximum depth of nested lists and objects.
MAX_NESTING = 32
#: Maximum number of seconds that a client may take to send a request body.
BODY_TIMEOUT = 30.0
#: Maximum number of characters in an error message, which may quote the request.
MAX_ERROR_LENGTH = 500


class RequestError(ValueError):
    """The request is invalid or asks for something unsupported.

    The message is truncated by :func:`shorten`; ``code`` is one of
    ``fastchat.constants.ErrorCode``, and ``param`` the invalid parameter of OpenAI's API, if known.
    """

    INVALID, OUT_OF_RANGE, CONTEXT = 40001, 40302, 40303

    def __init__(self, message: str, code: int = OUT_OF_RANGE, param: str | None = None) -> None:
        super().__init__(shorten(message))
        self.code, self.param = code, param


class RefusedError(Exception):
    """The request is refused with an HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def shorten(message: str) -> str:
    """Truncate an error message, which may quote a request of any size."""
    if len(message) <= MAX_ERROR_LENGTH:
        return message
    return f"{message[: MAX_ERROR_LENGTH - 4]} ..."


async def read_body(chunks: AsyncIterable[bytes], content_length: str, limit: int) -> bytes:
    """Collect a request body of at most ``limit`` bytes, within :data:`BODY_TIMEOUT` seconds.

    Nothing is read if the Content-Length header (or an empty string) exceeds the limit. Raises
    RefusedError.
    """
    too_large = RefusedError(413, f"the request body exceeds {limit} bytes")
    if content_length.isdecimal() and int(content_length) > limit:
        raise too_large

    async def collect() -> bytes:
        data = bytearray()
        async for chunk in chunks:
            data += chunk
            if len(data) > limit:
                raise too_large
        return bytes(data)

    try:
        return await asyncio.wait_for(collect(), BODY_TIMEOUT)
    except asyncio.TimeoutError:
        message = f"the request body was not complete after {BODY_TIMEOUT:g} s"
        raise RefusedError(408, message) from None


def read_json(data: bytes) -> dict[str, Any]:
    """Parse a JSON object with finite numbers, valid Unicode strings and bounded nesting.

    Raises RequestError.
    """
    try:
        value = json.loads(data, parse_constant=_finite, parse_float=_finite)
    except RecursionError as error:
        raise RequestError("the request is nested too deeply", RequestError.INVALID) from error
    except ValueError as error:
        raise RequestError("the request is not valid JSON", RequestError.INVALID) from error
    if not isinstance(value, dict):
        raise RequestError("the request is not a JSON object", RequestError.INVALID)
    level: list[Any] = [value]
    for _ in range(MAX_NESTING):
        level = [child for item in level for child in _children(item)]
    if level:
        raise RequestError("the request is nested too deeply", RequestError.INVALID)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # tokenizers and responses cannot represent it
        message = "the request contains a lone surrogate, which is not a character"
        raise RequestError(message, RequestError.INVALID) from error
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a valid JSON number")
    return value


def _children(value: Any) -> list[Any]:
    """List the lists and objects directly inside a list or an object."""
    items = value.values() if isinstance(value, dict) else value
    return [item for item in items if isinstance(item, (dict, list))]
