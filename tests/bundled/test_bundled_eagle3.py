"""The bundled EAGLE-3 head: its files, that it drafts losslessly, and what its card states."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from accelerators import reset_accelerator_state
from safetensors.torch import load_file
from torch import Tensor
from unseen import unseen_prompts

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.bundled import BUNDLED_EAGLE3, BUNDLED_TARGET
from eagle_fsd.bundled.problems import problems
from eagle_fsd.model.drafters.eagle3 import Eagle3Head
from eagle_fsd.model.drafters.layer_detection import detect_layers, sample_texts
from eagle_fsd.train.config import TrainConfig
from eagle_fsd.train.record import read_record
from recipes import bundled
from recipes.bundled import EAGLE3_CONFIG
from recipes.compare_heads import TREES

TREE = TreeConfig(**dict(zip(("total_tokens", "depth", "top_k"), TREES[0], strict=True)))


@lru_cache
def model() -> EagleFSD:
    return EagleFSD.from_pretrained(
        drafter="bundled-eagle3", dtype=torch.float32, device_map="cpu", tree=TREE
    )


@lru_cache
def prompts() -> tuple[Tensor, Tensor]:
    return unseen_prompts(model().tokenizer, seed=5)


def test_files_are_small_and_in_half_precision() -> None:
    names = {path.name for path in BUNDLED_EAGLE3.iterdir()}
    assert names == {"README.md", "config.json", "model.safetensors", "training.json"}
    weights = load_file(BUNDLED_EAGLE3 / "model.safetensors")
    dtypes = {name: item.dtype for name, item in weights.items()}
    assert (dtypes.pop("d2t"), dtypes.pop("t2d")) == (torch.int64, torch.bool)
    assert set(dtypes.values()) == {torch.float16}
    assert (BUNDLED_EAGLE3 / "model.safetensors").stat().st_size < 1_000_000
    config = json.loads((BUNDLED_EAGLE3 / "config.json").read_text())
    assert config["rope_theta"] == 10000.0
    assert config["torch_dtype"] == "float16"


def test_head_is_that_of_the_recipe() -> None:
    head = model().drafter
    assert isinstance(head, Eagle3Head)
    assert head.reads == (2, 7, 11)
    assert head.flags.fc_norm
    assert head.flags.norm_output
    assert head.draft_vocab_size == EAGLE3_CONFIG.draft_vocab_size
    assert TrainConfig.from_dict(read_record(BUNDLED_EAGLE3)["settings"]) == EAGLE3_CONFIG


def test_hidden_states_are_detected() -> None:
    """One layer above or below is nearly as good in this small target, two below is not."""
    target, trained, other = model().target, (2, 7, 11), (0, 5, 9)
    texts = sample_texts(target)
    choice = detect_layers(model().drafter, target, texts)
    assert choice.reads == trained
    assert set(choice.agreement) == {(1, 6, 10), trained, (3, 8, 12)}
    assert max(choice.agreement.values()) == choice.agreement[trained]
    assert min(choice.agreement.values()) > choice.agreement[trained] - 0.03
    assert detect_layers(model().drafter, target, texts, [other, trained]).reads == trained


def test_head_can_draft_the_tokens_of_answers() -> None:
    token_ids = model().drafter.token_ids
    assert token_ids is not None
    solutions = [problem.answer for problem in problems("test", 200, seed=6)]
    tokens = {token for ids in model().tokenizer(solutions)["input_ids"] for token in ids}
    assert len(tokens) > 100
    assert tokens <= set(token_ids.tolist())


@pytest.mark.slow
def test_greedy_output_is_the_target_s_and_tau_the_card_s() -> None:
    ids, mask = prompts()
    expected = model().generate(ids, mask, max_new_tokens=128, method="ar").sequences
    out = model().generate(ids, mask, max_new_tokens=128, threshold=0.0)
    assert torch.equal(out.sequences, expected)
    card = (BUNDLED_EAGLE3 / "README.md").read_text()
    row = re.search(r"^\| 16/8/2 \| [\d.]+ \| ([\d.]+) \|$", card, re.MULTILINE)
    assert row is not None
    assert out.stats.tau == pytest.approx(float(row[1]), rel=0.1)


@pytest.mark.slow
def test_recipe_stores_features_and_trains_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reset_accelerator_state()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(bundled, "HEAD_CHATS", 12)
    config = EAGLE3_CONFIG.updated(max_steps=2)
    monkeypatch.setattr(bundled, "EAGLE3_CONFIG", config)
    bundled.train_eagle3(BUNDLED_TARGET, tmp_path, tmp_path / "out")
    assert read_record(tmp_path / "out")["steps"] == 2
    trained = load_file(tmp_path / "out" / "model.safetensors")
    shipped = load_file(BUNDLED_EAGLE3 / "model.safetensors")
    assert {name: item.shape for name, item in trained.items()} == {
        name: item.shape for name, item in shipped.items()
    }
