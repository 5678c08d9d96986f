"""The literature's acceptance rules on hand-built trees, with the exact tokens they keep."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from evidence import A, B, C, D, E, make_evidence, make_tree, outcome

from eagle_fsd.model.acceptance import (
    BudgetRule,
    DeferredRule,
    DrawnRule,
    ExactRule,
    TargetRule,
    TopGapRule,
)
from eagle_fsd.model.verify import AcceptanceRule, Evidence, Origin, verify

EXACT, FUZZY, TARGET = Origin.EXACT, Origin.FUZZY, Origin.TARGET
SURE = [0.96, 0.01, 0.01, 0.01, 0.01]  # of A
TORN = [0.30, 0.25, 0.20, 0.15, 0.10]


def _chain(p: list[list[float]], tokens: list[int], sampled: list[int]) -> Evidence:
    """A root and ``tokens`` below it in a row; ``p`` after each node."""
    tree = make_tree([0, *range(len(tokens))], [E, *tokens])
    return make_evidence(tree, p, sampled)


def _star(p: list[float], tokens: list[int], sampled: int) -> Evidence:
    """A root with ``tokens`` as its children, after each of which A is sure."""
    tree = make_tree([0] * (1 + len(tokens)), [E, *tokens])
    return make_evidence(tree, [p, *[SURE] * len(tokens)], [sampled, *[A] * len(tokens)])


# -- TensorRT-LLM: among the top, within a gap ----------------------------------------------------


@pytest.mark.parametrize(
    ("top", "gap", "kept"),
    [
        (5, 0.6, [D, A]),  # all of TORN is within the gap: the likeliest relaxed child is A's own
        (5, 0.16, [D, A]),
        (5, 0.14, [A]),  # D is 0.15 below the peak
        (4, 0.6, [D, A]),
        (3, 0.6, [A]),  # D is the fourth
        (1, 0.6, [A]),
    ],
)
def test_top_gap(top: int, gap: float, kept: list[int]) -> None:
    evidence = _star(TORN, [D], A)
    assert outcome(verify(evidence, TopGapRule(top, gap)))[0] == kept


# -- SGLang: thresholds on the target's probability -----------------------------------------------


def test_single_threshold() -> None:
    evidence = _star(TORN, [B, C], A)
    assert outcome(verify(evidence, TargetRule(single=0.26)))[0] == [A]
    assert outcome(verify(evidence, TargetRule(single=0.24))) == (
        [B, A],
        [FUZZY, TARGET],
        [0, 1],
    )
    assert outcome(verify(evidence, TargetRule(single=0.2)))[0] == [B, A]  # the likelier of two


def test_accumulated_threshold_at_temperature_0() -> None:
    """0.25 raised by 1 / 0.8 is 0.3125, above the peak of 0.30; 0.20 becomes 0.25 and is not."""
    assert outcome(verify(_star(TORN, [B], A), TargetRule(acc=0.8)))[0] == [B, A]
    assert outcome(verify(_star(TORN, [C], A), TargetRule(acc=0.8)))[0] == [A]


# -- Cactus: a KL budget --------------------------------------------------------------------------


def test_budget_at_temperature_0() -> None:
    """With d = 0.01, 0.25 rises by sqrt(0.02 * 0.25 * 0.75) to 0.3112, and 0.20 to 0.2566."""
    assert outcome(verify(_star(TORN, [B], A), BudgetRule(0.01)))[0] == [B, A]
    assert outcome(verify(_star(TORN, [C], A), BudgetRule(0.01)))[0] == [A]
    assert outcome(verify(_star(TORN, [C], A), BudgetRule(0.05)))[0] == [C, A]


def test_a_token_without_probability_is_never_raised() -> None:
    nothing = [0.5, 0.5, 0.0, 0.0, 0.0]
    for rule in (BudgetRule(10.0), TargetRule(single=0.0, acc=1e-6), TopGapRule(5, 1.0)):
        assert outcome(verify(_star(nothing, [C], A), rule))[0] == [A]


# -- rules that draw, when sampling ---------------------------------------------------------------


def _drawn_share(rule: AcceptanceRule, children: list[int], count: int = 200_000) -> list[float]:
    """How often each child of a root with law TORN is kept, over ``count`` draws."""
    generator = torch.Generator().manual_seed(7)
    one = _star(TORN, children, A)
    tree = replace(
        one.tree,
        **{
            name: getattr(one.tree, name).expand(count, *getattr(one.tree, name).shape[1:])
            for name in ("tokens", "parents", "depths", "ancestors", "draft_rows")
        },
        draft_log_probs=one.tree.draft_log_probs.expand(count, -1, -1),
    )
    wide = one.raw_log_probs.expand(count, -1, -1)
    sampled = torch.full((count, tree.size), A)
    law = torch.tensor(TORN)
    sampled[:, 0] = torch.multinomial(law, count, replacement=True, generator=generator)
    uniform = torch.rand(count, tree.size, generator=generator)
    kept = verify(Evidence(tree, wide, wide, wide, None, sampled, None, uniform), rule)
    first, longer = kept.tokens[:, 0], kept.count == 2
    return [float(((first == child) & longer).float().mean()) for child in children]


@pytest.mark.parametrize("rule", [TargetRule(), BudgetRule(0.0), ExactRule()])
def test_raising_nothing_keeps_the_targets_law(rule: AcceptanceRule) -> None:
    """Five deviations of a share of 200,000 draws: a false alarm in two million."""
    for share, p in zip(_drawn_share(rule, [C, A]), (0.20, 0.30), strict=True):
        assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / 200_000)


@pytest.mark.parametrize(
    ("rule", "raised"),
    [
        (TargetRule(acc=0.5), lambda p: min(1.0, p / 0.5)),
        (BudgetRule(0.1), lambda p: p + math.sqrt(0.2 * p * (1 - p))),
    ],
)
def test_a_lone_child_stands_as_often_as_its_raised_probability(rule: DrawnRule, raised) -> None:
    (share,) = _drawn_share(rule, [C])
    wanted = raised(0.20)
    assert abs(share - wanted) < 5 * math.sqrt(wanted * (1 - wanted) / 200_000)


def test_a_single_threshold_when_sampling() -> None:
    (share,) = _drawn_share(TargetRule(single=0.19), [C])
    assert share == 1.0


# -- FLy: an entropy gate and a window that is looked at later ------------------------------------


def test_a_mismatch_stands_if_enough_of_what_follows_agrees() -> None:
    """B for A, then two tokens that the target would have said."""
    evidence = _chain([TORN, SURE, SURE, SURE], [B, A, A], [A, A, A, A])
    kept = verify(evidence, DeferredRule(0.3, 2))
    assert outcome(kept) == ([B, A, A, A], [FUZZY, EXACT, EXACT, TARGET], [0, 1, 2, 3])
    assert outcome(verify(evidence, DeferredRule(0.3, 3)))[0] == [A]  # the tree ends too soon


def test_a_mismatch_falls_with_the_next_one_inside_its_window() -> None:
    evidence = _chain([TORN, TORN, SURE, SURE, SURE], [B, C, A, A], [A, A, A, A, A])
    assert outcome(verify(evidence, DeferredRule(0.3, 2)))[0] == [A]
    late = _chain(
        [TORN, SURE, TORN, SURE, SURE], [B, A, C, A], [A, A, A, A, A]
    )  # behind a window of one
    assert outcome(verify(late, DeferredRule(0.3, 1)))[0] == [B, A, C, A, A]
    assert outcome(verify(late, DeferredRule(0.3, 2)))[0] == [A]


def test_where_the_target_is_sure_nothing_is_deferred() -> None:
    """The entropy of SURE is 0.22 nats, 0.14 of ln 5; of TORN it is 0.96 of it."""
    evidence = _chain([SURE, SURE, SURE], [B, A], [A, A, A])
    assert outcome(verify(evidence, DeferredRule(0.3, 1)))[0] == [A]
    assert outcome(verify(evidence, DeferredRule(0.1, 1)))[0] == [B, A, A]


def test_the_longer_branch_wins_though_a_mismatch_opens_it() -> None:
    """A's branch is exact and ends; B's is a mismatch with two that agree below it."""
    tree = make_tree([0, 0, 0, 2, 3], [E, A, B, A, A])
    evidence = make_evidence(tree, [TORN, SURE, SURE, SURE, SURE], [A, D, A, A, A])
    assert outcome(verify(evidence, ExactRule()))[0] == [A, D]
    assert outcome(verify(evidence, DeferredRule(0.3, 2)))[0] == [B, A, A, A]


def test_rules_that_judge_paths_refuse_other_selections() -> None:
    for rule in (DeferredRule(), TargetRule(), BudgetRule()):
        with pytest.raises(ValueError, match="judges whole paths"):
            verify(_star(TORN, [B], A), rule, selection="target")
