"""Tests for batches: every chat once per epoch for any number of processes, and the loss mask."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from accelerate.utils import send_to_device
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset
from torch.utils.data._utils.pin_memory import pin_memory
from trainings import make_chat, write_chats

from eagle_fsd.bundled import BUNDLED_TARGET
from eagle_fsd.model.loading import load_tokenizer
from eagle_fsd.train.chat_file import ChatFile
from eagle_fsd.train.dataset import (
    FILLER,
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
def test_processes_together_see_every_chat_once_in_the_batches_of_one_process(
    count: int, batch_size: int, seed: int, processes: int
) -> None:
    parts = [batches_of(count, batch_size, seed, 0, at, processes) for at in range(processes)]
    assert {len(part) for part in parts} == {-(-count // (batch_size * processes))}
    assert all(len(batch) == batch_size for part in parts for batch in part)
    together = [list(chain(*batches)) for batches in zip(*parts, strict=True)]
    assert together == batches_of(count, batch_size * processes, seed)
    seen = [index for batch in together for index in batch if index != FILLER]
    assert sorted(seen) == [3 * number + 1 for number in range(count)]


@given(st.integers(0, 300), st.integers(0, 50), SEEDS)
def test_split_validation_partitions_the_chats(count: int, validation: int, seed: int) -> None:
    chats, held_out = split_validation(count, validation, seed)
    assert sorted(chats + held_out) == list(range(count))
    assert len(held_out) == min(validation, count // 10)


# -- batches of tokens -----------------------------------------------------------------------------

LENGTHS = st.lists(st.integers(2, 64), max_size=200)


@given(LENGTHS, st.integers(64, 300), SEEDS)
def test_packed_batches_never_exceed_the_budget(lengths: list[int], tokens: int, seed: int) -> None:
    """Padding counts toward the budget, and a chat starts a new batch only if it does not fit."""
    chats = [3 * number + 1 for number in range(len(lengths))]
    batches = pack_batches(chats, lengths, tokens, seed)
    assert sorted(chain(*batches)) == chats
    sizes = [[lengths[chats.index(chat)] for chat in batch] for batch in batches]
    assert all(len(batch) * max(batch) <= tokens for batch in sizes)
    assert all((len(one) + 1) * min(other) > tokens for one, other in pairwise(sizes))
    with pytest.raises(ValueError, match=f"at least {tokens + 1}, .*; got {tokens}$"):
        pack_batches([0, *chats], [tokens + 1, *lengths], tokens, seed)


@given(st.integers(0, 50), SEEDS, st.integers(1, 4))
def test_processes_share_the_packed_batches_of_every_epoch(
    count: int, seed: int, processes: int
) -> None:
    """Each process takes one batch of every group, or a filler in the last group."""
    batches = [[2 * number, 2 * number + 1] for number in range(count)]
    whole = shared_batches(batches, seed, epoch=3)
    assert sorted(whole) == batches
    parts = [shared_batches(batches, seed, 3, at, processes) for at in range(processes)]
    groups = list(zip(*parts, strict=True))
    assert len(groups) == -(-count // processes)
    assert [batch for batch in chain(*groups) if batch != [FILLER]] == whole


# -- collate ---------------------------------------------------------------------------------------


def test_collate_pads_on_the_right(monkeypatch: pytest.MonkeyPatch) -> None:
    features = torch.arange(1.0, 11).view(5, 2).bfloat16()
    batch = collate(
        [
            Example(5, [11, 12, 13, 14, 15], [False, False, True, True, True], True, features),
            Example(2, [21, 22, 23], [False, True, True], features=features[:3]),
        ]
    )
    assert batch.ids.tolist() == [[11, 12, 13, 14, 15], [21, 22, 23, 0, 0]]
    assert batch.assistant_mask.int().tolist() == [[0, 0, 1, 1, 1], [0, 1, 1, 0, 0]]
    # Pair t holds feature t and token t + 1; its prediction determines token t + 2.
    assert batch.loss_mask.int().tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert (batch.indices, batch.lengths, batch.truncated) == ([5, 2], [5, 3], 1)
    assert batch.features.dtype == torch.bfloat16
    assert torch.equal(batch.features[0], features)
    assert torch.equal(batch.features[1], torch.cat([features[:3], torch.zeros(2, 2)]))
    moved = send_to_device(batch, torch.device("meta"))
    assert all(item.is_meta for item in (moved.ids, moved.assistant_mask, moved.features))
    assert (moved.indices, moved.lengths, batch.ids.is_meta) == ([5, 2], [5, 3], False)
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda item: pinned.append(item) or item)
    assert pin_memory(batch) == batch
    assert pinned == [batch.ids, batch.assistant_mask, batch.features]


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
    for workers in (0, 2):
        measured = list(read_examples(example_length, dataset, [4, 0, 5], workers))
        assert measured == [len(dataset[index].ids) for index in [4, 0, 5]]


def test_chats_that_contribute_nothing_are_counted(dataset: ChatDataset) -> None:
    """One that the template rejects is reported with its line."""
    strict = copy.copy(dataset)
    strict.tokenizer = copy.deepcopy(dataset.tokenizer)
    strict.tokenizer.chat_template = "{{ raise_exception('too long') }}"
    strict.chat_template = TokenizerTemplate(strict.tokenizer)
    rejected = strict[1]
    assert re.search(r"chats\.jsonl, line 2: .*too long", str(rejected.error))
    silent = Example(7, [1, 2, 3, 4], [True, True, False, False])
    batch = collate([silent, rejected, dataset[FILLER], dataset[0]])
    assert (batch.unused, batch.errors) == (1, (rejected.error,))
    assert batch.loss_mask.any(1).tolist() == [False, False, False, True]
    assert collate([dataset[FILLER]] * 2).loss_mask.shape == (2, 1)


# -- contribution ----------------------------------------------------------------------------------


class Recorded(Dataset[Example]):
    """Examples with four tokens, and the indices that were read."""

    def __init__(self, contributes: Sequence[bool], fields: dict[int, dict[str, Any]]) -> None:
        self.contributes, self.fields = contributes, fields
        self.read: list[int] = []

    def __getitem__(self, index: int) -> Example:
        self.read.append(index)
        mask = [False, False, False, self.contributes[index]]
        return Example(index, [1] * 4, mask, **self.fields.get(index, {}))


def test_contribution_is_checked_up_to_the_first_chat_that_has_some() -> None:
    """Chats are read in random order, as a file may begin with some that contribute nothing."""
    data = Recorded([number >= 500 for number in range(1000)], {})
    check_contribution(data, range(1000), seed=0)
    assert len(data.read) < 20
    cut = {"truncated": True}
    fields = {0: cut, 1: cut, 2: {"error": "line 3: rejected"}}
    data = Recorded([False, False, False, False, True], fields)
    with pytest.raises(ValueError, match=r"no token of the 4 chats contributes") as caught:
        check_contribution(data, [0, 1, 2, 3], seed=0)
    for part in ("2 are truncated", "raise max_length", "1 cannot be encoded (line 3", "1 have no"):
        assert part in str(caught.value)
    check_contribution(data, [0, 4], seed=0)
