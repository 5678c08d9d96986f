"""Tests for batches: every chat once per epoch for any number of processes, and the loss mask."""

from __future__ import annotations

import re
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset
from trainings import make_chat, write_chats

from eagle_fsd.bundled import BUNDLED_TARGET
from eagle_fsd.model.loading import load_tokenizer
from eagle_fsd.train.chat_file import ChatFile
from eagle_fsd.train.dataset import (
    FILLER,
    Batch,
    ChatDataset,
    Example,
    check_contribution,
    collate,
    example_length,
    pack_batches,
    read_examples,
    shared_batches,
    shuffled_batches,
    split_validation,
)
from eagle_fsd.utils.chat_templates import TokenizerTemplate

COUNTS = st.integers(0, 300)
BATCH_SIZES = st.integers(1, 9)
SEEDS = st.integers(0, 2**31 - 1)


def batches_of(count: int, batch_size: int, seed: int, *part: int) -> list[list[int]]:
    """Batches of chats whose indices are not their positions, of scattered lengths."""
    chats = [3 * number + 1 for number in range(count)]
    sizes = [number * 7919 % 101 for number in range(count)]
    return shuffled_batches(chats, sizes, batch_size, seed, *(part or (0,)))


@given(COUNTS, BATCH_SIZES, SEEDS, st.integers(1, 5))
def test_every_chat_is_in_one_batch_of_an_epoch(
    count: int, batch_size: int, seed: int, processes: int
) -> None:
    seen: list[int] = []
    for process in range(processes):
        batches = batches_of(count, batch_size, seed, 0, process, processes)
        assert len(batches) == -(-count // (batch_size * processes))  # as for every process
        assert all(len(batch) == batch_size for batch in batches)
        seen += [index for batch in batches for index in batch if index != FILLER]
    assert sorted(seen) == [3 * number + 1 for number in range(count)]


@given(COUNTS, BATCH_SIZES, SEEDS, st.integers(2, 4))
def test_processes_together_see_the_larger_batches_of_one_process(
    count: int, batch_size: int, seed: int, processes: int
) -> None:
    parts = [batches_of(count, batch_size, seed, 0, at, processes) for at in range(processes)]
    together = [list(chain(*batches)) for batches in zip(*parts, strict=True)]
    assert together == batches_of(count, batch_size * processes, seed)


def test_order_depends_on_seed_and_epoch_only() -> None:
    batches = batches_of(200, 4, 5)
    state = torch.random.get_rng_state()
    torch.rand(3)
    assert batches_of(200, 4, 5) == batches
    assert batches_of(200, 4, 6) != batches
    assert batches_of(200, 4, 5, 1) != batches
    torch.random.set_rng_state(state)


def test_batches_hold_chats_of_similar_length_in_random_order() -> None:
    lengths = [number * 7919 % 1009 for number in range(512)]
    batches = shuffled_batches(range(512), lengths, 8, seed=0, epoch=0)
    spans = [max(map(lengths.__getitem__, b)) - min(map(lengths.__getitem__, b)) for b in batches]
    assert sum(spans) / len(spans) < 1009 / 8
    first_lengths = [lengths[batch[0]] for batch in batches]
    assert first_lengths != sorted(first_lengths)


@given(st.integers(0, 300), st.integers(0, 50), SEEDS)
def test_split_validation_partitions_the_chats(count: int, validation: int, seed: int) -> None:
    chats, held_out = split_validation(count, validation, seed)
    assert sorted(chats + held_out) == list(range(count))
    assert len(held_out) == min(validation, count // 10)


# -- batches of tokens -----------------------------------------------------------------------------

LENGTHS = st.lists(st.integers(2, 64), max_size=200)


@given(LENGTHS, st.integers(64, 300), SEEDS)
def test_packed_batches_never_exceed_the_budget(lengths: list[int], tokens: int, seed: int) -> None:
    """Padding included; and a chat moves to a new batch only if it does not fit."""
    chats = [3 * number + 1 for number in range(len(lengths))]
    batches = pack_batches(chats, lengths, tokens, seed)
    assert sorted(chain(*batches)) == chats
    costs = []
    for batch in batches:
        longest = max(lengths[chats.index(chat)] for chat in batch)
        costs.append(len(batch) * longest)
        assert costs[-1] <= tokens
    for batch, following in pairwise(batches):
        shortest = min(lengths[chats.index(chat)] for chat in following)
        assert (len(batch) + 1) * shortest > tokens


def test_packed_batches_depend_on_the_seed_only() -> None:
    lengths = [number % 5 + 3 for number in range(100)]
    batches = pack_batches(range(100), lengths, 40, seed=1)
    torch.rand(3)
    assert pack_batches(range(100), lengths, 40, seed=1) == batches
    assert pack_batches(range(100), lengths, 40, seed=2) != batches


def test_chat_longer_than_the_budget_raises() -> None:
    with pytest.raises(ValueError, match="tokens_per_batch is 40, and a chat has 41 tokens"):
        pack_batches(range(3), [5, 41, 40], 40, seed=0)


@given(st.integers(0, 50), SEEDS, st.integers(1, 4))
def test_processes_share_the_packed_batches_of_every_epoch(
    count: int, seed: int, processes: int
) -> None:
    """In groups: each process takes one batch of a group, or a filler in the last one."""
    batches = [[2 * number, 2 * number + 1] for number in range(count)]
    whole = shared_batches(batches, seed, epoch=3)
    assert sorted(whole) == batches
    parts = [shared_batches(batches, seed, 3, at, processes) for at in range(processes)]
    groups = list(zip(*parts, strict=True))
    assert len(groups) == -(-count // processes)
    assert [batch for batch in chain(*groups) if batch != [FILLER]] == whole


def test_order_of_packed_batches_changes_with_the_epoch() -> None:
    batches = [[number] for number in range(30)]
    orders = [shared_batches(batches, 5, epoch) for epoch in range(2)]
    assert orders[0] != orders[1]
    assert orders[0] == shared_batches(batches, 5, 0)


# -- collate ---------------------------------------------------------------------------------------


def test_collate_pads_on_the_right() -> None:
    batch = collate(
        [
            Example(5, [11, 12, 13, 14, 15], [False, False, True, True, True], truncated=True),
            Example(2, [21, 22, 23], [False, True, True]),
        ]
    )
    assert batch.ids.tolist() == [[11, 12, 13, 14, 15], [21, 22, 23, 0, 0]]
    assert batch.assistant_mask.int().tolist() == [[0, 0, 1, 1, 1], [0, 1, 1, 0, 0]]
    # Pair t holds feature t and token t + 1; its prediction determines token t + 2.
    assert batch.loss_mask.int().tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert (batch.indices, batch.lengths, batch.truncated) == ([5, 2], [5, 3], 1)
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
def test_loss_mask_covers_pairs_that_determine_an_assistant_token(rows: list[list[bool]]) -> None:
    batch = collate([Example(n, [1] * len(row), row) for n, row in enumerate(rows)])
    assert batch.loss_mask.shape == (len(rows), batch.ids.shape[1] - 1)
    for row, mask in zip(rows, batch.loss_mask.tolist(), strict=True):
        for pair, covered in enumerate(mask):
            assert covered == (pair + 2 < len(row) and row[pair + 2])


def test_batch_to_moves_every_tensor() -> None:
    batch = collate([Example(3, [1, 2], [True, True], features=torch.ones(2, 4))])
    moved = batch.to(torch.device("meta"))
    assert isinstance(moved, Batch)
    assert {moved.ids.device.type, moved.assistant_mask.device.type} == {"meta"}
    assert moved.features is not None
    assert moved.features.device.type == "meta"
    assert (moved.indices, moved.lengths) == ([3], [2])
    assert batch.ids.device.type == "cpu"


# -- ChatDataset -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> ChatDataset:
    file = write_chats(tmp_path_factory.mktemp("data") / "chats.jsonl", 6)
    tokenizer = load_tokenizer(BUNDLED_TARGET)
    return ChatDataset(ChatFile(file), tokenizer, TokenizerTemplate(tokenizer), max_length=60)


def test_dataset_encodes_chats(dataset: ChatDataset) -> None:
    assert len(dataset) == 6
    for index in range(6):
        example = dataset[index]
        assert example.index == index
        assert len(example.ids) == len(example.assistant_mask) <= 60
        text = dataset.tokenizer.decode(example.ids)
        question = make_chat(index)[0]["content"]
        assert text.startswith(f"<|begin|><|user|>{question}"[: len(text)])
    assert [dataset[index].truncated for index in range(6)].count(True) in range(1, 6)


def test_filler_contributes_nothing(dataset: ChatDataset) -> None:
    example = dataset[FILLER]
    assert example.index == FILLER
    batch = collate([example] * 2)
    assert batch.loss_mask.shape == (2, 1)
    assert not batch.loss_mask.any()


def test_chat_that_the_template_rejects_is_reported_with_its_line(tmp_path: Path) -> None:
    file = write_chats(tmp_path / "chats.jsonl", 4)
    tokenizer = load_tokenizer(BUNDLED_TARGET)
    tokenizer.chat_template = "{{ raise_exception('too long') if messages | length > 2 }}x"
    data = ChatDataset(ChatFile(file), tokenizer, TokenizerTemplate(tokenizer), max_length=60)
    example = data[1]
    assert example.error is not None
    assert re.search(r"chats\.jsonl, line 2: .*too long", example.error)
    batch = collate([data[0], example])
    assert batch.errors == (example.error,)
    assert not batch.loss_mask[1].any()


@pytest.mark.parametrize("workers", [0, 2])
def test_lengths_are_measured_in_order(dataset: ChatDataset, workers: int) -> None:
    chats = [4, 0, 5]
    measured = list(read_examples(example_length, dataset, chats, workers))
    assert measured == [len(dataset[index].ids) for index in chats]


def test_chats_without_loss_tokens_are_counted(dataset: ChatDataset) -> None:
    silent = Example(7, [1, 2, 3, 4], [True, True, False, False])
    rejected = Example(8, [0, 0], [False, False], error="no")
    batch = collate([dataset[0], silent, rejected, dataset[FILLER]])
    assert (batch.unused, len(batch.errors)) == (1, 1)


# -- contribution ----------------------------------------------------------------------------------


class Recorded(Dataset[Example]):
    """Examples, and the indices that were read."""

    def __init__(self, examples: list[Example]) -> None:
        self.examples = examples
        self.read: list[int] = []

    def __getitem__(self, index: int) -> Example:
        self.read.append(index)
        return self.examples[index]


def example(index: int, contributes: bool, **fields: Any) -> Example:
    return Example(index, [1] * 4, [False, False, False, contributes], **fields)


def test_contribution_is_checked_up_to_the_first_chat_that_has_some() -> None:
    """In random order: chats that contribute nothing may come first in a file."""
    data = Recorded([example(number, number >= 500) for number in range(1000)])
    check_contribution(data, range(1000), seed=0)
    assert len(data.read) < 20


def test_data_without_contribution_is_rejected_with_the_reasons() -> None:
    data = Recorded(
        [
            example(0, False, truncated=True),
            example(1, False, truncated=True),
            example(2, False, error="line 3: rejected"),
            example(3, False),
            example(4, True),
        ]
    )
    with pytest.raises(ValueError, match=r"no token of the 4 chats contributes") as caught:
        check_contribution(data, [0, 1, 2, 3], seed=0)
    for part in ("2 are truncated", "raise max_length", "1 cannot be encoded (line 3", "1 have no"):
        assert part in str(caught.value)
    check_contribution(data, [0, 4], seed=0)
