"""``eagle-fsd calibrate``: the fastest settings for a pair within a bound on the loss."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from eagle_fsd.cli.console import err, out
from eagle_fsd.cli.runs import Run, print_table, with_run
from eagle_fsd.cli.sweep import (
    GRID_FIELDS,
    THRESHOLDS,
    Divergence,
    MinRatios,
    Thresholds,
    check_grid,
)

MIN_RATIOS = (0.1, 0.3)
#: The bundled problems that evaluate and sweep measure have seed 0: these are others.
SEED = 1
COUNT = 1000


@with_run(leave_out=GRID_FIELDS)
def calibrate(
    run: Run,
    max_drop: Annotated[
        float | None,
        typer.Option(min=0.0, max=100.0, help="Points of accuracy that may be lost."),
    ] = None,
    max_nats: Annotated[
        float | None,
        typer.Option(min=0.0, help="Nats a token that may be lost, for sets without a score."),
    ] = None,
    confidence: Annotated[
        float, typer.Option(min=0.5, max=0.9999, help="That the loss is within the bound.")
    ] = 0.95,
    thresholds: Thresholds = None,
    divergences: Divergence = None,
    min_ratios: MinRatios = None,
    install: Annotated[
        bool, typer.Option("--install", help="Put fsd.json beside the head, for every command.")
    ] = False,
) -> None:
    """Find the fastest setting whose loss is within a bound, and write it as fsd.json."""
    from eagle_fsd.bundled import BUNDLED_HEAD
    from eagle_fsd.evaluation.answer_store import write_whole
    from eagle_fsd.evaluation.calibration import (
        Allowed,
        certify,
        chosen_settings,
        fastest,
        verdict_table,
    )
    from eagle_fsd.evaluation.methods import EXACT, fsd_groups
    from eagle_fsd.evaluation.tables import footnote
    from eagle_fsd.model.config import SETTINGS_FILE

    if max_drop is None and max_nats is None:
        raise typer.BadParameter("say what may be lost: --max-drop 0.5, in points of accuracy")
    thresholds = list(dict.fromkeys(thresholds or THRESHOLDS))
    divergences = list(dict.fromkeys(divergences or ["js"]))
    min_ratios = list(dict.fromkeys(MIN_RATIOS if min_ratios is None else min_ratios))
    check_grid(thresholds, divergences, min_ratios)
    if not any(thresholds):
        raise typer.BadParameter("there is nothing to choose from: name a threshold above 0")
    beside = Path(run.head) if run.head else BUNDLED_HEAD
    if install and not beside.is_dir():
        raise typer.BadParameter(f"--install needs a head in a folder; {beside} is none")
    if run.questions == "bundled" and run.count is None:
        run = run.counting(COUNT)
    allowed = Allowed(max_drop, max_nats, confidence)
    series = list(fsd_groups(thresholds, min_ratios, divergences).values())
    methods = [method for group in series for method in group]
    folder = run.folder("calibrate")
    found: dict[str, Any] = {}

    def begin(questions: Sequence[Any]) -> None:
        warning = allowed.check(questions, len(series), run.execute_code)
        if warning:
            err.print(f"warning: {warning}.", soft_wrap=True)

    def finish(evaluation: Any, report: dict[str, Any]) -> None:
        verdicts = certify(report["rows"], series, allowed, evaluation.losses)
        best = fastest(report["rows"], verdicts)
        found["table"] = verdict_table(verdicts)
        found["best"] = best["method"]
        found["settings"] = chosen_settings(best, methods, verdicts, allowed, report)
        report["calibration"] = found["settings"]
        report["tables"] = [found["table"]]

    report = run.evaluate("calibrate", [EXACT, *methods], seed=SEED, begin=begin, finish=finish)
    if report is None:
        return
    text = json.dumps(found["settings"], indent=2) + "\n"
    places = [folder / SETTINGS_FILE] + [beside / SETTINGS_FILE] * install
    for place in places:
        write_whole(place, text)
    if run.as_json:
        typer.echo(json.dumps(report))
        return
    print_table(*found["table"])
    out.print()
    out.print(f"Chosen: {found['best']}.", soft_wrap=True)
    out.print(footnote(report), style="dim", soft_wrap=True)
    shown = " and ".join(map(str, places))
    err.print(f"Its settings are in {shown}: --settings takes them.", style="dim", soft_wrap=True)
