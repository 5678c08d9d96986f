"""Record divergences during exact decoding, which show where a threshold would open the gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_fsd.model.acceptance import FuzzyRule
from eagle_fsd.model.verify import AcceptanceRule, VerificationInputs


@dataclass(frozen=True)
class ProbeRecord:
    """The ``K`` expanded nodes with children that exact verification reached in one step.

    ``depths`` are ``[K]`` edges from the root, ``drafted`` is ``[K]`` bool, whether the target's
    sample is among the node's children, and ``divergences`` are ``[K]`` values by name.
    """

    depths: Tensor
    drafted: Tensor
    divergences: dict[str, Tensor]


class DivergenceProbe(AcceptanceRule):
    """An exact acceptance rule that appends a :class:`ProbeRecord` to ``records`` at every step."""

    def __init__(self, divergences: Sequence[str] = ("js",)) -> None:
        self.rules = {name: FuzzyRule(threshold=0.0, divergence=name) for name in divergences}
        self.records: list[ProbeRecord] = []

    @property
    def capturable(self) -> bool:
        """False, because the number of recorded nodes varies."""
        return False

    def gate(self, inputs: VerificationInputs) -> Tensor:
        """Record the step and keep the gate closed everywhere; see :meth:`AcceptanceRule.gate`."""
        tree = inputs.tree
        if tree.size > 1:
            exact = tree.tokens == inputs.sampled.gather(1, tree.parents)
            children = torch.zeros_like(tree.tokens)
            drafted = children.scatter_add(1, tree.parents[:, 1:], exact[:, 1:].long()) > 0
            exact[:, 0] = True
            reached = ~(tree.ancestors & ~exact[:, None, :]).any(-1)
            values = {name: rule.divergences(inputs) for name, rule in self.rules.items()}
            # Infinite at leaves and at nodes that were not expanded.
            reached &= next(iter(values.values())).isfinite()
            self.records.append(
                ProbeRecord(
                    tree.depths[reached],
                    drafted[reached],
                    {name: value[reached] for name, value in values.items()},
                )
            )
        return torch.zeros_like(tree.tokens, dtype=torch.bool)
