"""Attention with folded query groups: equal to that of transformers, and invisible to others."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from pairs import prompt, small_tree, tiny_target, untrained_head
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from eagle_fsd import EagleFSD
from eagle_fsd.model import attention
from eagle_fsd.model.attention import (
    TREE_ATTENTION,
    fold_mask,
    folded_queries,
    query_groups,
    tree_attention,
)
from eagle_fsd.model.cache import additive_mask
from eagle_fsd.model.self_check import check_target
from eagle_fsd.model.target import Target

HEADS, SIZE, QUERIES, KEYS = 8, 16, 7, 33
GENERATOR = torch.Generator().manual_seed(0)


def _layer(key_heads: int) -> nn.Module:
    layer = nn.Module()
    layer.num_key_value_groups = HEADS // key_heads
    return layer


def _inputs(rows: int, key_heads: int, dtype: torch.dtype) -> list[Tensor]:
    """Return query, key and value as a cache returns them, and an additive mask."""
    query = torch.randn(rows, QUERIES, HEADS, SIZE, generator=GENERATOR)
    store = torch.randn(2, rows, KEYS + 9, key_heads, SIZE, generator=GENERATOR)
    allowed = torch.rand(rows, QUERIES, KEYS, generator=GENERATOR) < 0.5
    allowed[..., 0] = True
    tensors = [item.to(dtype).transpose(1, 2) for item in (query, *store[:, :, :KEYS])]
    return [*tensors, additive_mask(allowed, dtype)]


def test_folded_attention_equals_that_of_transformers() -> None:
    """Multi-query, grouped-query and multi-head attention, with additive and boolean masks."""
    for key_heads, rows, boolean, dtype in (
        (1, 1, False, torch.float32),
        (1, 3, True, torch.bfloat16),
        (2, 1, True, torch.float32),
        (2, 3, False, torch.bfloat16),
        (HEADS, 3, True, torch.float32),
        (HEADS, 1, False, torch.bfloat16),
    ):
        *inputs, mask = _inputs(rows, key_heads, dtype)
        mask = mask == 0.0 if boolean else mask
        expected, _ = sdpa_attention_forward(_layer(key_heads), *inputs, mask, scaling=0.3)
        folded = fold_mask(mask, HEADS // key_heads)
        assert folded.shape == (rows, 1, HEADS // key_heads * QUERIES, KEYS)
        found, weights = tree_attention(_layer(key_heads), *inputs, folded, scaling=0.3)
        assert weights is None
        assert found.is_contiguous()
        tolerance = 1e-6 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def test_other_calls_get_the_attention_of_transformers() -> None:
    """A position bias is added by transformers; a layer may have fewer groups than others."""
    for key_heads in (2, HEADS):
        *inputs, mask = _inputs(2, key_heads, torch.float32)
        for given in (mask, None):
            expected, _ = sdpa_attention_forward(_layer(key_heads), *inputs, given, is_causal=True)
            found, _ = tree_attention(_layer(key_heads), *inputs, given, is_causal=True)
            assert torch.equal(found, expected)
    *inputs, mask = _inputs(2, 2, torch.float32)
    bias = torch.randn(1, HEADS, QUERIES, KEYS, generator=GENERATOR)
    for groups, options in ((4, {"position_bias": bias}), (8, {"position_bias": bias}), (8, {})):
        expected, _ = sdpa_attention_forward(_layer(2), *inputs, mask, **options)
        found, _ = tree_attention(_layer(2), *inputs, fold_mask(mask, groups), **options)
        torch.testing.assert_close(found, expected)


def test_tree_pass_folds_and_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are those of the stock path; before and after, the model is on SDPA."""
    model = tiny_target("qwen3", num_attention_heads=4, num_key_value_heads=2)
    assert query_groups(model) == 2
    folded: list[tuple[nn.Module, bool]] = []

    def spy(module: nn.Module, query: Tensor, *args: object, **options: object) -> object:
        mask = args[2]
        assert isinstance(mask, Tensor)
        folded.append((module, mask.shape[2] == 2 * query.shape[2]))
        return tree_attention(module, query, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setitem(attention.AttentionInterface._global_mapping, TREE_ATTENTION, spy)
    pair = EagleFSD(model, untrained_head(model), small_tree())
    folded.clear()
    expected = model.generate(prompt(6), max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert not folded
    assert torch.equal(pair.generate(prompt(6), max_new_tokens=12).sequences, expected)
    assert {module for module, _ in folded} >= {layer.self_attn for layer in model.model.layers}
    assert all(found for _, found in folded)
    assert model.config._attn_implementation == "sdpa"


def test_overlapping_passes_keep_the_selection_until_the_last_ends() -> None:
    """Meanwhile, the model can be wrapped, and a plain call computes what it always does."""
    model, ids = tiny_target(num_attention_heads=4, num_key_value_heads=2), prompt(5, 2)
    with folded_queries(model, 2), ExitStack() as other:
        other.enter_context(folded_queries(model, 2))
        pair = EagleFSD(model, None)
        outer = other.pop_all()
    assert model.config._attn_implementation == TREE_ATTENTION
    during = model(ids, attention_mask=torch.ones_like(ids)).logits
    outer.close()
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(ids, attention_mask=torch.ones_like(ids)).logits, during)
    assert pair.generate(prompt(6), max_new_tokens=2, method="ar").sequences.shape == (1, 8)


def test_models_that_reject_folded_masks_keep_the_attention_of_transformers() -> None:
    """The self-check finds it, and decoding continues with masks of the usual size.

    Eager attention is never folded.
    """
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
