"""Verification: hand-built trees with their exact outcome, random ones against a reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from eagle_fsd.model.sampling import Sampler
from eagle_fsd.model.settings import FSDSettings
from eagle_fsd.model.tree import DraftTree, ancestor_matrix, single_node
from eagle_fsd.model.verify import (
    AcceptanceRule,
    Evidence,
    ExactRule,
    FuzzyRule,
    Origin,
    TypicalRule,
    Verification,
    rule_for,
    verify,
)

EXACT, FUZZY, TARGET = Origin.EXACT, Origin.FUZZY, Origin.TARGET
A, B, C, D, E = range(5)
VOCABULARY = 5
FLAT = [0.2] * VOCABULARY
#: Above the largest value of every bounded divergence.
ANY = math.inf


# -- building trees and evidence -------------------------------------------------------------------


def _depths(parents: Sequence[int]) -> list[int]:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths


def _tree(
    parents: Sequence[int],
    tokens: Sequence[int],
    q: dict[int, Sequence[float]] | None = None,
    max_depth: int | None = None,
) -> DraftTree:
    """One row; ``q`` has the draft's probabilities at the nodes that the head expanded."""
    q = q or {}
    rows = {node: row for row, node in enumerate(sorted(q))}
    depths = _depths(parents)
    draft = torch.tensor([q[node] for node in sorted(q)], dtype=torch.float32)
    return DraftTree(
        tokens=torch.tensor([tokens]),
        parents=torch.tensor([parents]),
        depths=torch.tensor([depths]),
        ancestors=ancestor_matrix(torch.tensor([parents])),
        draft_rows=torch.tensor([[rows.get(node, -1) for node in range(len(parents))]]),
        draft_log_probs=draft.reshape(1, len(q), VOCABULARY).log(),
        max_depth=max(depths) if max_depth is None else max_depth,
    )


def _evidence(
    tree: DraftTree,
    p: Sequence[Sequence[float]],
    sampled: Sequence[int],
    drawn: Sequence[int] | None = None,
    masked: Sequence[tuple[int, int]] = (),
) -> Evidence:
    """Evidence from the target's probabilities; ``masked``: (node, token) that a processor forbids.

    What is masked has processed and warped log-probability ``-inf``; the raw one stays.
    """
    raw = torch.tensor([p], dtype=torch.float32).log()
    processed = raw.clone()
    for node, token in masked:
        processed[0, node, token] = -torch.inf
    return Evidence(
        tree,
        raw_log_probs=raw,
        log_probs=processed,
        warped_log_probs=processed,
        warped_draft_log_probs=tree.draft_log_probs,
        sampled=torch.tensor([sampled]),
        drawn=None if drawn is None else torch.tensor([drawn]),
    )


def _outcome(kept: Verification, row: int = 0) -> tuple[list[int], list[Origin], list[int]]:
    """Emitted tokens, their origins and the kept nodes; what lies beyond them must be padding."""
    count = int(kept.count[row])
    assert (kept.origins[row, count:] == Origin.PADDING).all()
    assert (kept.path[row, count:] == 0).all()
    origins = [Origin(item) for item in kept.origins[row, :count].tolist()]
    return kept.tokens[row, :count].tolist(), origins, kept.path[row, :count].tolist()


#   0 --A-- 1 --C-- 3 --B-- 6
#   |       +---D-- 4
#   +---B-- 2 --A-- 5
PARENTS = [0, 0, 0, 1, 1, 2, 3]
TOKENS = [E, A, B, C, D, A, B]
INNER = (0, 1, 2, 3)
#: The target everywhere, and a draft that agrees with it (divergence 0) or not at all (> 0.5).
P = [0.5, 0.3, 0.1, 0.05, 0.05]
FAR = [0.001, 0.001, 0.001, 0.001, 0.996]


def _drawn_case(
    sampled: Sequence[int],
    fuzzy: Sequence[int] = (),
    p: dict[int, Sequence[float]] | None = None,
    drawn: Sequence[int] | None = None,
    masked: Sequence[tuple[int, int]] = (),
) -> Evidence:
    """The tree above; at the nodes in ``fuzzy`` draft and target agree, elsewhere they are far."""
    table = [(p or {}).get(node, P) for node in range(len(PARENTS))]
    q = {node: table[node] if node in fuzzy else FAR for node in INNER}
    return _evidence(_tree(PARENTS, TOKENS, q), table, sampled, drawn, masked)


FSD = FuzzyRule(threshold=0.1)


# -- exact edges -----------------------------------------------------------------------------------


@pytest.mark.parametrize("selection", ["longest", "target", "sample"])
@pytest.mark.parametrize("rule", [ExactRule(), FuzzyRule(0.0), FSD])
@pytest.mark.parametrize(
    ("sampled", "tokens", "path"),
    [
        # Nothing accepted: the root's sample is no child of it, whatever is agreed on below.
        ([D, C, A, B, E, E, E], [D], [0]),
        # An inner path: A is in the tree, what follows it is not. Below B all would have matched.
        ([A, B, A, B, E, E, E], [A, B], [0, 1]),
        # Another inner path, one level down.
        ([A, C, A, A, E, E, E], [A, C, A], [0, 1, 3]),
        # A leaf that is not the deepest.
        ([B, C, A, B, E, D, E], [B, A, D], [0, 2, 5]),
        # The longest path, and the bonus token after its leaf.
        ([A, C, A, B, E, D, C], [A, C, B, C], [0, 1, 3, 6]),
    ],
)
def test_samples_are_followed_while_they_are_in_the_tree(
    sampled: list[int], tokens: list[int], path: list[int], rule: AcceptanceRule, selection: str
) -> None:
    """With every gate closed (no rule, ``T = 0``, divergences above ``T``) only samples count."""
    evidence = _drawn_case(sampled, drawn=[B, D, A, B, E, E, E])
    kept = verify(evidence, rule, selection=selection)
    assert _outcome(kept) == (tokens, [EXACT] * (len(tokens) - 1) + [TARGET], path)


def test_plain_decoding_is_the_tree_of_one_node() -> None:
    """Two rows of nothing but a root emit their sample each, under every rule and selection."""
    tree = single_node(torch.tensor([A, B]), VOCABULARY)
    p = torch.tensor(P).log().expand(2, 1, -1)
    sampled = torch.tensor([[C], [D]])
    evidence = Evidence(tree, p, p, p, tree.draft_log_probs, sampled, tree.tokens)
    for rule in (ExactRule(), FuzzyRule(ANY)):
        for selection in ("longest", "target", "sample"):
            for fallback in ("exact", "stop"):
                kept = verify(evidence, rule, fallback, selection)
                assert _outcome(kept, 0) == ([C], [TARGET], [0])
                assert _outcome(kept, 1) == ([D], [TARGET], [0])


# -- fuzzy edges, selection="longest" --------------------------------------------------------------


def test_above_the_maximum_the_deepest_path_is_taken() -> None:
    """Every inner node is fuzzy at ``T = inf``, however far the draft; no sample is in the tree."""
    evidence = _drawn_case([E, E, E, E, E, E, D])
    kept = verify(evidence, FuzzyRule(ANY))
    assert _outcome(kept) == ([A, C, B, D], [FUZZY, FUZZY, FUZZY, TARGET], [0, 1, 3, 6])
    assert kept.accepted.all()


def test_a_fuzzy_node_whose_sampled_child_is_not_on_the_longest_path() -> None:
    """The root is fuzzy and its sample B is a child, but below A the samples reach farther."""
    evidence = _drawn_case([B, C, D, B, E, E, D], fuzzy=[0])
    kept = verify(evidence, FSD)
    assert _outcome(kept) == ([A, C, B, D], [FUZZY, EXACT, EXACT, TARGET], [0, 1, 3, 6])


def test_a_fuzzy_edge_opens_only_its_own_node() -> None:
    """Node 1 is fuzzy, the root is not: the path must first get to node 1 by a sample."""
    inside = verify(_drawn_case([A, E, E, E, E, E, E], fuzzy=[1]), FSD)
    # Of the equally deep C (.1) and D (.05) the target prefers C.
    assert _outcome(inside) == ([A, C, E], [EXACT, FUZZY, TARGET], [0, 1, 3])
    outside = verify(_drawn_case([C, E, E, E, E, E, E], fuzzy=[1]), FSD)
    assert _outcome(outside) == ([C], [TARGET], [0])


def test_a_fuzzy_token_that_is_the_sample_counts_as_exact() -> None:
    """Origins tell what the threshold changed: the target's own choice is never called fuzzy."""
    kept = verify(_drawn_case([A, C, E, E, E, E, E], fuzzy=INNER), FSD)
    assert _outcome(kept) == ([A, C, B, E], [EXACT, EXACT, FUZZY, TARGET], [0, 1, 3, 6])


@pytest.mark.parametrize(
    ("p1", "p2", "tokens"),
    [
        (0.1, 0.8, [B, D]),  # .6 x .1 < .3 x .8
        (0.5, 0.8, [A, C]),  # .6 x .5 > .3 x .8
        (0.1, 0.1, [A, C]),  # the first edge alone decides
    ],
)
def test_ties_go_to_the_larger_sum_of_target_log_probabilities(
    p1: float, p2: float, tokens: list[int]
) -> None:
    """Two leaves of depth 2, all fuzzy: ``p(A) p(C|A)`` against ``p(B) p(D|B)``, in logs."""
    p = [
        [0.6, 0.3, 0.04, 0.03, 0.03],
        [(1 - p1) / 4] * 2 + [p1] + [(1 - p1) / 4] * 2,
        [(1 - p2) / 4] * 3 + [p2] + [(1 - p2) / 4],
        FLAT,
        FLAT,
    ]
    # The samples pull the other way, and must not matter for the choice.
    sampled = [B if tokens[0] == A else A, C, D, E, E]
    tree = _tree([0, 0, 0, 1, 2], [E, A, B, C, D], {node: p[node] for node in range(3)})
    kept = verify(_evidence(tree, p, sampled), FSD)
    node = 1 if tokens[0] == A else 2
    assert _outcome(kept) == ([*tokens, E], [FUZZY, EXACT, TARGET], [0, node, node + 2])


def test_a_node_without_a_draft_distribution_is_never_fuzzy() -> None:
    """Divergence is ``+inf`` where there is no ``q``, and below no threshold, not even ``inf``."""
    tree = _tree([0, 0], [E, A], q={})
    kept = verify(_evidence(tree, [P, P], [B, B]), FuzzyRule(ANY))
    assert _outcome(kept) == ([B], [TARGET], [0])


def test_divergences_are_known_where_there_are_children() -> None:
    """Root and node 1 have children; leaf 2 was expanded but has none; leaf 3 was not expanded."""
    tree = _tree([0, 0, 0, 1], [E, A, B, C], {0: P, 1: FAR, 2: P})
    found = FuzzyRule(1.0).divergences(_evidence(tree, [P] * 4, [A] * 4))[0]
    middle = [(a + b) / 2 for a, b in zip(P, FAR, strict=True)]
    js = sum(
        0.5 * a * math.log(a / m) + 0.5 * b * math.log(b / m)
        for a, b, m in zip(P, FAR, middle, strict=True)
    )
    assert found[:2].tolist() == pytest.approx([0.0, js], abs=1e-6)
    assert found[2:].tolist() == [math.inf, math.inf]


def test_the_threshold_itself_is_not_below_the_threshold() -> None:
    """``D < T`` is strict: with ``D`` exactly 0.25 (tv) the gate opens just above it."""
    p, q = [0.5, 0.5, 0, 0, 0], [0.75, 0.25, 0, 0, 0]
    evidence = _evidence(_tree([0, 0], [E, A], {0: q}), [p, FLAT], [B, C])
    assert _outcome(verify(evidence, FuzzyRule(0.25, "tv")))[0] == [B]
    assert _outcome(verify(evidence, FuzzyRule(0.2500001, "tv")))[0] == [A, C]


def test_divergence_on_raw_or_warped() -> None:
    """Equal once warped but far apart as the models gave them: fuzzy only on ``warped``."""
    evidence = _evidence(_tree([0, 0], [E, A], {0: FAR}), [P, FLAT], [B, C])
    peaked = torch.tensor([[[0.6, 0.4, 0.0, 0.0, 0.0]]]).log()
    evidence = replace(
        evidence,
        warped_log_probs=torch.cat([peaked, evidence.raw_log_probs[:, 1:]], 1),
        warped_draft_log_probs=peaked,
    )
    assert _outcome(verify(evidence, FuzzyRule(0.1)))[0] == [B]
    assert _outcome(verify(evidence, FuzzyRule(0.1, divergence_on="warped")))[0] == [A, C]


# -- the guards ------------------------------------------------------------------------------------


@pytest.mark.parametrize("selection", ["longest", "target", "sample"])
@pytest.mark.parametrize("fallback", ["exact", "stop"])
def test_a_masked_token_on_the_longest_path_is_never_emitted(selection: str, fallback: str) -> None:
    """Everything is fuzzy and C leads to the deepest leaf, but a processor forbids C after A.

    D takes its place: the only child left (``longest``), or the target's own sample, also where
    the draft drew C (``sample``). ``T = inf`` does not help.
    """
    evidence = _drawn_case(
        [A, D, A, B, E, E, E],
        INNER,
        p={1: [0.1, 0.1, 0.2, 0.5, 0.1]},
        drawn=[A, C, A, B, E, E, E],
        masked=[(1, C)],
    )
    kept = verify(evidence, FuzzyRule(ANY), fallback, selection)
    assert _outcome(kept) == ([A, D, E], [EXACT, EXACT, TARGET], [0, 1, 4])
    assert not kept.accepted[0, 3]


def test_a_masked_first_token_blocks_all_below_it() -> None:
    """A is forbidden after the root: the shallower branch below B is all there is."""
    evidence = _drawn_case([C, C, A, B, E, D, E], INNER, masked=[(0, A)])
    kept = verify(evidence, FuzzyRule(ANY))
    assert _outcome(kept) == ([B, A, D], [FUZZY, EXACT, TARGET], [0, 2, 5])


def test_a_token_outside_the_nucleus_is_masked_too() -> None:
    """The guard looks at the warped distribution, where top-k and top-p have left nothing."""
    evidence = _drawn_case([B, A, A, A, E, D, E], INNER)
    warped = evidence.log_probs.clone()
    warped[0, 0, [A, C, D, E]] = -torch.inf
    evidence = replace(evidence, warped_log_probs=warped)
    kept = verify(evidence, FuzzyRule(ANY))
    assert _outcome(kept) == ([B, A, D], [EXACT, EXACT, TARGET], [0, 2, 5])


@pytest.mark.parametrize(
    ("ratio", "tokens", "origins"),
    [
        (0.0, [A, C, B, E], [FUZZY, FUZZY, FUZZY, TARGET]),
        (0.19, [A, C, B, E], [FUZZY, FUZZY, FUZZY, TARGET]),  # C has .1 / .5 of the peak
        (0.21, [B, A, E], [EXACT, FUZZY, TARGET]),  # so A leads nowhere and B, A is deeper
        (0.61, [B, A, E], [EXACT, FUZZY, TARGET]),  # B (.3) is the sample: no floor for it
        (1.0, [B, A, E], [EXACT, FUZZY, TARGET]),  # A is the peak itself
    ],
)
def test_min_ratio_is_a_floor_on_fuzzy_tokens(
    ratio: float, tokens: list[int], origins: list[Origin]
) -> None:
    """A fuzzy token needs ``p(x) >= r max p``; a sample needs nothing."""
    kept = verify(_drawn_case([B, E, E, E, E, E, E], INNER), FuzzyRule(ANY, min_ratio=ratio))
    assert _outcome(kept)[:2] == (tokens, origins)


def test_min_ratio_looks_at_processed_probabilities() -> None:
    """With the peak A masked, C is half of what is left at the top, and passes a floor of 0.3."""
    evidence = _drawn_case([B, C, E, E, E, E, E], fuzzy=[1], masked=[(1, A), (1, B)])
    evidence = replace(evidence, sampled=torch.tensor([[A, E, E, E, E, E, E]]))
    kept = verify(evidence, FuzzyRule(0.1, min_ratio=0.9))
    assert _outcome(kept) == ([A, C, E], [EXACT, FUZZY, TARGET], [0, 1, 3])


# -- fallback="stop" -------------------------------------------------------------------------------


def test_stop_emits_the_sample_and_ends_where_the_gate_is_closed() -> None:
    """Node 1 is closed: its sample C is a child, but is emitted as the last token."""
    evidence = _drawn_case([A, C, A, B, E, E, E], fuzzy=[0, 3])
    assert _outcome(verify(evidence, FSD, "stop")) == ([A, C], [EXACT, TARGET], [0, 1])
    assert _outcome(verify(evidence, FSD, "exact"))[0] == [A, C, B, E]


def test_stop_at_a_closed_root_emits_one_token() -> None:
    """As the paper's chain algorithm does, although the sample's branch goes on."""
    evidence = _drawn_case([A, C, A, B, E, E, E], fuzzy=[1, 2, 3])
    assert _outcome(verify(evidence, FSD, "stop")) == ([A], [TARGET], [0])


def test_stop_prefers_the_deeper_of_two_open_branches() -> None:
    """The root is open; A's node is closed, B's is open and goes one deeper."""
    evidence = _drawn_case([A, C, E, B, E, D, E], fuzzy=[0, 2])
    kept = verify(evidence, FSD, "stop")
    assert _outcome(kept) == ([B, A, D], [FUZZY, FUZZY, TARGET], [0, 2, 5])


# -- selection="target" ----------------------------------------------------------------------------


def test_target_follows_the_sampled_child_even_if_another_is_deeper() -> None:
    """Everything is fuzzy and the root's sample is B: the shorter branch, where longest takes A."""
    evidence = _drawn_case([B, C, E, B, E, D, E], INNER)
    kept = verify(evidence, FSD, selection="target")
    assert _outcome(kept) == ([B, A, D], [EXACT, FUZZY, TARGET], [0, 2, 5])
    assert _outcome(verify(evidence, FSD))[0] == [A, C, B, E]


def test_target_follows_its_favourite_child_where_the_sample_is_not_in_the_tree() -> None:
    """At node 1 the sample E is no child; the target likes D better than C, which leads deeper."""
    evidence = _drawn_case([A, E, E, B, C, D, E], INNER, p={1: [0.2, 0.2, 0.2, 0.3, 0.1]})
    kept = verify(evidence, FSD, selection="target")
    assert _outcome(kept) == ([A, D, C], [EXACT, FUZZY, TARGET], [0, 1, 4])


def test_target_passes_over_a_favourite_that_the_guards_forbid() -> None:
    """D is the favourite but masked, so C; with C below the floor the sample ends the path."""
    p = {1: [0.2, 0.1, 0.12, 0.3, 0.28]}
    masked = _drawn_case([A, E, E, B, C, D, E], INNER, p=p, masked=[(1, D)])
    kept = verify(masked, FSD, selection="target")
    assert _outcome(kept) == ([A, C, B, E], [EXACT, FUZZY, EXACT, TARGET], [0, 1, 3, 6])
    # The peak among what is left is E (.28): C (.12) is below 0.9 of it.
    kept = verify(masked, FuzzyRule(0.1, min_ratio=0.9), selection="target")
    assert _outcome(kept) == ([A, E], [EXACT, TARGET], [0, 1])


# -- selection="sample" ----------------------------------------------------------------------------


def test_sample_follows_the_draft_at_fuzzy_nodes() -> None:
    """Drawn B at the root and A after it, both in the tree; the target's own samples differ."""
    evidence = _drawn_case([A, C, E, B, E, D, E], INNER, drawn=[B, D, A, D, D, D, D])
    kept = verify(evidence, FSD, selection="sample")
    assert _outcome(kept) == ([B, A, D], [FUZZY, FUZZY, TARGET], [0, 2, 5])


def test_sample_emits_a_draw_outside_the_tree_and_ends() -> None:
    """At node 1 the draft draws B, which is no child: it is emitted, and nothing after it."""
    evidence = _drawn_case([A, C, E, B, E, D, E], INNER, drawn=[A, B, A, D, D, D, D])
    kept = verify(evidence, FSD, selection="sample")
    assert _outcome(kept) == ([A, B], [EXACT, FUZZY], [0, 1])


def test_sample_follows_the_target_where_the_gate_is_closed() -> None:
    """Root closed: the draft's draw B does not count there; node 1 open: D, its draw, does."""
    evidence = _drawn_case([A, C, E, B, C, D, E], fuzzy=[1], drawn=[B, D, A, D, D, D, D])
    kept = verify(evidence, FSD, selection="sample")
    assert _outcome(kept) == ([A, D, C], [EXACT, FUZZY, TARGET], [0, 1, 4])
    kept = verify(evidence, FSD, "stop", "sample")
    assert _outcome(kept) == ([A], [TARGET], [0])


def test_sample_lets_the_target_stand_in_for_a_forbidden_draw() -> None:
    """The draft draws C at node 1; masked, or below the floor, it gives way to the sample D."""
    drawn = [A, C, A, B, D, D, D]
    masked = _drawn_case([A, D, E, B, C, D, E], INNER, drawn=drawn, masked=[(1, C)])
    kept = verify(masked, FSD, selection="sample")
    assert _outcome(kept) == ([A, D, C], [EXACT, EXACT, TARGET], [0, 1, 4])
    floored = _drawn_case([A, D, E, B, C, D, E], INNER, drawn=drawn)
    kept = verify(floored, FuzzyRule(0.1, min_ratio=0.5), selection="sample")
    assert _outcome(kept) == ([A, D, C], [EXACT, EXACT, TARGET], [0, 1, 4])


def test_sample_takes_the_bonus_from_the_target_at_leaves() -> None:
    """A leaf that the head expanded has a ``q``, but no children and so no divergence."""
    tree = _tree([0, 0], [E, A], {0: P, 1: P})
    evidence = _evidence(tree, [P, P], sampled=[B, C], drawn=[A, D])
    kept = verify(evidence, FuzzyRule(ANY), selection="sample")
    assert _outcome(kept) == ([A, C], [FUZZY, TARGET], [0, 1])


def test_sample_needs_a_draw() -> None:
    """Without one it says so, instead of quietly decoding some other way."""
    with pytest.raises(ValueError, match="sample"):
        verify(_drawn_case([A] * 7, INNER), FSD, selection="sample")


# -- Medusa's typical acceptance -------------------------------------------------------------------


def test_typical_acceptance_by_hand() -> None:
    """``H(.5, .25, .2, .04, .01) = 1.190``; ``0.09 exp(-H) = 0.0274``: .04 stands and .01 does not.

    At node 1, ``p = (.9, .04, .03, .02, .01)`` has ``H = 0.4645`` and a bound of 0.0566: only A.
    """
    p = [[0.5, 0.25, 0.2, 0.04, 0.01], [0.9, 0.04, 0.03, 0.02, 0.01], FLAT, FLAT, FLAT, FLAT]
    tree = _tree([0, 0, 0, 0, 1, 1], [A, D, E, C, B, A])
    kept = verify(_evidence(tree, p, [B, C, A, A, A, A]), TypicalRule())
    assert kept.accepted.tolist() == [[True, True, False, True, False, True]]
    assert _outcome(kept) == ([D, A, A], [FUZZY, FUZZY, TARGET], [0, 1, 5])


@pytest.mark.parametrize(("epsilon", "accepted"), [(0.21, False), (0.19, True)])
def test_typical_acceptance_is_capped_by_epsilon(epsilon: float, accepted: bool) -> None:
    """``delta`` large: the bound is ``epsilon`` itself, and C has probability .2."""
    p = [[0.5, 0.25, 0.2, 0.04, 0.01], FLAT]
    rule = TypicalRule(epsilon=epsilon, delta=5.0)
    kept = verify(_evidence(_tree([0, 0], [A, C]), p, [B, B]), rule)
    assert bool(kept.accepted[0, 1]) is accepted


def test_typical_acceptance_looks_at_the_distribution_sampled_from() -> None:
    """D has .04 of the raw mass, above its bound, but .001 after the temperature, far below."""
    p = [[0.5, 0.25, 0.2, 0.04, 0.01], FLAT]
    evidence = _evidence(_tree([0, 0], [A, D]), p, [B, B])
    warped = evidence.warped_log_probs.clone()
    warped[0, 0] = torch.tensor([0.9, 0.05, 0.048, 0.001, 0.001]).log()
    evidence = replace(evidence, warped_log_probs=warped)
    assert not verify(evidence, TypicalRule()).accepted[0, 1]


def test_typical_acceptance_with_masked_tokens() -> None:
    """``0 log 0`` is 0 in the entropy: a mask must not make the bound NaN and accept nothing."""
    p = [[0.5, 0.25, 0.2, 0.05, 0.0], FLAT, FLAT]
    kept = verify(_evidence(_tree([0, 0, 0], [A, D, E]), p, [B, B, B]), TypicalRule())
    assert kept.accepted.tolist() == [[True, True, False]]


def test_typical_acceptance_without_a_draft_draw_is_the_targets_own() -> None:
    """``selection="sample"`` draws from ``q`` where there is one: not at a leaf or a lone root.

    Their entries of ``drawn`` mean nothing and must not be emitted.
    """
    tree = _tree([0, 0], [E, A], {0: P})
    evidence = _evidence(tree, [P, P], sampled=[A, C], drawn=[A, B])
    kept = verify(evidence, TypicalRule(), selection="sample")
    assert _outcome(kept) == ([A, C], [EXACT, TARGET], [0, 1])
    lone = _evidence(_tree([0], [A]), [P], sampled=[B], drawn=[A])
    assert _outcome(verify(lone, TypicalRule(), selection="sample")) == ([B], [TARGET], [0])


# -- which rule the settings ask for ---------------------------------------------------------------


def test_rule_for_settings() -> None:
    """``T = 0`` is the exact rule whatever else is set; otherwise every field arrives."""
    assert rule_for(FSDSettings(divergence="tv", min_ratio=0.5)) == ExactRule()
    wanted = FSDSettings(threshold=0.2, divergence="kl", min_ratio=0.1, divergence_on="warped")
    assert rule_for(wanted) == FuzzyRule(0.2, "kl", 0.1, "warped")


# -- random trees against a slow reference ---------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A batch of random trees of one size with random models, all from one seed."""

    evidence: Evidence
    seed: int

    @property
    def tree(self) -> DraftTree:
        return self.evidence.tree


def _random_row(random: np.random.Generator, size: int, max_depth: int) -> Evidence:
    """One row: a level-ordered tree, a draft more or less close to the target, some masks."""
    while True:
        parents = [0] + [int(random.integers(max(0, i - 5), i)) for i in range(1, size)]
        parents = _level_ordered(parents)
        if max(_depths(parents)) <= max_depth and np.bincount(parents[1:] or [0]).max() <= 5:
            break
    tokens = [int(random.integers(VOCABULARY))] + [0] * (size - 1)
    for node in range(size):
        children = [child for child in range(1, size) if parents[child] == node]
        for child, token in zip(children, random.permutation(VOCABULARY), strict=False):
            tokens[child] = int(token)

    logits = torch.tensor(random.normal(0, 1.5, (1, size, VOCABULARY)), dtype=torch.float32)
    inner = sorted(set(parents[1:]))
    extra = [node for node in range(size) if node not in inner and random.random() < 0.3]
    expanded = sorted([*inner, *extra])
    noise = random.normal(0, 1, (len(expanded), VOCABULARY)) * random.choice([0.0, 0.5, 1.5])
    q = torch.tensor(noise, dtype=torch.float32).reshape(-1, VOCABULARY)
    q = (logits[0, expanded] + q).softmax(-1)
    tree = _tree(parents, tokens, dict(zip(expanded, q.tolist(), strict=True)), max_depth)

    raw = logits.log_softmax(-1)
    processed = raw.masked_fill(torch.tensor(random.random(raw.shape) < 0.1), -torch.inf)
    processed[..., 0] = raw[..., 0]  # never everything
    processed = processed.log_softmax(-1)
    hidden = torch.tensor(random.random(raw.shape) < 0.1)
    hidden[..., 0] = False
    warped = (processed / 0.8).masked_fill(hidden, -torch.inf).log_softmax(-1)

    def choices(weights: Tensor) -> list[int]:
        """A token with positive weight at each node, often one that a child carries."""
        found = []
        for node in range(size):
            children = [tokens[child] for child in range(1, size) if parents[child] == node]
            allowed = [t for t in range(VOCABULARY) if weights[node, t] > 0]
            liked = [token for token in children if token in allowed]
            pool = liked if liked and random.random() < 0.6 else allowed
            found.append(int(random.choice(pool)))
        return found

    draft = tree.draft_log_probs
    return Evidence(
        tree,
        raw,
        processed,
        warped,
        (draft / 0.8).log_softmax(-1),
        torch.tensor([choices(warped[0].exp())]),
        torch.tensor([choices(torch.ones(size, VOCABULARY))]),
    )


def _level_ordered(parents: list[int]) -> list[int]:
    """The same tree with its nodes renumbered level by level."""
    depths = _depths(parents)
    order = sorted(range(len(parents)), key=lambda node: (depths[node], node))
    place = {node: index for index, node in enumerate(order)}
    return [place[parents[node]] for node in order]


def _stack(rows: Sequence[Evidence]) -> Evidence:
    """Rows of one size and ``max_depth`` as one batch; spare draft rows are NaN, and never read."""
    most = max(row.tree.draft_log_probs.shape[1] for row in rows)

    def join(name: str, of: Sequence[object]) -> Tensor:
        values = [getattr(item, name) for item in of]
        if "draft_log_probs" in name:
            values = [
                torch.cat([v, v.new_full((1, most - v.shape[1], VOCABULARY), torch.nan)], 1)
                for v in values
            ]
        return torch.cat(values)

    trees = [row.tree for row in rows]
    tree = DraftTree(
        **{f.name: join(f.name, trees) for f in fields(DraftTree) if f.name != "max_depth"},
        max_depth=trees[0].max_depth,
    )
    rest = [f.name for f in fields(Evidence) if f.name != "tree"]
    return Evidence(tree, **{name: join(name, rows) for name in rest})


def _case(seed: int, size: int, batch: int) -> Case:
    random = np.random.default_rng(seed)
    rows = [_random_row(random, size, max_depth=min(size, 5)) for _ in range(batch)]
    return Case(_stack(rows), seed)


cases = st.builds(_case, st.integers(0, 2**32 - 1), st.integers(1, 14), st.integers(1, 3))
thresholds = st.floats(0.0, 0.75) | st.sampled_from([0.0, 0.05, 0.2, ANY])
ratios = st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0])
fallbacks = st.sampled_from(["exact", "stop"])
selections = st.sampled_from(["longest", "target", "sample"])
places = st.sampled_from(["raw", "warped"])


def _js(log_p: Tensor, log_q: Tensor) -> float:
    """Jensen-Shannon in Python floats."""
    total = 0.0
    for a, b in zip(log_p.double().exp().tolist(), log_q.double().exp().tolist(), strict=True):
        for x in (a, b):
            if x > 0:
                total += 0.5 * x * math.log(x / ((a + b) / 2))
    return total


def _reference(
    evidence: Evidence,
    row: int,
    rule: FuzzyRule,
    fallback: str,
    selection: str,
) -> tuple[list[int], list[Origin], list[int]]:
    """DESIGN section 2 as loops over the nodes of one row, one step after another."""
    tree = evidence.tree
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    sampled, drawn = evidence.sampled[row].tolist(), evidence.drawn[row].tolist()
    log_p, warped = evidence.log_probs[row].tolist(), evidence.warped_log_probs[row].tolist()
    children = {
        node: {tokens[c]: c for c in range(1, tree.size) if parents[c] == node}
        for node in range(tree.size)
    }

    def is_open(node: int) -> bool:
        index = tree.draft_rows[row, node].item()
        if index < 0 or not children[node]:
            return False
        on_warped = rule.divergence_on == "warped"
        p = (evidence.warped_log_probs if on_warped else evidence.raw_log_probs)[row, node]
        q = (evidence.warped_draft_log_probs if on_warped else tree.draft_log_probs)[row, index]
        divergence = _js(p, q)
        assume(abs(divergence - rule.threshold) > 1e-6)  # float32 may see it on the other side
        return divergence < rule.threshold

    def may_be_fuzzy(node: int, token: int) -> bool:
        if warped[node][token] == -math.inf:
            return False
        floor = rule.min_ratio * max(map(math.exp, log_p[node]))
        return math.exp(log_p[node][token]) >= floor * (1 - 1e-6)

    def follows(node: int, token: int) -> bool:
        """Whether ``selection="longest"`` accepts the edge."""
        if is_open(node) and may_be_fuzzy(node, token):
            return True
        return token == sampled[node] and (fallback == "exact" or is_open(node))

    def choice(node: int) -> int:
        """The one token that ``target`` and ``sample`` emit at ``node``."""
        if not is_open(node):
            return sampled[node]
        if selection == "sample":
            return drawn[node] if may_be_fuzzy(node, drawn[node]) else sampled[node]
        if sampled[node] in children[node]:
            return sampled[node]
        fuzzy = [token for token in children[node] if may_be_fuzzy(node, token)]
        return max(fuzzy, key=lambda token: log_p[node][token], default=sampled[node])

    if selection == "longest":
        best = (0, 0.0, 0)
        paths = {0: ([0], 0.0)}
        for node in range(1, tree.size):
            above = paths.get(parents[node])
            if above is None or not follows(parents[node], tokens[node]):
                continue
            score = above[1] + log_p[parents[node]][tokens[node]]
            paths[node] = ([*above[0], node], score)
            best = max(best, (len(above[0]), score, node))
        path = paths[best[2]][0]
        emitted = [tokens[node] for node in path[1:]] + [sampled[path[-1]]]
    else:
        path, emitted = [0], [choice(0)]
        while emitted[-1] in children[path[-1]] and (fallback == "exact" or is_open(path[-1])):
            path.append(children[path[-1]][emitted[-1]])
            emitted.append(choice(path[-1]))
    origins = [
        EXACT if token == sampled[node] else FUZZY
        for token, node in zip(emitted, path, strict=True)
    ]
    if origins[-1] == EXACT:
        origins[-1] = TARGET
    return emitted, origins, path


@given(cases, thresholds, ratios, fallbacks, selections, places)
def test_agrees_with_the_slow_reference(
    case: Case, threshold: float, ratio: float, fallback: str, selection: str, place: str
) -> None:
    """Tokens, origins and nodes of every row, for every option there is."""
    rule = FuzzyRule(threshold, "js", ratio, place)
    kept = verify(case.evidence, rule, fallback, selection)
    for row in range(case.tree.tokens.shape[0]):
        expected = _reference(case.evidence, row, rule, fallback, selection)
        assert _outcome(kept, row) == expected


@given(cases, st.sampled_from([0.0, 0.1, ANY]), fallbacks, selections)
def test_a_batch_gives_each_row_what_it_gets_alone(
    case: Case, threshold: float, fallback: str, selection: str
) -> None:
    """Batch size changes nothing."""
    rule = FuzzyRule(threshold)
    rows = case.tree.tokens.shape[0]
    together = verify(case.evidence, rule, fallback, selection)
    for row in range(rows):
        alone = verify(_only(case.evidence, row), rule, fallback, selection)
        assert _outcome(alone) == _outcome(together, row)
        assert torch.equal(alone.accepted[0], together.accepted[row])


def _only(evidence: Evidence, row: int) -> Evidence:
    here = slice(row, row + 1)
    tree = DraftTree(
        **{
            f.name: getattr(evidence.tree, f.name)[here]
            for f in fields(DraftTree)
            if f.name != "max_depth"
        },
        max_depth=evidence.tree.max_depth,
    )
    rest = [f.name for f in fields(Evidence) if f.name != "tree"]
    return Evidence(tree, **{name: getattr(evidence, name)[here] for name in rest})


@given(cases, st.lists(st.floats(0.0, 0.8), min_size=2, max_size=6), ratios, fallbacks)
def test_accepted_length_does_not_fall_as_the_threshold_grows(
    case: Case, levels: list[float], ratio: float, fallback: str
) -> None:
    """On fixed logits and samples a larger ``T`` only adds accepted edges: row by row, and so in
    the mean, the kept path is at least as long."""
    before = None
    for threshold in [0.0, *sorted(levels), ANY]:
        rule = rule_for(FSDSettings(threshold=threshold, min_ratio=ratio))
        kept = verify(case.evidence, rule, fallback)
        if before is not None:
            assert (kept.count >= before.count).all()
            assert kept.count.float().mean() >= before.count.float().mean()
            assert (kept.accepted | ~before.accepted).all()
        before = kept


@given(cases)
def test_above_the_maximum_the_path_is_the_deepest_supported(case: Case) -> None:
    """At ``T = inf`` only the support guard (and an unexpanded parent: none here) blocks a path."""
    tree, evidence = case.tree, case.evidence
    kept = verify(evidence, FuzzyRule(ANY))
    for row in range(tree.tokens.shape[0]):
        deepest = {0: 0}
        for node in range(1, tree.size):
            parent, token = tree.parents[row, node].item(), tree.tokens[row, node].item()
            if parent in deepest and evidence.warped_log_probs[row, parent, token] > -math.inf:
                deepest[node] = deepest[parent] + 1
        assert kept.count[row] == max(deepest.values()) + 1


@given(cases, selections)
def test_threshold_zero_follows_samples_only(case: Case, selection: str) -> None:
    """Every emitted token is the target's own sample at its node; the draft decides nothing."""
    for rule in (ExactRule(), FuzzyRule(0.0)):
        kept = verify(case.evidence, rule, selection=selection)
        for row in range(case.tree.tokens.shape[0]):
            tokens, origins, path = _outcome(kept, row)
            assert tokens == case.evidence.sampled[row, path].tolist()
            assert FUZZY not in origins


@given(cases, thresholds, ratios, fallbacks, selections)
def test_nothing_masked_is_emitted(
    case: Case, threshold: float, ratio: float, fallback: str, selection: str
) -> None:
    """Fuzzy or not, bonus or not: every emitted token has warped probability above zero."""
    evidence = case.evidence
    kept = verify(evidence, FuzzyRule(threshold, min_ratio=ratio), fallback, selection)
    for row in range(case.tree.tokens.shape[0]):
        tokens, _, path = _outcome(kept, row)
        for node, token in zip(path, tokens, strict=True):
            assert evidence.warped_log_probs[row, node, token] > -math.inf


@given(cases, thresholds, ratios, fallbacks)
def test_the_bonus_token_is_no_accepted_child(
    case: Case, threshold: float, ratio: float, fallback: str
) -> None:
    """A path ends where no child is accepted, and the bonus is the target's own sample there.

    So what is emitted last never repeats a branch that could have been followed.
    """
    tree = case.tree
    kept = verify(case.evidence, FuzzyRule(threshold, min_ratio=ratio), fallback)
    for row in range(tree.tokens.shape[0]):
        tokens, origins, path = _outcome(kept, row)
        children = (tree.parents[row] == path[-1]).nonzero().flatten().tolist()
        accepted = [
            tree.tokens[row, child].item()
            for child in children
            if child and kept.accepted[row, child]
        ]
        assert accepted == []
        assert tokens[-1] == case.evidence.sampled[row, path[-1]]
        assert origins[-1] == TARGET
        if fallback == "exact":
            carried = [tree.tokens[row, child].item() for child in children if child]
            assert tokens[-1] not in carried


broken = st.sampled_from([math.nan, math.inf, -math.inf, 3e38, 0.0])


@given(
    cases,
    st.lists(broken, min_size=1, max_size=5),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from(["p", "q", "both"]),
    st.booleans(),
    thresholds,
    fallbacks,
    selections,
)
def test_ids_stay_in_range_with_broken_logits(
    case: Case,
    values: list[float],
    temperature: float,
    where: str,
    everywhere: bool,
    threshold: float,
    fallback: str,
    selection: str,
) -> None:
    """NaN and infinities in either model's logits: counts, nodes and ids stay usable as indices.

    The engine raises afterwards, but on a GPU an index out of range would have ended the process.
    """
    random = np.random.default_rng(case.seed)

    def damaged(clean: Tensor) -> Tensor:
        hit = torch.tensor(random.random(clean.shape) < (1.1 if everywhere else 0.2))
        bad = torch.tensor(random.choice(values, clean.shape), dtype=torch.float32)
        return torch.where(hit, bad, clean)

    tree, logits = case.tree, case.evidence.raw_log_probs
    if where != "q":
        logits = damaged(logits)
    if where != "p":
        tree = replace(tree, draft_log_probs=damaged(tree.draft_log_probs))
    generator = torch.Generator().manual_seed(0)
    sampler = Sampler(temperature, draw_from_draft=selection == "sample", generator=generator)
    for rule in (rule_for(FSDSettings(threshold=threshold)), TypicalRule()):
        kept = verify(sampler(tree, logits, None), rule, fallback, selection)
        assert (kept.tokens >= 0).all()
        assert (kept.tokens < VOCABULARY).all()
        assert (kept.count >= 1).all()
        assert (kept.count <= tree.max_depth + 1).all()
        assert (kept.path >= 0).all()
        assert (kept.path < tree.size).all()
