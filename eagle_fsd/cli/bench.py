"""``eagle-fsd bench``: decoding methods side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from eagle_fsd.cli.console import ProgressBar, out
from eagle_fsd.cli.options import Device, Dtype, Head, Json, Target, load_pair, with_settings
from eagle_fsd.model.config import FSDSettings


@with_settings(leave_out=("threshold", "min_ratio"))
def bench(
    settings: dict[str, Any],
    target: Target = None,
    head: Head = None,
    dtype: Dtype = None,
    device: Device = None,
    problems: Annotated[int, typer.Option(min=1, help="Problems measured for quality.")] = 100,
    timed: Annotated[int, typer.Option(min=1, help="How many of them are timed.")] = 20,
    repeats: Annotated[int, typer.Option(min=1, help="Decodings of each timed problem.")] = 1,
    thresholds: Annotated[
        list[float] | None, typer.Option("--thresholds", "-T", help="FSD's T; repeat the option.")
    ] = None,
    min_ratios: Annotated[
        list[float] | None, typer.Option("--min-ratio", "-r", help="Floors tried with each T.")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="'hf': also Hugging Face's own greedy generate.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Per answer.")] = 256,
    seed: Annotated[int, typer.Option(help="Of the problems.")] = 0,
    as_json: Json = False,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")] = None,
) -> None:
    """Plain decoding, exact EAGLE-2 and FSD side by side, in one run on the bundled problems."""
    from eagle_fsd.evaluation.bench import Bench, bench_methods

    if baseline not in (None, "hf"):
        raise typer.BadParameter("--baseline knows only 'hf'")
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        raise typer.BadParameter(f"{output} is no place for a file")
    thresholds = thresholds or [0.1, 0.2, 0.3]
    ratios = min_ratios if min_ratios is not None else [0.0, 0.1]
    try:
        for threshold in thresholds:
            for ratio in ratios:
                FSDSettings().updated(threshold=threshold, min_ratio=ratio)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    model = load_pair(target, head, dtype, device, settings)
    methods = bench_methods(thresholds, ratios, model.settings.divergence, baseline == "hf")
    runner = Bench(model, methods, problems, min(timed, problems), repeats, max_new_tokens, seed)
    with ProgressBar("decoding") as progress:
        report = runner.run(progress)
    if output is not None:
        output.write_text(json.dumps(report, indent=2) + "\n")
    if as_json:
        typer.echo(json.dumps(report))
        return
    _print_bench(report)


def _print_bench(report: dict[str, Any]) -> None:
    rows = report["rows"]
    with_hf = rows[0]["method"] == "hf"
    table = Table(box=None, header_style="bold", pad_edge=False)
    columns = ["method", "tokens/s", "x plain"] + ["x HF"] * with_hf
    columns += ["tau", "exact", "fuzzy", "target", "accuracy"]
    columns += ["| step", "target", "draft", "tree", "verify", "cache", "host"]
    for column in columns:
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        cells = [
            row["method"],
            f"{row['tokens_per_second']:.1f}",
            f"{row['speedup_over_plain']:.2f}",
        ]
        if with_hf:
            cells.append(f"{row['speedup_over_hf']:.2f}")
        cells.append(f"{row['tau']:.2f}" if row["tau"] else "")
        shares = row["origins"] or {}
        cells += [f"{shares[name]:.0%}" if shares else "" for name in ("exact", "fuzzy", "target")]
        cells.append(f"{row['accuracy']:.1%}")
        step = row["step_over_exact"]
        cells.append(f"{step:.2f}" if step else "")
        phases = row["phase_shares"]
        names = ("target", "draft", "tree", "verify", "cache", "host")
        cells += [f"{phases[name]:.1%}" if phases else "" for name in names]
        table.add_row(*cells)
    # Wide enough for every column: a file or a pipe has no width to fit.
    Console(width=max(out.width, 130), highlight=False, markup=False).print(table)
    environment = report["environment"]
    tree = report["settings"]
    machine = environment["machine"]
    versions = environment["versions"]
    shape = f"{tree['total_tokens']}/{tree['depth']}/{tree['top_k']}"
    out.print(
        f"{report['problems']} problems, {report['timed']} timed x {report['repeats']};"
        f" {report['dtype']} on {machine.get('gpu') or machine['cpu']},"
        f" {machine['threads']} threads; tree {shape};"
        f" torch {versions['torch']}, transformers {versions['transformers']};"
        f" {environment['date'][:10]}, revision {environment['revision']}",
        style="dim",
        soft_wrap=True,
    )
