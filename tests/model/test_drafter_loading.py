"""Which drafter a name or a folder stands for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from eagle3_heads import target_model, untrained_eagle3
from pairs import greedy_reference, prompt, untrained_head
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from eagle_fsd import CheckpointError, EagleFSD, EagleHead
from eagle_fsd.model.checkpoint import save_head, tensor_names
from eagle_fsd.model.drafters.draft_model import DraftModel
from eagle_fsd.model.drafters.eagle3 import Eagle3Head
from eagle_fsd.model.drafters.interface import Drafter
from eagle_fsd.model.drafters.loading import load_drafter
from eagle_fsd.model.drafters.ngram import AdaptiveNGramDrafter, NGramDrafter
from eagle_fsd.model.eagle3_checkpoint import save_eagle3
from eagle_fsd.model.target import Target


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look up names that are not folders in the local cache only."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return target_model()


def save_draft_model(folder: Path, model: PreTrainedModel, **options: Any) -> None:
    config = type(model.config)(**{**model.config.to_dict(), "num_hidden_layers": 2})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, **options)


def save_kind(kind: str, folder: Path, model: PreTrainedModel) -> type[Drafter]:
    """Write a drafter of a kind and return its class."""
    if kind.startswith("eagle-2"):
        head = untrained_head(model).attach(Target(model))
        save_head(head, folder, binary=kind.endswith("bin"))
        return EagleHead
    if kind.startswith("eagle-3"):
        layout = "speculators" if "speculators" in kind else "eagle"
        save_eagle3(untrained_eagle3(model), folder, layout, binary=kind.endswith("bin"))
        return Eagle3Head
    save_draft_model(folder, model, max_shard_size="20KB" if "shards" in kind else "1GB")
    assert ("shards" in kind) == (len(list(folder.glob("*.safetensors"))) > 1)
    return DraftModel


@pytest.mark.parametrize(
    "kind", ["eagle-2 bin", "eagle-3", "eagle-3 speculators", "draft model in shards"]
)
def test_kind_follows_from_the_files(kind: str, model: PreTrainedModel, tmp_path: Path) -> None:
    """Every kind decodes exactly."""
    expected = save_kind(kind, tmp_path, model)
    pair = EagleFSD.from_pretrained(model, tmp_path, total_tokens=6, depth=2, top_k=2)
    assert type(pair.drafter) is expected
    ids = prompt(9, 5)
    out = pair.generate(ids, max_new_tokens=12)
    assert torch.equal(out.sequences, greedy_reference(model, ids, new=12))


def test_ngram_drafters_have_names(model: PreTrainedModel) -> None:
    for name, kind in (("ngram", NGramDrafter), ("adaptive-ngram", AdaptiveNGramDrafter)):
        assert type(load_drafter(name, Target(model))) is kind
        assert type(EagleFSD.from_pretrained(model, name).drafter) is kind


def test_folder_without_a_usable_drafter_is_rejected(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    """Files that are missing or damaged, and Medusa heads."""
    for number, (files, message) in enumerate(
        (
            ({}, "has no config.json"),
            ({"config.json": "{}"}, "has neither model.safetensors nor pytorch_model.bin"),
            ({"config.json": "[]"}, "not a JSON object"),
            ({"config.json": "{}", "model.safetensors": "x"}, "model.safetensors"),
            ({"config.json": "{}", "model.safetensors.index.json": "{}"}, "has no weight_map"),
            ({"config.json": "{}", "model.safetensors.index.json": "["}, "index.json"),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
        assert_rejected(folder, message, model)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "medusa"}))
    save_file({"0.linear.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    assert_rejected(tmp_path, r"neither an EAGLE head .*model_type medusa", model)


def assert_rejected(name: Path | str, message: str, model: PreTrainedModel) -> None:
    """Loading raises an error of one line."""
    with pytest.raises(CheckpointError, match=message) as error:
        load_drafter(name, Target(model))
    assert str(error.value).isprintable()


def test_names_of_shards_are_read_from_the_index_alone(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    """The kind of a drafter on the Hub is known before its shards are downloaded."""
    save_draft_model(tmp_path, model, max_shard_size="20KB")
    for shard in tmp_path.glob("*.safetensors"):
        shard.unlink()
    names = tensor_names(tmp_path)
    assert "lm_head.weight" in names
    assert "model.layers.1.mlp.up_proj.weight" in names
