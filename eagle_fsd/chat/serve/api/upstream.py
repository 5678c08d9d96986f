"""How the API server calls a worker: a refusal stays one, and a request's extras travel along.

These take the place of functions of FastChat's server, see :func:`eagle_fsd.chat.serve.api.app.api_app`.
"""

from __future__ import annotations

import json
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from functools import cache
from types import ModuleType
from typing import Any

import aiohttp
import httpx

from eagle_fsd.chat.serve.api.replies import NO_MODEL, NO_WORKER
from eagle_fsd.chat.serve.api.requests import Extras

log = logging.getLogger(__name__)

#: The request that this task serves.
EXTRAS: ContextVar[Extras | None] = ContextVar("extras", default=None)
#: FastChat's error for it: also that a worker ended in the middle of an answer.
WORKER_GONE = {"text": "no worker answers", "error_code": NO_WORKER[0]}


@cache
def _tls() -> ssl.SSLContext:
    """Made once: it takes longer than a request."""
    return ssl.create_default_context()


#: An answer may wait in line for as long as it takes, but a machine that died says nothing either:
#: after 10 silent seconds it is asked three times, 5 seconds apart. (Where the system knows these.)
_KEEP_ALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
]


def _client() -> httpx.AsyncClient:
    """For a worker, which is never behind the environment's proxy: nor is it for FastChat."""
    transport = httpx.AsyncHTTPTransport(verify=_tls(), socket_options=_KEEP_ALIVE)
    timeout = httpx.Timeout(10.0, read=None)
    return httpx.AsyncClient(timeout=timeout, trust_env=False, transport=transport)


async def ask(worker: str, route: str, body: dict[str, Any]) -> dict[str, Any]:
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


def check_length_of(server: ModuleType) -> Callable[..., Awaitable[tuple[int | None, Any]]]:
    """How many tokens an answer may have, or the error; FastChat's own fails on a refusal."""

    async def check_length(
        request: Any, prompt: str, max_tokens: int | None, worker: str
    ) -> tuple[int | None, Any]:
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


def check_model_of(server: ModuleType) -> Callable[..., Awaitable[Any]]:
    """The error where there is no such model; FastChat's own has no words for having none."""

    async def check_model(request: Any) -> Any:
        url = f"{server.app_settings.controller_address}/list_models"
        try:
            models = await server.fetch_remote(url, None, "models")
        except (aiohttp.ClientError, OSError, ValueError, LookupError) as error:
            log.warning("the controller does not answer: %r", error)
            models = None
        if not isinstance(models, list):  # FastChat gives an error as text
            return server.create_error_response(NO_WORKER[0], "the controller does not answer")
        if not models:
            return server.create_error_response(NO_WORKER[0], "no worker has registered")
        if request.model not in models:
            message = f"only {', '.join(sorted(models))} allowed here; got {request.model}"
            return server.create_error_response(NO_MODEL, message)
        return None

    return check_model


def get_embedding_of(server: ModuleType) -> Callable[..., Awaitable[dict[str, Any]]]:
    async def get_embedding(body: dict[str, Any]) -> dict[str, Any]:
        worker = await server.get_worker_address(body["model"])
        return await ask(worker, "worker_get_embeddings", body)

    return get_embedding


async def generate_stream(params: dict[str, Any], worker: str) -> AsyncIterator[dict[str, Any]]:
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
                    pending = extras.pending.setdefault(index, {})
                    for name, values in (output.get("logprobs") or {}).items():
                        pending.setdefault(name, []).extend(values)
                    yield output
            if rest:  # a refusal, which is one JSON object and no stream
                yield json.loads(rest)
    except httpx.HTTPError as error:
        log.warning("the worker %s does not answer: %r", worker, error)
        yield {**WORKER_GONE}


async def generate(params: dict[str, Any], worker: str) -> dict[str, Any]:
    """The worker's last output, with the log-probabilities of all.

    FastChat's server calls this for all of a request's choices at once. They go one after the
    other, or one request would take many places in the worker's line, and more than there are; and
    once one is refused, the rest is not decoded for nothing.
    """
    extras = EXTRAS.get() or Extras()
    async with extras.turn:
        if extras.refusal:
            return extras.refusal
        logprobs: dict[str, list[Any]] = {}
        output: dict[str, Any] = {"text": "the worker said nothing", "error_code": 50001}
        async for output in generate_stream(params, worker):
            for name, values in (output.get("logprobs") or {}).items():
                logprobs.setdefault(name, []).extend(values)
        output["logprobs"] = logprobs or None
        if output["error_code"]:
            extras.refusal = output
        return output
