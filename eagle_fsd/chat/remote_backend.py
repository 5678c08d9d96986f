"""The web page over a running worker: what the page needs of it, there and back.

FastChat's stream carries text; the page wants every token with its origin and divergence. So a
worker has two routes beside FastChat's (:func:`add_page_routes`), and :class:`RemoteBackend` asks
the controller for a worker and then that worker, as FastChat's own web server does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from eagle_fsd.chat.backend import (
    About,
    Backend,
    BackendError,
    LocalBackend,
    Update,
)
from eagle_fsd.chat.config import Limits
from eagle_fsd.chat.requests import RequestError
from eagle_fsd.model.config import FSDSettings

ABOUT, STREAM = "/page_about", "/page_stream"
#: Seconds to connect, and to wait for a line: the worker sends signs of life.
TIMEOUT = httpx.Timeout(10.0, read=30.0)


def add_page_routes(
    app: FastAPI,
    backend: LocalBackend,
    read_body: Callable[[Request], Awaitable[dict[str, Any]]],
) -> None:
    """Give a worker's application what :class:`RemoteBackend` asks for.

    Args:
        read_body: The worker's own way to read a request's JSON object, bounded.
    """
    about = backend.about

    @app.get(ABOUT)
    async def page_about() -> dict[str, Any]:
        settings = about.settings.as_dict()
        return {"name": about.name, "settings": settings, "limits": about.limits.as_dict()}

    @app.post(STREAM)
    async def page_stream(request: Request) -> Response:
        body = await read_body(request)
        params = body.get("params")
        if not isinstance(params, dict):
            raise RequestError("the request is not the page's", RequestError.INVALID)

        async def lines() -> AsyncIterator[bytes]:
            try:
                async for update in backend.stream(params, body.get("plain") is True):
                    yield json.dumps(update.as_dict()).encode() + b"\n"
            except BackendError as error:
                yield json.dumps({"error": str(error)}).encode() + b"\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")


class RemoteBackend(Backend):
    """A worker that the controller knows.

    Args:
        controller: Its address. model: What the model is called there; default: the first.

    Raises:
        BackendError: The controller or a worker does not answer, or knows nothing of the page.
    """

    def __init__(self, controller: str, model: str | None = None) -> None:
        self.controller, self.model = controller.rstrip("/"), model
        self.about = asyncio.run(self._ask())

    async def _ask(self) -> About:
        async with _client() as client:
            try:
                worker = await self._worker(client)
                reply = await client.get(worker + ABOUT)
                reply.raise_for_status()
                about = reply.json()
                return About(
                    about["name"],
                    FSDSettings.from_dict(about["settings"]),
                    Limits.from_dict(about["limits"]),
                )
            except httpx.HTTPStatusError as error:
                raise BackendError(f"the worker {worker} has nothing for the web page") from error
            except httpx.HTTPError as error:
                raise BackendError(self._unreachable(error)) from error

    async def _worker(self, client: httpx.AsyncClient) -> str:
        """Address of the worker whose turn it is."""
        if self.model is None:
            await client.post(f"{self.controller}/refresh_all_workers")
            names = await self._told(client, "list_models", "models")
            if not names:
                raise BackendError(f"the controller {self.controller} knows no worker")
            self.model = sorted(names)[0]
        address = await self._told(client, "get_worker_address", "address", model=self.model)
        if not address:
            raise BackendError(f"the controller {self.controller} knows no worker of {self.model}")
        return address

    async def _told(self, client: httpx.AsyncClient, route: str, name: str, **body: str) -> Any:
        """What the controller says under ``name``."""
        reply = await client.post(f"{self.controller}/{route}", json=body)
        try:
            return reply.json()[name]
        except (ValueError, LookupError, TypeError) as error:
            raise BackendError(f"{self.controller} is no controller") from error

    def _unreachable(self, error: Exception) -> str:
        return f"no worker answers through {self.controller}: {error or type(error).__name__}"

    async def stream(self, params: Mapping[str, Any], plain: bool = False) -> AsyncIterator[Update]:
        """See :meth:`Backend.stream`."""
        body = {"params": dict(params), "plain": plain}
        async with _client() as client:
            try:
                worker = await self._worker(client)
                async with client.stream("POST", worker + STREAM, json=body) as reply:
                    if not reply.is_success:
                        await reply.aread()
                        raise BackendError(_refusal(reply))
                    async for line in reply.aiter_lines():
                        found = json.loads(line)
                        if "error" in found:
                            raise BackendError(found["error"])
                        yield Update.from_dict(found)
            except httpx.HTTPError as error:
                raise BackendError(self._unreachable(error)) from error


def _refusal(reply: httpx.Response) -> str:
    """Why a worker refuses a request, in its own words where there are any."""
    try:
        return str(reply.json()["text"])
    except (ValueError, KeyError, TypeError):
        return f"the worker answers with status {reply.status_code}"


def _client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=TIMEOUT, trust_env=False)
