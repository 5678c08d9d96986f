"""Tiny EAGLE-3 heads and their targets, shared by the tests; see :mod:`pairs`."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from pairs import VOCAB_SIZE, aligned_target, randomize, small_tree, tiny_target
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config

from eagle_fsd import EagleFSD
from eagle_fsd.model.drafters.eagle3 import Eagle3Flags, Eagle3Head, default_reads, layer_config
from eagle_fsd.model.target import Target

#: Layers of the targets: the fewest from which three hidden states are read.
LAYERS = 7
#: Size of the heads' vocabularies, unless a test needs another.
DRAFT_VOCAB_SIZE = 40


def target_model(**changes: Any) -> PreTrainedModel:
    """Create a random target."""
    return tiny_target(num_hidden_layers=LAYERS, **changes)


def draft_tokens(size: int = DRAFT_VOCAB_SIZE) -> torch.Tensor:
    """Return ``size`` of the target's tokens in random order."""
    return torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(4))[:size]


def untrained_eagle3(
    model: PreTrainedModel,
    draft_vocab_size: int | None = DRAFT_VOCAB_SIZE,
    family: type[LlamaConfig] | type[Qwen3Config] = LlamaConfig,
    flags: Eagle3Flags | None = None,
    embedding: bool = False,
    **changes: Any,
) -> Eagle3Head:
    """Create a random head, attached to its target.

    ``changes`` are fields of the layers' configuration; ``embedding`` gives the head its own.
    """
    values = {**layer_config(model.config).to_diff_dict(), **changes}
    values.pop("model_type")
    config = family(**values)
    reads = default_reads(model.config.num_hidden_layers)
    head = Eagle3Head(config, model.config.hidden_size, draft_vocab_size, reads, flags)
    if embedding:
        head.embed_tokens = torch.nn.Embedding(config.vocab_size, config.hidden_size)
    randomize(head, 7)
    if head.d2t is not None:
        head.set_token_ids(draft_tokens(len(head.d2t)))
    return head.attach(Target(model)).to(model.dtype).eval()


@lru_cache
def aligned_eagle3_pair(draft_vocab_size: int = VOCAB_SIZE, active: int = 1) -> EagleFSD:
    """Return a target whose next token depends mostly on the current one, and a head to match.

    The target's layer ``active``, 1 or 4, is the one that does something (see
    :func:`aligned_target`). The head is a copy of it: its attention attends to the current token
    only, by RoPE, and passes on the embedding. The head reads the difference of two hidden states
    between which the target does nothing. With 1 the difference is large if they are read one layer
    lower, with 4 if they are read one layer higher, and the head fails.
    """
    model = aligned_target(num_hidden_layers=LAYERS)
    first, other = (model.base_model.layers[index] for index in (0, active))
    weights = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    first.load_state_dict(other.state_dict())
    other.load_state_dict(weights)

    head = untrained_eagle3(
        model,
        draft_vocab_size,
        attention_bias=True,
        num_key_value_heads=model.config.num_attention_heads,
    )
    size, layer = model.config.hidden_size, head.layers[0]
    identity = torch.eye(size)
    with torch.no_grad():
        for name in ("q_proj", "k_proj"):  # the largest product of equal keys is at distance 0
            getattr(layer.self_attn, name).weight.zero_()
            getattr(layer.self_attn, name).bias.fill_(8.0)
        layer.self_attn.v_proj.weight.copy_(torch.cat([identity, torch.zeros(size, size)], 1))
        layer.self_attn.o_proj.weight.copy_(identity)
        for name in ("v_proj", "o_proj"):
            getattr(layer.self_attn, name).bias.zero_()
        layer.input_layernorm.weight.fill_(1.0)
        layer.hidden_norm.weight.fill_(0.1)
        layer.post_attention_layernorm.load_state_dict(other.post_attention_layernorm.state_dict())
        layer.mlp.load_state_dict(other.mlp.state_dict())
        head.norm.weight.fill_(1.0)
        low, middle, high = (1, -1, 0) if active == 1 else (0, 1, -1)
        head.fc.weight.copy_(torch.cat([low * identity, middle * identity, high * identity], 1))
        tokens = torch.arange(VOCAB_SIZE) if head.token_ids is None else head.token_ids
        head.lm_head.weight.copy_(model.lm_head.weight[tokens])
    return EagleFSD(model, head, small_tree())
