"""The bundled draft model: its files, that it fits the bundled target, and its recipe."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from unseen import unseen_prompts

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.bundled import BUNDLED_DRAFT_MODEL, BUNDLED_TARGET
from eagle_fsd.model.acceptance import ExactRule, FuzzyRule
from eagle_fsd.model.drafters.draft_model import DraftModel
from eagle_fsd.train.record import read_record
from recipes.draft_model import (
    DraftModelConfig,
    build_draft_model,
    train_draft_model,
)

CHAIN = TreeConfig(total_tokens=7, depth=5, top_k=1)


@lru_cache
def model() -> EagleFSD:
    """The bundled target with the draft model, which drafts chains of 6 tokens."""
    return EagleFSD.from_pretrained(
        drafter="bundled-draft-model", dtype=torch.float32, device_map="cpu", tree=CHAIN
    )


@lru_cache
def prompts() -> tuple[Tensor, Tensor]:
    return unseen_prompts(model().tokenizer, seed=4)


def test_files_are_small_and_in_half_precision() -> None:
    names = {path.name for path in BUNDLED_DRAFT_MODEL.iterdir()}
    weights = "model.safetensors"
    assert names == {"README.md", "config.json", "generation_config.json", weights, "training.json"}
    assert (BUNDLED_DRAFT_MODEL / weights).stat().st_size < 2_000_000
    assert {item.dtype for item in load_file(BUNDLED_DRAFT_MODEL / weights).values()} == {
        torch.float16
    }


@pytest.mark.slow
def test_greedy_output_is_the_target_s() -> None:
    """Chains, and a tree; most steps accept several tokens."""
    ids, mask = prompts()
    expected = model().generate(ids, mask, max_new_tokens=32, method="ar").sequences
    out = model().generate(ids, mask, max_new_tokens=32)
    assert torch.equal(out.sequences, expected)
    assert out.stats.tau > 2.5
    tree = EagleFSD(model().model, model().drafter, TreeConfig(total_tokens=12, depth=4, top_k=3))
    assert torch.equal(tree.generate(ids, mask, max_new_tokens=32).sequences, expected)


def test_most_sampled_tokens_are_accepted() -> None:
    """As a block, token by token, and by FSD. Measured: 6.0, 6.0 and 6.2 of 7 tokens per step."""
    ids, mask = prompts()
    for rule in (ExactRule(), FuzzyRule(0.0), FuzzyRule(0.1)):
        out = model().generate(ids, mask, max_new_tokens=64, temperature=1.0, seed=1, rule=rule)
        assert out.stats.tau > 5


def test_initial_weights_are_the_target_s() -> None:
    target = AutoModelForCausalLM.from_pretrained(BUNDLED_TARGET, dtype=torch.float32)
    draft = build_draft_model(target, (0, -1))
    assert draft.lm_head.weight is draft.model.embed_tokens.weight
    for found, layer in zip(draft.model.layers, (0, -1), strict=True):
        for name, value in found.state_dict().items():
            assert torch.equal(value, target.model.layers[layer].state_dict()[name])
    for name in ("embed_tokens.weight", "norm.weight"):
        assert torch.equal(draft.model.state_dict()[name], target.model.state_dict()[name])


@pytest.mark.slow
def test_recipe_trains_a_model_that_loads(tmp_path: Path) -> None:
    config = DraftModelConfig(chats=4, epochs=2, tokens_per_batch=1024)
    train_draft_model(config, BUNDLED_TARGET, tmp_path / "work", tmp_path / "out")
    assert read_record(tmp_path / "out")["settings"]["chats"] == 4
    found = EagleFSD.from_pretrained(BUNDLED_TARGET, tmp_path / "out", dtype=torch.float32)
    assert isinstance(found.drafter, DraftModel)
    ids, mask = (item[:2] for item in prompts())
    expected = model().generate(ids, mask, max_new_tokens=16, method="ar").sequences
    assert torch.equal(found.generate(ids, mask, max_new_tokens=16).sequences, expected)
