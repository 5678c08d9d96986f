"""Translate requests of current OpenAI clients for FastChat's API server.

That server implements the API of 2023. Options that it cannot handle are converted or rejected
here. Options that it would drop (acceptance options, seeds, log-probabilities of chats, usage in
streams) are kept in a :class:`RequestContext`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle_fsd.chat.request_body import RequestError, read_json, shorten
from eagle_fsd.chat.wire_format import strip_markers

#: Maximum number of answers to one request.
MAX_CHOICES = 16
#: Maximum number of inputs in one request for embeddings, as in OpenAI's API.
MAX_EMBEDDING_INPUTS = 2048
#: Options that would change the answer and so must not be ignored.
UNSUPPORTED = (
    "tools",
    "functions",
    "tool_choice",
    "function_call",
    "suffix",
    "logit_bias",
    "use_beam_search",
)
#: Options passed on to FastChat's server. It would reject some of the others for their types.
FORWARDED = (
    "model",
    "messages",
    "prompt",
    "input",
    "encoding_format",
    "n",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "stream",
    "echo",
    "logprobs",
    "best_of",
)


class ApiError(Exception):
    """An error response in OpenAI's format.

    Args:
        message: The error message, which is truncated.
        status: HTTP status.
        kind: OpenAI's error type.
        code: OpenAI's error code, or FastChat's.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | int | None = None,
    ) -> None:
        super().__init__(shorten(message))
        self.status, self.kind, self.code = status, kind, code

    def body(self) -> dict[str, Any]:
        """Return the response in OpenAI's format."""
        error = {"message": str(self), "type": self.kind, "param": None, "code": self.code}
        return {"error": error}


@dataclass
class RequestContext:
    """State of a request that FastChat's API server does not carry.

    Attributes:
        worker_params: Parameters for the worker in addition to FastChat's.
        chat: Whether the request is a chat; else it is a plain completion.
        logprobs: Whether log-probabilities are requested.
        stream: Whether the response is streamed.
        include_usage: Whether the stream ends with the usage.
        choices: Number of choices for each prompt.
        outputs: The last worker output of each choice.
        pending_logprobs: For each choice, log-probabilities that no chunk of the stream contains
            yet.
        turn: Held while a choice of a response that is not streamed is generated.
        error: The worker's error output, if a choice failed.
    """

    worker_params: dict[str, Any] = field(default_factory=dict)
    chat: bool = True
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    choices: int = 1
    outputs: list[dict[str, Any]] = field(default_factory=list)
    pending_logprobs: dict[int, dict[str, list[Any]]] = field(default_factory=dict)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    error: dict[str, Any] | None = None


def translate_body(path: str, data: bytes) -> tuple[bytes, RequestContext]:
    """Translate a request body.

    Args:
        path: The request's path.
        data: The body from the client.

    Returns:
        The body for FastChat's server, and the request's context.

    Raises:
        ApiError: The request is invalid or asks for something unsupported.
    """
    try:
        body = read_json(data)
    except RequestError as error:
        raise ApiError(str(error)) from error
    if not isinstance(body.get("model"), str):
        raise ApiError("model must be a string")
    if path.endswith("/embeddings"):
        context = _embeddings(body)
    else:
        _check_options(body)
        context = _chat(body) if path.endswith("/chat/completions") else _completion(body)
        context.stream = body.get("stream") is True
        context.choices = body.get("n") or 1
        stream_options = body.get("stream_options")
        if stream_options is not None and not isinstance(stream_options, dict):
            raise ApiError("stream_options must be an object")
        context.include_usage = bool((stream_options or {}).get("include_usage"))
        for name in ("fsd", "seed"):
            if body.get(name) is not None:
                context.worker_params[name] = body[name]
    forwarded = {name: body[name] for name in FORWARDED if body.get(name) is not None}
    return json.dumps(forwarded).encode(), context


def _check_options(body: dict[str, Any]) -> None:
    """Check the options that chats and completions share; remove null limits and numbers."""
    for name in UNSUPPORTED:
        if body.get(name) not in (None, False, [], {}, "none", "auto", ""):
            raise ApiError(f"{name} is not supported")
    format_ = body.get("response_format")
    if format_ is not None and not (isinstance(format_, dict) and format_.get("type") == "text"):
        raise ApiError('response_format must be {"type": "text"}')
    if body.get("max_completion_tokens") is not None:
        body["max_tokens"] = body["max_completion_tokens"]
    bounds = {"n": (1, MAX_CHOICES), "max_tokens": (1, 2**31), "best_of": (1, 1)}
    for name, (low, high) in bounds.items():
        value = body.get(name)
        if value is None:
            body.pop(name, None)
        elif isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ApiError(f"{name} must be an integer in [{low}, {high}]; got {value!r}")
    for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty", "top_k"):
        value = body.get(name)
        if value is None:
            body.pop(name, None)
        elif isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) >= 1e6:
            raise ApiError(f"{name} must be a number in (-1e6, 1e6); got {value!r}")
    top_k = body.get("top_k")
    if isinstance(top_k, float) and not top_k.is_integer():
        raise ApiError(f"top_k must be an integer; got {top_k!r}")
    for name in ("stream", "echo"):
        if body.get(name) is not None and not isinstance(body[name], bool):
            raise ApiError(f"{name} must be true or false; got {body[name]!r}")
    stop = body.get("stop")
    if stop is not None:
        strings = [stop] if isinstance(stop, str) else stop
        if not isinstance(strings, list) or not all(isinstance(item, str) for item in strings):
            raise ApiError(f"stop must be a string or a list of strings; got {stop!r}")


def _chat(body: dict[str, Any]) -> RequestContext:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError("messages must be a list with at least one message")
    system, turns = [], []
    for message in messages:
        if not isinstance(message, Mapping):
            raise ApiError(f"messages must be objects; got {message!r}")
        role, text = message.get("role"), _text(message.get("content"))
        if role in ("system", "developer"):
            system.append(text)
        elif role in ("user", "assistant"):
            turns.append({"role": role, "content": text})
        else:
            raise ApiError(f"messages with the role {role!r} are not supported")
    if not turns:
        raise ApiError("messages must include a user message")
    # FastChat would keep only the last system message.
    head = [{"role": "system", "content": "\n\n".join(system)}] if system else []
    body["messages"] = head + turns
    logprobs, top = body.pop("logprobs", None), body.pop("top_logprobs", None)
    if logprobs not in (None, False, True):
        raise ApiError(f"logprobs must be true or false; got {logprobs!r}")
    if top is not None and (isinstance(top, bool) or not isinstance(top, int) or not logprobs):
        raise ApiError(f"top_logprobs must be an integer and requires logprobs; got {top!r}")
    worker_params = {"logprobs": top or 0} if logprobs else {}
    return RequestContext(worker_params, chat=True, logprobs=bool(logprobs))


def _completion(body: dict[str, Any]) -> RequestContext:
    prompts = _strings(body, "prompt")
    if len(prompts) * (body.get("n") or 1) > MAX_CHOICES:
        raise ApiError(f"prompt must be at most {MAX_CHOICES} strings, multiplied by n")
    body["prompt"] = [strip_markers(text) for text in prompts]
    logprobs = body.get("logprobs")
    if logprobs is not None and (isinstance(logprobs, bool) or not isinstance(logprobs, int)):
        raise ApiError(f"logprobs must be an integer; got {logprobs!r}")
    return RequestContext(chat=False, logprobs=logprobs is not None)


def _embeddings(body: dict[str, Any]) -> RequestContext:
    texts = _strings(body, "input")
    if len(texts) > MAX_EMBEDDING_INPUTS:
        raise ApiError(f"input must be at most {MAX_EMBEDDING_INPUTS} strings; got {len(texts)}")
    if body.get("encoding_format") not in (None, "float", "base64"):
        raise ApiError("encoding_format must be one of float, base64")
    if body.get("dimensions") is not None:
        raise ApiError("dimensions is not supported")
    body["input"] = texts
    return RequestContext()


def _strings(body: dict[str, Any], name: str) -> list[str]:
    """Return an option that is a string or a list of strings as a list."""
    value = body.get(name)
    strings: list[Any] = value if isinstance(value, list) else [value]
    if not strings or not all(isinstance(item, str) and item for item in strings):
        raise ApiError(
            f"{name} must be a non-empty string or a list of them; token ids are not supported"
        )
    return strings


def _text(content: Any) -> str:
    """Return the text of a message's content, which may be a list of parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return strip_markers(content)
    if not isinstance(content, list):
        raise ApiError("a message's content must be a string or a list of parts")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise ApiError("only message parts of type text are supported")
        if not isinstance(part.get("text"), str):
            raise ApiError("the text of a message part must be a string")
        texts.append(strip_markers(part["text"]))
    return "\n".join(texts)
