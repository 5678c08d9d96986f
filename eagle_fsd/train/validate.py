"""What predicts decoding: losses on held-out chats, tau of an exact decode, divergence by depth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from eagle_fsd.model.decode import EagleFSD
from eagle_fsd.model.head import EagleHead
from eagle_fsd.model.rules import FuzzyRule
from eagle_fsd.model.target import Target
from eagle_fsd.model.verify import AcceptanceRule, Evidence
from eagle_fsd.train.dataset import Batch
from eagle_fsd.train.features import batch_features
from eagle_fsd.train.losses import HeadLosses

#: New tokens of the short decode that measures tau.
DECODED_TOKENS = 64


class DivergenceByDepth(AcceptanceRule):
    """Exact verification that looks on: the mean JS at accepted nodes, by their depth.

    Attributes:
        sums, counts: By depth, the root's (0) first.
    """

    def __init__(self) -> None:
        self.sums: list[float] = []
        self.counts: list[int] = []

    def gate(self, evidence: Evidence) -> Tensor:
        tree = evidence.tree
        if tree.size > 1:
            self._book(evidence)
        return torch.zeros_like(tree.tokens, dtype=torch.bool)

    def _book(self, evidence: Evidence) -> None:
        tree = evidence.tree
        divergence = FuzzyRule(threshold=1.0).divergences(evidence)  # [B, N]
        exact = tree.tokens == evidence.sampled.gather(1, tree.parents)
        exact[:, 0] = True
        reached = ~(tree.ancestors & ~exact[:, None, :]).any(-1) & divergence.isfinite()
        for depth in range(tree.max_depth + 1):
            here = divergence[reached & (tree.depths == depth)]
            while len(self.sums) <= depth:
                self.sums.append(0.0)
                self.counts.append(0)
            self.sums[depth] += float(here.sum())
            self.counts[depth] += len(here)

    def means(self) -> list[float]:
        """By depth, as far as there was anything."""
        pairs = zip(self.sums, self.counts, strict=True)
        return [total / count for total, count in pairs if count]


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
    watch = DivergenceByDepth()
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
    return {"tau": tokens / steps if steps else None, "js_by_depth": watch.means()}


def validation_prompts(batches: Iterable[Batch], count: int) -> list[Tensor]:
    """What comes before the assistant's first word in each chat, the first ``count``."""
    prompts: list[Tensor] = []
    for batch in batches:
        for ids, spoken in zip(batch.ids, batch.spoken, strict=True):
            begin = int(spoken.int().argmax())
            if begin > 0 and len(prompts) < count:
                prompts.append(ids[:begin])
    return prompts
