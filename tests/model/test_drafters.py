"""Draft heads by themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from eagle3_heads import target_model, untrained_eagle3
from pairs import MODEL_SIZES, VOCAB_SIZE, tiny_target, untrained_head
from transformers import AutoModelForCausalLM, Gemma2Config

from eagle_fsd.model.drafters.heads import DraftHead
from eagle_fsd.model.target import Target


def eagle_head() -> DraftHead:
    model = tiny_target()
    return untrained_head(model).attach(Target(model))


def eager_head() -> DraftHead:
    """A head of a family whose layers support eager attention only."""
    config = Gemma2Config(**{**MODEL_SIZES, "head_dim": 8, "sliding_window": 128})
    model = AutoModelForCausalLM.from_config(config).eval()
    return untrained_head(model).attach(Target(model))


def eagle3_head() -> DraftHead:
    return untrained_eagle3(target_model(), num_hidden_layers=2)


@pytest.mark.parametrize("make", [eagle_head, eager_head, eagle3_head])
def test_head_without_a_mask_is_causal(make: Callable[[], DraftHead]) -> None:
    """Training runs the head without a mask: later features must not change earlier outputs."""
    head = make()
    features = torch.randn(
        1, 8, MODEL_SIZES["hidden_size"], generator=torch.Generator().manual_seed(0)
    )
    changed = features.clone()
    changed[:, 5:] += 1.0
    tokens, positions = torch.arange(8)[None] % VOCAB_SIZE, torch.arange(8)[None]
    with torch.no_grad():
        before, after = (head(item, tokens, positions) for item in (features, changed))
    torch.testing.assert_close(after[:, :5], before[:, :5])
    assert (after[:, 5:] - before[:, 5:]).abs().max() > 0.1
