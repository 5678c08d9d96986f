"""FastChat's OpenAI-compatible API server behind a middleware.

The server is FastChat's installed module; its files are not changed. :func:`api_app` replaces some
of its functions: those that call workers, to preserve the workers' errors; the one that builds the
parameters of worker requests, to add the request's context; and the ``json`` method of two response
classes, which fails with pydantic 2. :class:`OpenAICompatMiddleware` translates requests and
responses.
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
from typing import Any

from eagle_fsd.chat.request_body import BodyTimeoutError, BodyTooLargeError, read_body
from eagle_fsd.chat.serve.api.replies import ResponseWriter
from eagle_fsd.chat.serve.api.requests import ApiError, RequestContext, translate_body
from eagle_fsd.chat.serve.api.upstream import (
    REQUEST_CONTEXT,
    fetch_remote,
    generate,
    generate_stream,
    make_check_length,
    make_check_model,
    make_get_embedding,
    make_get_worker_address,
)
from eagle_fsd.chat.serve.asgi import (
    App,
    ClientDisconnectedError,
    Message,
    Receive,
    Send,
    body_chunks,
    replay_body,
    send_json,
)

#: The routes that are served. FastChat's other routes are closed: some require no API key, and none
#: limits its requests.
POST_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
GET_ROUTES = ("/v1/models", "/openapi.json")
#: Seconds that a stream gets to end by itself after its client has disconnected.
DISCONNECT_TIMEOUT = 0.5


def import_fastchat(name: str) -> Any:
    """Import a FastChat server module without letting it redirect stdout or create log files.

    Args:
        name: The module's name in ``fastchat.serve``.
    """
    # FastChat reads LOGDIR once, when it is first imported. If unset, FastChat would write logs to
    # the working directory.
    utils: Any = importlib.import_module("fastchat.utils")
    utils.LOGDIR = os.environ.get("LOGDIR", "")
    # FastChat's model list has a field that is declared as a string but holds a boolean.
    warnings.filterwarnings("ignore", "Pydantic serializer warnings", UserWarning)
    streams = sys.stdout, sys.stderr
    try:
        module = importlib.import_module(f"fastchat.serve.{name}")
    finally:
        sys.stdout, sys.stderr = streams
    if getattr(module, "logger", None) is not None:
        module.logger.setLevel(logging.WARNING)
    return module


def api_app(
    controller: str, api_keys: list[str] | None = None, max_body: int = 1 << 20
) -> OpenAICompatMiddleware:
    """Return the ASGI application.

    Args:
        controller: URL of the controller.
        api_keys: Keys, one of which every request must send; None: no key is required.
        max_body: Maximum size of a request in bytes.
    """
    server = import_fastchat("openai_api_server")
    server.app_settings.controller_address = controller
    server.app_settings.api_keys = api_keys
    for kind in (server.ChatCompletionStreamResponse, server.CompletionStreamResponse):
        kind.json = _dump_json
    if not getattr(server.get_gen_params, "adds_context", False):
        server.get_gen_params = _add_context(server.get_gen_params)
        server.generate_completion = generate
        server.generate_completion_stream = generate_stream
        server.check_length = make_check_length(server)
        server.check_model = make_check_model(server)
        server.get_embedding = make_get_embedding(server)
        server.get_worker_address = make_get_worker_address(server)
        server.fetch_remote = fetch_remote
    return OpenAICompatMiddleware(server.app, max_body)


def _dump_json(self: Any, **options: Any) -> str:
    """Replace pydantic's ``json``, to which FastChat passes an option of pydantic 1."""
    options.pop("ensure_ascii", None)
    text: str = self.model_dump_json(**options)
    return text


def _add_context(get_gen_params: Callable[..., Awaitable[dict[str, Any]]]) -> Callable[..., Any]:
    """Wrap FastChat's function so that it adds the parameters of the request's context."""

    async def wrapper(*args: Any, **kwargs: Any) -> dict[str, Any]:
        params = await get_gen_params(*args, **kwargs)
        context = REQUEST_CONTEXT.get()
        return {**params, **context.worker_params} if context else params

    wrapper.adds_context = True  # type: ignore[attr-defined]
    return wrapper


class OpenAICompatMiddleware:
    """ASGI middleware that translates and limits requests, and completes responses.

    Args:
        app: FastChat's application.
        max_body: Maximum size of a request in bytes.
    """

    def __init__(self, app: App, max_body: int) -> None:
        self.app, self.max_body = app, max_body

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        if scope["type"] != "http":
            return
        method, path = scope["method"], scope["path"]
        try:
            if path not in (*POST_ROUTES, *GET_ROUTES):
                raise ApiError(f"{path} not found", 404)
            if method != ("GET" if path in GET_ROUTES else "POST"):
                raise ApiError(f"method {method} is not allowed for {path}", 405)
            if method == "GET":
                await self._get(scope, receive, send)
            else:
                await self._post(scope, receive, send)
        except ApiError as error:
            await send_json(send, error.status, error.body())

    async def _get(self, scope: Message, receive: Receive, send: Send) -> None:
        writer = ResponseWriter(send, RequestContext())
        try:
            await self.app(scope, receive, writer)
        except Exception as error:
            await writer.fail(error)

    async def _post(self, scope: Message, receive: Receive, send: Send) -> None:
        body, context = await self._translate(scope, receive)
        writer = ResponseWriter(send, context)
        REQUEST_CONTEXT.set(context)
        headers = [item for item in scope["headers"] if item[0] != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        scope = {**scope, "headers": headers}
        left = asyncio.Event()

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            left.set()

        async def wait_for_disconnect() -> Message:
            await left.wait()
            return {"type": "http.disconnect"}

        work = asyncio.ensure_future(
            self.app(scope, replay_body(body, wait_for_disconnect), writer)
        )
        # FastChat does not notice a disconnect while it generates a response that is not streamed.
        watcher = asyncio.ensure_future(watch())
        try:
            await asyncio.wait({work, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and context.stream:
                await asyncio.wait({work}, timeout=DISCONNECT_TIMEOUT)
        finally:
            work.cancel()  # no effect if it is done
            watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            try:
                await work
            except Exception as error:
                await writer.fail(error)
        await writer.finish()

    async def _translate(self, scope: Message, receive: Receive) -> tuple[bytes, RequestContext]:
        """Read a request; return the body for FastChat's server and the request's context."""
        headers = dict(scope["headers"])
        # Web pages can make a browser send other content types to any server without its consent.
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != b"application/json":
            raise ApiError("the Content-Type must be application/json", 415)
        content_length = headers.get(b"content-length", b"").decode("latin-1")
        try:
            data = await read_body(body_chunks(receive), content_length, self.max_body)
        except BodyTooLargeError as error:
            raise ApiError(str(error), 413) from error
        except BodyTimeoutError as error:
            raise ApiError(str(error), 408) from error
        except ClientDisconnectedError:
            raise ApiError("the client disconnected", 499) from None
        body, context = translate_body(scope["path"], data)
        if len(body) > self.max_body:  # the worker receives the body as escaped ASCII
            raise ApiError(f"the request body exceeds {self.max_body} bytes", 413)
        return body, context
