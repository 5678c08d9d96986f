"""The target: an unmodified Hugging Face causal language model, and its pass over a draft tree."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from eagle_fsd.model.cache import TreeCache, additive_mask
from eagle_fsd.model.tree import DraftTree

#: Attention implementations that take an arbitrary 4-D mask.
MASKED_ATTENTION = ("sdpa", "eager")
#: RoPE whose frequencies change with the length, so that cached keys go out of date.
LENGTH_DEPENDENT_ROPE = ("longrope", "dynamic")


@dataclass
class TargetPass:
    """``logits``: ``[B, N, V]`` float32; ``features``: ``[B, N, H]``, after the final norm."""

    logits: Tensor
    features: Tensor


class Target:
    """What decoding needs of a causal language model, whatever its architecture.

    With the model spread over several devices, everything that goes in and comes out here is on
    :attr:`device`, that of the output projection, where the head and the tree are too.

    Raises:
        ValueError: Some layer does not attend to the whole prefix, or the attention implementation
            cannot take a tree mask.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config: PreTrainedConfig = model.config.get_text_config(decoder=True)
        self.embed: nn.Module = model.get_input_embeddings()
        self.lm_head: nn.Module = model.get_output_embeddings()
        if self.lm_head is None:
            raise ValueError(f"{type(model).__name__} has no output projection: not a causal LM")
        attention = self.config._attn_implementation
        if attention not in MASKED_ATTENTION:
            raise ValueError(
                f"attention implementation {attention!r} cannot take a tree mask; load the target"
                f" with attn_implementation set to one of {', '.join(MASKED_ATTENTION)}"
            )
        told = getattr(self.config, "max_position_embeddings", None) is not None
        if not told or getattr(self.config, "alibi", False):
            raise ValueError(
                f"{type(model).__name__} tells positions by other means than position ids up to"
                " max_position_embeddings: that is not supported"
            )
        _watch(self.lm_head)

    @property
    def vocabulary(self) -> int:
        return self.lm_head.weight.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def context(self) -> int:
        """Tokens a sequence may hold."""
        return self.config.max_position_embeddings

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    def project(self, features: Tensor) -> Tensor:
        """Features ``[..., H]`` to float32 logits ``[..., V]``, scaled as the model scales its own.

        (Cohere multiplies, Granite divides, Gemma 2 caps softly.)
        """
        logits = self.lm_head(features.to(self.dtype)).float()
        if (factor := getattr(self.config, "logit_scale", None)) is not None:
            logits = logits * factor
        if (divisor := getattr(self.config, "logits_scaling", None)) is not None:
            logits = logits / divisor
        if (cap := getattr(self.config, "final_logit_softcapping", None)) is not None:
            logits = cap * torch.tanh(logits / cap)
        return logits

    @cached_property
    def steady_context(self) -> int:
        """Tokens up to which a key, once turned by its position, stays as it is."""
        limits = [
            rope.get("original_max_position_embeddings") or self.context
            for rope in _rope_parameters(self.config)
            if rope.get("rope_type") in LENGTH_DEPENDENT_ROPE
        ]
        return min([self.context, *limits])

    def check_length(self, length: int) -> None:
        """Refuse lengths at which a partial-attention layer would not see the whole prefix."""
        window = getattr(self.config, "sliding_window", None)
        kinds = set(getattr(self.config, "layer_types", None) or ())
        if kinds - {"full_attention", "sliding_attention"}:
            raise ValueError(
                f"layers of type {', '.join(sorted(kinds - {'full_attention'}))} are not supported:"
                " decoding a draft tree needs full attention"
            )
        slides = "sliding_attention" in kinds if kinds else window is not None
        if "local" in (getattr(self.config, "attention_layers", None) or ()):  # GPT-Neo's words
            slides, window = True, self.config.window_size
        if slides and window is not None and length > window:
            raise ValueError(
                f"this call may reach {length} tokens, but the target attends to a sliding window"
                f" of {window}: shorten the prompt or max_new_tokens"
            )
        if length > self.steady_context:
            raise ValueError(
                f"this call may reach {length} tokens, but beyond {self.steady_context} the"
                " target's RoPE turns old keys another way: shorten the prompt or max_new_tokens"
            )

    def new_cache(self, rows: int, length: int) -> TreeCache:
        """A cache on the devices of the layers it serves."""
        devices = [next(layer.parameters()).device for layer in self.layers]
        outside = [self.embed.weight.device, self.lm_head.weight.device]
        if any(device.type == "meta" for device in [*devices, *outside]):
            raise ValueError(
                "parts of this target are offloaded to the CPU's memory or to disk; a tree pass"
                " needs all layers on their devices: use a smaller dtype or more devices"
            )
        return TreeCache(self.config, rows, length, self.dtype, devices)

    def prefill(self, ids: Tensor, start: int, cache: TreeCache) -> Tensor:
        """Features ``[B, S, H]`` of ``ids`` (``[B, S]``) at positions ``start ..`` of every row."""
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)
        view = cache.visible(start + ids.shape[1])
        seen = torch.arange(view, device=ids.device) <= positions[:, None]  # [S, view]
        mask = additive_mask(seen[None], self.dtype).expand(ids.shape[0], -1, -1, -1)
        positions = positions.expand_as(ids)
        cache.place(positions, view)
        output = self.model.base_model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        return output.last_hidden_state.to(self.device)

    def forward_tree(
        self, tree: DraftTree, lengths: Tensor, longest: int, cache: TreeCache
    ) -> TargetPass:
        """Score every node of ``tree`` in one pass.

        Args:
            tree: ``[B, N]``; its root is the first token that is not in the cache.
            lengths: ``[B]`` tokens of each row in the cache.
            longest: An upper bound of ``lengths`` that the host knows.
            cache: Node ``i`` of row ``b`` is written at slot ``lengths[b] + i``.
        """
        view = cache.visible(longest + tree.size)
        slots = lengths[:, None] + torch.arange(tree.size, device=lengths.device)  # [B, N]
        seen = torch.arange(view, device=lengths.device) < lengths[:, None]  # [B, view]
        seen = seen[:, None].expand(-1, tree.size, -1)
        columns = slots[:, None].expand(-1, tree.size, -1)
        mask = additive_mask(seen.scatter(2, columns, tree.ancestors), self.dtype)
        cache.place(slots, view)
        # Nodes beyond the context are never emitted; they only must not break the embedding, nor
        # make the model believe in a longer text.
        positions = (lengths[:, None] + tree.depths).clamp_max(self.steady_context - 1)
        outer = getattr(_projected, "features", None)  # of a pass that this one interrupts
        _projected.features = []
        try:
            # Through the whole model, so that whatever it does to its logits is done here too.
            output = self.model(
                input_ids=tree.tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
            features = _projected.features[-1]
        finally:
            _projected.features = outer
        return TargetPass(output.logits.to(self.device).float(), features.to(self.device))

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        count = self.config.num_hidden_layers
        for module in self.model.base_model.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return module
        raise ValueError(f"{type(self.model).__name__}: found no list of {count} decoder layers")


#: Where this thread's tree pass wants the features that go into the output projection.
_projected = threading.local()
_watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _watch(lm_head: nn.Module) -> None:
    """Have ``lm_head`` note its inputs for tree passes; once for each, as hooks add up."""
    if lm_head not in _watched:
        lm_head.register_forward_pre_hook(_note_features)
        _watched.add(lm_head)


def _note_features(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    features = getattr(_projected, "features", None)
    if features is not None:
        features.append(inputs[0])


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """RoPE's parameters; some configurations have them for each type of layer."""
    found = getattr(config, "rope_parameters", None) or {}
    original = getattr(config, "original_max_position_embeddings", None)
    each = [found] if "rope_type" in found else [v for v in found.values() if isinstance(v, dict)]
    return [{"original_max_position_embeddings": original, **rope} for rope in each]
