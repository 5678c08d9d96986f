"""Search for the fastest trees: predict the speed of many, then race the most promising ones.

In a race, each round doubles the number of prompts and drops the slower half of the candidates; if
only two are left, they answer all prompts (successive halving, arXiv 1502.07943). Candidates take
turns prompt by prompt, or batch by batch, so that changes in the machine's speed affect all of them
alike; their speeds are compared on the prompts that all of them answered.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from eagle_fsd.evaluation.methods import EXACT, PLAIN, Method
from eagle_fsd.evaluation.search.prediction import (
    PLAIN_TREE,
    Candidate,
    LengthRecorder,
    Lengths,
    StepCosts,
    is_past_best,
    measure_costs,
    rank,
    recorded_trees,
    shortlist,
    step_seconds,
)
from eagle_fsd.evaluation.search.workload import Workload
from eagle_fsd.evaluation.statistics import Estimate, median_and_p95, speed_ratio
from eagle_fsd.model.config import TreeConfig
from eagle_fsd.utils.files import atomic_write
from eagle_fsd.utils.progress import Progress, ProgressFactory

#: Groups of prompts in the first round, and the number of candidates that no round falls below,
#: apart from those that are always kept.
FIRST_ROUND, FINALISTS = 4, 2
#: Trees of every method whose steps are timed, and the number of times.
TIMED_TREES, TIMED_ROUNDS = 3, 5
#: File with the trees of all methods.
TREES_FILE = "trees.json"
#: Values of a report's row that are measured separately if answers are decoded in other batches.
SPEED_FIELDS = (
    *("tokens_per_second", "latency", "speedup", "speedup_interval"),
    *("speed_over_exact", "speed_over_exact_interval"),
)


@dataclass(eq=False)
class Runner:
    """A candidate in a race: a method with its own tree, and what it has measured so far.

    ``timings`` holds seconds and tokens for each group of prompts, ``steps`` counts target passes.
    """

    method: Method
    workload: Workload
    timings: list[tuple[float, int]] = field(default_factory=list)
    steps: int = 0

    def warm_up(self) -> None:
        """Decode one group, and forget all measurements and what the drafter learned."""
        self._pair = self.workload.pair()
        self.answer(0)
        self.timings.clear()
        self.steps, self._pair = 0, self.workload.pair()

    def answer(self, group: int) -> None:
        """Decode a group of prompts, timed."""
        size = self.workload.config.batch
        answers, seconds = self.workload.decode(self._pair, self.method, group * size, size)
        self.timings.append((seconds, sum(len(answer.tokens) for answer in answers)))
        self.steps += sum(answer.stats.steps for answer in answers)

    @property
    def tree(self) -> TreeConfig:
        """The method's tree."""
        return self.method.tree or PLAIN_TREE

    @property
    def tokens_per_second(self) -> float:
        """Speed so far, including the prefill."""
        seconds, tokens = np.sum(self.timings, axis=0)
        return float(tokens / seconds)

    @property
    def tau(self) -> float:
        """Tokens per target pass so far."""
        return sum(count for _, count in self.timings) / self.steps

    def over(self, other: Runner) -> Estimate:
        """Divide the speed by another candidate's, on the prompts that both have answered."""
        shared = min(len(self.timings), len(other.timings))
        own, theirs = (np.asarray(item.timings[:shared], dtype=float) for item in (self, other))
        return speed_ratio(own.reshape(-1, 2), theirs.reshape(-1, 2))


def fastest_first(runners: Iterable[Runner]) -> list[Runner]:
    """Sort candidates by their speed so far."""
    return sorted(runners, key=lambda runner: -runner.tokens_per_second)


def race(
    runners: Sequence[Runner], progress: Progress, keep: Collection[Runner] = ()
) -> list[Runner]:
    """Race candidates in rounds that each drop the slower half of them.

    Returns those that answered all prompts, fastest first. Those to ``keep``, such as plain
    decoding, are never dropped.
    """
    rounds = plan_rounds(len(runners) - len(keep), runners[0].workload.groups)
    plan = [(first, size, count) for (first, _), (size, count) in pairwise([(0, 0), *rounds])]
    work = sum((size - first) * (count + len(keep)) for first, size, count in plan)
    active, done = list(runners), 0
    for runner in active:
        runner.warm_up()
    for first, size, count in plan:
        dropped = [runner for runner in active if runner not in keep][count:]
        active = [runner for runner in active if runner not in dropped]
        for group in range(first, size):
            turn = group % len(active)
            for runner in active[turn:] + active[:turn]:
                runner.answer(group)
                done += 1
                progress(done, work)
        active = fastest_first(active)
    return active


def race_exact(
    workload: Workload, trees: Iterable[TreeConfig], others: Sequence[Method], progress: Progress
) -> tuple[list[Runner], list[Runner]]:
    """Race the best trees of exact decoding once more, alternating with the methods to compare.

    If another program disturbs the race that selects a tree, a slower one may win it, and all
    methods look faster relative to exact decoding than they are. Returns exact decoding with each
    of the trees, fastest first, and the other methods in their order.
    """
    exact = [Runner(replace(EXACT, tree=tree), workload) for tree in dict.fromkeys(trees)]
    runners = [Runner(method, workload) for method in others]
    race([*exact, *runners], progress, keep=[*exact, *runners])
    return fastest_first(exact), runners


def measure_speeds(
    workload: Workload,
    trees: Iterable[TreeConfig],
    methods: Sequence[Method],
    progress: ProgressFactory,
) -> tuple[Method, dict[str, dict[str, Any]]]:
    """Measure the speeds of methods, and of exact and plain decoding.

    Returns exact decoding with the fastest of the trees, with which all are compared, and the
    values of a report's rows about speed, by method.
    """
    with progress("measuring speeds") as advance:
        (exact, *_), others = race_exact(workload, trees, [*methods, PLAIN], advance)
    found = {}
    for runner in (exact, *others):
        waits = [seconds for seconds, _ in runner.timings]  # for a group of prompts
        found[runner.method.name] = {
            "tokens_per_second": runner.tokens_per_second,
            "latency": median_and_p95(waits) if workload.config.batch == 1 else None,
            **runner.over(others[-1]).as_dict("speedup"),
            **runner.over(exact).as_dict("speed_over_exact"),
        }
    return exact.method, found


def plan_rounds(candidates: int, total: int) -> list[tuple[int, int]]:
    """Return, for each round, the groups answered at its end, and the candidates that take part."""
    rounds = []
    size = min(FIRST_ROUND, total)
    while size < total and candidates > FINALISTS:
        rounds.append((size, candidates))
        size, candidates = min(2 * size, total), max(FINALISTS, (candidates + 1) // 2)
    return [*rounds, (total, candidates)]


@dataclass
class TreeRace:
    """The trees of one method: ``predicted``, and those in ``trees`` that answered all prompts.

    Both are sorted by speed. ``references`` are plain decoding (``"plain"``) and, if it was raced
    with these trees, the best lossless tree (``"exact"``).
    """

    method: Method
    predicted: list[Candidate] = field(default_factory=list)
    references: dict[str, Runner] = field(default_factory=dict)
    trees: list[Runner] = field(default_factory=list)

    def run(self, workload: Workload, trees: Iterable[TreeConfig], advance: Progress) -> None:
        """Race trees against the references."""
        runners = [Runner(replace(self.method, tree=tree), workload) for tree in trees]
        kept = list(self.references.values())
        finished = race([*runners, *kept], advance, keep=kept)
        self.trees = [runner for runner in finished if runner not in kept]

    @property
    def tree(self) -> TreeConfig:
        """The fastest tree; :data:`PLAIN_TREE` if plain decoding is at least as fast."""
        best, plain = self.trees[0], self.references["plain"]
        is_slow = plain.tokens_per_second >= best.tokens_per_second
        return PLAIN_TREE if is_slow or best.tree.total_tokens == 1 else best.tree


@dataclass
class TreeSearch:
    """A search for the fastest trees of some methods, which may be incomplete.

    Trees are raced with the prompts of ``workload``; accepted lengths are recorded by ``recorder``.
    ``costs`` are the measured times of a step.
    """

    workload: Workload
    recorder: LengthRecorder
    progress: ProgressFactory
    races: list[TreeRace]
    costs: StepCosts | None = None

    def run(self) -> None:
        """Predict the speeds of trees for each method, and race the best ones."""
        with self.progress("measuring steps") as advance:
            self.costs = measure_costs(self.workload, advance)
        predicted = self.predict()
        for item in self.races:
            item.predicted = predicted[item.method.name]
            item.references = {"plain": Runner(PLAIN, self.workload)}
            trees = shortlist(item.predicted, item.method.pair_for(self.workload.model).tree)
            with self.progress(f"racing trees of {item.method.name}") as advance:
                item.run(self.workload, trees, advance)

    def predict(self, *others: TreeConfig) -> dict[str, list[Candidate]]:
        """Return the trees of each recorded method, fastest first; ``others`` are among them."""
        assert self.costs is not None
        trees = list(dict.fromkeys([*recorded_trees(), *others]))
        found = {method.name: Lengths({}) for method in self.recorder.methods}
        finished: set[int] = set()  # widths of which larger trees are slower
        with self.progress("recording accepted lengths") as advance:
            for at, tree in enumerate(trees, 1):
                if tree.top_k not in finished or tree in others:
                    recorded = self.recorder.record(tree)
                    for lengths, new in zip(found.values(), recorded, strict=True):
                        lengths.recorded[tree] = new
                    if all(is_past_best(self.costs, item, tree) for item in found.values()):
                        finished.add(tree.top_k)
                advance(at, len(trees))
        rows = self.workload.config.batch
        return {name: rank(self.costs, lengths, rows) for name, lengths in found.items()}


class TreePlan(BaseModel):
    """The fastest tree of exact decoding, and the trees of several methods by predicted speed.

    ``candidates`` also hold those of exact decoding.
    """

    exact: TreeConfig
    candidates: dict[str, list[Candidate]]

    def timed(self, workload: Workload, progress: ProgressFactory) -> TreePlan:
        """Return the plan with predictions that rest on the measured steps of the best trees.

        These trees come first, even if others are predicted to be faster. Steps with full trees are
        measured, see :func:`step_seconds`.
        """
        best = [item.tree for found in self.candidates.values() for item in found[:TIMED_TREES]]
        trees = list(dict.fromkeys([self.exact, *best]))
        seconds: dict[TreeConfig, float] = {}
        with progress("timing the best trees") as advance:
            for round_ in range(TIMED_ROUNDS):
                for at, tree in enumerate(trees):
                    spent = step_seconds(workload, replace(EXACT, tree=tree), round_)
                    seconds[tree] = min(spent, seconds.get(tree, spent))
                    advance(round_ * len(trees) + at + 1, TIMED_ROUNDS * len(trees))
        candidates, rows = {}, workload.config.batch
        for name, found in self.candidates.items():
            known = [
                Candidate(item.tree, item.tau, rows * item.tau / seconds[item.tree])
                for item in found
                if item.tree in seconds
            ]
            known.sort(key=lambda item: -item.tokens_per_second)
            candidates[name] = [*known, *(item for item in found if item.tree not in seconds)]
        return TreePlan(exact=self.exact, candidates=candidates)

    @property
    def exact_trees(self) -> list[TreeConfig]:
        """The trees of exact decoding to race once more, beginning with the one so far."""
        return [self.exact, *(item.tree for item in self.candidates[EXACT.name][:TIMED_TREES])]

    def speed(self, name: str) -> float:
        """Return the predicted speed of a method with its fastest tree, in tokens per second."""
        return self.candidates[name][0].tokens_per_second

    def with_trees(self, methods: Sequence[Method]) -> list[Method]:
        """Return methods with their fastest trees."""
        trees = {name: found[0].tree for name, found in self.candidates.items()}
        trees[EXACT.name] = self.exact
        return [replace(method, tree=trees[method.name]) for method in methods]


def plan_trees(
    workload: Workload,
    methods: Sequence[Method],
    file: Path,
    progress: ProgressFactory,
    *,
    compiled: bool = False,
    last_race: bool = False,
) -> TreePlan:
    """Predict the trees of exact decoding and other methods, and race those of exact decoding.

    ``file`` keeps the plan, with which an interrupted run resumes: answers with other trees could
    not be resumed. Plans for other options in the file are kept, too. If ``compiled``, the steps of
    the best trees are timed again with compiled passes; unless the plan is in the file, this leaves
    the workload's pair compiled. With ``last_race``, the best trees of exact decoding are raced
    once more, alternating with the fastest of the methods.
    """
    # Not .jsonl: FastChat reads every such file beside the answers as answers.
    recorder = LengthRecorder(workload, [EXACT, *methods], file.with_name(f"{file.stem}.lengths"))
    key = f"{recorder.digest}, compiled" if compiled else recorder.digest
    plans = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if key in plans:
        return TreePlan.model_validate(plans[key])
    exact = TreeRace(EXACT)
    search = TreeSearch(workload, recorder, progress, [exact])
    search.run()
    # Every method may take the tree of exact decoding, which may be none of the candidates.
    own = [exact.tree] if exact.tree != PLAIN_TREE else []
    candidates = search.predict(*own)
    if not own:
        candidates[EXACT.name].insert(0, Candidate(PLAIN_TREE, 1.0, 0.0))  # which is timed next
    plan = TreePlan(exact=exact.tree, candidates=candidates).timed(workload, progress)
    if compiled:
        workload.model.compile = True
        plan = plan.timed(workload, progress)
        plan.exact = plan.candidates[EXACT.name][0].tree
    if last_race:
        ranked = sorted(plan.with_trees(methods), key=lambda method: -plan.speed(method.name))
        with progress("racing the best trees of exact") as advance:
            (winner, *_), _ = race_exact(workload, plan.exact_trees, ranked[:1], advance)
        plan.exact = winner.tree
    atomic_write(file, json.dumps({**plans, key: plan.model_dump(mode="json")}) + "\n")
    return plan
