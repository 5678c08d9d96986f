"""Draft heads compute plain decoder layers by themselves, with the results of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eagle3_heads import target_model, untrained_eagle3
from pairs import small_tree, tiny_target, untrained_head

from eagle_fsd.model.drafters.heads import DraftHead
from eagle_fsd.model.target import Target

FAMILIES = {
    "llama-linear-rope-tied": {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    "mistral-no-window": {"num_key_value_heads": 1},
    "qwen2": {"num_key_value_heads": 4},
}


def head_for(family: str, options: dict[str, Any]) -> DraftHead:
    if family == "eagle3":
        model = target_model()
        head: DraftHead = untrained_eagle3(model)
    else:
        model = tiny_target(architecture=family, num_attention_heads=4, **options)
        head = untrained_head(model)
    head.attach(Target(model))
    return head.eval()


@torch.inference_mode()
def outputs(head: DraftHead, plain: bool) -> list[torch.Tensor]:
    """Process two rows of pending pairs, then a level of a tree."""
    head.plain = plain
    cache, generator = head.new_cache(2, 24), torch.Generator().manual_seed(0)
    features = torch.randn(2, 6, head.feature_size, generator=generator)
    tokens = torch.randint(head.target.vocab_size, (2, 6), generator=generator)
    lengths = torch.zeros(2, dtype=torch.long)
    keys = cache.keys(16, torch.device("cpu"))
    first = head.append(features, tokens, lengths, keys, cache)
    slots = torch.arange(6, 9).expand(2, -1)
    cache.place(slots, keys)
    mask = torch.zeros(2, 1, 3, len(keys))
    mask[..., 9:] = torch.finfo(mask.dtype).min
    rotary = head.rotate(slots)
    return [first, head.extend(first[:, :3], tokens[:, :3], slots, rotary, mask, cache)]


@pytest.mark.parametrize("family", [*FAMILIES, "eagle3"])
def test_parts_give_the_results_of_the_layers(family: str) -> None:
    head = head_for(family, FAMILIES.get(family, {}))
    head.start(small_tree(), None)
    assert head.plain
    for found, expected in zip(outputs(head, True), outputs(head, False), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_hooked_layers_are_called() -> None:
    head = head_for("qwen2", {})
    head.layers[0].mlp.register_forward_hook(lambda *_: None)
    head.start(small_tree(), None)
    assert not head.plain
