"""Sweep over a grid of acceptance settings: one table, conclusions, and three plots."""

from __future__ import annotations

from collections.abc import Callable

from eagle_fsd.evaluation.analysis import conclusions, probe_divergences
from eagle_fsd.evaluation.config import EvaluationConfig, EvaluationRequest, GridConfig, SweepGrid
from eagle_fsd.evaluation.methods import EXACT, PLAIN, fsd_series, rule_methods
from eagle_fsd.evaluation.plots import draw_divergences, draw_positions, draw_tradeoff
from eagle_fsd.evaluation.runner import (
    Evaluation,
    Hooks,
    Report,
    ignore,
    run_evaluation,
)
from eagle_fsd.model.config import Settings
from eagle_fsd.utils.progress import ProgressFactory, no_progress


def sweep(
    request: EvaluationRequest,
    config: EvaluationConfig | None = None,
    grid: GridConfig | None = None,
    *,
    rules: bool = True,
    settings: Settings | None = None,
    progress: ProgressFactory = no_progress,
    on_report: Callable[[Report], None] | None = None,
) -> Report | None:
    """Evaluate every setting of a grid, and draw quality against speed.

    Writes ``tradeoff.png``, ``divergence.png`` and ``accepted.png`` beside the report.

    Args:
        request: What to evaluate.
        config: How answers are decoded; default: ``EvaluationConfig()``.
        grid: Acceptance settings; default: ``SweepGrid()``.
        rules: Also evaluate the acceptance rules of the literature.
        settings: Tree and acceptance options that override the head's ``fsd.json``.
        progress: Reports progress.
        on_report: Called with the report as soon as it is complete, or when the judge has failed.

    Returns:
        The report on the first process, None on the others. In addition to the values of
        :func:`~eagle_fsd.evaluation.runner.evaluate`, ``divergences`` summarizes the divergences at
        the nodes that exact decoding visits, and ``conclusions`` names the fastest settings.

    Raises:
        OptionsError, LoadError, QuestionSetError, JudgeError, ValueError: As in
            :func:`~eagle_fsd.evaluation.runner.evaluate`.
    """
    config, grid = config or EvaluationConfig(), grid or SweepGrid()
    series = fsd_series(grid)
    methods = [PLAIN, EXACT, *(method for group in series.values() for method in group)]
    if rules:
        methods += rule_methods()
    folder = request.output_folder("sweep")

    def extend(evaluation: Evaluation, report: Report) -> None:
        found = probe_divergences(
            evaluation.model,
            evaluation.questions,
            evaluation.chat_template,
            grid.divergences,
            config,
        )
        report["divergences"] = found.summary()
        report["conclusions"] = conclusions(report["rows"])
        lines = {label: [method.name for method in group] for label, group in series.items()}
        draw_tradeoff(report, lines, folder / "tradeoff.png")
        draw_divergences(found, grid.thresholds, report, folder / "divergence.png")
        draw_positions(report, folder / "accepted.png")

    hooks = Hooks(progress, on_report=extend, on_finish=on_report or ignore)
    return run_evaluation(request, config, methods, folder, settings, hooks)
