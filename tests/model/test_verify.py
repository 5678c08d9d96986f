"""Verification of hand-built trees, each with its exact outcome."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from trees import (
    ALWAYS,
    EXACT,
    FUZZY,
    TARGET,
    UNIFORM,
    A,
    B,
    C,
    D,
    E,
    make_inputs,
    make_tree,
    outcome,
)

from eagle_fsd.model.acceptance import ExactRule, FuzzyRule
from eagle_fsd.model.probe import DivergenceProbe
from eagle_fsd.model.verify import (
    Origin,
    VerificationInputs,
    verify,
)

#   0 --A-- 1 --C-- 3 --B-- 6
#   |       +---D-- 4
#   +---B-- 2 --A-- 5
PARENTS = [0, 0, 0, 1, 1, 2, 3]
TOKENS = [E, A, B, C, D, A, B]
INNER = (0, 1, 2, 3)
#: The target at every node, and a draft whose divergence from it is above 0.5.
P = [0.5, 0.3, 0.1, 0.05, 0.05]
DISTANT = [0.001, 0.001, 0.001, 0.001, 0.996]
FSD = FuzzyRule(threshold=0.1)


def _inputs(
    sampled: Sequence[int],
    open_nodes: Sequence[int] = (),
    p: dict[int, Sequence[float]] | None = None,
    drawn: Sequence[int] | None = None,
    masked: Sequence[tuple[int, int]] = (),
) -> VerificationInputs:
    """The tree above; draft and target agree at ``open_nodes`` and are far apart elsewhere."""
    table = [(p or {}).get(node, P) for node in range(len(PARENTS))]
    q = {node: table[node] if node in open_nodes else DISTANT for node in INNER}
    return make_inputs(make_tree(PARENTS, TOKENS, q), table, sampled, drawn, masked)


def test_divergence_equal_to_the_threshold_is_not_below_it() -> None:
    """The total variation here is exactly 0.25."""
    p, q = [0.5, 0.5, 0, 0, 0], [0.75, 0.25, 0, 0, 0]
    inputs = make_inputs(make_tree([0, 0], [E, A], {0: q}), [p, UNIFORM], [B, C])
    assert outcome(verify(inputs, FuzzyRule(0.25, "tv")))[0] == [B]
    assert outcome(verify(inputs, FuzzyRule(0.2500001, "tv")))[0] == [A, C]


#: Samples of the target, open nodes, and what is kept.
LONGEST: list[tuple[list[int], Sequence[int], list[int], list[Origin], list[int]]] = [
    # The root is open and its sample B is a child, but the path below A is longer.
    ([B, C, D, B, E, E, D], [0], [A, C, B, D], [FUZZY, EXACT, EXACT, TARGET], [0, 1, 3, 6]),
    # Node 1 is open and the root is not. C (.1) and D (.05) are equally deep; C is likelier.
    ([A, E, E, E, E, E, E], [1], [A, C, E], [EXACT, FUZZY, TARGET], [0, 1, 3]),
    # A sample must lead to node 1.
    ([C, E, E, E, E, E, E], [1], [C], [TARGET], [0]),
    # A sampled token below an open node has the origin EXACT.
    ([A, C, E, E, E, E, E], INNER, [A, C, B, E], [EXACT, EXACT, FUZZY, TARGET], [0, 1, 3, 6]),
]
#: The same with ``fallback="stop"``.
STOP: list[tuple[list[int], Sequence[int], list[int], list[Origin], list[int]]] = [
    # Node 1 is closed: its sample C is a child, but is emitted as the last token.
    ([A, C, A, B, E, E, E], [0, 3], [A, C], [EXACT, TARGET], [0, 1]),
    # A closed root emits one token.
    ([A, C, A, B, E, E, E], [1, 2, 3], [A], [TARGET], [0]),
    # The node after A is closed, the node after B is open.
    ([A, C, E, B, E, D, E], [0, 2], [B, A, D], [FUZZY, FUZZY, TARGET], [0, 2, 5]),
]


def test_longest_path_of_accepted_edges_is_kept() -> None:
    for fallback, table in (("exact", LONGEST), ("stop", STOP)):
        for sampled, open_nodes, *expected in table:
            kept = verify(_inputs(sampled, open_nodes), FSD, fallback)
            assert outcome(kept) == tuple(expected), (sampled, open_nodes)


def test_reached_nodes_with_children_are_recorded() -> None:
    """The target samples B, then E, which is not below B: the root and node 1 are recorded."""
    # 0 -> (1: B, 2: C), 1 -> (3: D), 2 -> (4: E); nodes 0, 1 and 2 are expanded.
    q = {0: UNIFORM, 1: [0.6, 0.1, 0.1, 0.1, 0.1], 2: UNIFORM}
    tree = make_tree([0, 0, 0, 1, 2], [A, B, C, D, E], q)
    inputs = make_inputs(tree, [UNIFORM] * 5, sampled=[B, E, E, A, A])
    probe = DivergenceProbe(["js", "tv"])
    probe.gate(make_inputs(make_tree([0], [A]), [UNIFORM], sampled=[B]))
    kept = verify(inputs, probe)
    (record,) = probe.records
    assert record.depths.tolist() == [0, 1]
    assert record.drafted.tolist() == [True, False]
    assert record.divergences["tv"].tolist() == pytest.approx([0.0, 0.4], abs=1e-6)
    expected = FuzzyRule(ALWAYS).divergences(inputs)[0, [0, 1]]
    assert torch.equal(record.divergences["js"], expected)
    assert torch.equal(kept.tokens, verify(inputs, ExactRule()).tokens)
