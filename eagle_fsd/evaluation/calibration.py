"""Calibration: choose the fastest settings for a pair whose loss of quality is within a bound.

Every setting is compared with exact decoding on the same questions. It is *certified* if an upper
confidence bound on its loss is within the allowed loss. Among many settings some would pass by
chance. Therefore the thresholds of each series (settings that share a divergence and a floor
``min_ratio``) are tested in increasing order, the first failure ends the series, and the error
probability is divided among the series (fixed-sequence testing; Angelopoulos et al., "Learn then
Test", arXiv 2110.01052). With the stated confidence, no certified setting loses more than allowed
on questions like these. Of the certified settings within :data:`SPEED_TOLERANCE` of the fastest,
the one with the smallest bound is chosen. A bound on nats is an approximation, see
:func:`~eagle_fsd.evaluation.statistics.mean_loss_bound`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_fsd.bundled import BUNDLED_HEAD
from eagle_fsd.evaluation.analysis import is_faster
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
from eagle_fsd.evaluation.runner import (
    Evaluation,
    Hooks,
    Report,
    run_evaluation,
)
from eagle_fsd.evaluation.statistics import MIN_LOSSES, loss_bound, mean_loss_bound
from eagle_fsd.evaluation.tables import Row, Table
from eagle_fsd.model.config import SETTINGS_FILE, Settings
from eagle_fsd.utils.files import atomic_write
from eagle_fsd.utils.options import OptionsError
from eagle_fsd.utils.progress import ProgressFactory, no_progress

log = logging.getLogger(__name__)

#: Default number of bundled questions.
DEFAULT_COUNT = 1000
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
        drop: Upper bound on the loss of accuracy in percentage points; None if not bounded.
        nats: Upper bound on the loss in nats per token; None if not bounded.
        certified: Whether the loss is within the bounds; None if an earlier failure ended the
            series.
    """

    row: Row
    drop: float | None
    nats: float | None
    certified: bool | None


@dataclass(frozen=True)
class Calibration:
    """The result of :func:`calibrate`.

    Attributes:
        report: The report; ``calibration`` holds the chosen settings, ``tables`` the verdicts.
        chosen: Name of the chosen method.
        table: The verdicts as a table.
        files: The ``fsd.json`` files that were written.
    """

    report: Report
    chosen: str
    table: Table
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
    """Find the fastest settings whose loss of quality is within bounds, and save them.

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
        ValueError: The questions or answers cannot support the bounds.
        LoadError, QuestionSetError, JudgeError: As in
            :func:`~eagle_fsd.evaluation.runner.evaluate`.
    """
    drafter = Path(request.drafter) if request.drafter else BUNDLED_HEAD
    if install and not drafter.is_dir():
        raise OptionsError(f"--install requires a drafter in a local folder; got {drafter}")
    if request.questions == "bundled":
        request = request.updated(count=request.count or DEFAULT_COUNT)
    series = list(fsd_series(grid or CalibrationGrid()).values())
    methods = [method for group in series for method in group]
    folder = request.output_folder("calibrate")
    found: list[tuple[str, Table]] = []

    def check(questions: Sequence[Question]) -> None:
        if warning := check_questions(bounds, questions, len(series), request.execute_code):
            log.warning("%s", warning)

    def choose(evaluation: Evaluation, report: Report) -> None:
        verdicts = certify(report["rows"], series, bounds, evaluation.losses)
        best = fastest(report["rows"], verdicts)
        table = verdict_table(verdicts)
        report["calibration"] = chosen_settings(best, methods, verdicts, bounds, report)
        report["tables"] = [table]
        found.append((best["method"], table))

    report = run_evaluation(
        request,
        config or CalibrationConfig(),
        [EXACT, *methods],
        folder,
        settings,
        Hooks(progress, on_questions=check, on_report=choose),
    )
    if report is None:
        return None
    files = [folder / SETTINGS_FILE]
    if install:
        files.append(drafter / SETTINGS_FILE)
    for file in files:
        atomic_write(file, json.dumps(report["calibration"], indent=2) + "\n")
    ((chosen, table),) = found
    return Calibration(report, chosen, table, files)


def check_questions(
    bounds: LossBounds, questions: Sequence[Question], series: int, execute_code: bool
) -> str | None:
    """Check, before any question is answered, whether the questions can support the bounds.

    Args:
        bounds: The largest loss to accept.
        questions: The questions.
        series: Number of series of settings.
        execute_code: Whether the code in answers is run.

    Returns:
        A warning if not even a lossless setting could be certified, else None.

    Raises:
        ValueError: A bound on accuracy is set and questions have no score, or a bound on nats is
            set and there are too few questions for it.
    """
    if bounds.max_nats is not None and len(questions) < MIN_LOSSES:
        raise ValueError(
            f"a bound on nats per token requires at least {MIN_LOSSES} questions; got"
            f" {len(questions)}"
        )
    if bounds.max_drop is None:
        return None
    kinds = {question.scored_by for question in questions}
    if "" in kinds:
        raise ValueError("these questions have no score; use --max-nats instead of --max-drop")
    if "code" in kinds and not execute_code:
        raise ValueError("answers with code are scored by running them; use --execute-code")
    least = 100 * loss_bound(0, 0, len(questions), bounds.level(series))
    if least <= bounds.max_drop:
        return None
    return (
        f"{len(questions)} questions cannot show a loss below {least:.2f} points even if nothing is"
        f" lost; use more questions, or a --max-drop above {bounds.max_drop:g}"
    )


def certify(
    rows: Sequence[Row],
    series: Sequence[Sequence[Method]],
    bounds: LossBounds,
    losses: Callable[[str], Sequence[float]],
) -> list[Verdict]:
    """Test every series of methods in order.

    Args:
        rows: Rows of the report.
        series: Series of methods; the first failure ends a series.
        bounds: The largest loss to accept.
        losses: Returns a method's loss by question, in nats per token.

    Returns:
        A verdict on every method.

    Raises:
        ValueError: Nothing was answered, speeds are not comparable, there is no score to bound,
            exact decoding is too inaccurate, or there are too few questions for a bound on nats.
    """
    by_name = {row["method"]: row for row in rows}
    if not all(row["tokens_per_second"] for row in rows):
        raise ValueError("no question was answered, so there is nothing to calibrate on")
    if not all(row["speed_over_exact"] for row in rows):
        raise ValueError(
            "exact decoding and the other methods were not answered in one run, so their speeds are"
            " not comparable; choose another output folder"
        )
    level = bounds.level(len(series))
    if bounds.max_drop is not None:
        _check_accuracy(by_name[EXACT.name], bounds.max_drop)
    verdicts = []
    for methods in series:
        active = True
        for method in methods:
            row = by_name[method.name]
            drop, nats = _bound_losses(row, bounds, level, losses)
            passed = (drop is None or drop <= (bounds.max_drop or 0.0)) and (
                nats is None or nats <= (bounds.max_nats or 0.0)
            )
            verdicts.append(Verdict(row, drop, nats, passed if active else None))
            active = active and passed
    return verdicts


def _check_accuracy(exact: Row, max_drop: float) -> None:
    """Raise ValueError if exact decoding is too inaccurate for a bound on the loss."""
    points = 100 * (exact["accuracy"] or 0.0)
    if points < max(MIN_ACCURACY, MIN_ACCURACY_TO_LOSS * max_drop):
        raise ValueError(
            f"the accuracy of exact decoding is only {points:.1f}%, too low for a bound of"
            f" {max_drop:g} points ({exact['cut_off']} answers were cut off); check"
            " --max-new-tokens and the chat template"
        )


def _bound_losses(
    row: Row, bounds: LossBounds, level: float, losses: Callable[[str], Sequence[float]]
) -> tuple[float | None, float | None]:
    """Return upper bounds on the losses that ``bounds`` limits, in points and nats per token."""
    against = row["against_exact"]
    drop = nats = None
    if bounds.max_drop is not None:
        if "lost" not in against:
            raise ValueError("these questions have no score; use --max-nats instead of --max-drop")
        drop = 100 * loss_bound(against["lost"], against["gained"], against["paired"], level)
    if bounds.max_nats is not None:
        nats = mean_loss_bound(losses(row["method"]), level)
    return drop, nats


def fastest(rows: Sequence[Row], verdicts: Sequence[Verdict]) -> Row:
    """Choose the fastest certified setting, or exact decoding if none is faster.

    Among settings within :data:`SPEED_TOLERANCE` of the fastest, choose the smallest bound.

    Args:
        rows: Rows of the report.
        verdicts: The verdicts on the settings.

    Returns:
        The row of the chosen method.
    """
    exact = next(row for row in rows if row["method"] == EXACT.name)
    candidates = [(exact, (0.0, 0.0))]
    candidates += [
        (verdict.row, (verdict.drop or 0.0, verdict.nats or 0.0))
        for verdict in verdicts
        if verdict.certified and is_faster(verdict.row)
    ]
    speed = max(row["speed_over_exact"] for row, _ in candidates)
    near = [
        item for item in candidates if item[0]["speed_over_exact"] >= (1 - SPEED_TOLERANCE) * speed
    ]
    return min(near, key=lambda item: item[1])[0]


def chosen_settings(
    row: Row,
    methods: Sequence[Method],
    verdicts: Sequence[Verdict],
    bounds: LossBounds,
    report: Report,
) -> dict[str, Any]:
    """Return the contents of ``fsd.json``: the settings, and how they were chosen (``about``).

    Args:
        row: Row of the chosen method.
        methods: The methods that were tested.
        verdicts: The verdicts on them.
        bounds: The largest loss to accept.
        report: The report.
    """
    method = next(method for method in (EXACT, *methods) if method.name == row["method"])
    exact = next(item for item in report["rows"] if item["method"] == EXACT.name)
    verdict = next((item for item in verdicts if item.row is row), None)
    # The tree is included because nothing is certified for another one.
    shared = ("fallback", "selection", "divergence_on", "total_tokens", "depth", "top_k")
    copied = ("questions", "count", "seed", "temperature", "batch", "max_new_tokens", "template")
    return {
        **method.acceptance,
        **{name: report["settings"][name] for name in shared},
        "about": {
            "made_by": "eagle-fsd calibrate",
            "max_drop_points": bounds.max_drop,
            "max_nats_a_token": bounds.max_nats,
            "confidence": bounds.confidence,
            "drop_is_below_points": verdict.drop if verdict else 0.0,
            "nats_are_below": verdict.nats if verdict else 0.0,
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


def verdict_table(verdicts: Sequence[Verdict]) -> Table:
    """Return a table of the settings and their outcomes.

    Args:
        verdicts: The verdicts.
    """
    headers = ["setting", "tokens/s", "x exact", "tau", "accuracy", "lost/gained"]
    headers += ["points lost <=", "nats lost <=", "outcome"]
    outcomes = {True: "within the bound", False: "exceeds the bound", None: "not tested"}
    cells = []
    for verdict in verdicts:
        row, against = verdict.row, verdict.row["against_exact"]
        cells.append(
            [
                row["method"],
                f"{row['tokens_per_second']:.1f}",
                f"{row['speed_over_exact']:.2f}",
                f"{row['tau']:.2f}",
                f"{row['accuracy']:.1%}" if row["accuracy"] is not None else "",
                f"{against['lost']}/{against['gained']}" if "lost" in against else "",
                "" if verdict.drop is None else f"{verdict.drop:.2f}",
                "" if verdict.nats is None else f"{verdict.nats:.4f}",
                outcomes[verdict.certified],
            ]
        )
    return headers, cells
