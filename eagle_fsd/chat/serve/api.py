"""The server: OpenAI's routes, health and metrics over a pair in this process.

The guard in front of the application checks keys, hosts, content types and the size of bodies
(:mod:`eagle_fsd.chat.serve.guard`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from eagle_fsd.chat.backend import LocalBackend
from eagle_fsd.chat.decode_queue import DecodeQueue, JobUpdate
from eagle_fsd.chat.request_body import RequestError, UnansweredError, read_json
from eagle_fsd.chat.serve.asgi import ClosingStream, parted_response, until_disconnected
from eagle_fsd.chat.serve.openai_format import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    ResponseBuilder,
    TokenizeRequest,
    acceptance_label,
    answer_error,
    check_logprobs,
    embedding_response,
    to_chat,
    validation_error,
)
from eagle_fsd.model.config import AcceptanceConfig

#: Status of a response that no client receives.
CLIENT_CLOSED_REQUEST = 499
#: How many choices of one request are decoded or wait at the same time, so that a request for many
#: choices does not fill the queue.
MAX_CONCURRENT_CHOICES = 4
#: Updates of all choices that wait to be sent; each choice's job holds those that come after.
MAX_UNREAD_UPDATES = 16


class JsonRequest(Request):
    """A request whose body is a bounded JSON object."""

    async def json(self) -> Any:
        """Parse the body; see :func:`eagle_fsd.chat.request_body.read_json`."""
        try:
            return read_json(await self.body())
        except RequestError as error:
            raise ApiError(str(error)) from None


class CancellableRoute(APIRoute):
    """A route that reads a :class:`JsonRequest` and is cancelled if its client disconnects."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See ``APIRoute``."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            request = JsonRequest(request.scope, request.receive)
            await request.body()  # from here on, only a disconnect can be received
            response = await until_disconnected(request.receive, handle(request))
            return Response(status_code=CLIENT_CLOSED_REQUEST) if response is None else response

        return handler


def api_app(backend: LocalBackend) -> FastAPI:
    """Return the application."""
    created, names = int(time.time()), backend.names
    app = FastAPI(
        title="eagle-fsd",
        version=version("eagle-fsd"),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.router.route_class = CancellableRoute

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        backend.queue.metrics.requests.labels("refused").inc()
        return _error_response(validation_error(error))

    @app.exception_handler(HTTPException)
    async def rejected(request: Request, error: HTTPException) -> Response:
        if isinstance(error, ApiError):
            if request.method == "POST":
                backend.queue.metrics.requests.labels("refused").inc()
            return _error_response(error)
        message = f"{request.method} {request.url.path}: {error.detail}"  # from the router
        body = ApiError(message, error.status_code).body()
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(UnansweredError)
    async def unanswered(request: Request, error: UnansweredError) -> Response:
        # The backend has counted it.
        names = getattr(request.state, "parameter_names", {})
        return _error_response(answer_error(error, names))

    @app.exception_handler(Exception)
    async def failed(_: Request, __: Exception) -> Response:  # the guard logs the exception
        return _error_response(ApiError("the request failed", 500))

    def check_model(name: str) -> None:
        if name not in names:
            message = f"model must be one of {', '.join(names)}; got {name}"
            raise ApiError(message, 404, "model_not_found", "model")

    def card(name: str) -> dict[str, Any]:
        certificate = backend.model.certificate_for(backend.default_acceptance)
        return {
            "id": name,
            "created": created,
            "object": "model",
            "owned_by": "eagle-fsd",
            "acceptance": acceptance_label(backend.default_acceptance),
            "certificate": certificate and certificate.model_dump(),
            "max_model_len": backend.model.target.stable_length,
        }

    async def answer(body: ChatRequest | CompletionRequest, request: Request) -> Response:
        request.state.parameter_names = body.parameter_names
        check_model(body.model)
        acceptance = backend.acceptance(body.fsd, body.lossless)
        if body.method == "ar":
            acceptance = AcceptanceConfig()
        certificate = backend.model.certificate_for(acceptance)
        if certificate is not None and not body.decodes_as(certificate):
            certificate = None
        headers = {"X-Eagle-FSD-Acceptance": acceptance_label(acceptance, certificate)}
        params = body.answer_params()
        if not body.stream:
            context = backend.model.target.stable_length
            check_logprobs(params, backend.limits.max_new_tokens, context)
        builder = ResponseBuilder(body, len(params), backend.tokens)
        updates = answer_choices(backend, params, request.state.client, body.method)
        if body.stream:
            events = stream(updates, builder, body)
            # An error before the first event sets the HTTP status. The last header tells nginx not
            # to buffer the response.
            headers |= {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            first = await anext(events)
            return ClosingStream(events, "text/event-stream", headers, first)
        async with aclosing(updates):
            async for index, update in updates:
                builder.add(index, update)
        return parted_response(builder.response(), "application/json", headers)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in sorted(names)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        check_model(name)
        return card(name)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await answer(body, request)

    @app.post("/v1/completions")
    async def complete(body: CompletionRequest, request: Request) -> Response:
        return await answer(body, request)

    @app.post("/v1/embeddings")
    async def embed(body: EmbeddingRequest, request: Request) -> Response:
        check_model(body.model)
        vectors, tokens = await backend.embed(body.input, request.state.client)
        content = await embedding_response(body, vectors, tokens)
        return parted_response(content, "application/json")

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
        check_model(body.model or names[0])
        chat = to_chat(body.messages) if body.messages else None
        special, client = body.add_special_tokens, request.state.client
        tokens = await backend.tokenize(body.prompt, chat, special, client)
        length = backend.model.target.stable_length
        return {"count": len(tokens), "max_model_len": length, "tokens": tokens}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, str]:
        check_model(body.model or names[0])
        return {"prompt": await backend.detokenize(body.tokens, request.state.client)}

    @app.get("/version")
    async def package_version() -> dict[str, str]:
        return {"version": app.version}

    add_status_routes(app, backend.queue)
    return app


def add_status_routes(app: FastAPI, queue: DecodeQueue) -> None:
    """Add the routes ``/health``, ``/ready`` and ``/metrics``."""

    def status(good: bool, otherwise: str) -> Response:
        body = {"status": "ok" if good else otherwise, "queue": len(queue)}
        return JSONResponse(body, 200 if good else 503)

    @app.get("/health")
    async def health() -> Response:
        return status(queue.alive, "decoding has stopped")

    @app.get("/ready")
    async def ready() -> Response:
        return status(queue.ready, "no requests are accepted")

    @app.get("/metrics")
    async def prometheus() -> Response:
        page = queue.metrics.page(len(queue), queue.rows, queue.max_batch)
        return PlainTextResponse(page, media_type=CONTENT_TYPE_LATEST)


async def answer_choices(
    backend: LocalBackend, params: Sequence[dict[str, Any]], client: str, method: str = "fsd"
) -> AsyncGenerator[tuple[int, JobUpdate], None]:
    """Answer the choices of a request, at most :data:`MAX_CONCURRENT_CHOICES` at the same time.

    Yields the index of a choice and its next update as they arrive. If one fails, the others are
    cancelled and its error is raised.
    """
    arrived: asyncio.Queue[tuple[int, JobUpdate | Exception | None]]
    arrived = asyncio.Queue(MAX_UNREAD_UPDATES)
    slots = asyncio.Semaphore(MAX_CONCURRENT_CHOICES)

    async def collect(index: int) -> None:
        try:
            async with slots:  # whether the queue has room is asked for the first one only
                updates = backend.answer(params[index], client, method, admitted=index > 0)
                async with aclosing(updates):
                    async for _, update in updates:
                        await arrived.put((index, update))
                        await asyncio.sleep(0)  # formatting a whole prompt would block others
            await arrived.put((index, None))
        except Exception as error:  # raised by the loop below
            await arrived.put((index, error))

    tasks = [asyncio.create_task(collect(index)) for index in range(len(params))]
    unfinished = len(tasks)
    try:
        while unfinished:
            index, update = await arrived.get()
            if isinstance(update, Exception):
                raise update
            if update is None:
                unfinished -= 1
            else:
                yield index, update
    finally:
        for task in tasks:
            task.cancel()
        # A response that is cancelled cancels every wait, which must not reach the tasks while
        # they close their iterators.
        await asyncio.shield(asyncio.gather(*tasks, return_exceptions=True))


async def stream(
    updates: AsyncGenerator[tuple[int, JobUpdate], None],
    builder: ResponseBuilder,
    request: ChatRequest | CompletionRequest,
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a streamed response.

    An error before the first event is raised, a later one becomes the last event.
    """
    started = False
    try:
        async with aclosing(updates):
            async for index, update in updates:
                for chunk in builder.chunks(index, update):
                    yield _event(chunk)
                    started = True
    except UnansweredError as error:
        if not started:
            raise
        yield _event(answer_error(error, request.parameter_names).body())
        return
    if request.stream_options.include_usage:
        yield _event(builder.usage_chunk())
    yield b"data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def _error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status_code)


def api_error(message: str, status: int) -> dict[str, Any]:
    """Return the body of an error of the guard."""
    return ApiError(message, status, "invalid_api_key" if status == 401 else None).body()
