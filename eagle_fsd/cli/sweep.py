"""``eagle-fsd sweep``: the trade-off between speed and quality."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter
from pydantic import Field

from eagle_fsd.cli.console import print_report, progress
from eagle_fsd.cli.evaluate import Questions, RequestOptions
from eagle_fsd.cli.options import (
    Json,
    OtherAcceptanceOptions,
    SettingsFile,
    SettingsOptions,
    given_settings,
)
from eagle_fsd.cli.parsing import options
from eagle_fsd.cli.processes import joined_evaluation
from eagle_fsd.evaluation.config import EvaluationConfig, EvaluationRequest, GridConfig
from eagle_fsd.model.config import AcceptanceConfig, TreeConfig
from eagle_fsd.utils.options import Options


class SweepConfig(Options):
    """How many questions a sweep answers at once."""

    answer_batch: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Questions answered at once; speeds are then measured separately, with --batch,"
        " on some of the questions. Default: --batch, with the speeds of all answers.",
    )


def sweep(
    questions: Questions = "bundled",
    /,
    *,
    rules: Annotated[
        bool,
        Parameter(
            help="Also measure other acceptance rules from the literature.", negative_bool="no-"
        ),
    ] = True,
    as_json: Json = False,
    grid: Annotated[GridConfig, options("Grid")] = GridConfig(),
    request: RequestOptions = EvaluationRequest(),
    file: SettingsOptions = SettingsFile(),
    acceptance: OtherAcceptanceOptions = AcceptanceConfig(),
    config: Annotated[EvaluationConfig, options("Decoding")] = EvaluationConfig(),
    answering: Annotated[SweepConfig, options("Decoding")] = SweepConfig(),
) -> None:
    """Compare combinations of thresholds, divergences and floors; write a report with figures."""
    from eagle_fsd.evaluation.sweep import sweep as run

    request = request.model_copy(update={"questions": questions})

    def show(report: dict[str, Any]) -> None:
        print_report(report, request.output_folder("sweep"), as_json)

    settings = given_settings(file.settings, TreeConfig(), acceptance)
    with joined_evaluation(request, "sweep") as (own, _):
        run(
            own,
            config,
            grid,
            rules=rules,
            answer_batch=answering.answer_batch,
            settings=settings,
            progress=progress,
            on_report=show,
        )
