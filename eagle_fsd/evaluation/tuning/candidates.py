"""Rank trees by their predicted speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle_fsd.evaluation.tuning.costs import StepCosts
from eagle_fsd.evaluation.tuning.lengths import Lengths, capacity
from eagle_fsd.model.config import TreeConfig

#: Nodes and depths to choose from, as far as recordings cover them.
NODE_COUNTS = (4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
LEVELS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 24, 30)
#: Nodes, depth and children of each node of the trees that accepted lengths are recorded with: a
#: chain, and bushy trees that are as deep as may pay off.
RECORDED = (
    (64, 62, 1),
    *((nodes, min(30, nodes - 2), 2) for nodes in (6, 12, 24, 64)),
    *((nodes, min(16, nodes - 2), 4) for nodes in (12, 24, 64)),
    *((nodes, 10, 8) for nodes in (24, 64)),
)
#: Those of them that are recorded where there are many methods.
QUICK = ((64, 62, 1), (6, 4, 2), (12, 10, 2), (64, 30, 2), (24, 16, 4))
#: Trees that are raced: the best by prediction, and the best of every other width.
SHORTLIST = 8
#: A tree that consists of its root: plain decoding.
PLAIN_TREE = TreeConfig(total_tokens=1, depth=1, top_k=1)


@dataclass(frozen=True)
class Candidate:
    """A tree with its predicted tokens per target pass, and per second without the prefill."""

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
    """Return the trees that accepted lengths are recorded with; few if ``quick``."""
    return [
        TreeConfig(total_tokens=nodes, depth=depth, top_k=width)
        for nodes, depth, width in (QUICK if quick else RECORDED)
    ]


def shortlist(candidates: Sequence[Candidate], current: TreeConfig) -> list[TreeConfig]:
    """Select the :data:`SHORTLIST` fastest trees, the fastest of every other width, and another.

    The candidates are sorted by predicted speed; ``current`` is the tree of the pair so far.
    """
    widest = {item.tree.top_k: item.tree for item in reversed(candidates)}
    trees = [item.tree for item in candidates[:SHORTLIST]]
    return list(dict.fromkeys([*trees, *widest.values(), current]))


def rank(costs: StepCosts, lengths: Lengths) -> list[Candidate]:
    """Sort the candidates that the recordings cover, and the recorded trees, by predicted speed."""
    found = []
    recorded = [tree for tree in lengths.recorded if tree.total_tokens > 1]
    for tree in dict.fromkeys([*candidate_trees(), *recorded]):
        tau = lengths.tau(tree)
        if tau is not None:
            found.append(Candidate(tree, tau, tau / costs.seconds(tree)))
    return sorted(found, key=lambda item: -item.tokens_per_second)
