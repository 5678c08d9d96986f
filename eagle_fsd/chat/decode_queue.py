"""Share one model among many clients: requests wait in a queue and are decoded in one batch.

:class:`DecodeQueue` owns a decoding thread. A server's event loop submits a request and reads the
updates of the returned :class:`Job`. Requests join the running batch as soon as it has a free row,
and leave it when they end. When a client disconnects, its job is cancelled and leaves the batch
before the next step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from eagle_fsd.chat.config import Limits
from eagle_fsd.chat.request_body import RequestError, UnansweredError
from eagle_fsd.chat.serve.metrics import Outcome, ServerMetrics
from eagle_fsd.chat.session import AnswerRequest, ChatAnswer
from eagle_fsd.chat.text import Piece
from eagle_fsd.model.batch import StreamChunk
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.model.request import BROKEN_LOGITS, Answer
from eagle_fsd.utils.errors import is_out_of_memory
from eagle_fsd.utils.text import one_line

log = logging.getLogger(__name__)

#: Number of failures in a row after which requests are refused.
MAX_FAILURES = 3
#: Error message for requests after that, or while decoding has stalled.
STOPPED = "decoding has stopped; the server's log says why"
#: Work for the decoding thread; its argument returns whether the call was cancelled.
Work = Callable[[Callable[[], bool]], Any]
Task = TypeVar("Task")


class QueueFullError(UnansweredError):
    """The request queue is full or closed."""

    status, code = 429, 42903


class ClosedError(QueueFullError):
    """The server is shutting down, or decoding has stopped."""

    status = 503


class DecodingError(UnansweredError):
    """Decoding, or preparing a request for it, failed."""


class AbortedError(DecodingError):
    """The server stopped, or decoding stalled, before the answer was complete."""

    status = 503


@dataclass(frozen=True)
class JobUpdate:
    """The increment of a streamed answer; ``finish_reason`` is None except in the last."""

    pieces: Sequence[Piece]
    usage: dict[str, int]
    finish_reason: str | None
    stats: dict[str, Any]

    @property
    def text(self) -> str:
        """The new text."""
        return "".join(piece.text for piece in self.pieces)


class Job(Generic[Task]):
    """A request for an answer, or other work that needs the model, in the queue or in progress.

    The event loop in which it is submitted reads its updates.
    """

    def __init__(self, client: str, task: Task) -> None:
        self.client, self.task = client, task
        self._loop = asyncio.get_running_loop()
        self._updates: asyncio.Queue[Any] = asyncio.Queue()
        self.cancelled = False
        self.outcome: Outcome = "cancelled"  # what metrics count if it is cancelled
        self.submitted = time.monotonic()

    def cancel(self) -> None:
        """Cancel the job."""
        self.cancelled = True

    def fail(self, error: Exception) -> None:
        """Cancel the job with an error."""
        self.outcome = "failed"
        self.publish(error)
        self.cancel()

    async def updates(self) -> AsyncGenerator[Any, None]:
        """Iterate over the updates of the answer, or the result of other work.

        Closing the iterator cancels the job. Raises DecodingError, QueueFullError if another
        request took the job's place, RequestError if the request's own options leave no token, or
        the error of other work.
        """
        try:
            while True:
                update = await self._updates.get()
                if update is None:
                    return
                if isinstance(update, Exception):
                    raise update
                yield update
        finally:
            self.cancel()

    def publish(self, update: Any) -> None:
        """Send an update, a result, an error, or None at the end, from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._updates.put_nowait, update)
        except RuntimeError:  # the loop is closed
            self.cancel()


@dataclass
class _Row:
    """A job that is being decoded, and when its first tokens had been decoded."""

    job: Job[AnswerRequest]
    answer: ChatAnswer
    began: float = 0.0
    first_tokens: int = 0

    def seconds_per_token(self) -> float | None:
        """Return the seconds per token since the first ones; None if there are no others."""
        later = self.answer.new_tokens - self.first_tokens
        return (time.monotonic() - self.began) / later if later else None


class DecodeQueue:
    """A queue of requests, and the thread that decodes them.

    A free row of the batch is given to the client that has the fewest rows; among these, to the one
    that has waited longest without one of its requests starting; and to that client's requests in
    order of arrival. At most ``max_waiting`` requests, beside ``admitted`` ones, wait while
    ``max_batch`` are being decoded; a further one takes the place of the newest one of a client
    with more requests, or is refused. A step or call that takes more than ``stall_timeout`` seconds
    has stalled. Events are counted in ``metrics``.
    """

    def __init__(
        self, model: EagleFSD, limits: Limits, metrics: ServerMetrics | None = None
    ) -> None:
        self.model, self.metrics = model, metrics or ServerMetrics()
        self.max_waiting, self.max_batch = limits.queue, limits.max_batch
        self.stall_timeout = limits.stall_timeout
        self._changed = threading.Condition()
        self._waiting: list[Job[AnswerRequest]] = []
        self._calls: list[Job[Any]] = []  # their tasks are Work
        self._active: set[Job[Any]] = set()  # taken from these lists and not finished
        self._started: dict[str, float] = {}  # when waiting clients' last requests started
        self._closed = self._draining = False
        self._working_since: float | None = None  # when the current step or call began
        self._failures = 0  # in a row, since the last step that succeeded
        # Only the decoding thread changes these. The batch keeps the caches of answers that ended:
        # the next turn of a chat only adds its own tokens.
        self._batch = model.batch(self.max_batch)
        self._rows: dict[Answer, _Row] = {}
        self._ended = 0  # answers
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Return the number of requests that are waiting or being decoded."""
        with self._changed:
            return len(self._present())

    @property
    def rows(self) -> int:
        """Number of requests that are being decoded."""
        return self._batch.rows

    @property
    def alive(self) -> bool:
        """Whether requests are being decoded, or would be."""
        return not (self._closed or self.failed or self.stalled)

    @property
    def ready(self) -> bool:
        """Whether further requests are accepted, if there is room."""
        return self.alive and not self._draining

    @property
    def failed(self) -> bool:
        """Whether decoding has failed too often in a row, or its thread has ended."""
        return self._failures >= MAX_FAILURES or not (self._thread.is_alive() or self._closed)

    @property
    def stalled(self) -> bool:
        """Whether the current step or call takes too long."""
        began = self._working_since
        return began is not None and time.monotonic() - began > self.stall_timeout

    def submit(self, request: AnswerRequest) -> Job[AnswerRequest]:
        """Add a request, in the event loop that will read its updates; raises QueueFullError."""
        job = Job(request.client, request)
        with self._changed:
            if self._closed or not request.admitted:
                self._admit(job.client)
            self._waiting.append(job)
            self._changed.notify()
        return job

    async def call(self, work: Work, client: str = "", admitted: bool = False) -> Any:
        """Do other work in the decoding thread between two steps, and return its result.

        The argument of ``work`` returns whether the call was cancelled; the result is not None.
        ``admitted`` work continues a request, so a full queue does not refuse it. Raises
        QueueFullError, AbortedError, or the error of the work itself.
        """
        call = Job(client, work)
        with self._changed:
            if self._closed or not admitted:
                self._admit(client)
            self._calls.append(call)
            self._changed.notify()
        async with contextlib.aclosing(call.updates()) as results:
            async for result in results:
                return result
        raise ClosedError("the server is shutting down")

    def check_room(self, client: str) -> None:
        """Raise QueueFullError if a client's next request would be refused."""
        with self._changed:
            if self._closed or self._draining:
                raise ClosedError("the server is shutting down")
            if self.failed or self.stalled:
                raise ClosedError(STOPPED)
            if self._full() and self._replaceable(client) is None:
                raise QueueFullError("the request queue is full; try again later")

    def drain(self) -> None:
        """Accept no further requests."""
        self._draining = True

    def abort(self, message: str) -> None:
        """End all requests with an AbortedError."""
        with self._changed:
            for job in self._present():
                if not job.cancelled:
                    job.fail(AbortedError(message))

    def close(self, timeout: float = 5.0) -> None:
        """Cancel all requests, and wait up to ``timeout`` seconds for the current step to end."""
        with self._changed:
            self._closed = True
            for job in (*self._waiting, *self._calls, *self._active):
                job.cancel()
            self._changed.notify()
        self._thread.join(timeout)

    def _queued(self) -> list[Job[Any]]:
        """List the requests that are waiting."""
        return [job for job in (*self._waiting, *self._calls) if not job.cancelled]

    def _present(self) -> list[Job[Any]]:
        """List the requests that are waiting or being decoded."""
        return [*self._queued(), *self._active]

    def _full(self) -> bool:
        # The first requests in the queue are about to start while there are free rows.
        return len(self._present()) >= self.max_waiting + self.max_batch

    def _replaceable(self, client: str) -> Job[Any] | None:
        """Return the waiting request that one of ``client`` replaces, if any."""
        counts = Counter(item.client for item in self._present())
        newest = max(
            self._queued(), key=lambda item: (counts[item.client], item.submitted), default=None
        )
        return newest if newest and counts[newest.client] > counts[client] + 1 else None

    def _admit(self, client: str) -> None:
        """Make room for a request, or raise QueueFullError; drop cancelled ones."""
        self.check_room(client)
        self._drop_cancelled()
        if self._full() and (item := self._replaceable(client)) is not None:
            message = "a client with fewer requests took this place in the queue; try again later"
            item.fail(QueueFullError(message))
            # Its caller counts a job that was replaced, and _drop_cancelled would count it again.
            self._waiting = [job for job in self._waiting if job is not item]
            self._calls = [call for call in self._calls if call is not item]

    def _drop_cancelled(self) -> None:
        """Remove requests that were cancelled while they waited."""
        for job in (*self._waiting, *self._calls):
            if job.cancelled:
                self.metrics.request_finished(job.outcome, {})
                job.publish(None)
        self._waiting = [job for job in self._waiting if not job.cancelled]
        self._calls = [call for call in self._calls if not call.cancelled]

    # -- in the decoding thread ------------------------------------------------------------------

    def _run(self) -> None:
        while self._wait():
            try:
                self._remove_cancelled()
                self._run_call()
                self._fill()
                self._step()
            except Exception as error:  # any error: the next requests must be served
                self._restart(error)
        self._remove_cancelled()

    def _wait(self) -> bool:
        """Wait for work; return whether the queue is open."""
        with self._changed:
            self._drop_cancelled()
            while not (self._waiting or self._calls or self._rows or self._closed):
                self._changed.wait()
                self._drop_cancelled()
            return not self._closed

    def _fill(self) -> None:
        """Give the free rows of the batch to waiting requests."""
        if not self._rows:
            self._batch.max_rows = self.max_batch  # it is lower after a shortage of memory
        while self._batch.free and (job := self._next_job()) is not None:
            self._start(job)

    def _next_job(self) -> Job[AnswerRequest] | None:
        """Take the next request from the queue; None if there is none."""
        with self._changed:
            self._drop_cancelled()
            if not self._waiting:
                return None
            rows = Counter(row.job.client for row in self._rows.values())
            started = {job.client: self._started.get(job.client, 0.0) for job in self._waiting}
            job = min(
                self._waiting,
                key=lambda job: (rows[job.client], max(job.submitted, started[job.client])),
            )
            self._waiting.remove(job)
            self._active.add(job)
            self._started = {**started, job.client: time.monotonic()}
            return job

    def _run_call(self) -> None:
        """Do the work of the first call."""
        with self._changed:
            self._drop_cancelled()
            if not self._calls:
                return
            call = self._calls.pop(0)
            self._active.add(call)
        self._working_since = time.monotonic()
        try:
            result = call.task(lambda: call.cancelled)
        except Exception as error:  # reported to the caller; the queue continues
            result = error
        self._working_since = None
        self._release(call)
        if call.cancelled:
            self.metrics.request_finished(call.outcome, {})
        call.publish(result)  # only now, so that a client that sees the end can submit again

    def _start(self, job: Job[AnswerRequest]) -> None:
        """Add a request to the batch."""
        self.metrics.wait_seconds.observe(time.monotonic() - job.submitted)
        try:
            answer = ChatAnswer(self.model, job.task)
            self._rows[answer.join(self._batch)] = _Row(job, answer)
        except Exception as error:  # any error: other requests continue
            log.exception("a request failed")
            self._count_failure(error)
            self._fail(job, error)

    def _count_failure(self, error: Exception) -> None:
        """Count an error that the device may repeat, unless it only lacks memory."""
        if isinstance(error, RuntimeError) and not is_out_of_memory(error):
            self._failures += 1

    def _step(self) -> None:
        """Take a step with all rows, and publish what it emitted."""
        if not self._rows:
            return
        began = self._working_since = time.monotonic()
        try:
            found = self._batch.step()
            self._failures = 0
        finally:
            self._working_since = None
        if found:
            self.metrics.step_seconds.observe(time.monotonic() - began)
        for answer, chunk in found:
            self._publish(answer, chunk)

    def _restart(self, error: Exception) -> None:
        """End all requests that are being decoded with an error, and start an empty batch."""
        log.exception("%d requests failed", len(self._rows))
        self._count_failure(error)
        self._batch = self.model.batch(self.max_batch)
        jobs = [row.job for row in self._rows.values()]
        self._rows.clear()
        for job in jobs:
            self._fail(job, error)

    def _publish(self, decoded: Answer, chunk: StreamChunk) -> None:
        """Send the tokens of a row to its client."""
        row = self._rows[decoded]
        job, answer = row.job, row.answer
        if isinstance(decoded.error, FloatingPointError) and str(decoded.error) != BROKEN_LOGITS:
            self._remove(decoded)  # its own options mask all tokens
            self._release(job)
            job.publish(RequestError(str(decoded.error)))
            return
        try:
            if decoded.error is not None:
                raise decoded.error
            pieces = answer.push(chunk)
        except Exception as error:  # any error: other requests continue
            log.exception("a request failed")
            self._remove(decoded)
            self._fail(job, error)
            return
        if not row.first_tokens:
            row.began, row.first_tokens = time.monotonic(), answer.new_tokens
            self.metrics.first_token_seconds.observe(row.began - job.submitted)
        if job.cancelled:
            return
        stats, usage = answer.stats(), answer.usage()
        if answer.finish_reason is not None:
            self._remove(decoded)
            self._release(job)  # first, so that a client that sees the end can submit again
            self._ended += 1
            if self._ended % self.max_batch == 0:  # a shortage of memory may have passed
                self._batch.max_rows = min(self.max_batch, self._batch.max_rows + 1)
            self.metrics.request_finished("ended", {**stats, **usage}, row.seconds_per_token())
        job.publish(JobUpdate(pieces, usage, answer.finish_reason, stats))
        if answer.finish_reason is not None:
            job.publish(None)

    def _remove_cancelled(self) -> None:
        """Free the rows whose clients have left."""
        for decoded, row in list(self._rows.items()):
            if row.job.cancelled:
                self._remove(decoded)
                self._release(row.job)
                self.metrics.request_finished(row.job.outcome, row.answer.stats())
                row.job.publish(None)

    def _remove(self, decoded: Answer) -> None:
        """Free a row; if that fails, the row stays for :meth:`_restart`."""
        self._batch.cancel(decoded)
        del self._rows[decoded]

    def _fail(self, job: Job[AnswerRequest], error: Exception) -> None:
        """End a request that failed."""
        self._release(job)
        self.metrics.request_finished("failed", {})
        job.publish(DecodingError(f"decoding failed: {one_line(error)}"))

    def _release(self, job: Job[Any]) -> None:
        with self._changed:
            self._active.remove(job)
