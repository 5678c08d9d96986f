"""FastChat's OpenAI-compatible API server, with what today's clients need carried around it.

The server is FastChat's module as installed. Around it stands one middleware
(:class:`AroundFastChat`); inside, some names of its module are given other functions when the
application is made (:func:`api_app`): those that call the worker, so that what a worker refuses
stays a refusal, the one that makes its parameters, so that a request's :class:`Extras` travel
along, and the ``json`` of two response classes, which pydantic 2 broke. Nothing of FastChat's files
is touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import os
import ssl
import sys
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from functools import cache
from types import ModuleType
from typing import Any

import httpx

from eagle_fsd.chat.api_requests import ApiError, Extras, translate_body
from eagle_fsd.chat.requests import BODY_SECONDS, announces_more

log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

#: The request that this task serves.
EXTRAS: ContextVar[Extras | None] = ContextVar("extras", default=None)
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
#: Every other route of FastChat's server is shut: some ask for no key, and none has bounds.
READABLE = ("/v1/models", "/openapi.json")
DONE = b"data: [DONE]"
#: Seconds that a stream gets to end by itself once its client is gone.
LEAVING_SECONDS = 0.5
#: HTTP's status for FastChat's error codes, which come with 400 or inside a stream otherwise.
STATUSES = {401: 401, 403: 400, 429: 429, 500: 500}
NO_MODEL, NO_WORKER = 40301, (50005, 50006)
#: One of them, with the words for it: also that a worker ended in the middle of an answer.
WORKER_GONE = {"text": "no worker answers", "error_code": NO_WORKER[0]}


def import_fastchat(name: str) -> ModuleType:
    """A server module of FastChat's, without its taking over the standard streams and the folder.

    On import they send standard output and error to a log file in the working directory.
    """
    os.environ.setdefault("LOGDIR", "")
    # Its list of models declares a text that is a truth value; pydantic 2 says so every time.
    warnings.filterwarnings("ignore", "Pydantic serializer warnings", UserWarning)
    streams = sys.stdout, sys.stderr
    try:
        module = importlib.import_module(f"fastchat.serve.{name}")
    finally:
        sys.stdout, sys.stderr = streams
    if getattr(module, "logger", None) is not None:
        module.logger.setLevel(logging.WARNING)
    return module


def api_app(controller: str, api_keys: list[str] | None = None, max_body: int = 1 << 20) -> Any:
    """The ASGI application.

    Args:
        controller: Its address.
        api_keys: One of these must come with every request; None: anybody may ask.
        max_body: Bytes of a request at most.
    """
    server = import_fastchat("openai_api_server")
    server.app_settings.controller_address = controller
    server.app_settings.api_keys = api_keys
    for kind in (server.ChatCompletionStreamResponse, server.CompletionStreamResponse):
        kind.json = _json_of_pydantic_2
    if not getattr(server.get_gen_params, "carries_extras", False):
        server.get_gen_params = _with_extras(server.get_gen_params)
        server.generate_completion = _generate
        server.generate_completion_stream = _generate_stream
        server.check_length = _check_length(server)
        server.get_embedding = _get_embedding(server)
    return AroundFastChat(server.app, max_body)


def _json_of_pydantic_2(self: Any, **options: Any) -> str:
    options.pop("ensure_ascii", None)  # never was pydantic 2's; it leaves characters as they are
    return self.model_dump_json(**options)


def _with_extras(make: Callable[..., Awaitable[dict[str, Any]]]) -> Callable[..., Any]:
    async def get_gen_params(*args: Any, **options: Any) -> dict[str, Any]:
        params = await make(*args, **options)
        extras = EXTRAS.get()
        return {**params, **extras.params} if extras else params

    get_gen_params.carries_extras = True  # type: ignore[attr-defined]
    return get_gen_params


@cache
def _tls() -> ssl.SSLContext:
    """Made once: it takes longer than a request."""
    return ssl.create_default_context()


def _client() -> httpx.AsyncClient:
    """For a worker, which is never behind the environment's proxy: nor is it for FastChat."""
    timeout = httpx.Timeout(10.0, read=None)
    return httpx.AsyncClient(timeout=timeout, trust_env=False, verify=_tls())


async def _ask(worker: str, route: str, body: dict[str, Any]) -> dict[str, Any]:
    """What a worker answers; whatever kept it from answering, as FastChat words errors."""
    try:
        async with _client() as client:
            reply = await client.post(f"{worker}/{route}", json=body)
    except httpx.HTTPError as error:
        log.warning("the worker %s does not answer: %r", worker, error)
        return {**WORKER_GONE}
    try:
        found = reply.json()
    except ValueError:
        found = None
    if isinstance(found, dict) and (reply.is_success or found.get("error_code")):
        return found
    return {"text": f"the worker answers with status {reply.status_code}", "error_code": 50001}


def _check_length(server: ModuleType) -> Callable[..., Awaitable[tuple[int | None, Any]]]:
    """How many tokens an answer may have, or the error; FastChat's own fails on a refusal."""

    async def check_length(
        request: Any, prompt: str, max_tokens: int | None, worker: str
    ) -> tuple[int | None, Any]:
        found: dict[str, Any] = {}
        for route, body in (("model_details", {}), ("count_token", {"prompt": prompt})):
            found |= await _ask(worker, route, {"model": request.model, **body})
            if found.get("error_code"):
                return None, server.create_error_response(found["error_code"], found["text"])
        room = found["context_length"] - found["count"]
        if room <= 0:
            message = f"the prompt's {found['count']} tokens leave no room for an answer"
            return None, server.create_error_response(server.ErrorCode.CONTEXT_OVERFLOW, message)
        return min(max_tokens or room, room), None

    return check_length


def _get_embedding(server: ModuleType) -> Callable[..., Awaitable[dict[str, Any]]]:
    async def get_embedding(body: dict[str, Any]) -> dict[str, Any]:
        worker = await server.get_worker_address(body["model"])
        return await _ask(worker, "worker_get_embeddings", body)

    return get_embedding


async def _generate_stream(params: dict[str, Any], worker: str) -> AsyncIterator[dict[str, Any]]:
    """The worker's outputs; the connection, and with it the decoding, ends with the caller."""
    extras = EXTRAS.get() or Extras()
    index = len(extras.outputs)
    extras.outputs.append({})
    seed = params.get("seed")
    if type(seed) is int and 0 <= seed < 2**63:  # or every choice would be the same
        params = {**params, "seed": (seed + index) % 2**63}
    try:
        async with (
            _client() as client,
            client.stream("POST", f"{worker}/worker_generate_stream", json=params) as reply,
        ):
            rest = b""
            async for data in reply.aiter_raw():
                *whole, rest = (rest + data).split(b"\0")
                for part in whole:
                    output = json.loads(part)
                    extras.outputs[index] = output
                    for name, values in (output.get("logprobs") or {}).items():
                        extras.pending.setdefault(name, []).extend(values)
                    yield output
            if rest:  # a refusal, which is one JSON object and no stream
                yield json.loads(rest)
    except httpx.HTTPError as error:
        log.warning("the worker %s does not answer: %r", worker, error)
        yield {**WORKER_GONE}


async def _generate(params: dict[str, Any], worker: str) -> dict[str, Any]:
    """The worker's last output, with the log-probabilities of all."""
    logprobs: dict[str, list[Any]] = {}
    output: dict[str, Any] = {"text": "the worker said nothing", "error_code": 50001}
    async for output in _generate_stream(params, worker):
        for name, values in (output.get("logprobs") or {}).items():
            logprobs.setdefault(name, []).extend(values)
    output["logprobs"] = logprobs or None
    return output


class AroundFastChat:
    """ASGI middleware: translates requests, bounds them, and completes what comes back."""

    def __init__(self, app: Callable[..., Awaitable[None]], max_body: int) -> None:
        self.app, self.max_body = app, max_body

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        if scope["type"] != "http":
            return
        method, path = scope["method"], scope["path"]
        if path in READABLE and method in ("GET", "HEAD"):
            await self.app(scope, receive, send)
            return
        try:
            if path not in (*PATHS, *READABLE):
                raise ApiError(f"there is no {path} here", 404)
            if path in READABLE or method != "POST":
                raise ApiError(f"{path} is not to be had by {method}", 405)
            data, extras = await self._translated(scope, receive)
        except ApiError as error:
            await send_json(send, error.status, error.body())
            return
        reply = _Reply(send, extras)
        EXTRAS.set(extras)
        headers = [item for item in scope["headers"] if item[0] != b"content-length"]
        headers.append((b"content-length", str(len(data)).encode()))
        scope = {**scope, "headers": headers}
        gone = asyncio.Event()
        work = asyncio.ensure_future(self.app(scope, _replay(data, receive, gone), reply))
        # FastChat's plain answers do not notice a client that leaves: this does, and ends them.
        leaving = asyncio.ensure_future(self._until_gone(receive, gone))
        try:
            await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and extras.stream:  # whose own way to end is to be told so
                await asyncio.wait({work}, timeout=LEAVING_SECONDS)
        finally:
            work.cancel()  # which does nothing to what is done
            leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            try:
                await work
            except Exception as error:
                await reply.broken(error)
        await reply.finish()

    async def _translated(self, scope: Message, receive: Receive) -> tuple[bytes, Extras]:
        """The body for FastChat's server, and what goes around it.

        A type other than JSON is refused: any web page may have a browser send one unasked.
        """
        headers = dict(scope["headers"])
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != b"application/json":
            raise ApiError("the request must be of the Content-Type application/json", 415)
        too_large = ApiError(f"the request is larger than {self.max_body} bytes", 413)
        if announces_more(headers.get(b"content-length", b"").decode("latin-1"), self.max_body):
            raise too_large
        try:
            data = await asyncio.wait_for(self._body(receive), BODY_SECONDS)
        except asyncio.TimeoutError:
            raise ApiError("the request did not come to its end", 408) from None
        data, extras = translate_body(scope["path"], data)
        if len(data) > self.max_body:  # spelled out in ASCII, as a worker gets it
            raise too_large
        return data, extras

    async def _body(self, receive: Receive) -> bytes:
        data = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ApiError("the client left", 499)
            data += message.get("body", b"")
            if len(data) > self.max_body:
                raise ApiError(f"the request is larger than {self.max_body} bytes", 413)
            if not message.get("more_body"):
                return bytes(data)

    @staticmethod
    async def _until_gone(receive: Receive, gone: asyncio.Event) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()


def _replay(data: bytes, receive: Receive, gone: asyncio.Event) -> Receive:
    """A ``receive`` that gives the translated body, and later the client's leaving."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": data, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    return replay


class _Reply:
    """A ``send`` that completes what FastChat's server answers.

    A stream begins with its first event of substance, so that a refusal still has its own status.
    """

    def __init__(self, send: Send, extras: Extras) -> None:
        self.send, self.extras = send, extras
        self.start: Message | None = None
        self.body = b""
        self.held: list[bytes] = []
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
        self._add_logprobs(chunk)
        self.held.append(_event_of(chunk))
        choice = chunk["choices"][0]
        said = choice.get("text") or (choice.get("delta") or {}).get("content")
        if said or choice.get("finish_reason"):
            await self._begin()

    held_id: dict[str, Any] | None = None

    def _add_logprobs(self, chunk: dict[str, Any]) -> None:
        choice = chunk["choices"][0]
        choice.pop("logprobs", None)
        said = choice.get("text") or (choice.get("delta") or {}).get("content")
        if self.extras.logprobs and said:
            pending, self.extras.pending = self.extras.pending, {}
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
    """OpenAI's counts over all choices, and FSD's: tau and the tokens by origin."""
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    figures = {"fuzzy_tokens": 0, "exact_tokens": 0, "target_tokens": 0, "steps": 0}
    for output in extras.outputs:
        for counts, found in ((usage, output.get("usage")), (figures, output.get("fsd"))):
            for name in counts:
                counts[name] += (found or {}).get(name, 0)
    tokens, steps = usage["completion_tokens"], figures.pop("steps")
    return {**usage, **figures, "tau": tokens / steps if steps else None}


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
