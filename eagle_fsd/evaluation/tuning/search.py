"""Find the best tree of a method: predict all of them, then race the most promising ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eagle_fsd.evaluation.completion import evaluation_template
from eagle_fsd.evaluation.config import EvaluationConfig, EvaluationRequest
from eagle_fsd.evaluation.methods import EXACT, PLAIN, Method
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.statistics import Ratio
from eagle_fsd.evaluation.tuning.candidates import (
    PLAIN_TREE,
    Candidate,
    rank,
    recorded_trees,
    shortlist,
)
from eagle_fsd.evaluation.tuning.costs import StepCosts, measure_costs, step_seconds
from eagle_fsd.evaluation.tuning.lengths import LengthRecorder, Lengths
from eagle_fsd.evaluation.tuning.race import Runner, race, race_exact
from eagle_fsd.evaluation.tuning.workload import Workload
from eagle_fsd.model.config import TreeConfig
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.utils.files import atomic_write
from eagle_fsd.utils.progress import Progress, ProgressFactory

#: Prompts that accepted lengths are recorded on, where there are many methods.
PREDICTION_PROMPTS = 12
#: Trees of every method whose steps are timed, and the number of times.
TIMED_TREES, TIMED_ROUNDS = 3, 5


def open_workload(
    model: EagleFSD,
    questions: Sequence[Question],
    request: EvaluationRequest,
    config: EvaluationConfig,
) -> Workload:
    """Return the prompts of questions, formatted as an evaluation formats them.

    Args:
        model: The pair.
        questions: The questions.
        request: How chats are formatted.
        config: How answers are decoded.
    """
    template = evaluation_template(model.tokenizer, request.chat_template, request.few_shot)
    return Workload(model, questions, template, config)


def predict_trees(
    recorder: LengthRecorder,
    costs: StepCosts,
    methods: Sequence[Method],
    trees: Iterable[TreeConfig],
    progress: ProgressFactory,
) -> dict[str, list[Candidate]]:
    """Predict the speed of every method with every tree.

    Args:
        recorder: Records accepted lengths.
        costs: The time of a step.
        methods: The methods; their own trees are ignored.
        trees: The trees to record accepted lengths with.
        progress: Reports progress.

    Returns:
        The trees of each method by name, fastest first.
    """
    trees = list(trees)
    found = {}
    with progress("recording accepted lengths") as advance:
        for at, method in enumerate(methods):
            recorded = {}
            for index, tree in enumerate(trees):
                recorded[tree] = recorder.record(replace(method, tree=tree))
                advance(at * len(trees) + index + 1, len(methods) * len(trees))
            found[method.name] = rank(costs, Lengths(recorded))
    return found


@dataclass
class TreeRace:
    """The trees of one method, and how fast they are.

    Attributes:
        method: The method, without a tree.
        predicted: All trees, by predicted speed.
        references: What the trees are compared with, by name: plain decoding (``"plain"``), the
            best lossless tree (``"exact"``), the best tree in float32 (``"float32"``).
        finalists: The trees and references that answered all prompts, fastest first.
    """

    method: Method
    predicted: list[Candidate] = field(default_factory=list)
    references: dict[str, Runner] = field(default_factory=dict)
    finalists: list[Runner] = field(default_factory=list)

    def run(self, workload: Workload, trees: Sequence[TreeConfig], advance: Progress) -> None:
        """Race trees against the references.

        Args:
            workload: The prompts.
            trees: The trees.
            advance: Reports progress.
        """
        runners = [Runner(replace(self.method, tree=tree), workload) for tree in trees]
        kept = list(self.references.values())
        self.finalists = race([*runners, *kept], advance, keep=kept)

    @property
    def trees(self) -> list[Runner]:
        """The finalists that are not references, fastest first."""
        return [item for item in self.finalists if item not in self.references.values()]

    @property
    def tree(self) -> TreeConfig:
        """The fastest tree; :data:`PLAIN_TREE` if plain decoding is at least as fast."""
        best, plain = self.trees[0], self.references.get("plain")
        if plain is not None and plain.tokens_per_second >= best.tokens_per_second:
            return PLAIN_TREE
        return best.method.tree or PLAIN_TREE

    def as_dict(self) -> dict[str, Any]:
        """Return the results as JSON values."""
        names = {runner: name for name, runner in self.references.items()}
        guesses = {item.tree: item for item in self.predicted}
        rows = []
        for place, runner in enumerate(self.finalists):
            tree = runner.method.tree
            guess = guesses.get(tree) if tree is not None and runner not in names else None
            rows.append(
                {
                    "name": names.get(runner, self.method.name),
                    "tree": tree.model_dump() if tree else None,
                    "tau": runner.tau,
                    "predicted_tau": guess.tau if guess else None,
                    "tokens_per_second": runner.tokens_per_second,
                    "predicted_tokens_per_second": guess.tokens_per_second if guess else None,
                    "prompts": len(runner.timings),
                    "over": {
                        name: ratio_dict(runner.over(other))
                        for name, other in (
                            *self.references.items(),
                            *(("next", item) for item in self.finalists[place + 1 : place + 2]),
                        )
                        if other is not runner
                    },
                }
            )
        return {
            "tree": self.tree.model_dump() if self.finalists else None,
            "finalists": rows,
            "predicted": [
                {
                    **item.tree.model_dump(),
                    "tau": item.tau,
                    "tokens_per_second": item.tokens_per_second,
                }
                for item in self.predicted
            ],
        }

    def sentence(self) -> str:
        """Return the outcome in a sentence, with the intervals of all ratios."""
        best, *others = self.trees
        name = self.method.name
        if self.tree == PLAIN_TREE:
            plain = self.references["plain"]
            return (
                f"{name}: plain decoding; the best tree, {shape(best.method.tree)}, is"
                f" {describe_ratio(best.over(plain))} as fast."
            )
        parts = [
            f"{describe_ratio(best.over(other))} as fast as {label}"
            for label, other in self.references.items()
        ]
        if others:
            rival = f"the next best tree, {shape(others[0].method.tree)}"
            parts.append(f"{describe_ratio(best.over(others[0]))} as fast as {rival}")
        return f"{name}: tree {shape(best.method.tree)}, {', '.join(parts)}."


def shape(tree: TreeConfig | None, separator: str = "/") -> str:
    """Format a tree as nodes/depth/children of each node; plain decoding has none.

    Args:
        tree: The tree.
        separator: Separates the numbers.
    """
    if tree is None:
        return "none"
    return separator.join(map(str, (tree.total_tokens, tree.depth, tree.top_k)))


def ratio_dict(ratio: Ratio) -> dict[str, Any]:
    """Return a ratio and its interval as JSON values.

    Args:
        ratio: The ratio.
    """
    return {"value": ratio.value, "interval": ratio.interval}


def describe_ratio(ratio: Ratio) -> str:
    """Format a ratio with its interval.

    Args:
        ratio: The ratio.
    """
    if ratio.interval is None:
        return f"{ratio.value:.2f} times"
    low, high = ratio.interval
    return f"{ratio.value:.2f} times ({low:.2f} to {high:.2f})"


@dataclass(frozen=True)
class TreePlan:
    """The trees of several methods.

    Attributes:
        exact: The fastest tree of exact decoding.
        candidates: The trees of every method by name, fastest by prediction first. Exact decoding
            is among the methods.
    """

    exact: TreeConfig
    candidates: Mapping[str, Sequence[Candidate]]

    @classmethod
    def make(
        cls,
        workload: Workload,
        methods: Sequence[Method],
        file: Path,
        progress: ProgressFactory,
        compiled: bool = False,
        race_again: bool = False,
    ) -> TreePlan:
        """Predict the trees of all methods, and race those of exact decoding.

        Args:
            workload: The prompts; the first :data:`PREDICTION_PROMPTS` of them serve predictions.
            methods: The methods, without exact decoding; their own trees are ignored.
            file: Keeps the plan, which an interrupted run resumes with: answers with other trees
                could not be resumed.
            progress: Reports progress.
            compiled: Whether the steps of the best trees are then timed again with compiled passes,
                with which other trees are faster. The workload's pair stays compiled.
            race_again: Race the best trees of exact decoding once more at the end, in turn with the
                fastest of the methods.
        """
        few = workload.subset(PREDICTION_PROMPTS)
        recorder = LengthRecorder(few, file.with_name(f"{file.stem}.lengths.jsonl"))
        described = [method.describe(workload.model) for method in methods]
        key = [recorder.digest, described, compiled]
        if file.exists():
            found = json.loads(file.read_text(encoding="utf-8"))
            if found["key"] == key:
                return cls._from_dict(found)
        with progress("measuring steps") as advance:
            costs = measure_costs(workload, advance)
        predicted = predict_trees(recorder, costs, [EXACT], recorded_trees(), progress)
        plain = Runner(PLAIN, workload)
        exact = TreeRace(EXACT, predicted[EXACT.name], {"plain": plain})
        with progress("racing trees of exact") as advance:
            exact.run(workload, shortlist(exact.predicted, workload.model.exact_tree), advance)
        # Every method may take the tree of exact decoding, which may be none of the candidates.
        for group, quick in (([EXACT], False), (methods, True)):
            trees = dict.fromkeys([*recorded_trees(quick), exact.tree])
            predicted |= predict_trees(recorder, costs, group, trees, progress)
        plan = cls(exact.tree, predicted).timed(workload, progress)
        if compiled:
            workload.model.compile = True
            plan = plan.timed(workload, progress)
            plan = cls(plan.candidates[EXACT.name][0].tree, plan.candidates)
        if race_again:
            speeds = {name: found[0].tokens_per_second for name, found in plan.candidates.items()}
            best = max(plan.with_trees(methods), key=lambda method: speeds[method.name])
            likely = [item.tree for item in plan.candidates[EXACT.name][:TIMED_TREES]]
            with progress("racing the best trees of exact") as advance:
                winner, _ = race_exact(workload, [plan.exact, *likely], [best], advance)
            plan = replace(plan, exact=winner.method.tree or plan.exact)
        atomic_write(file, json.dumps({"key": key, **plan.as_dict()}) + "\n")
        return plan

    def timed(self, workload: Workload, progress: ProgressFactory) -> TreePlan:
        """Return the plan with predictions that rest on the measured steps of the best trees.

        Steps with full trees are measured, see :func:`step_seconds`. The trees of heads and draft
        models are always full. Steps in which an n-gram drafter proposes nothing take less time, so
        its predictions are lower bounds, with this measurement as without it.

        Args:
            workload: The prompts.
            progress: Reports progress.
        """
        best = [found[:TIMED_TREES] for found in self.candidates.values()]
        trees = list(dict.fromkeys([self.exact, *(item.tree for found in best for item in found)]))
        seconds: dict[TreeConfig, float] = {}
        with progress("timing the best trees") as advance:
            for round_ in range(TIMED_ROUNDS):
                for at, tree in enumerate(trees):
                    spent = step_seconds(workload, replace(EXACT, tree=tree), round_)
                    seconds[tree] = min(spent, seconds.get(tree, spent))
                    advance(round_ * len(trees) + at + 1, TIMED_ROUNDS * len(trees))
        candidates = {}
        for name, found in self.candidates.items():
            known = [
                replace(item, tokens_per_second=item.tau / seconds[item.tree])
                for item in found
                if item.tree in seconds
            ]
            known.sort(key=lambda item: -item.tokens_per_second)
            candidates[name] = [*known, *(item for item in found if item.tree not in seconds)]
        return replace(self, candidates=candidates)

    def with_trees(self, methods: Sequence[Method]) -> list[Method]:
        """Return methods with their fastest trees.

        Args:
            methods: The methods.
        """
        trees = {name: found[0].tree for name, found in self.candidates.items()}
        trees[EXACT.name] = self.exact
        return [replace(method, tree=trees[method.name]) for method in methods]

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return {
            "exact": self.exact.model_dump(),
            "candidates": {
                name: [[item.tree.model_dump(), item.tau, item.tokens_per_second] for item in found]
                for name, found in self.candidates.items()
            },
        }

    @classmethod
    def _from_dict(cls, values: dict[str, Any]) -> TreePlan:
        candidates = {
            name: [Candidate(TreeConfig(**tree), tau, speed) for tree, tau, speed in found]
            for name, found in values["candidates"].items()
        }
        return cls(TreeConfig(**values["exact"]), candidates)
