"""Batches: every chat once an epoch however many processes share them, and what counts in them."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainings import chat, write_chats

from eagle_fsd.bundled import BUNDLED_TARGET
from eagle_fsd.model.loading import load_tokenizer
from eagle_fsd.train.chats import ChatFile
from eagle_fsd.train.dataset import (
    NOTHING,
    Batch,
    ChatDataset,
    Example,
    SharedBatches,
    collate,
)
from eagle_fsd.utils.chat_templates import TokenizerFormat

COUNTS = st.integers(0, 300)
SIZES = st.integers(1, 9)
SEEDS = st.integers(0, 2**31 - 1)


def shared(
    count: int, batch_size: int, seed: int, process: int = 0, processes: int = 1, **options: int
) -> SharedBatches:
    """Of chats whose numbers are not their places, of lengths that are all over the place."""
    chats = [3 * number + 1 for number in range(count)]
    sizes = [number * 7919 % 101 for number in range(count)]
    epoch = options.pop("epoch", 0)
    return SharedBatches(chats, sizes, batch_size, seed, epoch, process, processes, **options)


@given(COUNTS, SIZES, SEEDS, st.integers(1, 5))
def test_every_chat_comes_once_an_epoch(
    count: int, batch_size: int, seed: int, processes: int
) -> None:
    seen: list[int] = []
    numbers = set()
    for process in range(processes):
        batches = shared(count, batch_size, seed, process, processes)
        listed = list(batches)
        numbers.add(len(listed))
        assert len(batches) == len(listed)
        assert all(len(batch) == batch_size for batch in listed)
        seen += [number for batch in listed for number in batch if number != NOTHING]
    assert sorted(seen) == [3 * number + 1 for number in range(count)]
    assert numbers == {-(-count // (batch_size * processes))}  # none waits for another


@given(COUNTS, SIZES, SEEDS, st.integers(2, 4))
def test_slices_together_are_one_processs_larger_batches(
    count: int, batch_size: int, seed: int, processes: int
) -> None:
    """In the same order, so that the same steps see the same chats."""
    slices = [shared(count, batch_size, seed, at, processes) for at in range(processes)]
    together = [list(chain(*parts)) for parts in zip(*slices, strict=True)]
    assert together == list(shared(count, batch_size * processes, seed))


@given(COUNTS, SIZES, SEEDS, st.data())
def test_first_leaves_out_that_many(
    count: int, batch_size: int, seed: int, draw: st.DataObject
) -> None:
    whole = list(shared(count, batch_size, seed))
    first = draw.draw(st.integers(0, len(whole)))
    rest = shared(count, batch_size, seed, first=first)
    assert list(rest) == whole[first:]
    assert len(rest) == len(whole) - first


def test_order_follows_from_seed_and_epoch_alone() -> None:
    before = torch.random.get_rng_state()
    first = list(shared(200, 4, seed=5))
    torch.rand(3)
    assert list(shared(200, 4, seed=5)) == first
    assert list(shared(200, 4, seed=6)) != first
    assert list(shared(200, 4, seed=5, epoch=1)) != first
    torch.random.set_rng_state(before)


def test_batches_hold_chats_of_like_length() -> None:
    """So little is padded, and yet short chats do not all come first."""
    count, size = 512, 8
    lengths = [number * 7919 % 1009 for number in range(count)]
    batches = list(SharedBatches(range(count), lengths, size, seed=0, epoch=0))
    spans = [max(map(lengths.__getitem__, b)) - min(map(lengths.__getitem__, b)) for b in batches]
    assert sum(spans) / len(spans) < 1009 / 8
    middle = [lengths[batch[0]] for batch in batches]
    assert middle != sorted(middle)


def test_collate_pads_on_the_right() -> None:
    batch = collate(
        [
            Example(5, [11, 12, 13, 14, 15], [False, False, True, True, True], cut=True),
            Example(2, [21, 22, 23], [False, True, True]),
        ],
        pad=9,
    )
    assert batch.ids.tolist() == [[11, 12, 13, 14, 15], [21, 22, 23, 9, 9]]
    assert batch.spoken.int().tolist() == [[0, 0, 1, 1, 1], [0, 1, 1, 0, 0]]
    # Pair t holds feature t and token t + 1; what it predicts decides token t + 2.
    assert batch.counted.int().tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert (batch.chats, batch.lengths, batch.cut) == ([5, 2], [5, 3], 1)
    assert batch.features is None


def test_collate_pads_features_with_zeros() -> None:
    features = torch.arange(1.0, 9).view(4, 2).bfloat16()
    batch = collate(
        [
            Example(0, [1, 2, 3, 4], [True] * 4, features=features),
            Example(1, [5, 6], [True] * 2, features=features[:2]),
        ]
    )
    assert batch.features is not None
    assert batch.features.dtype == torch.bfloat16
    assert batch.features.tolist() == [
        [[1, 2], [3, 4], [5, 6], [7, 8]],
        [[1, 2], [3, 4], [0, 0], [0, 0]],
    ]


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=5))
def test_counted_pairs_are_those_that_decide_a_spoken_token(rows: list[list[bool]]) -> None:
    """All of them but the first two tokens of a chat, which no pair decides."""
    batch = collate([Example(n, [1] * len(row), row) for n, row in enumerate(rows)])
    assert batch.counted.shape == (len(rows), batch.ids.shape[1] - 1)
    for row, counted in zip(rows, batch.counted.tolist(), strict=True):
        for pair, counts in enumerate(counted):
            assert counts == (pair + 2 < len(row) and row[pair + 2])


def test_a_batch_of_nothing_counts_nowhere() -> None:
    batch = collate([Example(NOTHING, [0, 0], [False, False])] * 2)
    assert batch.counted.shape == (2, 1)
    assert not batch.counted.any()


def test_to_moves_everything_and_keeps_the_rest() -> None:
    batch = collate([Example(3, [1, 2], [True, True], features=torch.ones(2, 4))])
    moved = batch.to(torch.device("meta"))
    assert isinstance(moved, Batch)
    assert {moved.ids.device.type, moved.spoken.device.type} == {"meta"}
    assert moved.features is not None
    assert moved.features.device.type == "meta"
    assert (moved.chats, moved.lengths) == ([3], [2])
    assert batch.ids.device.type == "cpu"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> ChatDataset:
    file = write_chats(tmp_path_factory.mktemp("data") / "chats.jsonl", 6)
    tokenizer = load_tokenizer(BUNDLED_TARGET)
    return ChatDataset(ChatFile(file), tokenizer, TokenizerFormat(tokenizer), limit=60)


def test_chats_are_encoded_when_asked_for(dataset: ChatDataset) -> None:
    assert len(dataset) == 6
    for index in range(6):
        example = dataset[index]
        assert example.chat == index
        assert len(example.ids) == len(example.spoken) <= 60
        text = dataset.tokenizer.decode(example.ids)
        first = chat(index)[0]["content"]
        assert text.startswith(f"<|begin|><|user|>{first}"[: len(text)])
    assert [dataset[index].cut for index in range(6)].count(True) in range(1, 6)
    nothing = dataset[NOTHING]
    assert nothing.chat == NOTHING
    assert not any(nothing.spoken)


def test_a_chat_that_cannot_be_worded_is_named_by_its_line(tmp_path: Path) -> None:
    file = write_chats(tmp_path / "chats.jsonl", 4)
    tokenizer = load_tokenizer(BUNDLED_TARGET)
    tokenizer.chat_template = "{{ raise_exception('too long') if messages | length > 2 }}x"
    data = ChatDataset(ChatFile(file), tokenizer, TokenizerFormat(tokenizer), limit=60)
    example = data[1]
    assert re.search(r"chats\.jsonl, line 2: .*too long", example.fault)
    batch = collate([data[0], example])
    assert batch.faults == (example.fault,)
    assert not batch.counted[1].any()
