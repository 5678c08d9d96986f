"""Sampled chains: the laws of both lossless verifications and of FSD, against enumerations.

A target and a draft of three tokens are tables of distributions by context. ``_enumerate`` follows
the algorithms as the papers print them, in float64, through every chain and every random decision,
and returns the exact law of a step's outcome: the kept tokens and the one after them. The
engine's parts (``TreeBuilder``, ``Sampler``, ``verify``) then take ``ROWS`` steps. ``TV`` between
their outcomes and the law exceeds ``_bound`` with probability below 1e-7 (see
``sampling_laws.py``).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sampling_laws import bound
from torch import Generator, Tensor
from trees import first_numbers

from eagle_fsd.model.acceptance import BudgetRule, ExactRule, FuzzyRule, TargetRule
from eagle_fsd.model.acceptance.draws import DrawnRule
from eagle_fsd.model.config import AcceptanceConfig, SamplingConfig, TreeConfig
from eagle_fsd.model.divergence import DIVERGENCES
from eagle_fsd.model.random_numbers import Purpose
from eagle_fsd.model.residual import SampledChain, verify_block, verify_tokens
from eagle_fsd.model.sampling import Sampler
from eagle_fsd.model.tree import TreeBuilder
from eagle_fsd.model.verify import AcceptanceRule, verify
from eagle_fsd.model.vocabulary import Distributions

Array = NDArray[np.float64]
#: The distribution after each context.
Table = dict[tuple[int, ...], Array]
#: The probability of each outcome.
Law = dict[tuple[int, ...], float]
#: Given a chain, the probability of keeping its first 0, 1, ... tokens, and the next token's law.
Algorithm = Callable[[tuple[int, ...]], list[tuple[float, Array]]]
VerifyChain = Callable[[SampledChain], Tensor]

VOCAB_SIZE = 3
#: Drafted tokens.
LENGTH = 3
ROWS = 50_000


def _contexts(length: int) -> Iterator[tuple[int, ...]]:
    return itertools.product(range(VOCAB_SIZE), repeat=length)


def _logits(seed: int, noise: float) -> tuple[Table, Table]:
    """Draw logits of a target and of a draft at a distance ``noise`` from it."""
    random = np.random.default_rng(seed)
    target, draft = {}, {}
    for context in itertools.chain.from_iterable(map(_contexts, range(LENGTH + 1))):
        target[context] = random.normal(0, 1.5, VOCAB_SIZE)
        scale = noise * random.uniform(0.2, 1.8)
        draft[context] = target[context] + scale * random.normal(0, 1, VOCAB_SIZE)
    return target, draft


def _probs(
    logits: Table, temperature: float, top_k: int, token_ids: Sequence[int] | None = None
) -> Table:
    """Apply temperature and top-k, and keep only ``token_ids``."""
    found = {}
    for context, values in logits.items():
        kept = values >= np.sort(values)[-top_k] if top_k else values > -np.inf
        if token_ids is not None:
            kept &= np.isin(np.arange(VOCAB_SIZE), token_ids)
        exponent = np.where(kept, np.exp(values / temperature), 0.0)
        found[context] = exponent / exponent.sum()
    return found


def _normalized(weights: Array) -> Array:
    return weights / weights.sum() if weights.sum() > 0 else weights


def _one_by_one(
    p: Table,
    q: Table,
    chain: tuple[int, ...],
    open_: Collection[tuple[int, ...]] = (),
    stop: bool = False,
    raised: Callable[[float], float] = float,
) -> list[tuple[float, Array]]:
    """Leviathan et al., algorithm 1: the probability of keeping ``n`` tokens, and the next's.

    FSD keeps tokens at open contexts, and may stop at others. Other rules first raise ``p``.
    """
    found, reached = [], 1.0
    for step, token in enumerate(chain):
        here, draft = p[chain[:step]], q[chain[:step]]
        accepted = 0.0 if stop else min(1.0, raised(here[token]) / draft[token])
        rest = here if stop else _normalized(np.maximum(here - draft, 0.0))
        accepted = 1.0 if chain[:step] in open_ else accepted
        found.append((reached * (1 - accepted), rest))
        reached *= accepted
    return [*found, (reached, p[chain])]


def _as_block(p: Table, q: Table, chain: tuple[int, ...]) -> list[tuple[float, Array]]:
    """Sun et al., algorithm 2 with equations 3 and 4."""
    weight, chances, rests = 1.0, [1.0], []
    for step, token in enumerate(chain):
        here, draft = p[chain[:step]], q[chain[:step]]
        rests.append(np.maximum(weight * here - draft, 0.0))
        if step:
            mass = rests[-1].sum()
            chances.append(mass / (mass + 1 - weight) if mass else 0.0)
        weight = min(weight * here[token] / draft[token], 1.0)
    chances.append(weight)
    found, not_later = [], 1.0
    for step in range(len(chain), -1, -1):  # the last candidate decides
        rest = p[chain] if step == len(chain) else _normalized(rests[step])
        found.append((not_later * chances[step], rest))
        not_later *= 1 - chances[step]
    return found[::-1]


def _enumerate(q: Table, algorithm: Algorithm) -> Law:
    """Return the law of (kept tokens, next token) under ``algorithm(chain)``."""
    law: Counter[tuple[int, ...]] = Counter()
    for chain in _contexts(LENGTH):
        drafted = math.prod(q[chain[:step]][token] for step, token in enumerate(chain))
        if not drafted:
            continue
        for count, (chance, following) in enumerate(algorithm(chain)):
            for token in range(VOCAB_SIZE):
                law[(*chain[:count], token)] += drafted * chance * following[token]
    return law


def _completed(law: Law, p: Table) -> Law:
    """Return the law of the first ``LENGTH`` tokens if the target goes on after a step."""
    found: Counter[tuple[int, ...]] = Counter()
    for tokens, chance in law.items():
        for rest in _contexts(max(0, LENGTH - len(tokens))):
            whole = (*tokens, *rest)
            following = [p[whole[:step]][whole[step]] for step in range(len(tokens), LENGTH)]
            found[whole[:LENGTH]] += chance * math.prod(following)
    return found


def _target_law(p: Table) -> Law:
    return {
        chain: math.prod(p[chain[:step]][token] for step, token in enumerate(chain))
        for chain in _contexts(LENGTH)
    }


def _mean_kept(law: Law) -> float:
    return sum((len(tokens) - 1) * chance for tokens, chance in law.items())


def _distance(one: Law, other: Law) -> float:
    assert sum(one.values()) == pytest.approx(1.0, abs=1e-9)
    assert sum(other.values()) == pytest.approx(1.0, abs=1e-9)
    return 0.5 * sum(abs(one.get(key, 0) - other.get(key, 0)) for key in {*one, *other})


def _bound(law: Law) -> float:
    return bound(np.array(list(law.values())), ROWS)


def _take_steps(
    target: Table,
    draft: Table,
    sampling: SamplingConfig,
    rule: AcceptanceRule,
    block: bool = False,
    token_ids: Sequence[int] | None = None,
    **options: str,
) -> Law:
    """Draft and verify ``ROWS`` chains; returns the empirical law.

    With ``token_ids``, the draft's vocabulary consists of these tokens.
    """
    random = first_numbers(1, ROWS)
    selects = options.get("selection") == "sample"
    uniform = rule.needs_uniform
    sampler = Sampler(sampling, draw_from_draft=selects, draw_uniform=uniform, block=block)
    config = TreeConfig(total_tokens=LENGTH + 1, depth=LENGTH - 1, top_k=1)
    known = None if token_ids is None else torch.tensor(token_ids)
    size = VOCAB_SIZE if known is None else len(known)
    builder = TreeBuilder(config, size, "cpu", known, sampler.draw_draft)

    def at(table: Table, tokens: Sequence[Tensor]) -> Tensor:
        """``[ROWS, V]`` logits after the tokens of every row."""
        values = torch.tensor(np.stack([table[item] for item in _contexts(len(tokens))]))
        index = torch.zeros(ROWS, dtype=torch.long)
        for token in tokens:
            index = index * VOCAB_SIZE + token
        return values[index].float()

    def draft_at(tokens: Sequence[Tensor]) -> Tensor:
        logits = at(draft, tokens)
        return (logits if known is None else logits[:, known]).log_softmax(-1)

    chain: list[Tensor] = []
    builder.start(draft_at(chain), random.in_step(Purpose.CHAIN, LENGTH))
    for _ in range(LENGTH - 1):
        tokens, _ = builder.choose()
        chain.append(tokens[:, 0])
        builder.extend(draft_at(chain)[:, None])
    tree = builder.finish(torch.zeros(ROWS, dtype=torch.long))
    assert tree.sampled
    assert (tree.parents == torch.tensor([0, 0, 1, 2])).all()
    drafted = list(tree.tokens[:, 1:].unbind(1))
    logits = torch.stack([at(target, drafted[:step]) for step in range(LENGTH + 1)], 1)
    kept = verify(sampler(tree, logits, random), rule, AcceptanceConfig(**options))
    rows = zip(kept.tokens.tolist(), kept.count.tolist(), strict=True)
    counts = Counter(tuple(tokens[:count]) for tokens, count in rows)
    return {tokens: count / ROWS for tokens, count in counts.items()}


@pytest.mark.parametrize(
    ("seed", "noise", "temperature", "top_k", "token_ids"),
    [
        (8, 1.5, 1.0, 0, None),
        (5, 1.5, 0.7, 2, None),
        (8, 1.0, 1.0, 0, [2, 0]),  # the draft knows two of the three tokens
    ],
)
def test_both_verifications_have_the_law_of_their_algorithm_and_are_lossless(
    seed: int, noise: float, temperature: float, top_k: int, token_ids: list[int] | None
) -> None:
    """50 000 steps each; the laws of the two algorithms differ by at least twice the bound."""
    target, draft = _logits(seed, noise)
    p, q = _probs(target, temperature, top_k), _probs(draft, temperature, top_k, token_ids)
    sampling = SamplingConfig(temperature=temperature, top_k=top_k)
    laws = {}
    for block, algorithm in ((False, _one_by_one), (True, _as_block)):
        law = laws[block] = _enumerate(q, lambda chain, a=algorithm: a(p, q, chain))
        assert _distance(_completed(law, p), _target_law(p)) < 1e-12
        found = _take_steps(target, draft, sampling, ExactRule(), block, token_ids)
        assert _distance(found, law) < _bound(law)
    if token_ids is None:
        assert _distance(laws[False], laws[True]) > 2 * _bound(laws[True])
        assert _mean_kept(laws[True]) > _mean_kept(laws[False])


def _verify_chain(
    verify_chain: VerifyChain, log_p: Tensor, log_q: Tensor, drafted: Tensor, generator: Generator
) -> Tensor:
    """Verify chains given by log-probabilities at every node but the last."""
    rows, nodes = drafted.shape
    uniform = torch.rand(2, rows, nodes + 1, dtype=torch.float64, generator=generator)
    target = Distributions.normalized(torch.cat([log_p, log_p[:, -1:]], 1))
    draft = Distributions.normalized(log_q)
    return verify_chain(SampledChain(target, draft, None, drafted, uniform))


@pytest.mark.parametrize("verify_chain", [verify_tokens, verify_block])
def test_equal_and_broken_distributions(verify_chain: VerifyChain) -> None:
    """Equal ones keep everything; where the draft's are NaN, the target is sampled."""
    generator = torch.Generator().manual_seed(3)
    log_p = torch.randn(1000, 5, 7, generator=generator).log_softmax(-1)
    drafted = torch.distributions.Categorical(logits=log_p).sample()
    found = _verify_chain(verify_chain, log_p, log_p, drafted, generator)
    assert torch.equal(found, drafted)
    log_p = torch.tensor([0.5, 0.5, 0.0]).log().expand(1000, 2, 3)
    log_q = torch.full_like(log_p, torch.nan)
    found = _verify_chain(verify_chain, log_p, log_q, torch.full((1000, 2), 2), generator)
    assert found.unique().tolist() == [0, 1]


# -- FSD on a chain --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("divergence", "fallback", "selection"),
    [
        ("js", "exact", "longest"),
        ("js", "stop", "sample"),
        ("js_reference", "stop", "target"),
        ("kl", "exact", "sample"),
        ("kl", "stop", "longest"),
    ],
)
def test_fuzzy_chain_has_the_law_of_the_algorithm(
    divergence: str, fallback: str, selection: str
) -> None:
    """Tokens are kept while the divergence is below ``T``; then the target's token ends a step."""
    target, draft = _logits(5, 1.0)
    p, q = _probs(target, 1.0, 0), _probs(draft, 1.0, 0)
    contexts = [context for context in q if len(context) < LENGTH]
    values = {
        context: DIVERGENCES[divergence](*(torch.tensor(item[context]).log() for item in (p, q)))
        for context in contexts
    }
    threshold = float(np.median(list(values.values())))
    open_ = {context for context in contexts if values[context] < threshold}
    assert 0 < len(open_) < len(contexts)
    law = _enumerate(q, lambda chain: _one_by_one(p, q, chain, open_, fallback == "stop"))
    rule = FuzzyRule(threshold, divergence)
    options = {"fallback": fallback, "selection": selection}
    found = _take_steps(target, draft, SamplingConfig(temperature=1.0), rule, **options)
    assert _distance(found, law) < _bound(law)
    for other in ({}, open_):  # another rule, and another fallback
        wrong = _enumerate(
            q, lambda chain, o=other: _one_by_one(p, q, chain, o, fallback == "exact")
        )
        assert _distance(found, wrong) > 2 * _bound(wrong)


@pytest.mark.parametrize(
    ("rule", "token_ids"),
    [(TargetRule(acc=0.5), None), (BudgetRule(0.1), None), (BudgetRule(0.1), [2, 0])],
)
def test_raised_probabilities_are_verified_like_the_targets(
    rule: DrawnRule, token_ids: list[int] | None
) -> None:
    """A token sampled from ``q`` is kept with the probability ``min(1, raised / q)``."""
    target, draft = _logits(5, 1.0)
    p, q = _probs(target, 1.0, 0), _probs(draft, 1.0, 0, token_ids)

    def raised(value: float) -> float:
        return float(rule.raised(torch.tensor(value)))

    sampling = SamplingConfig(temperature=1.0)
    found = _take_steps(target, draft, sampling, rule, token_ids=token_ids)
    law = _enumerate(q, partial(_one_by_one, p, q, raised=raised))
    wrong = _enumerate(q, partial(_one_by_one, p, q))
    assert _distance(found, law) < _bound(law)
    assert _distance(found, wrong) > 2 * _bound(wrong)
