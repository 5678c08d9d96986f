"""Streams, streamers, and concurrent calls on one model."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
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
from transformers.generation.streamers import BaseStreamer

from eagle_fsd import GenerateOutput, Origin
from eagle_fsd.model.self_check import check_target


def joined(parts: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(parts))


def test_chunks_add_up_to_the_output_of_generate() -> None:
    """The last chunk of a row is marked as finished, and none follows it."""
    pair, threshold = aligned_pair(), 0.6
    ids, mask = batch()
    eos = int(reference(aligned=True)[0, ids.shape[1] + 5])
    options = {"attention_mask": mask, "max_new_tokens": 20, "threshold": threshold}
    out = pair.generate(ids, **options, eos_token_id=eos)
    tokens: list[list[int]] = [[] for _ in range(4)]
    origins: list[list[int]] = [[] for _ in range(4)]
    sizes: list[list[int]] = [[] for _ in range(4)]
    finished: set[int] = set()
    stream = pair.stream(ids, **options, eos_token_id=eos)
    assert stream.stats.prefilled == 0
    for chunk in stream:
        assert chunk.row not in finished
        assert len(chunk.tokens) == len(chunk.origins) >= 1
        tokens[chunk.row] += chunk.tokens
        origins[chunk.row] += chunk.origins
        sizes[chunk.row].append(len(chunk.tokens))
        if chunk.finished:
            finished.add(chunk.row)
    assert finished == set(range(4))
    assert list(stream) == []
    assert torch.equal(stream.output().sequences, out.sequences)
    assert sizes == out.stats.accepted
    for row in range(4):
        length = len(tokens[row])
        assert tokens[row] == answers(out)[row, :length].tolist()
        assert origins[row] == out.origins[row, :length].tolist()
        assert (out.origins[row, length:] == Origin.PADDING).all()


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


class Collector(BaseStreamer):
    """Record the arguments of every call."""

    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        assert not self.ended
        self.puts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def test_streamer_receives_the_prompt_and_then_each_step() -> None:
    pair, ids, collector = aligned_pair(), prompt(6, 3), Collector()
    out = pair.generate(ids, max_new_tokens=15, streamer=collector)
    bound = Collector()  # Hugging Face does not pass a streamer on
    decode = functools.partial(pair.custom_generate, streamer=bound)
    greedy_reference(pair.model, ids, new=15, custom_generate=decode)
    assert (bound.puts, bound.ended) == (collector.puts, 1)
    assert collector.ended == 1
    assert collector.puts[0] == ids[0].tolist()
    assert joined(collector.puts[1:]) == answers(out)[0].tolist()
    assert [len(item) for item in collector.puts[1:]] == out.stats.accepted[0]
