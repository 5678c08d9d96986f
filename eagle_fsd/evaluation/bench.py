"""Benchmark: an evaluation that also times each phase of decoding."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from eagle_fsd.evaluation.config import BenchConfig, BenchGrid, EvaluationRequest, GridConfig
from eagle_fsd.evaluation.methods import EXACT, PLAIN, fsd_series, given_acceptance
from eagle_fsd.evaluation.runner import Report, evaluate
from eagle_fsd.model.config import Settings
from eagle_fsd.utils.options import OptionsError
from eagle_fsd.utils.progress import ProgressFactory, no_progress

#: Default number of bundled questions.
DEFAULT_COUNT = 20


def bench(
    request: EvaluationRequest,
    config: BenchConfig | None = None,
    grid: GridConfig | None = None,
    *,
    settings: Settings | None = None,
    progress: ProgressFactory = no_progress,
    on_report: Callable[[Report], None] | None = None,
) -> Report | None:
    """Time plain decoding, exact decoding and FSD, and each phase of their steps.

    Without an output folder, answers are not kept and nothing is resumed; without a count,
    :data:`DEFAULT_COUNT` of the bundled questions are answered. Each row of the report also holds
    ``phase_shares`` (fractions of the decoding time), ``seconds_per_step`` and
    ``step_over_exact``; see :func:`~eagle_fsd.evaluation.runner.evaluate` for the rest.
    """
    if request.out is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise OptionsError("--out is required when several processes run the benchmark")
    if request.questions == "bundled":
        request = request.updated(count=request.count or DEFAULT_COUNT)
    shared = dict(given_acceptance(settings))  # a dump would omit some defaults
    del shared["rule"]
    fuzzy = [
        replace(method, acceptance={**shared, **method.acceptance})
        for group in fsd_series(grid or BenchGrid()).values()
        for method in group
    ]
    methods = [PLAIN, EXACT, *fuzzy]
    temporary = tempfile.TemporaryDirectory() if request.out is None else nullcontext(request.out)
    with temporary as folder:
        return evaluate(
            request.updated(out=Path(folder)),
            config or BenchConfig(),
            methods,
            settings=settings,
            progress=progress,
            on_report=on_report,
        )
