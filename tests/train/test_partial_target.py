"""Tests for training on stored features, which loads no layers of the target, and device maps."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import tiny_target
from trainings import (
    Train,
    command,
    read_metrics,
    read_weights,
    same_training,
    same_weights,
    without_option,
    write_target,
)
from transformers import PreTrainedModel

from eagle_fsd.model.loading import LoadError, load_target, load_tokenizer
from eagle_fsd.model.target import LAST, Target
from eagle_fsd.train.config import FeaturesRequest
from eagle_fsd.train.feature_store import store_features
from eagle_fsd.train.features import compute_features
from eagle_fsd.train.loaded_target import check_device_map
from eagle_fsd.train.validation import can_decode
from eagle_fsd.utils.options import OptionsError

NO_TAU = "validation reports losses and no tau, because the target's layers are not loaded"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a file for every tensor."""
    folder = write_target(tmp_path_factory.mktemp("sharded") / "target")
    (folder / "model.safetensors").unlink()
    model = tiny_target(vocab_size=1024, bos_token_id=1, eos_token_id=2)
    model.save_pretrained(folder, max_shard_size="1KB")
    return folder


@pytest.fixture(scope="module")
def features(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stored") / "features"
    store_features(FeaturesRequest(data=data, out=out, target=target, max_length=64))
    return out


@pytest.fixture
def layerless(target: Path, tmp_path: Path) -> Path:
    """The same target, whose layers, tokenizer and chat template are gone."""
    folder = tmp_path / "target"
    folder.mkdir()
    index = json.loads((target / "model.safetensors.index.json").read_text())
    layers = {file for key, file in index["weight_map"].items() if "layers" in key}
    assert len(layers) > 10
    for file in target.iterdir():
        if file.name not in layers and not re.match("token|chat_template", file.name):
            (folder / file.name).symlink_to(file)
    return folder


def copy_features(features: Path, target: Path, folder: Path) -> Path:
    """Copy features as those of another folder with the same target."""
    shutil.copytree(features, folder)
    index = json.loads((features / "index.json").read_text())
    index["made_from"]["target"] = str(target)
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def test_training_on_features_reads_neither_layers_nor_tokenizer(
    train: Train, features: Path, layerless: Path, tmp_path: Path
) -> None:
    """It equals training with the whole target bit for bit, although the files are gone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eagle_fsd.train.loaded_target.load_embeddings", fail)
        whole = train("whole", features=features)
    copied = copy_features(features, layerless, tmp_path / "features")
    part = train("part", target=layerless, features=copied)
    assert same_training(part, whole)
    assert (part / "config.json").read_bytes() == (whole / "config.json").read_bytes()
    with pytest.raises(LoadError, match="cannot load the target"):
        load_target(layerless)
    with pytest.raises(LoadError):
        load_tokenizer(layerless)


def fail(*_: Any) -> None:
    raise LoadError("they are quantized")


def test_validation_on_features_reports_losses_only(
    train: Train, features: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And says so once."""
    caplog.set_level(logging.WARNING)
    settings = {"features": features, "validation": 1, "validate_every": 4}
    out = train(**settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eagle_fsd.train.loaded_target.load_embeddings", fail)
        whole = train("whole", **settings)
    assert caplog.messages.count(NO_TAU) == 1
    validations = read_metrics(out, "validation")
    assert [line["step"] for line in validations] == [4, 8, 12]
    for line, complete in zip(validations, read_metrics(whole, "validation"), strict=True):
        assert complete["tau"] is not None
        assert (line["tau"], line["js_by_depth"]) == (None, [])
        assert all(line[name] == complete[name] for name in ("loss", "top1", "top3"))
    card = (out / "README.md").read_text()
    assert "among its three most likely" in card
    assert "tau" not in card.partition("![Training")[0]
    assert "; tau " in (whole / "README.md").read_text()


# -- device maps -----------------------------------------------------------------------------------


PARTS = ["embed_tokens", "layers.0", "layers.1", "norm", "rotary_emb"]


def load_offloaded(target: Path, offloaded: Sequence[str], folder: Path) -> PreTrainedModel:
    """Load a target with some parts on the disk."""
    places = dict.fromkeys([*(f"model.{part}" for part in PARTS), "lm_head"], "cpu")
    places |= dict.fromkeys(offloaded, "disk")
    return load_target(target, device_map=places, offload_folder=str(folder))


def test_features_of_a_spread_target_equal_those_of_one_device(
    target: Path, tmp_path: Path
) -> None:
    """Hooks move the inputs to the devices of the parts. One of two states precedes a layer."""
    states, ids = (1, LAST), torch.arange(3, 43).view(2, 20)
    expected = compute_features(Target(load_target(target)), ids, states)
    for offloaded in (
        ["model.layers.1"],
        ["model.layers.1", "lm_head"],
        ["model.embed_tokens", "model.layers.0"],
    ):
        spread = Target(load_offloaded(target, offloaded, tmp_path))
        assert not can_decode(spread)
        assert torch.equal(compute_features(spread, ids, states), expected)


def test_training_with_offloaded_parts(
    train: Train, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers may be offloaded, the output projection must not be."""
    whole = train("whole", validation=1)
    parts: list[str] = []
    monkeypatch.setattr(
        "eagle_fsd.train.loaded_target.load_target",
        lambda *_, **__: load_offloaded(target, parts, tmp_path / "disk"),
    )
    parts[:] = ["lm_head"]
    with pytest.raises(ValueError, match="output projection is offloaded"):
        train("spread", device_map="auto")
    parts[:] = ["model.layers.1"]
    spread = train("spread", device_map="auto", validation=1)
    assert same_weights(read_weights(spread), read_weights(whole))
    assert [line["tau"] for line in read_metrics(spread, "validation")] == [None]


@pytest.mark.skipif(torch.cuda.is_available(), reason="auto chooses the GPU")
def test_commands_accept_a_device_map(
    succeed: Any, refused: Any, target: Path, data: Path, tmp_path: Path
) -> None:
    """Under two names, and for one process only."""
    store = ("train", "features", "--data", data, "--target", target, "--out")
    rewrite = ("train", "regenerate", "--data", data, "--max-new-tokens", 4, "--out")
    features, auto = tmp_path / "features", ("--device-map", "auto")
    succeed(*store, features, "--max-length", 64, *auto)
    arguments = command(data, tmp_path / "out", target, max_steps=2, validation=1)
    succeed(*arguments, *auto)
    words = [*without_option(arguments, "--data"), "--overwrite", "--features", features]
    _, errors = succeed(*words, *auto)
    (line,) = [line for line in errors.splitlines() if "held-out" in line]
    assert line.rpartition(", ")[2].startswith("top-3 ")  # there is no tau
    for words in (
        [*command(data, tmp_path / "no", target), "--device-map"],
        [*store, tmp_path / "no", "--device"],
        [*rewrite, tmp_path / "no", "--device-map"],
        ["generate", "Hello!", "--device-map"],
    ):
        assert "'toaster' is not a device" in refused(*words, "toaster")
        assert "cuda:99 does not exist" in refused(*words, "cuda:99")
    check_device_map("auto", 1)
    with pytest.raises(OptionsError, match="--device-map requires a single process"):
        check_device_map("cpu", 2)
