"""The types of heads that can be trained: what they read, and how they are created and loaded.

Shape letters: ``B`` chats, ``S`` tokens, ``F`` values of the features, ``H`` hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from eagle_fsd.model.checkpoint import (
    CheckpointError,
    load_head,
    read_config,
    save_head,
    tensor_names,
)
from eagle_fsd.model.drafters.eagle import EagleHead
from eagle_fsd.model.drafters.eagle3 import Eagle3Flags, Eagle3Head, default_reads, layer_config
from eagle_fsd.model.drafters.heads import DraftHead
from eagle_fsd.model.eagle3_checkpoint import HeadLayout, is_eagle3, load_eagle3, save_eagle3
from eagle_fsd.model.target import LAST, Target
from eagle_fsd.train.config import EAGLE3_FLAGS, HeadType, TrainConfig
from eagle_fsd.utils.options import OptionsError


def new_head(config: TrainConfig, target: Target, token_ids: Tensor | None = None) -> DraftHead:
    """Create a head with random weights, attached to its target.

    ``token_ids`` ``[D]`` are the head's vocabulary, the most frequent token first; by default all.
    The output projection of an EAGLE-3 head starts as the target's rows of its vocabulary.
    """
    if config.head_type == "eagle":
        eagle = EagleHead(target.config, config.bias).attach(target)
        eagle.restrict_vocabulary(token_ids)
        return eagle
    layers = layer_config(target.config)
    size = target.vocab_size if token_ids is None else len(token_ids)
    reads = head_reads(config.head_type, target)
    flags = Eagle3Flags(**{name: getattr(config, name) for name in EAGLE3_FLAGS})
    head = Eagle3Head(layers, target.hidden_size, draft_vocab_size=size, reads=reads, flags=flags)
    rows = target.lm_head.weight.detach()
    if token_ids is not None:
        token_ids = token_ids.sort().values
        head.set_token_ids(token_ids)
        rows = rows[token_ids]
    with torch.no_grad():
        head.lm_head.weight.copy_(rows)
    return head.attach(target)


def empty_copy(head: DraftHead, dtype: torch.dtype) -> DraftHead:
    """Create a head of the same shape with weights that are still to be set, on the same target."""
    copy: DraftHead
    if isinstance(head, Eagle3Head):
        copy = Eagle3Head(
            head.config,
            head.target_hidden_size,
            draft_vocab_size=head.draft_vocab_size,
            reads=head.reads,
            flags=head.flags,
            dtype=dtype,
        )
        if head.token_ids is not None:
            copy.set_token_ids(head.token_ids)
    else:
        assert isinstance(head, EagleHead)
        copy = EagleHead(head.config, head.fc.bias is not None, dtype)
        copy.ranked_tokens = head.ranked_tokens
    copy.attach(head.target)
    if head.embed_tokens is not None:
        rows, size = head.embed_tokens.weight.shape
        copy.embed_tokens = nn.Embedding(rows, size, dtype=dtype, device=copy.device)
    return copy


def head_reads(head_type: HeadType, target: Target) -> tuple[int, ...]:
    """Return the hidden states of the target that new heads read."""
    if head_type == "eagle":
        return EagleHead.reads
    return default_reads(int(target.config.num_hidden_layers))


def training_states(reads: Sequence[int]) -> tuple[int, ...]:
    """Return the hidden states that training needs: those that the head reads, and the last one."""
    return tuple(dict.fromkeys((*reads, LAST)))


def split_features(head: DraftHead, features: Tensor) -> tuple[Tensor, Tensor]:
    """Split ``[B, S, F]`` hidden states :func:`training_states` into the head's inputs and labels.

    Inputs ``[B, S - 1, head.feature_size]`` are the hidden states that the head reads, at all but
    the last token, labels ``[B, S - 1, H]`` the target's last hidden state, at all but the first.
    """
    return features[:, :-1, : head.feature_size], features[:, 1:, -head.target_hidden_size :]


def load_for_training(
    path: str | Path, config: TrainConfig, target: Target, token: str | None = None
) -> DraftHead:
    """Load a head in float32.

    Raises CheckpointError if it is of another type than the configuration's, OptionsError if other
    options that are set contradict it.
    """
    eagle3 = config.head_type == "eagle3"
    if is_eagle3(read_config(path, token), tensor_names(path, token)) != eagle3:
        raise CheckpointError(f"{path} is not a head of type {config.head_type}; see --head-type")
    load = load_eagle3 if eagle3 else load_head
    head: DraftHead = load(path, target, torch.float32, token)
    own = {"bias": head.fc.bias is not None, "draft_vocab_size": head.vocab_size}
    if isinstance(head, Eagle3Head):
        own |= {name: getattr(head.flags, name) for name in EAGLE3_FLAGS}
    for name, value in own.items():
        given = getattr(config, name)
        if name in config.model_fields_set and given not in (None, value):
            raise OptionsError(f"{name} must be that of --head, {value}; got {given}")
    return head


def save_trained(head: DraftHead, path: Path, dtype: torch.dtype, binary: bool = False) -> None:
    """Save a head in EAGLE's layout; an EAGLE-3 head without Llama layers in speculators'."""
    if isinstance(head, Eagle3Head):
        layout: HeadLayout = "eagle" if head.config.model_type == "llama" else "speculators"
        save_eagle3(head, path, layout=layout, dtype=dtype, binary=binary)
    else:
        assert isinstance(head, EagleHead)
        save_head(head, path, dtype, binary)
