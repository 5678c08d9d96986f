"""Verification of random trees: against a slow reference, and what holds for all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from evidence import (
    ANY,
    EXACT,
    FUZZY,
    TARGET,
    VOCABULARY,
    depths_of,
    make_tree,
    outcome,
)
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from eagle_fsd.model.acceptance import ExactRule, FuzzyRule, TypicalRule, rule_for
from eagle_fsd.model.config import FSDSettings
from eagle_fsd.model.sampling import Sampler
from eagle_fsd.model.tree import DraftTree
from eagle_fsd.model.verify import Evidence, Origin, verify


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
        if max(depths_of(parents)) <= max_depth and np.bincount(parents[1:] or [0]).max() <= 5:
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
    tree = make_tree(parents, tokens, dict(zip(expanded, q.tolist(), strict=True)), max_depth)

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
    depths = depths_of(parents)
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
    rest = [f.name for f in fields(Evidence) if f.name not in ("tree", "uniform")]
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
    """Verification as loops over the nodes of one row, one step after another."""
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
        assert outcome(kept, row) == expected


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
        assert outcome(alone) == outcome(together, row)
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
    rest = [f.name for f in fields(Evidence) if f.name not in ("tree", "uniform")]
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
            tokens, origins, path = outcome(kept, row)
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
        tokens, _, path = outcome(kept, row)
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
        tokens, origins, path = outcome(kept, row)
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
