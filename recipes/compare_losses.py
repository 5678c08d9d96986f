"""Compare training losses: ``python -m recipes.compare_losses``.

The script trains a head for the bundled target with each variant of the losses, on the same chats
with the same seed and number of steps. It measures every head on the same unseen problems: tau of
exact decoding, and tau and accuracy of FSD at several thresholds. An interrupted run resumes.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

from eagle_fsd.bundled import BUNDLED_TARGET
from eagle_fsd.cli.train import TrainingProgress
from eagle_fsd.evaluation.tables import markdown
from eagle_fsd.train.chat_file import write_chats
from eagle_fsd.train.config import TrainConfig, TrainRequest
from eagle_fsd.train.record import RECORD_FILE, read_record
from eagle_fsd.train.run import train
from eagle_fsd.train.training_folder import TrainingFolder
from eagle_fsd.utils.files import atomic_write
from eagle_fsd.utils.provenance import describe_environment
from recipes.measure import measure

THRESHOLDS = (0.05, 0.1, 0.2)
MIN_RATIO = 0.1

log = logging.getLogger(__name__)


PUBLISHED = {"divergence_weight": 0.0, "unroll": 1}
#: The hyperparameters in which variants of the losses differ from the common ones.
VARIANTS: dict[str, dict[str, Any]] = {
    "published losses": PUBLISHED,
    "unroll 3": {**PUBLISHED, "unroll": 3},
    "JS loss": {**PUBLISHED, "divergence_weight": 1.0, "divergence_loss": "js"},
    "TV loss": {**PUBLISHED, "divergence_weight": 1.0, "divergence_loss": "tv"},
    "unroll 3 and JS loss": {"divergence_weight": 1.0, "unroll": 3},
}


def main() -> None:
    """Train and measure the variants, and print a table."""
    parser = argparse.ArgumentParser(description="Compare options of the head's training.")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/compare"), help="parent of chats and trainings"
    )
    parser.add_argument("--chats", type=int, default=8000, help="chats to train on")
    parser.add_argument("--steps", type=int, default=1500, help="optimizer steps of each variant")
    parser.add_argument("--batch-size", type=int, default=16, help="chats per step")
    parser.add_argument("--problems", type=int, default=500, help="problems to measure on")
    parser.add_argument(
        "--only", action="append", choices=VARIANTS, help="variant to compare; default: all of them"
    )
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    work = options.work / f"{options.chats}-chats-{options.steps}-steps-of-{options.batch_size}"
    work.mkdir(parents=True, exist_ok=True)
    data = write_chats(work / "chats.jsonl", options.chats)
    common = TrainConfig(
        max_steps=options.steps,
        batch_size=options.batch_size,
        epochs=1000,
        max_length=512,
        validate_every=options.steps,
        checkpoint_every=250,
        compile=True,
    )
    results = {}
    for variant, changes in VARIANTS.items():
        if options.only and variant not in options.only:
            continue
        folder = TrainingFolder(work / variant.replace(" ", "-"))
        if not (folder.path / RECORD_FILE).exists():
            log.info("training: %s", variant)
            request = TrainRequest(data=data, out=folder.path, resume=folder.exists)
            with TrainingProgress() as on_metrics:
                train(request, common.updated(**changes), on_metrics=on_metrics)
        file = folder.path / f"compared-{options.problems}.json"
        if not file.exists():
            atomic_write(file, json.dumps(measure_head(folder.path, options.problems), indent=2))
        results[variant] = json.loads(file.read_text(encoding="utf-8"))
    sys.stdout.write(format_table(results, common) + "\n")


def measure_head(head: Path, count: int) -> dict[str, Any]:
    """Measure exact decoding and FSD with a head on unseen problems."""
    result: dict[str, Any] = {
        "minutes": read_record(head)["seconds"] / 60,
        "problems": count,
        "environment": describe_environment(),
    }
    rows = {"exact": measure(BUNDLED_TARGET, head, count, ["exact"])["exact"]}
    for threshold in THRESHOLDS:
        options = ("--threshold", threshold, "--min-ratio", MIN_RATIO)
        rows[f"T={threshold:g}"] = measure(BUNDLED_TARGET, head, count, ["fsd"], *options)["fsd"]
    for name, row in rows.items():
        result[name] = {"tau": row["tau"], "accuracy": row["accuracy"]}
    return result


def format_table(results: dict[str, dict[str, Any]], config: TrainConfig) -> str:
    """Format results of :func:`measure_head` by variant as a Markdown table."""
    names = [f"T={threshold:g}" for threshold in THRESHOLDS]
    rows = []
    for variant, result in results.items():
        cells = [variant, f"{result['minutes']:.0f}", f"{result['exact']['tau']:.2f}"]
        cells += [f"{result[name]['tau']:.2f}, {result[name]['accuracy']:.1%}" for name in names]
        rows.append(cells)
    table = markdown(["trained with", "minutes", "tau exact", *names], rows)
    last = list(results.values())[-1]
    environment = last["environment"]
    machine, versions = environment["machine"], environment["versions"]
    return (
        f"{table}\n\n{config.max_steps} steps of {config.batch_size} chats; FSD: tau and accuracy"
        f" on {last['problems']} unseen problems, js, min_ratio {MIN_RATIO:g}; greedy, float32;"
        f" {machine['cpu']}, {machine['threads']} threads, {environment['date'][:10]}, torch"
        f" {versions['torch']}, transformers {versions['transformers']}, revision"
        f" {environment['revision']}."
    )


if __name__ == "__main__":
    main()
