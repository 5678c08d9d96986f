"""Shared code of the recipes of published heads: train and save a head, write its model card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from eagle_fsd.cli.console import progress
from eagle_fsd.cli.train import TrainingProgress
from eagle_fsd.model.config import SETTINGS_FILE, TargetOptions
from eagle_fsd.train.config import TrainConfig, TrainRequest
from eagle_fsd.train.heads import load_for_training, save_trained
from eagle_fsd.train.loaded_target import load_frozen_target
from eagle_fsd.train.model_card import CARD_FILE
from eagle_fsd.train.record import RECORD_FILE, read_record
from eagle_fsd.train.run import train
from eagle_fsd.utils.files import atomic_write
from recipes.measure import describe_versions


def train_and_save(
    request: TrainRequest, config: TrainConfig, out: Path, dtype: torch.dtype = torch.float16
) -> None:
    """Train a head, and save it in half precision, without settings for an earlier one."""
    with TrainingProgress() as on_metrics:
        train(request, config, progress=progress, on_metrics=on_metrics)
    options = TargetOptions(target=request.target, dtype="float32")
    target = load_frozen_target(options, layers=False)
    head = load_for_training(request.out, config, target)
    save_trained(head, out, dtype)
    shutil.copy(request.out / RECORD_FILE, out / RECORD_FILE)
    (out / SETTINGS_FILE).unlink(missing_ok=True)


def write_questions(path: Path, questions: Iterable[str]) -> None:
    """Write chats whose answers are placeholders, for ``regenerate`` to replace."""
    answer = {"role": "assistant", "content": "..."}
    chats = ([{"role": "user", "content": question}, answer] for question in questions)
    atomic_write(path, "".join(json.dumps({"messages": chat}) + "\n" for chat in chats))


#: The end of every card.
_CARD_END = """
{results}

Configuration:

```json
{recipe}
```
"""


def write_card(folder: Path, template: str, results: str, chats: int) -> None:
    """Write a model card from a template, the folder's record and measured results."""
    record = read_record(folder)
    card = (template + _CARD_END).format(
        **record,
        recipe=json.dumps(record["settings"], indent=2),
        parameters=f"{_count_parameters(folder) / 1e6:.2f}",
        minutes=f"{record['seconds'] / 60:.0f}",
        chats=record["settings"].get("chats", chats),
        results=results,
    )
    atomic_write(folder / CARD_FILE, card)


def _count_parameters(folder: Path) -> int:
    weights = load_file(folder / "model.safetensors").values()
    return sum(weight.numel() for weight in weights if weight.is_floating_point())


def describe_tree(row: dict[str, Any]) -> str:
    """Return total_tokens/depth/top_k of a row of a report."""
    return "/".join(str(row["settings"][name]) for name in ("total_tokens", "depth", "tree_top_k"))


def describe_measurement(count: int, questions: str) -> str:
    """Describe what a table was measured on, the date and the versions."""
    return (
        f"Measured on {count} {questions}, greedy, float32, {describe_versions()}; trees are"
        " total_tokens/depth/top_k:"
    )
