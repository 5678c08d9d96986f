"""The request queue: the batch, fair shares, cancellation, a full queue, failures."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from prompts import HELLO, reference, request

from eagle_fsd import EagleFSD
from eagle_fsd.chat.config import Limits
from eagle_fsd.chat.decode_queue import (
    MAX_FAILURES,
    DecodeQueue,
    DecodingError,
    Job,
    JobUpdate,
    QueueFullError,
)
from eagle_fsd.chat.processors import AnswerPenalty
from eagle_fsd.chat.request_body import RequestError
from eagle_fsd.chat.serve.metrics import Outcome, ServerMetrics
from eagle_fsd.chat.session import AnswerRequest, ChatAnswer
from eagle_fsd.model.batch import Batch
from eagle_fsd.model.self_check import check_target
from eagle_fsd.model.target import Target
from eagle_fsd.model.tree import DraftTree

#: Options of an answer that nobody waits to see the end of.
LONG = {"temperature": 2.0, "seed": 1, "max_new_tokens": 4000}


class Recorder(ServerMetrics):
    """Records the events of a queue; ``on_step`` is called in the decoding thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.began: list[float] = []
        self.row_counts: list[int] = []
        self.token_counts: list[int] = []
        self.finished: list[Outcome] = []
        self.seconds_per_token: list[float | None] = []
        self.on_step: Callable[[], None] = lambda: None
        step = Batch.step

        def recorded_step(batch: Batch) -> Any:
            found = step(batch)
            if found and threading.current_thread().name == "decode":
                self.row_counts.append(len(found))
                self.token_counts.append(sum(len(chunk.tokens) for _, chunk in found))
                self.on_step()
            return found

        monkeypatch.setattr(Batch, "step", recorded_step)
        monkeypatch.setattr(self.first_token_seconds, "observe", self.began.append)

    def request_finished(
        self, outcome: Outcome, stats: Mapping[str, Any], seconds_per_token: float | None = None
    ) -> None:
        self.finished.append(outcome)
        self.seconds_per_token.append(seconds_per_token)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


@pytest.fixture
def queue(model: EagleFSD, recorder: Recorder) -> Iterator[DecodeQueue]:
    queue = DecodeQueue(model, Limits(queue=4, max_batch=2), recorder)
    yield queue
    queue.close()
    assert not queue.alive
    with pytest.raises(QueueFullError, match="shutting down"):
        queue.check_room("a")


async def collect(job: Job) -> list[JobUpdate]:
    return [update async for update in job.updates() if update is not None]


def joined(updates: Sequence[JobUpdate | None]) -> str:
    """Return the text of an answer."""
    return "".join(update.text for update in updates if update is not None)


async def text_of(job: Job) -> str:
    return joined(await collect(job))


def run(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(work(), 120))


async def submit_at_once(queue: DecodeQueue, *requests: AnswerRequest) -> list[Job]:
    """Submit requests while the queue is blocked."""
    release = threading.Event()
    blocking = asyncio.create_task(queue.call(lambda _: release.wait(60)))
    await asyncio.sleep(0)
    jobs = [queue.submit(item) for item in requests]
    assert len(queue) == len(requests) + 1
    release.set()
    assert await blocking
    return jobs


async def answer_at_once(
    queue: DecodeQueue, *requests: AnswerRequest
) -> tuple[list[str], list[int]]:
    """Submit requests together.

    Returns the answers, and the indices of the requests in the order of their first tokens.
    """
    order: list[int] = []

    async def answer(number: int, job: Job) -> str:
        text = ""
        async for update in job.updates():
            text += update.text
            if number not in order:
                order.append(number)
        return text

    jobs = await submit_at_once(queue, *requests)
    return await asyncio.gather(*(answer(number, job) for number, job in enumerate(jobs))), order


def test_requests_join_and_leave_the_batch(
    model: EagleFSD, queue: DecodeQueue, recorder: Recorder
) -> None:
    """They start in order, both rows are in use while any wait, and answers are those alone."""
    lengths = [40, 3, 20, 1, 30]
    requests = [request(model, max_new_tokens=length) for length in lengths]
    answers, order = run(lambda: answer_at_once(queue, *requests))
    assert answers == [reference(model, max_new_tokens=length) for length in lengths]
    assert order == [0, 1, 2, 3, 4]
    assert recorder.row_counts[0] == 2
    if model.model.device.type == "cpu":  # elsewhere, the next step begins before a row leaves
        assert recorder.row_counts == sorted(recorder.row_counts, reverse=True)
    assert recorder.finished == ["ended"] * 5
    assert len(recorder.began) == 5
    assert min(recorder.began) > 0.0
    # An answer of one token takes one step; the longest one more than one.
    assert None in recorder.seconds_per_token
    assert max(seconds or 0.0 for seconds in recorder.seconds_per_token) > 0.0
    assert len(queue) == queue.rows == 0


def test_clients_get_equal_shares(model: EagleFSD) -> None:
    """Client b comes after three requests of client a, and waits for at most one of them."""
    for rows in (1, 2):
        queue = DecodeQueue(model, Limits(queue=5, max_batch=rows))
        short = request(model, max_new_tokens=8)
        requests = [replace(short, client=client) for client in "aaabb"]
        _, order = run(lambda queue=queue, requests=requests: answer_at_once(queue, *requests))
        assert order == [0, 3, 1, 4, 2]
        queue.close()


def test_clients_with_one_request_at_a_time_do_not_overtake_others(model: EagleFSD) -> None:
    """Client a has no request in the queue when c starts; its next one comes after that of b."""
    queue = DecodeQueue(model, Limits(max_batch=1))
    short, long = request(model, max_new_tokens=8), request(model, **LONG)
    order: list[str] = []

    async def finish(client: str, job: Job) -> None:
        await collect(job)
        order.append(client)

    async def work() -> None:
        first = [replace(short, client=client) for client in "bba"]
        jobs = await submit_at_once(queue, *first, replace(long, client="c"))
        updates = jobs[-1].updates()
        await anext(updates)
        again = queue.submit(replace(short, client="a"))
        await updates.aclose()
        await asyncio.gather(finish("b", jobs[1]), finish("a", again))

    run(work)
    queue.close()
    assert order == ["b", "a"]


def test_requests_of_a_busy_client_make_room_for_others(
    model: EagleFSD, queue: DecodeQueue, recorder: Recorder
) -> None:
    """A full queue drops the newest waiting request of a client with more than an equal share."""

    held, released = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        released.wait(120)

    async def work() -> None:
        long, short = request(model, **LONG), request(model, max_new_tokens=1)
        jobs = [queue.submit(replace(long, client="a"))]
        await asyncio.to_thread(held.wait, 120)
        jobs += [queue.submit(replace(long, client="a")) for _ in range(5)]
        call = asyncio.create_task(queue.call(lambda _: 7, "b"))
        await asyncio.sleep(0)
        others = [queue.submit(replace(short, client=client)) for client in "bb"]
        with pytest.raises(QueueFullError):
            queue.submit(replace(short, client="b"))
        with pytest.raises(QueueFullError):
            queue.check_room("a")
        queue.check_room("c")
        for job in jobs[3:]:
            with pytest.raises(
                QueueFullError, match="a client with fewer requests took this place"
            ):
                await collect(job)
        for job in jobs[:3]:
            job.cancel()
        released.set()
        assert await call == 7
        assert [len(await collect(job)) for job in others] == [1, 1]

    recorder.on_step = hold  # keeps the requests in their places
    run(work)
    assert recorder.finished.count("cancelled") == 3


def test_cancelled_row_is_free_in_the_next_step(
    model: EagleFSD, queue: DecodeQueue, recorder: Recorder
) -> None:
    """The client leaves during the second step with two rows; the other's answer is the same."""
    left: list[int] = []

    async def work() -> str:
        leaving = queue.submit(request(model, **LONG))

        def leave() -> None:
            if not left and recorder.row_counts.count(2) == 2:
                left.append(len(recorder.row_counts))
                leaving.cancel()

        recorder.on_step = leave
        return await text_of(queue.submit(request(model)))

    assert run(work) == reference(model)
    assert set(recorder.row_counts[left[0] :]) == {1}
    assert recorder.finished == ["cancelled", "ended"]


def test_cancelled_calls_are_told(queue: DecodeQueue) -> None:
    started, ended = threading.Event(), threading.Event()

    def endless(cancelled: Callable[[], bool]) -> None:
        started.set()
        while not cancelled():
            time.sleep(0.001)
        ended.set()

    async def work() -> None:
        task = asyncio.create_task(queue.call(endless))
        await asyncio.to_thread(started.wait, 60)
        task.cancel()
        assert await asyncio.to_thread(ended.wait, 60)
        assert await queue.call(lambda _: 7) == 7
        assert len(queue) == 0

    run(work)


def test_failure_affects_one_request(
    model: EagleFSD, queue: DecodeQueue, recorder: Recorder
) -> None:
    """A failure in joining, in converting tokens or in a step ends only its own request."""

    async def work(message: str) -> None:
        good = queue.submit(request(model))
        bad = request(model, prompt=None, prompt_token_ids=[5, 6], presence_penalty=1.0)
        with pytest.raises((DecodingError, RequestError), match=message):
            await collect(queue.submit(bad))
        assert await text_of(good) == reference(model)

    def failing(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda answer, item: 1 / 0 if answer.prompt_tokens == 2 else method(answer, item)

    for owner, name, fault, message in (
        (ChatAnswer, "join", failing(ChatAnswer.join), "decoding failed: division by zero"),
        (ChatAnswer, "push", failing(ChatAnswer.push), "decoding failed: division by zero"),
        (
            AnswerPenalty,
            "__call__",
            lambda _, ids, scores: scores * torch.nan,
            "^no token can be chosen: AnswerPenalty returned NaN",
        ),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, fault)
            run(lambda message=message: work(message))
    assert recorder.finished == ["failed", "ended"] * 2 + ["ended"]  # a refusal is the server's


def test_failed_step_ends_all_running_requests(
    model: EagleFSD, queue: DecodeQueue, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later requests are decoded; only errors that the device may repeat count as failures."""

    async def work() -> None:
        check_target(model.target)
        forward = Target.forward_tree
        monkeypatch.setattr(Target, "forward_tree", lambda *_: 1 / 0)
        for _ in range(MAX_FAILURES):
            for job in await submit_at_once(queue, request(model), request(model)):
                with pytest.raises(DecodingError, match="decoding failed: division by zero"):
                    await collect(job)
        monkeypatch.setattr(Target, "forward_tree", forward)
        assert await text_of(queue.submit(request(model))) == reference(model)

    run(work)
    assert recorder.finished == ["failed"] * 2 * MAX_FAILURES + ["ended"]


def test_failure_in_removing_a_row_is_survived(
    model: EagleFSD, queue: DecodeQueue, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device may report an error there; the queue fails if its thread ends nevertheless."""

    cancel = Batch.cancel

    def fail(*_: Any) -> None:
        monkeypatch.setattr(Batch, "cancel", cancel)
        raise RuntimeError("CUDA error")

    async def work() -> None:
        jobs = [queue.submit(request(model, **LONG)) for _ in range(2)]
        answers = [job.updates() for job in jobs]
        for answer in answers:
            await anext(answer)
        monkeypatch.setattr(Batch, "cancel", fail)
        jobs[0].cancel()
        for answer in answers:
            with pytest.raises(DecodingError, match="decoding failed: CUDA error"):
                async for _ in answer:
                    pass
        assert await text_of(queue.submit(request(model))) == reference(model)
        monkeypatch.setattr(threading, "excepthook", lambda _: None)
        monkeypatch.setattr(Batch, "step", fail)
        monkeypatch.setattr(recorder, "request_finished", fail)
        queue.submit(request(model))
        while not queue.failed:
            await asyncio.sleep(0.01)
        with pytest.raises(QueueFullError, match="decoding has stopped"):
            queue.submit(request(model))

    run(work)
    assert recorder.finished == ["failed", "failed", "ended"]


def test_shortage_of_memory_passes(
    model: EagleFSD, queue: DecodeQueue, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests go on in a smaller batch, and the next ones in a batch of the usual size."""
    forward, rows = Target.forward_tree, 2

    def run_out(self: Target, tree: DraftTree, *args: Any) -> Any:
        nonlocal rows
        if len(tree.tokens) == rows and sum(recorder.token_counts) > 10:
            rows = 0
            raise torch.OutOfMemoryError
        return forward(self, tree, *args)

    async def answer_two() -> list[str]:
        jobs = [queue.submit(request(model)) for _ in range(2)]
        return [await text_of(job) for job in jobs]

    check_target(model.target)
    monkeypatch.setattr(Target, "forward_tree", run_out)
    assert run(answer_two) == [reference(model)] * 2
    assert rows == 0
    recorder.row_counts.clear()
    assert run(answer_two) == [reference(model)] * 2
    assert max(recorder.row_counts) == 2
    # So it does if requests are always being decoded.
    rows, larger = 4, DecodeQueue(model, Limits(queue=16, max_batch=4), recorder)
    recorder.row_counts.clear()

    async def answer_in_turns() -> None:
        limits = range(8, 64, 7)
        jobs = [larger.submit(request(model, max_new_tokens=limit)) for limit in limits]
        for job in jobs:
            await text_of(job)

    run(answer_in_turns)
    larger.close()
    assert rows == 0
    assert max(recorder.row_counts) == 3


def test_next_turn_prefills_only_its_own_tokens(model: EagleFSD, queue: DecodeQueue) -> None:
    """Decoding without the drafter leaves the prefix cache alone."""
    first = request(model)

    async def work() -> list[list[JobUpdate]]:
        answers = [
            await collect(queue.submit(item))
            for item in (first, replace(first, method="ar"), first)
        ]
        chat = [*HELLO, {"role": "assistant", "content": joined(answers[0])}, *HELLO]
        return [*answers, await collect(queue.submit(request(model, messages=chat)))]

    answers = run(work)
    assert len(set(map(joined, answers[:3]))) == 1
    whole, baseline, again, turn = (updates[-1] for updates in answers)
    assert baseline.stats["tau"] == 1.0
    prompt = whole.usage["prompt_tokens"]
    assert baseline.stats["prefilled_tokens"] == whole.stats["prefilled_tokens"] == prompt - 1
    assert again.stats["prefilled_tokens"] < 3
    assert turn.stats["prefilled_tokens"] < turn.usage["prompt_tokens"] - 15
