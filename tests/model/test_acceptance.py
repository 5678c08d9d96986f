"""Acceptance rules from the literature on hand-built trees, with the exact tokens they keep."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from trees import EXACT, FUZZY, TARGET, A, B, C, D, E, make_inputs, make_tree, outcome

from eagle_fsd.model.acceptance import (
    BudgetRule,
    DeferredRule,
    DrawnRule,
    ExactRule,
    FuzzyRule,
    TargetRule,
    TopGapRule,
    TypicalRule,
    rule_for,
)
from eagle_fsd.model.config import AcceptanceConfig
from eagle_fsd.model.verify import AcceptanceRule, VerificationInputs, verify

CERTAIN = [0.96, 0.01, 0.01, 0.01, 0.01]  # of A; entropy 0.22 nats, 0.14 of ln 5
UNDECIDED = [0.30, 0.25, 0.20, 0.15, 0.10]  # entropy 0.96 of ln 5


def _chain(p: list[list[float]], tokens: list[int], sampled: list[int]) -> VerificationInputs:
    """A root with ``tokens`` below it in a row; ``p`` is the target after each node."""
    tree = make_tree([0, *range(len(tokens))], [E, *tokens])
    return make_inputs(tree, p, sampled)


def _star(p: list[float], tokens: list[int], sampled: int) -> VerificationInputs:
    """A root with ``tokens`` as its children, each followed by A."""
    tree = make_tree([0] * (1 + len(tokens)), [E, *tokens])
    return make_inputs(tree, [p, *[CERTAIN] * len(tokens)], [sampled, *[A] * len(tokens)])


def test_rule_for_passes_every_option() -> None:
    """``T = 0`` selects the exact rule whatever the other options are."""
    assert rule_for(AcceptanceConfig(divergence="tv", min_ratio=0.5)) == ExactRule()
    config = AcceptanceConfig(threshold=0.2, divergence="kl", min_ratio=0.1, divergence_on="warped")
    assert rule_for(config) == FuzzyRule(0.2, "kl", 0.1, "warped")


def test_rules_declare_the_inputs_they_read() -> None:
    assert not ExactRule().needs_uniform
    assert not FuzzyRule(0.1).needs_warped_draft
    assert FuzzyRule(0.1, divergence_on="warped").needs_warped_draft
    assert TargetRule().needs_uniform
    assert BudgetRule().needs_uniform


# -- TopGapRule (TensorRT-LLM) ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("top", "gap", "kept"),
    [
        (5, 0.16, [D, A]),
        (5, 0.14, [A]),  # D is 0.15 below the peak
        (4, 0.6, [D, A]),
        (3, 0.6, [A]),  # D is the fourth
    ],
)
def test_top_gap_rule_limits_rank_and_gap(top: int, gap: float, kept: list[int]) -> None:
    inputs = _star(UNDECIDED, [D], A)
    assert outcome(verify(inputs, TopGapRule(top, gap)))[0] == kept


# -- TargetRule (SGLang) and BudgetRule (Cactus) at temperature 0 ----------------------------------


def test_target_rule_single_accepts_probable_tokens() -> None:
    inputs = _star(UNDECIDED, [B, C], A)
    assert outcome(verify(inputs, TargetRule(single=0.26)))[0] == [A]
    assert outcome(verify(inputs, TargetRule(single=0.24))) == ([B, A], [FUZZY, TARGET], [0, 1])
    assert outcome(verify(inputs, TargetRule(single=0.2)))[0] == [B, A]  # the likelier of two


def test_target_rule_acc_compares_raised_probability_with_peak() -> None:
    """0.25 / 0.8 is 0.3125, above the peak of 0.30; 0.20 / 0.8 is 0.25."""
    assert outcome(verify(_star(UNDECIDED, [B], A), TargetRule(acc=0.8)))[0] == [B, A]
    assert outcome(verify(_star(UNDECIDED, [C], A), TargetRule(acc=0.8)))[0] == [A]


def test_budget_rule_compares_raised_probability_with_peak() -> None:
    """With d = 0.01, 0.25 rises by sqrt(0.02 * 0.25 * 0.75) to 0.3112, and 0.20 to 0.2566."""
    assert outcome(verify(_star(UNDECIDED, [B], A), BudgetRule(0.01)))[0] == [B, A]
    assert outcome(verify(_star(UNDECIDED, [C], A), BudgetRule(0.01)))[0] == [A]
    assert outcome(verify(_star(UNDECIDED, [C], A), BudgetRule(0.05)))[0] == [C, A]


def test_token_of_zero_probability_is_never_accepted() -> None:
    p = [0.5, 0.5, 0.0, 0.0, 0.0]
    for rule in (BudgetRule(10.0), TargetRule(single=0.0, acc=1e-6), TopGapRule(5, 1.0)):
        assert outcome(verify(_star(p, [C], A), rule))[0] == [A]


# -- the same rules when sampling ------------------------------------------------------------------

DRAWS = 50_000


def _accepted_shares(rule: AcceptanceRule, children: list[int]) -> list[float]:
    """Fraction of ``DRAWS`` samples from UNDECIDED in which each child of a root is kept."""
    generator = torch.Generator().manual_seed(7)
    one = _star(UNDECIDED, children, A)
    tree = replace(
        one.tree,
        **{
            name: getattr(one.tree, name).expand(DRAWS, *getattr(one.tree, name).shape[1:])
            for name in ("tokens", "parents", "depths", "ancestors", "draft_rows")
        },
        draft_log_probs=one.tree.draft_log_probs.expand(DRAWS, -1, -1),
    )
    wide = one.raw_log_probs.expand(DRAWS, -1, -1)
    sampled = torch.full((DRAWS, tree.size), A)
    p = torch.tensor(UNDECIDED)
    sampled[:, 0] = torch.multinomial(p, DRAWS, replacement=True, generator=generator)
    uniform = torch.rand(DRAWS, tree.size, generator=generator)
    inputs = VerificationInputs(tree, wide, wide, wide, None, sampled, None, uniform)
    kept = verify(inputs, rule)
    first, longer = kept.tokens[:, 0], kept.count == 2
    return [float(((first == child) & longer).float().mean()) for child in children]


def _within(share: float, p: float) -> bool:
    """Whether ``share`` of ``DRAWS`` is within 5.2 standard deviations of ``p``.

    False-alarm rate 2e-7; a probability wrong by 0.02 (more than 9 deviations) is detected.
    """
    return abs(share - p) < 5.2 * math.sqrt(p * (1 - p) / DRAWS)


@pytest.mark.parametrize("rule", [TargetRule(), BudgetRule(0.0), ExactRule()])
def test_rule_that_raises_nothing_keeps_the_target_law(rule: AcceptanceRule) -> None:
    shares = _accepted_shares(rule, [C, A])
    assert _within(shares[0], 0.20)
    assert _within(shares[1], 0.30)


@pytest.mark.parametrize(
    ("rule", "raised"),
    [
        (TargetRule(acc=0.5), lambda p: min(1.0, p / 0.5)),
        (BudgetRule(0.1), lambda p: p + math.sqrt(0.2 * p * (1 - p))),
    ],
)
def test_single_child_is_accepted_with_its_raised_probability(
    rule: DrawnRule, raised: Callable[[float], float]
) -> None:
    (share,) = _accepted_shares(rule, [C])
    assert _within(share, raised(0.20))


def test_target_rule_single_accepts_probable_tokens_when_sampling() -> None:
    assert _accepted_shares(TargetRule(single=0.19), [C]) == [1.0]


# -- DeferredRule (FLy) ----------------------------------------------------------------------------


def test_mismatch_is_accepted_if_the_following_window_agrees() -> None:
    """B instead of A, then two tokens that the target samples too."""
    inputs = _chain([UNDECIDED, CERTAIN, CERTAIN, CERTAIN], [B, A, A], [A, A, A, A])
    kept = verify(inputs, DeferredRule(0.3, 2))
    assert outcome(kept) == ([B, A, A, A], [FUZZY, EXACT, EXACT, TARGET], [0, 1, 2, 3])
    assert outcome(verify(inputs, DeferredRule(0.3, 3)))[0] == [A]  # the tree ends too early


def test_second_mismatch_inside_the_window_is_rejected() -> None:
    near = _chain([UNDECIDED, UNDECIDED, CERTAIN, CERTAIN, CERTAIN], [B, C, A, A], [A, A, A, A, A])
    assert outcome(verify(near, DeferredRule(0.3, 2)))[0] == [A]
    far = _chain([UNDECIDED, CERTAIN, UNDECIDED, CERTAIN, CERTAIN], [B, A, C, A], [A, A, A, A, A])
    assert outcome(verify(far, DeferredRule(0.3, 1)))[0] == [B, A, C, A, A]
    assert outcome(verify(far, DeferredRule(0.3, 2)))[0] == [A]


def test_mismatch_is_rejected_where_the_entropy_is_low() -> None:
    inputs = _chain([CERTAIN, CERTAIN, CERTAIN], [B, A], [A, A, A])
    assert outcome(verify(inputs, DeferredRule(0.3, 1)))[0] == [A]
    assert outcome(verify(inputs, DeferredRule(0.1, 1)))[0] == [B, A, A]


def test_longer_branch_wins_although_it_starts_with_a_mismatch() -> None:
    """A's branch is exact and ends; B's is a mismatch followed by two exact tokens."""
    tree = make_tree([0, 0, 0, 2, 3], [E, A, B, A, A])
    p = [UNDECIDED, CERTAIN, CERTAIN, CERTAIN, CERTAIN]
    inputs = make_inputs(tree, p, [A, D, A, A, A])
    assert outcome(verify(inputs, ExactRule()))[0] == [A, D]
    assert outcome(verify(inputs, DeferredRule(0.3, 2)))[0] == [B, A, A, A]


@pytest.mark.parametrize("rule", [DeferredRule(), TargetRule(), BudgetRule()])
def test_rule_that_judges_whole_paths_requires_longest_selection(rule: AcceptanceRule) -> None:
    with pytest.raises(ValueError, match="judges whole paths"):
        verify(_star(UNDECIDED, [B], A), rule, selection="target")


# -- TypicalRule (Medusa) --------------------------------------------------------------------------


def test_typical_rule_uses_the_entropy_bound() -> None:
    """``H(.5, .25, .2, .04, .01) = 1.190``; ``0.09 exp(-H) = 0.0274``: .04 passes, .01 does not.

    At node 1, ``p = (.9, .04, .03, .02, .01)`` has ``H = 0.4645`` and a bound of 0.0566: only A.
    """
    p = [[0.5, 0.25, 0.2, 0.04, 0.01], [0.9, 0.04, 0.03, 0.02, 0.01], *[[0.2] * 5] * 4]
    tree = make_tree([0, 0, 0, 0, 1, 1], [A, D, E, C, B, A])
    kept = verify(make_inputs(tree, p, [B, C, A, A, A, A]), TypicalRule())
    assert kept.accepted.tolist() == [[True, True, False, True, False, True]]
    assert outcome(kept) == ([D, A, A], [FUZZY, FUZZY, TARGET], [0, 1, 5])


@pytest.mark.parametrize(("epsilon", "accepted"), [(0.21, False), (0.19, True)])
def test_typical_rule_bound_is_capped_by_epsilon(epsilon: float, accepted: bool) -> None:
    """With a large ``delta`` the bound is ``epsilon``; C has probability .2."""
    inputs = _star([0.5, 0.25, 0.2, 0.04, 0.01], [C], B)
    kept = verify(inputs, TypicalRule(epsilon=epsilon, delta=5.0))
    assert bool(kept.accepted[0, 1]) is accepted


def test_typical_rule_looks_at_the_warped_distribution() -> None:
    """D has .04 of the raw mass, above its bound, but .001 after the temperature."""
    inputs = _star([0.5, 0.25, 0.2, 0.04, 0.01], [D], B)
    warped = inputs.warped_log_probs.clone()
    warped[0, 0] = torch.tensor([0.9, 0.05, 0.048, 0.001, 0.001]).log()
    inputs = replace(inputs, warped_log_probs=warped)
    assert not verify(inputs, TypicalRule()).accepted[0, 1]


def test_typical_rule_entropy_ignores_masked_tokens() -> None:
    """``0 log 0`` is 0: a mask must not make the bound NaN, which would accept nothing."""
    inputs = _star([0.5, 0.25, 0.2, 0.05, 0.0], [D, E], B)
    assert verify(inputs, TypicalRule()).accepted.tolist() == [[True, True, False]]


def test_sample_selection_without_a_draft_distribution_uses_the_target_sample() -> None:
    """The entries of ``drawn`` at a leaf and at a root without draft are undefined."""
    tree = make_tree([0, 0], [E, A], {0: UNDECIDED})
    inputs = make_inputs(tree, [UNDECIDED] * 2, sampled=[A, C], drawn=[A, B])
    kept = verify(inputs, TypicalRule(), selection="sample")
    assert outcome(kept) == ([A, C], [EXACT, TARGET], [0, 1])
    root_only = make_inputs(make_tree([0], [A]), [UNDECIDED], sampled=[B], drawn=[A])
    assert outcome(verify(root_only, TypicalRule(), selection="sample")) == ([B], [TARGET], [0])
