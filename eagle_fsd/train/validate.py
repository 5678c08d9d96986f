"""What predicts decoding: losses on held-out chats, tau of an exact decode, divergence by depth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from eagle_fsd.model.drafters.eagle import EagleHead
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.model.probe import Onlooker, Seen
from eagle_fsd.model.target import Target
from eagle_fsd.train.dataset import Batch
from eagle_fsd.train.features import batch_features
from eagle_fsd.train.losses import HeadLosses

#: New tokens of the short decode that measures tau.
DECODED_TOKENS = 64


@torch.no_grad()
def validation_losses(
    losses: HeadLosses, target: Target, batches: Iterable[Batch]
) -> dict[str, float]:
    """Means over the held-out positions that count, without noise."""
    sums: dict[str, float] = {}
    counted = 0
    for cpu_batch in batches:
        batch = cpu_batch.to(losses.head.device)
        features = batch_features(target, batch).to(losses.head.dtype)
        result = losses(features[:, :-1], batch.ids[:, 1:], features[:, 1:], batch.counted)
        for name, value in result.items():
            sums[name] = sums.get(name, 0.0) + float(value)
        counted += int(batch.counted.sum())
    return {name: value / max(1, counted) for name, value in sums.items()}


def decode_validation(
    head: EagleHead, target: Target, prompts: Sequence[Tensor], **options: Any
) -> dict[str, Any]:
    """Decode ``prompts`` exactly: ``tau``, and ``js_by_depth``, the mean JS at accepted depths."""
    model = EagleFSD(target.model, head)
    watch = Onlooker()
    tokens = steps = 0
    for prompt in prompts:
        out = model.generate(
            prompt[None].to(target.device),
            torch.ones_like(prompt[None]),
            max_new_tokens=DECODED_TOKENS,
            rule=watch,
            **options,
        )
        tokens, steps = tokens + out.stats.tokens, steps + out.stats.steps
    return {"tau": tokens / steps if steps else None, "js_by_depth": _js_by_depth(watch.seen)}


def _js_by_depth(seen: Sequence[Seen]) -> list[float]:
    """The mean JS at accepted nodes, the root (depth 0) first, as far as any was reached."""
    if not any(len(item.depths) for item in seen):
        return []
    depths = torch.cat([item.depths for item in seen])
    values = torch.cat([item.divergences["js"] for item in seen]).double()
    sums = torch.zeros(int(depths.max()) + 1, dtype=torch.float64, device=depths.device)
    sums = sums.scatter_add(0, depths, values)
    return (sums / depths.bincount()).tolist()


def validation_prompts(batches: Iterable[Batch], count: int) -> list[Tensor]:
    """What comes before the assistant's first word in each chat, the first ``count``."""
    prompts: list[Tensor] = []
    for batch in batches:
        for ids, spoken in zip(batch.ids, batch.spoken, strict=True):
            begin = int(spoken.int().argmax())
            if begin > 0 and len(prompts) < count:
                prompts.append(ids[:begin])
    return prompts
