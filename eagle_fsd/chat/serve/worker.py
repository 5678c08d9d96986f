"""FastChat's worker for a pair: registration and heart-beat are FastChat's, decoding is ours.

The protocol is FastChat's, error codes in the body included, so that its controller and API server
work with it unchanged. The routes are our own: FastChat's leak a slot on every error.
"""

from __future__ import annotations

import asyncio
import json
import logging
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests
import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from fastchat.constants import ErrorCode
from fastchat.conversation import Conversation as Template
from fastchat.serve.base_model_worker import BaseModelWorker
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect

from eagle_fsd.chat.backend import LocalBackend
from eagle_fsd.chat.config import Limits
from eagle_fsd.chat.decode_queue import DecodeQueue, DecodingError, QueueFullError, Update
from eagle_fsd.chat.remote_backend import add_page_routes
from eagle_fsd.chat.requests import (
    BODY_SECONDS,
    AnswerRequest,
    RequestError,
    announces_more,
    read_json,
    read_request,
    shortened,
)
from eagle_fsd.chat.serve.metrics import WorkerMetrics
from eagle_fsd.chat.session import most_characters
from eagle_fsd.chat.text import Piece
from eagle_fsd.chat.wire_format import template
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.utils.chat_templates import ChatFormat

log = logging.getLogger(__name__)

#: Texts in one request for embeddings at most.
MOST_TEXTS = 64
#: The status of an answer that nobody is there to read.
GONE = 499


class FSDWorker(BaseModelWorker):
    """A pair behind FastChat's controller.

    Args:
        controller: Its address, ``http://...``; None: the worker stands alone.
        address: Where the controller and the API server reach this worker.
        names: What clients call the model.
    """

    def __init__(
        self,
        model: EagleFSD,
        wording: ChatFormat,
        limits: Limits,
        controller: str | None,
        address: str,
        names: list[str],
        worker_id: str,
    ) -> None:
        super().__init__(controller or "", address, worker_id, names[0], names, 1)
        self.model, self.wording, self.limits = model, wording, limits
        self.tokenizer, self.context_len = model.tokenizer, model.target.context
        self.metrics = WorkerMetrics()
        self.queue = DecodeQueue(model, limits.queue, self.metrics.watch)
        # Requests are tokenized one at a time, beside the event loop: a long prompt takes seconds,
        # in which those that stream are to go on.
        self._reader = ThreadPoolExecutor(1, "read")
        #: Whether it was tried to register: who waits for the worker waits for that.
        self.ready = controller is None

    def make_conv_template(self, *_: Any, **__: Any) -> Template:
        """The template that carries chats through FastChat untouched."""
        return template()

    def get_queue_length(self) -> int:
        return len(self.queue)

    def init_heart_beat(self) -> None:
        """Register, and go on telling the controller that we are there."""
        super().init_heart_beat()
        self.ready = True

    def register_to_controller(self) -> None:
        """Register; a controller that is not there yet is tried again with the next heart-beat."""
        try:
            super().register_to_controller()
        except (requests.RequestException, AssertionError) as error:
            log.warning("the controller %s does not take us: %s", self.controller_addr, error)

    async def count_token(self, params: dict[str, Any]) -> dict[str, Any]:
        """How many tokens a prompt has as it will be worded.

        A chat that outgrows the context counts as what is left of it once its oldest turns are
        gone, or FastChat's API server would refuse it. What does not fit at all counts as the
        whole context, with the reason.
        """
        try:
            request = await self.read({"prompt": params.get("prompt")})
        except RequestError as error:
            count = self.context_len if error.code == RequestError.CONTEXT else 0
            return {**failure(str(error), error.code), "count": count}
        return {"count": request.ids.shape[1], "error_code": 0}

    async def read(self, params: dict[str, Any]) -> AnswerRequest:
        """The request that ``params`` are, in its turn.

        Raises:
            RequestError: They are none.
        """
        return await asyncio.get_running_loop().run_in_executor(
            self._reader, read_request, params, self.model, self.wording, self.limits
        )

    async def answers(self, params: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """What FastChat calls outputs: the text so far, usage, and at the end why it ended.

        An error is the last output, with its code.
        """
        self.call_ct += 1
        try:
            self.queue.check_room()
            request = await self.read(params)
            job = self.queue.submit(request)
            told = len(request.echo)
            async for update in job.updates():
                yield self._output(update, told, request.details is not None)
                told += sum(len(piece.text) for piece in update.pieces)
        except RequestError as error:
            self.metrics.requests.labels("refused").inc()
            yield failure(str(error), error.code)
        except QueueFullError as error:
            self.metrics.requests.labels("queue_full").inc()
            yield failure(str(error), ErrorCode.ENGINE_OVERLOADED)
        except DecodingError as error:
            yield failure(str(error), ErrorCode.INTERNAL_ERROR)
        except Exception:  # a tokenizer's or a chat template's: the client is told that much
            log.exception("a request failed")
            self.metrics.requests.labels("failed").inc()
            yield failure("the request could not be read", ErrorCode.INTERNAL_ERROR)

    def _output(self, update: Update, offset: int, details: bool) -> dict[str, Any]:
        output = {
            "text": update.text,
            "error_code": 0,
            "usage": update.usage,
            "finish_reason": update.finish_reason,
            "logprobs": self._logprobs(update.pieces, offset) if details else None,
        }
        if update.figures is not None:
            output["fsd"] = update.figures
        return output

    def _logprobs(self, pieces: list[Piece], offset: int) -> dict[str, Any]:
        """As OpenAI's completions have them: of the pieces that are new."""
        found: dict[str, list[Any]] = {
            "text_offset": [],
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
        }
        for piece in pieces:
            found["text_offset"].append(offset)
            found["tokens"].append(self._token_text(piece.token))
            found["token_logprobs"].append(piece.detail.log_prob)
            top = {self._token_text(token): value for token, value in piece.detail.top}
            found["top_logprobs"].append(top or None)
            offset += len(piece.text)
        return found

    def _token_text(self, token: int) -> str:
        return self.tokenizer.decode([token])

    @torch.inference_mode()
    def embed(
        self, texts: list[str], base64: bool = False, gone: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        """Each text's features under the target: their mean, scaled to length 1.

        Args:
            base64: Vectors as little-endian float32 in base64, as OpenAI's client asks for them.
            gone: Whether nobody waits for them any more: the rest is left out.

        Raises:
            RequestError: A text has no tokens.
        """
        vectors: list[Any] = []
        count = 0
        for text in texts:
            if gone():
                break
            text = text[: most_characters(self.context_len)]
            ids = self.tokenizer(text, return_tensors="pt").input_ids[:, : self.context_len]
            if not ids.shape[1]:
                raise RequestError("a text of input has no tokens")
            count += ids.shape[1]
            model = self.model.model.base_model
            features = model(input_ids=ids.to(model.device), use_cache=False).last_hidden_state
            mean = features[0].float().mean(0)
            vector = torch.nn.functional.normalize(mean, dim=0).cpu().numpy().astype("<f4")
            vectors.append(b64encode(vector.tobytes()).decode() if base64 else vector.tolist())
        return {"embedding": vectors, "token_num": count}

    def close(self) -> None:
        """Stop decoding."""
        self._reader.shutdown(wait=False, cancel_futures=True)
        self.queue.close()


def failure(message: str, code: int) -> dict[str, Any]:
    """An output of FastChat's that tells an error."""
    return {"text": shortened(message), "error_code": int(code)}


async def while_there(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of ``work``; once the client is gone it is cancelled, and the result is None."""

    async def until_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(until_gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def worker_app(worker: FSDWorker) -> FastAPI:
    """The routes of FastChat's worker protocol, and ``/metrics`` and ``/health``."""
    app = FastAPI(title="eagle-fsd worker", docs_url=None, redoc_url=None, openapi_url=None)

    async def body(request: Request) -> dict[str, Any]:
        """The JSON object of a request, no larger than it may be."""

        most = worker.limits.max_body
        too_large = RequestError(f"the request is larger than {most} bytes")
        if announces_more(request.headers.get("content-length", ""), most):
            raise too_large

        async def whole() -> bytes:
            data = bytearray()
            async for chunk in request.stream():
                data += chunk
                if len(data) > most:
                    raise too_large
            return bytes(data)

        try:
            data = await asyncio.wait_for(whole(), BODY_SECONDS)
        except asyncio.TimeoutError:
            raise RequestError("the request did not come to its end") from None
        return read_json(data or b"{}")

    @app.exception_handler(RequestError)
    async def refused(_: Request, error: RequestError) -> Response:
        worker.metrics.requests.labels("refused").inc()
        return JSONResponse(failure(str(error), error.code), status_code=400)

    @app.exception_handler(ClientDisconnect)
    async def left(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=GONE)

    @app.exception_handler(Exception)
    async def failed(_: Request, __: Exception) -> Response:
        message = "the request failed; the worker's log says why"
        return JSONResponse(failure(message, ErrorCode.INTERNAL_ERROR), status_code=500)

    @app.post("/worker_generate_stream")
    async def generate_stream(request: Request) -> Response:
        params = await body(request)

        async def chunks() -> AsyncIterator[bytes]:
            async for output in worker.answers(params):
                yield json.dumps(output).encode() + b"\0"

        return StreamingResponse(chunks(), media_type="application/octet-stream")

    @app.post("/worker_generate")
    async def generate(request: Request) -> Response:
        params = await body(request)
        logprobs: dict[str, list[Any]] = {}

        async def last() -> dict[str, Any]:
            output: dict[str, Any] = {}
            async for output in worker.answers(params):
                for name, values in (output.get("logprobs") or {}).items():
                    logprobs.setdefault(name, []).extend(values)
            return output

        output = await while_there(request, last())
        if output is None:
            return Response(status_code=GONE)
        return JSONResponse({**output, "logprobs": logprobs or None})

    @app.post("/worker_get_embeddings")
    async def get_embeddings(request: Request) -> Response:
        params = await body(request)
        texts = params.get("input")
        texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, list) or not all(isinstance(item, str) for item in texts):
            raise RequestError("input must be a text or a list of texts", RequestError.INVALID)
        if not 0 < len(texts) <= MOST_TEXTS or not all(texts):
            raise RequestError(f"input must hold 1 to {MOST_TEXTS} texts, none empty")
        base64 = params.get("encoding_format") == "base64"
        work = worker.queue.call(lambda gone: worker.embed(texts, base64, gone))
        try:
            found = await while_there(request, work)
        except QueueFullError as error:
            return JSONResponse(failure(str(error), ErrorCode.ENGINE_OVERLOADED))
        return Response(status_code=GONE) if found is None else JSONResponse(found)

    @app.post("/worker_get_status")
    async def get_status() -> dict[str, Any]:
        return worker.get_status()

    @app.post("/count_token")
    async def count_token(request: Request) -> dict[str, Any]:
        return await worker.count_token(await body(request))

    @app.post("/worker_get_conv_template")
    async def get_conv_template() -> dict[str, Any]:
        return worker.get_conv_template()

    @app.post("/model_details")
    async def model_details() -> dict[str, int]:
        return {"context_length": worker.context_len}

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(
            worker.metrics.page(len(worker.queue)), media_type=CONTENT_TYPE_LATEST
        )

    @app.get("/health")
    async def health() -> Response:
        status = "ok" if worker.ready else "registering"
        if not worker.queue.alive:
            status = "decoding has stopped"
        answer = {"status": status, "queue": len(worker.queue)}
        return JSONResponse(answer, status_code=200 if status == "ok" else 503)

    backend = LocalBackend(
        worker.model,
        worker.wording,
        worker.limits,
        worker.model_names[0],
        worker.queue,
        worker.read,
    )
    add_page_routes(app, backend, body)
    return app
