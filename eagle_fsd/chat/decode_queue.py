"""One model, many clients: requests wait in line and are decoded one at a time.

A thread of its own decodes; what it says goes to each request's :class:`Job`, which the server's
event loop reads. A client that leaves cancels its job, and the next step does not happen. This is
the seam behind which batches of requests can be decoded some day.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

from eagle_fsd.chat.requests import AnswerRequest
from eagle_fsd.chat.session import Answer
from eagle_fsd.chat.text import Piece
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.model.prefix_cache import Conversation

log = logging.getLogger(__name__)


class QueueFullError(RuntimeError):
    """As many requests are waiting as may."""


class DecodingError(RuntimeError):
    """Decoding failed; the message is fit for the client."""


@dataclass(frozen=True)
class Update:
    """What is new of an answer.

    Attributes:
        text: All of it so far. pieces: What is new in it.
        figures: How it was decoded, with the last update only.
    """

    text: str
    pieces: list[Piece]
    usage: dict[str, int]
    finish_reason: str | None
    figures: dict[str, Any] | None = None


class Job:
    """A request in line, or being answered: iterate for its updates, or cancel it."""

    def __init__(self, request: AnswerRequest, loop: asyncio.AbstractEventLoop) -> None:
        self.request, self._loop = request, loop
        self._updates: asyncio.Queue[Update | Exception | None] = asyncio.Queue()
        self.cancelled = False
        self.begun = time.monotonic()

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self.cancelled = True

    async def updates(self) -> AsyncIterator[Update]:
        """Until the answer is complete; leaving early cancels.

        Raises:
            DecodingError: It failed.
        """
        said = self.request.echo
        try:
            while (update := await self._updates.get()) is not None:
                if isinstance(update, Exception):
                    raise update
                said += "".join(piece.text for piece in update.pieces)
                yield replace(update, text=said)
        finally:
            self.cancel()

    def tell(self, update: Update | Exception | None) -> None:
        """Called by the thread that decodes.

        The text is put together where it is read: a client that stops reading is not to hold a
        copy of it for every step.
        """
        try:
            self._loop.call_soon_threadsafe(self._updates.put_nowait, update)
        except RuntimeError:  # the loop is closed: its server is gone
            self.cancel()


class Call:
    """Other work that needs the model, in the same line."""

    def __init__(
        self, work: Callable[[Callable[[], bool]], Any], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.work, self._loop = work, loop
        self.result: asyncio.Future[Any] = loop.create_future()
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.result.cancel)

    def run(self) -> Callable[[], None]:
        """Called by the thread that decodes; what it returns tells the outcome."""
        try:
            found, failure = self.work(lambda: self.cancelled), None
        except Exception as error:  # the client's, not the line's
            found, failure = None, error
        return lambda: self.tell(found, failure)

    def tell(self, found: Any, failure: Exception | None) -> None:
        """Called by the thread that decodes."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: its server is gone
            self._loop.call_soon_threadsafe(self._tell, found, failure)

    def _tell(self, found: Any, failure: Exception | None) -> None:
        if self.result.cancelled():
            return
        if failure is None:
            self.result.set_result(found)
        else:
            self.result.set_exception(failure)


class DecodeQueue:
    """The line of requests, and the thread that answers them in the order they came.

    Args:
        waiting: How many may wait beside the one that is being answered.
        watch: Told of every step's seconds and tokens, and of every answer that ended.
    """

    def __init__(
        self,
        model: EagleFSD,
        waiting: int,
        watch: Callable[[str, dict[str, Any]], None] = lambda *_: None,
    ) -> None:
        self.model, self.waiting, self.watch = model, waiting, watch
        self._line: deque[Job | Call] = deque()
        self._changed = threading.Condition()
        self._current: Job | Call | None = None
        self._closed = False
        # The caches of the last answer: a chat that goes on pays for its new tokens only.
        self._conversation = Conversation()
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Requests waiting or being answered."""
        with self._changed:
            return self._in_line() + (self._current is not None)

    @property
    def alive(self) -> bool:
        """Whether the thread that decodes is there."""
        return self._thread.is_alive() and not self._closed

    def _in_line(self) -> int:
        return sum(not job.cancelled for job in self._line)

    def submit(self, request: AnswerRequest) -> Job:
        """Put a request in line; call from the event loop that will read its updates.

        Raises:
            QueueFullError: Too many wait.
        """
        job = Job(request, asyncio.get_running_loop())
        self._enqueue(job)
        return job

    async def call(self, work: Callable[[Callable[[], bool]], Any]) -> Any:
        """The result of ``work``, done in its turn by the thread that decodes.

        Args:
            work: Is handed a function that says whether nobody waits for it any more.

        Raises:
            QueueFullError: Too many wait.
        """
        call = Call(work, asyncio.get_running_loop())
        self._enqueue(call)
        try:
            return await call.result
        finally:
            call.cancelled = True

    def check_room(self) -> None:
        """Whether one more may wait: to know before work is spent on it.

        Raises:
            QueueFullError: None may.
        """
        with self._changed:
            if self._closed:
                raise QueueFullError("the server is shutting down")
            # While none is decoded, the first in line is about to be: it is not one that waits.
            if self._in_line() + (self._current is not None) > self.waiting:
                raise QueueFullError(f"{self.waiting} requests are waiting: try again later")

    def _enqueue(self, item: Job | Call) -> None:
        with self._changed:
            self.check_room()
            # Those that left are not to pile up behind a long answer.
            line, self._line = self._line, deque()
            for waiting in line:
                if waiting.cancelled:
                    self._book_left(waiting)
                else:
                    self._line.append(waiting)
            self._line.append(item)
            self._changed.notify()

    def close(self, timeout: float = 5.0) -> None:
        """Answer nobody any more; what is being decoded ends with its step."""
        with self._changed:
            self._closed = True
            for job in self._line:
                job.cancel()
            if self._current is not None:
                self._current.cancel()
            self._changed.notify()
        self._thread.join(timeout)

    def _next(self) -> Job | Call | None:
        with self._changed:
            while True:
                while self._line:
                    job = self._line.popleft()
                    if not job.cancelled:
                        self._current = job
                        return job
                    self._book_left(job)
                if self._closed:
                    return None
                self._changed.wait()

    def _book_left(self, item: Job | Call) -> None:
        """One that left before it was its turn."""
        if isinstance(item, Job):
            self.watch("cancelled", {})

    def _run(self) -> None:
        while (job := self._next()) is not None:
            tell = job.run() if isinstance(job, Call) else self._outcome(job)
            with self._changed:
                self._current = None
            tell()  # now that its place is free: whoever is told may count on that

    def _outcome(self, job: Job) -> Callable[[], None]:
        """Answer a request; what is returned tells its end."""
        end: DecodingError | None = None
        try:
            self._answer(job)
        except Exception as error:  # whatever it is, the next client is to be served
            log.exception("a request failed")
            self._conversation = Conversation()
            end = DecodingError(f"decoding failed: {' '.join(str(error).split())}")
            self.watch("failed", {})
        return lambda: job.tell(end)

    def _answer(self, job: Job) -> None:
        request = job.request
        self.watch("begun", {"waited": time.monotonic() - job.begun})
        answer = Answer(
            self.model,
            request.ids,
            request.options,
            request.stop,
            request.stop_token_ids,
            request.settings,
            conversation=self._conversation,
            details=request.details,
        )
        begun, before = time.monotonic(), 0
        for pieces in answer:
            now = time.monotonic()
            self.watch("step", {"seconds": now - begun, "tokens": answer.new_tokens - before})
            begun, before = now, answer.new_tokens
            if job.cancelled:
                self.watch("cancelled", answer.figures())
                return
            last = answer.finish_reason is not None
            figures = answer.figures() if last else None
            job.tell(Update("", pieces, answer.usage(), answer.finish_reason, figures))
        self.watch("ended", {**answer.figures(), **answer.usage()})
