"""Batches of encoded chats: the same ones in the same order, however many processes share them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from transformers import PreTrainedTokenizerBase

from eagle_fsd.train.chats import ChatFile
from eagle_fsd.train.encoding import encode_chat
from eagle_fsd.utils.chat_templates import ChatFormat

#: Batches sorted by length together, so that little is padded and order stays random.
SORTED_TOGETHER = 32
#: Stands for "no chat": fills up what is left of the last batch.
NOTHING = -1


@dataclass
class Batch:
    """Chats padded on the right.

    Attributes:
        ids: ``[B, S]``.
        spoken: ``[B, S]`` bool, the tokens the assistant says.
        chats: Which chat each row is, or :data:`NOTHING`.
        lengths: Tokens of each row, padding apart.
        cut: How many chats were longer than the limit.
        faults: Why chats count nowhere that the template cannot word.
        features: ``[B, S, H]`` of the target where they were stored; None: to be computed.
    """

    ids: Tensor
    spoken: Tensor
    chats: list[int]
    lengths: list[int]
    cut: int = 0
    faults: tuple[str, ...] = ()
    features: Tensor | None = None

    @property
    def counted(self) -> Tensor:
        """``[B, S - 1]`` bool: the predicted features that count.

        Pair ``t`` joins feature ``t`` and token ``t + 1`` to predict feature ``t + 1``, which
        decides token ``t + 2``: it counts where the assistant says that one.
        """
        return torch.nn.functional.pad(self.spoken[:, 2:], (0, 1))

    def to(self, device: torch.device) -> Batch:
        features = None if self.features is None else self.features.to(device, non_blocking=True)
        ids, spoken = (item.to(device, non_blocking=True) for item in (self.ids, self.spoken))
        return replace(self, ids=ids, spoken=spoken, features=features)


@dataclass
class Example:
    """One chat; ``features`` ``[S, H]`` where they were stored; ``fault`` why it counts nowhere."""

    chat: int
    ids: list[int]
    spoken: list[bool]
    cut: bool = False
    features: Tensor | None = None
    fault: str | None = None


class ChatDataset(Dataset[Example]):
    """Encodes a chat when it is asked for.

    :data:`NOTHING`, and a chat that the template cannot word, give an example that counts nowhere.
    """

    def __init__(
        self,
        file: ChatFile,
        tokenizer: PreTrainedTokenizerBase,
        wording: ChatFormat,
        limit: int,
    ) -> None:
        self.file, self.tokenizer, self.wording, self.limit = file, tokenizer, wording, limit

    def __len__(self) -> int:
        return len(self.file)

    def __getitem__(self, index: int) -> Example:
        if index == NOTHING:
            return Example(NOTHING, [0, 0], [False, False])
        try:
            encoded = encode_chat(self.file[index], self.tokenizer, self.wording, self.limit)
        except ValueError as error:
            line = self.file.line(index)
            fault = f"{self.file.path}, line {line}: {error}"
            return Example(index, [0, 0], [False, False], fault=fault)
        return Example(index, encoded.ids, encoded.spoken, encoded.cut)


def collate(examples: Sequence[Example], pad: int = 0) -> Batch:
    """Pad on the right: under a causal mask no real token ever sees the padding."""
    width = max(2, *(len(item.ids) for item in examples))
    ids = torch.full((len(examples), width), pad)
    spoken = torch.zeros(len(examples), width, dtype=torch.bool)
    stored = [item.features for item in examples if item.features is not None]
    features = None
    if stored:
        features = stored[0].new_zeros(len(examples), width, stored[0].shape[-1])
    for row, item in enumerate(examples):
        ids[row, : len(item.ids)] = torch.tensor(item.ids)
        spoken[row, : len(item.ids)] = torch.tensor(item.spoken)
        if item.features is not None:
            features[row, : len(item.ids)] = item.features
    chats, lengths = [item.chat for item in examples], [len(item.ids) for item in examples]
    faults = tuple(item.fault for item in examples if item.fault)
    cut = sum(item.cut for item in examples)
    return Batch(ids, spoken, chats, lengths, cut, faults, features)


class SharedBatches(Sampler[list[int]]):
    """The batches of one epoch as one process of several sees them.

    Chats are shuffled by ``seed`` and ``epoch`` alone and gathered by like length into batches of
    ``batch_size`` times ``processes``; each process takes its slice of every batch. So two
    processes see between them what one with twice the batch sees, and every chat is seen once.
    What is missing in the last batch is filled with :data:`NOTHING`.

    Args:
        chats: Which chats.
        sizes: Their lengths, in any unit.
        first: Batches to leave out at the beginning: where a resumed run goes on.
    """

    def __init__(
        self,
        chats: Sequence[int],
        sizes: Sequence[int],
        batch_size: int,
        seed: int,
        epoch: int,
        process: int = 0,
        processes: int = 1,
        first: int = 0,
    ) -> None:
        self.chats, self.sizes = chats, sizes
        self.batch_size, self.process, self.processes = batch_size, process, processes
        self.seed, self.epoch, self.first = seed, epoch, first

    def __len__(self) -> int:
        return count_batches(len(self.chats), self.batch_size * self.processes) - self.first

    def __iter__(self) -> Iterator[list[int]]:
        whole = self.batch_size * self.processes
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        shuffled = torch.randperm(len(self.chats), generator=generator)
        batches = []
        for start in range(0, len(shuffled), whole * SORTED_TOGETHER):
            window = shuffled[start : start + whole * SORTED_TOGETHER].tolist()
            window.sort(key=self.sizes.__getitem__)
            batches += [window[at : at + whole] for at in range(0, len(window), whole)]
        begin = self.process * self.batch_size
        for number in torch.randperm(len(batches), generator=generator).tolist()[self.first :]:
            chats = [self.chats[place] for place in batches[number]]
            chats += [NOTHING] * (whole - len(chats))
            yield chats[begin : begin + self.batch_size]


def count_batches(chats: int, batch_size: int) -> int:
    return -(-chats // batch_size)
