"""Verification of hand-built trees, each with its exact outcome."""

from __future__ import annotations

import pytest
import torch
from trees import (
    ALWAYS,
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
from eagle_fsd.model.config import AcceptanceConfig
from eagle_fsd.model.probe import DivergenceProbe
from eagle_fsd.model.verify import verify


def test_divergence_equal_to_the_threshold_is_not_below_it() -> None:
    """The total variation here is exactly 0.25."""
    p, q = [0.5, 0.5, 0, 0, 0], [0.75, 0.25, 0, 0, 0]
    inputs = make_inputs(make_tree([0, 0], [E, A], {0: q}), [p, UNIFORM], [B, C])
    assert outcome(verify(inputs, FuzzyRule(0.25, "tv")))[0] == [B]
    assert outcome(verify(inputs, FuzzyRule(0.2500001, "tv")))[0] == [A, C]


def test_reached_nodes_with_children_are_recorded() -> None:
    """The target samples B, then E, which is not below B: the root and node 1 are recorded."""
    # 0 -> (1: B, 2: C), 1 -> (3: D), 2 -> (4: E); nodes 0, 1 and 2 are expanded.
    q = {0: UNIFORM, 1: [0.6, 0.1, 0.1, 0.1, 0.1], 2: UNIFORM}
    tree = make_tree([0, 0, 0, 1, 2], [A, B, C, D, E], q)
    inputs = make_inputs(tree, [UNIFORM] * 5, sampled=[B, E, E, A, A])
    probe = DivergenceProbe(["js", "tv"])
    # A tree without children is not recorded.
    probe.gate(make_inputs(make_tree([0], [A]), [UNIFORM], sampled=[B]))
    kept = verify(inputs, probe)
    (depths,), (drafted,) = probe.depths, probe.drafted
    assert depths.tolist() == [0, 1]
    assert drafted.tolist() == [True, False]
    (js,), (tv,) = probe.divergences.values()
    assert tv.tolist() == pytest.approx([0.0, 0.4], abs=1e-6)
    assert torch.equal(js, FuzzyRule(ALWAYS).divergences(inputs)[0, [0, 1]])
    for result in (kept, verify(inputs, DivergenceProbe(), AcceptanceConfig(fallback="stop"))):
        assert torch.equal(result.tokens, verify(inputs, ExactRule()).tokens)
