"""Parse request bodies within bounds on values and nesting; errors of requests."""

from __future__ import annotations

import json
import math
from typing import Any

#: Maximum depth of nested lists and objects.
MAX_NESTING = 32
#: Maximum number of characters in an error message, which may quote the request.
MAX_ERROR_LENGTH = 500


class UnansweredError(Exception):
    """Why a request is not answered; the message may be shown to the client.

    ``status`` is that of the API's response, ``code`` one of ``fastchat.constants.ErrorCode``, and
    ``param`` the invalid parameter of OpenAI's API, if known.
    """

    status, code = 500, 50001
    param: str | None = None


class RequestError(UnansweredError):
    """The request is invalid or asks for something unsupported.

    The message is truncated by :func:`shorten`.
    """

    INVALID, OUT_OF_RANGE, CONTEXT = 40001, 40302, 40303
    status = 400

    def __init__(self, message: str, code: int = OUT_OF_RANGE, param: str | None = None) -> None:
        super().__init__(shorten(message))
        self.code, self.param = code, param


def shorten(message: str) -> str:
    """Truncate an error message, which may quote a request of any size."""
    if len(message) <= MAX_ERROR_LENGTH:
        return message
    return f"{message[: MAX_ERROR_LENGTH - 4]} ..."


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
