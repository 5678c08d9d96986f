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
    """A candidate in a race.

    Attributes:
        method: The method, with its own tree.
        workload: The prompts, with the pair that decodes them.
        timings: Seconds and tokens for each group of prompts so far.
        steps: Target passes so far.
    """

    method: Method
    workload: Workload
    timings: list[tuple[float, int]] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        self._pair: EagleFSD = self.workload.pair()

    def warm_up(self) -> None:
        """Decode one prompt untimed, and forget what the drafter learned from it."""
        self.answer(0)
        self.timings.clear()
        self.steps = 0
        self._pair = self.workload.pair()

    def answer(self, group: int) -> None:
        """Decode a group of prompts, timed.

        Args:
            group: Its index.
        """
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
        """Compare speeds on the prompts that both have answered.

        Args:
            other: The candidate in the denominator.
        """
        shared = min(len(self.timings), len(other.timings))
        own, theirs = (np.asarray(item.timings[:shared], dtype=float) for item in (self, other))
        return Ratio.of_speeds(own.reshape(-1, 2), theirs.reshape(-1, 2))


def race(
    runners: Sequence[Runner],
    progress: Progress,
    *,
    keep: Collection[Runner] = (),
) -> list[Runner]:
    """Find the fastest candidate.

    Args:
        runners: The candidates. Their timings are extended.
        progress: Called with the number of answers so far and the total.
        keep: Candidates that no round drops, such as plain decoding.

    Returns:
        The candidates that answered all prompts, fastest first.
    """
    total = runners[0].workload.groups
    active = list(runners)
    sizes = round_sizes(len(active) - len(keep), total)
    work = _answers(len(active), len(keep), sizes)
    done = 0
    for runner in active:
        runner.warm_up()
    first = 0
    for size in sizes:
        for group in range(first, size):
            turn = group % len(active)
            for runner in active[turn:] + active[:turn]:
                runner.answer(group)
                done += 1
                progress(done, work)
        first = size
        active.sort(key=lambda runner: -runner.tokens_per_second)
        if size < total:
            others = [runner for runner in active if runner not in keep]
            dropped = others[_survivors(len(others)) :]
            active = [runner for runner in active if runner not in dropped]
    return active


def race_exact(
    workload: Workload, trees: Iterable[TreeConfig], others: Sequence[Method], progress: Progress
) -> list[Runner]:
    """Race the best trees of exact decoding once more, in turn with what is compared with it.

    If another program disturbs the race that selects a tree, a slower one may win it, and all
    methods look faster relative to exact decoding than they are.

    Args:
        workload: The prompts.
        trees: The trees of exact decoding.
        others: The methods that are compared with it.
        progress: As for :func:`race`.

    Returns:
        Exact decoding with the fastest of the trees, and the other methods in their order.
    """
    exact = [Runner(replace(EXACT, tree=tree), workload) for tree in dict.fromkeys(trees)]
    runners = [Runner(method, workload) for method in others]
    race([*exact, *runners], progress, keep=[*exact, *runners])
    return [max(exact, key=lambda runner: runner.tokens_per_second), *runners]


def round_sizes(candidates: int, total: int) -> list[int]:
    """Return the number of groups that have been answered after each round.

    Args:
        candidates: Number of candidates that may be dropped.
        total: Number of groups.
    """
    sizes = []
    size = min(FIRST_ROUND, total)
    while size < total and candidates > FINALISTS:
        sizes.append(size)
        size, candidates = min(2 * size, total), _survivors(candidates)
    return [*sizes, total]


def _survivors(candidates: int) -> int:
    """Return how many candidates a round keeps."""
    return max(min(FINALISTS, candidates), (candidates + 1) // 2)


def _answers(active: int, kept: int, sizes: Sequence[int]) -> int:
    """Return the number of answers of all rounds."""
    total, first = 0, 0
    for size in sizes:
        total += active * (size - first)
        active, first = kept + _survivors(active - kept), size
    return total
