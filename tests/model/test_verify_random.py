"""Verification of random trees: against a slow reference, and properties that always hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rules import DISABLED, RULES, WRAPPED
from torch import Tensor
from trees import (
    ALWAYS,
    EXACT,
    FUZZY,
    TARGET,
    VOCAB_SIZE,
    dense,
    depths_of,
    first_numbers,
    make_tree,
    outcome,
)

from eagle_fsd.model.acceptance import ExactRule, FuzzyRule, LimitedRule, TopKRule, TypicalRule
from eagle_fsd.model.config import AcceptanceConfig, SamplingConfig
from eagle_fsd.model.sampling import Sampler
from eagle_fsd.model.tree import DraftTree
from eagle_fsd.model.verify import WHOLE_PATHS, AcceptanceRule, Origin, VerificationInputs, verify
from eagle_fsd.model.vocabulary import Distributions

TREE_FIELDS = [
    field.name
    for field in fields(DraftTree)
    if field.name not in ("max_depth", "token_ids", "sampled")
]
#: Distributions of the inputs.
LAWS = ("raw", "processed", "warped", "warped_draft")


@dataclass(frozen=True)
class Case:
    """A batch of random trees of one size with random models, drawn from one seed."""

    inputs: VerificationInputs
    seed: int

    @property
    def tree(self) -> DraftTree:
        return self.inputs.tree


def _random_row(random: np.random.Generator, size: int, max_depth: int) -> VerificationInputs:
    """One row: a level-ordered tree, a draft more or less close to the target, some masks."""
    while True:
        parents = [0] + [int(random.integers(max(0, i - 5), i)) for i in range(1, size)]
        parents = _level_ordered(parents)
        if max(depths_of(parents)) <= max_depth and np.bincount(parents[1:] or [0]).max() <= 5:
            break
    tokens = [int(random.integers(VOCAB_SIZE))] + [0] * (size - 1)
    for node in range(size):
        children = [child for child in range(1, size) if parents[child] == node]
        for child, token in zip(children, random.permutation(VOCAB_SIZE), strict=False):
            tokens[child] = int(token)

    logits = torch.tensor(random.normal(0, 1.5, (1, size, VOCAB_SIZE)), dtype=torch.float32)
    inner = sorted(set(parents[1:]))
    extra = [node for node in range(size) if node not in inner and random.random() < 0.3]
    expanded = sorted([*inner, *extra])
    noise = random.normal(0, 1, (len(expanded), VOCAB_SIZE)) * random.choice([0.0, 0.5, 1.5])
    q = torch.tensor(noise, dtype=torch.float32).reshape(-1, VOCAB_SIZE)
    q = (logits[0, expanded] + q).softmax(-1)
    tree = make_tree(parents, tokens, dict(zip(expanded, q.tolist(), strict=True)), max_depth)

    raw = logits.log_softmax(-1)
    processed = raw.masked_fill(torch.tensor(random.random(raw.shape) < 0.1), -torch.inf)
    processed[..., 0] = raw[..., 0]  # never mask everything
    processed = processed.log_softmax(-1)
    hidden = torch.tensor(random.random(raw.shape) < 0.1)
    hidden[..., 0] = False
    warped = (processed / 0.8).masked_fill(hidden, -torch.inf).log_softmax(-1)

    def choices(weights: Tensor) -> list[int]:
        """A token of positive weight at each node, often one that a child carries."""
        found = []
        for node in range(size):
            children = [tokens[child] for child in range(1, size) if parents[child] == node]
            allowed = [t for t in range(VOCAB_SIZE) if weights[node, t] > 0]
            drafted = [token for token in children if token in allowed]
            pool = drafted if drafted and random.random() < 0.6 else allowed
            found.append(int(random.choice(pool)))
        return found

    draft = tree.draft_log_probs
    return VerificationInputs(
        tree,
        *map(Distributions.of, (raw, processed, warped)),
        Distributions.of((draft / 0.8).log_softmax(-1)),
        torch.tensor([choices(warped[0].exp())]),
        torch.tensor([choices(torch.ones(size, VOCAB_SIZE))]),
    )


def _level_ordered(parents: list[int]) -> list[int]:
    """The same tree with its nodes renumbered level by level."""
    depths = depths_of(parents)
    order = sorted(range(len(parents)), key=lambda node: (depths[node], node))
    place = {node: index for index, node in enumerate(order)}
    return [place[parents[node]] for node in order]


def _stack(rows: Sequence[VerificationInputs]) -> VerificationInputs:
    """Rows of one size as one batch. Unused draft rows are NaN; they must not be read."""
    most = max(row.tree.draft_log_probs.shape[1] for row in rows)

    def join(name: str, objects: Sequence[object]) -> Tensor:
        values = [getattr(item, name) for item in objects]
        if name in LAWS:
            values = [dense(value) for value in values]
        if name in ("draft_log_probs", "warped_draft"):
            values = [
                torch.cat([v, v.new_full((1, most - v.shape[1], VOCAB_SIZE), torch.nan)], 1)
                for v in values
            ]
        return torch.cat(values)

    trees = [row.tree for row in rows]
    tree = DraftTree(
        **{name: join(name, trees) for name in TREE_FIELDS}, max_depth=trees[0].max_depth
    )
    laws = {name: Distributions.of(join(name, rows)) for name in LAWS}
    drawn = {name: join(name, rows) for name in ("sampled", "drawn")}
    return VerificationInputs(tree, **laws, **drawn)


def _case(seed: int, size: int, batch: int) -> Case:
    random = np.random.default_rng(seed)
    rows = [_random_row(random, size, max_depth=min(size, 5)) for _ in range(batch)]
    return Case(_stack(rows), seed)


cases = st.builds(_case, st.integers(0, 2**32 - 1), st.integers(1, 14), st.integers(1, 3))
thresholds = st.floats(0.0, 0.75) | st.sampled_from([0.0, 0.05, 0.2, ALWAYS])
ratios = st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0])
fallbacks = st.sampled_from(["exact", "stop"])
selections = st.sampled_from(["longest", "priced", "target", "sample"])
prices = st.sampled_from([0.0, 0.3, 1.0, 4.0])
distributions = st.sampled_from(["raw", "warped"])


def _js(log_p: Tensor, log_q: Tensor) -> float:
    """Jensen-Shannon divergence in Python floats."""
    total = 0.0
    for a, b in zip(log_p.double().exp().tolist(), log_q.double().exp().tolist(), strict=True):
        for x in (a, b):
            if x > 0:
                total += 0.5 * x * math.log(x / ((a + b) / 2))
    return total


def _reference(
    inputs: VerificationInputs,
    row: int,
    rule: FuzzyRule,
    fallback: str,
    selection: str,
    price: float,
) -> tuple[list[int], list[Origin], list[int]]:
    """Verification of one row with loops over nodes."""
    tree = inputs.tree
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    sampled, drawn = inputs.sampled[row].tolist(), inputs.drawn[row].tolist()
    log_p, warped = dense(inputs.processed)[row].tolist(), dense(inputs.warped)[row].tolist()
    children = {
        node: {tokens[c]: c for c in range(1, tree.size) if parents[c] == node}
        for node in range(tree.size)
    }

    def is_open(node: int) -> bool:
        index = tree.draft_rows[row, node].item()
        if index < 0 or not children[node]:
            return False
        on_warped = rule.divergence_on == "warped"
        p = (dense(inputs.warped) if on_warped else dense(inputs.raw))[row, node]
        q = (dense(inputs.warped_draft) if on_warped else tree.draft_log_probs)[row, index]
        divergence = _js(p, q)
        assume(abs(divergence - rule.threshold) > 1e-6)  # float32 may round across the threshold
        return divergence < rule.threshold

    def may_be_fuzzy(node: int, token: int) -> bool:
        if warped[node][token] == -math.inf:
            return False
        floor = rule.min_ratio * max(map(math.exp, log_p[node]))
        return math.exp(log_p[node][token]) >= floor * (1 - 1e-6)

    def longest_accepts(node: int, token: int) -> bool:
        if is_open(node) and may_be_fuzzy(node, token):
            return True
        return token == sampled[node] and (fallback == "exact" or is_open(node))

    def choice(node: int) -> int:
        """The only token that ``target`` and ``sample`` emit at ``node``."""
        if not is_open(node):
            return sampled[node]
        if selection == "sample":
            return drawn[node] if may_be_fuzzy(node, drawn[node]) else sampled[node]
        if sampled[node] in children[node]:
            return sampled[node]
        fuzzy = [token for token in children[node] if may_be_fuzzy(node, token)]
        return max(fuzzy, key=lambda token: log_p[node][token], default=sampled[node])

    if selection in ("longest", "priced"):
        best = (0.0, 0.0, 0)
        paths = {0: ([0], 0.0, 0.0)}
        for node in range(1, tree.size):
            above, row_log_p = paths.get(parents[node]), log_p[parents[node]]
            if above is None or not longest_accepts(parents[node], tokens[node]):
                continue
            score, cost = above[1] + row_log_p[tokens[node]], above[2]
            if tokens[node] != sampled[parents[node]]:
                cost += max(row_log_p) - row_log_p[tokens[node]]
            paths[node] = ([*above[0], node], score, cost)
            value = len(above[0]) - (price * cost if selection == "priced" else 0.0)
            assume(value == best[0] or abs(value - best[0]) > 1e-5)
            best = max(best, (value, score, node))
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


@given(cases, thresholds, ratios, fallbacks, selections, distributions, prices)
def test_verification_agrees_with_slow_reference(
    case: Case,
    threshold: float,
    ratio: float,
    fallback: str,
    selection: str,
    distribution: str,
    price: float,
) -> None:
    """Tokens, origins and nodes of every row, each by itself, for every option."""
    rule, inputs = FuzzyRule(threshold, "js", ratio, distribution), case.inputs
    options = AcceptanceConfig(fallback=fallback, selection=selection, price=price)
    kept = verify(inputs, rule, options)
    warped = dense(inputs.warped)
    for row in range(case.tree.tokens.shape[0]):
        found = outcome(kept, row)
        assert found == _reference(inputs, row, rule, fallback, selection, price)
        for token, _, node in zip(*found, strict=True):
            assert warped[row, node, token] > -math.inf


@settings(max_examples=60)
@given(cases, st.lists(st.floats(0.0, 0.8), min_size=2, max_size=4), ratios, fallbacks)
def test_accepted_length_is_monotonic_in_the_threshold(
    case: Case, levels: list[float], ratio: float, fallback: str
) -> None:
    """On fixed logits and samples a larger ``T`` only adds accepted edges."""
    before, options = None, AcceptanceConfig(fallback=fallback)
    for threshold in [0.0, *sorted(levels), ALWAYS]:
        kept = verify(case.inputs, FuzzyRule(threshold, min_ratio=ratio), options)
        if before is not None:
            assert (kept.count >= before.count).all()
            assert (kept.accepted | ~before.accepted).all()
        before = kept


@given(cases, thresholds, ratios, fallbacks, st.none() | prices)
def test_bonus_token_is_the_target_sample_and_not_an_accepted_child(
    case: Case, threshold: float, ratio: float, fallback: str, price: float | None
) -> None:
    """A priced path may end where a fuzzy child was accepted: it was too expensive."""
    tree = case.tree
    rule = FuzzyRule(threshold, min_ratio=ratio)
    selection = "longest" if price is None else "priced"
    options = AcceptanceConfig(fallback=fallback, selection=selection, price=price or 0.0)
    kept = verify(case.inputs, rule, options)
    for row in range(tree.tokens.shape[0]):
        tokens, origins, path = outcome(kept, row)
        children = (tree.parents[row] == path[-1]).nonzero().flatten().tolist()
        accepted = [child for child in children if child and kept.accepted[row, child]]
        assert not accepted or price
        assert tokens[-1] not in [tree.tokens[row, child].item() for child in accepted]
        assert tokens[-1] == case.inputs.sampled[row, path[-1]]
        assert origins[-1] == TARGET
        if fallback == "exact":
            carried = [tree.tokens[row, child].item() for child in children if child]
            assert tokens[-1] not in carried


def _for_rule(case: Case, rule: AcceptanceRule, greedy: bool) -> VerificationInputs:
    """The inputs with everything that a rule may read; the prompt of every row is token 1."""
    inputs = case.inputs
    prompts = [torch.tensor([1])] * inputs.sampled.shape[0]
    uniform = torch.rand(inputs.sampled.shape, generator=torch.Generator().manual_seed(case.seed))
    processed = Distributions.of(dense(inputs.processed) + 5.0)  # a rule may read the logits
    sampled, warped = inputs.sampled, inputs.warped
    if greedy:  # top-k and top-p do not apply
        sampled, warped = processed.logits.argmax(-1), processed
    return replace(
        inputs,
        sampled=sampled,
        processed=processed,
        warped=warped,
        uniform=None if greedy else uniform,
        state=rule.start(prompts),
    )


@given(
    cases,
    st.sampled_from([*RULES, *WRAPPED]),
    st.booleans(),
    st.sampled_from(["longest", "priced"]),
)
def test_rules_emit_nothing_outside_the_support(
    case: Case, rule: AcceptanceRule, greedy: bool, selection: str
) -> None:
    """Accepted or not: no drafted token is kept, and no bonus token emitted, that is masked."""
    inputs = _for_rule(case, rule, greedy)
    kept = verify(inputs, rule, AcceptanceConfig(selection=selection, price=0.5))
    parents, tokens = case.tree.parents, case.tree.tokens
    supported = inputs.supported(parents, tokens)
    supported[:, 0] = True
    assert (supported | ~kept.accepted).all()
    emitted = inputs.supported(kept.path, kept.tokens)
    assert (emitted | (kept.origins == Origin.PADDING)).all()


@given(cases, st.sampled_from(DISABLED), st.booleans(), selections)
def test_disabled_rules_are_exact(
    case: Case, rule: AcceptanceRule, greedy: bool, selection: str
) -> None:
    """They emit the target's samples."""
    inputs = _for_rule(case, rule, greedy or isinstance(rule, TopKRule))
    if rule.judges_paths and selection not in WHOLE_PATHS:
        selection = "longest"
    kept = verify(inputs, rule, AcceptanceConfig(selection=selection))
    exact = verify(inputs, ExactRule())
    for name in ("tokens", "origins", "count", "path"):
        assert torch.equal(getattr(kept, name), getattr(exact, name))
    for row in range(len(kept.tokens)):
        tokens, origins, path = outcome(kept, row)
        assert tokens == inputs.sampled[row, path].tolist()
        assert FUZZY not in origins


@given(cases, st.floats(0.0, 6.0), st.floats(0.0, 6.0), st.booleans(), prices)
def test_limited_rule_stays_within_the_budget(
    case: Case, limit: float, spent: float, greedy: bool, price: float
) -> None:
    """What a step spends is added to the state, and the sum never exceeds the limit."""
    rule = LimitedRule(FuzzyRule(ALWAYS), limit)
    inputs = _for_rule(case, rule, greedy)
    inputs.state = torch.full_like(inputs.state, spent)
    kept = verify(inputs, rule, AcceptanceConfig(selection="priced", price=price))
    log_p = dense(inputs.processed)
    for row, after in enumerate(rule.advance(inputs, kept)[:, 0].tolist()):
        tokens, origins, path = outcome(kept, row)
        cost = sum(
            (log_p[row, node].max() - log_p[row, node, token]).item()
            for node, token, origin in zip(path, tokens, origins, strict=True)
            if origin == FUZZY
        )
        assert math.isclose(after, spent + cost, rel_tol=1e-5, abs_tol=1e-5)
        assert cost <= max(0.0, limit - spent) + 1e-5


broken = st.sampled_from([math.nan, math.inf, -math.inf, 3e38, 0.0])


@settings(max_examples=60)
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
def test_broken_logits_give_valid_indices(
    case: Case,
    values: list[float],
    temperature: float,
    where: str,
    everywhere: bool,
    threshold: float,
    fallback: str,
    selection: str,
) -> None:
    """NaN and infinities in either model's logits."""
    random = np.random.default_rng(case.seed)

    def damaged(clean: Tensor) -> Tensor:
        hit = torch.tensor(random.random(clean.shape) < (1.1 if everywhere else 0.2))
        bad = torch.tensor(random.choice(values, clean.shape), dtype=torch.float32)
        return torch.where(hit, bad, clean)

    tree, logits = case.tree, dense(case.inputs.raw)
    if where != "q":
        logits = damaged(logits)
    if where != "p":
        tree = replace(tree, draft_log_probs=damaged(tree.draft_log_probs))
    sampler = Sampler(
        SamplingConfig(temperature=temperature),
        draw_from_draft=selection == "sample",
    )
    random_numbers = first_numbers(0, len(logits))
    options = AcceptanceConfig(fallback=fallback, selection=selection)
    for rule in (ExactRule(), FuzzyRule(threshold), TypicalRule()):
        kept = verify(sampler(tree, logits, random_numbers), rule, options)
        assert (kept.tokens >= 0).all()
        assert (kept.tokens < VOCAB_SIZE).all()
        assert (kept.count >= 1).all()
        assert (kept.count <= tree.max_depth + 1).all()
        assert (kept.path >= 0).all()
        assert (kept.path < tree.size).all()
