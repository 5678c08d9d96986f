"""``eagle-fsd train``: train a draft head, prepare its training data, and export it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from pydantic import Field

from eagle_fsd.cli.console import ProgressBar, err, out, progress
from eagle_fsd.cli.parsing import Command, options
from eagle_fsd.train.config import (
    ExportRequest,
    FeaturesRequest,
    PartialTrainConfig,
    RanksRequest,
    RegenerateConfig,
    RegenerateRequest,
    RegenerateServer,
    SynthesizeConfig,
    SynthesizeRequest,
    TrainConfig,
    TrainRequest,
    read_config,
)
from eagle_fsd.utils.options import Options, OptionsError
from eagle_fsd.utils.progress import Progress

app = Command("train", help="Train a draft head for a target on a file of chats.")


class ChatsRequest(Options):
    """Chats to generate: their number, the seed and the output file."""

    out: Path = Field(description="JSON Lines file to write.")
    count: int = Field(3000, ge=1, description="Number of chats.")
    seed: int = Field(3, ge=0, description="Seed of the generator.")


@app.default
def train(
    *,
    request: Annotated[TrainRequest, options("Training")],
    config_file: Annotated[
        Path | None,
        Parameter(
            name="--config",
            help="YAML file of hyperparameters; the command line overrides it.",
        ),
    ] = None,
    config: Annotated[
        PartialTrainConfig, options("Hyperparameters", negative_bool="no-")
    ] = PartialTrainConfig(),
) -> None:
    """Train a draft head for a target on a file of chats."""
    from eagle_fsd.train import train as run

    given = config.model_dump(exclude_unset=True)
    values = {**(read_config(config_file) if config_file else {}), **given}
    with TrainingProgress() as on_metrics:
        folder = run(
            request, TrainConfig.from_dict(values), progress=progress, on_metrics=on_metrics
        )
    if folder is not None:
        out.print(f"The head is in {folder}.")


def features(*, request: Annotated[FeaturesRequest, options("Features")]) -> None:
    """Store the target's features of chats, for several trainings. An interrupted run resumes."""
    from eagle_fsd.train.feature_store import store_features

    store = store_features(request, progress=progress)
    if store is not None:
        out.print(f"{len(store)} chats are in {request.out}.")


def regenerate(
    *,
    request: Annotated[RegenerateRequest, options("Chats")],
    server: Annotated[RegenerateServer, options("Server")] = RegenerateServer(),
    config: Annotated[RegenerateConfig, options("Sampling")] = RegenerateConfig(),
) -> None:
    """Rewrite all answers of the assistant but tool calls. An interrupted run resumes."""
    from eagle_fsd.train.regenerate import regenerate as run

    shown = WritingProgress(config)
    written = run(request, config, server, progress=shown.stage, on_tokens=shown.add_tokens)
    if written is not None:
        out.print(f"{len(written)} rewritten chats are in {request.out}.")


def synthesize(
    *,
    request: Annotated[SynthesizeRequest, options("Chats")],
    server: Annotated[RegenerateServer, options("Server")] = RegenerateServer(),
    config: Annotated[SynthesizeConfig, options("Sampling")] = SynthesizeConfig(),
) -> None:
    """Have the target write chats, both sides of them. An interrupted run resumes."""
    from eagle_fsd.train.synthesize import synthesize as run

    shown = WritingProgress(config)
    written = run(request, config, server, progress=shown.stage, on_tokens=shown.add_tokens)
    out.print(f"{len(written)} chats are in {request.out}.")


def chats(*, request: Annotated[ChatsRequest, options("Chats")]) -> None:
    """Write generated chats of word problems, such as the bundled target was trained on."""
    from eagle_fsd.train.chat_file import write_chats

    if request.out.exists():
        raise OptionsError(f"{request.out} exists already")
    write_chats(request.out, request.count, request.seed)
    out.print(f"{request.count} chats are in {request.out}.")


def ranks(*, request: Annotated[RanksRequest, options("Chats")]) -> None:
    """Rank tokens by their frequency in answers, for an EAGLE-1/2 head that drafts only some."""
    from eagle_fsd.train.token_ranks import rank_tokens

    count = rank_tokens(request, progress=progress)
    out.print(f"{count} tokens occur; their ranking is in {request.out}.")


def export(*, request: Annotated[ExportRequest, options("Export")]) -> None:
    """Convert a trained head for another engine."""
    from eagle_fsd.train.export import export_head

    export_head(request)
    out.print(f"The head is in {request.out}, as {request.format} reads it.")


class WritingProgress:
    """Show tokens per second and the time left while the target writes chats."""

    def __init__(self, config: RegenerateConfig) -> None:
        self.bar = ProgressBar("")
        self._config = config
        self._tokens = self._done = self._total = 0
        self._resumed: int | None = None  # chats of an earlier run
        self._started = 0.0

    @contextmanager
    def stage(self, label: str) -> Iterator[Progress]:
        """Show the progress of one stage."""
        if label == "reading":
            with progress(label) as report:
                yield report
            return
        self._started = time.monotonic()
        with ProgressBar(label) as self.bar:
            yield self.report

    def report(self, done: int, total: int) -> None:
        """Show the number of complete chats."""
        self._done, self._total = done, total
        if self._resumed is None:
            self._resumed = done
        self._show()

    def add_tokens(self, count: int) -> None:
        """Count tokens."""
        self._tokens += count
        self._show()

    def _show(self) -> None:
        speed = self._tokens / max(time.monotonic() - self._started, 1e-3)
        # The first chats take long; until they end, their tokens are the progress.
        written = (self._resumed or 0) + self._tokens / self._config.max_new_tokens
        begun = min(self._done + self._config.batch_size, self._total)
        work = max(self._done, min(written, begun))
        self.bar(self._done, self._total, f"{speed:.0f} tokens/s" if self._tokens else "", work)


class TrainingProgress:
    """Show training metrics beside a progress bar, or as lines if there is no terminal."""

    def __init__(self) -> None:
        self.bar = ProgressBar("training", immediate=False)

    def __enter__(self) -> TrainingProgress:
        return self

    def __exit__(self, *details: object) -> None:
        self.bar.__exit__(*details)

    def __call__(self, metrics: Mapping[str, Any]) -> None:
        """Show the start of the training, or the metrics of a step or of a validation."""
        step, steps = metrics["step"], metrics["steps"]
        if metrics["kind"] == "start":
            done = f", from step {step}" if step else ""
            err.print(
                f"training on {metrics['chats']} chats: {steps} steps, up to {metrics['epochs']}"
                f" epochs{done}; each checkpoint saves the head, Ctrl-C stops after one",
            )
            return
        if metrics["kind"] == "validation":
            decoded = ""
            if metrics["tau"]:
                depths = " ".join(f"{value:.3f}" for value in metrics["js_by_depth"])
                decoded = f", tau {metrics['tau']:.2f}, JS by depth {depths}"
            err.print(
                f"step {step}: held-out loss {metrics['loss']:.4f}, top-1 {metrics['top1']:.1%},"
                f" top-3 {metrics['top3']:.1%}{decoded}",
            )
            return
        note = (
            f"loss {metrics['loss']:.4f}, top-1 {metrics['top1']:.1%}, top-3 {metrics['top3']:.1%},"
            f" lr {metrics['lr']:.1e}, {metrics['tokens_per_second']:.0f} tokens/s"
        )
        self.bar(step, steps, note)


app.add(features, synthesize, regenerate, chats, ranks, export)
