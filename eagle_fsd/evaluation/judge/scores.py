"""What judgments come to: each method's score, by turn and category, and against exact decoding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eagle_fsd.evaluation.judge.judging import Judgment
from eagle_fsd.evaluation.judge.prompts import NO_RATING
from eagle_fsd.evaluation.statistics import Mean


def judge_summary(
    judgments: Sequence[Judgment], baseline: str = "exact"
) -> dict[str, dict[str, Any]]:
    """What the judge thinks of each method, in plain values.

    Each method has ``score`` (mean), ``score_interval`` (95 %), ``rated`` and ``unrated`` (turns),
    ``by_turn`` and ``by_category`` (the same four of a part), and, if the baseline is there,
    ``against_{baseline}``: ``score_change`` (mean difference over the turns that both have a rating
    of), ``score_change_interval``, ``turns``. What nothing is known of is None. The intervals take
    questions for independent, not the turns of one.
    """
    by_method: dict[str, list[Judgment]] = defaultdict(list)
    for judgment in judgments:
        by_method[judgment.model].append(judgment)
    exact = _ratings(by_method.get(baseline, []))
    summary = {}
    for method, found in by_method.items():
        row = _part(found)
        row["by_turn"] = _parts(found, lambda judgment: str(judgment.turn))
        row["by_category"] = _parts(found, lambda judgment: judgment.category)
        if baseline in by_method and method != baseline:
            own = _ratings(found)
            change = {key: own[key] - exact[key] for key in exact if key in own}
            row[f"against_{baseline}"] = {
                "score_change": sum(change.values()) / len(change) if change else None,
                "score_change_interval": _interval(change),
                "turns": len(change),
            }
        summary[method] = row
    return summary


def _ratings(judgments: Sequence[Judgment]) -> dict[tuple[int | str, int], float]:
    """Scores by question and turn, without those that are none."""
    rated = (judgment for judgment in judgments if judgment.score != NO_RATING)
    return {(judgment.question_id, judgment.turn): judgment.score for judgment in rated}


def _part(judgments: Sequence[Judgment]) -> dict[str, Any]:
    ratings = _ratings(judgments)
    return {
        "score": sum(ratings.values()) / len(ratings) if ratings else None,
        "score_interval": _interval(ratings),
        "rated": len(ratings),
        "unrated": len(judgments) - len(ratings),
    }


def _interval(values: Mapping[tuple[int | str, int], float]) -> list[float] | None:
    """Of the mean over turns, with the turns of a question as one sample; None below two."""
    if not values:
        return None
    mean = sum(values.values()) / len(values)
    questions = len({question for question, _ in values})
    moved: dict[int | str, float] = defaultdict(float)  # by each question
    for (question, _), value in values.items():
        moved[question] += (value - mean) * questions / len(values)
    found = Mean.of(list(moved.values())).interval
    return found and [mean + end for end in found]


def _parts(
    judgments: Sequence[Judgment], name: Callable[[Judgment], str]
) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[Judgment]] = defaultdict(list)
    for judgment in judgments:
        groups[name(judgment)].append(judgment)
    return {key: _part(group) for key, group in groups.items()}
