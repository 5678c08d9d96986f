"""What all draft heads share: the target's embedding, a cache, and decoder layers of a family.

A draft head processes pairs of a hidden state and the token after it. Before an accepted token the
hidden states are the target's, which :meth:`DraftHead.fuse` converts to the head's input; before a
drafted token it is the head's own output, which :meth:`DraftHead.carry` converts.

Shape letters: ``B`` rows, ``S`` new pairs, ``L`` visible slots of the cache, ``H`` hidden size of
the head.
"""

from __future__ import annotations

import copy
import inspect
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, Cache, PreTrainedConfig
from typing_extensions import Self

from eagle_fsd.model.attention import TREE_ATTENTION, fold_mask
from eagle_fsd.model.drafters.levels import LevelDrafter
from eagle_fsd.model.plain_layers import AttentionInputs, is_plain, signed_rotary
from eagle_fsd.model.target import Target


class DraftHead(nn.Module, LevelDrafter):
    """Base class of EAGLE heads.

    The embedding is the target's module, set by :meth:`attach`. A head that was trained with
    another embedding keeps it in ``embed_tokens``.
    """

    fc: nn.Linear
    layers: nn.ModuleList
    rotary: nn.Module
    plain: bool = False  # whether `encode` calls `_run_plain`
    groups: int  # query heads per key head that masks are folded for, see `attention`

    def __init__(self, config: PreTrainedConfig, target_hidden_size: int) -> None:
        super().__init__()
        self.config, self.target_hidden_size = config, target_hidden_size
        self.embed_tokens: nn.Embedding | None = None
        self._target: Target | None = None
        self._rotary_options: dict[str, str] = {}

    def attach(self, target: Target) -> Self:
        """Use the target's modules, and move to the target's device; see :meth:`Drafter.attach`."""
        if self.target_hidden_size != target.hidden_size:
            raise ValueError(
                f"this head belongs to another target: it reads hidden states of size"
                f" {self.target_hidden_size}, the target's have size {target.hidden_size}"
            )
        if self.config.vocab_size != target.vocab_size:
            raise ValueError(
                f"this head belongs to another target: its vocabulary has"
                f" {self.config.vocab_size} tokens, the target's has {target.vocab_size}"
            )
        self._target = target  # not a module, so its parameters are not registered here
        self.renew()
        return self if self.device == target.device else self.to(target.device)

    @property
    def network(self) -> Self:
        return self

    @property
    def target(self) -> Target:
        """The target that the head is attached to."""
        if self._target is None:
            raise RuntimeError("attach the head to its target first")
        return self._target

    @property
    def feature_size(self) -> int:
        return len(self.reads) * self.target_hidden_size

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens with the head's own embedding if it has one, else with the target's."""
        embedding = self.embed_tokens if self.embed_tokens is not None else self.target.embed
        embedded: Tensor = embedding(tokens)
        return embedded.to(self.fc.weight)

    def forward(
        self,
        x: Tensor,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Process pairs of a hidden state ``x`` and the token after it: ``[B, S, H]``.

        ``x`` ``[B, S, H]`` is a result of :meth:`fuse` or :meth:`carry`, ``positions`` ``[B, S]``
        are those of the hidden states, and ``mask`` ``[B, 1, S, L]`` is additive; None is causal
        over ``S``. For whole texts, as in training: decoding calls :meth:`encode`.
        """
        options = layer_options(positions, mask, cache, self.embed_positions(positions))
        return self._run_layers(x, self.embed(tokens), options)

    @abstractmethod
    def _run_layers(self, x: Tensor, embedded: Tensor, options: dict[str, Any]) -> Tensor:
        """Run the layers of transformers, with their keyword arguments."""

    @abstractmethod
    def _run_plain(self, x: Tensor, embedded: Tensor, inputs: AttentionInputs) -> Tensor:
        """Run the same layers by their parts, see :mod:`~eagle_fsd.model.plain_layers`."""

    def renew(self) -> None:
        """Determine whether the layers are plain, which hooks change."""
        self.plain = all(is_plain(layer, self.config) for layer in self.layers)

    def embed_positions(self, positions: Tensor) -> tuple[Tensor, ...]:
        """Return the rotary embedding of positions ``[B, S]``, as the family's layers take it."""
        # Of the weight, the rotary embedding takes dtype and device.
        found = self.rotary(self.fc.weight, position_ids=positions, **self._rotary_options)
        # Some families represent rotations as complex numbers.
        return found if isinstance(found, tuple) else (found,)

    def rotary_embedding(self, positions: Tensor) -> tuple[Tensor, ...]:
        found = self.embed_positions(positions)
        return signed_rotary(*found) if self.plain else found

    def encode(
        self, x: Tensor, tokens: Tensor, positions: Tensor, inputs: AttentionInputs
    ) -> Tensor:
        inputs = inputs._replace(mask=fold_mask(inputs.mask, self.groups))
        if self.plain:
            return self._run_plain(x, self.embed(tokens), inputs)
        options = layer_options(positions, inputs.mask, inputs.cache, inputs.rotary)
        return self._run_layers(x, self.embed(tokens), options)


def layer_options(
    positions: Tensor, mask: Tensor | None, cache: Cache | None, rotary: tuple[Tensor, ...]
) -> dict[str, Any]:
    """Return the keyword arguments of a decoder layer."""
    return {
        "attention_mask": mask,
        "position_ids": positions,
        "past_key_values": cache,
        "use_cache": cache is not None,
        "position_embeddings": rotary if len(rotary) > 1 else rotary[0],
    }


def decoder_layers(
    config: PreTrainedConfig, count: int, dtype: torch.dtype
) -> tuple[nn.ModuleList, nn.Module, PreTrainedConfig]:
    """Build decoder layers with full attention, their rotary embedding, and their configuration.

    Attention other than eager accepts masks from :func:`fold_mask`. Raises ``TypeError`` if the
    layers do not have the interface of Llama's.
    """
    config = copy.deepcopy(config)
    config.num_hidden_layers = count
    config.vocab_size = 1  # the embedding is discarded
    config.pad_token_id = 0
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * count
    # By default, a family may choose an implementation that takes no mask.
    for attention in ("sdpa", "eager"):
        try:
            base = AutoModel.from_config(config, dtype=dtype, attn_implementation=attention)
            break
        except ValueError:
            if attention == "eager":
                raise
    layers, rotary = getattr(base, "layers", None), getattr(base, "rotary_emb", None)
    needed = {"past_key_values", "position_embeddings"}
    if (
        not layers
        or rotary is None
        or not needed <= set(inspect.signature(layers[0].forward).parameters)
    ):
        names = " and ".join(sorted(needed))
        raise TypeError(f"{type(base).__name__} needs rotary_emb and layers that take {names}")
    if attention == "sdpa":
        base.config._attn_implementation = TREE_ATTENTION
    return layers, rotary, base.config
