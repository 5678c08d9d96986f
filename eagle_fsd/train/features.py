"""The features that a head is trained on: hidden states of the target, plus noise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle_fsd.model.target import LAST, Target
from eagle_fsd.train.dataset import TrainingBatch

#: Maximum number of logits to compute at a time; on a CPU, so few that they often fit its caches.
MAX_LOGITS = 1 << 26
MAX_CPU_LOGITS = 1 << 21


@torch.no_grad()
def compute_features(target: Target, ids: Tensor, states: Sequence[int] = (LAST,)) -> Tensor:
    """Compute the hidden states ``states`` of padded ``[B, S]`` ids as one tensor ``[B, S, F]``.

    States are indices into Hugging Face's ``hidden_states``; the last one is after the final norm.
    The target's parts may be spread over devices or offloaded, as Hugging Face's hooks move the
    inputs. The result is on the target's device, unless the output projection is offloaded.
    """
    if not target.embed.weight.is_meta:
        ids = ids.to(target.embed.weight.device)
    with target.recording(states) as recorded:
        last: Tensor = target.body(input_ids=ids, use_cache=False).last_hidden_state
    recorded[LAST] = last
    device = last.device if target.lm_head.weight.is_meta else target.device
    return torch.cat([recorded[state].to(device) for state in states], -1)


@torch.no_grad()
def most_likely_tokens(target: Target, hidden: Tensor) -> Tensor:
    """Return the target's most likely tokens ``[n]`` after its last hidden states ``[n, H]``."""
    size = max(1, max_logits(hidden.device) // target.vocab_size)
    parts = [target.project(part).argmax(-1) for part in hidden.split(size)]
    return torch.cat(parts)


def max_logits(device: torch.device) -> int:
    """Return the maximum number of logits to compute at a time on a device."""
    return MAX_CPU_LOGITS if device.type == "cpu" else MAX_LOGITS


def add_noise(features: Tensor, batch: TrainingBatch, half_width: float, seed: int) -> Tensor:
    """Add noise in ``[-half_width, half_width]`` that depends on the chat, not on its row or batch.

    Features and result are ``[B, S - 1, F]``, the result in float32.
    """
    features = features.float()
    if not half_width:
        return features
    noise = torch.zeros_like(features)
    generator = torch.Generator(features.device)
    for row, (index, length) in enumerate(zip(batch.indices, batch.lengths, strict=True)):
        generator.manual_seed((seed * 1_000_000_007 + index + 1) % 2**63)
        noise[row, : length - 1].uniform_(-1, 1, generator=generator)
    return features + half_width * noise
