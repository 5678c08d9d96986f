"""What the web page asks and is told, and the pair in this process that answers it.

The page knows a :class:`Backend` alone: :class:`LocalBackend` here, or a running worker
(:mod:`eagle_fsd.chat.remote_backend`). Requests are FastChat's to a worker, so that the same reader
checks and bounds them (:func:`eagle_fsd.chat.requests.read_request`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from eagle_fsd.chat.config import AnswerOptions, Limits
from eagle_fsd.chat.decode_queue import DecodeQueue, QueueFullError
from eagle_fsd.chat.requests import CHOOSABLE, AnswerRequest, RequestError, read_request
from eagle_fsd.chat.session import Answer
from eagle_fsd.chat.text import Piece
from eagle_fsd.chat.wire_format import clean, template
from eagle_fsd.model.config import FSDSettings
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.model.prefix_cache import Conversation
from eagle_fsd.utils.chat_templates import Chat, ChatFormat

log = logging.getLogger(__name__)

#: Likeliest tokens of the target's that are told of every token.
ALTERNATIVES = 3
WARM_UP_TOKENS = 16
#: Seconds between two updates: a browser need not draw every step, and drawing slows decoding.
REFRESH = 0.08
#: Seconds between two signs of life while a request waits, so that one who left is noticed.
SIGN_OF_LIFE = 0.25


class BackendError(RuntimeError):
    """No answer, and why: fit for the page."""


@dataclass(frozen=True)
class Token:
    """What the page shows of one token.

    Attributes:
        text: What it completes; empty where it completes no character.
        origin: ``"exact"``, ``"fuzzy"`` or ``"target"``.
        divergence: Between target and draft where it stands; None where there was no draft.
        probability: The target's, from 0 to 1.
        top: The target's likeliest tokens there, with their probabilities.
    """

    id: int
    text: str
    origin: str
    divergence: float | None = None
    probability: float | None = None
    top: Sequence[tuple[str, float]] = ()


@dataclass(frozen=True)
class Update:
    """What is new of an answer; without tokens it is a sign of life.

    Attributes:
        figures: Of the answer so far: ``tau``, ``tokens_per_second``, ``tokens``,
            ``fuzzy_tokens``, ``dropped`` (messages that the context had no room for), ...; empty
            while it waits.
        finish_reason: ``"stop"`` or ``"length"`` with the last one.
    """

    tokens: Sequence[Token] = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    finish_reason: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Update:
        tokens = [Token(**item) for item in values["tokens"]]
        return cls(tokens, values["figures"], values["finish_reason"])


@dataclass(frozen=True)
class About:
    """What a backend is and grants.

    Attributes:
        settings: FSD's, where a request has none of its own.
    """

    name: str
    settings: FSDSettings
    limits: Limits


class Backend(Protocol):
    """Who answers the page."""

    about: About

    def stream(self, params: Mapping[str, Any], plain: bool = False) -> AsyncIterator[Update]:
        """The answer to a request, as it comes; closing the iterator ends the decoding.

        Args:
            params: As :func:`request` makes them; they are checked and bounded here.
            plain: Decode without the draft head.

        Raises:
            BackendError: There is no answer, or it broke off.
        """


def request(
    chat: Chat, options: Mapping[str, Any], fsd: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The parameters of a request: ``chat``, the assistant to speak next, and how to answer it."""
    conversation = template()
    conversation.messages = []
    user, assistant = conversation.roles
    for message in chat:
        role = user if message["role"] == "user" else assistant
        conversation.append_message(role, clean(message["content"]))
    conversation.append_message(assistant, None)
    params = {"prompt": conversation.get_prompt(), "logprobs": ALTERNATIVES, **options}
    return params if fsd is None else {**params, "fsd": dict(fsd)}


def choosable(settings: FSDSettings) -> dict[str, Any]:
    """Those of ``settings`` that a request may choose."""
    return {name: getattr(settings, name) for name in CHOOSABLE}


class LocalBackend:
    """A pair in this process, in the line of a :class:`DecodeQueue`.

    Args:
        name: What the page calls the pair.
        queue, read: Who decodes, and who reads requests: a worker's. Default: our own.
    """

    def __init__(
        self,
        model: EagleFSD,
        wording: ChatFormat,
        limits: Limits,
        name: str,
        queue: DecodeQueue | None = None,
        read: Callable[[dict[str, Any]], Awaitable[AnswerRequest]] | None = None,
    ) -> None:
        self.model, self.wording = model, wording
        self.about = About(name, model.settings, limits)
        # (An empty queue is false.)
        self.queue = DecodeQueue(model, limits.queue) if queue is None else queue
        self._read = read or self._read_here
        # A tokenizer is one thread's at a time; a long prompt is not to hold up the event loop.
        self._reader = ThreadPoolExecutor(1, "read")
        # The caches of the last answer, touched by the thread that decodes alone.
        self._conversation = Conversation()

    async def stream(self, params: Mapping[str, Any], plain: bool = False) -> AsyncIterator[Update]:
        """See :meth:`Backend.stream`."""
        loop = asyncio.get_running_loop()
        updates: asyncio.Queue[Update | None] = asyncio.Queue()
        begun = time.monotonic()

        def work(gone: Callable[[], bool]) -> None:
            self.queue.watch("begun", {"waited": time.monotonic() - begun})
            for update in self._answer(asked, plain, gone):
                with contextlib.suppress(RuntimeError):  # the loop is closed: its server is gone
                    loop.call_soon_threadsafe(updates.put_nowait, update)

        try:
            self.queue.check_room()
            asked = await self._read(dict(params))
        except (RequestError, QueueFullError) as error:
            raise BackendError(str(error)) from error
        done = asyncio.ensure_future(self.queue.call(work))
        done.add_done_callback(lambda _: updates.put_nowait(None))
        try:
            async for update in until_none(updates):
                yield update
            await done
        except QueueFullError as error:
            raise BackendError(str(error)) from error
        except Exception as error:
            log.exception("a request failed")
            message = " ".join(str(error).split())
            raise BackendError(f"decoding failed: {message}") from error
        finally:
            done.cancel()

    async def _read_here(self, params: dict[str, Any]) -> AnswerRequest:
        return await asyncio.get_running_loop().run_in_executor(
            self._reader, read_request, params, self.model, self.wording, self.about.limits
        )

    def _answer(
        self, asked: AnswerRequest, plain: bool, gone: Callable[[], bool]
    ) -> Iterator[Update]:
        """Runs in the thread that decodes."""
        answer = Answer(
            self.model,
            asked.ids,
            asked.options,
            asked.stop,
            asked.stop_token_ids,
            asked.settings,
            plain,
            # What plain decoding leaves in the caches lacks the head's half.
            conversation=None if plain else self._conversation,
            details=asked.details,
        )
        watch, before, now, told = self.queue.watch, 0, time.monotonic(), 0.0
        pending: list[Piece] = []
        try:
            for pieces in answer:
                pending += pieces
                seconds, now = time.monotonic() - now, time.monotonic()
                watch("step", {"seconds": seconds, "tokens": answer.new_tokens - before})
                before = answer.new_tokens
                if gone():
                    watch("cancelled", answer.figures())
                    return
                if now - told >= REFRESH or answer.finish_reason is not None:
                    yield self._update(answer, pending, asked.dropped)
                    told, pending = now, []
        except Exception:
            self._conversation = Conversation()
            watch("failed", {})
            raise
        watch("ended", {**answer.figures(), **answer.usage()})

    def _update(self, answer: Answer, pieces: Iterable[Piece], dropped: int) -> Update:
        figures = {**answer.figures(), "tokens": answer.new_tokens, "dropped": dropped}
        return Update([self._token(piece) for piece in pieces], figures, answer.finish_reason)

    def _token(self, piece: Piece) -> Token:
        detail, decode = piece.detail, self.model.tokenizer.decode
        name = piece.origin.name.lower()
        if detail is None:
            return Token(piece.token, piece.text, name)
        top = [(decode([token]), math.exp(value)) for token, value in detail.top]
        probability = math.exp(detail.log_prob)
        return Token(piece.token, piece.text, name, detail.divergence, probability, top)

    def warm_up(self) -> None:
        """Decode a few tokens both ways, so that no answer is measured with what is done once.

        Not from within an event loop: for whoever starts a server.
        """

        def work(_: Callable[[], bool]) -> None:
            ids = self.model.tokenizer("Hello", return_tensors="pt").input_ids
            for plain in (False, True):
                options = AnswerOptions(max_new_tokens=WARM_UP_TOKENS)
                for _ in Answer(self.model, ids, options, plain=plain, details=ALTERNATIVES):
                    pass

        asyncio.run(self.queue.call(work))

    def close(self) -> None:
        """Stop decoding."""
        self._reader.shutdown(wait=False, cancel_futures=True)
        self.queue.close()


async def until_none(updates: asyncio.Queue[Update | None]) -> AsyncIterator[Update]:
    """What is put in, and a sign of life wherever nothing comes for a while."""
    while True:
        try:
            update = await asyncio.wait_for(updates.get(), SIGN_OF_LIFE)
        except asyncio.TimeoutError:
            yield Update()
            continue
        if update is None:
            return
        yield update
