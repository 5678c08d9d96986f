"""Calls from the API server to the controller and the workers.

:func:`~eagle_fsd.chat.serve.api.app.api_app` replaces FastChat's own functions with these, which
preserve a worker's errors and record its outputs in the request's :class:`RequestContext`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from functools import cache
from types import ModuleType
from typing import Any

import httpx

from eagle_fsd.chat.serve.api.requests import RequestContext
from eagle_fsd.chat.serve.guard import cluster_headers

log = logging.getLogger(__name__)

#: Context of the request that the current task serves.
REQUEST_CONTEXT: ContextVar[RequestContext | None] = ContextVar("request_context", default=None)

#: FastChat's error codes for an unknown model, a missing worker and an internal error.
UNKNOWN_MODEL, NO_WORKER, INTERNAL_ERROR = 40301, 50005, 50001
#: Output of a worker that cannot be reached, or that exits during an answer.
WORKER_UNREACHABLE = {"text": "no worker answers", "error_code": NO_WORKER}

#: Seconds to wait for the controller, and for a worker's status.
STATUS_TIMEOUT = 6.0
#: How many workers are tried for a request.
MAX_ATTEMPTS = 3
#: A request may wait in the queue indefinitely, but a crashed machine must be detected: after 10 s
#: without traffic the connection is probed three times, 5 s apart, if the system supports it.
_KEEP_ALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
]


@cache
def _tls() -> ssl.SSLContext:
    """Return a shared TLS context, since creating one takes longer than a request."""
    return ssl.create_default_context()


def _client() -> httpx.AsyncClient:
    """Return a client that bypasses the environment's proxy, as FastChat does."""
    transport = httpx.AsyncHTTPTransport(verify=_tls(), socket_options=_KEEP_ALIVE)
    timeout = httpx.Timeout(10.0, read=None)
    return httpx.AsyncClient(
        headers=cluster_headers(), timeout=timeout, trust_env=False, transport=transport
    )


async def ask(
    worker: str, route: str, body: dict[str, Any], timeout: float | None = None
) -> dict[str, Any]:
    """Send a request to a worker or to the controller.

    Args:
        worker: The server's URL.
        route: The route, without a leading slash.
        body: The request.
        timeout: Maximum number of seconds without a response; default: no limit.

    Returns:
        The response. Any failure becomes an error in FastChat's format.
    """
    try:
        async with _client() as client:
            response = await asyncio.wait_for(client.post(f"{worker}/{route}", json=body), timeout)
    except (httpx.HTTPError, asyncio.TimeoutError) as error:
        log.warning("the worker %s does not answer: %r", worker, error)
        return {**WORKER_UNREACHABLE}
    try:
        found = response.json()
    except ValueError:
        found = None
    if isinstance(found, dict) and (response.is_success or found.get("error_code")):
        return found
    message = f"the worker responded with status {response.status_code}"
    return {"text": message, "error_code": INTERNAL_ERROR}


async def find_worker(controller: str, model: str) -> str:
    """Find a worker that accepts connections.

    The controller forgets workers that do not answer, so that each is only tried once.

    Args:
        controller: URL of the controller.
        model: The model's name.

    Returns:
        The worker's URL; an empty string if there is none.
    """
    for _ in range(MAX_ATTEMPTS):
        found = await ask(controller, "get_worker_address", {"model": model}, STATUS_TIMEOUT)
        worker = found.get("address")
        if not isinstance(worker, str) or not worker:
            break
        status = await ask(worker, "worker_get_status", {}, STATUS_TIMEOUT)
        if not status.get("error_code"):
            return worker
        await ask(controller, "refresh_all_workers", {}, STATUS_TIMEOUT)
    return ""


def make_get_worker_address(server: ModuleType) -> Callable[[str], Awaitable[str]]:
    """Return a replacement for FastChat's ``get_worker_address``, which may find a dead worker.

    Args:
        server: FastChat's API server module.
    """

    async def get_worker_address(model: str) -> str:
        worker = await find_worker(server.app_settings.controller_address, model)
        if not worker:
            raise ValueError(f"no worker for {model} answers")
        return worker

    return get_worker_address


async def fetch_remote(url: str, pload: Any = None, name: str | None = None) -> Any:
    """Replace FastChat's ``fetch_remote``, which cannot send the cluster's key.

    Args:
        url: URL of a controller's or a worker's route.
        pload: The request; default: none.
        name: The field of the response to return; None: all, as bytes; "": all, as JSON.

    Raises:
        httpx.HTTPError: The server cannot be reached, or it rejects the request.
    """
    async with _client() as client:
        response = await client.post(url, json=pload)
    response.raise_for_status()
    if name is None:
        return response.content
    return response.json()[name] if name else response.json()


def make_check_length(server: ModuleType) -> Callable[..., Awaitable[tuple[int | None, Any]]]:
    """Return a replacement for FastChat's ``check_length``, which cannot handle worker errors.

    Args:
        server: FastChat's API server module.
    """

    async def check_length(
        request: Any, prompt: str, max_tokens: int | None, worker: str
    ) -> tuple[int | None, Any]:
        """Return the maximum number of new tokens and None, or None and an error response."""
        found: dict[str, Any] = {}
        for route, body in (("model_details", {}), ("count_token", {"prompt": prompt})):
            found |= await ask(worker, route, {"model": request.model, **body})
            if found.get("error_code"):
                return None, server.create_error_response(found["error_code"], found["text"])
        room = found["context_length"] - found["count"]
        if room <= 0:
            message = f"the prompt's {found['count']} tokens leave no room for an answer"
            return None, server.create_error_response(server.ErrorCode.CONTEXT_OVERFLOW, message)
        return min(max_tokens or room, room), None

    return check_length


def make_check_model(server: ModuleType) -> Callable[..., Awaitable[Any]]:
    """Return a replacement for FastChat's ``check_model``, which does not report missing workers.

    Args:
        server: FastChat's API server module.
    """

    async def check_model(request: Any) -> Any:
        """Return None, or an error response if the model is not served."""
        url = f"{server.app_settings.controller_address}/list_models"
        try:
            models = await server.fetch_remote(url, None, "models")
        except (httpx.HTTPError, OSError, ValueError, LookupError) as error:
            log.warning("the controller does not answer: %r", error)
            models = None
        if not isinstance(models, list):
            return server.create_error_response(NO_WORKER, "the controller does not answer")
        if not models:
            return server.create_error_response(NO_WORKER, "no worker has registered")
        if request.model not in models:
            message = f"model must be one of {', '.join(sorted(models))}; got {request.model}"
            return server.create_error_response(UNKNOWN_MODEL, message)
        return None

    return check_model


def make_get_embedding(server: ModuleType) -> Callable[..., Awaitable[dict[str, Any]]]:
    """Return a replacement for FastChat's ``get_embedding`` that preserves worker errors.

    Args:
        server: FastChat's API server module.
    """

    async def get_embedding(body: dict[str, Any]) -> dict[str, Any]:
        worker = await server.get_worker_address(body["model"])
        return await ask(worker, "worker_get_embeddings", body)

    return get_embedding


async def generate_stream(params: dict[str, Any], worker: str) -> AsyncIterator[dict[str, Any]]:
    """Stream a worker's outputs; closing the iterator cancels the decoding.

    Args:
        params: The request for the worker.
        worker: The worker's URL.

    Yields:
        Outputs, which are recorded in the request's context. If the worker cannot be reached or
        rejects the request, the last output has an error code.
    """
    context = REQUEST_CONTEXT.get() or RequestContext()
    index = len(context.outputs)
    context.outputs.append({})
    seed = params.get("seed")
    if type(seed) is int and 0 <= seed < 2**63:  # with the same seed all choices would be equal
        params = {**params, "seed": (seed + index) % 2**63}
    try:
        async with (
            _client() as client,
            client.stream("POST", f"{worker}/worker_generate_stream", json=params) as response,
        ):
            rest = b""
            async for data in response.aiter_raw():
                *parts, rest = (rest + data).split(b"\0")
                for part in parts:
                    output = json.loads(part)
                    context.outputs[index] = output
                    pending = context.pending_logprobs.setdefault(index, {})
                    for name, values in (output.get("logprobs") or {}).items():
                        pending.setdefault(name, []).extend(values)
                    yield output
            if rest:  # an error response: one JSON object, not a stream
                yield json.loads(rest)
    except httpx.HTTPError as error:
        log.warning("the worker %s does not answer: %r", worker, error)
        yield {**WORKER_UNREACHABLE}


async def generate(params: dict[str, Any], worker: str) -> dict[str, Any]:
    """Return a worker's last output with the log-probabilities of all outputs.

    FastChat's server calls this for all choices of a request concurrently. They are generated one
    after the other, so that one request does not fill the worker's queue; after an error the
    remaining choices are skipped.

    Args:
        params: The request for the worker.
        worker: The worker's URL.
    """
    context = REQUEST_CONTEXT.get() or RequestContext()
    async with context.turn:
        if context.error:
            return context.error
        logprobs: dict[str, list[Any]] = {}
        output: dict[str, Any] = {
            "text": "the worker returned no output",
            "error_code": INTERNAL_ERROR,
        }
        async for output in generate_stream(params, worker):
            for name, values in (output.get("logprobs") or {}).items():
                logprobs.setdefault(name, []).extend(values)
        output["logprobs"] = logprobs or None
        if output["error_code"]:
            context.error = output
        return output
