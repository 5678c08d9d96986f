"""Train a draft head from a chat file and a target."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from eagle_fsd.model.checkpoint import load_head, save_head
from eagle_fsd.train.config import TrainConfig, TrainRequest
from eagle_fsd.train.curves import CURVES_FILE, draw_curves
from eagle_fsd.train.dataset import ChatDataset
from eagle_fsd.train.feature_store import FeatureStore
from eagle_fsd.train.loaded_target import LoadedTarget
from eagle_fsd.train.model_card import write_card
from eagle_fsd.train.record import write_record
from eagle_fsd.train.regenerate import rewrite_chats
from eagle_fsd.train.trainer import MetricsCallback, Trainer
from eagle_fsd.train.training_folder import TrainingFolder
from eagle_fsd.utils.options import OptionsError
from eagle_fsd.utils.progress import ProgressFactory, no_progress

log = logging.getLogger(__name__)


def train(
    request: TrainRequest,
    config: TrainConfig | None = None,
    *,
    token: str | None = None,
    accelerator: Accelerator | None = None,
    progress: ProgressFactory = no_progress,
    on_metrics: MetricsCallback | None = None,
) -> Path | None:
    """Train a draft head; :mod:`~eagle_fsd.train.training_folder` lists the files it writes.

    Args:
        request: The chats or stored features, the target, and the folder to write.
        config: The hyperparameters.
        token: Access token for the Hub.
        accelerator: Devices and processes; default: the result of :func:`make_accelerator`.
        progress: Reports ``reading`` (in bytes) and ``rewriting`` (in chats) on the main process.
        on_metrics: Called on the main process with the metrics of every logged step and validation.

    Returns:
        The head's folder; None on processes other than the main one.

    Raises:
        OptionsError: ``request.regenerate`` is set and there are several processes.
        ValueError: A file or an option is invalid, the target does not support ``max_length``, or
            the folder holds another training.
        OSError: A file cannot be read or written.
        LoadError: The target cannot be loaded.
        CheckpointError: The head to start from cannot be loaded.
        TrainingError: Training could not continue.
        KeyboardInterrupt: A signal stopped the training.
    """
    config = config or TrainConfig()
    accelerator = accelerator or make_accelerator(request.out)
    is_main = accelerator.is_main_process
    if request.regenerate and accelerator.num_processes > 1:
        raise OptionsError(
            "--regenerate requires a single process; run eagle-fsd train regenerate first"
        )
    loaded = LoadedTarget.load(request, accelerator.device, token)
    target = loaded.target
    target.check_length(min(config.max_length, target.context_length))
    data, fingerprint = _open_data(request, config, loaded, progress if is_main else no_progress)
    head = None
    if request.head is not None:
        head = load_head(request.head, target, torch.float32, token)
    fingerprint = {**fingerprint, "head": None if head is None else str(request.head)}
    folder = TrainingFolder(request.out)
    with accelerator.main_process_first():
        if is_main:
            folder.prepare(config, fingerprint, request.resume, request.overwrite)
    accelerator.init_trackers("tensorboard")
    start = time.monotonic()
    trainer = Trainer(config, target, data, folder, accelerator, on_metrics, head)
    trained = trainer.run()
    if trainer.truncated:
        log.warning("chats were truncated %d times", trainer.truncated)
    if trainer.rejected:
        log.warning("chats that the template rejects were skipped %d times", trainer.rejected)
    if is_main:
        dtype = None if target.dtype == torch.float32 else target.dtype
        save_head(trained, folder.path, dtype, binary=request.binary)
        log.info("trained in %.0f s", time.monotonic() - start)
        settings = config.model_dump()
        write_record(folder.path, settings, trainer.step, trainer.tokens, trainer.seconds)
        metrics = folder.metrics()
        draw_curves(metrics, folder.path / CURVES_FILE)
        write_card(folder.path, metrics, fingerprint)
    accelerator.wait_for_everyone()
    accelerator.end_training()  # closes the connection between the processes
    return folder.path if is_main else None


def make_accelerator(out: str | Path) -> Accelerator:
    """Create an accelerator, with mixed precision in bfloat16 on GPUs that support it.

    A precision set by ``accelerate launch`` takes precedence.

    Args:
        out: Folder for TensorBoard's files.
    """
    precision = None
    if "ACCELERATE_MIXED_PRECISION" not in os.environ:
        capable = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        precision = "bf16" if capable else "no"
    return Accelerator(mixed_precision=precision, log_with="tensorboard", project_dir=str(out))


def _open_data(
    request: TrainRequest, config: TrainConfig, loaded: LoadedTarget, progress: ProgressFactory
) -> tuple[ChatDataset | FeatureStore, dict[str, Any]]:
    """Return the training data and its fingerprint."""
    if request.features is not None:
        store = FeatureStore(request.features)
        if not store.complete:
            raise ValueError(
                f"{request.features} is incomplete; run eagle-fsd train features again"
            )
        if store.fingerprint["target"] != loaded.name:
            target = store.fingerprint["target"]
            raise ValueError(f"{request.features} holds features of the target {target}")
        return store, store.fingerprint
    assert request.data is not None  # TrainRequest requires one of the two
    path, length = request.data, config.max_length
    if request.regenerate:
        path = request.out.with_name(request.out.name + "-regenerated.jsonl")
        with progress("reading") as report:
            chats = loaded.open_chats(request.data, progress=report).file
        with progress("rewriting") as report:
            rewrite_chats(loaded, chats, path, progress=report)
    with progress("reading") as report:
        return loaded.open_chats(path, length, report), loaded.fingerprint(path, length)
