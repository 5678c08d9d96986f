"""Verification of hand-built trees, each with its exact outcome."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from evidence import (
    ANY,
    EXACT,
    FLAT,
    FUZZY,
    TARGET,
    VOCABULARY,
    A,
    B,
    C,
    D,
    E,
    make_evidence,
    make_tree,
    outcome,
)

from eagle_fsd.model.acceptance import ExactRule, FuzzyRule, TypicalRule, rule_for
from eagle_fsd.model.config import FSDSettings
from eagle_fsd.model.tree import single_node
from eagle_fsd.model.verify import AcceptanceRule, Evidence, Origin, verify

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
    return make_evidence(make_tree(PARENTS, TOKENS, q), table, sampled, drawn, masked)


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
    assert outcome(kept) == (tokens, [EXACT] * (len(tokens) - 1) + [TARGET], path)


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
                assert outcome(kept, 0) == ([C], [TARGET], [0])
                assert outcome(kept, 1) == ([D], [TARGET], [0])


# -- fuzzy edges, selection="longest" --------------------------------------------------------------


def test_above_the_maximum_the_deepest_path_is_taken() -> None:
    """Every inner node is fuzzy at ``T = inf``, however far the draft; no sample is in the tree."""
    evidence = _drawn_case([E, E, E, E, E, E, D])
    kept = verify(evidence, FuzzyRule(ANY))
    assert outcome(kept) == ([A, C, B, D], [FUZZY, FUZZY, FUZZY, TARGET], [0, 1, 3, 6])
    assert kept.accepted.all()


def test_a_fuzzy_node_whose_sampled_child_is_not_on_the_longest_path() -> None:
    """The root is fuzzy and its sample B is a child, but below A the samples reach farther."""
    evidence = _drawn_case([B, C, D, B, E, E, D], fuzzy=[0])
    kept = verify(evidence, FSD)
    assert outcome(kept) == ([A, C, B, D], [FUZZY, EXACT, EXACT, TARGET], [0, 1, 3, 6])


def test_a_fuzzy_edge_opens_only_its_own_node() -> None:
    """Node 1 is fuzzy, the root is not: the path must first get to node 1 by a sample."""
    inside = verify(_drawn_case([A, E, E, E, E, E, E], fuzzy=[1]), FSD)
    # Of the equally deep C (.1) and D (.05) the target prefers C.
    assert outcome(inside) == ([A, C, E], [EXACT, FUZZY, TARGET], [0, 1, 3])
    outside = verify(_drawn_case([C, E, E, E, E, E, E], fuzzy=[1]), FSD)
    assert outcome(outside) == ([C], [TARGET], [0])


def test_a_fuzzy_token_that_is_the_sample_counts_as_exact() -> None:
    """Origins tell what the threshold changed: the target's own choice is never called fuzzy."""
    kept = verify(_drawn_case([A, C, E, E, E, E, E], fuzzy=INNER), FSD)
    assert outcome(kept) == ([A, C, B, E], [EXACT, EXACT, FUZZY, TARGET], [0, 1, 3, 6])


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
    tree = make_tree([0, 0, 0, 1, 2], [E, A, B, C, D], {node: p[node] for node in range(3)})
    kept = verify(make_evidence(tree, p, sampled), FSD)
    node = 1 if tokens[0] == A else 2
    assert outcome(kept) == ([*tokens, E], [FUZZY, EXACT, TARGET], [0, node, node + 2])


def test_a_node_without_a_draft_distribution_is_never_fuzzy() -> None:
    """Divergence is ``+inf`` where there is no ``q``, and below no threshold, not even ``inf``."""
    tree = make_tree([0, 0], [E, A], q={})
    kept = verify(make_evidence(tree, [P, P], [B, B]), FuzzyRule(ANY))
    assert outcome(kept) == ([B], [TARGET], [0])


def test_divergences_are_known_where_there_are_children() -> None:
    """Root and node 1 have children; leaf 2 was expanded but has none; leaf 3 was not expanded."""
    tree = make_tree([0, 0, 0, 1], [E, A, B, C], {0: P, 1: FAR, 2: P})
    found = FuzzyRule(1.0).divergences(make_evidence(tree, [P] * 4, [A] * 4))[0]
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
    evidence = make_evidence(make_tree([0, 0], [E, A], {0: q}), [p, FLAT], [B, C])
    assert outcome(verify(evidence, FuzzyRule(0.25, "tv")))[0] == [B]
    assert outcome(verify(evidence, FuzzyRule(0.2500001, "tv")))[0] == [A, C]


def test_divergence_on_raw_or_warped() -> None:
    """Equal once warped but far apart as the models gave them: fuzzy only on ``warped``."""
    evidence = make_evidence(make_tree([0, 0], [E, A], {0: FAR}), [P, FLAT], [B, C])
    peaked = torch.tensor([[[0.6, 0.4, 0.0, 0.0, 0.0]]]).log()
    evidence = replace(
        evidence,
        warped_log_probs=torch.cat([peaked, evidence.raw_log_probs[:, 1:]], 1),
        warped_draft_log_probs=peaked,
    )
    assert outcome(verify(evidence, FuzzyRule(0.1)))[0] == [B]
    assert outcome(verify(evidence, FuzzyRule(0.1, divergence_on="warped")))[0] == [A, C]


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
    assert outcome(kept) == ([A, D, E], [EXACT, EXACT, TARGET], [0, 1, 4])
    assert not kept.accepted[0, 3]


def test_a_masked_first_token_blocks_all_below_it() -> None:
    """A is forbidden after the root: the shallower branch below B is all there is."""
    evidence = _drawn_case([C, C, A, B, E, D, E], INNER, masked=[(0, A)])
    kept = verify(evidence, FuzzyRule(ANY))
    assert outcome(kept) == ([B, A, D], [FUZZY, EXACT, TARGET], [0, 2, 5])


def test_a_token_outside_the_nucleus_is_masked_too() -> None:
    """The guard looks at the warped distribution, where top-k and top-p have left nothing."""
    evidence = _drawn_case([B, A, A, A, E, D, E], INNER)
    warped = evidence.log_probs.clone()
    warped[0, 0, [A, C, D, E]] = -torch.inf
    evidence = replace(evidence, warped_log_probs=warped)
    kept = verify(evidence, FuzzyRule(ANY))
    assert outcome(kept) == ([B, A, D], [EXACT, EXACT, TARGET], [0, 2, 5])


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
    assert outcome(kept)[:2] == (tokens, origins)


def test_min_ratio_looks_at_processed_probabilities() -> None:
    """With the peak A masked, C is the largest that is left, and passes a floor of 0.9."""
    evidence = _drawn_case([A, E, E, E, E, E, E], fuzzy=[1], masked=[(1, A), (1, B)])
    kept = verify(evidence, FuzzyRule(0.1, min_ratio=0.9))
    assert outcome(kept) == ([A, C, E], [EXACT, FUZZY, TARGET], [0, 1, 3])


# -- fallback="stop" -------------------------------------------------------------------------------


def test_stop_emits_the_sample_and_ends_where_the_gate_is_closed() -> None:
    """Node 1 is closed: its sample C is a child, but is emitted as the last token."""
    evidence = _drawn_case([A, C, A, B, E, E, E], fuzzy=[0, 3])
    assert outcome(verify(evidence, FSD, "stop")) == ([A, C], [EXACT, TARGET], [0, 1])
    assert outcome(verify(evidence, FSD, "exact"))[0] == [A, C, B, E]


def test_stop_at_a_closed_root_emits_one_token() -> None:
    """As the paper's chain algorithm does, although the sample's branch goes on."""
    evidence = _drawn_case([A, C, A, B, E, E, E], fuzzy=[1, 2, 3])
    assert outcome(verify(evidence, FSD, "stop")) == ([A], [TARGET], [0])


def test_stop_prefers_the_deeper_of_two_open_branches() -> None:
    """The root is open; A's node is closed, B's is open and goes one deeper."""
    evidence = _drawn_case([A, C, E, B, E, D, E], fuzzy=[0, 2])
    kept = verify(evidence, FSD, "stop")
    assert outcome(kept) == ([B, A, D], [FUZZY, FUZZY, TARGET], [0, 2, 5])


# -- selection="target" ----------------------------------------------------------------------------


def test_target_follows_the_sampled_child_even_if_another_is_deeper() -> None:
    """Everything is fuzzy and the root's sample is B: the shorter branch, where longest takes A."""
    evidence = _drawn_case([B, C, E, B, E, D, E], INNER)
    kept = verify(evidence, FSD, selection="target")
    assert outcome(kept) == ([B, A, D], [EXACT, FUZZY, TARGET], [0, 2, 5])
    assert outcome(verify(evidence, FSD))[0] == [A, C, B, E]


def test_target_follows_its_favourite_child_where_the_sample_is_not_in_the_tree() -> None:
    """At node 1 the sample E is no child; the target likes D better than C, which leads deeper."""
    evidence = _drawn_case([A, E, E, B, C, D, E], INNER, p={1: [0.2, 0.2, 0.2, 0.3, 0.1]})
    kept = verify(evidence, FSD, selection="target")
    assert outcome(kept) == ([A, D, C], [EXACT, FUZZY, TARGET], [0, 1, 4])


def test_target_passes_over_a_favourite_that_the_guards_forbid() -> None:
    """D is the favourite but masked, so C; with C below the floor the sample ends the path."""
    p = {1: [0.2, 0.1, 0.12, 0.3, 0.28]}
    masked = _drawn_case([A, E, E, B, C, D, E], INNER, p=p, masked=[(1, D)])
    kept = verify(masked, FSD, selection="target")
    assert outcome(kept) == ([A, C, B, E], [EXACT, FUZZY, EXACT, TARGET], [0, 1, 3, 6])
    # The peak among what is left is E (.28): C (.12) is below 0.9 of it.
    kept = verify(masked, FuzzyRule(0.1, min_ratio=0.9), selection="target")
    assert outcome(kept) == ([A, E], [EXACT, TARGET], [0, 1])


# -- selection="sample" ----------------------------------------------------------------------------


def test_sample_follows_the_draft_at_fuzzy_nodes() -> None:
    """Drawn B at the root and A after it, both in the tree; the target's own samples differ."""
    evidence = _drawn_case([A, C, E, B, E, D, E], INNER, drawn=[B, D, A, D, D, D, D])
    kept = verify(evidence, FSD, selection="sample")
    assert outcome(kept) == ([B, A, D], [FUZZY, FUZZY, TARGET], [0, 2, 5])


def test_sample_emits_a_draw_outside_the_tree_and_ends() -> None:
    """At node 1 the draft draws B, which is no child: it is emitted, and nothing after it."""
    evidence = _drawn_case([A, C, E, B, E, D, E], INNER, drawn=[A, B, A, D, D, D, D])
    kept = verify(evidence, FSD, selection="sample")
    assert outcome(kept) == ([A, B], [EXACT, FUZZY], [0, 1])


def test_sample_follows_the_target_where_the_gate_is_closed() -> None:
    """Root closed: the draft's draw B does not count there; node 1 open: D, its draw, does."""
    evidence = _drawn_case([A, C, E, B, C, D, E], fuzzy=[1], drawn=[B, D, A, D, D, D, D])
    kept = verify(evidence, FSD, selection="sample")
    assert outcome(kept) == ([A, D, C], [EXACT, FUZZY, TARGET], [0, 1, 4])
    kept = verify(evidence, FSD, "stop", "sample")
    assert outcome(kept) == ([A], [TARGET], [0])


def test_sample_lets_the_target_stand_in_for_a_forbidden_draw() -> None:
    """The draft draws C at node 1; masked, or below the floor, it gives way to the sample D."""
    drawn = [A, C, A, B, D, D, D]
    masked = _drawn_case([A, D, E, B, C, D, E], INNER, drawn=drawn, masked=[(1, C)])
    kept = verify(masked, FSD, selection="sample")
    assert outcome(kept) == ([A, D, C], [EXACT, EXACT, TARGET], [0, 1, 4])
    floored = _drawn_case([A, D, E, B, C, D, E], INNER, drawn=drawn)
    kept = verify(floored, FuzzyRule(0.1, min_ratio=0.5), selection="sample")
    assert outcome(kept) == ([A, D, C], [EXACT, EXACT, TARGET], [0, 1, 4])


def test_sample_takes_the_bonus_from_the_target_at_leaves() -> None:
    """A leaf that the head expanded has a ``q``, but no children and so no divergence."""
    tree = make_tree([0, 0], [E, A], {0: P, 1: P})
    evidence = make_evidence(tree, [P, P], sampled=[B, C], drawn=[A, D])
    kept = verify(evidence, FuzzyRule(ANY), selection="sample")
    assert outcome(kept) == ([A, C], [FUZZY, TARGET], [0, 1])


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
    tree = make_tree([0, 0, 0, 0, 1, 1], [A, D, E, C, B, A])
    kept = verify(make_evidence(tree, p, [B, C, A, A, A, A]), TypicalRule())
    assert kept.accepted.tolist() == [[True, True, False, True, False, True]]
    assert outcome(kept) == ([D, A, A], [FUZZY, FUZZY, TARGET], [0, 1, 5])


@pytest.mark.parametrize(("epsilon", "accepted"), [(0.21, False), (0.19, True)])
def test_typical_acceptance_is_capped_by_epsilon(epsilon: float, accepted: bool) -> None:
    """``delta`` large: the bound is ``epsilon`` itself, and C has probability .2."""
    p = [[0.5, 0.25, 0.2, 0.04, 0.01], FLAT]
    rule = TypicalRule(epsilon=epsilon, delta=5.0)
    kept = verify(make_evidence(make_tree([0, 0], [A, C]), p, [B, B]), rule)
    assert bool(kept.accepted[0, 1]) is accepted


def test_typical_acceptance_looks_at_the_distribution_sampled_from() -> None:
    """D has .04 of the raw mass, above its bound, but .001 after the temperature, far below."""
    p = [[0.5, 0.25, 0.2, 0.04, 0.01], FLAT]
    evidence = make_evidence(make_tree([0, 0], [A, D]), p, [B, B])
    warped = evidence.warped_log_probs.clone()
    warped[0, 0] = torch.tensor([0.9, 0.05, 0.048, 0.001, 0.001]).log()
    evidence = replace(evidence, warped_log_probs=warped)
    assert not verify(evidence, TypicalRule()).accepted[0, 1]


def test_typical_acceptance_with_masked_tokens() -> None:
    """``0 log 0`` is 0 in the entropy: a mask must not make the bound NaN and accept nothing."""
    p = [[0.5, 0.25, 0.2, 0.05, 0.0], FLAT, FLAT]
    kept = verify(make_evidence(make_tree([0, 0, 0], [A, D, E]), p, [B, B, B]), TypicalRule())
    assert kept.accepted.tolist() == [[True, True, False]]


def test_typical_acceptance_without_a_draft_draw_is_the_targets_own() -> None:
    """``selection="sample"`` draws from ``q`` where there is one: not at a leaf or a lone root.

    Their entries of ``drawn`` mean nothing and must not be emitted.
    """
    tree = make_tree([0, 0], [E, A], {0: P})
    evidence = make_evidence(tree, [P, P], sampled=[A, C], drawn=[A, B])
    kept = verify(evidence, TypicalRule(), selection="sample")
    assert outcome(kept) == ([A, C], [EXACT, TARGET], [0, 1])
    lone = make_evidence(make_tree([0], [A]), [P], sampled=[B], drawn=[A])
    assert outcome(verify(lone, TypicalRule(), selection="sample")) == ([B], [TARGET], [0])


# -- which rule the settings ask for ---------------------------------------------------------------


def test_rule_for_settings() -> None:
    """``T = 0`` is the exact rule whatever else is set; otherwise every field arrives."""
    assert rule_for(FSDSettings(divergence="tv", min_ratio=0.5)) == ExactRule()
    wanted = FSDSettings(threshold=0.2, divergence="kl", min_ratio=0.1, divergence_on="warped")
    assert rule_for(wanted) == FuzzyRule(0.2, "kl", 0.1, "warped")
