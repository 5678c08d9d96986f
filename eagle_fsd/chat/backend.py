"""Generate the answers of the API, the FastChat worker and the web page.

:class:`LocalBackend` decodes in this process. All servers use :meth:`LocalBackend.answer`, which
takes the parameters that :func:`eagle_fsd.chat.requests.read_request` validates. The web page
depends on the :class:`Backend` protocol only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch

from eagle_fsd.chat.config import AnswerOptions, Limits
from eagle_fsd.chat.decode_queue import (
    DecodeObserver,
    DecodeQueue,
    DecodingError,
    JobUpdate,
    QueueFullError,
)
from eagle_fsd.chat.request_body import RequestError
from eagle_fsd.chat.requests import default_acceptance, read_acceptance, read_request
from eagle_fsd.chat.session import (
    AnswerRequest,
    answer_stats,
    max_chars,
    score_prompt,
    token_usage,
)
from eagle_fsd.chat.text import Piece, TokenDecoder
from eagle_fsd.model.config import AcceptanceConfig
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.model.stats import DecodeStats
from eagle_fsd.model.step import TokenDetail
from eagle_fsd.model.verify import Origin
from eagle_fsd.utils.chat_templates import Chat, ChatTemplate, encode_prompt

log = logging.getLogger(__name__)

#: Most likely target tokens that the page shows for each token.
NUM_ALTERNATIVES = 3
#: Minimum seconds between two updates of the page: rendering every step would slow decoding down.
UPDATE_INTERVAL = 0.08
#: Seconds between empty updates while a request waits, so that the page notices disconnects.
HEARTBEAT_INTERVAL = 0.25


class BackendError(RuntimeError):
    """No answer, or only a part of one; the message is fit for the user."""


@dataclass(frozen=True)
class Token:
    """A token as the page shows it.

    ``text`` is what the token completes and may be empty; ``divergence`` is in nats, None without
    a draft; ``probability`` is the target's; ``top`` are the target's most likely tokens with their
    probabilities.
    """

    id: int
    text: str
    origin: str
    divergence: float | None = None
    probability: float | None = None
    top: Sequence[tuple[str, float]] = ()


@dataclass(frozen=True)
class Update:
    """The increment of an answer on the page; one without tokens and stats is a heartbeat.

    ``stats`` are those of the answer so far: ``tau``, ``tokens_per_second``, ``tokens``,
    ``fuzzy_tokens``, ``dropped_messages`` (to fit the context), ...
    """

    tokens: Sequence[Token] = ()
    stats: Mapping[str, float] = field(default_factory=dict)
    finish_reason: str | None = None


@dataclass(frozen=True)
class About:
    """A backend's name, default acceptance options, and limits of requests."""

    name: str
    acceptance: AcceptanceConfig
    limits: Limits


class Backend(Protocol):
    """A source of answers for the page."""

    about: About

    def stream(
        self, params: Mapping[str, Any], client: str = "", method: str = "fsd"
    ) -> AsyncGenerator[Update, None]:
        """Stream an answer; closing the iterator cancels the decoding.

        ``method`` is ``"fsd"``, or ``"ar"`` to decode without the drafter. Raises BackendError.
        """


def request_params(
    chat: Chat, options: AnswerOptions | None = None, acceptance: AcceptanceConfig | None = None
) -> dict[str, Any]:
    """Build the parameters of a request of the page; defaults are the server's."""
    params: dict[str, Any] = {"messages": list(chat), "logprobs": NUM_ALTERNATIVES}
    params["truncation"] = "auto"  # the page says how many messages were dropped
    if options is not None:
        params |= options.model_dump(exclude_none=True)
    if acceptance is not None:
        params["fsd"] = acceptance.model_dump()
    return params


class LocalBackend:
    """A pair in this process.

    A thread of its own tokenizes requests: a tokenizer is not thread-safe, and a long prompt takes
    seconds, while other answers must continue to stream.
    """

    def __init__(
        self,
        model: EagleFSD,
        chat_template: ChatTemplate,
        limits: Limits,
        name: str,
        observer: DecodeObserver | None = None,
    ) -> None:
        self.model, self.chat_template = model, chat_template
        self.about = About(name, default_acceptance(model, limits), limits)
        self.queue = DecodeQueue(
            model, limits.queue, limits.max_batch, observer, limits.stall_timeout
        )
        self.reader = ThreadPoolExecutor(1, "read")
        self.tokens = TokenDecoder(model.tokenizer)

    async def answer(
        self,
        params: Mapping[str, Any],
        client: str = "",
        method: str = "fsd",
        heartbeat: float | None = None,
    ) -> AsyncGenerator[tuple[AnswerRequest, JobUpdate | None], None]:
        """Stream an answer; with ``echo``, the first update holds the prompt.

        Yields the validated request with each update, which is None whenever there is no other for
        ``heartbeat`` seconds. Raises RequestError, QueueFullError or DecodingError.
        """
        finished = self.queue.observer.request_finished
        try:
            self.queue.check_room()
            request = replace(await self.read(params), client=client, method=method)
            if request.echo_texts:
                yield request, await self._echo(request)
            if request.prompt_only:
                finished("ended", {**answer_stats(DecodeStats.empty(1)), **_prompt_usage(request)})
                return
            async with contextlib.aclosing(self.queue.submit(request).updates(heartbeat)) as found:
                async for update in found:
                    yield request, update
        except RequestError:
            finished("refused", {})
            raise
        except QueueFullError:
            finished("queue_full", {})
            raise
        except DecodingError:
            raise
        except Exception as error:  # from a tokenizer, a chat template or the scoring of a prompt
            log.exception("a request failed")
            finished("failed", {})
            raise DecodingError("the request could not be processed") from error

    async def _echo(self, request: AnswerRequest) -> JobUpdate:
        """Return the prompt as an update, scored in the decoding queue if requested."""
        details: Sequence[TokenDetail | None] = [None] * request.ids.shape[1]
        if request.details is not None:
            count = request.details
            scored = await self.queue.call(
                lambda cancelled: score_prompt(self.model, request.ids, count, cancelled)
            )
            details = [None, *scored]
        tokens = zip(request.echo_texts, request.ids[0].tolist(), details, strict=True)
        return JobUpdate(
            [Piece(text, token, Origin.PADDING, detail) for text, token, detail in tokens],
            _prompt_usage(request),
            "length" if request.prompt_only else None,
            answer_stats(DecodeStats.empty(1)),
        )

    async def stream(
        self, params: Mapping[str, Any], client: str = "", method: str = "fsd"
    ) -> AsyncGenerator[Update, None]:
        """See :meth:`Backend.stream`."""
        pieces: list[Piece] = []
        sent = -math.inf
        try:
            answer = self.answer(params, client, method, HEARTBEAT_INTERVAL)
            async with contextlib.aclosing(answer) as updates:
                async for _, update in updates:
                    if update is None:
                        yield Update()
                        continue
                    pieces += update.pieces
                    now = time.monotonic()
                    if now - sent < UPDATE_INTERVAL and update.finish_reason is None:
                        continue
                    tokens = [self._token(piece) for piece in pieces]
                    stats = {**update.stats, "tokens": update.usage["completion_tokens"]}
                    yield Update(tokens, stats, update.finish_reason)
                    pieces, sent = [], now
        except (RequestError, QueueFullError, DecodingError) as error:
            raise BackendError(str(error)) from error

    def acceptance(self, fsd: Mapping[str, Any], lossless: bool) -> AcceptanceConfig:
        """Return the acceptance options of a request; raises RequestError."""
        return read_acceptance(fsd, lossless, self.model, self.about.limits)

    async def read(self, params: Mapping[str, Any]) -> AnswerRequest:
        """Validate and tokenize a request, one at a time; raises RequestError."""
        return await asyncio.get_running_loop().run_in_executor(
            self.reader, read_request, params, self.model, self.chat_template, self.about.limits
        )

    async def tokenize(self, prompt: str, chat: Chat | None, special: bool) -> list[int]:
        """Tokenize a raw prompt, with special tokens or without, or a chat; raises RequestError."""

        def encode() -> list[int]:
            tokenizer = self.model.tokenizer
            if chat is None:
                tokens: list[int] = tokenizer(prompt, add_special_tokens=special).input_ids
                return tokens
            try:
                return list(encode_prompt(chat, tokenizer, self.chat_template)[0].tolist())
            except ValueError as error:  # the template rejects the chat
                raise RequestError(str(error), RequestError.INVALID) from error

        return await asyncio.get_running_loop().run_in_executor(self.reader, encode)

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """Decode tokens, special ones included; raises RequestError."""
        last = self.model.target.vocab_size - 1
        if not all(0 <= token <= last for token in tokens):
            raise RequestError(f"tokens must be token ids in [0, {last}]")
        decode = partial(self.model.tokenizer.decode, list(tokens))
        return str(await asyncio.get_running_loop().run_in_executor(self.reader, decode))

    async def embed(self, texts: Sequence[str]) -> tuple[list[list[float]], int]:
        """Embed texts as the mean of the target's features, scaled to length 1.

        Returns a vector for each text, truncated to the context, and the number of tokens. Answers
        take a step between two texts. Raises RequestError for a text without tokens, and
        QueueFullError.
        """
        vectors: list[list[float]] = []
        count = 0
        for text in texts:
            vector, tokens = await self.queue.call(partial(self._embed, text), bool(vectors))
            vectors.append(vector)
            count += tokens
        return vectors, count

    @torch.inference_mode()
    def _embed(self, text: str, _cancelled: Callable[[], bool]) -> tuple[list[float], int]:
        context, base = self.model.target.context_length, self.model.model.base_model
        encoded = self.model.tokenizer(text[: max_chars(context)], return_tensors="pt")
        ids = encoded.input_ids[:, :context]
        if not ids.shape[1]:
            raise RequestError("input must not contain texts without tokens")
        features = base(input_ids=ids.to(base.device), use_cache=False).last_hidden_state
        mean = features[0].float().mean(0)
        return torch.nn.functional.normalize(mean, dim=0).cpu().tolist(), ids.shape[1]

    def _token(self, piece: Piece) -> Token:
        token = Token(piece.token, piece.text, piece.origin.name.lower())
        if piece.detail is None:
            return token
        return replace(
            token,
            divergence=piece.detail.divergence,
            probability=math.exp(piece.detail.log_prob),
            top=[(self.tokens.text(id_), math.exp(value)) for id_, value in piece.detail.top],
        )

    def close(self) -> None:
        """Stop the decoding thread and the tokenizing thread."""
        self.reader.shutdown(wait=False, cancel_futures=True)
        self.queue.close()


def _prompt_usage(request: AnswerRequest) -> dict[str, int]:
    return token_usage(request.ids.shape[1], 0)
