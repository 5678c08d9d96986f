"""``eagle-fsd sweep``: the trade-off curve of a pair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from eagle_fsd.cli.many import is_number, many_values
from eagle_fsd.cli.runs import Run, print_report, with_run
from eagle_fsd.model.config import DIVERGENCE_NAMES, FSDSettings

#: Divergences spread over decades, and where a pair agrees well the small ones decide.
THRESHOLDS = (0.0, 0.003, 0.01, 0.05, 0.1, 0.4)
MIN_RATIOS = (0.0, 0.1, 0.3)

Thresholds = Annotated[
    list[float] | None,
    typer.Option("--thresholds", "-T", help="FSD's T, several.", show_default="0 0.003 ... 0.4"),
]
Divergence = Annotated[
    list[str] | None,
    typer.Option("--divergence", "-d", help="js, kl, tv, ...: several.", show_default="js"),
]
MinRatios = Annotated[
    list[float] | None,
    typer.Option("--min-ratio", "-r", help="Floors tried with each T.", show_default="0 0.1 0.3"),
]

#: Several values may follow these.
GridCommand = many_values(
    {
        **dict.fromkeys(("--thresholds", "-T", "--min-ratio", "-r"), is_number),
        **dict.fromkeys(("--divergence", "-d"), DIVERGENCE_NAMES.__contains__),
    }
)
GRID_FIELDS = ("threshold", "divergence", "min_ratio")


def check_grid(
    thresholds: Sequence[float], divergences: Sequence[str], min_ratios: Sequence[float]
) -> None:
    """Every value within its bounds, or a usage error that states them."""
    try:
        for threshold in thresholds:
            FSDSettings(threshold=threshold)
        for divergence in divergences:
            FSDSettings(divergence=divergence)
        for ratio in min_ratios:
            FSDSettings(min_ratio=ratio)
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from error


@with_run(leave_out=GRID_FIELDS)
def sweep(
    run: Run,
    thresholds: Thresholds = None,
    divergences: Divergence = None,
    min_ratios: MinRatios = None,
    rules: Annotated[
        bool, typer.Option("--rules/--no-rules", help="The literature's other rules as well.")
    ] = True,
) -> None:
    """Every threshold with every divergence and floor: one table, and the curve as pictures."""
    from eagle_fsd.evaluation.methods import EXACT, PLAIN, fsd_groups, rule_methods
    from eagle_fsd.evaluation.plots import draw_divergences, draw_positions, draw_tradeoff
    from eagle_fsd.evaluation.sweep import conclusions, watch_divergences

    thresholds = list(dict.fromkeys(thresholds or THRESHOLDS))
    divergences = list(dict.fromkeys(divergences or ["js"]))
    min_ratios = list(dict.fromkeys(MIN_RATIOS if min_ratios is None else min_ratios))
    check_grid(thresholds, divergences, min_ratios)
    groups = fsd_groups(thresholds, min_ratios, divergences)
    methods = [PLAIN, EXACT, *(method for group in groups.values() for method in group)]
    if rules:
        methods += rule_methods()
    folder = run.folder("sweep")

    def finish(evaluation: Any, report: dict[str, Any]) -> None:
        found = watch_divergences(
            evaluation.model,
            evaluation.questions,
            evaluation.wording,
            divergences,
            evaluation.decoding,
        )
        report["divergences"] = found.summary()
        report["conclusions"] = conclusions(report["rows"])
        lines = {label: [method.name for method in group] for label, group in groups.items()}
        draw_tradeoff(report, lines, folder / "tradeoff.png")
        draw_divergences(found, thresholds, report, folder / "divergence.png")
        draw_positions(report, folder / "accepted.png")

    def show(report: dict[str, Any]) -> None:
        what = "Answers, report.md, report.csv and the pictures"
        print_report(report, run.as_json, folder, what)

    run.evaluate("sweep", methods, finish=finish, show=show)
