"""Summarize answers as the rows of a report: speed, accepted length and quality per method."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eagle_fsd.evaluation.agreement import agreement, regret_summary
from eagle_fsd.evaluation.answer_store import Record, all_turns
from eagle_fsd.evaluation.code_execution.execution import RunResult
from eagle_fsd.evaluation.code_execution.programs import Program
from eagle_fsd.evaluation.methods import BASELINES
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.scoring import HARNESS_FILTERS, harness_match, score
from eagle_fsd.evaluation.statistics import McNemar, Mean, Proportion, Ratio, loss_bound
from eagle_fsd.model.verify import Origin

#: Probability that any of a report's limits on the loss of accuracy is too low.
LIMIT_ERROR = 0.05


@dataclass
class Summary:
    """Totals over the answers of one method.

    Attributes:
        name: The method's name.
        seconds: Wall time of all turns, including the prefill.
        tokens: New tokens of all turns.
        steps: Target passes, not counting the prefill.
        emitted: Number of target passes by the number of tokens they emitted.
        origins: Number of tokens by origin.
        scores: Whether the answer is correct, for each question with a score.
        likelihoods: The target's mean log-probability of the answer to each question, in nats per
            token.
        timings: Session, group, seconds and tokens for each question.
        by_category: Tokens and steps for each category.
        phases: Seconds by phase of decoding; None if they were not recorded.
        answers: Number of answers.
        failed: Turns that were not answered because their prompt fills the context.
        cut_off: Turns that reached the limit on new tokens or the end of the context.
        memory: Peak memory of any turn in bytes; None if unknown.
        records: The answers.
    """

    name: str
    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    emitted: Counter[int] = field(default_factory=Counter)
    origins: Counter[str] = field(default_factory=Counter)
    scores: dict[int | str, bool] = field(default_factory=dict)
    likelihoods: dict[int | str, float] = field(default_factory=dict)
    timings: dict[int | str, tuple[str, int, float, int]] = field(default_factory=dict)
    by_category: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    phases: dict[str, float] | None = None
    answers: int = 0
    failed: int = 0
    cut_off: int = 0
    memory: int | None = None
    records: Sequence[Record] = ()

    @classmethod
    def from_records(
        cls, name: str, records: Sequence[Record], scores: dict[int | str, bool]
    ) -> Summary:
        """Add up the answers of a method.

        Args:
            name: The method's name.
            records: Its answers.
            scores: Whether each answer is correct, by question.
        """
        found = cls(name, scores=scores, answers=len(records), records=records)
        for record in records:
            choice = all_turns(record)
            found.failed += sum(error is not None for error in choice["errors"])
            found.cut_off += sum(choice["cut_off"])
            seconds, tokens = sum(choice["wall_time"]), sum(choice["new_tokens"])
            place = record["session"], record["batch"]
            found.timings[record["question_id"]] = *place, seconds, tokens
            found.seconds += seconds
            found.tokens += tokens
            peaks = [peak for peak in choice["memory"] if peak is not None]
            found.memory = max([found.memory or 0, *peaks]) or None
            for accepted in choice["accepted"]:
                found.emitted.update(accepted)
                found.by_category[record["category"]][0] += sum(accepted)
                found.by_category[record["category"]][1] += len(accepted)
            for origins in choice["origins"]:
                found.origins.update(Origin(item).name.lower() for item in origins)
            for phases in choice.get("phases", ()):
                found.phases = found.phases or {}
                for phase, spent in phases.items():
                    found.phases[phase] = found.phases.get(phase, 0.0) + spent
        found.likelihoods = answer_likelihoods(records)
        found.steps = sum(found.emitted.values())
        return found

    @property
    def tokens_per_second(self) -> float | None:
        """Speed over all answers; None if nothing was answered."""
        return self.tokens / self.seconds if self.seconds else None

    def speed_over(self, other: Summary | None) -> Ratio:
        """Compare speeds on the questions that both methods answered in the same session.

        Speeds measured in different sessions, at other times or on other machines, are not
        comparable. The questions of a group share one measured time, so that groups, not
        questions, are the independent measurements of the interval.

        Args:
            other: The method in the denominator; None gives a ratio of NaN.
        """
        theirs = other.timings if other is not None else {}
        groups: dict[tuple[str, int], np.ndarray] = defaultdict(lambda: np.zeros((2, 2)))
        for key, (session, group, *own) in self.timings.items():
            if key in theirs and theirs[key][0] == session:
                groups[session, group] += (own, theirs[key][2:])
        pairs = np.asarray(list(groups.values()), dtype=float).reshape(-1, 2, 2)
        return Ratio.of_speeds(pairs[:, 0], pairs[:, 1])

    def latency(self) -> dict[str, float] | None:
        """Return ``median`` and ``p95`` of the seconds per answer; None without answers."""
        choices = [choice for record in self.records for choice in record["choices"]]
        waits = [sum(choice["latency"]) for choice in choices]
        if not waits:
            return None
        median, high = np.quantile(waits, (0.5, 0.95)).tolist()
        return {"median": median, "p95": high}

    @property
    def tau(self) -> float | None:
        """Mean tokens emitted per target pass, without the prefill; None if not reported."""
        if not self.steps:
            return None
        return sum(length * count for length, count in self.emitted.items()) / self.steps

    @property
    def accuracy(self) -> Proportion | None:
        """Fraction of correct answers; None if no question has a score."""
        return Proportion(sum(self.scores.values()), len(self.scores)) if self.scores else None

    def origin_share(self, origin: str) -> float | None:
        """Return the fraction of tokens with an origin; None if origins are not reported.

        Args:
            origin: Name of an :class:`~eagle_fsd.model.verify.Origin` in lowercase.
        """
        total = sum(self.origins.values())
        return self.origins[origin] / total if total else None

    def reach(self) -> list[float]:
        """Return the fraction of target passes that emit at least 1, 2, 3, ... tokens."""
        counts = [
            sum(passes for length, passes in self.emitted.items() if length >= minimum)
            for minimum in range(1, max(self.emitted, default=0) + 1)
        ]
        return [count / self.steps for count in counts]

    def decoding_phases(self) -> dict[str, float]:
        """Return the seconds by phase without the prefill; empty if phases were not recorded."""
        return {name: spent for name, spent in (self.phases or {}).items() if name != "prefill"}

    @property
    def seconds_per_step(self) -> float | None:
        """Seconds per target pass, without the prefill; None if phases were not recorded."""
        return (
            sum(self.decoding_phases().values()) / self.steps
            if self.phases and self.steps
            else None
        )

    def phase_shares(self) -> dict[str, float]:
        """Return the fraction of the decoding time by phase, without the prefill."""
        phases = self.decoding_phases()
        total = sum(phases.values())
        return {name: spent / total for name, spent in phases.items()} if total else {}

    def as_row(
        self, plain: Summary | None, exact: Summary | None, hf: Summary | None = None
    ) -> dict[str, Any]:
        """Return a row of the report, as JSON values.

        Args:
            plain: Plain decoding of the same questions, for the speed-up.
            exact: Exact speculative decoding, for speed and quality relative to it.
            hf: Hugging Face's ``generate``, for the speed relative to it.
        """
        accuracy, likelihood = self.accuracy, Mean.of(list(self.likelihoods.values()))
        over_plain, over_exact = self.speed_over(plain), self.speed_over(exact)
        row: dict[str, Any] = {
            "method": self.name,
            "answers": self.answers,
            "failed": self.failed,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "speedup": _none_if_nan(over_plain.value),
            "speedup_interval": over_plain.interval,
            "speed_over_exact": _none_if_nan(over_exact.value),
            "speed_over_exact_interval": over_exact.interval,
            "latency": self.latency(),
            "cut_off": self.cut_off,
            "tau": self.tau,
            "tau_by_category": {
                name: tokens / steps for name, (tokens, steps) in self.by_category.items() if steps
            },
            "reach": self.reach(),
            "memory": self.memory,
            "origins": {name: self.origin_share(name) for name in ("exact", "fuzzy", "target")},
            "accuracy": accuracy.value if accuracy else None,
            "accuracy_interval": accuracy.interval if accuracy else None,
            "scored": len(self.scores),
            "log_likelihood": likelihood.value if likelihood.count else None,
            "log_likelihood_interval": likelihood.interval if likelihood.count else None,
            "regret": regret_summary(self.records),
        }
        if hf is not None:
            row["speed_over_hf"] = _none_if_nan(self.speed_over(hf).value)
        if self.phases is not None:
            own, other = self.seconds_per_step, exact.seconds_per_step if exact else None
            row["seconds_per_step"] = own
            row["step_over_exact"] = own / other if own and other else None
            row["phase_shares"] = self.phase_shares()
        if exact is not None and exact is not self:
            row["against_exact"] = self._compare_quality(exact)
        return row

    def _compare_quality(self, exact: Summary) -> dict[str, Any]:
        """Compare with exact decoding on the same questions, paired to cancel their difficulty."""
        found: dict[str, Any] = {"agreement": agreement(exact.records, self.records)}
        both = [key for key in exact.scores if key in self.scores]
        if both:
            test = McNemar.of([exact.scores[k] for k in both], [self.scores[k] for k in both])
            found["accuracy_change"] = (test.gained - test.lost) / len(both)
            found |= {"lost": test.lost, "gained": test.gained, "paired": len(both)}
            found["mcnemar_p"] = test.p_value
        shared = [key for key in exact.likelihoods if key in self.likelihoods]
        if shared:
            change = Mean.of([self.likelihoods[k] - exact.likelihoods[k] for k in shared])
            found["log_likelihood_change"] = change.value
            found["log_likelihood_change_interval"] = change.interval
        return found


def _none_if_nan(value: float) -> float | None:
    """Replace NaN, which JSON cannot express."""
    return None if math.isnan(value) else value


def summarize(
    methods: Sequence[str],
    records: Mapping[str, Sequence[Record]],
    scores: Mapping[str, dict[int | str, bool]],
) -> list[dict[str, Any]]:
    """Summarize the answers of several methods.

    Args:
        methods: The methods' names. Each row is compared with ``plain``, ``exact`` and ``hf`` where
            these are included.
        records: Answers by method.
        scores: Whether each answer is correct, by method and question.

    Returns:
        A row per method. ``against_exact`` holds ``loss_limit``, an exact upper limit on the loss
        of accuracy; with 95% confidence, the limits of all methods hold at once (Bonferroni).
    """
    found = {name: Summary.from_records(name, records[name], scores[name]) for name in methods}
    references = [found.get(name) for name in ("plain", "exact", "hf")]
    rows = [found[name].as_row(*references) for name in methods]
    compared = [
        row["against_exact"]
        for row in rows
        if "lost" in row.get("against_exact", {}) and row["method"] not in BASELINES
    ]
    for against in compared:
        counts = (against[name] for name in ("lost", "gained", "paired"))
        against["loss_limit"] = loss_bound(*counts, 1 - LIMIT_ERROR / len(compared))
    return rows


def answer_likelihoods(records: Iterable[Record]) -> dict[int | str, float]:
    """Return the mean log-probability of each answer under the target.

    Args:
        records: The answers.

    Returns:
        Nats per token over all turns, by question. Questions without new tokens are omitted.
    """
    found = {}
    for record in records:
        choice = all_turns(record)
        turns = [
            (value, count)
            for value, count in zip(choice["log_likelihood"], choice["new_tokens"], strict=True)
            if value is not None
        ]
        if turns:
            total = sum(count for _, count in turns)
            found[record["question_id"]] = sum(value * count for value, count in turns) / total
    return found


def score_records(
    questions: Sequence[Question],
    records: Sequence[Record],
    progress: Callable[[int, int], None] | None = None,
    run: Callable[[Program], RunResult] | None = None,
) -> dict[int | str, bool]:
    """Score answers by their last turn.

    Args:
        questions: The questions.
        records: The answers.
        progress: Called with the number of answers processed so far and the total.
        run: Runs the code in answers to ``code`` questions; None: these questions have no score.

    Returns:
        Whether each answer is correct, by question. Questions without a score are omitted.
    """
    by_id = {question.question_id: question for question in questions}
    found = {}
    for done, record in enumerate(records, 1):
        answer = record["choices"][0]["turns"][-1]
        right = score(by_id[record["question_id"]], answer, run)
        if right is not None:
            found[record["question_id"]] = right
        if progress is not None:
            progress(done, len(records))
    return found


def harness_accuracy(
    questions: Sequence[Question], records: Sequence[Record]
) -> dict[str, float] | None:
    """Return the accuracy of numbers under lm-evaluation-harness's filters for GSM8K.

    Args:
        questions: The questions.
        records: The answers.

    Returns:
        The fraction of correct answers by the name of the filter; None if no question asks for a
        number.
    """
    numbers = {item.question_id: item.answer for item in questions if item.scored_by == "number"}
    answers = [
        (record["choices"][0]["turns"][-1], numbers[record["question_id"]] or "")
        for record in records
        if record["question_id"] in numbers
    ]
    if not answers:
        return None
    return {
        name: sum(harness_match(*answer, name) for answer in answers) / len(answers)
        for name in HARNESS_FILTERS
    }
