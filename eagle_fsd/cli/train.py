"""``eagle-fsd train``: from a chat file to a draft head; features, rewritten chats, exports."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from eagle_fsd.cli.console import ProgressBar, err, out
from eagle_fsd.cli.options import Dtype, OptionsFile, Target, Template, with_options
from eagle_fsd.train.config import TrainRecipe, read_recipe

app = typer.Typer(
    help="Train a draft head for a target, from a file of chats.",
    invoke_without_command=True,
    no_args_is_help=True,
)

#: Seconds between plain lines where there is no terminal.
LINE_EVERY = 30.0

Data = Annotated[
    Path | None,
    typer.Option(help="Chats: ShareGPT's or OpenAI's layout, JSON or JSON Lines.", exists=True),
]


@app.callback()
@with_options(
    TrainRecipe, "recipe", OptionsFile("--config", "A YAML file of these options.", read_recipe)
)
def train(
    context: typer.Context,
    recipe: dict[str, Any],
    data: Data = None,
    features: Annotated[
        Path | None, typer.Option(help="In their place: a folder of stored features.")
    ] = None,
    to: Annotated[Path | None, typer.Option("--out", help="Folder for the head.")] = None,
    target: Target = None,
    head: Annotated[
        Path | None,
        typer.Option(help="A head to begin with.", exists=True, show_default="a fresh one"),
    ] = None,
    template: Template = None,
    dtype: Dtype = None,
    regenerate: Annotated[
        bool, typer.Option("--regenerate", help="First let the target rewrite its own turns.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Throw away an earlier training in --out.")
    ] = False,
    binary: Annotated[
        bool, typer.Option("--bin", help="Write pytorch_model.bin in place of safetensors.")
    ] = False,
) -> None:
    """Train a draft head for a target, from a file of chats."""
    if context.invoked_subcommand is not None:
        return
    if to is None:
        raise typer.BadParameter("--out is missing: the folder for the head")
    if (data is None) == (features is None):
        raise typer.BadParameter("give either --data or --features")
    from eagle_fsd.train.run import make_accelerator
    from eagle_fsd.train.run import train as run

    accelerator = make_accelerator(to)
    if regenerate:
        if data is None or accelerator.num_processes > 1:
            raise typer.BadParameter(
                "--regenerate needs --data and one process; for several run"
                " eagle-fsd train regenerate first"
            )
        rewritten = to.with_name(to.name + "-regenerated.jsonl")
        regenerate_command(data, rewritten, target, template, dtype)
        data = rewritten
    with _Display(quiet=not accelerator.is_main_process) as display:
        folder = run(
            TrainRecipe.from_dict(recipe),
            to,
            data=data,
            features=features,
            target=target,
            template=template,
            dtype=dtype,
            head=head,
            resume=resume,
            overwrite=overwrite,
            binary=binary,
            listener=display,
            accelerator=accelerator,
        )
    if accelerator.is_main_process:
        out.print(f"The head is in {folder}.", soft_wrap=True)


@app.command("features")
def features_command(
    data: Annotated[Path, typer.Option(help="Chats, as for training.", exists=True)],
    to: Annotated[Path, typer.Option("--out", help="Folder for the features.")],
    target: Target = None,
    template: Template = None,
    dtype: Dtype = None,
    max_length: Annotated[int, typer.Option(min=8, help="Tokens of a chat.")] = 2048,
    batch_size: Annotated[int, typer.Option(min=1, help="Chats a pass.")] = 4,
) -> None:
    """Store the target's features, for several trainings on the same chats. Can be stopped."""
    import shutil

    from eagle_fsd.train.features import estimated_bytes, write_features
    from eagle_fsd.train.run import Source

    source = Source.load(target, template, dtype)
    chats = source.open(data, max_length)
    needed = estimated_bytes(chats, source.target.hidden_size)
    to.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(to).free
    err.print(f"about {_size(needed)} for {len(chats)} chats; {_size(free)} are free in {to}")
    if needed > free:
        raise OSError(f"{to} has {_size(free)} free, and about {_size(needed)} are needed")
    with ProgressBar("features") as progress:
        store = write_features(
            chats,
            source.target,
            to,
            source.describe(data, max_length),
            batch_size,
            progress=progress,
        )
    out.print(f"{len(store)} chats are in {to}.", soft_wrap=True)


@app.command("regenerate")
def regenerate_command(
    data: Annotated[Path, typer.Option(help="Chats, as for training.", exists=True)],
    to: Annotated[Path, typer.Option("--out", help="JSON Lines to write.")],
    target: Target = None,
    template: Template = None,
    dtype: Dtype = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Chats at a time.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of a turn.")] = 512,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="1 draws from the target as it is; 0 is greedy.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws.")] = 0,
) -> None:
    """Let the target rewrite every turn of the assistant's. Can be stopped."""
    from eagle_fsd.train.regenerate import regenerate
    from eagle_fsd.train.run import Source

    source = Source.load(target, template, dtype)
    chats = source.open(data, source.target.context).file
    with ProgressBar("rewriting") as progress:
        written = regenerate(
            source, chats, to, batch_size, max_new_tokens, temperature, seed, progress
        )
    err.print(f"{len(written)} rewritten chats are in {to}", soft_wrap=True)


@app.command("chats")
def chats_command(
    to: Annotated[Path, typer.Option("--out", help="JSON Lines to write.")],
    count: Annotated[int, typer.Option(min=1, help="How many.")] = 3000,
    seed: Annotated[int, typer.Option(min=0, help="Of the generator.")] = 3,
) -> None:
    """Write generated chats of word problems: what the bundled target speaks of."""
    from eagle_fsd.train.recipes.chats import write_chats

    if to.exists():
        raise typer.BadParameter(f"{to} exists")
    write_chats(to, count, seed)
    out.print(f"{count} chats are in {to}.", soft_wrap=True)


@app.command("export")
def export_command(
    head: Annotated[Path, typer.Option(help="The trained head's folder.", exists=True)],
    to: Annotated[Path, typer.Option("--out", help="Folder to write.")],
    format_: Annotated[str, typer.Option("--format", help="eagle, sglang or vllm.")],
    target: Target = None,
    dtype: Dtype = None,
) -> None:
    """Write a trained head as another engine reads it."""
    from eagle_fsd.train.export import FORMATS, export_head
    from eagle_fsd.train.run import Source

    if format_ not in FORMATS:
        raise typer.BadParameter(f"--format must be one of {', '.join(FORMATS)}")
    export_head(head, Source.load(target, dtype=dtype).target, to, format_)
    out.print(f"The head is in {to}, as {format_} reads it.", soft_wrap=True)


class _Display:
    """A training as it goes: behind a progress bar on a terminal, in lines elsewhere."""

    def __init__(self, quiet: bool) -> None:
        self.bar = ProgressBar("training")
        self.quiet = quiet
        self.told = -LINE_EVERY

    def __enter__(self) -> _Display:
        if not self.quiet and err.is_terminal:
            self.bar.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self.bar.__exit__(*details)

    def __call__(self, metrics: dict[str, Any]) -> None:
        step, steps = metrics["step"], metrics["steps"]
        if metrics["kind"] == "validation":
            tau = f"tau {metrics['tau']:.2f}" if metrics["tau"] else "no tau"
            depths = " ".join(f"{value:.3f}" for value in metrics["js_by_depth"])
            err.print(
                f"step {step}: held-out loss {metrics['loss']:.4f}, top-1 {metrics['top1']:.1%},"
                f" top-3 {metrics['top3']:.1%}, {tau}, JS by depth {depths}",
                soft_wrap=True,
            )
            return
        note = (
            f"loss {metrics['loss']:.4f}, top-1 {metrics['top1']:.1%}, top-3 {metrics['top3']:.1%},"
            f" lr {metrics['lr']:.1e}, {metrics['tokens_per_second']:.0f} tokens/s"
        )
        if self.bar.bar is not None:
            self.bar(step, steps, note)
        elif time.monotonic() - self.told >= LINE_EVERY or step == steps:
            self.told = time.monotonic()
            left = metrics["seconds_left"] / 60
            err.print(f"step {step} of {steps}: {note}, {left:.0f} minutes left", soft_wrap=True)


def _size(number: int) -> str:
    value, unit = float(number), "B"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.1f} {unit}"
