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
import logging
import os
import sys
import warnings
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

from eagle_fsd.chat.requests import BODY_SECONDS, announces_more
from eagle_fsd.chat.serve.api.replies import Message, Receive, Reply, Send, send_json
from eagle_fsd.chat.serve.api.requests import ApiError, Extras, translate_body
from eagle_fsd.chat.serve.api.upstream import (
    EXTRAS,
    check_length_of,
    check_model_of,
    generate,
    generate_stream,
    get_embedding_of,
)

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
#: Every other route of FastChat's server is shut: some ask for no key, and none has bounds.
READABLE = ("/v1/models", "/openapi.json")
#: Seconds that a stream gets to end by itself once its client is gone.
LEAVING_SECONDS = 0.5


def import_fastchat(name: str) -> ModuleType:
    """A server module of FastChat's, without its taking over the standard streams and the folder.

    On import they send standard output and error to a log file in the working directory.
    """
    # Read from the environment when it was first imported, which may have been long before.
    importlib.import_module("fastchat.utils").LOGDIR = os.environ.get("LOGDIR", "")
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
        server.generate_completion = generate
        server.generate_completion_stream = generate_stream
        server.check_length = check_length_of(server)
        server.check_model = check_model_of(server)
        server.get_embedding = get_embedding_of(server)
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
        if path in READABLE and method == "GET":
            reply = Reply(send, Extras())
            try:
                await self.app(scope, receive, reply)
            except Exception as error:
                await reply.broken(error)
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
        reply = Reply(send, extras)
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
