"""Measure the time of a few steps, and predict that of any tree.

A step over ``N`` nodes, drafted in ``D`` levels of ``K`` nodes, takes ``nodes(N) + draft(K) +
D * level(K)`` seconds: the target's pass with the rest of the step, and the drafter's passes. The
first term is measured for several ``N`` and interpolated, the others for every ``K`` with two
depths.

The trees of all measured steps are full. The n-gram drafters propose nothing in many steps, which
then cost as much as plain decoding, whatever ``N`` is, so :class:`FullTrees` takes their place. The
predicted speed is then a lower bound: that of a drafter which always has something to propose.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from eagle_fsd.evaluation.methods import EXACT, PLAIN, Method
from eagle_fsd.evaluation.processes import from_first
from eagle_fsd.evaluation.tuning.lengths import capacity
from eagle_fsd.evaluation.tuning.workload import Workload
from eagle_fsd.model.batch import Batch
from eagle_fsd.model.compilation import EAGER_STEPS, using_device
from eagle_fsd.model.config import TreeConfig
from eagle_fsd.model.drafters.ngram import MAX_FOLLOWERS, AdaptiveNGramDrafter
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.utils.progress import Progress

#: Children of each node, ``K``.
WIDTHS = (1, 2, 4, 8)
#: Nodes of the trees that show the cost of ``N``: all have one level of the largest width.
NODES = (4, 8, 16, 32, 48, 64)
#: Nodes of the trees that show the cost of a level, and their two depths.
LEVEL_NODES, DEPTHS = 16, (14, 46)
#: Least number of steps and seconds of every measurement, without its first step. Measurements of
#: equal length are interrupted by other processes equally often, whatever the length of a step.
STEPS, SECONDS = 5, 0.05
#: How often the steps of a measurement are taken before it, by type of device. On CUDA, steps run
#: eagerly and are captured before they are replayed.
WARM_UPS = {"cuda": EAGER_STEPS + 1}
#: Tokens after which a measurement ends in any case.
MAX_TOKENS = 4096
#: Every measurement is repeated; the fastest counts, because other processes only add time.
ROUNDS = 7


class FullTrees(AdaptiveNGramDrafter):
    """An n-gram drafter that always fills its tree, with the same tokens after any context."""

    def followers(self, context: list[int]) -> list[tuple[int, int]]:
        """Return the first tokens of the vocabulary, with equal counts."""
        return [(token, 1) for token in range(min(MAX_FOLLOWERS, self.vocab_size))]


@dataclass(frozen=True)
class StepCosts:
    """Seconds of the parts of a step.

    ``nodes`` is that of a step without drafting, by the number of nodes; one node is plain
    decoding. ``level`` is that of each level, and ``draft`` what drafting takes besides, by the
    number of nodes per level.
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
        """Predict the seconds of a step; other widths than :data:`WIDTHS` are interpolated."""
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
    shapes += [(LEVEL_NODES, depth, width) for width in WIDTHS for depth in DEPTHS]
    return [TreeConfig(total_tokens=n, depth=depth, top_k=width) for n, depth, width in shapes]


def measure_costs(workload: Workload, progress: Progress, rounds: int | None = None) -> StepCosts:
    """Measure the costs of a step, at the batch size of the workload.

    The measurements rotate, so that changes in the machine's speed affect all of them alike.
    """
    rounds = rounds or ROUNDS
    trees = measured_trees()
    methods = [PLAIN, *(Method("exact", EXACT.acceptance, tree=tree) for tree in trees)]
    seconds: list[list[float]] = [[] for _ in methods]
    for round_ in range(rounds):
        for at, method in enumerate(methods):
            seconds[at].append(step_seconds(workload, method, round_))
            progress(round_ * len(methods) + at + 1, rounds * len(methods))
    plain, *others = map(min, seconds)
    return StepCosts.fit(plain, dict(zip(trees, others, strict=True)))


def step_seconds(workload: Workload, method: Method, prompt: int) -> float:
    """Return the median seconds of a few steps whose trees are full, from a prompt's index on.

    Drafters that propose trees on the host may propose fewer nodes than the tree has, or none;
    :class:`FullTrees` drafts in their place. All others always propose as many nodes. Either way,
    the result depends on the tree, not on what the prompts let the drafter propose.

    What happens only once is not part of it: the first step, and on CUDA, the first steps with any
    shapes, because the same steps have been taken before.
    """
    prompts = workload.take(prompt, workload.config.batch)
    pair = method.pair_for(workload.pair())
    with using_device(pair.target.device):
        fills_tree = pair.drafter.start(pair.tree, None).on_device
    if not fills_tree:
        pair.drafter = FullTrees().attach(pair.target)
    room = workload.model.target.context_length - max(map(len, prompts))
    batch = pair.batch(len(prompts))
    spent: list[float] = []
    limit = math.inf
    for _ in range(1 + WARM_UPS.get(pair.target.device.type, 0)):
        answers = [
            batch.add(
                pair.request(ids, min(room, MAX_TOKENS), method=method.decoder, eos_token_id=[])
            )
            for ids in prompts
        ]
        spent = _take_steps(pair, batch, limit)
        limit = len(spent)
        for answer in answers:
            batch.cancel(answer)
    steps = [after - before for before, after in pairwise(spent)]
    return statistics.median(steps) if steps else spent[0]


def _take_steps(pair: EagleFSD, batch: Batch, limit: float) -> list[float]:
    """Take at most ``limit`` steps; return the batch's seconds, without prefill, after each."""
    spent: list[float] = []
    while len(batch) and len(spent) < limit:
        if len(spent) > STEPS and spent[-1] - spent[0] > SECONDS:
            break
        for answer, _ in batch.step():
            if answer.error is not None:
                raise answer.error
        parts = [value for phase, value in batch.seconds.items() if phase != "prefill"]
        spent.append(from_first(pair.target, partial(sum, parts)))
    return spent
