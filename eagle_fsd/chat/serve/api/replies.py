"""Complete the FastChat API server's responses: statistics, log-probabilities, error codes."""

from __future__ import annotations

import json
import logging
from typing import Any

from eagle_fsd.chat.serve.api.requests import ApiError, RequestContext
from eagle_fsd.chat.serve.api.upstream import NO_WORKER, UNKNOWN_MODEL
from eagle_fsd.chat.serve.asgi import Message, Send, send_json

log = logging.getLogger(__name__)

#: The last event of a stream.
DONE = b"data: [DONE]"


class ResponseWriter:
    """An ASGI ``send`` that completes what FastChat's server sends.

    A streamed response starts with its first chunk of content, so that an earlier error can still
    set the HTTP status.

    Args:
        send: The ASGI ``send`` of the client's request.
        context: The request's context.
    """

    def __init__(self, send: Send, context: RequestContext) -> None:
        self.send, self.context = send, context
        self._start: Message = {}
        self._body = b""
        self._held: list[bytes] = []
        self._chunk_fields: dict[str, Any] | None = None
        self._finished_choices: set[int] = set()
        self._started = self._ended = False

    async def __call__(self, message: Message) -> None:
        """Process one ASGI message from the FastChat server."""
        if message["type"] == "http.response.start":
            self._start = message
        elif message["type"] == "http.response.body" and not self._ended:
            self._body += message.get("body", b"")
            if self._is_stream():
                *events, self._body = self._body.split(b"\n\n")
                for event in events:
                    await self._write_event(event)
            elif not message.get("more_body"):
                await self._write_response()

    async def fail(self, error: Exception) -> None:
        """Report to the client that FastChat's server raised an exception, and log it.

        Args:
            error: The exception.
        """
        log.warning("a request failed: %r", error)
        if self._ended:
            return
        failure = ApiError("no worker answers", 503, "server_error")
        if self._started:
            await self._write(_event(failure.body()))
        else:
            self._ended = True
            await send_json(self.send, failure.status, failure.body())

    async def finish(self) -> None:
        """End a stream that FastChat's server started but did not end."""
        if self._started and not self._ended:
            await self._end()

    def _is_stream(self) -> bool:
        headers = dict(self._start.get("headers", ()))
        return bool(headers.get(b"content-type", b"").startswith(b"text/event-stream"))

    async def _write_response(self) -> None:
        """Write a response that is not streamed."""
        status, self._ended = self._start["status"], True
        try:
            body = json.loads(self._body)
        except ValueError:
            error = ApiError("no worker answers", 503, "server_error")
            await send_json(self.send, error.status, error.body())
            return
        if status == 200 and body.get("object") != "error":
            await send_json(self.send, status, complete_response(body, self.context))
        else:
            error = translate_error(body, status)
            await send_json(self.send, error.status, error.body())

    async def _write_event(self, event: bytes) -> None:
        if event.strip() == DONE:
            if self.context.include_usage and self._chunk_fields is not None:
                await self._write(_event(self._usage_chunk()))
            await self._write(DONE)
            await self._end()
            return
        chunk = json.loads(event.removeprefix(b"data: "))
        if chunk.get("error_code"):
            error = translate_error(chunk, 200)
            if self._started:
                await self._write(_event(error.body()))
            else:
                self._ended = True
                await send_json(self.send, error.status, error.body())
            return
        self._chunk_fields = {key: chunk[key] for key in ("id", "created", "model") if key in chunk}
        choice = chunk["choices"][0]
        text = choice.get("text") or (choice.get("delta") or {}).get("content")
        if text or choice.get("finish_reason"):
            self._complete_choice(choice, bool(text))
            await self._write(_event(chunk))
        else:
            self._held.append(_event(chunk))

    def _complete_choice(self, choice: dict[str, Any], has_text: bool) -> None:
        """Add log-probabilities, and correct the index, which FastChat restarts for each prompt."""
        outputs = len(self.context.outputs)
        # Finish reasons without text follow all choices, in their order.
        unfinished = {*range(outputs)} - self._finished_choices
        index = outputs - 1 if has_text else min(unfinished, default=0)
        if choice.get("finish_reason"):
            self._finished_choices.add(index)
        choice["index"] = index
        choice.pop("logprobs", None)
        pending = self.context.pending_logprobs.pop(index, None)
        if self.context.logprobs and pending:
            choice["logprobs"] = chat_logprobs(pending) if self.context.chat else pending

    def _usage_chunk(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.context.chat else "text_completion"
        usage = combined_usage(self.context)
        return {**(self._chunk_fields or {}), "object": kind, "choices": [], "usage": usage}

    async def _write(self, event: bytes) -> None:
        """Write an event after those that were held back."""
        if not self._started:
            self._started = True
            await self.send(self._start)
        events, self._held = [*self._held, event], []
        for item in events:
            body = item + b"\n\n"
            await self.send({"type": "http.response.body", "body": body, "more_body": True})

    async def _end(self) -> None:
        self._ended = True
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})


def complete_response(body: dict[str, Any], context: RequestContext) -> dict[str, Any]:
    """Add decoding statistics to the usage of a response, and log-probabilities to a chat's.

    Args:
        body: FastChat's response, changed in place.
        context: The request's context.
    """
    if body.get("object") in ("chat.completion", "text_completion"):
        body["usage"] = combined_usage(context)
        for choice, output in zip(body["choices"], context.outputs, strict=False):
            if context.chat and context.logprobs:
                choice["logprobs"] = chat_logprobs(output.get("logprobs") or {})
    return body


def combined_usage(context: RequestContext) -> dict[str, Any]:
    """Return OpenAI's token counts, tau, and the tokens by origin over all choices.

    Args:
        context: The request's context. A prompt counts once for all of its choices.
    """
    usages = [output.get("usage") or {} for output in context.outputs]
    prompt = sum(usage.get("prompt_tokens", 0) for usage in usages[:: context.choices])
    tokens = sum(usage.get("completion_tokens", 0) for usage in usages)
    totals = {"fuzzy_tokens": 0, "exact_tokens": 0, "target_tokens": 0, "steps": 0}
    for output in context.outputs:
        for name in totals:
            totals[name] += (output.get("fsd") or {}).get(name, 0)
    steps = totals.pop("steps")
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        **totals,
        "tau": tokens / steps if steps else None,
    }


def chat_logprobs(columns: dict[str, list[Any]]) -> dict[str, Any]:
    """Convert log-probabilities from the format of OpenAI's completions to that of its chats.

    Args:
        columns: ``tokens``, ``token_logprobs`` and ``top_logprobs``; all may be missing.
    """

    def entry(token: str, value: float) -> dict[str, Any]:
        return {"token": token, "logprob": value, "bytes": list(token.encode())}

    names = ("tokens", "token_logprobs", "top_logprobs")
    rows = zip(*(columns.get(name, []) for name in names), strict=True)
    content = [
        {**entry(token, value), "top_logprobs": [entry(*item) for item in (top or {}).items()]}
        for token, value, top in rows
    ]
    return {"content": content, "refusal": None}


def translate_error(body: dict[str, Any], status: int) -> ApiError:
    """Convert a FastChat server error to OpenAI's format.

    Args:
        body: FastChat's response or chunk.
        status: Its HTTP status.
    """
    detail = body.get("detail")
    if isinstance(detail, dict) and "error" in detail:  # authentication
        message = detail["error"].get("message") or "the API key is missing or wrong"
        return ApiError(message, status, code=detail["error"].get("code"))
    code = body.get("code") or body.get("error_code") or 0
    message = str(body.get("message") or body.get("text") or detail or "the request failed")
    if code == UNKNOWN_MODEL:
        return ApiError(message, 404, code="model_not_found")
    if code in (NO_WORKER, NO_WORKER + 1):
        return ApiError(message, 503, "server_error", code)
    # FastChat's codes begin with an HTTP status, though its responses have status 400.
    if code // 100 == 401:
        return ApiError(message, 401, code=code)
    if code // 100 == 429:
        return ApiError(message, 429, "rate_limit_error", code)
    if code // 100 == 500:
        return ApiError(message, 500, "server_error", code)
    return ApiError(message, 400, code=code or None)


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode()
