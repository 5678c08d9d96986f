"""Attention of tree passes: one call of torch, without repeating keys and values for query groups.

:func:`tree_attention` views the queries of a group as further query positions, ``[B, kv heads,
G * S, head size]``, under a mask from :func:`fold_mask` that is repeated for every group. For
every other mask it is the SDPA attention of transformers.

Shape letters: ``B`` rows, ``S`` queries, ``L`` keys, ``G`` query heads per key head.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

#: Name of :func:`tree_attention` as a transformers attention implementation.
TREE_ATTENTION = "eagle_fsd_tree"
#: Arguments with which a layer asks for more than masked softmax attention.
OWN_TERMS = ("position_bias", "softcap", "s_aux", "cache")


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention with folded query groups if the mask is folded, else as transformers does.

    Query, key and value are ``[B, heads, S or L, head size]``, the mask is ``[B, 1, S, L]``, or
    ``[B, 1, G * S, L]`` from :func:`fold_mask`, and the result ``[B, S, heads, value size]``.
    Layers that pass any of :data:`OWN_TERMS`, or a mask per head, also get the attention of
    transformers.
    """
    batch, heads, queries, _ = query.shape
    groups = heads // key.shape[1]
    if attention_mask is not None and (groups == 1 or attention_mask.shape[2] > queries):
        # A layer with fewer query heads per key head than others needs fewer copies of the mask.
        attention_mask = attention_mask[:, :, : groups * queries]
        shared = attention_mask.shape[1] == 1  # by all heads
        if shared and all(options.get(name) is None for name in OWN_TERMS):
            output = nn.functional.scaled_dot_product_attention(
                query.reshape(batch, heads // groups, groups * queries, -1),
                key,
                value,
                attn_mask=attention_mask,
                dropout_p=dropout,
                scale=scaling,
            )
            return output.reshape(batch, heads, queries, -1).transpose(1, 2).contiguous(), None
        attention_mask = attention_mask[:, :, :queries]
    output, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
    )
    return output, None


AttentionInterface.register(TREE_ATTENTION, tree_attention)
AttentionMaskInterface.register(TREE_ATTENTION, sdpa_mask)

#: Models that must not be given folded masks, because they handle masks or attention themselves.
not_foldable: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


def query_groups(model: PreTrainedModel) -> int:
    """Return the number of times to repeat masks of tree passes; 0 if they must not be folded."""
    config = model.config.get_text_config(decoder=True)
    if model in not_foldable or config._attn_implementation not in ("sdpa", TREE_ATTENTION):
        return 0
    return config_groups(config)


def config_groups(config: PreTrainedConfig) -> int:
    """Return the number of query heads per key head, 1 where queries are not folded."""
    heads = getattr(config, "num_attention_heads", None)
    key_heads = getattr(config, "num_key_value_heads", None)
    if config._attn_implementation not in ("sdpa", TREE_ATTENTION) or not (heads and key_heads):
        return 1
    return max(1, int(heads) // int(key_heads))


def fold_mask(mask: Tensor, groups: int) -> Tensor:
    """Repeat a mask ``[B, 1, S, L]`` for every query head of a group: ``[B, 1, G * S, L]``."""
    return mask.repeat(1, 1, groups, 1) if groups > 1 else mask


_lock = threading.Lock()
#: Number of passes in progress, by the id of the configuration.
_passes: Counter[int] = Counter()


@contextmanager
def folded_queries(model: PreTrainedModel, groups: int) -> Iterator[None]:
    """Select :func:`tree_attention` for passes of a model, unless ``groups`` (of its queries) is 0.

    Passes may overlap in several threads. Compiled code is called inside the context, never opens
    it.
    """
    if groups == 0:
        yield
        return
    config = model.config.get_text_config(decoder=True)
    with _lock:
        _passes[id(config)] += 1
        config._attn_implementation = {"": TREE_ATTENTION}  # not for nested configurations
    try:
        yield
    finally:
        with _lock:
            _passes[id(config)] -= 1
            if not _passes[id(config)]:
                del _passes[id(config)]
                config._attn_implementation = {"": "sdpa"}
