"""The command line: ``eagle-fsd`` and its sub-commands."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import math
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.exceptions import TyperException

from eagle_fsd.model.settings import FSDSettings, read_settings

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Fuzzy speculative decoding with EAGLE-2 draft trees.",
)
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

#: The tree's top_k; plain ``--top-k`` is sampling's, as in Hugging Face.
OPTION_NAMES = {"top_k": "--tree-top-k"}
ORIGIN_STYLES = {"exact": "green", "fuzzy": "bold yellow", "target": "default"}

Target = Annotated[
    str | None, typer.Option(help="Target: a folder or Hub name.", show_default="the bundled one")
]
Head = Annotated[
    str | None,
    typer.Option(help="Draft head: a folder or Hub name.", show_default="the bundled one"),
]
Dtype = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16 or float16.", show_default="float32 on the CPU"),
]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda, cuda:1, auto.", show_default="the GPU if there is one"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]


def with_settings(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command an option for every field of :class:`FSDSettings`.

    The command's ``settings`` parameter receives the values that were given, checked.
    """

    @functools.wraps(command)
    def wrapper(**values: Any) -> Any:
        given = {item.name: values.pop(f"setting_{item.name}") for item in fields(FSDSettings)}
        file = values.pop("settings_file")
        merged = read_settings(file) if file else {}
        merged.update({name: value for name, value in given.items() if value is not None})
        try:
            FSDSettings().updated(**merged)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        return command(settings=merged, **values)

    signature = inspect.signature(command, eval_str=True)
    own = [p for name, p in signature.parameters.items() if name != "settings"]
    added = [_setting_parameter(item) for item in fields(FSDSettings)]
    file = Annotated[Path | None, typer.Option("--settings", help="An fsd.json with settings.")]
    added.append(_parameter("settings_file", file))
    wrapper.__signature__ = inspect.Signature(own + added)
    wrapper.__annotations__ = {p.name: p.annotation for p in own + added}
    return wrapper


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=annotation)


def _setting_parameter(item: Any) -> inspect.Parameter:
    assert item.default is not MISSING
    option = OPTION_NAMES.get(item.name, "--" + item.name.replace("_", "-"))
    text = item.metadata["help"]
    limits = {}
    if "choices" in item.metadata:
        text += f" ({', '.join(item.metadata['choices'])})"
    else:
        limits["min"] = item.metadata["low"]
        if item.metadata["high"] != math.inf:
            limits["max"] = item.metadata["high"]
    info = typer.Option(option, help=text[0].upper() + text[1:] + ".", **limits)
    return _parameter(f"setting_{item.name}", Annotated[type(item.default) | None, info])


def load_pair(
    target: str | None,
    head: str | None,
    dtype: str | None,
    device: str | None,
    settings: dict[str, Any],
) -> Any:
    """The model that the options name, with ``settings`` above its own."""
    from eagle_fsd.model.decode import EagleFSD

    model = EagleFSD.from_pretrained(target, head, dtype=dtype, device_map=device)
    model.settings = model.settings.updated(**settings)
    return model


@app.command()
@with_settings
def generate(
    prompt: Annotated[
        str, typer.Argument(help="What to say to the model; - reads standard input.")
    ],
    settings: dict[str, Any],
    target: Target = None,
    head: Head = None,
    dtype: Dtype = None,
    device: Device = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to emit at most.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Nucleus sampling; 1 is off.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the k likeliest; 0 is off.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Decode without the draft head.")] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text; no chat template.")
    ] = False,
    show_origins: Annotated[
        bool, typer.Option("--show-origins", help="Colour exact, fuzzy and target tokens.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Answer one prompt, streaming it, and say how it was decoded."""
    import torch

    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise typer.BadParameter("the prompt is empty")
    model = load_pair(target, head, dtype, device, settings)
    tokenizer = model.tokenizer
    if raw or tokenizer.chat_template is None:
        ids = tokenizer(text, return_tensors="pt").input_ids
    else:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )["input_ids"]
    printer = _Printer(tokenizer, show_origins, quiet=as_json)
    decoding = model.stream(
        ids.to(model.target.device),
        torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        method="ar" if plain else "fsd",
    )
    try:
        for chunk in decoding:
            printer(chunk)
    except KeyboardInterrupt:
        pass  # what was said so far stands, and so do its figures
    printer.end()
    answer = decoding.output()
    stats = answer.stats
    if as_json:
        new = answer.sequences[0, ids.shape[1] :].tolist()
        record = {"text": tokenizer.decode(new, skip_special_tokens=True), "tokens": new}
        record |= {"origins": answer.origins[0].tolist(), "stats": stats.as_dict()}
        record |= {"settings": model.settings.as_dict()}
        typer.echo(json.dumps(record))
        return
    counts = stats.as_dict()["origins"]
    legend = ", ".join(f"{counts[name]} {name}" for name in ORIGIN_STYLES)
    err.print(
        f"{stats.tokens} tokens ({legend}) in {stats.steps} target passes:"
        f" tau {stats.tau:.2f}, {stats.tokens_per_second:.1f} tokens/s,"
        f" threshold {0.0 if plain else model.settings.threshold:g}",
        style="dim",
        soft_wrap=True,
    )


class _Printer:
    """Writes tokens as they come, whole characters only."""

    def __init__(self, tokenizer: Any, show_origins: bool, quiet: bool) -> None:
        self.tokenizer, self.show_origins, self.quiet = tokenizer, show_origins, quiet
        self.tokens: list[int] = []
        self.shown = 0

    def __call__(self, chunk: Any) -> None:
        if self.quiet:
            return
        from eagle_fsd.model.verify import Origin

        for token, origin in zip(chunk.tokens, chunk.origins, strict=True):
            self.tokens.append(token)
            text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
            if text.endswith("\ufffd"):  # in the middle of a character
                continue
            style = ORIGIN_STYLES[Origin(origin).name.lower()] if self.show_origins else None
            out.print(Text(text[self.shown :], style=style or ""), end="", soft_wrap=True)
            self.shown = len(text)

    def end(self) -> None:
        if self.quiet:
            return
        out.print()
        if self.show_origins:
            legend = [Text(name, style=style) for name, style in ORIGIN_STYLES.items()]
            err.print(Text(" ").join(legend))


@app.command()
@with_settings
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
        list[float] | None, typer.Option("--min-ratios", "-r", help="Floors tried with each T.")
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
    if output is not None and not output.parent.is_dir():
        raise typer.BadParameter(f"{output.parent} is not a folder")
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
    with _progress("decoding") as progress:
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
    Console(width=max(out.width, 130), highlight=False).print(table)
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


class _progress:  # noqa: N801  (used as a context manager, like rich's own)
    """A progress bar on a terminal, a plain line every tenth elsewhere; both on standard error."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.bar: Any = None
        self.last = -1

    def __enter__(self) -> Callable[[int, int], None]:
        if err.is_terminal:
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            self.bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=err,
                transient=True,
            )
            self.bar.start()
            self.task = self.bar.add_task(self.label, total=None)
        return self.update

    def update(self, done: int, total: int) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=done, total=total)
        elif done * 10 // total != self.last:
            self.last = done * 10 // total
            err.print(f"{self.label}: {done} of {total}")

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()


def main() -> None:
    """Run the command; whatever is expected to go wrong is one line on standard error.

    Status 0 on success, 2 for a usage error, 1 otherwise.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    try:
        status = app(prog_name="eagle-fsd", standalone_mode=False)
    except TyperException as error:
        _fail(f"{error.format_message()} (see eagle-fsd --help)", error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        _fail("stopped", 130)
    except (ValueError, FloatingPointError, OSError) as error:
        _fail(str(error), 1)
    raise SystemExit(status or 0)


def _fail(message: str, status: int) -> NoReturn:
    err.print(f"error: {' '.join(message.split())}", markup=False, soft_wrap=True)
    raise SystemExit(status)


if __name__ == "__main__":
    main()
