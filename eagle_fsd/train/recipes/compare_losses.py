"""Which options make a better head: ``python -m eagle_fsd.train.recipes.compare_losses``.

Trains the bundled target's head several times on the same chats, with the same seed and for as many
steps, once for each option, and measures each on the same unseen problems: tau of exact decoding,
tau and accuracy of FSD at several thresholds. Trainings that were stopped go on.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from eagle_fsd.bundled import BUNDLED_TARGET
from eagle_fsd.bundled.problems import problems
from eagle_fsd.bundled.quality import measure_quality
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.train.config import TrainRecipe
from eagle_fsd.train.recipes.chats import write_chats
from eagle_fsd.train.record import RECORD_FILE
from eagle_fsd.train.run import train
from eagle_fsd.train.run_folder import RunFolder
from eagle_fsd.utils.provenance import describe_environment

log = logging.getLogger(__name__)

THRESHOLDS = (0.05, 0.1, 0.2)
MIN_RATIO = 0.1


@dataclass(frozen=True)
class Variant:
    """A name and what it changes of the common recipe."""

    name: str
    changes: dict[str, Any]


PUBLISHED = {"divergence_weight": 0.0, "unroll": 1}
VARIANTS = (
    Variant("published losses", PUBLISHED),
    Variant("3 steps", {**PUBLISHED, "unroll": 3}),
    Variant("JS loss", {**PUBLISHED, "divergence_weight": 1.0, "divergence_loss": "js"}),
    Variant("TV loss", {**PUBLISHED, "divergence_weight": 1.0, "divergence_loss": "tv"}),
    Variant("3 steps and JS loss", {"divergence_weight": 1.0, "unroll": 3}),
)

app = typer.Typer(add_completion=False)


@app.command()
def main(
    work: Annotated[Path, typer.Option(help="Chats, trainings, results.")] = Path("runs/compare"),
    count: Annotated[int, typer.Option("--chats", help="To train on.")] = 8000,
    steps: Annotated[int, typer.Option(help="Of the optimiser, for each variant.")] = 1500,
    batch_size: Annotated[int, typer.Option(help="Chats a step.")] = 16,
    unseen: Annotated[int, typer.Option("--problems", help="Measured for each variant.")] = 500,
    only: Annotated[list[str] | None, typer.Option(help="Variants by name.")] = None,
) -> None:
    """Train the variants, measure them, print a table."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    work.mkdir(parents=True, exist_ok=True)
    data = write_chats(work / "chats.jsonl", count)
    common = {"max_steps": steps, "batch_size": batch_size, "epochs": 1000, "max_length": 512}
    common |= {"validate_every": steps, "checkpoint_every": 250, "compile": True}
    rows = []
    for variant in VARIANTS:
        if only and variant.name not in only:
            continue
        folder = work / variant.name.replace(" ", "-")
        if not (folder / RECORD_FILE).exists():
            log.info("training: %s", variant.name)
            recipe = TrainRecipe.from_dict({**common, **variant.changes})
            train(recipe, folder, data=data, resume=RunFolder.begun(folder), listener=_log)
        result = folder / "compared.json"
        if not result.exists():
            result.write_text(json.dumps(measure(folder, unseen), indent=2) + "\n")
        rows.append((variant.name, json.loads(result.read_text())))
    typer.echo(table(rows, common))


def measure(head: Path, count: int) -> dict[str, Any]:
    """Exact decoding and FSD on ``count`` unseen problems, and what the training took."""
    model = EagleFSD.from_pretrained(BUNDLED_TARGET, head, dtype=torch.float32)
    unseen = problems("test", count, seed=0)
    settings = [("exact", {"threshold": 0.0})]
    settings += [
        (f"T={threshold:g}", {"threshold": threshold, "min_ratio": MIN_RATIO})
        for threshold in THRESHOLDS
    ]
    record = json.loads((head / RECORD_FILE).read_text())
    result: dict[str, Any] = {"minutes": record["seconds"] / 60, "problems": count}
    result["environment"] = describe_environment()
    for name, options in settings:
        with torch.inference_mode():
            quality = measure_quality(model, unseen, batch=32, **options)
        result[name] = {"tau": quality.tau, "accuracy": quality.accuracy}
    return result


def table(rows: list[tuple[str, dict[str, Any]]], common: dict[str, Any]) -> str:
    """Markdown."""
    names = [f"T={threshold:g}" for threshold in THRESHOLDS]
    lines = ["| trained with | minutes | tau exact | " + " | ".join(names) + " |"]
    lines.append("|---" * (3 + len(names)) + "|")
    for name, result in rows:
        cells = [name, f"{result['minutes']:.0f}", f"{result['exact']['tau']:.2f}"]
        cells += [f"{result[key]['tau']:.2f}, {result[key]['accuracy']:.1%}" for key in names]
        lines.append("| " + " | ".join(cells) + " |")
    environment = rows[-1][1]["environment"]
    versions = environment["versions"]
    lines += [
        "",
        f"{common['max_steps']} steps of {common['batch_size']} chats; FSD: tau and accuracy on"
        f" {rows[-1][1]['problems']} unseen problems, js, min_ratio {MIN_RATIO:g}; greedy, float32;"
        f" {environment['machine']['cpu']}, {environment['machine']['threads']} threads,"
        f" {environment['date'][:10]}, torch {versions['torch']}, transformers"
        f" {versions['transformers']}, revision {environment['revision']}.",
    ]
    return "\n".join(lines)


def _log(metrics: dict[str, Any]) -> None:
    if metrics["kind"] == "validation" or metrics["step"] % 100 == 0:
        shown = {name: metrics.get(name) for name in ("kind", "step", "loss", "top1", "tau")}
        log.info("%s", shown)


if __name__ == "__main__":
    app()
