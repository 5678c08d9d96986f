"""Rank trees by their predicted speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle_fsd.evaluation.tuning.costs import StepCosts
from eagle_fsd.evaluation.tuning.lengths import RECORDED, Lengths, capacity
from eagle_fsd.model.config import TreeConfig

#: Shapes to choose from, as far as recordings cover them.
NODE_COUNTS = (4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
LEVELS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 24, 30)
#: Trees that are measured: the best by prediction, and the best of every other width.
SHORTLIST = 8
#: Nodes and children of the recorded trees where there are many methods.
QUICK = ((64, 1), (6, 2), (12, 2), (64, 2), (24, 4))
#: A tree that consists of its root: plain decoding.
PLAIN_TREE = TreeConfig(total_tokens=1, depth=1, top_k=1)


@dataclass(frozen=True)
class Candidate:
    """A tree and its predicted speed.

    Attributes:
        tree: The tree.
        tau: Predicted tokens per target pass.
        tokens_per_second: Predicted speed, without the prefill.
    """

    tree: TreeConfig
    tau: float
    tokens_per_second: float


def candidate_trees() -> list[TreeConfig]:
    """Return the trees to choose from: chains, and bushy trees with 2, 4 or 8 children."""
    chains = [
        TreeConfig(total_tokens=nodes, depth=nodes - 2, top_k=1)
        for nodes in (*NODE_COUNTS, 18, 22, 26, 36)
    ]
    bushy = [
        TreeConfig(total_tokens=nodes, depth=depth, top_k=width)
        for width in sorted({width for _, _, width in RECORDED if width > 1})
        for nodes in NODE_COUNTS
        for depth in LEVELS
        if depth + 2 <= nodes
    ]
    return [*chains, *(tree for tree in bushy if capacity(tree) == tree.total_tokens)]


def recorded_trees(quick: bool = False) -> list[TreeConfig]:
    """Return the trees that accepted lengths are recorded with.

    Args:
        quick: Only a chain, three trees with two children and one with four, for many methods.
    """
    return [
        TreeConfig(total_tokens=nodes, depth=depth, top_k=width)
        for nodes, depth, width in RECORDED
        if not quick or (nodes, width) in QUICK
    ]


def shortlist(candidates: Sequence[Candidate], current: TreeConfig) -> list[TreeConfig]:
    """Select the trees to measure.

    Args:
        candidates: All trees, by predicted speed.
        current: The tree that the pair has so far, which is always measured.

    Returns:
        The :data:`SHORTLIST` fastest trees, the fastest of every other width, and ``current``.
    """
    widest = {item.tree.top_k: item.tree for item in reversed(candidates)}
    trees = [item.tree for item in candidates[:SHORTLIST]]
    return list(dict.fromkeys([*trees, *widest.values(), current]))


def rank(costs: StepCosts, lengths: Lengths) -> list[Candidate]:
    """Predict the speed of every candidate that the recordings cover, and of the recorded trees.

    Args:
        costs: The time of a step.
        lengths: Accepted lengths of a method.

    Returns:
        The candidates, fastest first.
    """
    found = []
    recorded = [tree for tree in lengths.recorded if tree.total_tokens > 1]
    for tree in dict.fromkeys([*candidate_trees(), *recorded]):
        tau = lengths.tau(tree)
        if tau is not None:
            found.append(Candidate(tree, tau, tau / costs.seconds(tree)))
    return sorted(found, key=lambda item: -item.tokens_per_second)
