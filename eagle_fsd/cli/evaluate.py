"""``eagle-fsd evaluate``: how fast and how well methods answer a set of questions."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from eagle_fsd.cli.many import many_values
from eagle_fsd.cli.runs import Run, print_report, with_run

#: What --method knows.
NAMED = ("plain", "exact", "fsd", "hf", "rules")
#: Several of them may follow one --method.
MethodsCommand = many_values(dict.fromkeys(("--method", "-m"), NAMED.__contains__))


@with_run()
def evaluate(
    run: Run,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            "-m",
            help="plain, exact, fsd (as set), hf, rules (the literature's); several.",
            show_default="plain exact fsd",
        ),
    ] = None,
) -> None:
    """Answer questions with several methods, and report speed and quality side by side."""
    from eagle_fsd.evaluation.methods import EXACT, HF, PLAIN, Method, rule_methods

    names = methods or ["plain", "exact", "fsd"]
    if unknown := [name for name in names if name not in NAMED]:
        raise typer.BadParameter(f"unknown method {unknown[0]}; there are {', '.join(NAMED)}")
    known = {"plain": [PLAIN], "exact": [EXACT], "fsd": [Method("fsd", {})], "hf": [HF]}
    known["rules"] = rule_methods()
    chosen = [method for name in dict.fromkeys(names) for method in known[name]]
    folder = run.folder("evaluate")

    def show(report: dict[str, Any]) -> None:
        print_report(report, run.as_json, folder, "Answers and report")

    run.evaluate("evaluate", chosen, show=show)
