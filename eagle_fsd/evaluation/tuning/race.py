"""Measure candidates on the same prompts, and drop the slower half after each round.

Successive halving (Jamieson and Talwalkar, arXiv 1502.07943): every round doubles the number of
prompts. Candidates take turns prompt by prompt, or batch by batch, so that changes in the machine's
speed affect all of them alike; their speeds are compared on the prompts that all of them answered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from eagle_fsd.evaluation.methods import EXACT, Method
from eagle_fsd.evaluation.statistics import Ratio
from eagle_fsd.evaluation.tuning.workload import Workload
from eagle_fsd.model.config import TreeConfig
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.utils.progress import Progress

#: Groups of prompts in the first round.
FIRST_ROUND = 4
#: Candidates that remain in the last round, apart from those that are always kept.
FINALISTS = 2


@dataclass(eq=False)
class Runner:
    """A candidate in a race: a method with its own tree, and what it has measured so far.

    ``timings`` holds seconds and tokens for each group of prompts, ``steps`` counts target passes.
    """

    method: Method
    workload: Workload
    timings: list[tuple[float, int]] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        self._pair: EagleFSD = self.workload.pair()

    def warm_up(self) -> None:
        """Decode one group, and forget all measurements and what the drafter learned."""
        self.answer(0)
        self.timings.clear()
        self.steps = 0
        self._pair = self.workload.pair()

    def answer(self, group: int) -> None:
        """Decode a group of prompts, timed."""
        size = self.workload.config.batch
        answers, seconds = self.workload.decode(self._pair, self.method, group * size, size)
        self.timings.append((seconds, sum(len(answer.tokens) for answer in answers)))
        self.steps += sum(answer.stats.steps for answer in answers)

    @property
    def tokens_per_second(self) -> float:
        """Speed so far, including the prefill."""
        seconds, tokens = np.sum(self.timings, axis=0)
        return float(tokens / seconds)

    @property
    def tau(self) -> float:
        """Tokens per target pass so far."""
        return sum(count for _, count in self.timings) / self.steps

    def over(self, other: Runner) -> Ratio:
        """Divide the speed by another candidate's, on the prompts that both have answered."""
        shared = min(len(self.timings), len(other.timings))
        own, theirs = (np.asarray(item.timings[:shared], dtype=float) for item in (self, other))
        return Ratio.of_speeds(own.reshape(-1, 2), theirs.reshape(-1, 2))


def race(
    runners: Sequence[Runner], progress: Progress, keep: Collection[Runner] = ()
) -> list[Runner]:
    """Return the candidates that answered all prompts, fastest first.

    No round drops those to ``keep``, such as plain decoding.
    """
    rounds = plan_rounds(len(runners) - len(keep), runners[0].workload.groups)
    sizes = [0, *(size for size, _ in rounds)]
    work = sum(
        (size - before) * (count + len(keep))
        for before, (size, count) in zip(sizes, rounds, strict=False)
    )
    active, done = list(runners), 0
    for runner in active:
        runner.warm_up()
    for first, (size, count) in zip(sizes, rounds, strict=False):
        dropped = [runner for runner in active if runner not in keep][count:]
        active = [runner for runner in active if runner not in dropped]
        for group in range(first, size):
            turn = group % len(active)
            for runner in active[turn:] + active[:turn]:
                runner.answer(group)
                done += 1
                progress(done, work)
        active.sort(key=lambda runner: -runner.tokens_per_second)
    return active


def race_exact(
    workload: Workload, trees: Iterable[TreeConfig], others: Sequence[Method], progress: Progress
) -> tuple[list[Runner], list[Runner]]:
    """Race the best trees of exact decoding once more, in turn with what is compared with it.

    If another program disturbs the race that selects a tree, a slower one may win it, and all
    methods look faster relative to exact decoding than they are. Returns exact decoding with each
    of the trees, fastest first, and the other methods in their order.
    """
    exact = [Runner(replace(EXACT, tree=tree), workload) for tree in dict.fromkeys(trees)]
    runners = [Runner(method, workload) for method in others]
    race([*exact, *runners], progress, keep=[*exact, *runners])
    exact.sort(key=lambda runner: -runner.tokens_per_second)
    return exact, runners


def plan_rounds(candidates: int, total: int) -> list[tuple[int, int]]:
    """Return, for each round, the groups answered at its end, and the candidates that take part."""
    rounds = []
    size = min(FIRST_ROUND, total)
    while size < total and candidates > FINALISTS:
        rounds.append((size, candidates))
        size, candidates = min(2 * size, total), max(FINALISTS, (candidates + 1) // 2)
    return [*rounds, (total, candidates)]
