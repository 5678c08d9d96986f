"""The target: an unmodified Hugging Face causal language model and its pass over a draft tree.

Shape letters: ``B`` rows, ``S`` tokens, ``N`` tree nodes, ``L`` visible slots, ``H`` hidden size,
``F`` = ``H`` times the number of requested hidden states, ``V`` vocabulary.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from eagle_fsd.model.attention import TREE_ATTENTION, fold_mask, query_groups
from eagle_fsd.model.cache import Layout, TreeCache, additive_mask
from eagle_fsd.model.packed_weights import forget_changed, linear
from eagle_fsd.model.plain_layers import is_changed, is_plain_model, run_layers
from eagle_fsd.model.tree import DraftTree

#: Attention implementations that accept an arbitrary 4-D mask.
MASKED_ATTENTION = ("sdpa", "eager")
#: Layer types of which every layer sees the whole sequence or the end of it.
ATTENTION_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
#: Configuration fields that limit how far layers see, for layer types other than full attention.
WINDOW_FIELDS = {
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
#: Index of the last hidden state after the final norm, as in Hugging Face's ``hidden_states``.
LAST = -1


@dataclass
class TargetPass:
    """The target's outputs on a tree: float32 logits ``[B, N, V]``, hidden states ``[B, N, F]``."""

    logits: Tensor
    features: Tensor


class Target:
    """Uniform interface to causal language models of different architectures.

    If the model is spread over several devices, tensors passed to and returned by this class are on
    :attr:`device`, the device of the output projection, as are the draft head and the tree.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config: PreTrainedConfig = model.config.get_text_config(decoder=True)
        projection: Any = model.get_output_embeddings()
        if projection is None:
            raise ValueError(
                f"{type(model).__name__} has no output projection; it is not a causal LM"
            )
        attention = self.config._attn_implementation
        # Another thread may be decoding with the model.
        if attention not in (*MASKED_ATTENTION, TREE_ATTENTION):
            raise ValueError(
                f"attention implementation {attention!r} does not accept a tree mask; load the"
                f" target with attn_implementation set to one of {', '.join(MASKED_ATTENTION)}"
            )
        if (getattr(self.config, "max_position_embeddings", None) or 0) < 1:
            raise ValueError(
                f"{type(model).__name__} is not supported: its configuration has no"
                " max_position_embeddings"
            )
        self.vocab_size = int(projection.weight.shape[0])  # V, including any padding
        #: Maximum number of tokens in a sequence.
        self.context_length = int(self.config.max_position_embeddings)
        self.attention_types = _attention_types(self.config)
        others = sorted(self.attention_types - set(ATTENTION_TYPES))
        if others:
            raise ValueError(
                f"{type(model).__name__} is not supported: a draft tree needs attention layers, but"
                f" it has layers of type {', '.join(others)}"
            )
        # A few families do not name their body; the base model is then the model itself.
        self.body: Any = model.base_model if model.base_model is not model else model.model
        self._logit_scale = getattr(self.config, "logit_scale", None)
        self._logit_divisor = getattr(self.config, "logits_scaling", None)
        if self.config.model_type == "hyperclovax":  # a factor there
            self._logit_scale, self._logit_divisor = self._logit_divisor, None
        divides = self.config.model_type == "minicpm3"  # before the projection
        self._feature_divisor = self._logit_divisor if divides else None
        self._soft_cap = getattr(self.config, "final_logit_softcapping", None)
        #: Maximum sequence length: attention changes beyond it, or the context ends.
        self.stable_length = self._stable_length()
        #: What the caches of this model allocated.
        self.layout = _layouts.setdefault(model, Layout())
        self.renew(())

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the embedding and the layers; that of the output projection may differ."""
        return self.embed.weight.dtype

    @property
    def device(self) -> torch.device:
        """Device of the output projection."""
        return self.lm_head.weight.device

    @cached_property
    def hidden_size(self) -> int:
        """``H``; the configurations of a few families have none."""
        return int(self.config.hidden_size)

    @cached_property
    def one_device(self) -> bool:
        """Whether all weights are on one device, and no layer is split over processes."""
        devices = {parameter.device for parameter in self.model.parameters()}
        return len(devices) == 1 and self.group is None

    @cached_property
    def group(self) -> ProcessGroup | None:
        """The processes that the layers are split over; all of them must make the same calls."""
        for parameter in self.model.parameters():
            if isinstance(parameter, DTensor):
                return parameter.device_mesh.get_group()
        return None

    def agree(self, number: int) -> int:
        """Return the 64-bit integer of the first process of :attr:`group`, if there is one."""
        if self.group is None:
            return number
        shared = torch.tensor(number, device=self.device)
        dist.broadcast(shared, group=self.group, group_src=0)
        return int(shared)

    def project(self, features: Tensor, rows: tuple[Tensor, Tensor | None] | None = None) -> Tensor:
        """Return float32 logits ``[..., V]`` of features ``[..., H]``, scaled as the model's own.

        ``rows`` are weight and bias of a part of the projection, ``[D, H]`` and ``[D]``, which give
        logits ``[..., D]``.
        """
        if rows is None and self._plain_projection:
            rows = self.lm_head.weight, self.lm_head.bias
        weight = self.lm_head.weight if rows is None else rows[0]
        features = features.to(weight.dtype)
        logits: Tensor = self.lm_head(features) if rows is None else linear(features, *rows)
        logits = logits.float()
        if self._logit_scale is not None:
            logits = logits * self._logit_scale
        if self._logit_divisor is not None:
            logits = logits / self._logit_divisor
        if self._soft_cap is not None:
            logits = self._soft_cap * torch.tanh(logits / self._soft_cap)
        return logits

    def _stable_length(self) -> int:
        """Return the sequence length beyond which attention changes, or the context ends."""
        limits = [
            rope.get("original_max_position_embeddings") or self.context_length
            for rope in _rope_parameters(self.config)
            if rope.get("rope_type") == "longrope"  # beyond it, cached keys have other frequencies
        ]
        if getattr(self.config, "attn_temperature_tuning", False):
            limits.append(int(self.config.floor_scale) - 1)
        limits.append(getattr(self.config, "keep_window_size", self.context_length))
        return min([self.context_length, *limits])

    def check_length(self, length: int) -> None:
        """Raise ``ValueError`` for sequences beyond :attr:`stable_length`."""
        if length > self.stable_length:
            raise ValueError(
                f"this call may reach {length} tokens, but the target's attention changes beyond"
                f" {self.stable_length}: shorten the prompt or reduce max_new_tokens"
            )

    def new_cache(self, rows: int, length: int) -> TreeCache:
        """Create a cache for this target."""
        return TreeCache(rows, length, self.layout)

    def prefill(
        self,
        ids: Tensor,
        start: int,
        cache: TreeCache,
        states: Sequence[int] = (LAST,),
    ) -> Tensor:
        """Process tokens ``[B, S]`` from position ``start`` on, causally: ``[B, S, F]`` states."""
        keys = cache.keys(start + ids.shape[1], ids.device)
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        mask = additive_mask(keys <= positions[:, :, None], self.dtype)
        cache.place(positions.expand_as(ids), keys)
        return self.encode(
            ids, positions, mask=mask, keys=keys[None, None], cache=cache, states=states
        )

    def encode(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor,
        keys: Tensor,
        cache: TreeCache,
        states: Sequence[int] = (LAST,),
    ) -> Tensor:
        """Run the layers on tokens ``[B, S]`` at any positions ``[B, S]``: ``[B, S, F]`` states.

        ``mask`` ``[B, 1, S, L]`` is the additive mask of full attention, ``keys`` ``[B, S, L]`` the
        position of each slot. ``positions``, ``mask`` and ``keys`` may have a single row for all,
        and ``keys`` a single entry for all tokens. :meth:`TreeCache.place` must have been called.
        """
        masks = self._masks(mask, positions, keys, len(ids))
        with self.recording(states) as recorded:
            output = self.body(
                input_ids=ids,
                attention_mask=masks,
                position_ids=positions.clamp_max(self.stable_length - 1).expand_as(ids),
                past_key_values=cache,
                use_cache=True,
            )
        recorded[LAST] = output.last_hidden_state
        return self._features(recorded, states)

    def forward_tree(
        self,
        tree: DraftTree,
        lengths: Tensor,
        keys: Tensor,
        cache: TreeCache,
        states: Sequence[int] = (LAST,),
        groups: int = 1,
    ) -> TargetPass:
        """Score every node of a tree in one pass.

        Node ``i`` is written to slot ``lengths[b] + i``, and ``keys`` are :meth:`TreeCache.keys`
        for ``N`` slots beyond any of ``lengths`` ``[B]``. ``groups`` query heads are folded per key
        head (0: none), which requires :func:`~eagle_fsd.model.attention.folded_queries`.
        """
        slots = lengths[:, None] + torch.arange(tree.size, device=lengths.device)  # [B, N]
        positions = lengths[:, None] + tree.depths
        path = fold_mask(additive_mask(tree.ancestors, self.dtype), groups)  # [B, 1, G * N, N]
        context = additive_mask((keys < lengths[:, None])[:, None], self.dtype)  # [B, 1, 1, L]
        # Compiled code computes the mask once per layer unless its last operation is a scatter.
        masks = self._masks(
            context.expand(-1, -1, path.shape[2], -1).scatter(
                3, slots[:, None, None].expand_as(path), path
            ),
            positions.repeat(1, max(groups, 1)),
            keys.expand(len(lengths), -1).scatter(1, slots, positions)[:, None],
            len(lengths),
        )
        cache.place(slots, keys)
        # Nodes beyond the context are never emitted, but must not index out of a position table or
        # switch RoPE to frequencies for longer sequences.
        positions = positions.clamp_max(self.stable_length - 1)
        autocast = torch.is_autocast_enabled(self.device.type)
        if groups and groups == self._plain_groups and isinstance(masks, Tensor) and not autocast:
            hidden = run_layers(self.body, tree.tokens, positions, mask=masks, cache=cache)
            recorded = {**dict(enumerate(hidden)), LAST: hidden[-1]}
            return TargetPass(self.project(hidden[-1]), self._features(recorded, states))
        with self.recording(states) as recorded:
            # Call the whole model, because some architectures scale their logits.
            output = self.model(
                input_ids=tree.tokens,
                attention_mask=masks,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
        if self._feature_divisor is not None:
            recorded[LAST] = recorded[LAST] * self._feature_divisor
        logits = output.logits.to(self.device).float()
        return TargetPass(logits, self._features(recorded, states))

    def renew(self, states: Sequence[int]) -> None:
        """Register hooks, determine plain layers, and forget packed weights that have changed."""
        # An embedding and a linear layer in most architectures; other modules have a weight, too.
        self.embed: Any = self.model.get_input_embeddings()
        self.lm_head: Any = self.model.get_output_embeddings()
        _record_input(self.lm_head, LAST)
        self.register(states)
        # Query heads per key head that masks of plain layers are folded for; 0 for other layers.
        self._plain_groups = query_groups(self.model) if is_plain_model(self.model) else 0
        self._plain_projection = type(self.lm_head) is nn.Linear and not is_changed(self.lm_head)
        forget_changed()

    def register(self, states: Sequence[int]) -> None:
        """Register the hooks that :meth:`recording` needs, unless that has been done."""
        for state in states:
            if state != LAST:
                _record_input(self.layers[state], state)

    @contextmanager
    def recording(self, states: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Record hidden states by index during a pass of this thread.

        :data:`LAST` is recorded only if the pass includes the output projection.
        """
        self.register(states)
        outer = getattr(_recorded, "states", None)  # set if passes are nested
        recorded = _recorded.states = {}
        try:
            yield recorded
        finally:
            _recorded.states = outer

    def _features(self, recorded: dict[int, Tensor], states: Sequence[int]) -> Tensor:
        """Concatenate hidden states on :attr:`device`."""
        found = [recorded[state].to(self.device) for state in states]
        if not found:
            last = recorded[LAST]
            return last.new_empty(*last.shape[:2], 0, device=self.device)
        return found[0] if len(found) == 1 else torch.cat(found, -1)

    def _masks(
        self, mask: Tensor, queries: Tensor, keys: Tensor, rows: int
    ) -> Tensor | dict[str, Tensor]:
        """Return the additive mask of every type of layer, or the one that all layers share.

        ``mask`` is that of full attention, between tokens at positions ``queries`` and slots at
        positions ``keys``; for the shapes, see :meth:`encode`. The results have ``rows`` rows.
        """
        queries = queries[:, :, None]
        lowest = torch.finfo(mask.dtype).min
        masks = {}
        for kind in self.attention_types:
            own = mask
            window = getattr(self.config, WINDOW_FIELDS[kind]) if kind in WINDOW_FIELDS else None
            if window is not None and window < mask.shape[-1]:
                if kind == "sliding_attention":
                    outside = keys <= queries - window
                else:
                    outside = keys // window != queries // window
                own = mask.masked_fill(outside[:, None], lowest)
            masks[kind] = own.expand(rows, -1, -1, -1)
        return masks if len(masks) > 1 else masks.popitem()[1]

    @cached_property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        count = self.config.num_hidden_layers
        for module in self.model.base_model.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return module
        raise ValueError(f"{type(self.model).__name__} has no list of {count} decoder layers")


#: ``states``: during a pass, this thread's inputs of hooked modules, by index of the hidden state.
_recorded = threading.local()
#: Attribute of modules that record their inputs. Compiled code checks it, so it must not depend on
#: other models, as the contents of a set of modules would.
RECORDS = "_eagle_fsd_records_input"
#: What the caches of each model allocated.
_layouts: weakref.WeakKeyDictionary[PreTrainedModel, Layout] = weakref.WeakKeyDictionary()


def _record_input(module: nn.Module, state: int) -> None:
    """Make a module record its input during passes; repeated calls do nothing."""
    if not getattr(module, RECORDS, False):
        hook: Any = partial(_record, state)
        hook.reads_only = True
        module.register_forward_pre_hook(hook, with_kwargs=True)
        setattr(module, RECORDS, True)


def _record(
    state: int, _module: nn.Module, inputs: tuple[Tensor, ...], options: dict[str, Any]
) -> None:
    states = getattr(_recorded, "states", None)
    if states is not None:
        states[state] = inputs[0] if inputs else options["hidden_states"]


def _attention_types(config: PreTrainedConfig) -> set[str]:
    """Return the types of a model's layers, as transformers derives them to build masks."""
    if types := getattr(config, "layer_types", None):
        return set(types)
    if "local" in (getattr(config, "attention_layers", None) or ()):
        return {"local"}  # GPT-Neo: the layers build this mask themselves, from slots
    for kind, field in WINDOW_FIELDS.items():
        if getattr(config, field, None) is not None:
            return {kind}
    return {"full_attention"}


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the RoPE parameters of each layer type, or the one set that all layers share."""
    found = getattr(config, "rope_parameters", None) or {}
    original = getattr(config, "original_max_position_embeddings", None)
    each = [found] if "rope_type" in found else [v for v in found.values() if isinstance(v, dict)]
    return [{"original_max_position_embeddings": original, **rope} for rope in each]
