"""What FastChat's API server answers, completed: figures, log-probabilities, status of errors."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from eagle_fsd.chat.serve.api.requests import ApiError, Extras

log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

DONE = b"data: [DONE]"
#: HTTP's status for FastChat's error codes, which come with 400 or inside a stream otherwise.
STATUSES = {401: 401, 403: 400, 429: 429, 500: 500}
NO_MODEL, NO_WORKER = 40301, (50005, 50006)


class Reply:
    """A ``send`` that completes what FastChat's server answers.

    A stream begins with its first event of substance, so that a refusal still has its own status.
    """

    def __init__(self, send: Send, extras: Extras) -> None:
        self.send, self.extras = send, extras
        self.start: Message | None = None
        self.body = b""
        self.held: list[bytes] = []
        self.finished: set[int] = set()
        self.begun = self.ended = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.start = message
        elif message["type"] == "http.response.body" and not self.ended:
            self.body += message.get("body", b"")
            if self._streams():
                await self._events()
            elif not message.get("more_body"):
                await self._whole()

    def _streams(self) -> bool:
        kinds = dict(self.start["headers"]) if self.start else {}
        return kinds.get(b"content-type", b"").startswith(b"text/event-stream")

    async def _whole(self) -> None:
        status, self.ended = self.start["status"], True
        try:
            body = json.loads(self.body)
        except ValueError:
            error = ApiError("no worker answers", 503, "server_error")
            await send_json(self.send, error.status, error.body())
            return
        if status == 200 and body.get("object") != "error":
            await send_json(self.send, status, complete(body, self.extras))
        else:
            error = error_of(body, status)
            await send_json(self.send, error.status, error.body())

    async def _events(self) -> None:
        *events, self.body = self.body.split(b"\n\n")
        for event in events:
            await self._event(event)

    async def _event(self, event: bytes) -> None:
        if event.strip() == DONE:
            if self.extras.include_usage and self.held_id is not None:
                await self._tell(_event_of(self._usage_chunk()))
            await self._begin()
            await self._tell(DONE)
            self.ended = True
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        chunk = json.loads(event.removeprefix(b"data: "))
        if chunk.get("error_code"):
            error = error_of(chunk, 200)
            if not self.begun:
                self.ended = True
                await send_json(self.send, error.status, error.body())
            else:
                await self._tell(_event_of(error.body()))
            return
        self.held_id = {key: chunk[key] for key in ("id", "created", "model") if key in chunk}
        choice = chunk["choices"][0]
        said = choice.get("text") or (choice.get("delta") or {}).get("content")
        substance = bool(said or choice.get("finish_reason"))
        if substance:
            self._complete_choice(choice, bool(said))
        self.held.append(_event_of(chunk))
        if substance:
            await self._begin()

    held_id: dict[str, Any] | None = None

    def _complete_choice(self, choice: dict[str, Any], said: bool) -> None:
        """Which choice it is of, where FastChat counts anew for each prompt; log-probabilities."""
        outputs = len(self.extras.outputs)
        # What ends a choice and says nothing comes after all of them, in their order.
        index = outputs - 1 if said else min({*range(outputs)} - self.finished, default=0)
        if choice.get("finish_reason"):
            self.finished.add(index)
        choice["index"] = index
        choice.pop("logprobs", None)
        pending = self.extras.pending.pop(index, None)
        if self.extras.logprobs and pending:
            choice["logprobs"] = chat_logprobs(pending) if self.extras.chat else pending

    def _usage_chunk(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.extras.chat else "text_completion"
        return {**self.held_id, "object": kind, "choices": [], "usage": usage_of(self.extras)}

    async def _begin(self) -> None:
        if not self.begun:
            self.begun = True
            await self.send(self.start)
        held, self.held = self.held, []
        for event in held:
            await self._tell(event)

    async def _tell(self, event: bytes) -> None:
        await self._begin_if_needed()
        await self.send({"type": "http.response.body", "body": event + b"\n\n", "more_body": True})

    async def _begin_if_needed(self) -> None:
        if not self.begun:
            await self._begin()

    async def broken(self, error: Exception) -> None:
        """FastChat's server failed: one line for the client, the rest for the log."""
        log.warning("a request failed: %r", error)
        if self.ended:
            return
        failure = ApiError("no worker answers", 503, "server_error")
        if self.begun:
            await self._tell(_event_of(failure.body()))
        else:
            self.ended = True
            await send_json(self.send, failure.status, failure.body())

    async def finish(self) -> None:
        """End what was begun and not ended."""
        if self.begun and not self.ended:
            self.ended = True
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})


def complete(body: dict[str, Any], extras: Extras) -> dict[str, Any]:
    """A whole answer with FSD's figures in its usage, and a chat's log-probabilities."""
    if body.get("object") in ("chat.completion", "text_completion"):
        body["usage"] = usage_of(extras)
        for choice, output in zip(body["choices"], extras.outputs, strict=False):
            if extras.chat and extras.logprobs:
                choice["logprobs"] = chat_logprobs(output.get("logprobs") or {})
    return body


def usage_of(extras: Extras) -> dict[str, Any]:
    """OpenAI's counts, a prompt counted once, and FSD's: tau and the tokens by origin."""
    usages = [output.get("usage") or {} for output in extras.outputs]
    prompt = sum(usage.get("prompt_tokens", 0) for usage in usages[:: extras.choices])
    tokens = sum(usage.get("completion_tokens", 0) for usage in usages)
    figures = {"fuzzy_tokens": 0, "exact_tokens": 0, "target_tokens": 0, "steps": 0}
    for output in extras.outputs:
        for name in figures:
            figures[name] += (output.get("fsd") or {}).get(name, 0)
    steps = figures.pop("steps")
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        **figures,
        "tau": tokens / steps if steps else None,
    }


def chat_logprobs(found: dict[str, list[Any]]) -> dict[str, Any]:
    """Log-probabilities as OpenAI's chats have them, from those of its completions."""

    def entry(token: str, value: float) -> dict[str, Any]:
        return {"token": token, "logprob": value, "bytes": list(token.encode())}

    columns = (found.get(name, []) for name in ("tokens", "token_logprobs", "top_logprobs"))
    content = [
        {**entry(token, value), "top_logprobs": [entry(*item) for item in (top or {}).items()]}
        for token, value, top in zip(*columns, strict=True)
    ]
    return {"content": content, "refusal": None}


def error_of(body: dict[str, Any], status: int) -> ApiError:
    """FastChat's error as OpenAI words errors, with the status that it deserves."""
    detail = body.get("detail")
    if isinstance(detail, dict) and "error" in detail:  # a wrong key
        message = detail["error"].get("message") or "the API key is missing or wrong"
        return ApiError(message, status, code=detail["error"].get("code"))
    code = body.get("code") or body.get("error_code") or 0
    message = str(body.get("message") or body.get("text") or detail or "the request failed")
    if code == NO_MODEL:
        return ApiError(message, 404, code="model_not_found")
    if code in NO_WORKER:
        return ApiError(message, 503, "server_error", code)
    status = STATUSES.get(code // 100, 400)
    kinds = {429: "rate_limit_error", 500: "server_error"}
    return ApiError(message, status, kinds.get(status, "invalid_request_error"), code or None)


async def send_json(send: Send, status: int, body: dict[str, Any]) -> None:
    """A whole JSON answer."""
    data = json.dumps(body, ensure_ascii=False).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data, "more_body": False})


def _event_of(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode()
