"""A FastChat worker that decodes with a pair.

:class:`FSDWorker` uses FastChat's registration and heartbeat; :func:`worker_app` serves FastChat's
worker protocol, including its error codes, so FastChat's controller, API server and web page
work unchanged. The routes are implemented here because FastChat's leak a semaphore slot on every
error.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import secrets
import sys
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

# Seconds, which FastChat reads when it is imported. Its own default is 45.
os.environ.setdefault("FASTCHAT_WORKER_HEART_BEAT_INTERVAL", "5")

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from eagle_fsd.chat.backend import LocalBackend
from eagle_fsd.chat.config import Limits
from eagle_fsd.chat.decode_queue import DecodingError, QueueFullError
from eagle_fsd.chat.request_body import RequestError, read_json, shorten
from eagle_fsd.chat.serve.api import CLIENT_CLOSED_REQUEST, add_status_routes
from eagle_fsd.chat.serve.asgi import ClosingStream, until_disconnected
from eagle_fsd.chat.serve.connections import BoundedServer, run_server
from eagle_fsd.chat.serve.guard import Access, Guard
from eagle_fsd.chat.serve.metrics import ServerMetrics
from eagle_fsd.chat.serve.openai_format import (
    MAX_EMBEDDING_INPUTS,
    base64_vector,
    completion_logprobs,
)
from eagle_fsd.chat.wire_format import conversation_template, decode_chat
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.utils.chat_templates import ChatTemplate


def _import_fastchat() -> Any:
    """Import FastChat's base worker without letting it redirect stdout or create log files."""
    # FastChat reads LOGDIR once, when it is first imported. If unset, FastChat would write logs to
    # the working directory.
    utils: Any = importlib.import_module("fastchat.utils")
    utils.LOGDIR = os.environ.get("LOGDIR", "")
    streams = sys.stdout, sys.stderr
    try:
        module: Any = importlib.import_module("fastchat.serve.base_model_worker")
    finally:
        sys.stdout, sys.stderr = streams
    # Without a logger, a worker would create one that redirects the standard streams to a file.
    module.logger = logging.getLogger("model_worker")
    return module


_BaseWorker: Any = _import_fastchat().BaseModelWorker
log = logging.getLogger(__name__)

#: Seconds to wait for the controller.
CONTROLLER_TIMEOUT = 5.0
#: FastChat's error codes, see ``fastchat.constants.ErrorCode``.
INVALID_KEY, OVERLOADED, INTERNAL = 40101, 42903, 50001


class FSDWorker(_BaseWorker):  # type: ignore[misc]
    """A pair behind a FastChat controller, or without one if ``controller`` is None.

    ``address`` is the URL at which FastChat's servers reach this worker, and ``names`` are the
    model's names for clients.
    """

    def __init__(
        self,
        model: EagleFSD,
        chat_template: ChatTemplate,
        limits: Limits,
        controller: str | None,
        address: str,
        names: list[str],
    ) -> None:
        super().__init__(controller or "", address, secrets.token_hex(4), names[0], names, 1)
        self.tokenizer, self.context_len = model.tokenizer, model.target.stable_length
        self.metrics = ServerMetrics()
        self.backend = LocalBackend(
            model, chat_template, limits, name=names[0], observer=self.metrics
        )
        self.queue = self.backend.queue

    def make_conv_template(self, *_: Any, **__: Any) -> Any:
        """Return the template that carries chats through FastChat's API server."""
        return conversation_template()

    def get_queue_length(self) -> int:
        """Return the number of requests that are waiting or being decoded."""
        return len(self.queue)

    def register_to_controller(self) -> None:
        """Register; if the controller is unreachable, the next heartbeat retries."""
        self._ask_controller(
            "register_worker",
            {
                "worker_name": self.worker_addr,
                "check_heart_beat": True,
                "worker_status": self.get_status(),
                "multimodal": False,
            },
        )

    def send_heart_beat(self) -> None:
        """Send a heartbeat; register if the controller does not know this worker."""
        found = self._ask_controller(
            "receive_heart_beat",
            {"worker_name": self.worker_addr, "queue_length": self.get_queue_length()},
        )
        if isinstance(found, dict) and not found.get("exist"):
            self.register_to_controller()

    def _ask_controller(self, route: str, body: dict[str, Any]) -> Any:
        """Return the controller's reply, or log a warning and return None without a valid one."""
        url = f"{self.controller_addr}/{route}"
        try:
            reply = httpx.post(url, json=body, timeout=CONTROLLER_TIMEOUT, trust_env=False)
            return reply.raise_for_status().json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            log.warning("the controller did not answer %s: %s", route, error)
            return None

    async def count_token(self, params: dict[str, Any], client: str) -> dict[str, Any]:
        """Count the tokens of a prompt after applying the chat template.

        If the prompt does not fit, the count is the context length and the reply holds the error.
        """
        given = {name: params.get(name) for name in ("prompt", "prompt_token_ids")}
        try:
            request = await self.backend.read(_answer_params(given), client)
        except RequestError as error:
            count = self.context_len if error.code == RequestError.CONTEXT else 0
            return {**error_output(str(error), error.code), "count": count}
        return {"count": request.ids.shape[1], "error_code": 0}

    async def answers(
        self, params: dict[str, Any], client: str
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Stream the outputs of a request in FastChat's format.

        An output holds the text so far, log-probabilities of the new tokens, usage, statistics, and
        at the end the finish reason. An error is the last output, with its code.
        """
        self.call_ct += 1
        text = ""
        try:
            params = _answer_params(params)
            async with aclosing(self.backend.answer(params, client)) as updates:
                async for request, update in updates:
                    logprobs = None
                    if request.details is not None:
                        tokens = self.backend.tokens
                        logprobs = completion_logprobs(update.pieces, len(text), tokens)
                    text += update.text
                    yield {
                        "text": text,
                        "error_code": 0,
                        "usage": update.usage,
                        "finish_reason": update.finish_reason,
                        "logprobs": logprobs,
                        "fsd": update.stats,
                    }
        except RequestError as error:
            yield error_output(str(error), error.code)
        except QueueFullError as error:
            yield error_output(str(error), OVERLOADED)
        except DecodingError as error:
            yield error_output(str(error), INTERNAL)


def _answer_params(params: dict[str, Any]) -> dict[str, Any]:
    """Decode the chat that a prompt may carry through FastChat's servers."""
    prompt = params.get("prompt")
    chat = decode_chat(prompt) if isinstance(prompt, str) else None
    return params if chat is None else {**params, "prompt": None, "messages": chat}


def error_output(message: str, code: int) -> dict[str, Any]:
    """Return an error in FastChat's format."""
    return {"text": shorten(message), "error_code": int(code)}


def worker_error(message: str, status: int) -> dict[str, Any]:
    """Return an error of the guard in FastChat's format."""
    code = INTERNAL if status >= 500 else RequestError.INVALID
    return error_output(message, INVALID_KEY if status == 401 else code)


def worker_app(worker: FSDWorker) -> FastAPI:
    """Return the application that serves FastChat's worker protocol, health and metrics."""
    app = FastAPI(title="eagle-fsd worker", docs_url=None, redoc_url=None, openapi_url=None)

    async def json_body(request: Request) -> dict[str, Any]:
        return read_json(await request.body() or b"{}")

    @app.exception_handler(RequestError)
    async def reject(_: Request, error: RequestError) -> Response:
        worker.metrics.requests.labels("refused").inc()
        return JSONResponse(error_output(str(error), error.code), status_code=400)

    @app.exception_handler(ClientDisconnect)
    async def disconnected(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.exception_handler(Exception)
    async def failed(_: Request, __: Exception) -> Response:
        message = "the request failed; see the worker's log"
        return JSONResponse(error_output(message, INTERNAL), status_code=500)

    @app.post("/worker_generate_stream")
    async def generate_stream(request: Request) -> Response:
        params = await json_body(request)

        async def chunks() -> AsyncGenerator[bytes, None]:
            async with aclosing(worker.answers(params, request.state.client)) as outputs:
                async for output in outputs:
                    yield json.dumps(output).encode() + b"\0"

        return ClosingStream(chunks(), "application/octet-stream")

    @app.post("/worker_generate")
    async def generate(request: Request) -> Response:
        params = await json_body(request)
        logprobs: dict[str, list[Any]] = {}

        async def last_output() -> dict[str, Any]:
            output: dict[str, Any] = {}
            async for output in worker.answers(params, request.state.client):
                for name, values in (output.get("logprobs") or {}).items():
                    logprobs.setdefault(name, []).extend(values)
            return output

        output = await until_disconnected(request.receive, last_output())
        if output is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return JSONResponse({**output, "logprobs": logprobs or None})

    @app.post("/worker_get_embeddings")
    async def get_embeddings(request: Request) -> Response:
        params = await json_body(request)
        texts = params.get("input")
        texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, list) or not all(isinstance(item, str) for item in texts):
            raise RequestError("input must be a string or a list of strings", RequestError.INVALID)
        if not 0 < len(texts) <= MAX_EMBEDDING_INPUTS or not all(texts):
            raise RequestError(
                f"input must be 1 to {MAX_EMBEDDING_INPUTS} non-empty strings; got {len(texts)}"
            )
        try:
            work = worker.backend.embed(texts, request.state.client)
            found = await until_disconnected(request.receive, work)
        except RequestError as error:  # counted by the backend
            return JSONResponse(error_output(str(error), error.code), status_code=400)
        except QueueFullError as error:
            return JSONResponse(error_output(str(error), OVERLOADED))
        except DecodingError as error:
            return JSONResponse(error_output(str(error), INTERNAL))
        if found is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        vectors: list[Any] = found[0]
        if params.get("encoding_format") == "base64":
            vectors = list(map(base64_vector, vectors))
        return JSONResponse({"embedding": vectors, "token_num": found[1]})

    @app.post("/worker_get_status")
    async def get_status() -> dict[str, Any]:
        status: dict[str, Any] = worker.get_status()
        return status

    @app.post("/count_token")
    async def count_token(request: Request) -> dict[str, Any]:
        return await worker.count_token(await json_body(request), request.state.client)

    @app.post("/worker_get_conv_template")
    async def get_conv_template() -> dict[str, Any]:
        template: dict[str, Any] = worker.get_conv_template()
        return template

    @app.post("/model_details")
    async def model_details() -> dict[str, int]:
        return {"context_length": worker.context_len}

    add_status_routes(app, worker.backend, worker.metrics)
    return app


def run_worker(
    model: EagleFSD,
    chat_template: ChatTemplate,
    limits: Limits,
    *,
    host: str,
    port: int,
    controller: str | None,
    address: str,
    names: Sequence[str],
    access: Access,
    shutdown_timeout: float,
) -> None:
    """Serve a pair as a FastChat worker until SIGINT or SIGTERM; see :class:`FSDWorker`.

    Raises OSError as :func:`~eagle_fsd.chat.serve.connections.run_server`.
    """
    if access.keys:
        address = with_key(address, access.keys[0])
    worker = FSDWorker(
        model, chat_template, limits, controller=controller, address=address, names=list(names)
    )

    def register() -> None:
        # Only once the port is open: the controller may send a request at once.
        threading.Thread(target=worker.init_heart_beat, daemon=True).start()

    try:
        app = Guard(worker_app(worker), access, limits.max_body, error_body=worker_error)
        on_started = register if controller else lambda: None
        run_server(
            BoundedServer(
                app,
                host,
                port,
                queue=worker.queue,
                shutdown_timeout=shutdown_timeout,
                on_started=on_started,
            )
        )
    finally:
        worker.backend.close()


def with_key(address: str, key: str) -> str:
    """Return a URL with a key as password, which FastChat's servers send with their requests."""
    parts = urlsplit(address)
    return urlunsplit(parts._replace(netloc=f"eagle-fsd:{quote(key, safe='')}@{parts.netloc}"))
