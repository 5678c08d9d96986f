"""Acceptance rules from the literature on hand-built trees, with the exact tokens they keep."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from pairs import batch, random_pair
from torch import Tensor
from trees import (
    ALWAYS,
    EXACT,
    FUZZY,
    TARGET,
    A,
    B,
    C,
    D,
    E,
    dense,
    make_inputs,
    make_tree,
    outcome,
)

from eagle_fsd import AcceptanceConfig, EagleFSD, Origin
from eagle_fsd.model.acceptance import (
    BudgetRule,
    CascadeRule,
    DeferredRule,
    DelayedRule,
    ExactRule,
    LimitedRule,
    MarginRule,
    MixtureRule,
    PhaseRule,
    RegretRule,
    TargetRule,
    TopKRule,
    TypicalRule,
)
from eagle_fsd.model.verify import AcceptanceRule, VerificationInputs, verify
from eagle_fsd.model.vocabulary import Distributions

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


def _kept(rule: AcceptanceRule, tokens: list[int], p: list[float] = UNDECIDED) -> list[int]:
    """The tokens kept below a root whose children carry ``tokens``; the target samples A."""
    return outcome(verify(_star(p, tokens, A), rule))[0]


def test_top_k_rule_limits_rank_gap_and_ratio() -> None:
    """D is the fourth; it is 0.15 below the peak and has half of it."""
    for rule, accepted in (
        (TopKRule(5, 0.16), True),
        (TopKRule(5, 0.14), False),
        (TopKRule(4, 0.6), True),
        (TopKRule(3, 0.6), False),
        (TopKRule(4, ratio=0.49), True),
        (TopKRule(4, ratio=0.51), False),
        (TopKRule(3, ratio=0.1), False),
    ):
        assert _kept(rule, [D]) == ([D, A] if accepted else [A]), rule


LOGITS = [10.0, 9.2, 9.1, 0.0, 0.0]


def test_margin_rule_compares_the_two_largest_logits() -> None:
    """C is almost as likely as B, but third: it is never accepted."""
    inputs = _star(torch.tensor(LOGITS).softmax(0).tolist(), [C, B], A)
    for shift, ratio, kept in (
        (0.0, 0.9, [B, A]),  # 9.2 / 10
        (0.0, 0.93, [A]),
        (20.0, 0.93, [B, A]),  # 29.2 / 30: the ratio is not invariant to shifts
        (-10.0, 0.0, [A]),  # the largest logit is 0: the ratio is undefined
    ):
        logits = dense(inputs.processed)
        logits[0, 0] = torch.tensor(LOGITS) + shift
        shifted = replace(inputs, processed=Distributions.of(logits))
        assert outcome(verify(shifted, MarginRule(ratio)))[0] == kept


def test_cascade_rule_accepts_only_the_choice_of_the_draft() -> None:
    """B is the draft's most likely token, C is not. A sampled chain holds the draft's choices."""
    q = [0.2, 0.35, 0.2, 0.15, 0.1]
    tree = make_tree([0, 0, 0, 1], [E, C, B, A], {0: q})
    inputs = make_inputs(tree, [UNDECIDED, CERTAIN, CERTAIN, CERTAIN], [A, A, A, A])
    assert outcome(verify(inputs, CascadeRule(0.0)))[0] == [B, A]
    tree = replace(make_tree([0, 0], [E, C], {0: q}), sampled=True)
    inputs = make_inputs(tree, [UNDECIDED, CERTAIN], [A, A])
    assert outcome(verify(inputs, CascadeRule(0.0)))[0] == [C, A]


def test_mixture_rule_follows_the_most_likely_token_of_the_mixture() -> None:
    """``w .30 + (1 - w) .1`` for A, ``w .25 + (1 - w) .6`` for B: equal at w = 10 / 11."""
    tree = make_tree([0, 0, 0], [E, A, B], {0: [0.1, 0.6, 0.1, 0.1, 0.1]})
    inputs = make_inputs(tree, [UNDECIDED, CERTAIN, CERTAIN], [A, A, A])
    for weight, token, origin in ((0.95, A, EXACT), (0.5, B, FUZZY), (0.0, B, FUZZY)):
        tokens, origins, _ = outcome(verify(inputs, MixtureRule(weight)))
        assert (tokens, origins) == ([token, A], [origin, TARGET])


def test_mixture_rule_emits_the_law_of_the_mixture() -> None:
    q = [0.1, 0.6, 0.1, 0.1, 0.1]
    generator = torch.Generator().manual_seed(3)
    one = make_inputs(make_tree([0, 0], [E, B], {0: q}), [UNDECIDED, CERTAIN], [A, A])
    for weight in (1.0, 0.7, 0.0):
        sampled, drawn = (
            torch.multinomial(torch.tensor(probs), DRAWS, replacement=True, generator=generator)
            for probs in (UNDECIDED, q)
        )
        inputs = _repeated(one, torch.rand(DRAWS, 2, generator=generator))
        inputs.sampled[:, 0] = sampled
        inputs.drawn = torch.stack([drawn, drawn], 1)
        kept = verify(inputs, MixtureRule(weight))
        for token, (p, other) in enumerate(zip(UNDECIDED, q, strict=True)):
            share = float((kept.tokens[:, 0] == token).float().mean())
            assert _within(share, weight * p + (1 - weight) * other)


def test_raised_probabilities_are_compared_with_the_peak() -> None:
    """B has .25, C .20, and the peak is .30."""
    assert outcome(verify(_star(UNDECIDED, [B, C], A), TargetRule(single=0.24))) == (
        [B, A],
        [FUZZY, TARGET],
        [0, 1],
    )
    for rule, children, kept in (
        (TargetRule(single=0.26), [B, C], [A]),
        (TargetRule(single=0.2), [B, C], [B, A]),  # the likelier of two
        (TargetRule(acc=0.8), [B], [B, A]),  # .25 / .8 is .3125
        (TargetRule(acc=0.8), [C], [A]),  # .20 / .8 is .25
        # With d = 0.01, .25 rises by sqrt(.02 x .25 x .75) to .3112, and .20 to .2566.
        (BudgetRule(0.01), [B], [B, A]),
        (BudgetRule(0.01), [C], [A]),
        (BudgetRule(0.05), [C], [C, A]),
    ):
        assert _kept(rule, children) == kept, rule


DRAWS = 50_000


def _repeated(one: VerificationInputs, uniform: Tensor) -> VerificationInputs:
    """``DRAWS`` copies of one row, with their random numbers; ``sampled`` may be written to."""
    tree = one.tree.of_rows(torch.zeros(DRAWS, dtype=torch.long))
    wide = Distributions.of(dense(one.raw).expand(DRAWS, -1, -1))
    sampled = one.sampled.repeat(DRAWS, 1)
    return VerificationInputs(tree, wide, wide, wide, None, sampled, None, uniform)


def _accepted_shares(rule: AcceptanceRule, children: list[int]) -> list[float]:
    """Fraction of ``DRAWS`` samples from UNDECIDED in which each child of a root is kept."""
    generator = torch.Generator().manual_seed(7)
    one = _star(UNDECIDED, children, A)
    p = torch.tensor(UNDECIDED)
    sampled = torch.multinomial(p, DRAWS, replacement=True, generator=generator)
    inputs = _repeated(one, torch.rand(DRAWS, one.tree.size, generator=generator))
    inputs.sampled[:, 0] = sampled
    kept = verify(inputs, rule)
    first, longer = kept.tokens[:, 0], kept.count == 2
    return [float(((first == child) & longer).float().mean()) for child in children]


def _within(share: float, p: float) -> bool:
    """Whether ``share`` of ``DRAWS`` is within 5.2 standard deviations of ``p``.

    False-alarm rate 2e-7; a probability wrong by 0.02 (more than 9 deviations) is detected.
    """
    return abs(share - p) < 5.2 * math.sqrt(p * (1 - p) / DRAWS)


def test_children_are_accepted_with_their_raised_probabilities() -> None:
    """C has .20, A has .30; rules that raise nothing accept exactly the target's samples."""
    for unchanged in (TargetRule(), BudgetRule(0.0), ExactRule()):
        shares = _accepted_shares(unchanged, [C, A])
        assert _within(shares[0], 0.20)
        assert _within(shares[1], 0.30)
    for rule, raised in (
        (TargetRule(acc=0.5), 0.20 / 0.5),
        (BudgetRule(0.1), 0.20 + math.sqrt(0.2 * 0.20 * 0.80)),
    ):
        (share,) = _accepted_shares(rule, [C])
        assert _within(share, raised)
    assert _accepted_shares(TargetRule(single=0.19), [C]) == [1.0]


def test_mismatch_is_accepted_if_the_following_window_agrees() -> None:
    """B instead of A, then two tokens that the target samples too."""
    inputs = _chain([UNDECIDED, CERTAIN, CERTAIN, CERTAIN], [B, A, A], [A, A, A, A])
    kept = verify(inputs, DeferredRule(0.3, 2))
    assert outcome(kept) == ([B, A, A, A], [FUZZY, EXACT, EXACT, TARGET], [0, 1, 2, 3])
    assert outcome(verify(inputs, DeferredRule(0.3, 3)))[0] == [A]  # the tree ends too early


def test_regret_rule_allows_more_where_more_follows() -> None:
    """C costs ``log(.30 / .20) = .405`` and saves two positions; below it the chain is exact."""
    inputs = _chain([UNDECIDED, CERTAIN, CERTAIN], [C, A], [A, A, A])
    for per_position, kept in ((0.35, [C, A, A]), (0.1, [A])):
        assert outcome(verify(inputs, RegretRule(per_position)))[0] == kept
        assert _kept(RegretRule(per_position), [C]) == [A]  # C saves one position


def _phase(
    inputs: VerificationInputs, prompt: list[int], begin: int | None = D, end: int = E
) -> tuple[list[int], float]:
    """Tokens kept without a gate between the markers, and the state after the step."""
    rule = PhaseRule(AcceptanceRule(), begin, end)
    state = rule.start([torch.tensor(prompt)])
    kept = verify(replace(inputs, state=state), rule)
    after = rule.advance(replace(inputs, state=state), kept)[0].item()
    for restricted in (LimitedRule(rule, ALWAYS), DelayedRule(rule, 0)):
        state = restricted.start([torch.tensor(prompt)])
        assert outcome(verify(replace(inputs, state=state), restricted)) == outcome(kept)
    return outcome(kept)[0], after


def test_phase_rule_reads_the_prompt() -> None:
    """The last marker counts. The phase may begin with the answer."""
    inputs = _star(UNDECIDED, [B], A)
    for prompt, kept in (
        ([A], [A]),
        ([D, A], [B, A]),
        ([D, E, A], [A]),
        ([E, D], [B, A]),
        ([D, E, D, A], [B, A]),
    ):
        assert _phase(inputs, prompt) == (kept, float(len(kept) == 2))
    assert _phase(inputs, [E, A], begin=None) == ([B, A], 1.0)


def test_phase_begins_and_ends_inside_a_tree() -> None:
    """B after the begin marker is relaxed, B after the end marker is not."""
    p = [CERTAIN, UNDECIDED, UNDECIDED, UNDECIDED]
    inputs = _chain(p, [D, B, E], [D, A, E, A])
    assert _phase(inputs, [A]) == ([D, B, E, A], 0.0)
    longer = _chain([*p, CERTAIN], [D, B, E, B], [D, A, E, A, A])
    assert _phase(longer, [A]) == ([D, B, E, A], 0.0)
    bonus = _chain([CERTAIN, CERTAIN], [A], [A, D])
    assert _phase(bonus, [A]) == ([A, D], 1.0)


def test_typical_rule_uses_the_entropy_bound() -> None:
    """``0.09 exp(-H)`` is .0274 at the root, so that .04 passes and .01 does not, then .0566."""
    p = [[0.5, 0.25, 0.2, 0.04, 0.01], [0.9, 0.04, 0.03, 0.02, 0.01], *[[0.2] * 5] * 4]
    tree = make_tree([0, 0, 0, 0, 1, 1], [A, D, E, C, B, A])
    kept = verify(make_inputs(tree, p, [B, C, A, A, A, A]), TypicalRule())
    assert kept.accepted.tolist() == [[True, True, False, True, False, True]]
    assert outcome(kept) == ([D, A, A], [FUZZY, FUZZY, TARGET], [0, 1, 5])


NEW_TOKENS = 40


def _spent(pair: EagleFSD, prompt: Tensor, answer: Tensor, origins: Tensor) -> float:
    """Sum of ``max log p - log p(x)`` over an answer's fuzzy tokens, by a plain forward pass."""
    ids = torch.cat([prompt, answer])[None]
    with torch.no_grad():
        log_probs = pair.model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    regret = log_probs.amax(-1) - log_probs.gather(1, answer[:, None])[:, 0]
    return float(regret[origins == Origin.FUZZY].sum())


@pytest.mark.parametrize("options", [{}, {"selection": "target"}, {"rule": "mixture 0.5"}])
def test_the_first_tokens_are_exact(options: dict[str, str]) -> None:
    """``exact_first`` makes exactly that many tokens exact, and the next one may be fuzzy."""
    pair = random_pair()
    ids, mask = batch()
    rule = {} if "rule" in options else {"threshold": ALWAYS}

    def answers(**acceptance: object) -> tuple[Tensor, Tensor]:
        out = pair.generate(ids, mask, NEW_TOKENS, eos_token_id=[], acceptance=acceptance)
        return out.sequences[:, ids.shape[1] :], out.origins

    exact, _ = answers()
    for count in (1, 4, NEW_TOKENS):
        tokens, origins = answers(**options, **rule, exact_first=count)
        assert torch.equal(tokens[:, :count], exact[:, :count])
        assert not (origins[:, :count] == Origin.FUZZY).any()
        assert count == NEW_TOKENS or not torch.equal(tokens, exact)
    if not options:
        assert (answers(**rule, exact_first=4)[1][:, 4] == Origin.FUZZY).any()


def test_fuzzy_tokens_of_an_answer_stay_within_the_limit() -> None:
    """``max_fuzzy_nats`` limits the whole answer; without it much more is given up, with 0 none."""
    pair = random_pair()
    ids, mask = batch()
    options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": []}

    def spent(acceptance: AcceptanceConfig) -> list[float]:
        out = pair.generate(ids, mask, acceptance=acceptance, **options)
        answers = out.sequences[:, ids.shape[1] :]
        return [
            _spent(pair, ids[row, real], answers[row], out.origins[row])
            for row, real in enumerate(mask.bool())
        ]

    for selection, limit in (("longest", 20.0), ("priced", 3.0)):
        free = AcceptanceConfig(threshold=10.0, selection=selection, price=0.1)
        limited = spent(free.updated(max_fuzzy_nats=limit))
        assert 0.5 * limit <= max(limited) <= limit + 1e-3
        assert min(spent(free)) > 20.0
    exact = pair.generate(ids, mask, threshold=0.0, **options)
    none = AcceptanceConfig(threshold=10.0, max_fuzzy_nats=0.0)
    assert torch.equal(
        pair.generate(ids, mask, acceptance=none, **options).sequences, exact.sequences
    )
