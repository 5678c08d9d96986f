"""Tests for stored features: they equal computed ones, and a kill never damages the store."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerators import reset_accelerator_state
from torch.utils.data import DataLoader
from trainings import (
    Train,
    killed,
    read_losses,
    train_here,
    write_chats,
    write_half,
)

from eagle_fsd.model.config import TargetOptions
from eagle_fsd.model.target import LAST
from eagle_fsd.train import feature_store, loaded_target
from eagle_fsd.train.config import FeaturesRequest
from eagle_fsd.train.dataset import FILLER, Example, collate
from eagle_fsd.train.feature_store import (
    FeatureStore,
    estimate_bytes,
    store_features,
    write_features,
)
from eagle_fsd.train.features import add_noise, compute_features
from eagle_fsd.train.loaded_target import LoadedTarget, fastest_dtype
from eagle_fsd.train.run import make_accelerator
from recipes.smollm2 import Recipe, Scale

COUNT = 23
MAX_LENGTH = 100
SHARD_CHATS = 5


class Source:
    """A target and chats, whose features the tests store."""

    def __init__(self, target: Path, file: Path) -> None:
        loaded = LoadedTarget.load(TargetOptions(target=target), device_map="cpu")
        self.target, self.chats = loaded.target, loaded.open_chats(file, MAX_LENGTH)
        self.fingerprint = loaded.fingerprint(file, MAX_LENGTH)

    def write(
        self,
        folder: Path,
        *,
        states: tuple[int, ...] = (LAST,),
        progress: Any = None,
        **changes: Any,
    ) -> FeatureStore:
        """Store the features of chats with a fingerprint, whose fields may be changed."""
        fingerprint = {**self.fingerprint, **changes}
        given = (self.chats, self.target, states, folder, fingerprint)
        return write_features(*given, batch_size=2, shard_chats=SHARD_CHATS, progress=progress)


@pytest.fixture(scope="module")
def source(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Source:
    return Source(target, write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", COUNT))


@pytest.fixture(scope="module")
def store(source: Source, tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    return source.write(tmp_path_factory.mktemp("store") / "features")


def same_example(one: Example, other: Example) -> bool:
    """Whether examples are equal bit for bit, except for features that one of them lacks."""
    names = ("index", "ids", "assistant_mask", "truncated")
    if any(getattr(one, name) != getattr(other, name) for name in names):
        return False
    if one.features is None or other.features is None:
        return True
    return torch.equal(one.features, other.features)


def test_stored_features_equal_computed_ones(store: FeatureStore, source: Source) -> None:
    """Stored features equal computed ones up to the precision of bfloat16."""
    assert (len(store), store.complete) == (COUNT, True)
    assert len(store.shards) > 3
    for index in range(COUNT):
        stored, fresh = store[index], source.chats[index]
        assert same_example(stored, fresh)
        assert stored.features.dtype == torch.bfloat16
        assert store.sizes[index] == len(stored.ids) == len(stored.features)
        features = compute_features(source.target, torch.tensor([fresh.ids]))[0]
        torch.testing.assert_close(stored.features.float(), features, rtol=2**-7, atol=1e-4)
    assert 0 < sum(store[index].truncated for index in range(COUNT)) < COUNT
    filler = store[FILLER]
    assert (filler.index, len(filler.ids), len(filler.features)) == (FILLER, 2, 2)
    assert not any(filler.assistant_mask)
    size = sum(file.stat().st_size for file in store.folder.glob("*.safetensors"))
    assert estimate_bytes(source.chats, 32) == pytest.approx(
        size - 400 * len(store.shards), rel=0.05
    )


def test_worker_processes_open_shards_for_themselves(store: FeatureStore) -> None:
    store[0]  # opens a shard
    assert same_example(pickle.loads(pickle.dumps(store))[5], store[5])
    for example in DataLoader(store, batch_size=None, sampler=range(COUNT), num_workers=2):
        assert same_example(example, store[example.index])


def test_larger_parts_of_a_store_contain_smaller_ones(store: FeatureStore, tmp_path: Path) -> None:
    """The learning curve of SmolLM2's heads is measured on such parts."""
    shutil.copytree(store.folder, tmp_path / "features")
    recipe = Recipe(tmp_path, tmp_path, tmp_path, Scale())
    tokens = sum(store.sizes)
    whole = {tuple(item.ids): item.features for item in map(store.__getitem__, range(COUNT))}
    previous: set[tuple[int, ...]] = set()
    for about in (tokens // 8, tokens // 2, tokens):
        part = FeatureStore(recipe.some_features(about), store.fingerprint)
        chats = [part[index] for index in range(len(part))]
        sizes = sum(len(item.ids) for item in chats)
        assert about <= sizes < about + SHARD_CHATS * MAX_LENGTH
        assert all(torch.equal(item.features, whole[tuple(item.ids)]) for item in chats)
        found = {tuple(item.ids) for item in chats}
        assert previous < found
        previous = found
    assert previous == set(whole)


def test_noise_depends_on_the_chat_and_the_seed_only(store: FeatureStore) -> None:
    """Noise does not depend on a chat's row, its batch or its padding."""
    together, alone = collate([store[3], store[4]]), collate([store[4]])
    noisy = add_noise(together.features[:, :-1], together, 0.1, seed=5)
    other = add_noise(alone.features[:, :-1], alone, 0.1, seed=5)
    assert torch.equal(noisy[1, : alone.lengths[0] - 1], other[0])
    difference = (other - alone.features[:, :-1].float()).abs()
    assert 0.05 < difference.max() <= 0.1 + 1e-6
    assert not torch.equal(add_noise(alone.features[:, :-1], alone, 0.1, seed=6), other)


# -- size ------------------------------------------------------------------------------------------


def test_too_little_space_is_reported_before_writing(
    source: Source,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What an earlier run has stored is not counted."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    request = FeaturesRequest(data=source.chats.file.path, out=tmp_path / "features", target=target)
    with pytest.raises(OSError, match=r"has 10 bytes free; about [\d.]+ kB are needed"):
        store_features(request)
    assert not any(request.out.iterdir())
    monkeypatch.undo()
    for _ in range(2):
        store_features(request)
    found = re.findall(rf"about [\d.]+ (\w+) for {COUNT} chats; .* are free in ", caplog.text)
    assert found == ["kB", "bytes"]


def test_chats_that_the_template_rejects_are_reported(
    target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_chats(tmp_path / "chats.jsonl", 2)
    call = {"function": {"name": "add", "arguments": {}}}
    chat = [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "assistant", "content": "Hi!"},
    ]
    file.write_text(file.read_text() + json.dumps({"messages": chat}) + "\n")
    store = Source(target, file).write(tmp_path / "features")
    assert f"skipped a chat: {file}, line 3: the chat template omits" in caplog.text
    assert [any(store[index].assistant_mask) for index in range(3)] == [True, True, False]


# -- interruptions ---------------------------------------------------------------------------------


def test_interrupted_writing_resumes(store: FeatureStore, source: Source, tmp_path: Path) -> None:
    """Writing resumes after a kill in a shard, before the index, and before its renaming."""
    moments = {
        "in_shard": lambda after: (feature_store, "save_file", after + 1, write_half),
        "before_index": lambda after: (feature_store, "atomic_write", after + 1, lambda *_: None),
        "in_index": lambda after: (Path, "replace", 2 * after + 2, lambda *_: None),
    }
    for name, moment in moments.items():
        for after in (0, 2):
            folder = tmp_path / f"{name}-{after}"
            with killed(*moment(after)):
                source.write(folder)
            assert (folder / "index.json").exists() == bool(after)
            if after:
                partial = FeatureStore(folder, store.fingerprint)
                assert (len(partial.shards), partial.complete) == (after, False)
                assert all(same_example(partial[at], store[at]) for at in range(len(partial)))
            reported: list[int] = []
            complete = source.write(folder, progress=lambda done, _, to=reported: to.append(done))
            assert len(reported) == len(store.shards) - after  # others are not written again
            assert (complete.shards, complete.complete) == (store.shards, True)
            assert same_store(complete, store)
            names = {file.name for file in folder.iterdir()}
            assert names == {file.name for file in store.folder.iterdir()}
            assert source.write(folder).shards == store.shards  # nothing is left to do


# -- several processes -----------------------------------------------------------------------------


def same_store(one: FeatureStore, other: FeatureStore) -> bool:
    """Whether stores have the same examples in the same order."""
    return len(one) == len(other) and all(
        same_example(one[index], other[index]) for index in range(len(one))
    )


def test_store_of_an_earlier_version_is_resumed(
    store: FeatureStore, source: Source, tmp_path: Path
) -> None:
    """Its index has no dtype and no first chat of each shard, and its files are numbered."""
    index = json.loads((store.folder / "index.json").read_text())
    del index["made_from"]["dtype"]
    index["complete"], index["shards"] = False, index["shards"][:2]
    for number, shard in enumerate(index["shards"]):
        shutil.copy(store.folder / shard["file"], tmp_path / f"features-{number:05d}.safetensors")
        shard["file"] = f"features-{number:05d}.safetensors"
        del shard["first"]
    (tmp_path / "index.json").write_text(json.dumps(index))
    (tmp_path / "features-of-mine.txt").touch()
    resumed = source.write(tmp_path)
    assert resumed.complete
    assert same_store(resumed, store)
    assert (tmp_path / "features-of-mine.txt").exists()


def test_features_of_other_data_are_not_resumed(
    train: Train, store: FeatureStore, source: Source, tmp_path: Path
) -> None:
    before = (store.folder / "index.json").read_text()
    for name in source.fingerprint:
        with pytest.raises(ValueError, match=f"other data: {name} .*'another' here"):
            source.write(store.folder, **{name: "another"})
    with pytest.raises(ValueError, match=r"other data: states is \[-1\] there, \[0, -1\] here"):
        source.write(store.folder, states=(0, LAST))
    assert (store.folder / "index.json").read_text() == before
    with pytest.raises(ValueError, match="holds features of the target"):
        train_here(None, tmp_path / "out", None, features=store.folder)
    folder = tmp_path / "partial"
    with killed(feature_store, "save_file", 2, write_half):
        source.write(folder)
    with pytest.raises(ValueError, match="run eagle-fsd train features again"):
        train(features=folder)
    (folder / "index.json").write_text('{"made_from": {}')
    with pytest.raises(ValueError, match="is not an index of features"):
        FeatureStore(folder)
    with pytest.raises(ValueError, match="holds no features"):
        FeatureStore(tmp_path / "elsewhere")


def test_bfloat16_is_chosen_for_a_cpu_that_is_faster_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a GPU, the device that is used decides; ACCELERATE_USE_CPU can select it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(loaded_target, "_time_product", lambda _: 1.0)
    assert fastest_dtype("cpu") is None  # its instructions for bfloat16 are no faster
    monkeypatch.setattr(loaded_target, "_time_product", lambda dtype: dtype.itemsize)
    found = [fastest_dtype(device) for device in (None, "cuda:0", "cpu", torch.device("cpu"))]
    assert found == [None, None, "bfloat16", "bfloat16"]
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        assert fastest_dtype("auto") == fastest_dtype() == "bfloat16"
    assert fastest_dtype("auto") is None
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    for cpu in (True, False):
        monkeypatch.setenv("ACCELERATE_USE_CPU", str(not cpu))
        reset_accelerator_state()
        assert make_accelerator(tmp_path, cpu).mixed_precision == "bf16"
    reset_accelerator_state()


# -- training on stored features -------------------------------------------------------------------


def test_training_on_stored_features_equals_training_on_chats(
    train: Train, store: FeatureStore, source: Source, target: Path, tmp_path: Path
) -> None:
    """Losses agree up to rounding; one batch holds all chats, as the two sort them differently."""
    settings = {"max_length": MAX_LENGTH, "batch_size": COUNT, "max_steps": 6}
    fresh = train_here(source.chats.file.path, tmp_path / "fresh", target, **settings)
    stored = train("stored", features=store.folder, **settings)
    assert read_losses(stored).tolist() == pytest.approx(read_losses(fresh).tolist(), rel=1e-3)
    assert read_losses(stored)[-1] < read_losses(stored)[0]
