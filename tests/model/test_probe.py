"""Looking on: which nodes are seen, and on which side the target's choice was."""

from __future__ import annotations

import pytest
import torch
from evidence import ANY, FLAT, A, B, C, D, E, make_evidence, make_tree

from eagle_fsd.model.acceptance import ExactRule, FuzzyRule
from eagle_fsd.model.probe import Onlooker
from eagle_fsd.model.verify import verify

#: 0 -> (1: B, 2: C), 1 -> (3: D), 2 -> (4: E); the head expanded 0, 1 and 2.
PARENTS, TOKENS = [0, 0, 0, 1, 2], [A, B, C, D, E]
PEAKED = [0.6, 0.1, 0.1, 0.1, 0.1]


def test_only_reached_nodes_with_children_are_seen() -> None:
    """The target says B, then E, which is not below B: the root and node 1 are seen."""
    tree = make_tree(PARENTS, TOKENS, {0: FLAT, 1: PEAKED, 2: FLAT})
    evidence = make_evidence(tree, [FLAT] * 5, sampled=[B, E, E, A, A])
    watch = Onlooker(["js", "tv"])
    kept = verify(evidence, watch)
    (seen,) = watch.seen
    assert seen.depths.tolist() == [0, 1]
    assert seen.drafted.tolist() == [True, False]
    assert seen.divergences["tv"].tolist() == pytest.approx([0.0, 0.4], abs=1e-6)
    assert list(seen.divergences) == ["js", "tv"]
    assert torch.equal(kept.tokens, verify(evidence, ExactRule()).tokens)


def test_the_divergence_is_the_gates_own() -> None:
    tree = make_tree(PARENTS, TOKENS, {0: PEAKED, 1: FLAT, 2: FLAT})
    evidence = make_evidence(tree, [FLAT] * 5, sampled=[B, D, E, A, A])
    watch = Onlooker()
    watch.gate(evidence)
    expected = FuzzyRule(ANY).divergences(evidence)[0, [0, 1]]
    assert torch.equal(watch.seen[0].divergences["js"], expected)


def test_a_tree_of_its_root_alone_shows_nothing() -> None:
    watch = Onlooker()
    watch.gate(make_evidence(make_tree([0], [A]), [FLAT], sampled=[B]))
    assert watch.seen == []
