"""Attention with folded query groups, and layers that are computed by their parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from eagle3_heads import target_model, untrained_eagle3
from pairs import (
    MODEL_SIZES,
    VOCAB_SIZE,
    greedy_reference,
    prompt,
    small_tree,
    tiny_target,
    untrained_head,
)
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma2Config
from transformers.models.llama.modeling_llama import LlamaMLP

from eagle_fsd import EagleFSD
from eagle_fsd.model.attention import query_groups
from eagle_fsd.model.drafters.heads import DraftHead
from eagle_fsd.model.self_check import check_target
from eagle_fsd.model.target import Target


def test_models_that_reject_folded_masks_keep_the_attention_of_transformers() -> None:
    """The self-check finds it, and decoding continues with masks of the usual size."""
    eager = tiny_target(num_attention_heads=4, num_key_value_heads=2, attention="eager")
    assert query_groups(eager) == 0
    model = tiny_target(num_attention_heads=4, num_key_value_heads=2)
    shapes: list[torch.Size] = []

    def check(_module: nn.Module, _args: object, kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor):
            shapes.append(mask.shape)
            if mask.shape[2] != kwargs["input_ids"].shape[1]:
                raise RuntimeError("unexpected mask")

    model.model.register_forward_pre_hook(check, with_kwargs=True)
    check_target(Target(model))
    assert query_groups(model) == 0
    pair = EagleFSD(model, untrained_head(model), small_tree())
    shapes.clear()
    pair.generate(prompt(6), max_new_tokens=12)
    assert shapes


class Louder(LlamaMLP):
    """Another module in the place of a layer's own."""

    def forward(self, x: Tensor) -> Tensor:
        return 3.0 * super().forward(x)


def replace(model: Any, name: str, part: nn.Module) -> None:
    model.model.layers[0].set_submodule(name, part)


CHANGES: list[Callable[[Any], object]] = [
    lambda model: setattr(model.model.layers[0].mlp, "forward", lambda x: 0.5 * x),
    lambda model: model.model.layers[0].mlp.register_forward_hook(lambda *args: 3.0 * args[2]),
    lambda model: replace(model, "mlp", Louder(model.config)),
    lambda model: replace(model, "mlp.act_fn", nn.Tanh()),
    lambda model: replace(model, "input_layernorm", nn.LayerNorm(32)),
    lambda model: replace(model, "self_attn.q_proj", nn.Sequential(nn.Linear(32, 32), nn.Tanh())),
]


def test_changed_layers_are_decoded_as_they_are() -> None:
    """Layers of Llama are computed by their parts unless somebody has changed them."""
    ids = prompt(9)
    for change in CHANGES:
        model = tiny_target(num_hidden_layers=1)
        pair = EagleFSD(model, untrained_head(model), small_tree())
        before = pair.generate(ids, max_new_tokens=20).sequences
        change(model)
        expected = greedy_reference(model, ids, new=20)
        assert not torch.equal(before, expected)
        assert torch.equal(pair.generate(ids, max_new_tokens=20).sequences, expected)


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
