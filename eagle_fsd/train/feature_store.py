"""Features stored once for several trainings, as safetensors shards with an index beside them.

Several processes share the work: each computes consecutive chats and writes shards of its own, and
the main process writes the index.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import PartialState
from accelerate.utils import gather_object
from rich import filesize
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils.data import Dataset

from eagle_fsd.model.target import Target
from eagle_fsd.train.chat_file import MAX_DESCRIBED
from eagle_fsd.train.config import FeaturesRequest
from eagle_fsd.train.dataset import FILLER, ChatDataset, Example, collate
from eagle_fsd.train.features import compute_features, most_likely_tokens
from eagle_fsd.train.heads import head_reads, training_states
from eagle_fsd.train.loaded_target import LoadedTarget, check_device_map
from eagle_fsd.utils.files import atomic_path, atomic_write
from eagle_fsd.utils.processes import start_processes
from eagle_fsd.utils.progress import Progress, ProgressFactory, no_progress

log = logging.getLogger(__name__)

INDEX_FILE = "index.json"
#: Names of shards, and of those that an interrupted process was writing.
SHARD_NAME = re.compile(r"features-\d+\.safetensors(\.\w+\.tmp)?")
STORAGE_DTYPE = torch.bfloat16
#: Maximum number of chats that are encoded to estimate the size of all.
SAMPLE_CHATS = 512
#: Maximum numbers of consecutive chats in a shard, which are sorted by length to make batches, and
#: of their tokens if all have the maximum length: two shards are in memory.
SHARD_CHATS, SHARD_TOKENS = 32, 2**16
#: Maximum number of open shards, each a memory mapping; Linux allows 65,530 by default.
MAX_OPEN_SHARDS = 2**14


def estimate_bytes(data: ChatDataset, feature_size: int) -> int:
    """Estimate the disk space of ``feature_size`` numbers per token from a sample of the chats."""
    generator = torch.Generator().manual_seed(0)
    sample = torch.randperm(len(data), generator=generator)[:SAMPLE_CHATS].tolist()
    tokens = sum(len(data[index].ids) for index in sample) / len(sample) * len(data)
    numbers = 4 + 4 + 1  # two int32 and a uint8
    return int(tokens * (feature_size * STORAGE_DTYPE.itemsize + numbers))


class FeatureStore(Dataset[Example]):
    """Stored features, one example per chat in the order of the chat file.

    ``sizes`` are the chats' numbers of tokens. In an incomplete store, chats may be missing between
    others. Raises ValueError if the folder holds no features, or features with another
    ``fingerprint``: that of :meth:`LoadedTarget.fingerprint` with ``states``.
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
            self._states = list(range(len(self.fingerprint["states"])))
            chats = 0
            for shard in self.shards:
                shard.setdefault("first", chats)  # absent in stores of earlier versions
                chats = shard["first"] + len(shard["chats"])
            # Of each chat: its shard, its first row there, its rows, and whether it was truncated.
            self._locations: list[tuple[int, int, int, bool]] = [
                (number, start, tokens, truncated)
                for number, shard in enumerate(self.shards)
                for start, tokens, truncated in shard["chats"]
            ]
            self.sizes = [tokens for _, _, tokens, _ in self._locations]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is not an index of features: {error}") from error
        if fingerprint is not None:
            self.fingerprint.setdefault("dtype", fingerprint["dtype"])  # absent in earlier versions
            if fingerprint != self.fingerprint:
                changed = [
                    f"{name} is {self.fingerprint.get(name)!r} there, {value!r} here"
                    for name, value in fingerprint.items()
                    if self.fingerprint.get(name) != value
                ]
                difference = ", ".join(changed) or "other fields"
                raise ValueError(f"{folder} holds features of other data: {difference}")
        self._open_shards: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._locations)

    def __getitem__(self, index: int) -> Example:
        """Read a chat; for :data:`FILLER`, return two tokens of the first chat, masked out."""
        number, start, tokens, truncated = self._locations[max(index, 0)]
        shard = self._open_shard(number)
        tokens = 2 if index == FILLER else tokens
        rows, features = slice(start, start + tokens), None
        if self._states:
            stored = shard.get_slice("features")[rows]
            states = stored.unflatten(-1, (len(self.fingerprint["states"]), -1))
            features = states[:, self._states].flatten(1)
        mask = shard.get_slice("spoken")[rows].bool()
        return Example(
            index,
            ids=shard.get_slice("ids")[rows].tolist(),
            assistant_mask=[False] * tokens if index == FILLER else mask.tolist(),
            truncated=truncated and index != FILLER,
            features=features,
            # Absent in stores of earlier versions.
            best=shard.get_slice("best")[rows] if "best" in set(shard.keys()) else None,
        )

    def select(self, states: Sequence[int]) -> None:
        """Read only these hidden states, or none; raises ValueError if one is not stored."""
        stored = self.fingerprint["states"]
        if missing := set(states) - set(stored):
            raise ValueError(
                f"{self.folder} holds the hidden states {stored}, without {sorted(missing)}"
            )
        self._states = [stored.index(state) for state in states]

    def _open_shard(self, number: int) -> Any:
        if number not in self._open_shards:
            if len(self._open_shards) >= MAX_OPEN_SHARDS:
                del self._open_shards[next(iter(self._open_shards))]
            path = self.folder / self.shards[number]["file"]
            self._open_shards[number] = safe_open(path, framework="pt")
        return self._open_shards[number]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open_shards": {}}


def store_features(
    request: FeaturesRequest,
    *,
    token: str | None = None,
    progress: ProgressFactory = no_progress,
) -> FeatureStore | None:
    """Compute and store the target's features of chats; return None on all but the main process.

    Every process of ``accelerate launch`` or ``torchrun`` calls this, with the same output folder.
    ``progress`` reports ``reading`` (in bytes) and ``features`` (in chats). OSError is
    raised if there is too little space for the features that are still to be written.
    """
    state = start_processes()
    check_device_map(request.device_map, state.num_processes)
    is_main = state.is_main_process
    progress = progress if is_main else no_progress
    loaded = LoadedTarget.load(request, request.device_map or state.device, token)
    with progress("reading") as report:
        chats = loaded.open_chats(request.data, request.max_length, report)
    states = training_states(head_reads(request.head_type, loaded.target))
    needed = estimate_bytes(chats, loaded.target.hidden_size * len(states))
    request.out.mkdir(parents=True, exist_ok=True)
    stored = sum(shard.stat().st_size for shard in request.out.glob("features-*"))
    state.wait_for_everyone()  # before partial files are removed
    needed = max(0, needed - stored)
    free = shutil.disk_usage(request.out).free
    needs, has = filesize.decimal(needed), filesize.decimal(free)
    if needed > free:
        raise OSError(f"{request.out} has {has} free; about {needs} are needed")
    if is_main:
        log.warning("about %s for %d chats; %s are free in %s", needs, len(chats), has, request.out)
    fingerprint = loaded.fingerprint(request.data, request.max_length)
    with progress("features") as report:
        store = write_features(
            chats,
            loaded.target,
            states,
            request.out,
            fingerprint=fingerprint,
            batch_size=request.batch_size,
            progress=report,
        )
    state.destroy_process_group()
    return store if is_main else None


def write_features(
    data: ChatDataset,
    target: Target,
    states: Sequence[int],
    folder: str | Path,
    fingerprint: dict[str, Any],
    batch_size: int = 4,
    shard_chats: int | None = None,
    progress: Progress | None = None,
) -> FeatureStore:
    """Store the hidden states ``states`` of every chat that is not in a complete shard yet.

    Chats that cannot be encoded are stored without answers; the first ones are logged. All
    processes share the work. Except for rounding, the result has the same examples whatever their
    number, in this run and in earlier ones that were interrupted.
    """
    state, folder = PartialState(), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    fingerprint = {**fingerprint, "states": list(states)}
    shards: list[dict[str, Any]] = []
    if (folder / INDEX_FILE).exists():
        shards = FeatureStore(folder, fingerprint).shards
    if state.is_main_process:
        listed = {shard["file"] for shard in shards}
        for file in folder.glob("features-*"):  # that an interrupted run wrote
            if SHARD_NAME.fullmatch(file.name) and file.name not in listed:
                file.unlink()
    state.wait_for_everyone()  # before the index and the files change
    size = shard_chats or max(1, min(SHARD_CHATS, SHARD_TOKENS // data.max_length))
    missing = _missing_shards(shards, len(data), size)
    first = len(missing) * state.process_index // state.num_processes
    last = len(missing) * (state.process_index + 1) // state.num_processes
    own = missing[first:last]
    work = (
        _compute_shard(data, target, states, chats=chats, batch_size=batch_size) for chats in own
    )
    described, indexed = 0, len(shards)
    while True:
        examples = next(work, None)
        for item in examples or ():
            if item.error is not None and described < MAX_DESCRIBED:
                described += 1
                log.warning("skipped a chat: %s", item.error)
        written = gather_object([] if examples is None else [_write_shard(folder, examples)])
        if not written:
            return FeatureStore(folder)
        shards = sorted([*shards, *written], key=lambda shard: int(shard["first"]))
        done = sum(len(shard["chats"]) for shard in shards)
        complete = done == len(data)
        # The index is written each time it has grown by 1/32, so the bytes written in all are
        # proportional to its size. A resumed run recomputes shards that the index lacks.
        if state.is_main_process and (complete or len(shards) - indexed > len(shards) // 32):
            index = {"made_from": fingerprint, "complete": complete, "shards": shards}
            atomic_write(folder / INDEX_FILE, json.dumps(index))
            indexed = len(shards)
        if progress is not None:
            progress(done, len(data))


def _missing_shards(shards: Sequence[dict[str, Any]], count: int, size: int) -> list[range]:
    """Divide the chats that are in no shard into shards of consecutive ones."""
    missing: list[range] = []
    start = 0
    for stop, resume in [
        *((shard["first"], shard["first"] + len(shard["chats"])) for shard in shards),
        (count, count),
    ]:
        missing += [range(at, min(at + size, stop)) for at in range(start, stop, size)]
        start = resume
    return missing


def _compute_shard(
    data: ChatDataset, target: Target, states: Sequence[int], chats: range, batch_size: int
) -> list[Example]:
    """Return chats with their features, computed in batches of similar lengths."""
    shard = [data[index] for index in chats]
    by_length = sorted(shard, key=lambda item: len(item.ids))
    for start in range(0, len(shard), batch_size):
        batch = by_length[start : start + batch_size]
        padded = collate(batch)
        computed = compute_features(target, padded.ids, states)
        best = torch.zeros_like(padded.ids)
        needed = F.pad(padded.loss_mask, (1, 0))  # features that the loss compares with predictions
        labels = computed[..., -target.hidden_size :]  # the last of the states
        best[needed] = most_likely_tokens(target, labels[needed.to(labels.device)]).cpu()
        for row, item in enumerate(batch):
            item.features = computed[row, : len(item.ids)].to("cpu", STORAGE_DTYPE)
            item.best = best[row, : len(item.ids)]
    return shard


def _write_shard(folder: Path, examples: Sequence[Example]) -> dict[str, Any]:
    """Write a shard, and return its entry in the index."""
    first = examples[0].index
    file = f"features-{first:05d}.safetensors"
    tensors = {  # "spoken" is the assistant mask in the file format
        "ids": torch.cat([torch.tensor(item.ids, dtype=torch.int32) for item in examples]),
        "spoken": torch.cat(
            [torch.tensor(item.assistant_mask, dtype=torch.uint8) for item in examples]
        ),
        "features": torch.cat([item.features for item in examples if item.features is not None]),
        "best": torch.cat([item.best.int() for item in examples if item.best is not None]),
    }
    with atomic_path(folder / file) as temporary:
        save_file(tensors, temporary)
    chats, start = [], 0
    for item in examples:
        chats.append((start, len(item.ids), item.truncated))
        start += len(item.ids)
    return {"file": file, "first": first, "chats": chats}
