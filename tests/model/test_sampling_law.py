"""The distribution of the emitted tokens, against exact distributions; see ``sampling_laws.py``.

The docstring of each test states the measured ``TV`` (torch 2.13.0, CPU) next to the bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from pairs import RecordingRule, small_vocabulary_config
from sampling_laws import (
    MODES,
    PROMPT,
    Array,
    assert_target_law,
    bound,
    distance,
    generate,
    histogram,
    softmax,
    target_law,
    warp,
)
from torch import Tensor
from transformers import LlamaForCausalLM
from trees import dense, make_tree

from eagle_fsd.model.acceptance import ExactRule, FuzzyRule, TypicalRule
from eagle_fsd.model.config import AcceptanceConfig, SamplingConfig, TreeConfig
from eagle_fsd.model.drafters.eagle import EagleHead
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.model.random_numbers import RandomNumbers, seed_keys
from eagle_fsd.model.sampling import Sampler
from eagle_fsd.model.tree import DraftTree
from eagle_fsd.model.verify import AcceptanceRule, Origin, VerificationInputs, verify


def _js(p: Array, q: Array) -> float:
    middle = (p + q) / 2
    return sum(0.5 * float((x[x > 0] * np.log(x[x > 0] / middle[x > 0])).sum()) for x in (p, q))


# -- many identical rows through Sampler and verify ------------------------------------------------

VOCAB_SIZE = 6
#: The root, three of its six children, and some grandchildren.
PARENTS = [0, 0, 0, 0, 1, 1, 1, 2]
TOKENS = [5, 0, 1, 3, 1, 2, 5, 0]
#: The expanded nodes: all with children, and leaf 3.
EXPANDED = [0, 1, 2, 3]


@dataclass(frozen=True)
class Models:
    """A target and a draft for two tokens.

    ``p`` and ``q`` are ``[1 + V, V]`` logits, after the root and after each first token.
    """

    p: Array
    q: Array

    @classmethod
    def make(cls, seed: int, noise: float) -> Models:
        """Draw logits; ``noise`` is the distance of the draft from the target."""
        random = np.random.default_rng(seed)
        p = random.normal(0, 1, (1 + VOCAB_SIZE, VOCAB_SIZE))
        scale = noise * random.uniform(0.3, 1.7, (1 + VOCAB_SIZE, 1))
        return cls(p, p + scale * random.normal(0, 1, p.shape))


def _node_logits(table: Array) -> Array:
    """``[N, V]`` logits of the nodes; zeros after a second token, where they do not matter."""
    logits = np.zeros((len(PARENTS), VOCAB_SIZE))
    logits[0] = table[0]
    for node, (parent, token) in enumerate(zip(PARENTS, TOKENS, strict=True)):
        if node and parent == 0:
            logits[node] = table[1 + token]
    return logits


def _rows(models: Models, count: int) -> tuple[DraftTree, Tensor]:
    """``count`` identical rows: the tree, and the target's logits ``[count, N, V]``."""
    draft = torch.tensor(_node_logits(models.q)).softmax(-1).tolist()
    tree = make_tree(PARENTS, TOKENS, {node: draft[node] for node in EXPANDED})
    logits = torch.tensor(_node_logits(models.p)).float()
    return tree.of_rows(torch.zeros(count, dtype=torch.long)), logits.expand(count, -1, -1)


def _first_two(
    models: Models,
    rule: AcceptanceRule,
    rows: int,
    seed: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    chunk: int = 50_000,
    **options: str,
) -> Iterator[Array]:
    """Yield counts ``[V, V]`` of the first two emitted tokens, for each ``chunk`` of ``rows``.

    After a step that emits one token, the second is sampled from the target directly.
    """
    generator = torch.Generator().manual_seed(seed)
    sampler = Sampler(
        SamplingConfig(temperature=temperature, top_p=top_p),
        draw_from_draft=options.get("selection") == "sample",
    )
    keys = seed_keys(seed, rows).split(chunk)
    after = torch.tensor(np.stack([warp(logits, temperature, top_p) for logits in models.p[1:]]))
    tree, logits = _rows(models, chunk)
    acceptance = AcceptanceConfig(**options)
    for part in keys:
        random = RandomNumbers(part, torch.zeros(chunk, dtype=torch.long))
        kept = verify(sampler(tree, logits, random), rule, acceptance)
        first, second = kept.tokens[:, 0], kept.tokens[:, 1]
        direct = torch.multinomial(after[first], 1, generator=generator)[:, 0]
        second = torch.where(kept.count > 1, second, direct)
        counts = torch.bincount(first * VOCAB_SIZE + second, minlength=VOCAB_SIZE**2)
        yield counts.reshape(VOCAB_SIZE, VOCAB_SIZE).numpy().astype(float)


def _fsd_law(
    models: Models,
    threshold: float,
    temperature: float,
    top_p: float,
    min_ratio: float = 0.0,
    fallback: str = "exact",
) -> Array:
    """``[V, V]``: the distribution of two tokens with ``selection="sample"``, enumerated.

    At an open node it is ``q`` on what the guards admit plus ``q``'s remaining mass times ``p``, at
    any other node ``p``. Outside the tree and after the end of a step the target is sampled.
    """

    def at(context: int) -> tuple[Array, bool]:
        raw_p, raw_q = softmax(models.p[context]), softmax(models.q[context])
        p = warp(models.p[context], temperature, top_p)
        if _js(raw_p, raw_q) >= threshold:
            return p, False
        q = warp(models.q[context], temperature, top_p)
        allowed = (p > 0) & (raw_p >= min_ratio * raw_p.max())
        return np.where(allowed, q, 0) + q[~allowed].sum() * p, True

    first, root_open = at(0)
    second = [warp(logits, temperature, top_p) for logits in models.p[1:]]
    for node in set(PARENTS[1:]) - {0}:  # nodes of the first level with children
        if root_open or fallback == "exact":
            second[TOKENS[node]] = at(1 + TOKENS[node])[0]
    return first[:, None] * np.stack(second)


@pytest.mark.parametrize(("temperature", "top_p"), MODES)
def test_exact_sampling_has_the_distribution_of_the_target(
    temperature: float, top_p: float
) -> None:
    """The first two tokens of 50,000 rows at ``T = 0`` follow the target's distribution."""
    models, rows = Models.make(seed=1, noise=0.5), 50_000
    law = _fsd_law(models, 0.0, temperature, top_p)
    counts = sum(_first_two(models, ExactRule(), rows, 7, temperature, top_p))
    assert distance(counts, law) < bound(law, rows)


@pytest.mark.slow
def test_distance_to_the_target_shrinks_with_the_number_of_rows() -> None:
    """A million rows, also cut into blocks of 1e5 and 1e4."""
    models = Models.make(seed=1, noise=0.5)
    law = _fsd_law(models, 0.0, *MODES[1])
    size = 10_000
    blocks = list(_first_two(models, ExactRule(), 100 * size, 7, *MODES[1], chunk=size))
    at_1e4 = [distance(counts, law) for counts in blocks]
    at_1e5 = [distance(sum(blocks[i : i + 10]), law) for i in range(0, 100, 10)]
    at_1e6 = distance(sum(blocks), law)
    assert max(at_1e4) < bound(law, size)
    assert max(at_1e5) < bound(law, 10 * size)
    assert at_1e6 < bound(law, 100 * size)
    assert 2.1 < np.mean(at_1e4) / np.mean(at_1e5) < 4.75
    assert 4 < np.mean(at_1e4) / at_1e6 < 30


def test_relaxed_rule_is_far_from_the_distribution_of_the_target() -> None:
    """A control: the same comparison detects another distribution."""
    models = Models.make(seed=1, noise=1.0)
    law = _fsd_law(models, 0.0, 1.0, 1.0)
    for rule in (FuzzyRule(0.06), FuzzyRule(math.inf), TypicalRule()):
        counts = sum(_first_two(models, rule, 10_000, 9, chunk=10_000))
        assert distance(counts, law) > 5 * bound(law, 10_000)


#: Seed, threshold, and whether the gate is open at the root.
MIXED = (1, 0.06, True)  # open: root (.02), after token 1 (.03); closed: after token 0 (.11)
CLOSED_ROOT = (0, 0.04, False)  # closed: root (.13), after token 1 (.06); open: after token 0 (.01)
ALL_OPEN = (1, math.inf, True)


@pytest.mark.parametrize(
    ("seed", "threshold", "root_open", "temperature", "top_p", "min_ratio", "fallback"),
    [
        (*MIXED, 1.0, 1.0, 0.4, "exact"),
        (*MIXED, 0.7, 0.9, 0.5, "stop"),
        (*CLOSED_ROOT, 1.0, 1.0, 0.0, "exact"),
        (*CLOSED_ROOT, 0.7, 0.9, 0.5, "stop"),
        (*ALL_OPEN, 0.7, 0.9, 0.0, "exact"),
    ],
)
def test_sample_selection_has_the_enumerated_distribution(
    seed: int,
    threshold: float,
    root_open: bool,
    temperature: float,
    top_p: float,
    min_ratio: float,
    fallback: str,
) -> None:
    """Gates open and closed at the root and below it, both guards, and both fallbacks."""
    rows = 50_000
    models = Models.make(seed, noise=1.0)
    assert (_js(softmax(models.p[0]), softmax(models.q[0])) < threshold) is root_open
    law = _fsd_law(models, threshold, temperature, top_p, min_ratio, fallback)
    rule = FuzzyRule(threshold, min_ratio=min_ratio)
    options = {"fallback": fallback, "selection": "sample"}
    counts = sum(_first_two(models, rule, rows, 10, temperature, top_p, **options))
    assert distance(counts, law) < bound(law, rows)
    assert not counts[law == 0].any()
    if root_open:
        exact = _fsd_law(models, 0.0, temperature, top_p)
        assert distance(counts, exact) > 2 * bound(exact, rows)


# -- end to end: a tiny Llama with an untrained head -----------------------------------------------

TINY = 8


@pytest.fixture(scope="module")
def pair() -> EagleFSD:
    """Two layers and a vocabulary of 8, with weights large enough for contexts to matter."""
    config = small_vocabulary_config(TINY, initializer_range=0.3)
    with torch.random.fork_rng():
        torch.manual_seed(10)
        model = LlamaForCausalLM(config)
        head = EagleHead(config)
    return EagleFSD(model, head, TreeConfig(total_tokens=9, depth=2, top_k=3))


@pytest.mark.parametrize(("temperature", "top_p"), MODES)
def test_generate_at_threshold_zero_has_the_distribution_of_the_target(
    pair: EagleFSD, temperature: float, top_p: float
) -> None:
    """3000 identical prompts and three new tokens, some of them from a second step."""
    draws = generate(pair, 3000, 3, seed=1, temperature=temperature, top_p=top_p)
    assert_target_law(draws, target_law(pair.model, 3, temperature, top_p))


def _step_law(inputs: VerificationInputs, threshold: float) -> Array:
    """``[V, V + 1]``: the distribution of the first two tokens of a step, ``selection="sample"``.

    Column ``V`` means that the step ended after one token. Enumerated from row 0 of ``inputs``.
    """
    tree = inputs.tree
    parents, tokens = tree.parents[0].tolist(), tree.tokens[0].tolist()

    def at(node: int) -> Array:
        raw = dense(inputs.raw)[0, node].double().exp().numpy()
        p = dense(inputs.warped)[0, node].double().exp().numpy()
        row = tree.draft_rows[0, node].item()
        if row < 0 or node not in parents[1:]:
            return p
        raw_q = tree.draft_log_probs[0, row].double().exp().numpy()
        if _js(raw, raw_q) >= threshold:
            return p
        q = dense(inputs.warped_draft)[0, row].double().exp().numpy()
        return np.where(p > 0, q, 0) + q[p == 0].sum() * p

    law = np.zeros((TINY, TINY + 1))
    law[:, TINY] = at(0)
    for node in range(1, tree.size):
        if parents[node] == 0:
            token = tokens[node]
            law[token, :TINY] = law[token, TINY] * at(node)
            law[token, TINY] = 0
    return law / law.sum()


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "top_p"), MODES)
def test_generate_with_sample_selection_has_the_enumerated_distribution(
    pair: EagleFSD, temperature: float, top_p: float
) -> None:
    """The first step of 6000 prompts; the gate is open at the root and at some nodes below."""
    acceptance = AcceptanceConfig(threshold=1.0, selection="sample")
    options = {"temperature": temperature, "top_p": top_p, "acceptance": acceptance}
    rule = RecordingRule()
    generate(pair, 1, 1, 0, rule=rule, **options)
    found = rule.divergences(rule.steps[0])[0]
    above = sorted(value for value in found[found.isfinite()].tolist() if value > found[0])
    assert len(above) >= 2, "pick another seed for the pair: its root must be among the closest"
    middle = len(above) // 2
    threshold = (above[middle - 1] + above[middle]) / 2

    rows, rule = 6000, RecordingRule(threshold)
    draws = generate(pair, rows, 2, 2, rule=rule, **options)
    tree = rule.steps[0].tree
    assert (tree.tokens == tree.tokens[:1]).all()
    law = _step_law(rule.steps[0], threshold)
    answers = draws.answers[:, :2].clone()
    ended = torch.tensor([row[0] == 1 for row in draws.accepted])
    answers[ended, 1] = TINY
    counts = histogram(answers, law.shape)
    assert distance(counts, law) < bound(law, rows)
    exact = _step_law(rule.steps[0], 0.0)
    assert distance(counts, exact) > 2 * bound(exact, rows)
    assert draws.count(Origin.FUZZY) > 0


@torch.no_grad()
@pytest.mark.parametrize("selection", ["longest", "target", "sample"])
def test_generate_never_emits_masked_tokens(pair: EagleFSD, selection: str) -> None:
    """``T = inf``, 100 prompts of 8 tokens: all are in the target's top-k or nucleus."""
    acceptance = AcceptanceConfig(threshold=math.inf, selection=selection)
    for top_k, top_p in ((2, 1.0), (0, 0.6)):
        options = {"temperature": 1.0, "top_k": top_k, "top_p": top_p, "acceptance": acceptance}
        draws = generate(pair, 100, 8, 3, **options)
        assert draws.count(Origin.FUZZY) > 0
        sequences = torch.cat([torch.tensor([PROMPT]).expand(100, -1), draws.answers], 1)
        probs = pair.model(sequences).logits.double().softmax(-1)[:, len(PROMPT) - 1 : -1]
        above = torch.where(probs > probs.gather(-1, draws.answers[:, :, None]), probs, 0.0)
        if top_k:
            assert ((above > 0).sum(-1) < top_k).all()
        else:
            assert (above.sum(-1) < top_p + 1e-4).all()
