"""Tests for stored features: they equal computed ones, and a kill never damages the store."""

from __future__ import annotations

import json
import pickle
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from trainings import (
    Killed,
    read_losses,
    read_metrics,
    read_weights,
    replace_call,
    same_weights,
    train_here,
    write_chats,
)

from eagle_fsd.model.config import TargetOptions
from eagle_fsd.model.target import LAST
from eagle_fsd.train import feature_store
from eagle_fsd.train.config import FeaturesRequest
from eagle_fsd.train.dataset import FILLER, ChatDataset, Example, collate
from eagle_fsd.train.feature_store import (
    FeatureStore,
    estimate_bytes,
    format_bytes,
    store_features,
    write_features,
)
from eagle_fsd.train.features import add_noise, batch_features, compute_features
from eagle_fsd.train.loaded_target import LoadedTarget

COUNT = 23
#: Seconds until a wait for another process fails.
TIMEOUT = 100
MAX_LENGTH = 100
#: A few chats of the tiny target fill a shard of this size.
SHARD_BYTES = 8000


@pytest.fixture(scope="module")
def loaded(target: Path) -> LoadedTarget:
    return LoadedTarget.load(TargetOptions(target=target), device_map="cpu")


@pytest.fixture(scope="module")
def chats(loaded: LoadedTarget, tmp_path_factory: pytest.TempPathFactory) -> ChatDataset:
    file = write_chats(tmp_path_factory.mktemp("features") / "chats.jsonl", COUNT)
    return loaded.open_chats(file, MAX_LENGTH)


@pytest.fixture(scope="module")
def fingerprint(loaded: LoadedTarget, chats: ChatDataset) -> dict[str, Any]:
    return {**loaded.fingerprint(chats.file.path, MAX_LENGTH), "states": [LAST]}


@pytest.fixture(scope="module")
def store(
    loaded: LoadedTarget,
    chats: ChatDataset,
    fingerprint: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> FeatureStore:
    folder = tmp_path_factory.mktemp("store") / "features"
    return write_features(chats, loaded.target, folder, fingerprint, shard_bytes=SHARD_BYTES)


def same_example(one: Example, other: Example) -> bool:
    """Whether examples are equal bit for bit, except for features that one of them lacks."""
    names = ("index", "ids", "assistant_mask", "truncated")
    if any(getattr(one, name) != getattr(other, name) for name in names):
        return False
    if one.features is None or other.features is None:
        return True
    return torch.equal(one.features, other.features)


def test_stored_features_equal_computed_ones(
    store: FeatureStore, chats: ChatDataset, loaded: LoadedTarget
) -> None:
    """Up to the precision of bfloat16."""
    assert len(store) == COUNT
    assert store.complete
    assert len(store.shards) > 3
    truncated = 0
    for index in range(COUNT):
        stored, fresh = store[index], chats[index]
        assert same_example(stored, fresh)
        assert stored.features is not None
        assert stored.features.dtype == torch.bfloat16
        assert store.size(index) == len(stored.ids) == len(stored.features)
        features = compute_features(loaded.target, torch.tensor([fresh.ids]))[0]
        torch.testing.assert_close(stored.features.float(), features, rtol=2**-7, atol=1e-4)
        truncated += stored.truncated
    assert 0 < truncated < COUNT


def test_filler_of_a_store_is_masked_out(store: FeatureStore) -> None:
    filler = store[FILLER]
    assert filler.index == FILLER
    assert not any(filler.assistant_mask)
    assert filler.features is not None
    assert len(filler.ids) == len(filler.features) == 2


def test_batch_uses_its_stored_features(store: FeatureStore, loaded: LoadedTarget) -> None:
    batch = collate([store[3], store[4]])
    assert batch.features is not None
    assert batch_features(loaded.target, batch) is batch.features
    for row, length in enumerate(batch.lengths):
        assert torch.equal(batch.features[row, :length], store[3 + row].features)
    batch.features = None
    assert batch_features(loaded.target, batch).shape == (*batch.ids.shape, 32)


def test_worker_processes_open_shards_for_themselves(store: FeatureStore) -> None:
    store[0]  # opens a shard
    copy = pickle.loads(pickle.dumps(store))
    assert same_example(copy[5], store[5])
    loader = DataLoader(store, batch_size=None, sampler=range(COUNT), num_workers=2)
    for example in loader:
        assert same_example(example, store[example.index])


def test_noise_depends_on_the_chat_and_the_seed_only(store: FeatureStore) -> None:
    """Not on the row, the batch or its padding."""
    together, alone = collate([store[3], store[4]]), collate([store[4]])
    assert together.features is not None
    assert alone.features is not None
    noisy = add_noise(together.features[:, :-1], together, 0.1, seed=5)
    length = alone.lengths[0] - 1
    other = add_noise(alone.features[:, :-1], alone, 0.1, seed=5)
    assert torch.equal(noisy[1, :length], other[0])
    difference = (other - alone.features[:, :-1].float()).abs()
    assert 0.05 < difference.max() <= 0.1 + 1e-6
    assert not torch.equal(add_noise(alone.features[:, :-1], alone, 0.1, seed=6), other)


# -- size ------------------------------------------------------------------------------------------


def test_estimate_matches_the_size_on_disk(store: FeatureStore, chats: ChatDataset) -> None:
    size = sum(file.stat().st_size for file in store.folder.glob("*.safetensors"))
    headers = 400 * len(store.shards)
    assert estimate_bytes(chats, 32) == pytest.approx(size - headers, rel=0.05)


def test_estimate_reads_a_sample_of_the_chats(
    chats: ChatDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = estimate_bytes(chats, 4096)
    read: list[int] = []
    original = ChatDataset.__getitem__
    monkeypatch.setattr(feature_store, "SAMPLE_CHATS", 7)
    monkeypatch.setattr(ChatDataset, "__getitem__", lambda s, i: read.append(i) or original(s, i))
    assert estimate_bytes(chats, 4096) == pytest.approx(full, rel=0.2)
    assert len(read) == 7


def test_too_little_space_is_reported_before_writing(
    chats: ChatDataset, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    request = FeaturesRequest(data=chats.file.path, out=tmp_path / "features", target=target)
    estimates: list[tuple[int, int, int]] = []
    with pytest.raises(OSError, match=r"has 10\.0 B free; about [\d.]+ KB are needed"):
        store_features(request, on_estimate=lambda *estimate: estimates.append(estimate))
    assert [estimate[1:] for estimate in estimates] == [(10, COUNT)]
    assert not any(request.out.iterdir())


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0.0 B"), (1500, "1.5 KB"), (2e9, "2.0 GB"), (3e15, "3000.0 TB")]
)
def test_format_bytes(size: float, text: str) -> None:
    assert format_bytes(size) == text


# -- interruptions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["in-shard", "before-index", "in-index"])
@pytest.mark.parametrize("after", [0, 2])
def test_interrupted_writing_resumes(
    moment: str,
    after: int,
    store: FeatureStore,
    loaded: LoadedTarget,
    chats: ChatDataset,
    fingerprint: dict[str, Any],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "features"

    def write(progress: Any = None) -> FeatureStore:
        return write_features(
            chats, loaded.target, folder, fingerprint, 4, SHARD_BYTES, progress=progress
        )

    with pytest.MonkeyPatch.context() as patch:
        kill(patch, moment, after)
        with pytest.raises(Killed):
            write()
    if (folder / "index.json").exists():
        partial = FeatureStore(folder, fingerprint)
        assert not partial.complete
        assert len(partial.shards) == after
        assert all(same_example(partial[index], store[index]) for index in range(len(partial)))
    else:
        assert after == 0
    reported: list[int] = []
    complete = write(lambda done, _: reported.append(done))
    assert len(reported) == len(store.shards) - after  # complete shards are not written again
    assert complete.complete
    assert complete.shards == store.shards
    assert all(same_example(complete[index], store[index]) for index in range(COUNT))
    names = {file.name for file in folder.iterdir()}
    assert names == {file.name for file in store.folder.iterdir()}
    assert write().shards == store.shards  # nothing is left to do


def kill(patch: pytest.MonkeyPatch, moment: str, after: int) -> None:
    """Raise :class:`Killed` while writing a shard or the index, after some complete ones."""

    def die(*_: Any) -> None:
        raise Killed

    def write_half(_: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise Killed

    if moment == "in-shard":
        replace_call(patch, feature_store, "save_file", after + 1, write_half)
    elif moment == "before-index":
        replace_call(patch, feature_store, "atomic_write", after + 1, die)
    else:
        original = Path.replace
        replaced = 0

        def replace(path: Path, to: Path) -> Path:
            nonlocal replaced
            replaced += to.name == "index.json"
            if replaced > after:
                raise Killed
            return original(path, to)

        patch.setattr(Path, "replace", replace)


# -- several processes -----------------------------------------------------------------------------


class Group:
    """Processes that are threads of this one; see ``accelerate.PartialState``."""

    def __init__(self, processes: int, patch: pytest.MonkeyPatch) -> None:
        self.processes = processes
        self.barrier = threading.Barrier(processes)
        self.gathered: list[list[Any]] = [[] for _ in range(processes)]
        self.local = threading.local()
        patch.setattr(feature_store, "gather_object", self.gather)

    def gather(self, items: list[Any]) -> list[Any]:
        self.gathered[self.local.rank] = items
        self.barrier.wait(TIMEOUT)
        found = [item for part in self.gathered for item in part]
        self.barrier.wait(TIMEOUT)
        return found

    def run(self, work: Callable[[Any], FeatureStore]) -> list[FeatureStore | BaseException]:
        """Call ``work`` with the state of each process; a process that fails ends the others."""
        results: list[Any] = [None] * self.processes

        def start(rank: int) -> None:
            self.local.rank = rank
            state = SimpleNamespace(
                process_index=rank,
                num_processes=self.processes,
                is_main_process=rank == 0,
                wait_for_everyone=lambda: self.barrier.wait(TIMEOUT),
            )
            try:
                results[rank] = work(state)
            except BaseException as error:
                results[rank] = error
                self.barrier.abort()

        threads = [threading.Thread(target=start, args=(rank,)) for rank in range(self.processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def copy_of(chats: ChatDataset) -> ChatDataset:
    """Return what a process has: an open file of its own."""
    copy: ChatDataset = pickle.loads(pickle.dumps(chats))
    return copy


def same_store(one: FeatureStore, other: FeatureStore) -> bool:
    """Whether stores have the same examples in the same order."""
    return len(one) == len(other) and all(
        same_example(one[index], other[index]) for index in range(len(one))
    )


@pytest.mark.parametrize("processes", [1, 2, 3, 5])
@pytest.mark.parametrize("shard_bytes", [SHARD_BYTES, 1 << 30])
def test_processes_share_the_chats(
    processes: int,
    shard_bytes: int,
    store: FeatureStore,
    loaded: LoadedTarget,
    chats: ChatDataset,
    fingerprint: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store has the examples of a single process, bit for bit."""
    computed: list[int] = []
    reported: list[int] = []

    def write(state: Any) -> FeatureStore:
        progress = (lambda done, total: reported.append(done)) if state.is_main_process else None
        return write_features(
            *(copy_of(chats), loaded.target, tmp_path, fingerprint, 2, shard_bytes, progress, state)
        )

    spy_on_chats(monkeypatch, computed)
    results = Group(processes, monkeypatch).run(write)
    monkeypatch.undo()
    assert sorted(computed) == list(range(COUNT))
    for found in results:
        assert isinstance(found, FeatureStore)
        assert found.complete
    single = write_features(chats, loaded.target, tmp_path / "one", fingerprint, 2)
    assert same_store(FeatureStore(tmp_path), single)
    assert reported == sorted(reported)
    assert reported[-1] == COUNT
    if shard_bytes > SHARD_BYTES:  # a shard for each process
        firsts = [shard["first"] for shard in FeatureStore(tmp_path).shards]
        assert len(firsts) == processes
        bounds = [*firsts, COUNT]
        sizes = [
            sum(chats.size(index) for index in range(*bounds[at : at + 2]))
            for at in range(processes)
        ]
        assert max(sizes) < 1.5 * sum(sizes) / processes


def spy_on_chats(patch: pytest.MonkeyPatch, read: list[int]) -> None:
    original = ChatDataset.__getitem__

    def spy(data: ChatDataset, index: int) -> Example:
        read.append(index)
        return original(data, index)

    patch.setattr(ChatDataset, "__getitem__", spy)


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2, 3])
@pytest.mark.parametrize("victim", [0, 1])
def test_any_number_of_processes_resumes(
    before: int,
    after: int,
    victim: int,
    store: FeatureStore,
    loaded: LoadedTarget,
    chats: ChatDataset,
    fingerprint: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a process was killed in its second shard. Complete ones are not computed again."""

    def write(state: Any) -> FeatureStore:
        return write_features(
            *(copy_of(chats), loaded.target, tmp_path, fingerprint, 4, SHARD_BYTES, None, state)
        )

    victim = min(victim, before - 1)
    group = Group(before, monkeypatch)
    original = feature_store.save_file
    written: dict[int, int] = {}

    def save(tensors: Any, path: Path) -> None:
        rank = group.local.rank
        written[rank] = written.get(rank, 0) + 1
        if rank == victim and written[rank] == 2:
            while not (tmp_path / "index.json").exists():
                time.sleep(0.01)  # the main process is still writing it
            path.write_bytes(b"half")
            raise Killed
        original(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(feature_store, "save_file", save)
        results = group.run(write)
    assert isinstance(results[victim], Killed)
    partial = FeatureStore(tmp_path, fingerprint)
    assert not partial.complete
    assert len(partial.shards) == before
    stored = {
        shard["first"] + offset for shard in partial.shards for offset in range(len(shard["chats"]))
    }
    computed: list[int] = []
    with monkeypatch.context() as patch:
        spy_on_chats(patch, computed)
        results = Group(after, patch).run(write)
    assert all(isinstance(found, FeatureStore) for found in results), results
    assert sorted(computed) == sorted(set(range(COUNT)) - stored)
    complete = FeatureStore(tmp_path, fingerprint)
    assert complete.complete
    assert same_store(complete, store)
    files = {shard["file"] for shard in complete.shards}
    assert {file.name for file in tmp_path.iterdir()} == {"index.json", *files}


def test_store_of_an_earlier_version_is_resumed(
    store: FeatureStore,
    loaded: LoadedTarget,
    chats: ChatDataset,
    fingerprint: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Its index does not name the first chat of each shard, and its files are numbered."""
    index = json.loads((store.folder / "index.json").read_text())
    index["complete"], index["shards"] = False, index["shards"][:2]
    for number, shard in enumerate(index["shards"]):
        shutil.copy(store.folder / shard["file"], tmp_path / f"features-{number:05d}.safetensors")
        shard["file"] = f"features-{number:05d}.safetensors"
        del shard["first"]
    (tmp_path / "index.json").write_text(json.dumps(index))
    (tmp_path / "features-of-mine.txt").touch()
    resumed = write_features(chats, loaded.target, tmp_path, fingerprint, 4, SHARD_BYTES)
    assert resumed.complete
    assert same_store(resumed, store)
    assert (tmp_path / "features-of-mine.txt").exists()


@pytest.mark.parametrize("name", ["data", "bytes", "target", "template", "max_length", "states"])
def test_features_of_other_data_are_not_resumed(
    name: str,
    store: FeatureStore,
    loaded: LoadedTarget,
    chats: ChatDataset,
    fingerprint: dict[str, Any],
) -> None:
    other = {**fingerprint, name: "another"}
    before = (store.folder / "index.json").read_text()
    with pytest.raises(ValueError, match=f"holds features of other data: {name} ") as caught:
        write_features(chats, loaded.target, store.folder, other)
    assert "'another' here" in str(caught.value)
    assert (store.folder / "index.json").read_text() == before


@pytest.mark.parametrize("content", ["", "{}", '{"made_from": {}'])
def test_damaged_index_is_rejected(content: str, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(ValueError, match="is not an index of features"):
        FeatureStore(tmp_path)
    with pytest.raises(ValueError, match="holds no features"):
        FeatureStore(tmp_path / "elsewhere")


# -- training on stored features -------------------------------------------------------------------


def test_training_on_stored_features_equals_training_on_chats(
    store: FeatureStore, chats: ChatDataset, target: Path, tmp_path: Path
) -> None:
    """Up to rounding, with all chats in one batch: the two sort batches by different lengths."""
    settings = {"max_length": MAX_LENGTH, "batch_size": COUNT, "max_steps": 6}
    fresh = train_here(chats.file.path, tmp_path / "fresh", target, **settings)
    stored = train_here(None, tmp_path / "stored", target, features=store.folder, **settings)
    assert read_losses(stored).tolist() == pytest.approx(read_losses(fresh).tolist(), rel=1e-3)
    assert read_losses(stored)[-1] < read_losses(stored)[0]


def test_training_on_stored_features_validates_and_resumes(
    store: FeatureStore, target: Path, tmp_path: Path
) -> None:
    settings = {"features": store.folder, "validation": 2, "validate_every": 6}
    out = train_here(None, tmp_path / "out", target, **settings)
    before = read_weights(out)
    train_here(None, out, target, resume=True, **settings)
    assert same_weights(read_weights(out), before)
    assert [line["step"] for line in read_metrics(out, "validation")] == [6, 12]


def test_features_of_another_target_are_rejected(store: FeatureStore, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds features of the target"):
        train_here(None, tmp_path / "out", None, features=store.folder)


def test_incomplete_features_are_rejected(
    loaded: LoadedTarget,
    chats: ChatDataset,
    fingerprint: dict[str, Any],
    target: Path,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "partial"
    with pytest.MonkeyPatch.context() as patch:
        kill(patch, "in-shard", 1)
        with pytest.raises(Killed):
            write_features(chats, loaded.target, folder, fingerprint, shard_bytes=SHARD_BYTES)
    with pytest.raises(ValueError, match="run eagle-fsd train features again"):
        train_here(None, tmp_path / "out", target, features=folder)
