"""Predict the speed of trees from the accepted lengths of a few and the time of a few steps.

Accepted lengths are recorded with a few trees, for all methods at once: answers are decoded
exactly, and at every step each method verifies the same tree (:class:`ObservingRule`), as if the
tokens before were the exact ones.

A recording with a deep tree predicts tau for every smaller depth. If a step emitted ``L`` tokens
and the tree in question emits at most ``m``, then

- on a chain, whose steps end where the target disagrees, the ``L`` tokens take ``ceil(L / m)``
  steps;
- on a bushy tree, whose steps often end where its nodes are used up, the step emits ``min(L, m)``
  tokens, and the next step is as long as any other.

Between recorded numbers of nodes, tau is interpolated on their logarithm.

A step over ``N`` nodes, drafted in ``D`` levels of ``K`` nodes, takes ``nodes(N) + draft(K) +
D * level(K)`` seconds: the target's pass with the rest of the step, and the drafter's passes. The
first term is measured for several ``N`` and interpolated, the others for every ``K`` with two
depths. The trees of all measured steps are full, except with draft models whose depth adapts, whose
costs are those of the trees that they draft. The n-gram drafters propose nothing in many steps,
which then cost as much as plain decoding, whatever ``N`` is, so :class:`FullTrees` takes their
place, and the predicted speed is for steps that always have something to verify.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eagle_fsd.evaluation.methods import EXACT, PLAIN, Method
from eagle_fsd.evaluation.processes import from_first
from eagle_fsd.evaluation.search.workload import Workload
from eagle_fsd.model.acceptance import ExactRule
from eagle_fsd.model.compilation import EAGER_STEPS, using_device
from eagle_fsd.model.config import TreeConfig
from eagle_fsd.model.drafters.ngram import MAX_FOLLOWERS, AdaptiveNGramDrafter
from eagle_fsd.model.identity import configuration, fingerprint, json_digest
from eagle_fsd.model.request import Decision
from eagle_fsd.model.verify import Verification, VerificationInputs, verify
from eagle_fsd.utils.files import append_line, read_jsonl, truncate_partial_line
from eagle_fsd.utils.progress import Progress

#: Prompts that accepted lengths are recorded on, all at once, and tokens of every answer.
RECORDED_PROMPTS, RECORDED_TOKENS = 16, 64


@dataclass(frozen=True)
class Lengths:
    """The tokens that each target pass of one method emitted, by tree."""

    recorded: dict[TreeConfig, Sequence[int]]

    def tau(self, tree: TreeConfig) -> float | None:
        """Predict the mean number of tokens that a target pass emits.

        None if the recordings do not cover the tree. A chain needs a recorded chain whose steps can
        emit at least as many tokens. A bushy tree needs recordings with the same ``top_k`` and at
        least as many levels (or as many as their nodes allow): one of at most and one of at least
        as many nodes.
        """
        if tree.top_k == 1:
            for recorded, lengths in self.recorded.items():
                if recorded.top_k == 1 and max_emitted(recorded) >= max_emitted(tree):
                    return _tau(lengths, tree)
            return None
        points = sorted(
            (recorded.total_tokens, _tau(lengths, tree))
            for recorded, lengths in self.recorded.items()
            if recorded.top_k == tree.top_k
            and recorded.depth >= min(tree.depth, recorded.total_tokens - 2)
        )
        nodes = tree.total_tokens
        if not points or not points[0][0] <= nodes <= points[-1][0]:
            return None
        sizes, taus = zip(*points, strict=True)
        return float(np.interp(math.log(nodes), np.log(sizes), taus))


def max_emitted(tree: TreeConfig) -> int:
    """Return the largest number of tokens that a step can emit: its deepest path and one more."""
    return min(tree.total_tokens, tree.depth + 2)


def capacity(tree: TreeConfig) -> int:
    """Return the nodes of a head's tree: ``total_tokens``, or fewer if depth or width limit it."""
    pool = 1 + (1 + tree.depth * tree.top_k) * tree.top_k
    return min(tree.total_tokens, pool)


def _tau(lengths: Sequence[int], tree: TreeConfig) -> float:
    """Return the mean number of tokens per step, given those of a deeper tree."""
    most = max_emitted(tree)
    if tree.top_k == 1:
        return sum(lengths) / max(1, sum(math.ceil(length / most) for length in lengths))
    return sum(min(length, most) for length in lengths) / max(1, len(lengths))


class ObservingRule(ExactRule):
    """Decode exactly, and record how many tokens other decisions would emit at every step.

    ``lengths`` are these numbers, by decision. A rule's state advances by all tokens that the rule
    would emit; those beyond the exact ones are decoded again in the next step, and count twice.
    """

    capturable = False  # the host reads the numbers of tokens

    def __init__(self, decisions: Sequence[Decision]) -> None:
        self.decisions, self.rules = decisions, [decision.rule for decision in decisions]
        self.lengths: list[list[int]] = [[] for _ in decisions]
        self.needs_uniform = any(rule.needs_uniform for rule in self.rules)
        self.needs_drawn = any(
            item.rule.needs_drawn or item.acceptance.selection == "sample" for item in decisions
        )

    @property
    def needs_warped_draft(self) -> bool:
        return any(rule.needs_warped_draft for rule in self.rules)

    @property
    def state_size(self) -> int:
        return sum(rule.state_size for rule in self.rules)

    def start(self, prompts: Sequence[Tensor]) -> Tensor:
        return torch.cat([rule.start(prompts) for rule in self.rules], 1)

    def advance(self, inputs: VerificationInputs, kept: Verification) -> Tensor:
        assert inputs.state is not None
        states = inputs.state.split([rule.state_size for rule in self.rules], 1)
        advanced = []
        for decision, state, lengths in zip(self.decisions, states, self.lengths, strict=True):
            own, rule = replace(inputs, state=state), decision.rule
            found = verify(own, rule, decision.acceptance)
            lengths += found.count.tolist()
            advanced.append(rule.advance(own, found))
        return torch.cat(advanced, 1)


class LengthRecorder:
    """Record the accepted lengths of methods, and keep them in a file, from which a run resumes.

    Each is recorded on the first tokens of the answers to the first prompts. ``digest`` is a hash
    of the pair, these prompts, the options of decoding and the methods.
    """

    def __init__(self, workload: Workload, methods: Sequence[Method], path: Path) -> None:
        tokens = min(RECORDED_TOKENS, workload.config.max_new_tokens)
        self.workload = replace(
            workload,
            prompts=workload.prompts[:RECORDED_PROMPTS],
            config=workload.config.updated(max_new_tokens=tokens),
        )
        self.methods, self.path = methods, path
        model = workload.model
        inputs = {
            "target": fingerprint(model.model),
            "drafter": fingerprint(model.drafter),
            "configurations": [configuration(item) for item in (model.model, model.drafter)],
            "prompts": [prompt.tolist() for prompt in self.workload.prompts],
            "config": self.workload.config.model_dump(),
            # Without the pair's own trees, which the recorded lengths do not depend on.
            "methods": [replace(method, tree=PLAIN_TREE).describe(model) for method in methods],
        }
        self.digest = json_digest(inputs)
        self._known: dict[str, list[list[int]]] = {}
        truncate_partial_line(path)
        if path.exists():
            self._known = {line["key"]: line["accepted"] for line in read_jsonl(path)}

    def record(self, tree: TreeConfig) -> list[list[int]]:
        """Return how many tokens each target pass with a tree emits: a list per method."""
        key = json_digest([self.digest, tree.model_dump()])
        if key not in self._known:
            pair = self.workload.pair()
            rule = ObservingRule([method.decision_for(pair) for method in self.methods])
            exact = replace(EXACT, rule=rule, tree=tree)
            self.workload.decode(pair, exact, 0, len(self.workload.prompts))
            self._known[key] = rule.lengths
            append_line(self.path, json.dumps({"key": key, "accepted": rule.lengths}))
        return self._known[key]


#: Children of each node, ``K``.
WIDTHS = (1, 2, 4, 8)
#: Nodes of the trees that show the cost of ``N``: all have one level of the largest width.
NODES = (4, 8, 16, 32, 48, 64)
#: Nodes of the trees that show the cost of a level, and their two depths.
LEVEL_NODES, DEPTHS = 16, (14, 46)
#: Seconds after which a measurement's first run ends, without the first step; later runs take as
#: many steps.
SECONDS = 0.05
#: Untimed repetitions of a measurement before it, by type of device. On CUDA, steps run eagerly and
#: are captured before they are replayed.
WARM_UPS = {"cuda": EAGER_STEPS + 1}
#: Maximum number of new tokens per prompt in a run.
MAX_TOKENS = 4096
#: Maximum number of rounds of measurements, and the seconds after which no further round starts.
#: The minimum is used, because other processes only add time.
ROUNDS, ROUNDS_SECONDS = 7, 60.0


class FullTrees(AdaptiveNGramDrafter):
    """An n-gram drafter that always fills its tree, with the same tokens after any context."""

    def followers(self, context: list[int]) -> list[tuple[int, int]]:
        """Return the first tokens of the vocabulary, with equal counts."""
        return [(token, 1) for token in range(min(MAX_FOLLOWERS, self.vocab_size))]


@dataclass(frozen=True)
class StepCosts:
    """Seconds of the parts of a step.

    ``nodes`` is that of a step with one level of the largest width, less that level, by the number
    of nodes; one node is plain decoding. ``level`` is that of each level, and ``draft`` what
    drafting takes besides, by the number of nodes per level.
    """

    nodes: Mapping[int, float]
    draft: Mapping[int, float]
    level: Mapping[int, float]

    @classmethod
    def fit(cls, plain: float, measured: Mapping[TreeConfig, float]) -> StepCosts:
        """Fit the costs to the seconds of plain steps and of those with :func:`measured_trees`."""
        low, high = DEPTHS
        spent = {(t.total_tokens, t.depth, t.top_k): seconds for t, seconds in measured.items()}
        level, draft = {}, {}
        for width in WIDTHS:
            rise = spent[LEVEL_NODES, high, width] - spent[LEVEL_NODES, low, width]
            level[width] = max(0.0, rise / (high - low))
        widest = WIDTHS[-1]
        nodes = {count: max(plain, spent[count, 1, widest] - level[widest]) for count in NODES}
        for width in WIDTHS:
            rest = spent[LEVEL_NODES, low, width] - low * level[width] - nodes[LEVEL_NODES]
            draft[width] = max(0.0, rest)
        return cls({1: plain, **nodes}, draft, level)

    def seconds(self, tree: TreeConfig) -> float:
        """Predict the seconds of a step.

        Costs are interpolated between measured node counts and widths. More nodes are extrapolated;
        wider trees are taken to cost as much as the widest of :data:`WIDTHS`.
        """
        sizes = sorted(self.nodes)
        count = capacity(tree)
        seconds = float(np.interp(count, sizes, [self.nodes[size] for size in sizes]))
        if count > sizes[-1]:
            last, before = sizes[-1], sizes[-2]
            slope = (self.nodes[last] - self.nodes[before]) / (last - before)
            seconds += max(0.0, slope) * (count - last)
        draft, level = (
            float(np.interp(tree.top_k, WIDTHS, [costs[width] for width in WIDTHS]))
            for costs in (self.draft, self.level)
        )
        return seconds + draft + tree.depth * level


def measured_trees() -> list[TreeConfig]:
    """Return the trees whose steps :func:`measure_costs` measures."""
    shapes = [(nodes, 1, WIDTHS[-1]) for nodes in NODES]
    return _trees([*shapes, *((LEVEL_NODES, depth, k) for k in WIDTHS for depth in DEPTHS)])


def measure_costs(workload: Workload, progress: Progress, rounds: int | None = None) -> StepCosts:
    """Measure the costs of a step, at the batch size of the workload.

    Every round measures all of them, so that changes in the machine's speed affect them alike.
    """
    rounds, begin = rounds or ROUNDS, time.perf_counter()
    target, trees = workload.model.target, measured_trees()
    methods = [PLAIN, *(replace(EXACT, tree=tree) for tree in trees)]
    seconds: list[list[float]] = [[] for _ in methods]
    for round_ in range(rounds):
        for at, method in enumerate(methods):
            seconds[at].append(step_seconds(workload, method, round_))
            progress(round_ * len(methods) + at + 1, rounds * len(methods))
        if from_first(target, lambda: time.perf_counter() - begin) > ROUNDS_SECONDS:
            break
    plain, *others = map(min, seconds)
    return StepCosts.fit(plain, dict(zip(trees, others, strict=True)))


def step_seconds(workload: Workload, method: Method, first: int) -> float:
    """Return the median seconds of steps, for prompts from index ``first`` on.

    :class:`FullTrees` replaces drafters on the host, which may propose fewer nodes than the tree
    has. One-time costs are left out: the first step and, on CUDA, the first steps with any shapes.
    """
    prompts = workload.take(first, workload.config.batch)
    pair = method.pair_for(workload.pair())
    with using_device(pair.target.device):
        fills_tree = pair.drafter.start(pair.tree, None).on_device
    if not fills_tree:
        pair.drafter = FullTrees()
    room = min(workload.model.target.stable_length - max(map(len, prompts)), MAX_TOKENS)
    batch, limit = pair.batch(len(prompts), compiled_rows=len(prompts)), math.inf
    spent: list[float] = []
    for _ in range(1 + WARM_UPS.get(pair.target.device.type, 0)):
        answers = [
            batch.add(pair.request(ids, room, method=method.decoder, eos_token_id=[]))
            for ids in prompts
        ]
        spent = []  # the batch's seconds, without prefill, after each step
        while len(batch) and len(spent) < limit:
            if len(spent) > 1 and spent[-1] - spent[0] > SECONDS:
                break
            found = batch.step()
            for answer, _ in found:
                if answer.error is not None:
                    raise answer.error
            if len(found) < batch.rows and not spent:  # prompts are still being processed
                continue
            parts = [value for phase, value in batch.seconds.items() if phase != "prefill"]
            spent.append(from_first(pair.target, partial(sum, parts)))
        limit = len(spent)
        for answer in answers:
            batch.cancel(answer)
    steps = [after - before for before, after in pairwise(spent)]
    return statistics.median(steps) if steps else spent[0]


#: Nodes and depths to choose from, as far as recordings cover them.
NODE_COUNTS = (4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
LEVELS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 24, 30)
#: Nodes, depth and children of each node of the trees that accepted lengths are recorded with:
#: chains, and bushy trees that are as deep as may pay off. Once a tree is predicted to be slower
#: than :data:`MIN_RECORDED_SPEED` times the fastest of its width for all methods, larger ones of
#: that width are skipped.
RECORDED = (
    *((nodes, nodes - 2, 1) for nodes in (12, 64)),
    *((nodes, min(30, nodes - 2), 2) for nodes in (6, 12, 24, 64)),
    *((nodes, min(16, nodes - 2), 4) for nodes in (12, 24, 64)),
    *((nodes, 10, 8) for nodes in (24, 64)),
)
MIN_RECORDED_SPEED = 0.8
#: Number of trees, the best by prediction, that :func:`shortlist` selects whatever their width.
SHORTLIST = 8
#: A tree that consists of its root: plain decoding.
PLAIN_TREE = TreeConfig(total_tokens=1, depth=1, top_k=1)


class Candidate(NamedTuple):
    """A tree with its predicted tokens per target pass of a prompt, and per second of all prompts.

    The seconds are those without the prefill.
    """

    tree: TreeConfig
    tau: float
    tokens_per_second: float


def _trees(shapes: Sequence[tuple[int, int, int]]) -> list[TreeConfig]:
    """Return the trees with some nodes, depths, and children of each node."""
    return [TreeConfig(total_tokens=n, depth=depth, top_k=k) for n, depth, k in shapes]


def candidate_trees() -> list[TreeConfig]:
    """Return the trees to choose from: chains, and bushy trees of the other :data:`WIDTHS`."""
    shapes = [(nodes, nodes - 2, 1) for nodes in (*NODE_COUNTS, 18, 22, 26, 36)]
    shapes += [
        (nodes, depth, width)
        for width in WIDTHS[1:]
        for nodes in NODE_COUNTS
        for depth in LEVELS
        if depth + 2 <= nodes
    ]
    return [tree for tree in _trees(shapes) if capacity(tree) == tree.total_tokens]


def recorded_trees() -> list[TreeConfig]:
    """Return the trees that accepted lengths are recorded with, the smallest first."""
    return _trees(sorted(RECORDED))


def is_past_best(costs: StepCosts, lengths: Lengths, tree: TreeConfig) -> bool:
    """Return whether a tree is so slow that larger ones of its width need not be recorded."""
    speeds = {item.tree: item.tokens_per_second for item in rank(costs, lengths)}
    best = max(speed for other, speed in speeds.items() if other.top_k == tree.top_k)
    return speeds[tree] < MIN_RECORDED_SPEED * best


def shortlist(candidates: Sequence[Candidate], current: TreeConfig) -> list[TreeConfig]:
    """Select the :data:`SHORTLIST` fastest trees, the fastest of every other width, and another.

    The candidates are sorted by predicted speed; ``current`` is the tree of the pair so far.
    """
    fastest = {item.tree.top_k: item.tree for item in reversed(candidates)}
    trees = [item.tree for item in candidates[:SHORTLIST]]
    return list(dict.fromkeys([*trees, *fastest.values(), current]))


def rank(costs: StepCosts, lengths: Lengths, rows: int = 1) -> list[Candidate]:
    """Sort the candidates that the recordings cover, and the recorded trees, by predicted speed.

    ``rows`` prompts are decoded at once.
    """
    found = []
    recorded = [tree for tree in lengths.recorded if tree.total_tokens > 1]
    for tree in dict.fromkeys([*candidate_trees(), *recorded]):
        tau = lengths.tau(tree)
        if tau is not None:
            found.append(Candidate(tree, tau, rows * tau / costs.seconds(tree)))
    return sorted(found, key=lambda item: -item.tokens_per_second)
