"""Features stored once for several trainings, as safetensors shards with an index beside them.

Features take ``hidden_size`` numbers per token, so :func:`store_features` estimates their size
before it writes anything.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils.data import Dataset

from eagle_fsd.model.target import Target
from eagle_fsd.train.config import FeaturesRequest
from eagle_fsd.train.dataset import FILLER, ChatDataset, Example, collate
from eagle_fsd.train.features import compute_features
from eagle_fsd.train.loaded_target import LoadedTarget
from eagle_fsd.utils.files import atomic_path, atomic_write
from eagle_fsd.utils.progress import Progress, ProgressFactory, no_progress

INDEX_FILE = "index.json"
STORAGE_DTYPE = torch.bfloat16
#: Number of chats that are encoded to estimate the size of all.
SAMPLE_CHATS = 512
#: Approximate size of a shard in bytes.
SHARD_BYTES = 1 << 30


def estimate_bytes(data: ChatDataset, hidden_size: int) -> int:
    """Estimate the disk space of the stored features from a sample of the chats.

    Args:
        data: The chats.
        hidden_size: The target's hidden size.
    """
    generator = torch.Generator().manual_seed(0)
    sample = torch.randperm(len(data), generator=generator)[:SAMPLE_CHATS].tolist()
    tokens = sum(len(data[index].ids) for index in sample) / len(sample) * len(data)
    return int(tokens * (hidden_size * STORAGE_DTYPE.itemsize + 4 + 1))  # int32 id, uint8 mask


@dataclass
class _Location:
    """Where a chat's rows are stored."""

    shard: int
    start: int
    tokens: int
    truncated: bool


class FeatureStore(Dataset[Example]):
    """Stored features, one example per chat in the order of the chat file.

    Args:
        folder: A folder that :func:`write_features` wrote.
        fingerprint: Fingerprint that the features must have; default: any. See
            :meth:`LoadedTarget.fingerprint`.

    Attributes:
        fingerprint: Fingerprint of the features.
        complete: Whether every chat is stored.

    Raises:
        ValueError: The folder holds no features, or features with another fingerprint.
    """

    def __init__(self, folder: str | Path, fingerprint: dict[str, Any] | None = None) -> None:
        self.folder = Path(folder)
        index = self.folder / INDEX_FILE
        if not index.is_file():
            raise ValueError(f"{folder} holds no features: {INDEX_FILE} is missing")
        try:
            content = json.loads(index.read_text(encoding="utf-8"))
            self.fingerprint, self.complete = content["made_from"], content["complete"]
            self.shards = content["shards"]
            self._locations = [
                _Location(number, start, tokens, truncated)
                for number, shard in enumerate(self.shards)
                for start, tokens, truncated in shard["chats"]
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{index} is not an index of features: {error}") from error
        if fingerprint is not None and fingerprint != self.fingerprint:
            difference = _describe_difference(self.fingerprint, fingerprint)
            raise ValueError(f"{folder} holds features of other data: {difference}")
        self._open_shards: dict[int, Any] = {}
        self._owner = -1

    def __len__(self) -> int:
        return len(self._locations)

    def __getitem__(self, index: int) -> Example:
        """Read a chat; for :data:`FILLER`, return two tokens of the first chat, masked out."""
        location = self._locations[max(index, 0)]
        shard = self._open_shard(location.shard)
        tokens = 2 if index == FILLER else location.tokens
        rows = slice(location.start, location.start + tokens)
        mask = shard.get_slice("spoken")[rows].bool()
        return Example(
            index,
            shard.get_slice("ids")[rows].tolist(),
            [False] * tokens if index == FILLER else mask.tolist(),
            location.truncated,
            shard.get_slice("features")[rows],
        )

    def size(self, index: int) -> int:
        """Return the number of tokens of a chat.

        Args:
            index: The chat's index.
        """
        return self._locations[index].tokens

    def _open_shard(self, number: int) -> Any:
        if self._owner != os.getpid():  # each worker process opens the files for itself
            self._open_shards, self._owner = {}, os.getpid()
        if number not in self._open_shards:
            path = self.folder / self.shards[number]["file"]
            self._open_shards[number] = safe_open(path, framework="pt")
        return self._open_shards[number]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open_shards": {}, "_owner": -1}


def store_features(
    request: FeaturesRequest,
    *,
    token: str | None = None,
    progress: ProgressFactory = no_progress,
    on_estimate: Callable[[int, int, int], None] | None = None,
) -> FeatureStore:
    """Compute and store the target's features of a chat file.

    Args:
        request: The chats, the target and the output folder.
        token: Access token for the Hub.
        progress: Reports ``reading`` (in bytes) and ``features`` (in chats).
        on_estimate: Called before anything is written, with the estimated bytes, the free bytes and
            the number of chats.

    Raises:
        ValueError: No chat is valid, or the folder holds features of other data.
        OSError: There is too little space, or a file cannot be read or written.
        LoadError: The target cannot be loaded.
    """
    loaded = LoadedTarget.load(request, token=token)
    with progress("reading") as report:
        chats = loaded.open_chats(request.data, request.max_length, report)
    needed = estimate_bytes(chats, loaded.target.hidden_size)
    request.out.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(request.out).free
    if on_estimate is not None:
        on_estimate(needed, free, len(chats))
    if needed > free:
        raise OSError(
            f"{request.out} has {format_bytes(free)} free; about {format_bytes(needed)} are needed"
        )
    fingerprint = loaded.fingerprint(request.data, request.max_length)
    with progress("features") as report:
        return write_features(
            chats, loaded.target, request.out, fingerprint, request.batch_size, progress=report
        )


def write_features(
    data: ChatDataset,
    target: Target,
    folder: str | Path,
    fingerprint: dict[str, Any],
    batch_size: int = 4,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> FeatureStore:
    """Store the features of every chat, resuming after the last complete shard.

    Args:
        data: The chats.
        target: The target.
        folder: Output folder, created if missing.
        fingerprint: Fingerprint of the features, which those in the folder must share.
        batch_size: Chats per forward pass.
        shard_bytes: Approximate size of a shard in bytes.
        progress: Called after every shard with the chats stored and the number of chats.

    Raises:
        ValueError: The folder holds features with another fingerprint.
        OSError: A file cannot be written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Any]] = []
    if (folder / INDEX_FILE).exists():
        shards = FeatureStore(folder, fingerprint).shards
    done = sum(len(shard["chats"]) for shard in shards)
    tokens_per_shard = max(1, shard_bytes // (target.hidden_size * STORAGE_DTYPE.itemsize))
    for examples in _compute_shards(data, target, done, batch_size, tokens_per_shard):
        file = f"features-{len(shards):05d}.safetensors"
        tensors = {  # "spoken" is the assistant mask in the file format
            "ids": torch.cat([torch.tensor(item.ids, dtype=torch.int32) for item in examples]),
            "spoken": torch.cat(
                [torch.tensor(item.assistant_mask, dtype=torch.uint8) for item in examples]
            ),
            "features": torch.cat(
                [item.features for item in examples if item.features is not None]
            ),
        }
        with atomic_path(folder / file) as temporary:
            save_file(tensors, temporary)
        chats, start = [], 0
        for item in examples:
            chats.append((start, len(item.ids), item.truncated))
            start += len(item.ids)
        shards.append({"file": file, "chats": chats})
        done += len(examples)
        index = {"made_from": fingerprint, "complete": done == len(data), "shards": shards}
        atomic_write(folder / INDEX_FILE, json.dumps(index))
        if progress is not None:
            progress(done, len(data))
    return FeatureStore(folder)


def _compute_shards(
    data: ChatDataset, target: Target, first: int, batch_size: int, tokens_per_shard: int
) -> Iterator[Sequence[Example]]:
    """Yield groups of about ``tokens_per_shard`` tokens, from chat ``first`` on, with features."""
    shard: list[Example] = []
    tokens = 0
    for start in range(first, len(data), batch_size):
        examples = [data[index] for index in range(start, min(start + batch_size, len(data)))]
        ids = collate(examples).ids.to(target.device)
        for item, features in zip(examples, compute_features(target, ids), strict=True):
            item.features = features[: len(item.ids)].to("cpu", STORAGE_DTYPE)
            shard.append(item)
            tokens += len(item.ids)
        if tokens >= tokens_per_shard:
            yield shard
            shard, tokens = [], 0
    if shard:
        yield shard


def _describe_difference(stored: dict[str, Any], fingerprint: dict[str, Any]) -> str:
    changed = [
        f"{name} is {stored.get(name)!r} there, {value!r} here"
        for name, value in fingerprint.items()
        if stored.get(name) != value
    ]
    return ", ".join(changed) or "other fields"


def format_bytes(size: float) -> str:
    """Format a size with a decimal unit, as in ``"1.5 GB"``.

    Args:
        size: Bytes.
    """
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
