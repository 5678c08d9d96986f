"""The parts of Llama's decoder layer, called with fewer operations than in transformers.

On a CPU, a small model's pass over a handful of nodes spends much of its time on their overhead.

Shape letters: ``B`` rows, ``S`` tokens, ``L`` visible slots, ``D`` head size, ``H`` hidden size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from eagle_fsd.model.cache import TreeCache
from eagle_fsd.model.packed_weights import linear

#: Families whose decoder layers these are.
PLAIN_FAMILIES = "llama", "mistral", "qwen2"
#: Modules that define the functions of plain layers and their parts, unless somebody patches them.
LIBRARIES = "torch.nn.", "transformers.", "eagle_fsd.model.drafters."


class AttentionInputs(NamedTuple):
    """What the attention of a pass over tokens ``[B, S]`` takes besides their hidden states.

    ``mask`` is additive, ``[B, 1, S, L]``, or ``[B, 1, G * S, L]`` for ``G`` query heads per key
    head; :meth:`TreeCache.place` has been called on ``cache``.
    """

    rotary: tuple[Tensor, ...]
    mask: Tensor
    cache: TreeCache


def is_plain(layer: nn.Module, config: PreTrainedConfig) -> bool:
    """Whether a layer consists of Llama's parts, none of which has changed (:func:`is_changed`)."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    return (
        config.model_type in PLAIN_FAMILIES
        and config.hidden_act == "silu"
        and hasattr(mlp, "gate_proj")
        and "SiLU" in type(getattr(mlp, "act_fn", None)).__name__
        and hasattr(attention, "head_dim")
        and hasattr(attention, "scaling")
        and all(
            type(part) is nn.Linear
            for name, part in layer.named_modules()
            if name.endswith("_proj")
        )
        and all(
            isinstance(part, nn.Identity) or hasattr(part, "variance_epsilon")
            for name, part in layer.named_modules()
            if name.endswith("norm")
        )
        and not any(map(is_changed, layer.modules()))
    )


def is_plain_model(model: Any) -> bool:
    """Whether a causal language model consists of plain layers, without further operations."""
    body, name = model.base_model, f"{type(model).__module__}.{type(model).__name__}"
    return (
        name.startswith("transformers.models.")
        and name.endswith("ForCausalLM")
        and model.config.model_type in PLAIN_FAMILIES
        and all(is_plain(layer, model.config) for layer in body.layers)
        and not any(map(is_changed, (model, body, body.rotary_emb, body.norm)))
    )


def is_changed(part: nn.Module) -> bool:
    """Whether a module's function is not a library's own, or a hook may change its result."""
    if "forward" in part.__dict__ or part._compiled_call_impl is not None:
        return True
    if not type(part).forward.__module__.startswith(LIBRARIES):
        return True
    hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
    return not all(getattr(hook, "reads_only", False) for hook in hooks)


def run_layers(
    body: Any, ids: Tensor, positions: Tensor, mask: Tensor, cache: TreeCache
) -> list[Tensor]:
    """Run a plain model's layers on tokens ``[B, S]`` at positions ``[B, S]``; see :func:`attend`.

    Returns the layers' inputs, then the last hidden state after the final norm: ``[B, S, H]`` each.
    """
    x = body.embed_tokens(ids)
    rotary, states = signed_rotary(*body.rotary_emb(x, position_ids=positions)), []
    inputs = AttentionInputs(rotary, mask, cache)
    for layer in body.layers:
        states.append(x)
        x = x + attend(layer.self_attn, norm(layer.input_layernorm, x), inputs)
        x = x + feed_forward(layer.mlp, norm(layer.post_attention_layernorm, x))
    return [*states, norm(body.norm, x)]


def signed_rotary(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Convert RoPE's cosines and sines ``[B, S, D]`` to the ``[B, S, 1, D]`` of :func:`attend`.

    RoPE pairs value ``i`` of a head with value ``i + D / 2``: ``x cos + rotate_half(x) sin`` is
    ``x cos + roll(x, D / 2) (-sin, sin)``.
    """
    first, second = sin.chunk(2, -1)
    return cos[:, :, None], torch.cat([-first, second], -1)[:, :, None]


def norm(module: Any, x: Tensor) -> Tensor:
    """Apply an RMS norm, or nothing for ``nn.Identity``."""
    if isinstance(module, nn.Identity):
        return x
    return F.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)


def attend(module: Any, x: Tensor, inputs: AttentionInputs) -> Tensor:
    """Apply self-attention, with rotary embeddings as :func:`signed_rotary` returns them.

    ``x`` is ``[B, S, H]``, or wider for a layer that takes more than a hidden state.
    """
    batch, length = x.shape[:2]
    shape, (cos, sin) = (batch, length, -1, module.head_dim), inputs.rotary
    half = module.head_dim // 2
    query, key, value = (
        linear(x, part.weight, part.bias).view(shape)
        for part in (module.q_proj, module.k_proj, module.v_proj)
    )
    query = torch.addcmul(query * cos, query.roll(half, -1), sin)
    key = torch.addcmul(key * cos, key.roll(half, -1), sin)
    groups, heads = query.shape[2] // key.shape[2], key.shape[2]
    keys, values = inputs.cache.write(key, value, module.layer_idx)
    if groups > 1:  # queries of a group are further query positions, see tree_attention
        query = query.view(batch, length, heads, groups, -1).permute(0, 2, 3, 1, 4)
        query = query.reshape(batch, heads, groups * length, -1)
    else:
        query = query.transpose(1, 2)
    found = F.scaled_dot_product_attention(query, keys, values, inputs.mask, scale=module.scaling)
    # CUDA kernels may return the result in another memory layout, which cannot be viewed.
    found = found.reshape(batch, -1, length, module.head_dim).transpose(1, 2).flatten(2)
    return linear(found, module.o_proj.weight, module.o_proj.bias)


def feed_forward(module: Any, x: Tensor) -> Tensor:
    """Apply a gated MLP to ``[B, S, H]``."""
    gate, up, down = module.gate_proj, module.up_proj, module.down_proj
    gated = F.silu(linear(x, gate.weight, gate.bias)) * linear(x, up.weight, up.bias)
    return linear(gated, down.weight, down.bias)
