"""Record divergences during exact decoding, which show where a threshold would open the gate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle_fsd.model.acceptance import FuzzyRule
from eagle_fsd.model.verify import AcceptanceRule, VerificationInputs

if TYPE_CHECKING:
    from eagle_fsd.model.pipeline import EagleFSD

#: The gate counts as closed if the divergence is below the threshold at a smaller share of nodes.
MIN_OPEN = 0.02


class DivergenceProbe(AcceptanceRule):
    """An exact acceptance rule that records the nodes that verification reaches in every step.

    Each list gets a tensor ``[K]`` per step with trees, over the ``K`` expanded nodes with children
    that were reached: ``drafted`` says whether the target's sample is among a node's children.
    """

    capturable = False  # the number of recorded nodes varies

    def __init__(self, divergences: Sequence[str] = ("js",)) -> None:
        self.rules = {name: FuzzyRule(threshold=0.0, divergence=name) for name in divergences}
        self.depths: list[Tensor] = []
        self.drafted: list[Tensor] = []
        self.divergences: dict[str, list[Tensor]] = {name: [] for name in divergences}

    def gate(self, inputs: VerificationInputs) -> Tensor:
        """Record the step; see :meth:`AcceptanceRule.gate`."""
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
            self.depths.append(tree.depths[reached])
            self.drafted.append(drafted[reached])
            for name, value in values.items():
                self.divergences[name].append(value[reached])
        return torch.ones_like(tree.tokens, dtype=torch.bool)

    def admits(self, inputs: VerificationInputs, nodes: Tensor, tokens: Tensor) -> Tensor:
        """Relax nothing; see :meth:`AcceptanceRule.admits`."""
        return torch.zeros_like(nodes, dtype=torch.bool)


def gate_divergences(
    model: EagleFSD, prompts: Sequence[Tensor], max_new_tokens: int, divergence: str
) -> Tensor:
    """Return the divergences ``[n]`` at the nodes that exact greedy decoding of prompts reaches."""
    probe = DivergenceProbe((divergence,))
    for _ in model.generate_many(prompts, max_new_tokens, rule=probe):
        pass
    return torch.cat([torch.empty(0), *(value.cpu() for value in probe.divergences[divergence])])


def describe_closed_gate(divergences: Tensor, threshold: float) -> str | None:
    """Return a warning if FSD's gate is open at less than :data:`MIN_OPEN` of the nodes, else None.

    Without nodes, None is returned.
    """
    share = float((divergences < threshold).double().mean()) if len(divergences) else 1.0
    if share >= MIN_OPEN:
        return None
    return (
        f"threshold {threshold:g} accepts hardly anything beyond lossless decoding: the divergence"
        f" between target and drafter is below it at {share:.1%} of the drafted positions, and its"
        f" median is {float(divergences.median()):.2f}"
    )
