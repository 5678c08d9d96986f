"""The target's features: computed beside the trainer, or stored once and read back.

Stored features are sharded safetensors with an index beside them. They are large, a row of the
hidden size for every token, so :func:`estimated_bytes` says how large before anything is written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Dataset

from eagle_fsd.model.target import Target
from eagle_fsd.train.dataset import NOTHING, Batch, ChatDataset, Example, collate

INDEX_FILE = "index.json"
STORED = torch.bfloat16
#: Chats read to estimate how long they are.
SAMPLED = 512
SHARD_BYTES = 1 << 30


@torch.no_grad()
def compute_features(target: Target, ids: Tensor) -> Tensor:
    """``[B, S]`` ids padded on the right to ``[B, S, H]`` features, after the final norm."""
    return target.model.base_model(input_ids=ids, use_cache=False).last_hidden_state


def batch_features(target: Target | None, batch: Batch) -> Tensor:
    """The stored features of a batch, or fresh ones."""
    if batch.features is not None:
        return batch.features
    if target is None:
        raise ValueError("this data holds no features, and there is no target to compute them")
    return compute_features(target, batch.ids)


def estimated_bytes(data: ChatDataset, hidden_size: int) -> int:
    """About what storing the features of ``data`` takes on disk, from a sample of its chats."""
    generator = torch.Generator().manual_seed(0)
    sample = torch.randperm(len(data), generator=generator)[:SAMPLED].tolist()
    tokens = sum(len(data[index].ids) for index in sample) / len(sample) * len(data)
    return int(tokens * (hidden_size * STORED.itemsize + 4 + 1))


@dataclass
class _Place:
    """Where a chat's rows are."""

    shard: int
    start: int
    tokens: int
    cut: bool


class FeatureStore(Dataset[Example]):
    """Features in a folder, a chat each, in the order of the chat file.

    Raises:
        ValueError: The folder holds none, or was made from something else than ``made_from``.
    """

    def __init__(self, folder: str | Path, made_from: dict[str, Any] | None = None) -> None:
        self.folder = Path(folder)
        index = self.folder / INDEX_FILE
        if not index.is_file():
            raise ValueError(f"{folder} holds no features: it has no {INDEX_FILE}")
        try:
            record = json.loads(index.read_text(encoding="utf-8"))
            self.made_from, self.complete = record["made_from"], record["complete"]
            self.shards = record["shards"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{index} is not an index of features: {error}") from error
        if made_from is not None and made_from != self.made_from:
            raise ValueError(
                f"{folder} holds features of other data: {_difference(self, made_from)}"
            )
        self.places = [
            _Place(number, start, tokens, cut)
            for number, shard in enumerate(self.shards)
            for start, tokens, cut in shard["chats"]
        ]
        self._open: dict[int, Any] = {}
        self._owner = -1

    def __len__(self) -> int:
        return len(self.places)

    def size(self, index: int) -> int:
        """Tokens of a chat."""
        return self.places[index].tokens

    def __getitem__(self, index: int) -> Example:
        place = self.places[max(index, 0)]
        shard = self._shard(place.shard)
        rows = slice(place.start, place.start + (2 if index == NOTHING else place.tokens))
        ids, spoken = shard.get_slice("ids")[rows], shard.get_slice("spoken")[rows]
        features = shard.get_slice("features")[rows]
        if index == NOTHING:
            spoken = torch.zeros_like(spoken)
        return Example(index, ids.tolist(), spoken.bool().tolist(), place.cut, features)

    def _shard(self, number: int) -> Any:
        if self._owner != os.getpid():
            self._open, self._owner = {}, os.getpid()
        if number not in self._open:
            path = self.folder / self.shards[number]["file"]
            self._open[number] = safe_open(path, framework="pt")
        return self._open[number]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}, "_owner": -1}


def write_features(
    data: ChatDataset,
    target: Target,
    folder: str | Path,
    made_from: dict[str, Any],
    batch_size: int = 4,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> FeatureStore:
    """Store the features of every chat; goes on after the last whole shard that is there.

    A shard and then the index are each written under another name and renamed, so a kill at any
    moment leaves whole shards and an index that is right.

    Args:
        made_from: What the features depend on (data, target, template, limit); a folder made from
            something else is refused.
        progress: Called with (chats done, chats in all).
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Any]] = []
    if (folder / INDEX_FILE).exists():
        shards = FeatureStore(folder, made_from).shards
    done = sum(len(shard["chats"]) for shard in shards)
    rows_per_shard = max(1, shard_bytes // (target.hidden_size * STORED.itemsize))
    for part in _shards(data, target, done, batch_size, rows_per_shard):
        file = f"features-{len(shards):05d}.safetensors"
        tensors = {
            "ids": torch.cat([torch.tensor(item.ids, dtype=torch.int32) for item in part]),
            "spoken": torch.cat([torch.tensor(item.spoken, dtype=torch.uint8) for item in part]),
            "features": torch.cat([item.features for item in part]),
        }
        save_file(tensors, folder / (file + ".part"))
        (folder / (file + ".part")).replace(folder / file)
        chats, start = [], 0
        for item in part:
            chats.append((start, len(item.ids), item.cut))
            start += len(item.ids)
        shards.append({"file": file, "chats": chats})
        done += len(part)
        _write_index(folder, made_from, shards, done == len(data))
        if progress is not None:
            progress(done, len(data))
    return FeatureStore(folder)


def _shards(
    data: ChatDataset, target: Target, first: int, batch_size: int, rows: int
) -> Iterator[list[Example]]:
    """Chats from ``first`` on with their features, gathered to about ``rows`` tokens."""
    part: list[Example] = []
    held = 0
    for start in range(first, len(data), batch_size):
        examples = [data[index] for index in range(start, min(start + batch_size, len(data)))]
        ids = collate(examples).ids.to(target.device)
        for item, features in zip(examples, compute_features(target, ids), strict=True):
            item.features = features[: len(item.ids)].to("cpu", STORED)
            part.append(item)
            held += len(item.ids)
        if held >= rows:
            yield part
            part, held = [], 0
    if part:
        yield part


def _write_index(
    folder: Path, made_from: dict[str, Any], shards: Sequence[dict[str, Any]], complete: bool
) -> None:
    record = {"made_from": made_from, "complete": complete, "shards": shards}
    part = folder / (INDEX_FILE + ".part")
    part.write_text(json.dumps(record), encoding="utf-8")
    part.replace(folder / INDEX_FILE)


def _difference(store: FeatureStore, made_from: dict[str, Any]) -> str:
    changed = [
        f"{name} {store.made_from.get(name)!r} there, {value!r} here"
        for name, value in made_from.items()
        if store.made_from.get(name) != value
    ]
    return ", ".join(changed) or "other fields"
