"""``eagle-fsd bench``: compare methods by speed, accuracy and time by phase."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from eagle_fsd.cli.console import print_report, progress
from eagle_fsd.cli.evaluate import Questions, RequestOptions
from eagle_fsd.cli.options import (
    Json,
    OtherAcceptanceOptions,
    SettingsFile,
    SettingsOptions,
    TreeOptions,
    given_settings,
)
from eagle_fsd.cli.parsing import options
from eagle_fsd.cli.processes import joined_evaluation
from eagle_fsd.evaluation.config import BenchConfig, BenchGrid, EvaluationRequest
from eagle_fsd.model.config import AcceptanceConfig, TreeConfig
from eagle_fsd.utils.files import atomic_write
from eagle_fsd.utils.options import OptionsError


def bench(
    questions: Questions = "bundled",
    /,
    *,
    output: Annotated[
        Path | None, Parameter(help="Also write the report to this JSON file.")
    ] = None,
    as_json: Json = False,
    grid: Annotated[BenchGrid, options("Grid")] = BenchGrid(),
    request: RequestOptions = EvaluationRequest(),
    file: SettingsOptions = SettingsFile(),
    tree: TreeOptions = TreeConfig(),
    acceptance: OtherAcceptanceOptions = AcceptanceConfig(),
    config: Annotated[BenchConfig, options("Decoding")] = BenchConfig(),
) -> None:
    """Compare plain, lossless speculative and FSD decoding: speed, accuracy, time by phase."""
    if output is not None:
        is_special = output.exists() and not output.is_file()  # a folder or a device
        output = output.resolve()  # what a link names is replaced, not the link
        if is_special or not os.access(output.parent, os.W_OK):
            raise OptionsError(f"--output must be a file in a writable folder; got {output}")
    from eagle_fsd.evaluation.bench import bench as run

    request = request.model_copy(update={"questions": questions})
    settings = given_settings(file.settings, tree, acceptance)
    with joined_evaluation(request, "bench") as (own, is_first):

        def show(report: dict[str, Any]) -> None:
            print_report(report, request.out, as_json)
            if output is not None and is_first:
                atomic_write(output, json.dumps(report, indent=2) + "\n")

        run(own, config, grid, settings=settings, progress=progress, on_report=show)
