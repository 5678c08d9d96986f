"""From a chat file and a target to a head: what ``eagle-fsd train`` does, for Python too."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eagle_fsd.bundled import BUNDLED_TARGET
from eagle_fsd.model.checkpoint import load_head, save_head
from eagle_fsd.model.loading import load_target, load_tokenizer
from eagle_fsd.model.target import Target
from eagle_fsd.train.card import write_card
from eagle_fsd.train.chats import ChatFile
from eagle_fsd.train.config import TrainRecipe
from eagle_fsd.train.curves import draw_curves
from eagle_fsd.train.dataset import ChatDataset
from eagle_fsd.train.features import FeatureStore
from eagle_fsd.train.record import write_record
from eagle_fsd.train.run_folder import RunFolder
from eagle_fsd.train.trainer import Listener, Trainer
from eagle_fsd.utils.chat_templates import chat_format

log = logging.getLogger(__name__)

#: Chats that are worded before a training begins, to tell a template that suits none.
TRIED = 20


@dataclass
class Source:
    """What a head is trained on and for.

    Attributes:
        name: Of the target, as the user gave it.
        template: A FastChat template's name, or None for the tokenizer's own.
    """

    name: str
    target: Target
    tokenizer: PreTrainedTokenizerBase
    template: str | None = None

    @classmethod
    def load(
        cls,
        target: str | Path | None = None,
        template: str | None = None,
        dtype: str | None = None,
        device: str | torch.device | None = None,
        token: str | None = None,
    ) -> Source:
        """The target (the bundled one when none is named) and its tokenizer.

        Raises:
            LoadError: Files are missing or damaged.
            ValueError: There is no such template, dtype or device.
        """
        name = str(target or BUNDLED_TARGET)
        tokenizer = load_tokenizer(name, token)
        chat_format(tokenizer, template)  # an unknown template is told before anything is loaded
        model: PreTrainedModel = load_target(name, dtype, device, token=token)
        model.requires_grad_(False)
        return cls(name, Target(model.eval()), tokenizer, template)

    def open(
        self,
        path: str | Path,
        limit: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> ChatDataset:
        """The chats of ``path``, encoded for this target.

        Raises:
            ValueError: No chat is usable, or the template cannot word the first ones.
        """
        file = ChatFile(path, progress)
        if file.skipped:
            first = "; ".join(map(str, file.faults[:3]))
            log.warning("%s: skipped %d malformed records (%s)", path, file.skipped, first)
        wording = chat_format(self.tokenizer, self.template)
        data = ChatDataset(file, self.tokenizer, wording, min(limit, self.target.context))
        faults = [data[index].fault for index in range(min(TRIED, len(data)))]
        if all(faults):
            raise ValueError(f"no chat can be worded with this template: {faults[0]}")
        return data

    def describe(self, path: str | Path, limit: int) -> dict[str, Any]:
        """What the encoded chats of ``path`` depend on: a run or features made from other data
        cannot be gone on with."""
        return {
            "data": str(path),
            "bytes": Path(path).stat().st_size,
            "target": self.name if self.name != str(BUNDLED_TARGET) else "bundled",
            "template": self.template,
            "max_length": min(limit, self.target.context),
        }


def train(
    recipe: TrainRecipe,
    out: str | Path,
    data: str | Path | None = None,
    features: str | Path | None = None,
    target: str | Path | None = None,
    template: str | None = None,
    dtype: str | None = None,
    token: str | None = None,
    head: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    binary: bool = False,
    listener: Listener | None = None,
    progress: Callable[[int, int], None] | None = None,
    accelerator: Accelerator | None = None,
) -> Path:
    """Train a head and leave it in ``out``; see ``folder.py`` for what lies there.

    Args:
        data: A chat file; or ``features``: a folder that ``write_features`` made.
        target, dtype, token: As for :func:`~eagle_fsd.model.loading.load_target`.
        template: A FastChat template; default: the tokenizer's own.
        head: A head's folder to begin with; default: a fresh head.
        resume, overwrite: What to do where ``out`` exists already.
        binary: Write ``pytorch_model.bin``, as EAGLE's own code reads it.
        listener: Given the metrics as they come, on the main process.
        progress: Told how far the chat file has been read.

    Raises:
        ValueError: Something of this does not exist or does not fit.
        CheckpointError: The head to begin with cannot be read.
        TrainingError: Training could not go on.
    """
    if (data is None) == (features is None):
        raise ValueError("name either a chat file or a folder of features")
    accelerator = accelerator or make_accelerator(out)
    source = Source.load(target, template, dtype, accelerator.device, token)
    source.target.check_length(min(recipe.max_length, source.target.context))
    if data is not None:
        chats: ChatDataset | FeatureStore = source.open(data, recipe.max_length, progress)
        made_from = source.describe(data, recipe.max_length)
    else:
        chats = FeatureStore(features)
        made_from = chats.made_from
        if not chats.complete:
            raise ValueError(f"{features} is not complete: run eagle-fsd train features again")
        if made_from["target"] != source.describe(__file__, 8)["target"]:
            raise ValueError(f"{features} holds features of the target {made_from['target']}")
    began_with = load_head(head, source.target, torch.float32, token) if head else None
    made_from = {**made_from, "head": str(head) if head else None}
    main = accelerator.is_main_process
    with accelerator.main_process_first():
        folder = RunFolder(out, recipe, made_from, resume, overwrite, main)
    accelerator.init_trackers("tensorboard")
    began = time.monotonic()
    trainer = Trainer(recipe, source.target, chats, folder, accelerator, listener, began_with)
    trained = trainer.run()
    if trainer.cut:
        log.warning("chats longer than the limit were cut %d times", trainer.cut)
    if trainer.refused:
        log.warning("chats that the template cannot word were left out %d times", trainer.refused)
    if main:
        dtype_ = source.target.dtype
        save_head(trained, folder.path, dtype_ if dtype_ != torch.float32 else None, binary=binary)
        log.info("trained in %.0f s", time.monotonic() - began)
        write_record(folder.path, recipe, trainer.step, trainer.tokens, trainer.seconds)
        metrics = folder.metrics()
        draw_curves(metrics, folder.curves)
        write_card(folder.path, metrics, made_from)
    accelerator.wait_for_everyone()
    accelerator.end_training()  # which takes the processes' connection down
    return folder.path


def make_accelerator(out: str | Path) -> Accelerator:
    """bfloat16 on a GPU that has it, unless ``accelerate launch`` says otherwise."""
    precision = None
    if "ACCELERATE_MIXED_PRECISION" not in os.environ:
        capable = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        precision = "bf16" if capable else "no"
    return Accelerator(mixed_precision=precision, log_with="tensorboard", project_dir=str(out))
