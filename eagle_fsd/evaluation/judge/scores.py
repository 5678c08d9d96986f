"""Summarize judgments: scores by method, turn and category, and the change from exact decoding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from eagle_fsd.evaluation.judge.grading import Judgment
from eagle_fsd.evaluation.judge.prompts import NO_RATING
from eagle_fsd.evaluation.methods import EXACT
from eagle_fsd.evaluation.statistics import Mean

#: Scores by question id and turn.
_Scores = dict[tuple[int | str, int], float]


def judge_summary(judgments: Sequence[Judgment]) -> dict[str, dict[str, Any]]:
    """Summarize the judgments of each method.

    Args:
        judgments: The judgments of all methods.

    Returns:
        For each method ``score`` (the mean), ``score_interval`` (95%), ``rated`` and ``unrated``
        (numbers of turns), ``by_turn`` and ``by_category`` (the same four values for each part).
        If exact decoding was judged, the other methods also have ``against_exact``:
        ``score_change`` (the mean difference over the turns for which both have a rating),
        ``score_change_interval`` and ``turns`` (their number). Values that cannot be computed are
        None. Intervals treat questions, but not the turns of a question, as independent.
    """
    by_method = _group(judgments, lambda judgment: judgment.model)
    exact_scores = _scores(by_method.get(EXACT.name, []))
    summary = {}
    for method, group in by_method.items():
        row = _summarize(group)
        by_turn = _group(group, lambda judgment: str(judgment.turn))
        row["by_turn"] = {turn: _summarize(part) for turn, part in by_turn.items()}
        by_category = _group(group, lambda judgment: judgment.category)
        row["by_category"] = {category: _summarize(part) for category, part in by_category.items()}
        if EXACT.name in by_method and method != EXACT.name:
            scores = _scores(group)
            change = {
                key: scores[key] - score for key, score in exact_scores.items() if key in scores
            }
            row["against_exact"] = {**_mean(change, "score_change"), "turns": len(change)}
        summary[method] = row
    return summary


def _group(
    judgments: Sequence[Judgment], key: Callable[[Judgment], str]
) -> dict[str, list[Judgment]]:
    """Group judgments by a key, in order of first appearance."""
    groups: dict[str, list[Judgment]] = defaultdict(list)
    for judgment in judgments:
        groups[key(judgment)].append(judgment)
    return groups


def _scores(judgments: Sequence[Judgment]) -> _Scores:
    """Return the scores of the judgments that have a rating."""
    rated = (judgment for judgment in judgments if judgment.score != NO_RATING)
    return {(judgment.question_id, judgment.turn): judgment.score for judgment in rated}


def _summarize(judgments: Sequence[Judgment]) -> dict[str, Any]:
    """Return the mean score, its interval, and the numbers of turns with and without a rating."""
    scores = _scores(judgments)
    unrated = len(judgments) - len(scores)
    return {**_mean(scores, "score"), "rated": len(scores), "unrated": unrated}


def _mean(values: _Scores, name: str) -> dict[str, Any]:
    """Return the mean over turns by name, and its interval; None below one and two questions.

    The turns of a question count as one sample: the question's influence on the mean.
    """
    if not values:
        return Mean.of([]).as_dict(name)
    mean = sum(values.values()) / len(values)
    count = len({question for question, _ in values})
    influence: dict[int | str, float] = defaultdict(float)
    for (question, _), value in values.items():
        influence[question] += (value - mean) * count / len(values)
    interval = Mean.of(list(influence.values())).interval
    limits = [mean + limit for limit in interval] if interval else None
    return {name: mean, f"{name}_interval": limits}
