"""Calibration: choose the fastest settings for a pair whose loss of accuracy is within a bound.

Every setting is compared with exact decoding on the same questions. Part of the questions,
:data:`SELECTION_SHARE`, select a setting: the fastest one that is likely to be certified. The other
questions, which had no part in that choice, *certify* it: an exact upper confidence bound on its
loss (:func:`~eagle_fsd.evaluation.statistics.loss_bound`) must be within the allowed loss. A single
setting is tested, so that the error probability need not be divided, however many settings there
are to choose from. With the stated confidence, a certified setting loses no more than allowed on
questions like these.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list

from eagle_fsd.bundled import BUNDLED_HEAD
from eagle_fsd.evaluation.analysis import is_faster
from eagle_fsd.evaluation.code_execution.execution import CachedRunner
from eagle_fsd.evaluation.config import (
    CalibrationConfig,
    CalibrationGrid,
    EvaluationConfig,
    EvaluationRequest,
    GridConfig,
    LossBounds,
)
from eagle_fsd.evaluation.methods import EXACT, Method, fsd_series
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.questions.sets import find_questions
from eagle_fsd.evaluation.report import score_records, summarize
from eagle_fsd.evaluation.runner import (
    PROGRAMS_FILE,
    Evaluation,
    Hooks,
    Report,
    run_evaluation,
)
from eagle_fsd.evaluation.statistics import is_loss_below, loss_bound
from eagle_fsd.evaluation.tables import Row, Table
from eagle_fsd.model.config import SETTINGS_FILE, Settings
from eagle_fsd.utils.files import atomic_write
from eagle_fsd.utils.options import OptionsError
from eagle_fsd.utils.progress import ProgressFactory, no_progress

log = logging.getLogger(__name__)

#: Default number of bundled questions.
DEFAULT_COUNT = 1000
#: Part of the questions on which a setting is selected; the others certify it.
SELECTION_SHARE = 0.25
#: Relative difference below which two speeds count as equal; repeated timings vary by as much.
SPEED_TOLERANCE = 0.02
#: Minimum accuracy of exact decoding, in percent and as a multiple of the allowed loss. Below it
#: there is little accuracy to lose, usually because answers are cut off or cannot be parsed.
MIN_ACCURACY, MIN_ACCURACY_TO_LOSS = 5.0, 2.0


@dataclass(frozen=True)
class Verdict:
    """The result of testing one setting.

    Attributes:
        row: The setting's row of the report.
        drop: Upper bound on the loss of accuracy in percentage points.
        certified: Whether the loss is within the allowed one; None if an earlier failure ended the
            series.
    """

    row: Row
    drop: float
    certified: bool | None


@dataclass(frozen=True)
class Calibration:
    """The result of :func:`calibrate`.

    Attributes:
        report: The report of the last run, on all questions or, if no setting was selected, on
            those for the selection. ``calibration`` holds the chosen settings, ``selection`` the
            rows that the selection is based on, ``tables`` both stages and ``conclusions`` the
            conclusion.
        chosen: Name of the chosen method.
        table: The selection as a table.
        conclusion: A sentence on the chosen method that states its bound.
        files: The ``fsd.json`` files that were written.
    """

    report: Report
    chosen: str
    table: Table
    conclusion: str
    files: list[Path]


def calibrate(
    request: EvaluationRequest,
    bounds: LossBounds,
    config: EvaluationConfig | None = None,
    grid: GridConfig | None = None,
    *,
    install: bool = False,
    settings: Settings | None = None,
    progress: ProgressFactory = no_progress,
) -> Calibration | None:
    """Find the fastest settings whose loss of accuracy is within a bound, and save them.

    Writes ``fsd.json`` to the output folder. Logs a warning before decoding if there are too few
    questions to certify any setting.

    Args:
        request: What to evaluate. Without a count, :data:`DEFAULT_COUNT` of the bundled questions
            are answered.
        bounds: The largest loss to accept.
        config: How answers are decoded; default: ``CalibrationConfig()``.
        grid: Acceptance settings to choose from; default: ``CalibrationGrid()``.
        install: Also save ``fsd.json`` beside the head, where every command reads it.
        settings: Tree and acceptance options that override the head's ``fsd.json``.
        progress: Reports progress.

    Returns:
        The result on the first process, None on the others.

    Raises:
        OptionsError: ``install`` is set, but the head is not a local folder.
        ValueError: The questions or answers cannot support the bound.
        LoadError, QuestionSetError, JudgeError: As in
            :func:`~eagle_fsd.evaluation.runner.evaluate`.
    """
    drafter = Path(request.drafter) if request.drafter else BUNDLED_HEAD
    if install and not drafter.is_dir():
        raise OptionsError(f"--install requires a drafter in a local folder; got {drafter}")
    if request.questions == "bundled":
        request = request.updated(count=request.count or DEFAULT_COUNT)
    config, max_drop = config or CalibrationConfig(), bounds.max_drop
    series = fsd_series(grid or CalibrationGrid()).values()
    methods = [method for group in series for method in group]
    folder = request.output_folder("calibrate")
    questions = find_questions(request.questions, request.count, config.seed)
    selection = request.updated(
        count=max(1, round(SELECTION_SHARE * len(questions))), judge_base_url=None
    )
    used = find_questions(selection.questions, selection.count, config.seed)
    fresh = remove_questions(questions, used)
    selected: list[Method] = []
    outcome: list[tuple[str, Table, str]] = []

    def check(_: Sequence[Question]) -> None:
        if warning := check_questions(max_drop, bounds.confidence, fresh, request.execute_code):
            log.warning("%s", warning)

    def finish(report: Report, rows: Sequence[Row], verdict: Verdict | None) -> None:
        table = selection_table(rows, selected)
        method = selected[0] if verdict is not None and verdict.certified else EXACT
        report["selection"] = rows
        report["tables"] = [table, *([verdict_table([verdict])] if verdict is not None else [])]
        report["conclusions"] = [conclude(verdict, bounds, len(methods))]
        report["calibration"] = chosen_settings(method, verdict, bounds, report)
        outcome.append((method.name, table, report["conclusions"][0]))

    def choose(_: Evaluation, report: Report) -> None:
        rows = report["rows"]
        check_rows(rows, max_drop)
        best = select(rows, max_drop, bounds.confidence, len(fresh))
        selected.extend(method for method in methods if method.name == best["method"])
        if not selected:
            finish(report, rows, None)

    def test(evaluation: Evaluation, report: Report) -> None:
        rows = fresh_rows(evaluation, fresh)
        (verdict,) = certify(rows, [selected], max_drop, bounds.confidence)
        finish(report, first["rows"] if first is not None else [], verdict)

    hooks = Hooks(progress, on_questions=check, on_report=choose)
    report = first = run_evaluation(selection, config, [EXACT, *methods], folder, settings, hooks)
    names = [selected[0].name if selected else None]
    broadcast_object_list(names)
    if names[0] is not None:
        winner = next(method for method in methods if method.name == names[0])
        hooks = Hooks(progress, on_report=test)
        report = run_evaluation(request, config, [EXACT, winner], folder, settings, hooks)
    if report is None:
        return None
    files = [folder / SETTINGS_FILE]
    if install:
        files.append(drafter / SETTINGS_FILE)
    for file in files:
        atomic_write(file, json.dumps(report["calibration"], indent=2) + "\n")
    return Calibration(report, *outcome[0], files)


def remove_questions(questions: Sequence[Question], used: Sequence[Question]) -> list[Question]:
    """Return the questions that are not in another set; questions are compared by their turns.

    Args:
        questions: The questions.
        used: The questions to remove.
    """
    turns = {question.turns for question in used}
    return [question for question in questions if question.turns not in turns]


def check_questions(
    max_drop: float, confidence: float, questions: Sequence[Question], execute_code: bool
) -> str | None:
    """Check, before any question is answered, whether the questions can support the bound.

    Args:
        max_drop: The largest loss to accept, in percentage points.
        confidence: Confidence that the loss is within it.
        questions: The questions that will certify a setting.
        execute_code: Whether the code in answers is run.

    Returns:
        A warning if not even a lossless setting could be certified, else None.

    Raises:
        ValueError: Questions have no score.
    """
    kinds = {question.scored_by for question in questions}
    if "" in kinds:
        raise ValueError("these questions have no score, so that a loss cannot be bounded")
    if "code" in kinds and not execute_code:
        raise ValueError("answers with code are scored by running them; use --execute-code")
    least = 100 * loss_bound(0, 0, len(questions), confidence)
    if least <= max_drop:
        return None
    return (
        f"{len(questions)} fresh questions cannot show a loss below {least:.2f} points even if"
        f" nothing is lost; use more questions, or a --max-drop above {max_drop:g}"
    )


def check_rows(rows: Sequence[Row], max_drop: float) -> None:
    """Check whether settings can be compared.

    Args:
        rows: Rows of the report on which settings are selected.
        max_drop: The largest loss to accept, in percentage points.

    Raises:
        ValueError: Nothing was answered, speeds are not comparable, or exact decoding is too
            inaccurate.
    """
    if not all(row["tokens_per_second"] for row in rows):
        raise ValueError("no question was answered, so there is nothing to calibrate on")
    if not all(row["speed_over_exact"] for row in rows):
        raise ValueError(
            "exact decoding and the other methods were not answered in one run, so their speeds are"
            " not comparable; choose another output folder"
        )
    exact = next(row for row in rows if row["method"] == EXACT.name)
    points = 100 * (exact["accuracy"] or 0.0)
    if points < max(MIN_ACCURACY, MIN_ACCURACY_TO_LOSS * max_drop):
        raise ValueError(
            f"the accuracy of exact decoding is only {points:.1f}%, too low for a bound of"
            f" {max_drop:g} points ({exact['cut_off']} answers were cut off); check"
            " --max-new-tokens and the chat template"
        )


def select(rows: Sequence[Row], max_drop: float, confidence: float, fresh: int) -> Row:
    """Choose the fastest setting that is likely to be certified, or exact decoding.

    A setting is likely to be certified if it would be after losing as many of the fresh questions
    as its median-unbiased estimate says. Among settings within :data:`SPEED_TOLERANCE` of the
    fastest, choose the one with the smallest estimate.

    Args:
        rows: Rows of the report on which settings are selected.
        max_drop: The largest loss to accept, in percentage points.
        confidence: Confidence of the certificate.
        fresh: Number of fresh questions that will certify the setting.

    Returns:
        The row of the chosen method.
    """
    candidates = [(next(row for row in rows if row["method"] == EXACT.name), 0.0)]
    for row in rows:
        if row["method"] == EXACT.name or not is_faster(row):
            continue
        against = row["against_exact"]
        estimate = loss_bound(against["lost"], against["gained"], against["paired"], 0.5)
        gained = fresh * against["gained"] // against["paired"]
        lost = max(0, gained + math.ceil(estimate * fresh))
        if is_loss_below(max_drop / 100, lost, gained, max(fresh, lost + gained), confidence):
            candidates.append((row, estimate))
    speed = max(row["speed_over_exact"] for row, _ in candidates)
    near = [
        item for item in candidates if item[0]["speed_over_exact"] >= (1 - SPEED_TOLERANCE) * speed
    ]
    return min(near, key=lambda item: item[1])[0]


def fresh_rows(evaluation: Evaluation, fresh: Sequence[Question]) -> list[Row]:
    """Summarize the answers to fresh questions.

    Args:
        evaluation: The evaluation of exact decoding and the selected setting on all questions.
        fresh: The questions that had no part in the selection.

    Returns:
        A row per method.
    """
    ids = {question.question_id for question in fresh}
    records = {
        name: [item for item in found if item["question_id"] in ids]
        for name, found in evaluation.merge().items()
    }
    run = None
    if evaluation.execute_code:
        run = CachedRunner(evaluation.folder / PROGRAMS_FILE, evaluation.unsafe)
    scores = {name: score_records(fresh, found, run=run) for name, found in records.items()}
    return summarize(list(records), records, scores)


def certify(
    rows: Sequence[Row],
    series: Sequence[Sequence[Method]],
    max_drop: float,
    confidence: float,
) -> list[Verdict]:
    """Test every series of methods in order.

    The first failure ends a series, so that its methods share one error probability (fixed-sequence
    testing; Angelopoulos et al., "Learn then Test", arXiv 2110.01052). The error probability is
    divided among the series (Bonferroni). The order must not depend on the answers that are tested.

    Args:
        rows: Rows of the report.
        series: Series of methods; the first failure ends a series.
        max_drop: The largest loss to accept, in percentage points.
        confidence: Confidence that the losses of all certified methods are within it.

    Returns:
        A verdict on every method.

    Raises:
        ValueError: Nothing was answered, or there is no score to bound.
    """
    by_name = {row["method"]: row for row in rows}
    level = 1 - (1 - confidence) / len(series)
    verdicts = []
    for methods in series:
        active = True
        for method in methods:
            row = by_name[method.name]
            if "lost" not in row["against_exact"]:
                raise ValueError("these questions have no score, so that a loss cannot be bounded")
            lost, gained, paired = (
                row["against_exact"][name] for name in ("lost", "gained", "paired")
            )
            passed = is_loss_below(max_drop / 100, lost, gained, paired, level)
            drop = 100 * loss_bound(lost, gained, paired, level)
            verdicts.append(Verdict(row, drop, passed if active else None))
            active = active and passed
    return verdicts


def conclude(verdict: Verdict | None, bounds: LossBounds, settings: int) -> str:
    """Return a sentence on the outcome that states the bound.

    Args:
        verdict: The verdict on the selected setting; None if none was selected.
        bounds: The largest loss to accept.
        settings: Number of settings to choose from.
    """
    allowed = f"{bounds.max_drop:g} points"
    if verdict is None:
        return (
            f"Exact decoding: none of {settings} settings is faster and likely to be certified to"
            f" lose at most {allowed} on this many questions."
        )
    row, against = verdict.row, verdict.row["against_exact"]
    measured = (
        f"on {against['paired']} questions that had no part in its selection, it lost"
        f" {against['lost']} answers and gained {against['gained']}, so that with"
        f" {100 * bounds.confidence:g}% confidence it loses at most {verdict.drop:.2f} points of"
        " accuracy relative to exact decoding"
    )
    if not verdict.certified:
        return f"Exact decoding: {row['method']} is not certified; {measured}, not {allowed}."
    return f"{row['method']}, {row['speed_over_exact']:.2f} times exact decoding: {measured}."


def chosen_settings(
    method: Method, verdict: Verdict | None, bounds: LossBounds, report: Report
) -> dict[str, Any]:
    """Return the contents of ``fsd.json``: the settings, and how they were chosen (``about``).

    Args:
        method: The chosen method.
        verdict: The verdict on the selected setting; None if none was selected.
        bounds: The largest loss to accept.
        report: The report.
    """
    row, exact = (
        next(item for item in report["rows"] if item["method"] == name)
        for name in (method.name, EXACT.name)
    )
    against = verdict.row["against_exact"] if verdict is not None else None
    # The tree is included because nothing is certified for another one.
    shared = (
        *("fallback", "selection", "price", "max_fuzzy_nats", "divergence_on"),
        *("total_tokens", "depth", "top_k"),
    )
    copied = ("questions", "count", "seed", "temperature", "batch", "max_new_tokens", "template")
    return {
        **method.acceptance,
        **{name: report["settings"][name] for name in shared},
        "about": {
            "made_by": "eagle-fsd calibrate",
            "max_drop_points": bounds.max_drop,
            "confidence": bounds.confidence,
            "tested": verdict.row["method"] if verdict is not None else None,
            "drop_is_below_points": verdict.drop if verdict is not None else None,
            "certified_on": against,
            "accuracy": row["accuracy"],
            "accuracy_exact": exact["accuracy"],
            "speed_over_exact": row["speed_over_exact"],
            "tau": row["tau"],
            "tau_exact": exact["tau"],
            **{name: report["about"][name] for name in (*copied, "target", "drafter")},
            "dtype": report["dtype"],
            "device": report["device"],
            "environment": report["environment"],
            "sessions": len(report["sessions"]),
        },
    }


def selection_table(rows: Sequence[Row], selected: Sequence[Method]) -> Table:
    """Return a table of the settings on the questions for the selection.

    Args:
        rows: Rows of the report.
        selected: The selected method, if any.
    """
    headers = ["selection", "tokens/s", "x exact", "tau", "accuracy", "lost/gained", "outcome"]
    names = [method.name for method in selected]
    return headers, [[*_cells(row), "selected" if row["method"] in names else ""] for row in rows]


def verdict_table(verdicts: Sequence[Verdict]) -> Table:
    """Return a table of the tested settings and their outcomes.

    Args:
        verdicts: The verdicts.
    """
    headers = ["certificate", "tokens/s", "x exact", "tau", "accuracy", "lost/gained"]
    headers += ["points lost <=", "outcome"]
    outcomes = {True: "within the bound", False: "exceeds the bound", None: "not tested"}
    return headers, [
        [*_cells(item.row), f"{item.drop:.2f}", outcomes[item.certified]] for item in verdicts
    ]


def _cells(row: Row) -> list[str]:
    """Return the cells that both tables share."""
    against = row.get("against_exact", {})
    return [
        row["method"],
        f"{row['tokens_per_second']:.1f}",
        f"{row['speed_over_exact']:.2f}",
        f"{row['tau']:.2f}",
        f"{row['accuracy']:.1%}" if row["accuracy"] is not None else "",
        f"{against['lost']}/{against['gained']}" if "lost" in against else "",
    ]
