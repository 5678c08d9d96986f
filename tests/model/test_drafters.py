"""The EAGLE head by itself."""

from __future__ import annotations

import pytest
import torch
from pairs import MODEL_SIZES, VOCAB_SIZE, tiny_target, untrained_head
from transformers import AutoModelForCausalLM, Gemma2Config, PreTrainedModel

from eagle_fsd.model.target import Target


def eager_target() -> PreTrainedModel:
    """A family whose layers support eager attention only."""
    config = Gemma2Config(**{**MODEL_SIZES, "head_dim": 8, "sliding_window": 128})
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("make_target", [tiny_target, eager_target])
def test_head_without_a_mask_is_causal(make_target: type) -> None:
    """Training runs the head without a mask: later features must not change earlier outputs."""
    model = make_target()
    head = untrained_head(model).attach(Target(model))
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
