"""The EAGLE-1/2 draft head (arXiv 2401.15077, section 3.1; arXiv 2406.16858).

From the target's feature at position ``t`` (its last hidden state, after the final norm) and the
token at ``t + 1`` the head predicts the feature at ``t + 1``::

    x = fc([embed(token_{t+1}); feature_t])
    feature_{t+1} = decoder_layer(x)          # the target's family, without its input norm
    logits_{t+2} = lm_head(feature_{t+1})     # the target's own projection

Shape letters: ``B`` rows, ``S`` new pairs, ``H`` hidden size, ``V`` vocabulary.
"""

from __future__ import annotations

import copy
import inspect

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig

from eagle_fsd.model.cache import TreeCache, additive_mask
from eagle_fsd.model.target import Target


class EagleHead(nn.Module):
    """One decoder layer of the target's family behind a fusing projection.

    The embedding and the output projection are the target's own tensors, not copies;
    :meth:`attach` hands them over. A head that was trained with an embedding of its own keeps it in
    ``embed_tokens``.

    Args:
        config: Of the target's family; one layer is built whatever ``num_hidden_layers`` says.
        bias: Whether ``fc`` has a bias (``config.bias`` of published heads, true when absent).
        dtype: Of the weights.

    Raises:
        ValueError: The family's decoder layer is of another make than Llama's.
    """

    def __init__(
        self, config: PreTrainedConfig, bias: bool = True, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias, dtype=dtype)
        layer, rotary = _decoder_layer(config, dtype)
        self.layers = nn.ModuleList([layer])
        self.rotary = rotary
        self.embed_tokens: nn.Embedding | None = None
        self._shared: Target | None = None

    def attach(self, target: Target) -> EagleHead:
        """Use the target's embedding and output projection, on the latter's device.

        Raises:
            ValueError: The head was made for a target of another hidden size or vocabulary.
        """
        if self.config.hidden_size != target.hidden_size:
            raise ValueError(
                f"the head's hidden size is {self.config.hidden_size}, the target's is"
                f" {target.hidden_size}: this head belongs to another target"
            )
        if self.config.vocab_size != target.vocabulary:
            raise ValueError(
                f"the head's vocabulary has {self.config.vocab_size} tokens, the target's has"
                f" {target.vocabulary}: this head belongs to another target"
            )
        self._shared = target  # no module itself, so nothing of it is registered here
        return self.to(target.device)

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def embed(self, tokens: Tensor) -> Tensor:
        """``[B, S]`` ids to ``[B, S, H]``, with the target's embedding unless it has its own."""
        embedding = self.embed_tokens if self.embed_tokens is not None else self._shared.embed
        return embedding(tokens).to(self.device, self.dtype)

    def readout(self, features: Tensor) -> Tensor:
        """Features ``[..., H]`` to float32 log-probabilities ``[..., V]``."""
        return F.log_softmax(self._shared.project(features), dim=-1)

    def new_cache(self, rows: int, length: int) -> TreeCache:
        config = copy.copy(self.config)
        config.num_hidden_layers = 1
        return TreeCache(config, rows, length, self.dtype, self.device)

    def forward(
        self,
        features: Tensor,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        cache: TreeCache | None = None,
    ) -> Tensor:
        """Predicted features ``[B, S, H]``.

        Args:
            features: ``[B, S, H]`` the target's (or the head's own) feature before each token.
            tokens: ``[B, S]``.
            positions: ``[B, S]`` the position of each feature, for the rotary embedding.
            mask: ``[B, 1, S, L]`` additive; None is causal over ``S``.
            cache: Already told where to write (:meth:`TreeCache.place`).
        """
        hidden = self.fc(torch.cat([self.embed(tokens), features.to(self.dtype)], -1))
        rotary = self.rotary(hidden, position_ids=positions)
        return self.layers[0](
            hidden,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
            position_embeddings=rotary,
        )

    def append(
        self,
        features: Tensor,
        tokens: Tensor,
        lengths: Tensor,
        longest: int,
        cache: TreeCache,
    ) -> Tensor:
        """Run the pairs that follow what is in the cache; pair ``i`` sees the pairs before it.

        Args:
            features, tokens: ``[B, S, H]`` and ``[B, S]``.
            lengths: ``[B]`` pairs already in the cache; ``longest`` bounds them for the host.
        """
        positions = lengths[:, None] + torch.arange(tokens.shape[1], device=lengths.device)
        view = cache.visible(longest + tokens.shape[1])
        seen = torch.arange(view, device=lengths.device) <= positions[:, :, None]
        cache.place(positions, view)
        return self(features, tokens, positions, additive_mask(seen, self.dtype), cache)


def _decoder_layer(config: PreTrainedConfig, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """A decoder layer of ``config``'s family without its input norm, and the rotary embedding."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = 1
    config.vocab_size = 1  # the embedding that comes along is thrown away
    config.pad_token_id = None
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"]
    # Whichever of the two the family has; without a word it may choose one that takes no mask.
    for attention in ("sdpa", "eager"):
        try:
            base = AutoModel.from_config(config, dtype=dtype, attn_implementation=attention)
            break
        except ValueError:
            if attention == "eager":
                raise
    layers, rotary = getattr(base, "layers", None), getattr(base, "rotary_emb", None)
    takes = inspect.signature(layers[0].forward).parameters if layers is not None else ()
    if rotary is None or not {"past_key_values", "position_embeddings"} <= set(takes):
        raise ValueError(
            f"no EAGLE head can be made for {config.model_type}: its decoder layers are of another"
            " make than Llama's"
        )
    if len(inspect.signature(rotary.forward).parameters) > 2:  # one RoPE for each type of layer
        raise ValueError(f"no EAGLE head can be made for {config.model_type}: it has several RoPEs")
    layers[0].input_layernorm = nn.Identity()
    return layers[0], rotary
