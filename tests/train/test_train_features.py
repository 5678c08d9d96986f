"""Stored features: what computing them would give, in a store that a kill does not harm."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from trainings import losses, metrics, same_weights, train_here, weights, write_chats

from eagle_fsd.train import features as module
from eagle_fsd.train.dataset import NOTHING, ChatDataset, Example, collate
from eagle_fsd.train.features import (
    FeatureStore,
    batch_features,
    compute_features,
    estimated_bytes,
    write_features,
)
from eagle_fsd.train.run import Source

COUNT = 23
LIMIT = 100
#: So small that a few chats fill a shard of the tiny target's features.
SHARD = 8000


@pytest.fixture(scope="module")
def source(target: Path) -> Source:
    return Source.load(target, device="cpu")


@pytest.fixture(scope="module")
def chats(source: Source, tmp_path_factory: pytest.TempPathFactory) -> ChatDataset:
    file = write_chats(tmp_path_factory.mktemp("features") / "chats.jsonl", COUNT)
    return source.open(file, LIMIT)


@pytest.fixture(scope="module")
def made_from(source: Source, chats: ChatDataset) -> dict[str, Any]:
    return source.describe(chats.file.path, LIMIT)


@pytest.fixture(scope="module")
def store(
    source: Source,
    chats: ChatDataset,
    made_from: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> FeatureStore:
    folder = tmp_path_factory.mktemp("store") / "features"
    return write_features(chats, source.target, folder, made_from, shard_bytes=SHARD)


def same(one: Example, other: Example) -> bool:
    """Bit for bit, features apart where one has none."""
    alike = (one.chat, one.ids, one.spoken, one.cut) == (
        other.chat,
        other.ids,
        other.spoken,
        other.cut,
    )
    if one.features is None or other.features is None:
        return alike
    return alike and torch.equal(one.features, other.features)


def test_what_is_stored_is_what_would_be_computed(
    store: FeatureStore, chats: ChatDataset, source: Source
) -> None:
    """Ids and spoken tokens as they are; features but for bfloat16's eight bits."""
    assert len(store) == COUNT
    assert store.complete
    assert len(store.shards) > 3
    cut = 0
    for index in range(COUNT):
        stored, fresh = store[index], chats[index]
        assert same(stored, fresh)
        assert stored.features.dtype == torch.bfloat16
        assert store.size(index) == len(stored.ids) == len(stored.features)
        features = compute_features(source.target, torch.tensor([fresh.ids]))[0]
        torch.testing.assert_close(stored.features.float(), features, rtol=2**-7, atol=1e-4)
        cut += stored.cut
    assert 0 < cut < COUNT
    nothing = store[NOTHING]
    assert nothing.chat == NOTHING
    assert not any(nothing.spoken)
    assert len(nothing.ids) == len(nothing.features) == 2


def test_a_batch_brings_its_features(store: FeatureStore, source: Source) -> None:
    batch = collate([store[3], store[4]])
    assert batch_features(None, batch) is batch.features
    for row, length in enumerate(batch.lengths):
        assert torch.equal(batch.features[row, :length], store[3 + row].features)
    batch.features = None
    with pytest.raises(ValueError, match="no features"):
        batch_features(None, batch)
    assert batch_features(source.target, batch).shape == (*batch.ids.shape, 32)


def test_worker_processes_open_shards_for_themselves(store: FeatureStore) -> None:
    store[0]  # a shard is open now
    copy = pickle.loads(pickle.dumps(store))
    assert same(copy[5], store[5])
    loader = DataLoader(store, batch_size=None, sampler=range(COUNT), num_workers=2)
    for example in loader:
        assert same(example, store[example.chat])


def test_the_size_is_told_before(store: FeatureStore, chats: ChatDataset) -> None:
    size = sum(file.stat().st_size for file in store.folder.glob("*.safetensors"))
    headers = 400 * len(store.shards)  # of a tiny store's tiny shards
    assert estimated_bytes(chats, 32) == pytest.approx(size - headers, rel=0.05)


def test_the_size_is_estimated_from_a_sample(
    chats: ChatDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = estimated_bytes(chats, 4096)
    asked: list[int] = []
    get = ChatDataset.__getitem__
    monkeypatch.setattr(module, "SAMPLED", 7)
    monkeypatch.setattr(ChatDataset, "__getitem__", lambda s, i: asked.append(i) or get(s, i))
    assert estimated_bytes(chats, 4096) == pytest.approx(whole, rel=0.2)
    assert len(asked) == 7


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the package may catch it and tidy up."""


@pytest.mark.parametrize("at", ["shard-not-named", "shard-not-in-index", "index-not-named"])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_writing_goes_on_after_a_kill(
    at: str,
    after: int,
    store: FeatureStore,
    source: Source,
    chats: ChatDataset,
    made_from: dict[str, Any],
    tmp_path: Path,
) -> None:
    """At whatever moment, the store is in the end the one that was written in one go."""
    folder = tmp_path / "features"

    def write() -> FeatureStore:
        return write_features(chats, source.target, folder, made_from, shard_bytes=SHARD)

    with pytest.MonkeyPatch.context() as patch:
        kill(patch, at, after)
        with pytest.raises(Killed):
            write()
    if (folder / "index.json").exists():
        part = FeatureStore(folder, made_from)
        assert not part.complete
        assert len(part.shards) == after
        assert all(same(part[index], store[index]) for index in range(len(part)))
    else:
        assert after == 0
    told: list[int] = []
    done = write_features(
        chats, source.target, folder, made_from, 4, SHARD, lambda now, _: told.append(now)
    )
    assert len(told) == len(store.shards) - after  # what was there is not written again
    assert done.complete
    assert done.shards == store.shards
    assert all(same(done[index], store[index]) for index in range(COUNT))
    assert {file.name for file in folder.glob("*.safetensors")} == {
        file.name for file in store.folder.glob("*.safetensors")
    }
    assert write().shards == store.shards  # and once more there is nothing to do


def kill(patch: pytest.MonkeyPatch, at: str, after: int) -> None:
    """Die in writing a shard or its entry in the index, ``after`` whole ones."""
    if at == "shard-not-in-index":
        name, whole = "_write_index", module._write_index
    elif at == "shard-not-named":
        name, whole = "save_file", module.save_file
    else:
        whole_replace, count = Path.replace, 0

        def replace(path: Path, to: Path) -> Path:
            nonlocal count
            if path.name == "index.json.part":
                count += 1
                if count > after:
                    raise Killed
            return whole_replace(path, to)

        patch.setattr(Path, "replace", replace)
        return
    calls = 0

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            if name == "save_file":
                Path(arguments[1]).write_bytes(b"half")
            raise Killed
        return whole(*arguments)

    patch.setattr(module, name, counted)


@pytest.mark.parametrize("name", ["data", "bytes", "target", "template", "max_length"])
def test_features_of_other_data_are_not_gone_on_with(
    name: str,
    store: FeatureStore,
    source: Source,
    chats: ChatDataset,
    made_from: dict[str, Any],
) -> None:
    other = {**made_from, name: "another"}
    before = (store.folder / "index.json").read_text()
    with pytest.raises(ValueError, match=f"holds features of other data: {name} ") as caught:
        write_features(chats, source.target, store.folder, other)
    assert "'another' here" in str(caught.value)
    assert (store.folder / "index.json").read_text() == before


@pytest.mark.parametrize("content", ["", "{}", '{"made_from": {}'])
def test_a_damaged_index_is_told(content: str, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(ValueError, match="is not an index of features"):
        FeatureStore(tmp_path)
    with pytest.raises(ValueError, match="holds no features"):
        FeatureStore(tmp_path / "elsewhere")


# -- training from them ----------------------------------------------------------------------------


def test_training_from_features_is_training_beside_the_target(
    store: FeatureStore, chats: ChatDataset, target: Path, tmp_path: Path
) -> None:
    """But for the rounding, as both batch by length: by bytes there and by tokens here."""
    settings = {"max_length": LIMIT, "batch_size": COUNT, "max_steps": 6}
    fresh = train_here(chats.file.path, tmp_path / "fresh", target, **settings)
    stored = train_here(None, tmp_path / "stored", target, features=store.folder, **settings)
    assert losses(stored).tolist() == pytest.approx(losses(fresh).tolist(), rel=1e-3)
    assert losses(stored)[-1] < losses(stored)[0]


def test_training_from_features_can_validate_and_go_on(
    store: FeatureStore, target: Path, tmp_path: Path
) -> None:
    settings = {"features": store.folder, "validation": 2, "validate_every": 6}
    out = train_here(None, tmp_path / "out", target, **settings)
    before = weights(out)
    train_here(None, out, target, resume=True, **settings)
    assert same_weights(weights(out), before)
    assert [line["step"] for line in metrics(out, "validation")] == [6, 12]


def test_features_of_another_target_are_refused(store: FeatureStore, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds features of the target"):
        train_here(None, tmp_path / "out", None, features=store.folder)


def test_incomplete_features_are_refused(
    source: Source,
    chats: ChatDataset,
    made_from: dict[str, Any],
    target: Path,
    tmp_path: Path,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        kill(patch, "shard-not-named", 1)
        with pytest.raises(Killed):
            write_features(chats, source.target, tmp_path / "part", made_from, shard_bytes=SHARD)
    with pytest.raises(ValueError, match="run eagle-fsd train features again"):
        train_here(None, tmp_path / "out", target, features=tmp_path / "part")
