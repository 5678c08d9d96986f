"""Streams and streamers: the answer in parts, and calls that do not disturb each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from pairs import (
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

from eagle_fsd import Origin


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
