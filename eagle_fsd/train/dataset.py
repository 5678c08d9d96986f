"""Batches of encoded chats, divided among processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase

from eagle_fsd.train.assistant_mask import FILLER, Example, encode_chat
from eagle_fsd.train.chat_file import ChatFile
from eagle_fsd.utils.chat_templates import ChatTemplate
from eagle_fsd.utils.progress import Progress

Value = TypeVar("Value")

#: Number of batches whose chats are sorted by length together, which reduces padding.
SORT_WINDOW = 32


class TrainingBatch(NamedTuple):
    """Chats padded on the right; a tuple, which ``DataLoader`` pins and accelerate moves.

    ``ids``, ``assistant_mask`` and ``best`` are ``[B, S]``, stored ``features`` ``[B, S, F]``.
    ``unused`` is the number of chats without errors in which the loss covers no token.
    """

    ids: Tensor
    assistant_mask: Tensor
    indices: list[int]
    lengths: list[int]
    truncated: int = 0
    errors: tuple[str, ...] = ()
    unused: int = 0
    features: Tensor | None = None
    best: Tensor | None = None

    @property
    def loss_mask(self) -> Tensor:
        """``[B, S - 1]`` bool: the predicted features that the loss covers.

        Pair ``t`` combines feature ``t`` and token ``t + 1`` to predict feature ``t + 1``, which
        determines token ``t + 2``: the loss covers it where the assistant generates that token.
        """
        return torch.nn.functional.pad(self.assistant_mask[:, 2:], (0, 1))


class ChatDataset(Dataset[Example]):
    """The chats of a file, encoded and truncated to ``max_length`` tokens on access.

    ``sizes`` are in bytes, and estimate the lengths of chats without reading them.
    """

    def __init__(
        self,
        file: ChatFile,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: ChatTemplate,
        max_length: int,
    ) -> None:
        self.file, self.sizes, self.tokenizer = file, file.sizes, tokenizer
        self.chat_template, self.max_length = chat_template, max_length

    def __len__(self) -> int:
        return len(self.file)

    def __getitem__(self, index: int) -> Example:
        """Encode a chat; one that cannot be encoded gives an example with an ``error``."""
        if index == FILLER:
            return Example(FILLER, [0, 0], [False, False])
        try:
            chat, length = self.file[index], self.max_length
            return encode_chat(chat, self.tokenizer, self.chat_template, length, index=index)
        except ValueError as error:
            message = f"{self.file.path}, line {self.file.lines[index]}: {error}"
            return Example(index, [0, 0], [False, False], error=message)


def collate(examples: Sequence[Example]) -> TrainingBatch:
    """Pad examples on the right, where a causal mask hides the padding from the chats' tokens.

    All of the examples have stored features, or none.
    """
    silent = [item for item in examples if item.index != FILLER and not item.contributes]
    features = [item.features for item in examples if item.features is not None]
    best = [item.best.long() for item in examples if item.best is not None]
    return TrainingBatch(
        _pad([torch.tensor(item.ids) for item in examples]),
        _pad([torch.tensor(item.assistant_mask) for item in examples]),
        indices=[item.index for item in examples],
        lengths=[len(item.ids) for item in examples],
        truncated=sum(item.truncated for item in examples),
        errors=tuple(item.error for item in examples if item.error),
        unused=sum(item.error is None for item in silent),
        features=_pad(features) if features else None,
        best=_pad(best) if len(best) == len(examples) else None,
    )


def _pad(rows: Sequence[Tensor]) -> Tensor:
    """Stack rows ``[S, ...]``, padded with zeros to the longest, but at least to 2."""
    two = rows[0].new_zeros(2, *rows[0].shape[1:])
    return pad_sequence([*rows, two], batch_first=True)[:-1]


def shuffled_batches(
    chats: Sequence[int],
    sizes: Sequence[int],
    batch_size: int,
    seed: int,
    epoch: int,
    process: int = 0,
    processes: int = 1,
) -> list[list[int]]:
    """Return one process's part of every batch of an epoch, as lists of chat indices.

    Chats are grouped by similar length into batches of ``batch_size * processes``, of which each
    process takes a slice: two processes see the batches of one process with twice the batch size.
    An incomplete batch is padded with :data:`FILLER`.
    """
    total, start = batch_size * processes, batch_size * process
    generator = _epoch_generator(seed, epoch)
    shuffled = torch.randperm(len(chats), generator=generator)
    batches = []
    for first in range(0, len(shuffled), total * SORT_WINDOW):
        window = shuffled[first : first + total * SORT_WINDOW].tolist()
        window.sort(key=sizes.__getitem__)
        batches += [window[at : at + total] for at in range(0, len(window), total)]
    parts = []
    for number in torch.randperm(len(batches), generator=generator).tolist():
        part = [chats[position] for position in batches[number][start : start + batch_size]]
        parts.append(part + [FILLER] * (batch_size - len(part)))
    return parts


def shared_batches(
    batches: Sequence[list[int]], seed: int, epoch: int, process: int = 0, processes: int = 1
) -> list[list[int]]:
    """Return one process's batches of an epoch, in random order.

    Of every ``processes`` consecutive ones each process takes one; :data:`FILLER` completes the
    last group.
    """
    order = torch.randperm(len(batches), generator=_epoch_generator(seed, epoch)).tolist()
    own = [batches[number] for number in order[process::processes]]
    return own + [[FILLER]] * (-(-len(batches) // processes) - len(own))


def _epoch_generator(seed: int, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + epoch)


def pack_batches(
    chats: Sequence[int], lengths: Sequence[int], tokens: int, seed: int
) -> list[list[int]]:
    """Pack chats of similar length into batches of at most ``tokens`` tokens, padding included.

    Raises ValueError if a chat is longer. The seed decides which equally long chats share a batch.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(chats), generator=generator).tolist()
    order.sort(key=lengths.__getitem__)
    if order and lengths[order[-1]] > tokens:
        raise ValueError(
            f"tokens_per_batch must be at least {lengths[order[-1]]}, the length of the longest"
            f" chat; got {tokens}"
        )
    batches: list[list[int]] = []
    for position in order:  # by length, so this chat is the longest of its batch
        if not batches or (len(batches[-1]) + 1) * lengths[position] > tokens:
            batches.append([])
        batches[-1].append(chats[position])
    return batches


def read_examples(
    read: Callable[[Any], Value], data: Dataset[Example], chats: Sequence[int], workers: int
) -> Iterator[Value]:
    """Yield ``read(example)`` for each chat, computed in ``workers`` processes, or here if 0."""
    yield from DataLoader(
        data, sampler=chats, batch_size=None, collate_fn=read, num_workers=workers
    )


def example_length(example: Example) -> int:
    """Return the number of tokens of an example, at least 2: a batch is at least as wide."""
    return max(2, len(example.ids))


def count_answer_tokens(
    data: Dataset[Example],
    chats: Sequence[int],
    vocab_size: int,
    workers: int,
    progress: Progress,
) -> Tensor:
    """Count how often the assistant generates each token of the vocabulary: ``[V]``."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for number, tokens in enumerate(read_examples(_answer, data, chats, workers), 1):
        counts += tokens.bincount(minlength=vocab_size)
        progress(number, len(chats))
    return counts


def _answer(example: Example) -> Tensor:
    return torch.tensor(example.ids)[torch.tensor(example.assistant_mask)]


def rank_by_frequency(counts: Tensor) -> Tensor:
    """Return all tokens, the most frequent first, of equally frequent ones the lowest."""
    return counts.sort(descending=True, stable=True).indices


def check_contribution(data: Dataset[Example], chats: Sequence[int], seed: int) -> None:
    """Raise ValueError, with the reasons, if the loss covers no token of any chat.

    Chats are encoded in random order up to the first one that contributes.
    """
    generator = torch.Generator().manual_seed(seed)
    truncated = rejected = 0
    error: str | None = None
    for position in torch.randperm(len(chats), generator=generator).tolist():
        example = data[chats[position]]
        if example.contributes:
            return
        truncated += example.truncated
        rejected += example.error is not None
        error = error or example.error
    reasons = {
        "are truncated before an answer (raise max_length)": truncated,
        f"cannot be encoded ({error})": rejected,
        "have no answer tokens": len(chats) - truncated - rejected,
    }
    found = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items() if count)
    raise ValueError(f"no token of the {len(chats):,} chats contributes to the loss: {found}")


def split_validation(count: int, validation: int, seed: int) -> tuple[list[int], list[int]]:
    """Return sorted indices of the chats to train on, and of those held out: at most a tenth."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(count, generator=generator).tolist()
    held_out = min(validation, count // 10)
    return sorted(order[held_out:]), sorted(order[:held_out])
