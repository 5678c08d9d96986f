"""``eagle-fsd calibrate``: find the fastest settings whose loss of quality is bounded."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from eagle_fsd.cli.console import err, out, print_json, print_table, progress
from eagle_fsd.cli.evaluate import Questions
from eagle_fsd.cli.options import (
    Install,
    Json,
    OtherAcceptanceOptions,
    SettingsFile,
    SettingsOptions,
    given_settings,
)
from eagle_fsd.cli.parsing import options
from eagle_fsd.cli.processes import joined_evaluation
from eagle_fsd.evaluation.config import (
    CalibrationConfig,
    CalibrationGrid,
    EngineName,
    EvaluationRequest,
    LossBounds,
    MeasureConfig,
    SelectionConfig,
)
from eagle_fsd.model.config import AcceptanceConfig, TreeConfig


def calibrate(
    questions: Questions = "bundled",
    /,
    *,
    bounds: Annotated[LossBounds, options("Loss of quality")] = LossBounds(),
    measure: Annotated[MeasureConfig, options("Loss of quality")] = MeasureConfig(),
    selection: Annotated[SelectionConfig, options("Selection")] = SelectionConfig(),
    engine: Annotated[
        EngineName | None,
        Parameter(
            name="--for",
            help="Choose among the settings that another engine has, and print its flags. The"
            " bound holds for eagle-fsd's answers with that rule, not for the engine's own.",
        ),
    ] = None,
    rules: Annotated[
        bool,
        Parameter(
            help="Choose among acceptance rules from the literature, too.", negative_bool="no-"
        ),
    ] = True,
    install: Install = False,
    as_json: Json = False,
    grid: Annotated[CalibrationGrid, options("Grid")] = CalibrationGrid(),
    request: Annotated[
        EvaluationRequest,
        options("Evaluation", exclude=("questions", "baseline", "assistant")),
    ] = EvaluationRequest(),
    file: SettingsOptions = SettingsFile(),
    acceptance: OtherAcceptanceOptions = AcceptanceConfig(),
    config: Annotated[
        CalibrationConfig,
        options("Decoding", exclude=("samples", "seeds", *MeasureConfig.model_fields)),
    ] = CalibrationConfig(),
) -> None:
    """Find the fastest settings whose loss of quality is bounded; write them to fsd.json."""
    from eagle_fsd.evaluation.calibration import calibrate as run
    from eagle_fsd.evaluation.tables import footnote

    request = request.model_copy(update={"questions": questions})
    settings = given_settings(file.settings, TreeConfig(), acceptance)
    with joined_evaluation(request, "calibrate") as (own, is_first):
        report = run(
            own,
            bounds,
            config=config.updated(**measure.model_dump()),
            grid=grid,
            selection=selection,
            engine=engine,
            rules=rules,
            install=install and is_first,
            settings=settings,
            progress=progress,
        )
    if report is None or not is_first:  # another process reports
        return
    if as_json:
        print_json(report)
        return
    print_table(*report["tables"][0])
    out.print()
    out.print(report["conclusions"][0])
    out.print(footnote(report), style="dim")
    if report["flags"]:
        out.print()
        out.print(report["flags"])
    if not report["files"]:
        return
    files = " and ".join(report["files"])
    err.print(f"The settings are in {files}; --settings reads them.", style="dim")
