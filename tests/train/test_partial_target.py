"""Tests for training on stored features, which loads no layers of the target, and device maps."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from trainings import (
    Train,
    command,
    read_metrics,
    read_weights,
    same_training,
    same_weights,
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

NO_TAU = "validation reports losses and no tau, because the target is not entirely in memory"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a file for every tensor."""
    return write_target(tmp_path_factory.mktemp("sharded") / "target", max_shard_size="1KB")


def test_training_on_features_reads_neither_layers_nor_tokenizer(
    train: Train, target: Path, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It equals training with the whole target bit for bit, but validations report losses only."""
    copy = shutil.copytree(target, tmp_path / "target")
    request = FeaturesRequest(data=data, out=tmp_path / "stored", target=copy, max_length=64)
    store_features(request)
    settings = {"target": copy, "features": request.out, "validation": 1, "validate_every": 4}

    def fail(*_: Any) -> None:
        raise LoadError("they are quantized")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eagle_fsd.train.loaded_target.load_embeddings", fail)
        whole = train("whole", **settings)
    assert NO_TAU not in caplog.messages
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    layers = {file for key, file in index["weight_map"].items() if "layers" in key}
    for file in copy.iterdir():
        if file.name in layers or re.match("token|chat_template", file.name):
            file.unlink()
    for load in (load_target, load_tokenizer):
        with pytest.raises(LoadError):
            load(copy)
    part = train("part", **settings)
    assert same_training(part, whole)
    assert (part / "config.json").read_bytes() == (whole / "config.json").read_bytes()
    assert caplog.messages.count(NO_TAU) == 1
    validations = read_metrics(part, "validation")
    assert [line["step"] for line in validations] == [4, 8, 12]
    for line, complete in zip(validations, read_metrics(whole, "validation"), strict=True):
        assert complete["tau"] is not None
        assert (line["tau"], line["js_by_depth"]) == (None, [])
        assert all(line[name] == complete[name] for name in ("loss", "top1", "top3"))
    card = (part / "README.md").read_text()
    assert "among the head's three most likely" in card
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
    options = {"validation": 1, "max_steps": 4}
    whole = train("whole", **options)
    parts: list[str] = []
    monkeypatch.setattr(
        "eagle_fsd.train.loaded_target.load_target",
        lambda *_, **__: load_offloaded(target, parts, tmp_path / "disk"),
    )
    parts[:] = ["lm_head"]
    with pytest.raises(ValueError, match="output projection is offloaded"):
        train("spread", device_map="auto")
    parts[:] = ["model.layers.1"]
    spread = train("spread", device_map="auto", **options)
    assert same_weights(read_weights(spread), read_weights(whole))
    assert [line["tau"] for line in read_metrics(spread, "validation")] == [None]


@pytest.mark.skipif(torch.cuda.is_available(), reason="auto chooses the GPU")
def test_commands_accept_a_device_map(
    succeed: Any, refused: Any, target: Path, data: Path, tmp_path: Path
) -> None:
    """Commands accept ``--device`` and ``--device-map``, but a map requires a single process."""
    store = ("train", "features", "--data", data, "--target", target, "--out")
    rewrite = ("train", "regenerate", "--data", data, "--out")
    succeed(*store, tmp_path / "features", "--max-length", 64, "--device-map", "auto")
    succeed(*command(data, tmp_path / "out", target, max_steps=1), "--device-map", "auto")
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
