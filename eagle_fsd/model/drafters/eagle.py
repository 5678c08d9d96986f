"""The EAGLE-1/2 draft head (arXiv 2401.15077, section 3.1; arXiv 2406.16858).

From the target's feature at position ``t`` (its last hidden state, after the final norm) and the
token at ``t + 1`` the head predicts the feature at ``t + 1``::

    x = fc([embed(token_{t+1}); feature_t])
    feature_{t+1} = decoder_layer(x)          # of the target's family, without its input norm
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

from eagle_fsd.model.cache import Layout, TreeCache, additive_mask
from eagle_fsd.model.target import Target
from eagle_fsd.utils.text import one_line


class EagleHead(nn.Module):
    """A projection that fuses embedding and feature, then one decoder layer of the target's family.

    The embedding and the output projection are the target's modules, set by :meth:`attach`. A head
    that was trained with another embedding keeps it in ``embed_tokens``.

    Args:
        config: A configuration of the target's family. One layer is built, whatever
            ``num_hidden_layers`` says.
        bias: Whether ``fc`` has a bias (``config.bias`` of published heads, true when absent).
        dtype: Data type of the weights.

    Raises:
        ValueError: The family's decoder layers do not have the interface of Llama's.
    """

    def __init__(
        self, config: PreTrainedConfig, bias: bool = True, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens: nn.Embedding | None = None
        self._target: Target | None = None
        self._layout = Layout()
        try:
            self._build(bias, dtype)
            self._try_layer()
        except Exception as error:
            raise ValueError(
                f"cannot build an EAGLE head for {config.model_type}: its decoder layers do not"
                f" have the interface of Llama's ({type(error).__name__}: {one_line(error)})"
            ) from error

    def _build(self, bias: bool, dtype: torch.dtype) -> None:
        size = self.config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=bias, dtype=dtype)
        layer, rotary, attention = _decoder_layer(self.config, dtype)
        self.layers = nn.ModuleList([layer])
        self.rotary = rotary
        # Families with a RoPE per layer type select it by name.
        per_type = len(inspect.signature(rotary.forward).parameters) > 2
        self._rotary_options = {"layer_type": "full_attention"} if per_type else {}
        self._needs_mask = attention != "sdpa"  # without a mask, only SDPA is causal

    @torch.no_grad()
    def _try_layer(self) -> None:
        """Run the layer once, so that a family whose layers need other inputs is rejected."""
        hidden = torch.zeros(1, 1, self.config.hidden_size, dtype=self.dtype, device=self.device)
        positions = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        cache = self.new_cache(1, 1)
        cache.place(positions, 1)
        self._run_layer(hidden, positions, hidden.new_zeros(1, 1, 1, 1), cache)

    def attach(self, target: Target) -> EagleHead:
        """Use the target's embedding and output projection, and move to the target's device.

        Args:
            target: The target that the head was trained for.

        Returns:
            The head itself.

        Raises:
            ValueError: Head and target differ in hidden size or vocabulary size.
        """
        if self.config.hidden_size != target.hidden_size:
            raise ValueError(
                f"this head belongs to another target: its hidden size is"
                f" {self.config.hidden_size}, the target's is {target.hidden_size}"
            )
        if self.config.vocab_size != target.vocab_size:
            raise ValueError(
                f"this head belongs to another target: its vocabulary has"
                f" {self.config.vocab_size} tokens, the target's has {target.vocab_size}"
            )
        self._target = target  # not a module, so its parameters are not registered here
        return self.to(target.device)

    @property
    def target(self) -> Target:
        """The target that the head is attached to.

        Raises:
            RuntimeError: :meth:`attach` has not been called.
        """
        if self._target is None:
            raise RuntimeError("attach the head to its target first")
        return self._target

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.fc.weight.dtype

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens with the head's own embedding if it has one, else the target's.

        Args:
            tokens: ``[B, S]`` token ids.

        Returns:
            ``[B, S, H]``.
        """
        embedding = self.embed_tokens if self.embed_tokens is not None else self.target.embed
        embedded: Tensor = embedding(tokens)
        return embedded.to(self.device, self.dtype)

    def log_probs(self, features: Tensor) -> Tensor:
        """Project features with the target's output projection.

        Args:
            features: ``[..., H]``.

        Returns:
            ``[..., V]`` float32 log-probabilities.
        """
        return F.log_softmax(self.target.project(features), dim=-1)

    def new_cache(self, rows: int, length: int) -> TreeCache:
        """Create a cache for the head's layer.

        Args:
            rows: Number of sequences.
            length: Slots per sequence.
        """
        return TreeCache(rows, length, self._layout)

    def forward(
        self,
        features: Tensor,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        cache: TreeCache | None = None,
    ) -> Tensor:
        """Predict the next feature from pairs of a feature and the token after it.

        Args:
            features: ``[B, S, H]`` the target's (or the head's own) feature before each token.
            tokens: ``[B, S]`` token ids.
            positions: ``[B, S]`` the position of each feature, for the rotary embedding.
            mask: ``[B, 1, S, L]`` additive attention mask; None is causal over ``S``.
            cache: A cache on which :meth:`TreeCache.place` has been called.

        Returns:
            ``[B, S, H]``.
        """
        if mask is None and self._needs_mask:
            length = tokens.shape[1]
            causal = torch.ones(1, length, length, dtype=torch.bool, device=self.device).tril()
            mask = additive_mask(causal, self.dtype)
        hidden = self.fc(torch.cat([self.embed(tokens), features.to(self.dtype)], -1))
        return self._run_layer(hidden, positions, mask, cache)

    def _run_layer(
        self, hidden: Tensor, positions: Tensor, mask: Tensor | None, cache: TreeCache | None
    ) -> Tensor:
        rotary = self.rotary(hidden, position_ids=positions, **self._rotary_options)
        predicted: Tensor = self.layers[0](
            hidden,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
            position_embeddings=rotary,
        )
        return predicted

    def append(
        self,
        features: Tensor,
        tokens: Tensor,
        lengths: Tensor,
        max_length: int,
        cache: TreeCache,
    ) -> Tensor:
        """Process the pairs that follow those in the cache, causally.

        Args:
            features: ``[B, S, H]`` the feature before each token.
            tokens: ``[B, S]`` token ids.
            lengths: ``[B]`` number of pairs in the cache.
            max_length: Upper bound of ``lengths``, known without reading from the device.
            cache: The head's cache.

        Returns:
            ``[B, S, H]`` predicted features.
        """
        positions = lengths[:, None] + torch.arange(tokens.shape[1], device=lengths.device)
        view = cache.visible(max_length + tokens.shape[1])
        seen = torch.arange(view, device=lengths.device) <= positions[:, :, None]
        cache.place(positions, view)
        return self.forward(features, tokens, positions, additive_mask(seen, self.dtype), cache)


def _decoder_layer(
    config: PreTrainedConfig, dtype: torch.dtype
) -> tuple[nn.Module, nn.Module, str]:
    """Build a decoder layer without its input norm; also return its RoPE and attention type."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = 1
    config.vocab_size = 1  # the embedding is discarded
    config.pad_token_id = 0
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"]
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
        raise TypeError("they take no RoPE or no cache")
    layers[0].input_layernorm = nn.Identity()
    return layers[0], rotary, attention
