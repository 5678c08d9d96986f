"""The folder of a training run: configuration, checkpoints, metrics and the head.

::

    recipe.json            the configuration and the fingerprint of the data
    metrics.jsonl          a line for every logged step and every validation
    checkpoints/step-N/    the newest two checkpoints
    tensorboard/           the metrics as TensorBoard events
    features/              the target's features, if they are stored; deleted at the end
    config.json, model.safetensors or pytorch_model.bin, README.md, curves.png, training.json
                           the head at the newest checkpoint
    token_ranks.safetensors    the tokens that an EAGLE-1/2 head with a draft vocabulary drafts
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from eagle_fsd.train.config import TrainConfig
from eagle_fsd.utils.files import append_line, atomic_write, read_jsonl
from eagle_fsd.utils.text import one_line

if TYPE_CHECKING:
    from accelerate import Accelerator

CONFIG_FILE = "recipe.json"
METRICS_FILE = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
FEATURES = "features"
MAX_CHECKPOINTS = 2
#: Options that may change when a run resumes.
RESUMABLE_CHANGES = (
    "max_steps",
    "validate_every",
    "checkpoint_every",
    "log_every",
    "workers",
    "compile",
)


class TrainingError(RuntimeError):
    """Training cannot continue; the message names the cause and the checkpoint that is kept."""


class TrainingFolder:
    """The folder of a training run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def exists(self) -> bool:
        """Whether the folder holds a training run."""
        return (self.path / CONFIG_FILE).is_file()

    def prepare(
        self, config: TrainConfig, fingerprint: dict[str, Any], overwrite: bool = False
    ) -> None:
        """Create the folder, or check that its training can resume; write the configuration.

        Raises ValueError if the folder holds checkpoints of a training run with other options or
        another ``fingerprint`` of its data, unless ``overwrite`` is set.
        """
        content = {"recipe": config.model_dump(), "data": fingerprint}
        if self.exists and overwrite:
            shutil.rmtree(self.path)
        elif self.exists:
            self._check_resumable(content)
        self.path.mkdir(parents=True, exist_ok=True)
        atomic_write(self.path / CONFIG_FILE, json.dumps(content, indent=2) + "\n")

    def recorded(self, name: str) -> Any:
        """Return what an earlier run recorded about its data; None if there is nothing."""
        if not self.exists:
            return None
        return json.loads((self.path / CONFIG_FILE).read_text(encoding="utf-8"))["data"].get(name)

    def check_usable(self, allow_existing: bool) -> None:
        """Raise ValueError if the folder holds other files, or a run without ``allow_existing``."""
        if self.exists:
            if not allow_existing:
                raise ValueError(f"{self.path} exists; add --resume or --overwrite")
        elif self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise ValueError(f"{self.path} exists and holds no training; choose another folder")

    def _check_resumable(self, content: dict[str, Any]) -> None:
        before = json.loads((self.path / CONFIG_FILE).read_text(encoding="utf-8"))
        # Earlier versions had fewer options and did not record the dtype and the processes.
        before["recipe"] = {**TrainConfig().model_dump(), **before["recipe"]}
        for name in ("dtype", "processes"):
            before["data"].setdefault(name, content["data"].get(name))
        changed = [
            f"{name} was {before[part].get(name)!r}, is {value!r}"
            for part in ("recipe", "data")
            for name, value in content[part].items()
            if before[part].get(name) != value and name not in RESUMABLE_CHANGES
        ]
        if changed and self.newest_checkpoint() is not None:
            raise ValueError(f"{self.path} cannot be resumed: {'; '.join(changed)}")

    # -- checkpoints -------------------------------------------------------------------------------

    def _checkpoints(self) -> list[Path]:
        return sorted((self.path / CHECKPOINTS).glob("step-*"), key=checkpoint_step)

    def newest_checkpoint(self) -> Path | None:
        """Return the newest complete checkpoint, or None."""
        return next(reversed(self._checkpoints()), None)

    def write_checkpoint(self, step: int, accelerator: Accelerator) -> None:
        """Write a checkpoint and keep the newest ones. Every process calls this.

        Raises TrainingError if it could not be written; earlier ones are kept.
        """
        is_main, wait = accelerator.is_main_process, accelerator.wait_for_everyone
        temporary = self.path / CHECKPOINTS / f"writing-{step}"
        complete = temporary.with_name(f"step-{step}")
        try:
            if is_main:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
            wait()
            accelerator.save_state(str(temporary))
            wait()
            if is_main:
                temporary.replace(complete)
        except (OSError, RuntimeError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise TrainingError(
                f"the checkpoint of step {step} could not be written ({one_line(error)});"
                f" {self.describe_newest_checkpoint()}"
            ) from error
        if is_main:
            for old in self._checkpoints()[:-MAX_CHECKPOINTS]:
                shutil.rmtree(old)
        wait()

    def describe_newest_checkpoint(self) -> str:
        """Describe the checkpoint that is kept, for error messages."""
        if (newest := self.newest_checkpoint()) is None:
            return "there is no checkpoint yet"
        return f"the checkpoint of step {checkpoint_step(newest)} is kept"

    # -- metrics -----------------------------------------------------------------------------------

    def append_metrics(self, metrics: dict[str, Any]) -> None:
        """Append a line of metrics, which include ``kind`` and ``step``."""
        append_line(self.path / METRICS_FILE, json.dumps(metrics))

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics so far."""
        path = self.path / METRICS_FILE
        return read_jsonl(path) if path.exists() else []

    def is_validated(self, step: int) -> bool:
        """Whether the metrics include a validation at a step."""
        return any((line["kind"], line["step"]) == ("validation", step) for line in self.metrics())

    def rewind_metrics(self, step: int) -> None:
        """Delete the metrics after a step, because a resumed run writes them again."""
        kept = [line for line in self.metrics() if line["step"] <= step]
        content = "".join(json.dumps(line) + "\n" for line in kept)
        atomic_write(self.path / METRICS_FILE, content)


def checkpoint_step(checkpoint: Path) -> int:
    """Return the number of optimizer steps done at a checkpoint, a folder named ``step-N``."""
    return int(checkpoint.name.removeprefix("step-"))
