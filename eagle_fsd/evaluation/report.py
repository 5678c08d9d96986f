"""From answers to figures: speed, accepted length, quality, each with its sample and interval."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eagle_fsd.evaluation.answer_store import Record
from eagle_fsd.evaluation.code_execution.sandbox import RunResult, run_program
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.scoring import score
from eagle_fsd.evaluation.statistics import McNemar, Mean, Proportion, Ratio
from eagle_fsd.model.verify import Origin


@dataclass
class Summary:
    """What one method's answers show.

    Attributes:
        seconds, tokens, steps: Of all turns; wall time, prefill included.
        emitted: How many tokens each target pass emitted.
        origins: Tokens by where they came from.
        scores: Right or wrong by question, where it has a score.
        likelihoods: Mean log-probability of the answer under the target by question, nats a token.
        by_category: Tokens and steps.
        timed: Session, seconds and tokens by question.
        failed: Turns that were not answered: the prompt filled the context.
        cut_off: Turns that ended for want of room: by the limit on new tokens, or the context's.
        memory: The most that any turn had in use, bytes; None where that is not known.
    """

    name: str
    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    emitted: Counter[int] = field(default_factory=Counter)
    origins: Counter[str] = field(default_factory=Counter)
    scores: dict[int | str, bool] = field(default_factory=dict)
    likelihoods: dict[int | str, float] = field(default_factory=dict)
    timed: dict[int | str, tuple[str, float, int]] = field(default_factory=dict)
    by_category: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    answers: int = 0
    failed: int = 0
    cut_off: int = 0
    memory: int | None = None

    @classmethod
    def of(cls, name: str, records: Sequence[Record], scores: dict[int | str, bool]) -> Summary:
        found = cls(name, scores=scores, answers=len(records))
        for record in records:
            choice = record["choices"][0]
            found.failed += sum(error is not None for error in choice["errors"])
            found.cut_off += sum(choice["cut_off"])
            seconds, tokens = sum(choice["wall_time"]), sum(choice["new_tokens"])
            found.timed[record["question_id"]] = record["session"], seconds, tokens
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
        found.likelihoods = likelihoods(records)
        found.steps = sum(found.emitted.values())
        return found

    @property
    def tokens_per_second(self) -> float | None:
        """None where nothing was answered."""
        return self.tokens / self.seconds if self.seconds else None

    def speed_over(self, other: Summary | None) -> Ratio:
        """How many times as fast as ``other``, on the questions that both answered in one session.

        Speeds of other runs, at other times or on other machines, are not compared.
        """
        theirs = other.timed if other is not None else {}
        both = [
            (own[1:], theirs[key][1:])
            for key, own in self.timed.items()
            if key in theirs and theirs[key][0] == own[0]
        ]
        pairs = np.asarray(both, dtype=float).reshape(-1, 2, 2)
        return Ratio.of_speeds(pairs[:, 0], pairs[:, 1])

    @property
    def tau(self) -> float | None:
        """Tokens emitted per target pass, prefill not counted; None where the method tells none."""
        if not self.steps:
            return None
        return sum(length * count for length, count in self.emitted.items()) / self.steps

    @property
    def accuracy(self) -> Proportion | None:
        return Proportion(sum(self.scores.values()), len(self.scores)) if self.scores else None

    def share(self, origin: str) -> float | None:
        total = sum(self.origins.values())
        return self.origins[origin] / total if total else None

    def reach(self) -> list[float]:
        """How often a pass emits at least 1, 2, 3, ... tokens."""
        longest = max(self.emitted, default=0)
        counts = [
            sum(c for n, c in self.emitted.items() if n >= at) for at in range(1, longest + 1)
        ]
        return [count / self.steps for count in counts]

    def as_dict(self, plain: Summary | None, exact: Summary | None) -> dict[str, Any]:
        """Plain values for files and tables."""
        accuracy, likelihood = self.accuracy, Mean.of(list(self.likelihoods.values()))
        over_plain, over_exact = self.speed_over(plain), self.speed_over(exact)
        row: dict[str, Any] = {
            "method": self.name,
            "answers": self.answers,
            "failed": self.failed,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "speedup": none_if_nan(over_plain.value),
            "speedup_interval": over_plain.interval,
            "speed_over_exact": none_if_nan(over_exact.value),
            "speed_over_exact_interval": over_exact.interval,
            "cut_off": self.cut_off,
            "tau": self.tau,
            "tau_by_category": {
                name: tokens / steps for name, (tokens, steps) in self.by_category.items() if steps
            },
            "reach": self.reach(),
            "memory": self.memory,
            "origins": {name: self.share(name) for name in ("exact", "fuzzy", "target")},
            "accuracy": accuracy.value if accuracy else None,
            "accuracy_interval": accuracy.interval if accuracy else None,
            "scored": len(self.scores),
            "log_likelihood": likelihood.value if likelihood.count else None,
            "log_likelihood_interval": likelihood.interval if likelihood.count else None,
        }
        if exact is not None and exact is not self:
            row["against_exact"] = self._against(exact)
        return row

    def _against(self, exact: Summary) -> dict[str, Any]:
        """The same questions under exact decoding: paired, so that their difficulty drops out."""
        found: dict[str, Any] = {}
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


def none_if_nan(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else value


def summarise(
    methods: Sequence[str],
    records: dict[str, Sequence[Record]],
    scores: dict[str, dict[int | str, bool]],
) -> list[dict[str, Any]]:
    """A row a method; speed-ups over ``plain`` and changes against ``exact`` if they are there."""
    found = {name: Summary.of(name, records[name], scores[name]) for name in methods}
    plain, exact = found.get("plain"), found.get("exact")
    return [found[name].as_dict(plain, exact) for name in methods]


def likelihoods(records: Iterable[Record]) -> dict[int | str, float]:
    """Mean log-probability of each answer under the target, nats a token, by question."""
    found = {}
    for record in records:
        choice = record["choices"][0]
        weighed = [
            (value, count)
            for value, count in zip(choice["log_likelihood"], choice["new_tokens"], strict=True)
            if value is not None
        ]
        if weighed:
            total = sum(count for _, count in weighed)
            found[record["question_id"]] = sum(value * count for value, count in weighed) / total
    return found


def score_records(
    questions: Sequence[Question],
    records: Sequence[Record],
    execute_code: bool = False,
    progress: Callable[[int, int], None] | None = None,
    run: Callable[[str], RunResult] = run_program,
) -> dict[int | str, bool]:
    """Right or wrong by question, for those that have a score; the last turn's answer counts.

    Args:
        execute_code: Run the code in answers to HumanEval's questions, with ``run``.
        progress: Called with the answers scored and all of them.
    """
    by_id = {question.question_id: question for question in questions}
    found = {}
    for done, record in enumerate(records, 1):
        answer = record["choices"][0]["turns"][-1]
        right = score(by_id[record["question_id"]], answer, execute_code, run)
        if right is not None:
            found[record["question_id"]] = right
        if progress is not None:
            progress(done, len(records))
    return found
