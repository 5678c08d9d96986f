"""Streams and streamers: the answer in parts, and calls that do not disturb each other."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from pairs import (
    DEVICES,
    FUZZY,
    PLAIN,
    answers,
    batch,
    greedy_reference,
    kindred_pair,
    prompt,
    reference,
    shared_pair,
    tiny_pair,
    tokenizer,
)
from torch import Tensor
from transformers import TextStreamer
from transformers.generation.streamers import BaseStreamer

from eagle_fsd import GenerateOutput, Origin


def joined(parts: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(parts))


# -- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0.0, FUZZY])
def test_a_stream_is_the_answer_in_parts(threshold: float) -> None:
    """Every row's chunks make up its answer; the last one says so, and nothing follows it."""
    pair = kindred_pair()
    ids, mask = batch()
    eos = int(reference(PLAIN, kindred=True)[0, ids.shape[1] + 5])
    options = {"attention_mask": mask, "max_new_tokens": 20, "threshold": threshold}
    out = pair.generate(ids, **options, eos_token_id=eos)
    tokens: list[list[int]] = [[] for _ in range(4)]
    origins: list[list[int]] = [[] for _ in range(4)]
    sizes: list[list[int]] = [[] for _ in range(4)]
    finished: set[int] = set()
    for chunk in pair.stream(ids, **options, eos_token_id=eos):
        assert chunk.row not in finished
        assert len(chunk.tokens) == len(chunk.origins) >= 1
        tokens[chunk.row] += chunk.tokens
        origins[chunk.row] += chunk.origins
        sizes[chunk.row].append(len(chunk.tokens))
        if chunk.finished:
            finished.add(chunk.row)
    assert finished == set(range(4))
    assert sizes == out.stats.accepted
    for row in range(4):
        length = len(tokens[row])
        assert tokens[row] == answers(out)[row, :length].tolist()
        assert origins[row] == out.origins[row, :length].tolist()
        assert (out.origins[row, length:] == Origin.PADDING).all()


def test_a_stream_checks_its_arguments_when_it_is_called() -> None:
    with pytest.raises(ValueError, match="threshold"):
        shared_pair().stream(prompt(4), threshold=-1.0)


def test_a_stream_comes_step_by_step_and_may_be_left() -> None:
    """Nothing is decoded ahead of what was asked for; other calls go on undisturbed."""
    pair = tiny_pair()
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


def test_a_finished_stream_has_the_whole_and_reading_it_again_changes_nothing() -> None:
    pair, ids = kindred_pair(), prompt(6, 3)
    decoding = pair.stream(ids, max_new_tokens=12)
    tokens = joined(chunk.tokens for chunk in decoding)
    whole = decoding.output().sequences
    assert tokens == whole[0, 6:].tolist()
    assert list(decoding) == []
    assert torch.equal(decoding.output().sequences, whole)


def test_streams_in_turn_do_not_disturb_each_other() -> None:
    """Two calls at once on one pair, as a server makes them."""
    pair = kindred_pair()
    prompts = [prompt(6, 3), prompt(9, 4)]
    found: list[list[int]] = [[], []]
    streams = [pair.stream(ids, max_new_tokens=20) for ids in prompts]
    for pieces in itertools.zip_longest(*streams):
        for tokens, piece in zip(found, pieces, strict=True):
            tokens += piece.tokens if piece else []
    for ids, tokens in zip(prompts, found, strict=True):
        assert tokens == greedy_reference(pair.model, ids, new=20)[0, ids.shape[1] :].tolist()


def test_a_call_within_a_call_does_not_disturb_it() -> None:
    """What two threads on one pair do to each other, made to happen in the middle of every pass.

    With everything accepted the text depends on the features that each pass hands on.
    """
    pair, ids = tiny_pair(), prompt(6, 3)
    undisturbed = pair.generate(ids, max_new_tokens=20, threshold=FUZZY)
    busy, count = False, 0

    def interrupt(*_args: Any) -> None:
        nonlocal busy, count
        if not busy:
            busy, count = True, count + 1
            pair.generate(prompt(4, count), max_new_tokens=2)
            busy = False

    # After the first layer: the outer pass has begun and has not ended.
    pair.model.base_model.layers[0].register_forward_hook(interrupt)
    out = pair.generate(ids, max_new_tokens=20, threshold=FUZZY)
    assert count == 1 + out.stats.passes
    assert torch.equal(out.sequences, undisturbed.sequences)
    assert out.stats.accepted == undisturbed.stats.accepted


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", ["fsd", "ar"])
def test_what_the_caller_does_between_chunks_is_not_booked(method: str, device: str) -> None:
    """A consumer that prints, or sends over a network, does not make decoding look slow."""
    pair = tiny_pair(device=device)
    ids, mask = (item.to(device) for item in batch())
    began = time.perf_counter()
    decoding = pair.stream(ids, attention_mask=mask, max_new_tokens=6, method=method)
    slept = 0.0
    for _ in decoding:
        pause = time.perf_counter()
        time.sleep(0.02)
        slept += time.perf_counter() - pause
    wall = time.perf_counter() - began
    seconds = decoding.output().stats.seconds
    assert slept > 0.3
    assert sum(seconds.values()) < wall - slept + 0.01
    assert min(seconds[phase] for phase in ("prefill", "target", "verify", "host")) > 0.0


def test_a_stream_that_waits_before_its_first_step_books_nothing() -> None:
    """Nor does what happens between the call and the first chunk, or after the last."""
    pair = tiny_pair()
    decoding = pair.stream(prompt(6), max_new_tokens=6)
    time.sleep(0.3)
    assert sum(decoding.stats.seconds.values()) == 0.0
    began = time.perf_counter()
    for _ in decoding:
        pass
    wall = time.perf_counter() - began
    time.sleep(0.1)
    assert 0.0 < sum(decoding.output().stats.seconds.values()) <= wall


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": "ar"},
        {"threshold": FUZZY},
        {"threshold": FUZZY, "selection": "sample"},
        {"temperature": 0.9, "top_p": 0.9, "seed": 4},
        {"temperature": 0.9, "selection": "sample", "threshold": FUZZY, "seed": 4},
    ],
)
def test_torchs_generator_is_left_alone(options: dict[str, Any]) -> None:
    """By greedy calls and by those with a seed: a caller's own random numbers stay repeatable."""
    before = torch.get_rng_state()
    kindred_pair().generate(prompt(6, 3), max_new_tokens=8, **options)
    assert torch.equal(torch.get_rng_state(), before)


def test_sampling_without_a_seed_takes_one_from_torchs_generator() -> None:
    """So ``torch.manual_seed`` makes it repeatable, and two calls in a row differ."""
    ids, options = prompt(6, 3), {"max_new_tokens": 24, "temperature": 1.0}
    torch.manual_seed(3)
    first, second = (kindred_pair().generate(ids, **options).sequences for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(kindred_pair().generate(ids, **options).sequences, first)


# -- threads --------------------------------------------------------------------------------------


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads give way to each other as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("options", [{}, {"threshold": FUZZY}, {"temperature": 0.9, "seed": 6}])
def test_threads_on_one_model_decode_as_if_alone(options: dict[str, Any]) -> None:
    """Each pass is made to wait in its middle until the other thread has had a turn.

    With everything accepted the text depends on the features that each pass hands on.
    """
    pair = tiny_pair()
    prompts = [batch(), (prompt(9, 4), torch.ones(1, 9))]
    alone = [pair.generate(*item, max_new_tokens=20, **options) for item in prompts]
    order: list[int] = []

    turn, ended = threading.Condition(), []

    def give_way(*_args: Any) -> None:
        me = threading.get_ident()
        with turn:
            order.append(me)
            turn.notify_all()
            assert turn.wait_for(lambda: order[-1] != me or ended, 60)

    # After the first layer: the pass has begun and has not ended.
    pair.model.base_model.layers[0].register_forward_hook(give_way)
    start = threading.Barrier(2)

    def decode(number: int) -> list[GenerateOutput]:
        start.wait(60)
        try:
            return [pair.generate(*prompts[number], max_new_tokens=20, **options) for _ in range(3)]
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


# -- streamers ------------------------------------------------------------------------------------


class Collector(BaseStreamer):
    """What a streamer is given, call by call."""

    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        assert not self.ended
        self.puts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_gets_the_prompt_and_then_each_step() -> None:
    pair, ids, collector = kindred_pair(), prompt(6, 3), Collector()
    out = pair.generate(ids, max_new_tokens=15, streamer=collector)
    assert collector.ended == 1
    assert collector.puts[0] == ids[0].tolist()
    assert joined(collector.puts[1:]) == answers(out)[0].tolist()
    assert [len(item) for item in collector.puts[1:]] == out.stats.accepted[0]


def test_a_streamer_through_hugging_faces_interface() -> None:
    """transformers 5.23 puts the prompt but keeps ``generate``'s streamer from a callable, so it
    may be bound to the callable; given either way it is accepted and the text is the same."""
    pair, ids, collector = kindred_pair(), prompt(6, 3), Collector()
    expected = greedy_reference(pair.model, ids, new=15)
    bound = partial(pair.custom_generate, streamer=collector)
    found = greedy_reference(pair.model, ids, new=15, custom_generate=bound)
    assert torch.equal(found, expected)
    assert joined(collector.puts) == expected[0, 6:].tolist()
    assert collector.ended == 1
    given = Collector()
    found = greedy_reference(
        pair.model, ids, new=15, custom_generate=pair.custom_generate, streamer=given
    )
    assert torch.equal(found, expected)
    assert given.puts[0] == ids[0].tolist()


def test_a_text_streamer_prints_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """Hugging Face's own, which is made for one token at a time."""
    pair, ids = kindred_pair(), prompt(6, 3)
    streamer = TextStreamer(tokenizer(), skip_prompt=True)
    out = pair.generate(ids, max_new_tokens=15, streamer=streamer)
    assert capsys.readouterr().out == tokenizer().decode(answers(out)[0]) + "\n"


def test_a_streamer_follows_one_prompt() -> None:
    with pytest.raises(ValueError, match="one prompt"):
        shared_pair().generate(batch()[0], streamer=Collector())
