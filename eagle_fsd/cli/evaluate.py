"""``eagle-fsd evaluate``: how fast and how well methods answer a set of questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from eagle_fsd.cli.console import ProgressBar, err, out
from eagle_fsd.cli.options import (
    Device,
    Dtype,
    Head,
    Json,
    Target,
    Template,
    load_pair,
    with_settings,
)

#: Methods that a name is enough for.
NAMED = ("plain", "exact", "fsd", "hf", "rules")


@with_settings()
def evaluate(
    settings: dict[str, Any],
    questions: Annotated[
        str,
        typer.Argument(
            help="bundled, mt-bench, spec-bench, gsm8k, commonsense-qa, mmlu, humaneval, or a file."
        ),
    ] = "bundled",
    target: Target = None,
    head: Head = None,
    dtype: Dtype = None,
    device: Device = None,
    count: Annotated[
        int | None,
        typer.Option(min=1, help="The first so many.", show_default="100 bundled ones, else all"),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            "-m",
            help="plain, exact, fsd (as set), hf, rules (the literature's); repeat the option.",
            show_default="plain, exact, fsd",
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Folder for answers and report; a run that was stopped goes on there.",
            show_default="runs/evaluate/QUESTIONS",
        ),
    ] = None,
    template: Template = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of a turn.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus; 1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="The k likeliest; 0 is off.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of sampling, and of bundled problems.")] = 0,
    execute_code: Annotated[
        bool, typer.Option("--execute-code", help="Run the code in answers to humaneval.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Answer questions with several methods, and report speed and quality side by side."""
    from accelerate import PartialState

    from eagle_fsd.evaluation.answers import Decoding
    from eagle_fsd.evaluation.evaluate import evaluate as run
    from eagle_fsd.evaluation.evaluate import footnote
    from eagle_fsd.evaluation.methods import EXACT, HF, PLAIN, Method, rule_methods
    from eagle_fsd.evaluation.report import table
    from eagle_fsd.evaluation.sets import find_questions

    names = methods or ["plain", "exact", "fsd"]
    if unknown := [name for name in names if name not in NAMED]:
        raise typer.BadParameter(f"unknown method {unknown[0]}; there are {', '.join(NAMED)}")
    found = find_questions(questions, count, seed)
    state = PartialState()
    if device is None and state.num_processes > 1:
        device = str(state.device)
    model = load_pair(target, head, dtype, device, settings)
    known = {"plain": [PLAIN], "exact": [EXACT], "fsd": [Method("fsd", {})], "hf": [HF]}
    known["rules"] = rule_methods()
    chosen = [method for name in dict.fromkeys(names) for method in known[name]]
    folder = to or Path("runs/evaluate") / Path(questions).name.split(".")[0]
    about = {
        "questions": Path(questions).name,
        "count": len(found),
        "target": target or "bundled",
        "head": head or "bundled",
    }
    decoding = Decoding(max_new_tokens, temperature, top_p, top_k, seed)
    with ProgressBar("answering") as progress:
        report = run(
            model,
            found,
            chosen,
            folder,
            decoding,
            about,
            template,
            execute_code,
            progress if state.is_main_process else None,
            state.process_index,
            state.num_processes,
            state.wait_for_everyone,
        )
    if report is None:
        return
    if as_json:
        typer.echo(json.dumps(report))
        return
    print_table(*table(report["rows"]))
    out.print(footnote(report), style="dim", soft_wrap=True)
    err.print(f"Answers and report are in {folder}.", style="dim", soft_wrap=True)


def print_table(headers: list[str], cells: list[list[str]]) -> None:
    """As wide as it needs: a file or a pipe has no width to fit."""
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for header in headers:
        shown.add_column(header, justify="left" if header == "method" else "right", no_wrap=True)
    for line in cells:
        shown.add_row(*line)
    Console(width=max(out.width, 160), highlight=False).print(shown)
