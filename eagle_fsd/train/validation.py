"""Validate on held-out chats: losses, and accepted length and divergences of exact decoding."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from torch.utils.data import Dataset

from eagle_fsd.model.drafters.heads import DraftHead
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.model.probe import DivergenceProbe
from eagle_fsd.model.target import Target
from eagle_fsd.train.dataset import Example, TrainingBatch
from eagle_fsd.train.losses import HeadLosses, loss_inputs

#: Maximum number of new tokens decoded per prompt to measure tau.
MAX_NEW_TOKENS = 64


@torch.no_grad()
def validation_losses(losses: HeadLosses, batches: Iterable[TrainingBatch]) -> dict[str, float]:
    """Compute mean losses over the held-out positions, without noise."""
    sums: dict[str, float] = {}
    positions = 0
    for cpu_batch in batches:
        batch = send_to_device(cpu_batch, losses.head.device, non_blocking=True)
        for name, value in losses(**loss_inputs(losses.head, batch)).items():
            sums[name] = sums.get(name, 0.0) + float(value)
        positions += int(batch.loss_mask.sum())
    return {name: value / max(1, positions) for name, value in sums.items()}


def validation_prompts(
    data: Dataset[Example], chats: Sequence[int], count: int, max_length: int
) -> list[Tensor]:
    """Return the ``[S]`` prompts before the first answers of at most ``count`` chats.

    Empty prompts, and those that could exceed ``max_length`` tokens with an answer, are left out.
    """
    examples = (item for item in map(data.__getitem__, chats) if any(item.assistant_mask))
    prompts = (torch.tensor(item.ids[: item.assistant_mask.index(True)]) for item in examples)
    fitting = (item for item in prompts if 0 < len(item) <= max_length - MAX_NEW_TOKENS)
    return list(islice(fitting, count))


def can_decode(target: Target) -> bool:
    """Whether all weights of the target are in memory, neither left out nor offloaded."""
    return not any(parameter.is_meta for parameter in target.model.parameters())


def decode_validation(head: DraftHead, target: Target, prompts: Sequence[Tensor]) -> dict[str, Any]:
    """Measure exact greedy decoding: tokens per target pass, and mean JS divergence by depth.

    ``tau`` is None if nothing was decoded, as without prompts; ``js_by_depth`` is in nats.
    """
    if not can_decode(target):
        return {"tau": None, "js_by_depth": []}
    model = EagleFSD(target.model, head)
    probe = DivergenceProbe()
    tokens = steps = 0
    with contextlib.suppress(FloatingPointError, MemoryError):  # raised after the other answers
        for item in model.generate_many(prompts, MAX_NEW_TOKENS, rule=probe):
            tokens, steps = tokens + item.stats.tokens, steps + item.stats.steps
    return {"tau": tokens / steps if steps else None, "js_by_depth": _mean_js_by_depth(probe)}


def _mean_js_by_depth(probe: DivergenceProbe) -> list[float]:
    """Average the divergence at accepted nodes by depth, the root (depth 0) first."""
    if not any(map(len, probe.depths)):
        return []
    depths, values = torch.cat(probe.depths), torch.cat(probe.divergences["js"]).double()
    means: list[float] = (depths.bincount(values) / depths.bincount()).tolist()
    return means
