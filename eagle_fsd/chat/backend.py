"""What generates the answers of the web page.

The page depends on the :class:`Backend` protocol only. :class:`LocalBackend` decodes in this
process; :class:`~eagle_fsd.chat.remote_backend.RemoteBackend` asks a running worker. Both take the
request parameters that FastChat sends to a worker, which are validated in one place:
:func:`eagle_fsd.chat.requests.read_request`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from eagle_fsd.chat.config import AnswerOptions, Limits
from eagle_fsd.chat.decode_queue import DecodeObserver, DecodeQueue, DecodingError, QueueFullError
from eagle_fsd.chat.request_body import RequestError
from eagle_fsd.chat.requests import read_request
from eagle_fsd.chat.session import AnswerRequest
from eagle_fsd.chat.text import Piece
from eagle_fsd.chat.wire_format import encode_chat
from eagle_fsd.model.config import AcceptanceConfig
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.utils.chat_templates import Chat, ChatTemplate

#: Most likely target tokens reported for each token.
NUM_ALTERNATIVES = 3
WARM_UP_TOKENS = 16
#: Minimum seconds between two updates: rendering every step would slow decoding down.
UPDATE_INTERVAL = 0.08
#: Seconds between empty updates while a request waits, so that disconnects are noticed.
HEARTBEAT_INTERVAL = 0.25


class BackendError(RuntimeError):
    """No answer, or only a part of one; the message is fit for the user."""


@dataclass(frozen=True)
class Token:
    """A token as the page shows it.

    Attributes:
        id: Its id.
        text: The text that it completes; may be empty.
        origin: ``"exact"``, ``"fuzzy"`` or ``"target"``.
        divergence: Divergence of target and draft at its position, in nats; None without a draft.
        probability: The target's probability of the token, in [0, 1].
        top: The most likely target tokens at its position, with their probabilities.
    """

    id: int
    text: str
    origin: str
    divergence: float | None = None
    probability: float | None = None
    top: Sequence[tuple[str, float]] = ()


@dataclass(frozen=True)
class Update:
    """The increment of a streamed answer; one without tokens and stats is a heartbeat.

    Attributes:
        tokens: The new tokens.
        stats: Statistics of the answer so far: ``tau``, ``tokens_per_second``, ``tokens``,
            ``fuzzy_tokens``, ``dropped`` (messages dropped to fit the context), ...
        finish_reason: ``"stop"`` or ``"length"`` with the last update.
    """

    tokens: Sequence[Token] = ()
    stats: Mapping[str, float] = field(default_factory=dict)
    finish_reason: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the update as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Update:
        """Rebuild an update.

        Args:
            values: What :meth:`as_dict` returned.
        """
        tokens = [Token(**item) for item in values["tokens"]]
        return cls(tokens, values["stats"], values["finish_reason"])


@dataclass(frozen=True)
class About:
    """A backend's properties.

    Attributes:
        name: Name of the pair.
        acceptance: Acceptance options of requests that set none.
        limits: Limits of requests.
    """

    name: str
    acceptance: AcceptanceConfig
    limits: Limits


class Backend(Protocol):
    """A source of answers."""

    about: About

    def stream(
        self, params: Mapping[str, Any], method: str = "fsd"
    ) -> AsyncGenerator[Update, None]:
        """Stream the answer to a request; closing the iterator cancels the decoding.

        Args:
            params: Request parameters from :func:`request_params`, validated by the backend.
            method: ``"fsd"``, or ``"ar"`` for autoregressive decoding without the drafter.

        Raises:
            BackendError: The request is invalid, or decoding failed.
        """


def request_params(
    chat: Chat, options: AnswerOptions | None = None, acceptance: AcceptanceConfig | None = None
) -> dict[str, Any]:
    """Build the parameters of a request, as a FastChat worker takes them.

    Args:
        chat: Messages, the last one from the user.
        options: Answer options; default: the worker's.
        acceptance: Acceptance options; default: the pair's.
    """
    params: dict[str, Any] = {"prompt": encode_chat(chat), "logprobs": NUM_ALTERNATIVES}
    if options is not None:
        params |= options.model_dump(exclude_none=True)
    if acceptance is not None:
        params["fsd"] = acceptance.model_dump()
    return params


class LocalBackend:
    """A pair in this process.

    Args:
        model: The pair.
        chat_template: How chats become prompts.
        limits: Limits of requests.
        name: Name of the pair on the page.
        observer: Receives the events of the queue; default: events are ignored.

    Attributes:
        queue: The queue that decodes the requests.
        reader: The thread that tokenizes: a tokenizer is not thread-safe, and a long prompt takes
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
        self.about = About(name, model.acceptance, limits)
        self.queue = DecodeQueue(model, limits.queue, limits.max_batch, observer)
        self.reader = ThreadPoolExecutor(1, "read")

    async def stream(
        self, params: Mapping[str, Any], method: str = "fsd"
    ) -> AsyncGenerator[Update, None]:
        """See :meth:`Backend.stream`."""
        pieces: list[Piece] = []
        sent = -math.inf
        try:
            self.queue.check_room()
            request = replace(await self.read(dict(params)), method=method)
            updates = self.queue.submit(request).updates(heartbeat=HEARTBEAT_INTERVAL)
            async with contextlib.aclosing(updates):
                async for update in updates:
                    if update is None:
                        yield Update()
                        continue
                    pieces += update.pieces
                    now = time.monotonic()
                    if now - sent < UPDATE_INTERVAL and update.finish_reason is None:
                        continue
                    tokens = [self._token(piece) for piece in pieces]
                    stats = {
                        **update.stats,
                        "tokens": update.usage["completion_tokens"],
                        "dropped": request.dropped,
                    }
                    yield Update(tokens, stats, update.finish_reason)
                    pieces, sent = [], now
        except (RequestError, QueueFullError, DecodingError) as error:
            raise BackendError(str(error)) from error

    async def read(self, params: dict[str, Any]) -> AnswerRequest:
        """Validate and tokenize a request, one at a time.

        Args:
            params: The request.

        Raises:
            RequestError: The request is invalid.
        """
        return await asyncio.get_running_loop().run_in_executor(
            self.reader, read_request, params, self.model, self.chat_template, self.about.limits
        )

    def _token(self, piece: Piece) -> Token:
        token = Token(piece.token, piece.text, piece.origin.name.lower())
        if piece.detail is None:
            return token
        decode = self.model.tokenizer.decode
        return replace(
            token,
            divergence=piece.detail.divergence,
            probability=math.exp(piece.detail.log_prob),
            top=[(str(decode([id_])), math.exp(value)) for id_, value in piece.detail.top],
        )

    def warm_up(self) -> None:
        """Decode a few tokens with both methods, so that one-time costs slow no answer.

        Must not be called from within an event loop.
        """
        options = AnswerOptions(max_new_tokens=WARM_UP_TOKENS)
        params = request_params([{"role": "user", "content": "Hello"}], options)

        async def decode() -> None:
            for method in ("fsd", "ar"):
                async for _ in self.stream(params, method):
                    pass

        asyncio.run(decode())

    def close(self) -> None:
        """Stop the decoding thread and the tokenizing thread."""
        self.reader.shutdown(wait=False, cancel_futures=True)
        self.queue.close()
