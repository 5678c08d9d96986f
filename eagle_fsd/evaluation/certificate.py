"""Certify the settings that a calibration selected, on questions that had no part in that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from eagle_fsd.evaluation.config import LossBounds
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.statistics import confidence_per_test, least_questions, loss_bound
from eagle_fsd.evaluation.tables import Row, measured, points_text
from eagle_fsd.model.config import Certificate, SamplingConfig
from eagle_fsd.utils.options import OptionsError

#: Part of the questions on which settings are selected; the others certify them.
SELECTION_SHARE = 0.2
#: Largest number of settings to test.
MAX_TESTS = 3
#: Error for questions without reference answers.
NO_SCORE = (
    "some questions have no score, so a loss of accuracy cannot be bounded: add reference answers,"
    " pass --grader, or calibrate with --measure agreement"
)


def outcomes(row: Row) -> tuple[int, int, int]:
    """Return the numbers of lost, gained and paired questions."""
    against = row["against_exact"]
    if "lost" not in against:
        raise ValueError(NO_SCORE)
    return against["lost"], against["gained"], against["paired"]


def is_certified(row: Row, bounds: LossBounds) -> bool:
    """Return whether a report's limit on a method's loss is within the allowed loss."""
    return bool(row["against_exact"]["loss_limit"] <= bounds.max_drop / 100)


def certificate_of(report: dict[str, Any], row: Row, decoder: str) -> Certificate:
    """Return the certificate of a setting that passed its test on the questions of a report."""
    about = report["about"]
    lost, gained, paired = outcomes(row)
    return Certificate(
        decoder=decoder,
        measure=f"{measured(report)} on {about['questions']}",
        questions=paired,
        lost=lost,
        gained=gained,
        bound=100 * max(0.0, row["against_exact"]["loss_limit"]),
        confidence=report["confidence"],
        temperature=about["temperature"],
        revision=report["environment"]["revision"],
    )


def split_questions(questions: Sequence[Question]) -> tuple[list[Question], list[Question]]:
    """Split questions into those that select settings and those that certify them.

    The former are the first questions of each category, :data:`SELECTION_SHARE` of all questions
    but at least one in total, with the shares of the categories in the whole set, up to rounding.
    The latter are the others, without those that repeat the turns of one of the former.
    """
    count = max(1, round(SELECTION_SHARE * len(questions)))
    categories = Counter(question.category for question in questions)
    # The category at evenly spaced places, if questions were sorted by category.
    places = list(categories.elements())
    quota = Counter(places[int((at + 0.5) * len(places) / count)] for at in range(count))
    used = []
    for question in questions:
        if quota[question.category]:
            quota[question.category] -= 1
            used.append(question)
    return used, without_repeated(questions, used)


def without_repeated(questions: Sequence[Question], used: Sequence[Question]) -> list[Question]:
    """Leave out questions whose turns are those of a used one, whatever precedes them."""
    known = {question.turns for question in used}
    return [item for item in questions if item.turns not in known]


def count_unscored_as_wrong(question: Question) -> Question:
    """Count answers that the user's grader leaves without a score as wrong."""
    grade = question.grade
    if grade is None:
        return question
    return replace(question, grade=lambda answer, asked: bool(grade(answer, asked)))


def check_scores(questions: Sequence[Question], execute_code: bool) -> None:
    """Raise a ValueError unless the answers to all questions will have a score."""
    kinds = {question.scored_by for question in questions}
    if "" in kinds:
        raise ValueError(NO_SCORE)
    if "code" in kinds and not execute_code:
        raise ValueError("answers with code are scored by running them; use --execute-code")


def check_sampling(config: SamplingConfig) -> None:
    """Raise an OptionsError for sampling options that a certificate does not state."""
    for name in ("top_p", "top_k", "min_p") if config.temperature else ():
        if getattr(config, name) != SamplingConfig.model_fields[name].default:
            raise OptionsError(
                "a certificate states no sampling option except the temperature:"
                f" --{name.replace('_', '-')} is not supported"
            )


def warn_of_few(bounds: LossBounds, fresh: Sequence[Question]) -> str | None:
    """Return a warning if not even a lossless setting could be certified."""
    least = loss_bound(0, 0, len(fresh), bounds.confidence)
    if 100 * least <= bounds.max_drop:
        return None
    advice = "use"
    if bounds.max_drop:
        one, several = (
            least_questions(bounds.max_drop / 100, confidence_per_test(bounds.confidence, tests))
            for tests in (1, MAX_TESTS)
        )
        advice = f"{one} can, {several} if {MAX_TESTS} settings are tested; use more questions, or"
    return (
        f"{len(fresh)} fresh questions cannot show a loss within --max-drop {bounds.max_drop:g}"
        f" even if nothing is lost; {advice} a --max-drop of at least {points_text(least)}"
    )


def conclude(
    rows: Sequence[Row],
    bounds: LossBounds,
    tests: int,
    choices: int,
    measure: str = "accuracy",
) -> str:
    """Return the outcome of testing up to ``tests`` of ``choices`` settings, with the bound.

    ``rows`` are those of the tested ones.
    """
    allowed = f"{bounds.max_drop:g} point{'' if bounds.max_drop == 1.0 else 's'}"
    if not rows:
        return (
            f"Exact decoding: none of {choices} settings is faster and likely to be certified to"
            f" lose at most {allowed} on this many questions."
        )
    last = rows[-1]
    paired = last["against_exact"]["paired"]
    confidence = f"with {100 * bounds.confidence:g}% confidence"
    if is_certified(last, bounds):
        sentences = [
            f"{last['method']}, {last['speed_over_exact']:.2f} times exact decoding: on"
            f" {paired} questions that had no part in its selection, it {_changes(last)}, so"
            f" {confidence} it loses at most {_limit(last)} of {measure}"
            " relative to exact decoding."
        ]
        sentences += [
            f"{item['method']} was tested before and is not certified: it {_changes(item)},"
            f" which shows at most {_limit(item)}, not {allowed}."
            for item in rows[:-1]
        ]
    else:
        found = "; ".join(
            f"{item['method']} {_changes(item)}, so it loses at most {_limit(item)}"
            for item in rows
        )
        sentences = [
            f"Exact decoding: nothing is certified to lose at most {allowed} of {measure} relative"
            f" to exact decoding. On {paired} questions that had no part in the selection,"
            f" {confidence}: {found}."
        ]
    if tests > 1:
        level = confidence_per_test(bounds.confidence, tests)
        sentences.append(
            f"Each of up to {tests} tests has a confidence of {100 * level:.4g}%, so the"
            " stated one holds whichever setting is reported."
        )
    return " ".join(sentences)


def _changes(row: Row) -> str:
    lost, gained, _ = outcomes(row)
    return f"lost {lost} answers and gained {gained}"


def _limit(row: Row) -> str:
    return f"{points_text(row['against_exact']['loss_limit'])} points"
