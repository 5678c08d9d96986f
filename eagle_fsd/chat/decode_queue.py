"""Share one model among many clients: requests wait in a queue and are decoded one at a time.

:class:`DecodeQueue` owns a decoding thread. A server's event loop submits a request and reads the
updates of the returned :class:`Job`. When a client disconnects, its job is cancelled and ends after
its current step. Batched decoding could be implemented behind the same interface.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from eagle_fsd.chat.session import Answer, AnswerRequest
from eagle_fsd.chat.text import Piece
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.model.prefix_cache import PrefixCache
from eagle_fsd.utils.text import one_line

log = logging.getLogger(__name__)

Outcome = Literal["ended", "cancelled", "failed"]
#: Work for the decoding thread; its argument returns whether the call was cancelled.
Work = Callable[[Callable[[], bool]], Any]


class QueueFullError(RuntimeError):
    """The request queue is full or closed."""


class DecodingError(RuntimeError):
    """Decoding failed; the message may be shown to the client."""


class DecodeObserver:
    """Receive the events of a queue; the methods do nothing and may be overridden.

    They are called by the decoding thread. For requests that were cancelled while they waited, the
    event loop may call :meth:`request_finished`.
    """

    def request_started(self, waited: float) -> None:
        """Called when a request is taken from the queue.

        Args:
            waited: Seconds it spent in the queue.
        """

    def step_finished(self, seconds: float, tokens: int) -> None:
        """Called when a decoding step is complete.

        Args:
            seconds: Duration of the step.
            tokens: Number of tokens that it emitted.
        """

    def request_finished(self, outcome: Outcome, stats: Mapping[str, Any]) -> None:
        """Called when a request ends, is cancelled or fails.

        Args:
            outcome: ``"ended"``, ``"cancelled"`` or ``"failed"``.
            stats: The answer's :meth:`~eagle_fsd.chat.session.Answer.stats` and, if it ended, its
                usage. Empty if the request failed or never started.
        """


@dataclass(frozen=True)
class Update:
    """The increment of a streamed answer.

    Attributes:
        text: The whole text so far.
        pieces: The new pieces.
        usage: Token counts in OpenAI's format.
        finish_reason: ``"stop"`` or ``"length"`` in the last update, else None.
        stats: The answer's statistics so far.
    """

    text: str
    pieces: list[Piece]
    usage: dict[str, int]
    finish_reason: str | None
    stats: dict[str, Any]


class Job:
    """A request that is waiting or being decoded.

    Args:
        request: The request.
        loop: The event loop that reads the updates.

    Attributes:
        cancelled: Whether the job was cancelled.
        submitted: Time of submission, from ``time.monotonic()``.
    """

    def __init__(self, request: AnswerRequest, loop: asyncio.AbstractEventLoop) -> None:
        self.request, self._loop = request, loop
        self._updates: asyncio.Queue[Update | Exception | None] = asyncio.Queue()
        self.cancelled = False
        self.submitted = time.monotonic()

    def cancel(self) -> None:
        """Cancel the request."""
        self.cancelled = True

    async def updates(self, heartbeat: float | None = None) -> AsyncGenerator[Update | None, None]:
        """Iterate over the updates of the answer; closing the iterator cancels the job.

        Args:
            heartbeat: Yield None whenever no update arrives for this many seconds; default: never.

        Raises:
            DecodingError: Decoding failed.
        """
        text = self.request.echo
        try:
            while True:
                try:
                    update = await asyncio.wait_for(self._updates.get(), heartbeat)
                except asyncio.TimeoutError:
                    yield None
                    continue
                if update is None:
                    return
                if isinstance(update, Exception):
                    raise update
                text += "".join(piece.text for piece in update.pieces)
                yield replace(update, text=text)
        finally:
            self.cancel()

    def publish(self, update: Update | Exception | None) -> None:
        """Send an update from the decoding thread to the event loop.

        Args:
            update: An update, an error, or None at the end. An update's text is left empty, because
                :meth:`updates` adds it: otherwise a slow reader would accumulate a copy per step.
        """
        try:
            self._loop.call_soon_threadsafe(self._updates.put_nowait, update)
        except RuntimeError:  # the loop is closed
            self.cancel()


class Call:
    """Other work that needs the model and waits in the same queue.

    Args:
        work: The function to run.
        loop: The event loop that awaits the result.

    Attributes:
        result: The future of the result.
        cancelled: Whether the call was cancelled.
    """

    def __init__(self, work: Work, loop: asyncio.AbstractEventLoop) -> None:
        self._work, self._loop = work, loop
        self.result: asyncio.Future[Any] = loop.create_future()
        self.cancelled = False

    def cancel(self) -> None:
        """Cancel the call and its future."""
        self.cancelled = True
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.result.cancel)

    def run(self) -> Callable[[], None]:
        """Do the work in the decoding thread; return a function that publishes its outcome."""
        try:
            value, error = self._work(lambda: self.cancelled), None
        except Exception as caught:  # reported to the caller; the queue continues
            value, error = None, caught

        def resolve() -> None:
            if self.result.cancelled():
                return
            if error is None:
                self.result.set_result(value)
            else:
                self.result.set_exception(error)

        def publish() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(resolve)

        return publish


class DecodeQueue:
    """A queue of requests, and the thread that decodes them in order of arrival.

    Args:
        model: The pair that decodes.
        max_waiting: Maximum number of waiting requests, not counting the one being decoded.
        observer: Receives the queue's events; default: events are ignored.
    """

    def __init__(
        self, model: EagleFSD, max_waiting: int, observer: DecodeObserver | None = None
    ) -> None:
        self.model, self.max_waiting = model, max_waiting
        self.observer = observer or DecodeObserver()
        self._waiting: deque[Job | Call] = deque()
        self._changed = threading.Condition()
        self._current: Job | Call | None = None
        self._closed = False
        # The KV caches of the last answer: the next turn of a chat only adds its own tokens.
        self._prefix_cache = PrefixCache()
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Return the number of requests that are waiting or being decoded."""
        with self._changed:
            return self._count_waiting() + (self._current is not None)

    @property
    def alive(self) -> bool:
        """Whether the decoding thread is running."""
        return self._thread.is_alive() and not self._closed

    def submit(self, request: AnswerRequest) -> Job:
        """Add a request; call this from the event loop that will read its updates.

        Args:
            request: The request.

        Raises:
            QueueFullError: The queue is full or closed.
        """
        job = Job(request, asyncio.get_running_loop())
        self._enqueue(job)
        return job

    async def call(self, work: Work) -> Any:
        """Do other work in the decoding thread when its turn comes, and return its result.

        Args:
            work: The function to run. Its argument is a function that returns whether the call was
                cancelled.

        Raises:
            QueueFullError: The queue is full or closed.
        """
        call = Call(work, asyncio.get_running_loop())
        self._enqueue(call)
        try:
            return await call.result
        finally:
            call.cancelled = True

    def check_room(self) -> None:
        """Check that the queue has room for one more request.

        Raises:
            QueueFullError: The queue is full or closed.
        """
        with self._changed:
            if self._closed:
                raise QueueFullError("the server is shutting down")
            # While nothing is being decoded, the first request in the queue is about to start.
            unfinished = self._count_waiting() + (self._current is not None)
            if unfinished > self.max_waiting:
                raise QueueFullError(f"{self.max_waiting} requests are waiting; try again later")

    def close(self, timeout: float = 5.0) -> None:
        """Stop serving; the request being decoded is cancelled after its current step.

        Args:
            timeout: Seconds to wait for that step.
        """
        with self._changed:
            self._closed = True
            for item in self._waiting:
                item.cancel()
            if self._current is not None:
                self._current.cancel()
            self._changed.notify()
        self._thread.join(timeout)

    def _count_waiting(self) -> int:
        return sum(not item.cancelled for item in self._waiting)

    def _enqueue(self, item: Job | Call) -> None:
        with self._changed:
            self.check_room()
            # Cancelled requests must not pile up behind a long answer.
            kept = deque(other for other in self._waiting if not other.cancelled)
            for other in self._waiting:
                if other.cancelled:
                    self._report_cancelled(other)
            self._waiting = kept
            self._waiting.append(item)
            self._changed.notify()

    def _next(self) -> Job | Call | None:
        """Wait for the next request; None once the queue is closed."""
        with self._changed:
            while True:
                while self._waiting:
                    item = self._waiting.popleft()
                    if not item.cancelled:
                        self._current = item
                        return item
                    self._report_cancelled(item)
                if self._closed:
                    return None
                self._changed.wait()

    def _report_cancelled(self, item: Job | Call) -> None:
        """Report a request that was cancelled while it waited."""
        if isinstance(item, Job):
            self.observer.request_finished("cancelled", {})

    def _run(self) -> None:
        while (item := self._next()) is not None:
            publish = item.run() if isinstance(item, Call) else self._decode(item)
            with self._changed:
                self._current = None
            publish()  # only now, so that a client that sees the end can submit again

    def _decode(self, job: Job) -> Callable[[], None]:
        """Decode a request; return a function that publishes its end."""
        end: DecodingError | None = None
        try:
            self._answer(job)
        except Exception as error:  # of any kind: the next request must be served
            log.exception("a request failed")
            self._prefix_cache = PrefixCache()
            end = DecodingError(f"decoding failed: {one_line(error)}")
            self.observer.request_finished("failed", {})
        return lambda: job.publish(end)

    def _answer(self, job: Job) -> None:
        self.observer.request_started(time.monotonic() - job.submitted)
        # Without the draft head only the target's half of the caches would be kept up to date.
        cache = self._prefix_cache if job.request.method == "fsd" else None
        answer = Answer(self.model, job.request, cache)
        step_began, tokens = time.monotonic(), 0
        for pieces in answer:
            now = time.monotonic()
            self.observer.step_finished(now - step_began, answer.new_tokens - tokens)
            step_began, tokens = now, answer.new_tokens
            if job.cancelled:
                self.observer.request_finished("cancelled", answer.stats())
                return
            job.publish(Update("", pieces, answer.usage(), answer.finish_reason, answer.stats()))
        self.observer.request_finished("ended", {**answer.stats(), **answer.usage()})
