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
from recipes.measure import describe_versions, measure

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
    rows = []
    for variant, changes in VARIANTS.items():
        if options.only and variant not in options.only:
            continue
        folder = TrainingFolder(work / variant.replace(" ", "-"))
        found = (folder.path / RECORD_FILE).exists()  # since the first checkpoint
        if not found or read_record(folder.path)["steps"] < options.steps:
            log.info("training: %s", variant)
            request = TrainRequest(data=data, out=folder.path, resume=folder.exists)
            with TrainingProgress() as on_metrics:
                train(request, common.updated(**changes), on_metrics=on_metrics)
        file = folder.path / f"compared-{options.problems}.json"
        if not file.exists():
            atomic_write(file, json.dumps(measure_head(folder.path, options.problems)))
        rows.append([variant, *json.loads(file.read_text(encoding="utf-8"))])
    names = [f"T={threshold:g}" for threshold in THRESHOLDS]
    environment = describe_environment()
    machine = environment["machine"]
    sys.stdout.write(
        f"{markdown(['trained with', 'minutes', 'tau exact', *names], rows)}\n\n{options.steps}"
        f" steps of {options.batch_size} chats; FSD: tau and accuracy on {options.problems} unseen"
        f" problems, js, min_ratio {MIN_RATIO:g}; greedy, float32, {describe_versions()};"
        f" {machine['cpu']}, {machine['threads']} threads, revision {environment['revision']}.\n"
    )


def measure_head(head: Path, count: int) -> list[str]:
    """Return the minutes of a head's training, and its results on unseen problems, as cells."""
    exact = measure(BUNDLED_TARGET, head, count, ["exact"])["exact"]
    cells = [f"{read_record(head)['seconds'] / 60:.0f}", f"{exact['tau']:.2f}"]
    for threshold in THRESHOLDS:
        options = ("--threshold", threshold, "--min-ratio", MIN_RATIO)
        row = measure(BUNDLED_TARGET, head, count, ["fsd"], *options)["fsd"]
        cells.append(f"{row['tau']:.2f}, {row['accuracy']:.1%}")
    return cells


if __name__ == "__main__":
    main()
