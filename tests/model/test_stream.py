"""Streams, streamers, and concurrent calls on one model."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from pairs import (
    ACCEPT_ALL,
    aligned_pair,
    answers,
    batch,
    greedy_reference,
    new_random_pair,
    prompt,
    reference,
)
from torch import Tensor

from eagle_fsd import GenerateOutput, Origin
from eagle_fsd.model.self_check import check_target


def joined(parts: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(parts))


@pytest.mark.parametrize("threshold", [0.0, 0.6])
def test_chunks_and_statistics_agree_with_the_output_of_generate(threshold: float) -> None:
    """The last chunk of a row is marked as finished, and none follows it."""
    pair, (ids, mask) = aligned_pair(), batch()
    eos = int(reference(aligned=True)[0, ids.shape[1] + 5])
    options: dict[str, Any] = {"max_new_tokens": 20, "threshold": threshold, "eos_token_id": eos}
    out = pair.generate(ids, mask, **options)
    stream, chunks = pair.stream(ids, mask, **options), [[] for _ in ids]
    assert stream.stats.prefilled == 0
    for chunk in stream:
        assert not any(item.finished for item in chunks[chunk.row])
        assert len(chunk.tokens) == len(chunk.origins) >= 1
        assert Origin.TARGET not in chunk.origins[:-1]  # a bonus token ends its step
        chunks[chunk.row].append(chunk)
    assert all(row[-1].finished for row in chunks)
    assert list(stream) == []
    assert torch.equal(stream.output().sequences, out.sequences)
    assert [[len(chunk.tokens) for chunk in row] for row in chunks] == out.stats.accepted
    for row, parts in enumerate(chunks):
        tokens = joined(chunk.tokens for chunk in parts)
        origins = joined(chunk.origins for chunk in parts)
        assert tokens == answers(out)[row, : len(tokens)].tolist()
        assert origins == out.origins[row, : len(tokens)].tolist()
        assert (out.origins[row, len(tokens) :] == Origin.PADDING).all()
    stats, counts = out.stats.as_dict(), Counter(out.origins.flatten().tolist())
    kinds = (Origin.EXACT, Origin.FUZZY, Origin.TARGET)
    assert stats["origins"] == {kind.name.lower(): counts[kind] for kind in kinds}
    assert stats["tokens"] == sum(stats["origins"].values())
    assert stats["steps"] == sum(map(len, chunks))
    assert stats["passes"] == max(map(len, chunks))
    assert stats["tau"] == pytest.approx(stats["tokens"] / stats["steps"])
    assert (stats["origins"]["fuzzy"] > 0) == (threshold > 0)
    assert stats["tokens_per_second"] > 0
    assert set(stats["seconds"]) >= {"prefill", "draft", "target", "verify", "cache"}
    assert all(value >= 0 for value in stats["seconds"].values())
    assert stats["seconds"]["target"] > 0


def test_stream_decodes_one_step_per_iteration_and_can_be_closed() -> None:
    pair = new_random_pair()
    check_target(pair.target)
    passes = []
    pair.model.base_model.register_forward_hook(lambda *_: passes.append(1))
    chunks = iter(pair.stream(prompt(6), max_new_tokens=40))
    next(chunks)
    assert len(passes) == 2  # prefill and one step
    next(chunks)
    assert len(passes) == 3
    chunks.close()
    out = pair.generate(prompt(6), max_new_tokens=8)
    assert torch.equal(out.sequences, greedy_reference(pair.model, prompt(6), new=8))


@pytest.fixture
def frequent_thread_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("frequent_thread_switches")
def test_threads_on_one_model_give_the_same_output_as_alone() -> None:
    """Each pass waits halfway until the other thread has run."""
    options = {"threshold": ACCEPT_ALL, "temperature": 0.9, "seed": 6}
    pair = new_random_pair()
    prompts = [batch(), (prompt(9, 4), torch.ones(1, 9))]
    alone = [pair.generate(*item, max_new_tokens=12, **options) for item in prompts]
    order: list[int] = []

    turn, ended = threading.Condition(), []

    def wait_for_other_thread(*_args: Any) -> None:
        me = threading.get_ident()
        with turn:
            order.append(me)
            turn.notify_all()
            assert turn.wait_for(lambda: order[-1] != me or ended, 60)

    # After the first layer, so that the pass has begun and has not ended.
    pair.model.base_model.layers[0].register_forward_hook(wait_for_other_thread)
    start = threading.Barrier(2)

    def decode(number: int) -> list[GenerateOutput]:
        start.wait(60)
        try:
            return [pair.generate(*prompts[number], max_new_tokens=12, **options) for _ in range(3)]
        finally:
            with turn:
                ended.append(number)
                turn.notify_all()

    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(decode, range(2)))
    turns = sum(before != after for before, after in itertools.pairwise(order))
    assert turns > len(order) / 8, "the threads ran one after the other"
    for expected, found in zip(alone, together, strict=True):
        for out in found:
            assert torch.equal(out.sequences, expected.sequences)
            assert torch.equal(out.origins, expected.origins)
            assert out.stats.accepted == expected.stats.accepted


class Collector(list[Any]):
    """The tokens of every call, then "end"."""

    def put(self, value: Tensor) -> None:
        self.append(value.flatten().tolist())

    def end(self) -> None:
        self.append("end")


def test_streamer_receives_the_prompt_and_then_each_step() -> None:
    pair, ids, collector, bound = aligned_pair(), prompt(6, 3), Collector(), Collector()
    out = pair.generate(ids, max_new_tokens=15, streamer=collector)
    # Hugging Face does not pass a streamer on.
    decode = functools.partial(pair.custom_generate, streamer=bound)
    greedy_reference(pair.model, ids, new=15, custom_generate=decode)
    assert bound == collector
    given, *steps, last = collector
    assert (given, last) == (ids[0].tolist(), "end")
    assert joined(steps) == answers(out)[0].tolist()
    assert [len(item) for item in steps] == out.stats.accepted[0]
