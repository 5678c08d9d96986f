"""Errors in OpenAI's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from openai.types.shared import ErrorObject
from starlette.exceptions import HTTPException

from eagle_fsd.chat.request_body import RequestError, shorten


class ApiError(HTTPException):
    """An error response.

    Args:
        message: The error message, which is truncated.
        status: HTTP status.
        code: OpenAI's error code; default: none.
        param: The invalid parameter; default: none in particular.
    """

    def __init__(
        self, message: str, status: int = 400, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(status, shorten(message))
        self.code, self.param = code, param

    def body(self) -> dict[str, Any]:
        """Return the body of the response."""
        kind = "server_error" if self.status_code >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status_code == 429 else kind
        error = ErrorObject(message=self.detail, type=kind, param=self.param, code=self.code)
        return {"error": error.model_dump(exclude_unset=True)}


def worker_error(output: Mapping[str, Any]) -> ApiError:
    """Convert an error output of a worker.

    Args:
        output: The output, whose ``error_code`` is one of ``fastchat.constants.ErrorCode``.
    """
    code = output["error_code"]
    status = {400: 400, 403: 400, 429: 429}.get(code // 100, 500)
    too_long = code == RequestError.CONTEXT
    return ApiError(output["text"], status, "context_length_exceeded" if too_long else None)


def validation_error(error: RequestValidationError) -> ApiError:
    """Describe the first problem of an invalid request in one line.

    Args:
        error: FastAPI's error.
    """
    problem = error.errors()[0]
    param = ".".join(map(str, problem["loc"][1:]))  # the first item is "body"
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "extra_forbidden" or context.get("max_length") == 0:
        message = "is not supported"
    elif kind == "missing":
        message = "is missing"
    elif kind == "value_error":
        message = str(context["error"])
    else:
        message = f"must {problem['msg'].partition(' should ')[2]}; got {problem['input']!r}"
    return ApiError(f"{param or 'the request'} {message}", param=param or None)
