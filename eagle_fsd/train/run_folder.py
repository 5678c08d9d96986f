"""The folder a training writes: recipe, checkpoints, metrics, and in the end the head.

::

    recipe.json            what was asked for
    metrics.jsonl          a line every few steps, and one for each validation
    checkpoints/step-N/    to go on from; the newest two are kept
    tensorboard/           the metrics as TensorBoard events
    config.json, model.safetensors, README.md, curves.png, training.json     at the end
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from eagle_fsd.train.config import TrainRecipe

RECIPE_FILE = "recipe.json"
METRICS_FILE = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
CURVES_FILE = "curves.png"
KEPT = 2
#: What may differ when a run goes on: it changes what is told and when it ends, not the steps.
MAY_CHANGE = ("validate_every", "checkpoint_every", "log_every", "workers", "compile")


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why and what is kept."""


class RunFolder:
    """One training's folder.

    Args:
        data: What the head is trained on (paths and names): a run that goes on must agree.
        resume: Go on from the newest checkpoint, or begin where there is none.
        overwrite: Throw away what an earlier training left here.

    Raises:
        ValueError: The folder exists and neither was asked for, or holds something else than a
            training, or a run that cannot be gone on with.
    """

    def __init__(
        self,
        path: str | Path,
        recipe: TrainRecipe,
        data: dict[str, Any],
        resume: bool = False,
        overwrite: bool = False,
        main: bool = True,
    ) -> None:
        self.path = Path(path)
        record = {"recipe": recipe.as_dict(), "data": data}
        if not main:  # of several processes one looks after the folder
            return
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            self._reuse(record, resume, overwrite)
        self.path.mkdir(parents=True, exist_ok=True)
        _write(self.path / RECIPE_FILE, json.dumps(record, indent=2) + "\n")

    def _reuse(self, record: dict[str, Any], resume: bool, overwrite: bool) -> None:
        if not (resume or overwrite):
            raise ValueError(f"{self.path} exists: add --resume to go on, or --overwrite")
        if not (self.path / RECIPE_FILE).is_file():
            raise ValueError(f"{self.path} exists and is not a training's folder: name another")
        if overwrite:
            shutil.rmtree(self.path)
            return
        before = json.loads((self.path / RECIPE_FILE).read_text())
        changed = [
            f"{name} was {before[part].get(name)!r}, is {value!r}"
            for part in ("recipe", "data")
            for name, value in record[part].items()
            if before[part].get(name) != value and name not in MAY_CHANGE
        ]
        if changed and self.newest() is not None:
            raise ValueError(f"{self.path} cannot be gone on with: {'; '.join(changed)}")

    @staticmethod
    def begun(path: Path) -> bool:
        """Whether a training's folder lies there."""
        return (path / RECIPE_FILE).is_file()

    @property
    def curves(self) -> Path:
        return self.path / CURVES_FILE

    def newest(self) -> Path | None:
        """The newest whole checkpoint."""
        found = sorted((self.path / CHECKPOINTS).glob("step-*"), key=step_of)
        return found[-1] if found else None

    def checkpoint(self, step: int) -> Path:
        return self.path / CHECKPOINTS / f"step-{step}"

    def write_checkpoint(
        self,
        step: int,
        write: Callable[[Path], None],
        main: bool = True,
        wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Have ``write`` fill a folder, then give it its name; older ones go.

        Every process calls this and writes its part; ``main`` makes the folder and renames it.

        Args:
            wait: Returns once every process has called it.

        Raises:
            TrainingError: It could not be written; what was there before is kept.
        """
        part = self.path / CHECKPOINTS / f"writing-{step}"
        try:
            if main:
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir(parents=True)
            wait()
            write(part)
            wait()
            if main and not self.checkpoint(step).exists():
                part.replace(self.checkpoint(step))
        except (OSError, RuntimeError, SafetensorError) as error:
            shutil.rmtree(part, ignore_errors=True)
            newest = self.newest()
            kept = f"{newest.name} is kept" if newest else "there is none yet"
            reason = " ".join(str(error).split())
            raise TrainingError(
                f"the checkpoint of step {step} could not be written ({reason}); {kept}"
            ) from error
        if main:
            for old in sorted((self.path / CHECKPOINTS).glob("step-*"), key=step_of)[:-KEPT]:
                shutil.rmtree(old)
        wait()

    def append_metrics(self, metrics: dict[str, Any]) -> None:
        with (self.path / METRICS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")

    def rewind_metrics(self, step: int) -> None:
        """Forget what was told after ``step``: it will be told again."""
        kept = [line for line in self.metrics() if line["step"] <= step]
        _write(self.path / METRICS_FILE, "".join(json.dumps(line) + "\n" for line in kept))

    def metrics(self) -> list[dict[str, Any]]:
        """The lines so far; a last one that a kill cut short is left out."""
        path = self.path / METRICS_FILE
        lines = []
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                lines.append(json.loads(line))
            except ValueError:
                break
        return lines


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])
