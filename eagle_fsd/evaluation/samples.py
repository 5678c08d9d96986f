"""Summarize several samples of each answer: pass@k, and means over samples and seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from eagle_fsd.evaluation.answer_store import Record
from eagle_fsd.evaluation.statistics import Mean

#: Values of k for which pass@k is reported, besides the number of samples.
PASS_AT = (5, 10, 50, 100, 500, 1000)

#: Whether each answer of one sample is correct, by question.
SampleScores = Mapping[int | str, bool]


def sample_records(records: Sequence[Record], sample: int) -> list[Record]:
    """Return the records of one sample, as if it were the only one.

    Args:
        records: Records with several choices.
        sample: Index of the sample.
    """
    return [{**record, "choices": [record["choices"][sample]]} for record in records]


def pass_at_k(correct: int, count: int, k: int) -> float:
    """Estimate the probability that at least one of ``k`` samples is correct, without bias.

    The estimate is ``1 - C(n - c, k) / C(n, k)`` (Chen et al., "Evaluating Large Language Models
    Trained on Code", arXiv 2107.03374, equation 1).

    Args:
        correct: Number of correct samples, c.
        count: Number of samples, n.
        k: Number of samples that are drawn.

    Raises:
        ValueError: ``k`` is not in [1, n].
    """
    if not 1 <= k <= count:
        raise ValueError(f"k must be in [1, {count}]; got {k}")
    return 1.0 - math.comb(count - correct, k) / math.comb(count, k)


def summarize_samples(
    scores: Sequence[SampleScores], seeds: int, exact: Sequence[SampleScores] | None = None
) -> dict[str, Any] | None:
    """Summarize the scores of several samples of each answer.

    Args:
        scores: The scores of each sample; the samples of a seed follow each other.
        seeds: Number of seeds.
        exact: The scores of exact decoding's samples, to compare with.

    Returns:
        ``samples`` (their number), ``accuracy`` (over all samples), ``accuracy_interval`` (95%,
        over questions, whose samples are averaged), ``seed_accuracies``,
        ``seed_accuracies_interval`` (95% of their mean, over seeds, for the same questions),
        ``pass_at`` (values by k, as strings) with ``pass_at_intervals``; given ``exact``,
        ``accuracy_change`` and ``accuracy_change_interval`` (over questions). Questions of which a
        sample has no score are omitted; None without any.
    """
    right = _count_correct(scores)
    if not right:
        return None
    count = len(scores)
    means = {key: correct / count for key, correct in right.items()}
    each = count // seeds
    by_seed = [
        Mean.of([sample[key] for sample in scores[first : first + each] for key in right])
        for first in range(0, count, each)
    ]
    sizes = [*(k for k in PASS_AT if k < count), count]
    passes = {
        str(k): Mean.of([pass_at_k(correct, count, k) for correct in right.values()]) for k in sizes
    }
    found: dict[str, Any] = {
        "samples": count,
        **Mean.of(list(means.values())).as_dict("accuracy"),
        "seed_accuracies": [item.value for item in by_seed],
        "seed_accuracies_interval": Mean.of([item.value for item in by_seed]).interval,
        "pass_at": {k: item.value for k, item in passes.items()},
        "pass_at_intervals": {k: item.interval for k, item in passes.items()},
    }
    if exact is not None:
        theirs = _count_correct(exact)
        change = Mean.of([means[key] - theirs[key] / count for key in means if key in theirs])
        if change.count:
            found |= change.as_dict("accuracy_change")
    return found


def _count_correct(scores: Sequence[SampleScores]) -> dict[int | str, int]:
    """Return the number of correct samples of each question whose samples all have a score."""
    return {
        key: sum(sample[key] for sample in scores)
        for key in scores[0]
        if all(key in sample for sample in scores)
    }
