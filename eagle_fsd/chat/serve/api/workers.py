"""Requests to the controller and to workers, with FastChat's protocol."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import cache
from typing import Any

import httpx

from eagle_fsd.chat.serve.api.errors import ApiError, worker_error
from eagle_fsd.chat.serve.guard import cluster_headers

log = logging.getLogger(__name__)

#: How many workers are tried for a request.
MAX_ATTEMPTS = 3
#: How many choices of one request are decoded or wait at the same time, so that a request for many
#: choices does not fill the workers' queues.
MAX_CONCURRENT_CHOICES = 4
#: How many texts are sent to a worker at a time.
EMBEDDING_BATCH_SIZE = 16
#: Seconds to wait for the controller, which waits up to 5 s for a worker's status.
CONTROLLER_TIMEOUT = 15.0
#: Seconds to connect. An answer may wait in a worker's queue indefinitely.
_TIMEOUT = httpx.Timeout(5.0, read=None)
#: Exceptions of a request that did not reach the worker.
_UNREACHABLE = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.UnsupportedProtocol,
    httpx.InvalidURL,
)
#: A machine that crashes must be detected: after 10 s without traffic the connection is probed
#: three times, 5 s apart, if the system supports it.
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
    """Return a client that bypasses the environment's proxy."""
    transport = httpx.AsyncHTTPTransport(verify=_tls(), socket_options=_KEEP_ALIVE)
    return httpx.AsyncClient(
        headers=cluster_headers(), timeout=_TIMEOUT, trust_env=False, transport=transport
    )


class Workers:
    """The workers that are registered with a controller.

    Args:
        controller: URL of the controller.
    """

    def __init__(self, controller: str) -> None:
        self.controller = controller

    async def models(self) -> list[str]:
        """Return the names of the models that are served, in alphabetical order.

        Raises:
            ApiError: The controller does not answer.
        """
        async with _client() as client:
            return sorted(await self._ask_controller(client, "list_models", "models"))

    async def answers(
        self, requests: Sequence[dict[str, Any]]
    ) -> AsyncGenerator[tuple[int, dict[str, Any]], None]:
        """Send several requests; closing the iterator cancels all of them.

        At most :data:`MAX_CONCURRENT_CHOICES` are decoded or wait at the same time.

        Args:
            requests: Parameters for the workers.

        Yields:
            The index of a request and its next output, in the order in which outputs arrive.

        Raises:
            ApiError: A request failed; the others are cancelled.
        """
        arrived: asyncio.Queue[tuple[int, dict[str, Any] | Exception | None]] = asyncio.Queue(1)
        slots = asyncio.Semaphore(MAX_CONCURRENT_CHOICES)

        async def collect(index: int) -> None:
            try:
                async with slots, aclosing(self._answer(requests[index])) as outputs:
                    async for output in outputs:
                        await arrived.put((index, output))
                await arrived.put((index, None))
            except Exception as error:
                await arrived.put((index, error))

        tasks = [asyncio.create_task(collect(index)) for index in range(len(requests))]
        unfinished = len(tasks)
        try:
            while unfinished:
                index, output = await arrived.get()
                if isinstance(output, Exception):
                    raise output
                if output is None:
                    unfinished -= 1
                else:
                    yield index, output
        finally:
            for task in tasks:
                task.cancel()
            # A response that is cancelled cancels every wait, which must not reach the tasks while
            # they close their connections.
            await asyncio.shield(asyncio.gather(*tasks, return_exceptions=True))

    async def embed(
        self, model: str, texts: Sequence[str], encoding_format: str
    ) -> tuple[list[Any], int]:
        """Embed texts.

        Args:
            model: The model's name.
            texts: The texts.
            encoding_format: ``"float"``, or ``"base64"`` for float32 numbers in base64.

        Returns:
            The vectors and the number of tokens.

        Raises:
            ApiError: A worker rejects the texts, or none answers.
        """
        vectors: list[Any] = []
        tokens = 0
        for begin in range(0, len(texts), EMBEDDING_BATCH_SIZE):
            batch = texts[begin : begin + EMBEDDING_BATCH_SIZE]
            body = {"model": model, "input": batch, "encoding_format": encoding_format}
            async with self._post("worker_get_embeddings", body) as response:
                output = json.loads(await response.aread())
            if output.get("error_code"):
                raise worker_error(output)
            vectors += output["embedding"]
            tokens += output["token_num"]
        return vectors, tokens

    async def _answer(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Stream a worker's outputs, up to the one with a finish reason."""
        async with self._post("worker_generate_stream", request) as response:
            rest = b""
            async for data in response.aiter_raw():
                *parts, rest = (rest + data).split(b"\0")
                for part in parts:
                    output = json.loads(part)
                    if output["error_code"]:
                        raise worker_error(output)
                    yield output
                    if output["finish_reason"]:
                        return
        raise ApiError("the worker ended the answer early", 503)

    @asynccontextmanager
    async def _post(self, route: str, body: dict[str, Any]) -> AsyncIterator[httpx.Response]:
        """Send a request to a worker, and to another one if that refuses the connection."""
        async with _client() as client:
            for _ in range(MAX_ATTEMPTS):
                worker = await self._find(client, body["model"])
                try:
                    request = client.build_request("POST", f"{worker}/{route}", json=body)
                    response = await client.send(request, stream=True)
                    break
                except _UNREACHABLE as error:
                    log.warning("the worker %s cannot be reached: %r", worker, error)
                    # The controller forgets workers that do not answer.
                    await self._ask_controller(client, "refresh_all_workers")
                except httpx.HTTPError as error:
                    log.warning("the worker %s does not answer: %r", worker, error)
                    raise ApiError("the worker does not answer", 503) from error
            else:
                raise ApiError("no worker can be reached", 503)
            try:
                if response.status_code != 200:
                    raise await _rejection(response)
                yield response
            except httpx.HTTPError as error:
                log.warning("the worker %s stopped during a response: %r", worker, error)
                raise ApiError("the worker stopped during the response", 503) from error
            finally:
                await response.aclose()

    async def _find(self, client: httpx.AsyncClient, model: str) -> str:
        """Return the URL of the worker for the next request."""
        address = await self._ask_controller(client, "get_worker_address", "address", model=model)
        if address:
            return str(address)
        models = sorted(await self._ask_controller(client, "list_models", "models"))
        if models and model not in models:
            message = f"model must be one of {', '.join(models)}; got {model}"
            raise ApiError(message, 404, "model_not_found", "model")
        raise ApiError("no worker is registered", 503)

    async def _ask_controller(
        self, client: httpx.AsyncClient, route: str, field: str | None = None, **body: str
    ) -> Any:
        """Return a field of the controller's reply, or None if no field is named."""
        url = f"{self.controller}/{route}"
        try:
            reply = await client.post(url, json=body, timeout=CONTROLLER_TIMEOUT)
            reply.raise_for_status()
            return reply.json()[field] if field else None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            log.warning("the controller does not accept %s: %r", url, error)
            raise ApiError("the controller does not answer", 503) from error


async def _rejection(response: httpx.Response) -> ApiError:
    """Convert a worker's response with another status than 200."""
    status = response.status_code
    try:
        message = str(json.loads(await response.aread())["text"])
    except (ValueError, LookupError, TypeError):
        message = f"the worker returned HTTP status {status}"
    if status not in (400, 413):
        log.warning("the worker %s returned HTTP status %d: %s", response.url, status, message)
        status = 502
    return ApiError(message, status)
