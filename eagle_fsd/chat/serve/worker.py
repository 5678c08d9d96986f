"""A FastChat worker that decodes with a pair.

:class:`FSDWorker` uses FastChat's registration and heartbeat; :func:`worker_app` serves FastChat's
worker protocol, including its error codes, so that FastChat's controller and API server work
unchanged. The routes are implemented here because FastChat's leak a semaphore slot on every error.
"""

from __future__ import annotations

import asyncio
import json
import logging
from base64 import b64encode
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Any

import httpx
import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastchat.constants import ErrorCode
from fastchat.conversation import Conversation
from fastchat.serve.base_model_worker import BaseModelWorker
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect

from eagle_fsd.chat.backend import LocalBackend
from eagle_fsd.chat.config import Limits
from eagle_fsd.chat.decode_queue import DecodingError, QueueFullError
from eagle_fsd.chat.remote_backend import add_page_routes
from eagle_fsd.chat.request_body import RequestError, read_body, read_json, shorten
from eagle_fsd.chat.serve.asgi import ClosingStream, until_disconnected
from eagle_fsd.chat.serve.guard import cluster_headers
from eagle_fsd.chat.serve.metrics import WorkerMetrics
from eagle_fsd.chat.session import (
    AnswerRequest,
    answer_stats,
    max_chars,
    score_prompt,
    token_usage,
)
from eagle_fsd.chat.wire_format import conversation_template
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.model.stats import DecodeStats
from eagle_fsd.model.step import TokenDetail
from eagle_fsd.utils.chat_templates import ChatTemplate

log = logging.getLogger(__name__)

#: Maximum number of inputs in one request for embeddings.
MAX_EMBEDDING_INPUTS = 64
#: Seconds to wait for the controller.
CONTROLLER_TIMEOUT = 5.0
#: Status logged for a response that no client receives.
CLIENT_CLOSED_REQUEST = 499


class FSDWorker(BaseModelWorker):
    """A pair behind a FastChat controller.

    Args:
        model: The pair.
        chat_template: How chats are formatted.
        limits: Limits of requests.
        controller: URL of the controller; None for a worker that does not register.
        address: URL at which the controller and the API server reach this worker.
        names: Names of the model for clients.
        worker_id: Name of this worker in log messages.

    Attributes:
        backend: Tokenizes and decodes, for FastChat's routes and for the page's.
        ready: Whether the worker has tried to register or need not; the health check reports it.
    """

    def __init__(
        self,
        model: EagleFSD,
        chat_template: ChatTemplate,
        limits: Limits,
        controller: str | None,
        address: str,
        names: list[str],
        worker_id: str,
    ) -> None:
        super().__init__(controller or "", address, worker_id, names[0], names, 1)
        self.model, self.limits = model, limits
        self.tokenizer, self.context_len = model.tokenizer, model.target.context_length
        self.metrics = WorkerMetrics()
        self.backend = LocalBackend(model, chat_template, limits, names[0], self.metrics)
        self.queue = self.backend.queue
        self.ready = controller is None

    def make_conv_template(self, *_: Any, **__: Any) -> Conversation:
        """Return the template that carries chats through FastChat's API server."""
        return conversation_template()

    def get_queue_length(self) -> int:
        """Return the number of requests that are waiting or being decoded."""
        return len(self.queue)

    def init_heart_beat(self) -> None:
        """Register with the controller and start sending heartbeats."""
        super().init_heart_beat()
        self.ready = True

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
        """Return the controller's reply, or None if it does not accept the request."""
        url = f"{self.controller_addr}/{route}"
        try:
            reply = httpx.post(
                url,
                json=body,
                headers=cluster_headers(),
                timeout=CONTROLLER_TIMEOUT,
                trust_env=False,
            )
            return reply.raise_for_status().json()
        except (httpx.HTTPError, ValueError) as error:
            log.warning("the controller does not accept %s: %s", url, error)
            return None

    async def count_token(self, params: dict[str, Any]) -> dict[str, Any]:
        """Count the tokens of a prompt after applying the chat template.

        Turns that will be dropped because the chat exceeds the context are not counted; otherwise
        FastChat's API server would reject the chat. If even the last question does not fit, the
        count is the context length and the response holds the error.

        Args:
            params: The request, with its ``prompt`` or ``prompt_token_ids``.
        """
        names = ("prompt", "prompt_token_ids")
        try:
            request = await self.backend.read({name: params.get(name) for name in names})
        except RequestError as error:
            count = self.context_len if error.code == RequestError.CONTEXT else 0
            return {**error_output(str(error), error.code), "count": count}
        return {"count": request.ids.shape[1], "error_code": 0}

    async def answers(self, params: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Stream the outputs of a request.

        Args:
            params: The request.

        Yields:
            Outputs in FastChat's format: the text so far, log-probabilities of the new tokens,
            usage, statistics, and at the end the finish reason. With ``echo`` the first output is
            the prompt. An error is the last output, with its code.
        """
        self.call_ct += 1
        try:
            self.queue.check_room()
            request = await self.backend.read(params)
            if request.echo_texts:
                yield await self._echo(request)
            if request.prompt_only:
                return
            offset = len(request.echo)
            async with aclosing(self.queue.submit(request).updates()) as updates:
                async for update in updates:
                    assert update is not None  # there is no heartbeat
                    logprobs = None
                    if request.details is not None:
                        logprobs = self._logprobs(
                            ((piece.token, piece.text, piece.detail) for piece in update.pieces),
                            offset,
                        )
                    offset += sum(len(piece.text) for piece in update.pieces)
                    yield {
                        "text": update.text,
                        "error_code": 0,
                        "usage": update.usage,
                        "finish_reason": update.finish_reason,
                        "logprobs": logprobs,
                        "fsd": update.stats,
                    }
        except RequestError as error:
            self.metrics.requests.labels("refused").inc()
            yield error_output(str(error), error.code)
        except QueueFullError as error:
            self.metrics.requests.labels("queue_full").inc()
            yield error_output(str(error), ErrorCode.ENGINE_OVERLOADED)
        except DecodingError as error:
            yield error_output(str(error), ErrorCode.INTERNAL_ERROR)
        except Exception:  # from a tokenizer or a chat template
            log.exception("a request failed")
            self.metrics.requests.labels("failed").inc()
            yield error_output("the request could not be processed", ErrorCode.INTERNAL_ERROR)

    async def _echo(self, request: AnswerRequest) -> dict[str, Any]:
        """Return the output that holds the prompt, scored in the decoding queue if requested."""
        logprobs = None
        if request.details is not None:
            count = request.details
            details = await self.queue.call(
                lambda cancelled: score_prompt(self.model, request.ids, count, cancelled)
            )
            # In the tokenizing thread: a long prompt has many alternatives to decode.
            tokens = zip(request.ids[0].tolist(), request.echo_texts, [None, *details], strict=True)
            logprobs = await asyncio.get_running_loop().run_in_executor(
                self.backend.reader, self._logprobs, tokens, 0
            )
        if request.prompt_only:
            self.metrics.requests.labels("ended").inc()
            self.metrics.prompt_tokens.inc(request.ids.shape[1])
        return {
            "text": request.echo,
            "error_code": 0,
            "usage": token_usage(request.ids.shape[1], 0),
            "finish_reason": "length" if request.prompt_only else None,
            "logprobs": logprobs,
            "fsd": answer_stats(DecodeStats.empty(1)),
        }

    def _logprobs(
        self, tokens: Iterable[tuple[int, str, TokenDetail | None]], offset: int
    ) -> dict[str, list[Any]]:
        """Return log-probabilities in the format of OpenAI's completions.

        Args:
            tokens: Each token's id, the text that it completes, and its details; None for the first
                token of a prompt.
            offset: Position of the first token in the answer's text.
        """
        columns: dict[str, list[Any]] = {
            "text_offset": [],
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
        }
        for token, text, detail in tokens:
            columns["text_offset"].append(offset)
            columns["tokens"].append(self._token_text(token))
            columns["token_logprobs"].append(detail and detail.log_prob)
            top: dict[str, float] = {}
            for other, log_prob in detail.top if detail else ():
                top.setdefault(self._token_text(other), log_prob)  # of equal texts the likeliest
            columns["top_logprobs"].append(top or None)
            offset += len(text)
        return columns

    def _token_text(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))

    @torch.inference_mode()
    def embed(
        self,
        texts: list[str],
        base64: bool = False,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any]:
        """Embed texts as the mean of the target's features, scaled to length 1.

        Args:
            texts: The texts, each truncated to the context length.
            base64: Encode vectors as little-endian float32 in base64, as OpenAI's client requests
                them; default: lists of numbers.
            cancelled: Returns whether to skip the remaining texts.

        Returns:
            ``embedding`` (one vector per text, fewer if cancelled) and ``token_num`` (the number of
            tokens).

        Raises:
            RequestError: A text has no tokens.
        """
        vectors: list[Any] = []
        token_count = 0
        for text in texts:
            if cancelled():
                break
            text = text[: max_chars(self.context_len)]
            ids = self.tokenizer(text, return_tensors="pt").input_ids[:, : self.context_len]
            if not ids.shape[1]:
                raise RequestError("input must not contain texts without tokens")
            token_count += ids.shape[1]
            model = self.model.model.base_model
            features = model(input_ids=ids.to(model.device), use_cache=False).last_hidden_state
            mean = features[0].float().mean(0)
            vector = torch.nn.functional.normalize(mean, dim=0).cpu().numpy().astype("<f4")
            vectors.append(b64encode(vector.tobytes()).decode() if base64 else vector.tolist())
        return {"embedding": vectors, "token_num": token_count}

    def close(self) -> None:
        """Stop the decoding thread and the tokenizing thread."""
        self.backend.close()


def error_output(message: str, code: int) -> dict[str, Any]:
    """Return an error in FastChat's format.

    Args:
        message: The error message.
        code: One of ``fastchat.constants.ErrorCode``.
    """
    return {"text": shorten(message), "error_code": int(code)}


def worker_error(message: str, status: int) -> dict[str, Any]:
    """Return an error of the guard in FastChat's format.

    Args:
        message: The error message.
        status: HTTP status.
    """
    code = ErrorCode.VALIDATION_TYPE_ERROR
    if status == 401:
        code = ErrorCode.INVALID_AUTH_KEY
    elif status >= 500:
        code = ErrorCode.INTERNAL_ERROR
    return error_output(message, code)


def worker_app(worker: FSDWorker) -> FastAPI:
    """Return the application that serves FastChat's worker protocol, ``/metrics`` and ``/health``.

    Args:
        worker: The worker.
    """
    app = FastAPI(title="eagle-fsd worker", docs_url=None, redoc_url=None, openapi_url=None)

    async def json_body(request: Request) -> dict[str, Any]:
        content_length = request.headers.get("content-length", "")
        data = await read_body(request.stream(), content_length, worker.limits.max_body)
        return read_json(data or b"{}")

    async def answer_params(request: Request) -> dict[str, Any]:
        """Return the parameters of a request for an answer, with its client."""
        host = request.client.host if request.client else ""
        return {"client": host, **await json_body(request)}

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
        return JSONResponse(error_output(message, ErrorCode.INTERNAL_ERROR), status_code=500)

    @app.post("/worker_generate_stream")
    async def generate_stream(request: Request) -> Response:
        params = await answer_params(request)

        async def chunks() -> AsyncGenerator[bytes, None]:
            async with aclosing(worker.answers(params)) as outputs:
                async for output in outputs:
                    yield json.dumps(output).encode() + b"\0"

        return ClosingStream(chunks(), "application/octet-stream")

    @app.post("/worker_generate")
    async def generate(request: Request) -> Response:
        params = await answer_params(request)
        logprobs: dict[str, list[Any]] = {}

        async def last_output() -> dict[str, Any]:
            output: dict[str, Any] = {}
            async for output in worker.answers(params):
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
        base64 = params.get("encoding_format") == "base64"
        work = worker.queue.call(lambda cancelled: worker.embed(texts, base64, cancelled))
        try:
            output = await until_disconnected(request.receive, work)
        except QueueFullError as error:
            return JSONResponse(error_output(str(error), ErrorCode.ENGINE_OVERLOADED))
        if output is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return JSONResponse(output)

    @app.post("/worker_get_status")
    async def get_status() -> dict[str, Any]:
        status: dict[str, Any] = worker.get_status()
        return status

    @app.post("/count_token")
    async def count_token(request: Request) -> dict[str, Any]:
        return await worker.count_token(await json_body(request))

    @app.post("/worker_get_conv_template")
    async def get_conv_template() -> dict[str, Any]:
        template: dict[str, Any] = worker.get_conv_template()
        return template

    @app.post("/model_details")
    async def model_details() -> dict[str, int]:
        return {"context_length": worker.context_len}

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(
            worker.metrics.page(len(worker.queue), worker.queue.rows, worker.limits.max_batch),
            media_type=CONTENT_TYPE_LATEST,
        )

    @app.get("/health")
    async def health() -> Response:
        status = "ok" if worker.ready else "registering"
        if not worker.queue.alive:
            status = "decoding has stopped"
        body = {"status": status, "queue": len(worker.queue)}
        return JSONResponse(body, status_code=200 if status == "ok" else 503)

    add_page_routes(app, worker.backend, json_body)
    return app
