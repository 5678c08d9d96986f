"""The web page over a running worker.

FastChat's protocol streams text, but the page needs every token with its origin and divergence. A
worker therefore has two routes beside FastChat's (:func:`add_page_routes`). :class:`RemoteBackend`
asks the controller for a worker's address and then that worker, as FastChat's own web server does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import Response

from eagle_fsd.chat.backend import About, BackendError, LocalBackend, Update
from eagle_fsd.chat.config import Limits
from eagle_fsd.chat.request_body import RequestError
from eagle_fsd.chat.serve.asgi import ClosingStream
from eagle_fsd.chat.serve.guard import CLUSTER_KEY_VARIABLE, cluster_headers
from eagle_fsd.model.config import AcceptanceConfig
from eagle_fsd.utils.text import one_line

ABOUT_ROUTE, STREAM_ROUTE = "/page_about", "/page_stream"
#: Seconds to connect, and to wait for a line; heartbeats come more often.
TIMEOUT = httpx.Timeout(10.0, read=30.0)
#: How many workers are tried for a request.
MAX_ATTEMPTS = 3


def add_page_routes(
    app: FastAPI,
    backend: LocalBackend,
    read_body: Callable[[Request], Awaitable[dict[str, Any]]],
) -> None:
    """Add the routes that :class:`RemoteBackend` requests to a worker's application.

    Args:
        app: The worker's application.
        backend: The worker's pair.
        read_body: Reads a request's JSON object, up to the worker's size limit.
    """
    about = backend.about

    @app.get(ABOUT_ROUTE)
    async def page_about() -> dict[str, Any]:
        return {
            "name": about.name,
            "acceptance": about.acceptance.model_dump(),
            "limits": about.limits.model_dump(),
        }

    @app.post(STREAM_ROUTE)
    async def page_stream(request: Request) -> Response:
        body = await read_body(request)
        params, method = body.get("params"), body.get("method", "fsd")
        if not isinstance(params, dict):
            raise RequestError("params must be an object", RequestError.INVALID)
        if method not in ("fsd", "ar"):
            raise RequestError(f"method must be one of fsd, ar; got {method!r}")

        async def lines() -> AsyncGenerator[bytes, None]:
            try:
                async with aclosing(backend.stream(params, method)) as updates:
                    async for update in updates:
                        yield json.dumps(update.as_dict()).encode() + b"\n"
            except BackendError as error:
                yield json.dumps({"error": str(error)}).encode() + b"\n"

        return ClosingStream(lines(), "application/x-ndjson")


class RemoteBackend:
    """A worker registered with a FastChat controller; see :meth:`connect`.

    Args:
        controller: URL of the controller.
        model: Name of the model at the controller.
        about: The worker's properties.
    """

    def __init__(self, controller: str, model: str, about: About) -> None:
        self.controller, self.model, self.about = controller, model, about

    @classmethod
    def connect(cls, controller: str, model: str | None = None) -> RemoteBackend:
        """Find a worker through a controller. Must not be called from within an event loop.

        Args:
            controller: URL of the controller.
            model: Name of the model at the controller; default: the first one.

        Raises:
            BackendError: No worker can be reached, or it does not support the page.
        """
        return asyncio.run(cls._connect(controller.rstrip("/"), model))

    @classmethod
    async def _connect(cls, controller: str, model: str | None) -> RemoteBackend:
        async with _client() as client:
            try:
                model = model or await _first_model(client, controller)
                worker = await _worker_address(client, controller, model)
                reply = await client.get(worker + ABOUT_ROUTE)
                reply.raise_for_status()
            except httpx.HTTPStatusError as error:
                message = f"the worker at {worker} does not support the web page"
                raise BackendError(message) from error
            except httpx.HTTPError as error:
                raise _unreachable(controller, error) from error
        values = reply.json()
        acceptance = AcceptanceConfig.from_dict(values["acceptance"])
        about = About(values["name"], acceptance, Limits.from_dict(values["limits"]))
        return cls(controller, model, about)

    async def stream(
        self, params: Mapping[str, Any], method: str = "fsd"
    ) -> AsyncGenerator[Update, None]:
        """See :meth:`eagle_fsd.chat.backend.Backend.stream`."""
        body = {"params": dict(params), "method": method}
        async with _client() as client:
            try:
                async with self._reply(client, body) as reply:
                    if not reply.is_success:
                        await reply.aread()
                        raise BackendError(_rejection(reply))
                    async for line in reply.aiter_lines():
                        values = json.loads(line)
                        if "error" in values:
                            raise BackendError(values["error"])
                        yield Update.from_dict(values)
            except httpx.HTTPError as error:
                raise _unreachable(self.controller, error) from error

    @asynccontextmanager
    async def _reply(
        self, client: httpx.AsyncClient, body: dict[str, Any]
    ) -> AsyncIterator[httpx.Response]:
        """Send a request to a worker, and to another one if that refuses the connection."""
        for attempt in range(MAX_ATTEMPTS):
            worker = await _worker_address(client, self.controller, self.model)
            request = client.build_request("POST", worker + STREAM_ROUTE, json=body)
            try:
                reply = await client.send(request, stream=True)
                break
            except (httpx.ConnectError, httpx.ConnectTimeout):
                if attempt == MAX_ATTEMPTS - 1:
                    raise
                # The controller forgets workers that do not answer.
                await client.post(f"{self.controller}/refresh_all_workers")
        try:
            yield reply
        finally:
            await reply.aclose()


async def _first_model(client: httpx.AsyncClient, controller: str) -> str:
    await client.post(f"{controller}/refresh_all_workers")
    names = await _ask_controller(client, controller, "list_models", "models")
    if not names:
        raise BackendError(f"no worker is registered at the controller {controller}")
    return str(min(names))


async def _worker_address(client: httpx.AsyncClient, controller: str, model: str) -> str:
    """Ask the controller which worker to use next."""
    address = await _ask_controller(
        client, controller, "get_worker_address", "address", model=model
    )
    if not address:
        message = f"no worker for {model} is registered at the controller {controller}"
        raise BackendError(message)
    return str(address)


async def _ask_controller(
    client: httpx.AsyncClient, controller: str, route: str, field: str, **body: str
) -> Any:
    reply = await client.post(f"{controller}/{route}", json=body)
    if reply.status_code == 401:
        raise BackendError(f"{controller} requires the cluster's key: set {CLUSTER_KEY_VARIABLE}")
    try:
        return reply.json()[field]
    except (ValueError, LookupError, TypeError) as error:
        raise BackendError(f"{controller} is not a FastChat controller") from error


def _unreachable(controller: str, error: Exception) -> BackendError:
    return BackendError(f"no worker can be reached through {controller}: {one_line(error)}")


def _rejection(reply: httpx.Response) -> str:
    """Return a worker's error message, or its HTTP status."""
    try:
        return str(reply.json()["text"])
    except (ValueError, KeyError, TypeError):
        return f"the worker returned HTTP status {reply.status_code}"


def _client() -> httpx.AsyncClient:
    return httpx.AsyncClient(headers=cluster_headers(), timeout=TIMEOUT, trust_env=False)
