"""The EAGLE-1/2 draft head (arXiv 2401.15077, section 3.1; arXiv 2406.16858).

From the target's feature at position ``t`` (its last hidden state, after the final norm) and the
token at ``t + 1`` the head predicts the feature at ``t + 1``::

    x = fc([embed(token_{t+1}); feature_t])
    feature_{t+1} = decoder_layer(x)          # of the target's family, without its input norm
    logits_{t+2} = lm_head(feature_{t+1})     # the target's own projection

Shape letter: ``D`` tokens of the draft vocabulary.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from typing_extensions import Self

from eagle_fsd.model.attention import config_groups, fold_mask
from eagle_fsd.model.cache import additive_mask
from eagle_fsd.model.drafters.heads import DraftHead, decoder_layers, layer_options
from eagle_fsd.model.plain_layers import AttentionInputs, attend, feed_forward, norm
from eagle_fsd.model.target import LAST, Target
from eagle_fsd.model.weights import whole
from eagle_fsd.utils.text import one_line


class EagleHead(DraftHead):
    """A projection that fuses embedding and feature, then one decoder layer of the target's family.

    The output projection is the target's, or some rows of it.

    Args:
        config: A configuration of the target's family. One layer is built, whatever
            ``num_hidden_layers`` says.
        bias: Whether ``fc`` has a bias (``config.bias`` of published heads, true when absent).
        dtype: Data type of the weights.

    Raises:
        ValueError: The layer cannot be built, or does not have the interface of Llama's.
    """

    reads = (LAST,)
    projects = True
    #: The draft vocabulary ``[D]``, the most frequent token first; None for all tokens.
    ranked_tokens: Tensor | None
    # The rows of the output projection that belong to token_ids.
    _row_weights: Tensor | None
    _row_bias: Tensor | None

    def __init__(
        self, config: PreTrainedConfig, bias: bool = True, dtype: torch.dtype = torch.float32
    ) -> None:
        try:
            super().__init__(config, config.hidden_size)
            self.ranked_tokens = None
            self._projection: tuple[Any, ...] | None = None  # whose rows are copied
            self.register_buffer("_row_weights", None, persistent=False)
            self.register_buffer("_row_bias", None, persistent=False)
            self._build(bias, dtype)
            try:
                self._try_layer()
            except Exception:
                if self.groups == 1:
                    raise
                self.groups = 1  # the layer may handle masks itself
                self._try_layer()
        except Exception as error:
            raise ValueError(
                f"cannot build an EAGLE head for {config.model_type}; it needs a decoder layer with"
                f" the interface of Llama's ({type(error).__name__}: {one_line(error)})"
            ) from error

    def _build(self, bias: bool, dtype: torch.dtype) -> None:
        size = self.config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=bias, dtype=dtype)
        self.layers, self.rotary, layer_config = decoder_layers(self.config, 1, dtype)
        self.groups = config_groups(layer_config)
        self.layers[0].input_layernorm = nn.Identity()
        # Families with a RoPE per layer type select it by name.
        per_type = "layer_type" in inspect.signature(self.rotary.forward).parameters
        self._rotary_options = {"layer_type": "full_attention"} if per_type else {}
        # Without a mask, eager attention is not causal.
        self._needs_mask = layer_config._attn_implementation == "eager"

    @torch.no_grad()
    def _try_layer(self) -> None:
        """Run the layer once, so that a family whose layers need other inputs is rejected."""
        hidden = torch.zeros(1, 2, self.config.hidden_size, dtype=self.dtype, device=self.device)
        positions = torch.arange(2, device=self.device)[None]
        cache = self.new_cache(1, 2)
        cache.place(positions, cache.keys(2, self.device))
        mask = fold_mask(hidden.new_zeros(1, 1, 2, 2), self.groups)
        rotary = self.embed_positions(positions)
        self._run_layers(hidden, hidden, layer_options(positions, mask, cache, rotary))

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size if self.token_ids is None else len(self.token_ids)

    def restrict_vocabulary(self, token_ids: Tensor | None) -> None:
        """Limit the tokens that are drafted (FR-Spec, arXiv 2502.14856), not those emitted.

        Args:
            token_ids: ``[D]`` distinct tokens, the most frequent first; None for all.
        """
        self.ranked_tokens = token_ids
        weights, bias = None, None
        if token_ids is not None:
            token_ids = token_ids.to(self.target.device).sort().values
            projection = self.target.lm_head
            weights, bias = projection.weight, getattr(projection, "bias", None)
            weights, bias = (
                None if part is None else whole(part)[token_ids] for part in (weights, bias)
            )
        new, old = (token_ids, weights, bias), (self.token_ids, self._row_weights, self._row_bias)
        if not all(map(_equal, new, old)):  # graphs that read the old tensors stay valid
            self.token_ids, self._row_weights, self._row_bias = new

    def attach(self, target: Target) -> Self:
        super().attach(target)
        weight = target.lm_head.weight
        version = None if weight.is_inference() else weight._version
        projection = id(weight), version, weight.dtype, weight.device
        if self._projection != projection:
            self.restrict_vocabulary(self.ranked_tokens)
            self._projection = projection
        return self

    def log_probs(self, hidden: Tensor) -> Tensor:
        rows = None if self._row_weights is None else (self._row_weights, self._row_bias)
        return F.log_softmax(self.target.project(hidden, rows), dim=-1)

    def _run_layers(self, x: Tensor, embedded: Tensor, options: dict[str, Any]) -> Tensor:
        if options["attention_mask"] is None and self._needs_mask:
            length = x.shape[1]
            causal = torch.ones(1, length, length, dtype=torch.bool, device=self.device).tril()
            options = {**options, "attention_mask": additive_mask(causal, self.dtype)}
        return self.layers[0](self._project(x, embedded), **options)

    def _run_plain(self, x: Tensor, embedded: Tensor, inputs: AttentionInputs) -> Tensor:
        layer: Any = self.layers[0]
        hidden = self._project(x, embedded)
        y = hidden + attend(layer.self_attn, hidden, inputs)
        return y + feed_forward(layer.mlp, norm(layer.post_attention_layernorm, y))

    def _project(self, x: Tensor, embedded: Tensor) -> Tensor:
        return self.fc(torch.cat([embedded, x.to(self.dtype)], -1))


def _equal(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return (first.device, first.dtype) == (second.device, second.dtype) and first.equal(second)
