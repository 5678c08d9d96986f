"""A FastChat worker that decodes with a pair.

:class:`FSDWorker` registers with FastChat's controller; :func:`worker_app` serves FastChat's worker
protocol, including its error codes, so FastChat's controller, API server and web page work
unchanged. Both are implemented here because FastChat's routes leak a semaphore slot if a request
fails, and its base class redirects the standard streams to log files.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from eagle_fsd.chat.backend import LocalBackend
from eagle_fsd.chat.request_body import RequestError, UnansweredError, read_json, shorten
from eagle_fsd.chat.serve.api import CancellableRoute, add_status_routes
from eagle_fsd.chat.serve.asgi import ClosingStream
from eagle_fsd.chat.serve.openai_format import (
    MAX_EMBEDDING_INPUTS,
    base64_vector,
    completion_logprobs,
)
from eagle_fsd.chat.wire_format import conversation_template, decode_chat

log = logging.getLogger(__name__)

#: Seconds between two heartbeats; FastChat's own default is 45.
HEART_BEAT_INTERVAL = int(os.environ.get("FASTCHAT_WORKER_HEART_BEAT_INTERVAL", "5"))
#: Seconds to wait for the controller.
CONTROLLER_TIMEOUT = 5.0
#: Further error codes of FastChat.
INVALID_KEY, INTERNAL = 40101, UnansweredError.code


class FSDWorker:
    """A pair behind a FastChat controller, or without one if ``controller`` is None.

    ``address`` is the URL at which FastChat's servers reach this worker.
    """

    def __init__(self, backend: LocalBackend, controller: str | None, address: str) -> None:
        self.backend, self.queue = backend, backend.queue
        self.controller, self.address = controller, address
        self.context_len = backend.model.target.stable_length

    def status(self) -> dict[str, Any]:
        """Return the model's names and the number of its requests, as FastChat expects them."""
        return {"model_names": self.backend.names, "speed": 1, "queue_length": len(self.queue)}

    def keep_registered(self) -> None:
        """Register with the controller, and send it heartbeats; does not return.

        If a heartbeat finds that the controller does not know this worker, it registers again.
        """
        found: Any = {"exist": False}
        while True:
            if isinstance(found, dict) and not found.get("exist"):
                status = {"worker_status": self.status(), "check_heart_beat": True}
                self._ask_controller("register_worker", {**status, "multimodal": False})
            time.sleep(HEART_BEAT_INTERVAL)
            found = None
            if self.queue.ready:  # otherwise, the controller forgets this worker
                length = {"queue_length": len(self.queue)}
                found = self._ask_controller("receive_heart_beat", length)

    def _ask_controller(self, route: str, body: dict[str, Any]) -> Any:
        """Return the controller's reply, or log a warning and return None without a valid one."""
        url, body = f"{self.controller}/{route}", {"worker_name": self.address, **body}
        try:
            reply = httpx.post(url, json=body, timeout=CONTROLLER_TIMEOUT, trust_env=False)
            return reply.raise_for_status().json()
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            log.warning("the request %s to the controller failed: %s", route, error)
            return None

    async def count_token(self, params: dict[str, Any], client: str) -> dict[str, Any]:
        """Count the tokens of a raw prompt or of an encoded chat.

        The reply to an invalid request holds the error; its count is the context length if the
        prompt does not fit, else 0.
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
        except UnansweredError as error:
            yield error_output(str(error), error.code)


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
    app.router.route_class = CancellableRoute

    async def json_body(request: Request) -> dict[str, Any]:
        return read_json(await request.body() or b"{}")

    @app.exception_handler(RequestError)
    async def reject(_: Request, error: RequestError) -> Response:
        worker.queue.metrics.requests.labels("refused").inc()
        return JSONResponse(error_output(str(error), error.code), status_code=400)

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
        output: dict[str, Any] = {}
        logprobs: dict[str, list[Any]] = {}
        async for output in worker.answers(params, request.state.client):
            for name, values in (output.get("logprobs") or {}).items():
                logprobs.setdefault(name, []).extend(values)
        return JSONResponse({**output, "logprobs": logprobs or None})

    @app.post("/worker_get_embeddings")
    async def get_embeddings(request: Request) -> Response:
        params = await json_body(request)
        texts = params.get("input")
        texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, list) or not all(isinstance(item, str) for item in texts):
            raise RequestError("input must be a string or a list of strings", RequestError.INVALID)
        if not 0 < len(texts) <= MAX_EMBEDDING_INPUTS or not all(texts):
            raise RequestError(f"input must be 1 to {MAX_EMBEDDING_INPUTS} non-empty strings")
        try:
            vectors, count = await worker.backend.embed(texts, request.state.client)
        except UnansweredError as error:  # counted by the backend
            return JSONResponse(error_output(str(error), error.code))
        base64 = params.get("encoding_format") == "base64"
        found = [base64_vector(vector) if base64 else vector.tolist() for vector in vectors]
        return JSONResponse({"embedding": found, "token_num": count})

    @app.post("/worker_get_status")
    async def get_status() -> Response:
        return JSONResponse(worker.status(), 200 if worker.queue.ready else 503)

    @app.post("/count_token")
    async def count_token(request: Request) -> dict[str, Any]:
        return await worker.count_token(await json_body(request), request.state.client)

    @app.post("/worker_get_conv_template")
    async def get_conv_template() -> dict[str, Any]:
        return {"conv": conversation_template()}

    @app.post("/model_details")
    async def model_details() -> dict[str, int]:
        return {"context_length": worker.context_len}

    add_status_routes(app, worker.queue)
    return app


def with_key(address: str, key: str) -> str:
    """Return a URL with a key as password, which FastChat's servers send with their requests."""
    parts = urlsplit(address)
    return urlunsplit(parts._replace(netloc=f"eagle-fsd:{quote(key, safe='')}@{parts.netloc}"))
