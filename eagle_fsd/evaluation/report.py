"""Summarize answers as the rows of a report: speed, accepted length and quality per method."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from eagle_fsd.evaluation import ifeval
from eagle_fsd.evaluation.agreement import agreement, changed_limit, regret_summary
from eagle_fsd.evaluation.answer_store import Record, all_turns
from eagle_fsd.evaluation.code_execution.execution import RunResult
from eagle_fsd.evaluation.code_execution.programs import Program, strip_reasoning
from eagle_fsd.evaluation.config import MeasureConfig
from eagle_fsd.evaluation.methods import BASELINES
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.scoring import HARNESS_FILTERS, harness_match, score
from eagle_fsd.evaluation.statistics import (
    Estimate,
    confidence_per_test,
    loss_bound,
    mcnemar_p,
    mean,
    median_and_p95,
    proportion_interval,
    speed_ratio,
)
from eagle_fsd.model.verify import Origin

#: Probability that all limits of a report of one kind, such as on the loss of accuracy, hold.
CONFIDENCE = 0.95
#: Values of k for which pass@k is reported, besides the number of samples.
PASS_AT = (5, 10, 50, 100, 500, 1000)

#: Whether each answer of one sample is correct, by question.
SampleScores = Mapping[int | str, bool]


@dataclass(frozen=True)
class Summary:
    """The answers of one method, whether they are correct if known, and what follows from them."""

    name: str
    records: Sequence[Record]
    scores: Mapping[int | str, bool]

    @cached_property
    def turns(self) -> list[dict[str, list[Any]]]:
        """The values of the turns of each answer, see :func:`all_turns`."""
        return [all_turns(record) for record in self.records]

    def total(self, name: str) -> Any:
        """Return the sum of a value over all turns."""
        return sum(sum(turns[name]) for turns in self.turns)

    def joined(self, name: str) -> list[Any]:
        """Concatenate a list that each turn has."""
        return [item for turns in self.turns for found in turns[name] for item in found]

    @cached_property
    def accepted(self) -> list[int]:
        """Number of tokens that each target pass emitted, not counting the prefill."""
        return self.joined("accepted")

    @cached_property
    def likelihoods(self) -> dict[int | str, float]:
        """The target's mean log-probability of each answer, in nats per token."""
        found = {}
        for record, turns in zip(self.records, self.turns, strict=True):
            values = [
                (value * count, count)
                for value, count in zip(turns["log_likelihood"], turns["new_tokens"], strict=True)
                if value is not None
            ]
            if values:
                nats, tokens = map(sum, zip(*values, strict=True))
                found[record["question_id"]] = nats / tokens
        return found

    @cached_property
    def timings(self) -> dict[int | str, tuple[tuple[str, int], float, int]]:
        """Session and group, seconds and tokens of each answer."""
        return {
            record["question_id"]: (
                (record["session"], record["batch"]),
                sum(turns["wall_time"]),
                sum(turns["new_tokens"]),
            )
            for record, turns in zip(self.records, self.turns, strict=True)
        }

    @cached_property
    def phases(self) -> dict[str, float] | None:
        """Seconds by phase, without the prefill; None if they were not recorded."""
        recorded = [phases for turns in self.turns for phases in turns.get("phases", ())]
        names = dict.fromkeys(name for phases in recorded for name in phases if name != "prefill")
        found = {name: sum(phases.get(name, 0.0) for phases in recorded) for name in names}
        return found if recorded else None

    @property
    def seconds_per_step(self) -> float | None:
        """Seconds per target pass, without the prefill; None if phases were not recorded."""
        if not self.phases or not self.accepted:
            return None
        return sum(self.phases.values()) / len(self.accepted)

    def speed_over(self, other: Summary | None) -> Estimate:
        """Compare speeds on the questions that both methods answered in the same session.

        The questions of a group share one measured time, so groups are the independent
        measurements of the interval. Without another method, the ratio is NaN.
        """
        theirs = other.timings if other is not None else {}
        groups: dict[tuple[str, int], np.ndarray] = defaultdict(lambda: np.zeros((2, 2)))
        for key, (group, *own) in self.timings.items():
            if key in theirs and theirs[key][0][0] == group[0]:
                groups[group] += (own, theirs[key][1:])
        pairs = np.asarray(list(groups.values()), dtype=float).reshape(-1, 2, 2)
        return speed_ratio(pairs[:, 0], pairs[:, 1])

    def as_row(
        self, plain: Summary | None, exact: Summary | None, hf: Summary | None = None
    ) -> dict[str, Any]:
        """Return the method's row of a report, as JSON values, compared with the given methods."""
        seconds, tokens, accepted = self.total("wall_time"), self.total("new_tokens"), self.accepted
        waits = [sum(choice["latency"]) for record in self.records for choice in record["choices"]]
        by_category: dict[str, list[int]] = defaultdict(list)
        for record, turns in zip(self.records, self.turns, strict=True):
            by_category[record["category"]] += chain(*turns["accepted"])
        origins = Counter(Origin(item).name.lower() for item in self.joined("origins"))
        peaks = [peak or 0 for turns in self.turns for peak in turns["memory"]]
        errors = [error for turns in self.turns for error in turns["errors"]]
        right, scored = sum(self.scores.values()), len(self.scores)
        row: dict[str, Any] = {
            "method": self.name,
            "answers": len(self.records),
            "failed": len(errors) - errors.count(None),
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds if seconds else None,
            **self.speed_over(plain).as_dict("speedup"),
            **self.speed_over(exact).as_dict("speed_over_exact"),
            "latency": median_and_p95(waits),
            "cut_off": self.total("cut_off"),
            "tau": sum(accepted) / len(accepted) if accepted else None,
            "tau_by_category": {
                name: sum(found) / len(found) for name, found in by_category.items() if found
            },
            # The fraction of target passes that emit at least 1, 2, 3, ... tokens.
            "reach": [
                sum(length >= least for length in accepted) / len(accepted)
                for least in range(1, max(accepted, default=0) + 1)
            ],
            "memory": max(peaks, default=0) or None,
            "origins": {
                name: origins[name] / origins.total() if origins else None
                for name in ("exact", "fuzzy", "target")
            },
            "accuracy": right / scored if scored else None,
            "accuracy_interval": proportion_interval(right, scored) if scored else None,
            "scored": scored,
            **mean(list(self.likelihoods.values())).as_dict("log_likelihood"),
            "regret": regret_summary(self.records),
        }
        if hf is not None:
            row |= self.speed_over(hf).as_dict("speed_over_hf")
        if self.phases is not None:
            own, other = self.seconds_per_step, exact.seconds_per_step if exact else None
            decoding = sum(self.phases.values())
            row["seconds_per_step"] = own
            row["step_over_exact"] = own / other if own and other else None
            row["phase_shares"] = {
                name: spent / decoding for name, spent in self.phases.items() if decoding
            }
        if exact is not None and exact is not self:
            row["against_exact"] = self._compare_quality(exact)
        return row

    def _compare_quality(self, exact: Summary) -> dict[str, Any]:
        """Compare with exact decoding on the same questions, paired to cancel their difficulty."""
        found: dict[str, Any] = {"agreement": agreement(exact.records, self.records)}
        both = [key for key in exact.scores if key in self.scores]
        if both:
            lost = sum(exact.scores[key] and not self.scores[key] for key in both)
            gained = sum(self.scores[key] and not exact.scores[key] for key in both)
            found["accuracy_change"] = (gained - lost) / len(both)
            found |= {"lost": lost, "gained": gained, "paired": len(both)}
            found["mcnemar_p"] = mcnemar_p(lost, gained)
        shared = [key for key in exact.likelihoods if key in self.likelihoods]
        if shared:
            change = mean([self.likelihoods[k] - exact.likelihoods[k] for k in shared])
            found |= change.as_dict("log_likelihood_change")
        return found


def summarize(
    methods: Sequence[str],
    records: Mapping[str, Sequence[Record]],
    scores: Mapping[str, dict[int | str, bool]],
    reference: str = "exact",
) -> list[dict[str, Any]]:
    """Summarize the answers of several methods as a row each."""
    found = {name: Summary(name, records[name], scores[name]) for name in methods}
    references = [found.get(name) for name in ("plain", reference, "hf")]
    return [found[name].as_row(*references) for name in methods]


def limit_losses(
    rows: Sequence[dict[str, Any]], others: int = 0, confidence: float = CONFIDENCE
) -> dict[str, float]:
    """Bound the loss of accuracy and the share of changed answers of all methods but baselines.

    The bounds of one kind hold for all methods at once. ``against_exact`` gets ``loss_limit``, an
    exact upper limit on the loss of accuracy, and its ``agreement`` gets ``changed_limit``. The
    error probability is divided among the methods and ``others``, the number of those that may
    still be tested on the same questions (Bonferroni). Returns the confidence of the limits of one
    kind together and that of each, as values of the report.
    """
    compared = [
        row["against_exact"]
        for row in rows
        if "against_exact" in row and row["method"] not in BASELINES
    ]
    level = confidence_per_test(confidence, max(1, len(compared) + others))
    for against in compared:
        if "lost" in against:
            counts = (against[name] for name in ("lost", "gained", "paired"))
            against["loss_limit"] = loss_bound(*counts, level)
        against["agreement"]["changed_limit"] = changed_limit(against["agreement"], level)
    return {"confidence": confidence, "limit_confidence": level}


def score_records(
    questions: Sequence[Question],
    records: Sequence[Record],
    run: Callable[[Program], RunResult] | None,
    advance: Callable[[], None],
) -> dict[int | str, bool]:
    """Return whether the last turn of each answer is correct, by question that has a score.

    ``advance`` is called after each answer.
    """
    by_id = {question.question_id: question for question in questions}
    found = {}
    for record in records:
        answer = record["choices"][0]["turns"][-1]
        right = score(by_id[record["question_id"]], answer, run)
        if right is not None:
            found[record["question_id"]] = right
        advance()
    return found


def preserved_answers(
    records: Sequence[Record], exact: Sequence[Record], config: MeasureConfig
) -> dict[int | str, bool]:
    """Return whether each answer agrees with exact decoding's, or has a small regret."""
    theirs = {record["question_id"]: record["choices"][0]["token_ids"] for record in exact}
    found = {}
    for record in records:
        key, choice = record["question_id"], record["choices"][0]
        if config.max_regret is not None:
            regret = sum(chain(*choice["regrets"]))
            found[key] = regret <= config.max_regret * sum(choice["new_tokens"])
        elif key in theirs:
            found[key] = choice["token_ids"] == theirs[key]
    return found


def harness_accuracy(
    questions: Sequence[Question], records: Sequence[Record]
) -> dict[str, float] | None:
    """Return the accuracies that lm-evaluation-harness gives for IFEval or, for numbers, GSM8K.

    None for questions of other kinds.
    """
    prompts = {item.question_id: item for item in questions if item.scored_by == "instructions"}
    if prompts:
        return ifeval.accuracies(
            ifeval.check(prompts[key], strip_reasoning(record["choices"][0]["turns"][-1]))
            for record in records
            if (key := record["question_id"]) in prompts
        )
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


def sample_records(records: Sequence[Record], sample: int) -> list[Record]:
    """Return the records of one sample, as if it were the only one."""
    return [{**record, "choices": [record["choices"][sample]]} for record in records]


def pass_at_k(correct: int, count: int, k: int) -> float:
    """Estimate the probability that at least one of ``k`` samples is correct, without bias.

    The estimate is ``1 - C(n - c, k) / C(n, k)`` (Chen et al., "Evaluating Large Language Models
    Trained on Code", arXiv 2107.03374, equation 1), of ``c`` correct samples out of ``n``.
    """
    if not 1 <= k <= count:
        raise ValueError(f"k must be in [1, {count}]; got {k}")
    return 1.0 - math.comb(count - correct, k) / math.comb(count, k)


def summarize_samples(
    scores: Sequence[SampleScores], seeds: int, exact: Sequence[SampleScores] | None = None
) -> dict[str, Any] | None:
    """Summarize the scores of several samples per question; the samples of a seed are adjacent.

    ``accuracy_interval`` treats the mean of a question's samples as one value, so it is about other
    questions. ``seed_accuracies_interval`` is about other seeds on the same questions. Questions
    without a score for every sample are left out. Return None if no question remains.
    """
    right = _count_correct(scores)
    if not right:
        return None
    count = len(scores)
    means = {key: correct / count for key, correct in right.items()}
    each = count // seeds
    by_seed = [
        mean([sample[key] for sample in scores[first : first + each] for key in right])
        for first in range(0, count, each)
    ]
    sizes = [*(k for k in PASS_AT if k < count), count]
    passes = {
        str(k): _mean_share([pass_at_k(correct, count, k) for correct in right.values()])
        for k in sizes
    }
    found: dict[str, Any] = {
        "samples": count,
        **_mean_share(list(means.values())).as_dict("accuracy"),
        "seed_accuracies": [item.value for item in by_seed],
        "seed_accuracies_interval": _mean_share([item.value for item in by_seed]).interval,
        "pass_at": {k: item.value for k, item in passes.items()},
        "pass_at_intervals": {k: item.interval for k, item in passes.items()},
    }
    if exact is not None:
        theirs = _count_correct(exact)
        changes = [means[key] - theirs[key] / count for key in means if key in theirs]
        if changes:
            found |= mean(changes).as_dict("accuracy_change")
    return found


def _mean_share(values: Sequence[float]) -> Estimate:
    """Return the mean of values in [0, 1], with its interval clipped to that range."""
    found = mean(values)
    if found.interval is None:
        return found
    low, high = found.interval
    return Estimate(found.value, (max(0.0, low), min(1.0, high)))


def _count_correct(scores: Sequence[SampleScores]) -> dict[int | str, int]:
    """Return the number of correct samples of each question whose samples all have a score."""
    return {
        key: sum(sample[key] for sample in scores)
        for key in scores[0]
        if all(key in sample for sample in scores)
    }
