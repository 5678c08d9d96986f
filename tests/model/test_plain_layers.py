"""Plain decoder layers are computed by their parts, with the results of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eagle3_heads import target_model, untrained_eagle3
from pairs import small_tree, tiny_target, untrained_head
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from eagle_fsd.model.attention import folded_queries, query_groups
from eagle_fsd.model.drafters.heads import DraftHead
from eagle_fsd.model.plain_layers import is_plain_model
from eagle_fsd.model.target import LAST, Target
from eagle_fsd.model.tree import DraftTree, ancestor_matrix

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


@torch.inference_mode()
def scored(target: Target, groups: int) -> list[torch.Tensor]:
    """Score a tree of four nodes in two rows."""
    target.renew((1, LAST))
    cache = target.new_cache(2, 24)
    target.prefill(torch.arange(12).view(2, 6) + 5, 0, cache)
    parents = torch.tensor([[0, 0, 0, 1]] * 2)
    tree = DraftTree(
        tokens=torch.tensor([[3, 5, 7, 9], [4, 6, 8, 10]]),
        parents=parents,
        depths=torch.tensor([[0, 1, 1, 2]] * 2),
        ancestors=ancestor_matrix(parents, 2),
        draft_rows=torch.full_like(parents, -1),
        draft_log_probs=torch.empty(2, 0, 0),
        max_depth=2,
    )
    lengths, keys = torch.tensor([6, 4]), cache.keys(16, torch.device("cpu"))
    with folded_queries(target.model, groups):
        found = target.forward_tree(tree, lengths, keys, cache, (1, LAST), groups)
    return [found.logits, found.features]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_target_gives_the_results_of_its_model(family: str) -> None:
    """Also hidden states of inner layers; a hook lets transformers call the layers."""
    model = tiny_target(architecture=family, num_attention_heads=4, **FAMILIES[family])
    assert is_plain_model(model)
    target = Target(model)
    found = scored(target, query_groups(model))
    with model.model.norm.register_forward_hook(lambda *_: None):
        assert not is_plain_model(model)
        expected = scored(target, query_groups(model))
    for plain, called in zip(found, expected, strict=True):
        torch.testing.assert_close(plain, called, atol=1e-4, rtol=1e-4)


def test_changed_targets_are_not_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    class Subclass(LlamaForCausalLM):
        pass

    assert not is_plain_model(Subclass(tiny_target().config))
    assert not is_plain_model(tiny_target("qwen3"))
    model = tiny_target()
    model.model.layers[0].mlp.forward = lambda x: x
    assert not is_plain_model(model)

    class Louder(LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 3.0 * super().forward(x)

    model = tiny_target()
    assert is_plain_model(model)
    model.model.layers[0].mlp = Louder(model.config)
    assert not is_plain_model(model)
    for name, part in (("mlp.act_fn", nn.GELU()), ("input_layernorm", nn.LayerNorm(32))):
        model = tiny_target()
        model.model.layers[0].set_submodule(name, part)
        assert not is_plain_model(model)
    model = tiny_target()
    monkeypatch.setattr(type(model.model.norm), "forward", lambda _, x: x)
    assert not is_plain_model(model)
    monkeypatch.undo()
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    assert not is_plain_model(get_peft_model(tiny_target(), config).base_model.model)
