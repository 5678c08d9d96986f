"""Looking on while decoding: exact verification that tells what it sees at every accepted node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_fsd.model.acceptance import FuzzyRule
from eagle_fsd.model.verify import AcceptanceRule, Evidence


@dataclass(frozen=True)
class Seen:
    """One step's nodes that exact verification reached and that have children, ``K`` in all.

    Attributes:
        depths: ``[K]`` edges from the root.
        drafted: ``[K]`` bool: whether the target's choice is among the node's children.
        divergences: ``[K]`` by name, between the target's and the draft's distributions.
    """

    depths: Tensor
    drafted: Tensor
    divergences: dict[str, Tensor]


class Onlooker(AcceptanceRule):
    """Relaxes nothing, and keeps what it saw at every step in :attr:`seen`.

    Args:
        divergences: Names in :data:`~eagle_fsd.model.divergence.DIVERGENCES`.
    """

    def __init__(self, divergences: Sequence[str] = ("js",)) -> None:
        self.rules = {name: FuzzyRule(threshold=0.0, divergence=name) for name in divergences}
        self.seen: list[Seen] = []

    def gate(self, evidence: Evidence) -> Tensor:
        tree = evidence.tree
        if tree.size > 1:
            exact = tree.tokens == evidence.sampled.gather(1, tree.parents)
            children = torch.zeros_like(tree.tokens)
            drafted = children.scatter_add(1, tree.parents[:, 1:], exact[:, 1:].long()) > 0
            exact[:, 0] = True
            reached = ~(tree.ancestors & ~exact[:, None, :]).any(-1)
            found = {name: rule.divergences(evidence) for name, rule in self.rules.items()}
            # Infinite where the head did not expand the node, or it has no children.
            reached &= next(iter(found.values())).isfinite()
            self.seen.append(
                Seen(
                    tree.depths[reached],
                    drafted[reached],
                    {name: value[reached] for name, value in found.items()},
                )
            )
        return torch.zeros_like(tree.tokens, dtype=torch.bool)
