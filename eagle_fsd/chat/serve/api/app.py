"""The routes of the API.

The guard in front of the application checks keys, hosts, content types and the size of bodies
(:mod:`eagle_fsd.chat.serve.guard`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from openai.types import CreateEmbeddingResponse, Embedding, Model
from openai.types.create_embedding_response import Usage
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from eagle_fsd.chat.request_body import RequestError, read_json
from eagle_fsd.chat.serve.api.errors import ApiError, validation_error
from eagle_fsd.chat.serve.api.responses import ResponseBuilder
from eagle_fsd.chat.serve.api.schemas import ChatRequest, CompletionRequest, EmbeddingRequest
from eagle_fsd.chat.serve.api.workers import Workers
from eagle_fsd.chat.serve.asgi import until_disconnected

#: Status of a response that no client receives.
CLIENT_CLOSED_REQUEST = 499


class JsonRequest(Request):
    """A request whose body is a bounded JSON object."""

    async def json(self) -> Any:
        """Parse the body; see :func:`eagle_fsd.chat.request_body.read_json`."""
        try:
            return read_json(await self.body())
        except RequestError as error:
            raise ApiError(str(error)) from error


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


class EventStream(StreamingResponse):
    """Server-sent events whose source is closed when the client disconnects.

    Args:
        first: The first event.
        others: The other events.
    """

    def __init__(self, first: bytes, others: AsyncGenerator[bytes, None]) -> None:
        # The second header tells nginx not to buffer the response.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._events(), headers=headers, media_type="text/event-stream")
        self.first, self.others = first, others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; see the ASGI specification for the arguments."""
        async with aclosing(self.others):
            await super().__call__(scope, receive, send)

    async def _events(self) -> AsyncIterator[bytes]:
        yield self.first
        async for event in self.others:
            yield event


def api_app(controller: str) -> FastAPI:
    """Return the application.

    Args:
        controller: URL of the controller.
    """
    workers, created = Workers(controller), int(time.time())
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
        return _error_response(validation_error(error))

    @app.exception_handler(HTTPException)
    async def rejected(request: Request, error: HTTPException) -> Response:
        if not isinstance(error, ApiError):  # from the router
            message = f"{request.method} {request.url.path}: {error.detail}"
            error = ApiError(message, error.status_code)
        return _error_response(error)

    @app.exception_handler(Exception)
    async def failed(_: Request, __: Exception) -> Response:  # the guard logs the exception
        return _error_response(ApiError("the request failed", 500))

    def card(name: str) -> dict[str, Any]:
        model = Model(id=name, created=created, object="model", owned_by="eagle-fsd")
        return model.model_dump(exclude_unset=True)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in await workers.models()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name not in await workers.models():
            raise ApiError(f"the model {name} does not exist", 404, "model_not_found", "model")
        return card(name)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await answer(workers, body, client_id(request))

    @app.post("/v1/completions")
    async def complete(body: CompletionRequest, request: Request) -> Response:
        return await answer(workers, body, client_id(request))

    @app.post("/v1/embeddings")
    async def embed(body: EmbeddingRequest) -> Response:
        vectors, tokens = await workers.embed(body.model, body.input, body.encoding_format)
        # Not validated: the type only allows lists of numbers, but clients request base64.
        data = [
            Embedding.construct(object="embedding", index=index, embedding=vector)
            for index, vector in enumerate(vectors)
        ]
        usage = Usage(prompt_tokens=tokens, total_tokens=tokens)
        return _json_response(
            CreateEmbeddingResponse.construct(
                object="list", data=data, model=body.model, usage=usage
            )
        )

    return app


def client_id(request: Request) -> str:
    """Return what identifies a client to the workers: a hash of its address and its key.

    Args:
        request: The client's request.
    """
    host = request.client.host if request.client else ""
    identity = f"{host} {request.headers.get('authorization', '')}"
    return hashlib.sha256(identity.encode()).hexdigest()


async def answer(
    workers: Workers, request: ChatRequest | CompletionRequest, client: str
) -> Response:
    """Answer a request for a chat or for completions.

    Args:
        workers: Where the choices are decoded.
        request: The request.
        client: Identifies the client.

    Raises:
        ApiError: The request failed before its response began.
    """
    requests = [{**params, "client": client} for params in request.worker_requests()]
    chat = isinstance(request, ChatRequest)
    logprobs = request.logprobs is not None and request.logprobs is not False
    builder = ResponseBuilder(chat, request.model, len(requests), request.n, logprobs)
    outputs = workers.answers(requests)
    if request.stream:
        events = stream(outputs, builder, request.stream_options.include_usage)
        return EventStream(await anext(events), events)  # an earlier error sets the HTTP status
    async with aclosing(outputs):
        async for index, output in outputs:
            list(builder.add(index, output))
    return _json_response(builder.response())


async def stream(
    outputs: AsyncGenerator[tuple[int, dict[str, Any]], None],
    builder: ResponseBuilder,
    include_usage: bool,
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a streamed response.

    Args:
        outputs: Outputs of workers, with the index of their choice.
        builder: Builds the chunks.
        include_usage: Whether the stream ends with the usage.

    Raises:
        ApiError: An error occurred before the first event; a later one becomes the last event.
    """
    started = False
    try:
        async with aclosing(outputs):
            async for index, output in outputs:
                for chunk in builder.add(index, output):
                    yield _event(_dump(chunk))
                    started = True
    except ApiError as error:
        if not started:
            raise
        yield _event(bytes(_error_response(error).body))
        return
    if include_usage:
        yield _event(_dump(builder.usage_chunk()))
    yield _event(b"[DONE]")


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _dump(response: BaseModel) -> bytes:
    return response.model_dump_json(exclude_unset=True, warnings=False).encode()


def _json_response(response: BaseModel) -> Response:
    return Response(_dump(response), media_type="application/json")


def _error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status_code, error.headers)
