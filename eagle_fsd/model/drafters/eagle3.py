"""The EAGLE-3 and EAGLE-3.1 draft heads (arXiv 2503.01840).

With ``h`` some of the target's hidden states before an accepted token, usually three, or with the
head's own output ``z`` before a drafted token, both at the position before the token::

    x = fc(cat(h_low, h_mid, h_high))                       # accepted tokens
    x = z                                                   # drafted tokens
    a = cat(input_layernorm(embed(token)), hidden_norm(x))
    y = x + self_attn(a)
    z = y + mlp(post_attention_layernorm(y))
    log q = log_softmax(lm_head(norm(z)))

Further layers, if any, are ordinary decoder layers. :class:`Eagle3Flags` lists the variants.

Sources: ``eagle/model/cnets.py`` in the code of EAGLE's authors; ``llama_eagle3.py`` in SGLang and
vLLM; ``models/eagle3`` in speculators.

Shape letters: ``Ht`` hidden size of the target, ``H`` of the head, ``V`` vocabulary of the target,
``D`` of the head.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from typing_extensions import Self

from eagle_fsd.model.attention import config_groups
from eagle_fsd.model.drafters.heads import DraftHead, decoder_layers
from eagle_fsd.model.packed_weights import linear
from eagle_fsd.model.plain_layers import AttentionInputs, attend, feed_forward, norm
from eagle_fsd.model.target import Target

#: Families of the decoder layers.
LAYER_FAMILIES = ("llama", "qwen3")


@dataclass(frozen=True)
class Eagle3Flags:
    """Variants of the architecture, by their names in ``config.json``.

    Attributes:
        bias: ``fc`` has a bias.
        norm_before_residual: The residual of the attention is ``hidden_norm(x)`` instead of ``x``.
        norm_before_fc: The concatenated hidden states are normed before ``fc``; excludes
            ``fc_norm``.
        fc_norm: Each hidden state is normed by itself before ``fc`` (EAGLE-3.1).
        norm_output: Before a drafted token, ``x`` is ``norm(z)`` instead of ``z`` (EAGLE-3.1).
    """

    bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other")


class Eagle3Head(DraftHead):
    """A projection of several hidden states, decoder layers over pairs, and an output projection.

    A head whose vocabulary is smaller than the target's starts with the target's first tokens;
    :meth:`set_token_ids` changes them.

    Args:
        config: Configuration of the decoder layers, of a family in :data:`LAYER_FAMILIES`, with the
            target's ``vocab_size``; see :func:`layer_config`.
        target_hidden_size: ``Ht``.
        draft_vocab_size: ``D``. None: the head has no output projection and uses the target's.
        reads: The target's hidden states, lowest first, as indices into Hugging Face's
            ``hidden_states``; see :func:`default_reads`.
        flags: Variants of the architecture; default: none.
        dtype: Data type of the weights.

    Attributes:
        flags: Variants of the architecture.
        draft_vocab_size: ``D``; None if the head uses the target's output projection.

    Raises:
        ValueError: The family or a sliding window is not supported, or ``draft_vocab_size`` is not
            in ``[1, V]``.
    """

    d2t: Tensor | None  # [D] the target's token for each of the head's, minus the latter

    def __init__(
        self,
        config: PreTrainedConfig,
        target_hidden_size: int,
        draft_vocab_size: int | None,
        reads: tuple[int, ...],
        flags: Eagle3Flags | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(config, target_hidden_size)
        if config.model_type not in LAYER_FAMILIES:
            raise ValueError(
                f"the layers of an EAGLE-3 head must be of type {' or '.join(LAYER_FAMILIES)}; got"
                f" {config.model_type}"
            )
        kinds = (getattr(config, "layer_types", None) or [])[: config.num_hidden_layers]
        if "sliding_attention" in kinds:
            raise ValueError("an EAGLE-3 head with a sliding window is not supported")
        if draft_vocab_size is not None and not 1 <= draft_vocab_size <= config.vocab_size:
            raise ValueError(
                f"draft_vocab_size must be in [1, {config.vocab_size}]; got {draft_vocab_size}"
            )
        self.draft_vocab_size, self.reads = draft_vocab_size, reads
        self.projects = draft_vocab_size is None
        self.flags = flags = flags or Eagle3Flags()
        size, fused = config.hidden_size, len(reads) * target_hidden_size
        count = config.num_hidden_layers
        self.layers, self.rotary, layers_config = decoder_layers(config, count, dtype)
        self.groups = config_groups(layers_config)
        first = _FirstLayer(self.layers[0], size, flags.norm_before_residual)
        self.layers[0] = first
        norm_type: Any = type(first.hidden_norm)

        def new_norm(width: int) -> nn.Module:
            return norm_type(width, eps=config.rms_norm_eps).to(dtype)

        if flags.norm_before_fc:
            self.input_norm = new_norm(fused)
        if flags.fc_norm:
            self.fc_norm = nn.ModuleList(new_norm(target_hidden_size) for _ in reads)
        self.fc = nn.Linear(fused, size, bias=flags.bias, dtype=dtype)
        self.norm = new_norm(size)
        d2t = None
        if draft_vocab_size is not None:
            self.lm_head = nn.Linear(size, draft_vocab_size, bias=False, dtype=dtype)
            if draft_vocab_size < config.vocab_size:
                d2t = torch.zeros(draft_vocab_size, dtype=torch.long)
        self.register_buffer("d2t", d2t)

    def attach(self, target: Target) -> Self:
        super().attach(target)
        layers = len(target.layers)
        if beyond := [index for index in self.reads if not 0 <= index < layers]:
            raise ValueError(
                f"this head belongs to another target: it reads the input of layer {beyond[0]}, the"
                f" target has layers 0 to {layers - 1}"
            )
        borrows = self.embed_tokens is None or self.draft_vocab_size is None
        if borrows and self.config.hidden_size != target.hidden_size:
            raise ValueError(
                f"this head uses the target's embedding or output projection, but its hidden size"
                f" is {self.config.hidden_size}, the target's is {target.hidden_size}"
            )
        return self

    @property
    def vocab_size(self) -> int:
        return self.draft_vocab_size or int(self.config.vocab_size)

    @property
    def token_ids(self) -> Tensor | None:  # type: ignore[override]
        """``[D]`` the target's token for each of the head's; None if they are the same."""
        if self.d2t is None:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def set_token_ids(self, token_ids: Tensor) -> None:
        """Choose the head's vocabulary.

        Args:
            token_ids: ``[D]`` the target's token for each of the head's.

        Raises:
            ValueError: The head has the target's vocabulary, the number of tokens is not ``D``, a
                token is not in the target's vocabulary, or two are the same.
        """
        if self.d2t is None:
            raise ValueError("this head has the target's vocabulary")
        if token_ids.shape != self.d2t.shape:
            raise ValueError(
                f"the vocabulary map must have shape {list(self.d2t.shape)}; got"
                f" {list(token_ids.shape)}"
            )
        wrong = (token_ids < 0) | (token_ids >= self.config.vocab_size)
        if wrong.any():
            index = int(wrong.nonzero()[0])
            raise ValueError(
                f"the vocabulary map sends token {index} to {int(token_ids[index])}, outside the"
                f" target's vocabulary of {self.config.vocab_size} tokens"
            )
        found, counts = token_ids.unique(return_counts=True)
        if len(found) < len(token_ids):
            twice = int(found[counts.argmax()])
            raise ValueError(f"the vocabulary map sends {int(counts.max())} tokens to {twice}")
        first = torch.arange(len(token_ids), device=token_ids.device)
        self.d2t.copy_(token_ids - first)

    def fuse(self, features: Tensor) -> Tensor:
        features = features.to(self.dtype)
        if self.flags.norm_before_fc:
            features = self.input_norm(features)
        if self.flags.fc_norm:
            parts = features.chunk(len(self.reads), -1)
            normed = [module(part) for module, part in zip(self.fc_norm, parts, strict=True)]
            features = torch.cat(normed, -1)
        return self.fc(features)

    def carry(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden) if self.flags.norm_output else hidden

    def log_probs(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        if self.projects:
            return F.log_softmax(self.target.project(normed), dim=-1)
        logits = linear(normed, self.lm_head.weight, self.lm_head.bias)
        return F.log_softmax(logits.float(), dim=-1)

    def _run_layers(self, x: Tensor, embedded: Tensor, options: dict[str, Any]) -> Tensor:
        z: Tensor = self.layers[0](x, embedded, **options)
        for layer in self.layers[1:]:
            z = layer(z, **options)
        return z

    def _run_plain(self, x: Tensor, embedded: Tensor, inputs: AttentionInputs) -> Tensor:
        layers: Any = self.layers
        for index, layer in enumerate(layers):
            if index == 0:
                normed = norm(layer.hidden_norm, x)
                read = torch.cat([norm(layer.input_layernorm, embedded), normed], -1)
                x = normed if self.flags.norm_before_residual else x
            else:
                read = norm(layer.input_layernorm, x)
            x = x + attend(layer.self_attn, read, inputs)
            x = x + feed_forward(layer.mlp, norm(layer.post_attention_layernorm, x))
        return x


class _FirstLayer(GradientCheckpointingLayer):
    """A Llama or Qwen3 layer whose attention reads embedding and hidden state, ``2 H`` values."""

    def __init__(self, layer: Any, size: int, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.self_attn: nn.Module = layer.self_attn
        self.mlp: nn.Module = layer.mlp
        self.input_layernorm: nn.Module = layer.input_layernorm
        self.hidden_norm: nn.Module = copy.deepcopy(layer.input_layernorm)
        self.post_attention_layernorm: nn.Module = layer.post_attention_layernorm
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(self.self_attn, name)
            wider = nn.Linear(
                2 * size,
                old.out_features,
                bias=old.bias is not None,
                device=old.weight.device,
                dtype=old.weight.dtype,
            )
            setattr(self.self_attn, name, wider)

    def forward(self, x: Tensor, embedded: Tensor, **options: Any) -> Tensor:
        normed = self.hidden_norm(x)
        pair = torch.cat([self.input_layernorm(embedded), normed], -1)
        attended, _ = self.self_attn(hidden_states=pair, **options)
        y = (normed if self.norm_before_residual else x) + attended
        return y + self.mlp(self.post_attention_layernorm(y))


def default_reads(layers: int) -> tuple[int, ...]:
    """Return the default ``reads``: 2, ``layers // 2`` and ``layers - 3``, where they exist."""
    wanted = {2, layers // 2, layers - 3}
    return tuple(sorted(index for index in wanted if 0 <= index < layers))


def layer_config(config: PreTrainedConfig) -> LlamaConfig:
    """Configure a head of one Llama layer for a target."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope = dict(rope.get("full_attention") or rope)
    # Layers of Llama rotate the whole attention head.
    if rope.pop("partial_rotary_factor", 1.0) != 1.0 and rope.get("rope_type") == "longrope":
        # Its factors are those of the pairs that the target rotates.
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", 4 * config.hidden_size),
        num_hidden_layers=1,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None),
        head_dim=getattr(config, "head_dim", None),
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        rope_parameters=rope or None,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
    )
