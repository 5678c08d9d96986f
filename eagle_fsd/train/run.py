"""Train a draft head from a chat file and a target."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, gather_object, parse_flag_from_env

from eagle_fsd.model.drafters.heads import DraftHead
from eagle_fsd.model.self_check import check_target
from eagle_fsd.train.config import TrainConfig, TrainRequest
from eagle_fsd.train.curves import CURVES_FILE, draw_curves
from eagle_fsd.train.dataset import ChatDataset, check_contribution, split_validation
from eagle_fsd.train.feature_store import FeatureStore, write_features
from eagle_fsd.train.heads import (
    head_reads,
    load_for_training,
    save_trained,
    training_states,
)
from eagle_fsd.train.loaded_target import (
    LoadedTarget,
    check_device_map,
    fastest_dtype,
    load_frozen_target,
    target_name,
)
from eagle_fsd.train.model_card import write_card
from eagle_fsd.train.record import write_record
from eagle_fsd.train.regenerate import rewrite_chats
from eagle_fsd.train.trainer import MetricsCallback, Trainer, describe_counts
from eagle_fsd.train.training_folder import FEATURES, TrainingFolder
from eagle_fsd.train.validation import can_decode
from eagle_fsd.train.writing import LocalWriter
from eagle_fsd.utils.options import OptionsError
from eagle_fsd.utils.processes import PROCESS_TIMEOUT
from eagle_fsd.utils.progress import ProgressFactory, no_progress

log = logging.getLogger(__name__)

#: Bytes per token, to estimate the lengths of chats that are not encoded yet.
BYTES_PER_TOKEN = 4


def train(
    request: TrainRequest,
    config: TrainConfig | None = None,
    *,
    token: str | None = None,
    accelerator: Accelerator | None = None,
    progress: ProgressFactory = no_progress,
    on_metrics: MetricsCallback | None = None,
) -> Path | None:
    """Train a draft head; return its folder, or None on processes other than the main one.

    :mod:`~eagle_fsd.train.training_folder` lists the files. ``progress`` reports ``reading`` (in
    bytes), ``rewriting``, ``features``, ``measuring`` and ``counting`` (in chats); ``on_metrics``
    receives the numbers of steps and chats, then the metrics of logged steps and validations.
    Raises ValueError for unsuitable options or data, TrainingError if training fails,
    KeyboardInterrupt on a signal.
    """
    config = config or TrainConfig()
    accelerator = accelerator or make_accelerator(request.out, cpu=request.device_map == "cpu")
    is_main = accelerator.is_main_process
    if accelerator.num_processes < int(os.environ.get("WORLD_SIZE", 1)):
        raise OptionsError(
            "WORLD_SIZE is set, but this process is on its own: start all with torchrun or"
            " accelerate launch, on machines without a GPU with ACCELERATE_USE_CPU=true"
        )
    if accelerator.mixed_precision == "fp16":  # its first losses overflow, to find a scale
        raise OptionsError("mixed precision must be bf16 or no; got fp16")
    if request.regenerate and accelerator.num_processes > 1:
        raise OptionsError(
            "--regenerate requires a single process; run eagle-fsd train regenerate first"
        )
    check_device_map(request.device_map, accelerator.num_processes)
    folder = TrainingFolder(request.out)
    if is_main:  # before hours of rewriting
        folder.check_usable(request.resume or request.overwrite)
    device_map = request.device_map or accelerator.device
    if request.store_features and request.dtype is None:
        dtype = folder.recorded("dtype") if request.resume else None
        request = request.updated(dtype=dtype or fastest_dtype(accelerator.device))
    loaded: LoadedTarget | None = None
    if request.features is None:
        loaded = LoadedTarget.load(request, device_map, token)
        target = loaded.target
    else:  # stored features need neither layers nor a chat template
        target = load_frozen_target(request, device_map, token, layers=False)
    if target.device.type == "meta":
        raise ValueError(
            "the target's output projection is offloaded to CPU memory or disk, but the head trains"
            " beside it: use a smaller dtype or more devices, or train on stored features"
        )
    if can_decode(target):
        check_target(target)
    if request.device_map is not None:
        accelerator.state.device = target.device
    length = min(config.max_length, target.stable_length)
    tokens = config.tokens_per_batch
    if request.data is not None and tokens is not None and tokens < length:
        raise OptionsError(f"tokens_per_batch must be at least max_length ({length}); got {tokens}")
    progress = progress if is_main else no_progress
    head = None
    if request.head is not None:
        head = load_for_training(request.head, config, target, token)
    states = training_states(head_reads(config.head_type, target) if head is None else head.reads)
    data: ChatDataset | FeatureStore
    if loaded is None:
        data = _open_features(request, config, states, length)
        fingerprint = data.fingerprint
        config = config.updated(max_length=fingerprint["max_length"])
    else:
        data, fingerprint = _open_chats(request, config, loaded, progress)
    if len(set(gather_object([len(data)]))) > 1:
        raise OptionsError("the chats changed while the processes were reading them")
    chats, _ = split_validation(len(data), config.validation, config.seed)
    check_contribution(data, chats, config.seed)
    sizes = [data.sizes[index] for index in chats]  # in tokens, or in bytes
    if loaded is not None:
        sizes = [min(size // BYTES_PER_TOKEN, length) for size in sizes]
    config = config.updated(epochs=config.count_epochs(sum(sizes)))
    if is_main and config.validation and not can_decode(target):
        log.warning(
            "validation reports losses and no tau, because the target is not entirely in memory"
        )
    with accelerator.main_process_first():
        if is_main:
            start = None if head is None else str(request.head)
            run = {**fingerprint, "head": start, "processes": accelerator.num_processes}
            folder.prepare(config, run, request.overwrite)
        elif not folder.exists:
            raise OptionsError(f"{folder.path} must be in a file system that all machines share")
    accelerator.init_trackers("tensorboard")
    records = data.file.counts() if isinstance(data, ChatDataset) else {}
    stored = folder.path / FEATURES
    if request.store_features:
        assert isinstance(data, ChatDataset)  # TrainRequest excludes stored features
        with progress("features") as report:
            data = write_features(
                data, target, states, folder=stored, fingerprint=fingerprint, progress=report
            )

    def save(trained: DraftHead) -> None:
        """Write the head with its record, curves and card, at checkpoints and at the end."""
        save_trained(trained, folder.path, target.dtype, binary=request.binary)
        write_record(
            folder.path,
            config.model_dump(),
            steps=trainer.step,
            tokens=trainer.counts["tokens"],
            seconds=trainer.seconds,
            data={**records, **trainer.counts},
        )
        draw_curves(folder.metrics(), folder.path / CURVES_FILE)
        write_card(folder.path, folder.metrics(), fingerprint)

    trainer = Trainer(
        config,
        target,
        data,
        folder,
        accelerator=accelerator,
        on_metrics=on_metrics,
        head=head,
        progress=progress,
        on_checkpoint=save,
    )
    trained = trainer.run()
    if is_main:
        if (summary := describe_counts(trainer.counts)) is not None:
            log.warning("%s", summary)
        save(trained)
        shutil.rmtree(stored, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.end_training()  # closes the connection between the processes
    return folder.path if is_main else None


def make_accelerator(out: str | Path, cpu: bool = False) -> Accelerator:
    """Create an accelerator, in mixed precision on GPUs with bfloat16 and CPUs faster in it.

    ``ACCELERATE_MIXED_PRECISION``, which ``accelerate launch`` sets, overrides this. ``out``
    receives TensorBoard's files.
    """
    cpu = cpu or parse_flag_from_env("ACCELERATE_USE_CPU") or torch.backends.mps.is_available()
    precision = None
    if "ACCELERATE_MIXED_PRECISION" not in os.environ:
        if not cpu and torch.cuda.is_available():
            capable = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            capable = fastest_dtype("cpu") is not None
        precision = "bf16" if capable else "no"
    return Accelerator(
        mixed_precision=precision,
        cpu=cpu,
        log_with="tensorboard",
        project_dir=str(out),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=PROCESS_TIMEOUT)],
    )


def _open_features(
    request: TrainRequest, config: TrainConfig, states: Sequence[int], length: int
) -> FeatureStore:
    """Return the stored features, or raise ValueError if the head cannot be trained on them."""
    assert request.features is not None
    store = FeatureStore(request.features)
    fingerprint = store.fingerprint
    if not store.complete:
        raise ValueError(f"{request.features} is incomplete; run eagle-fsd train features again")
    if fingerprint["target"] != target_name(request):
        raise ValueError(f"{request.features} holds features of the target {fingerprint['target']}")
    try:
        store.select(states)
    except ValueError as error:
        command = f"eagle-fsd train features --head-type {config.head_type}"
        raise ValueError(f"{error}; run {command}, or pass --data instead") from None
    given_length = length if "max_length" in config.model_fields_set else None
    for option, given, stored in (
        ("max_length", given_length, fingerprint["max_length"]),
        ("--conv-template", request.chat_template, fingerprint["template"]),
    ):
        if given not in (None, stored):
            own = stored or "the tokenizer's"
            raise OptionsError(f"{option} must be that of --features, {own}; got {given}")
    return store


def _open_chats(
    request: TrainRequest, config: TrainConfig, loaded: LoadedTarget, progress: ProgressFactory
) -> tuple[ChatDataset, dict[str, Any]]:
    """Return the chats, rewritten if requested, and their fingerprint."""
    assert request.data is not None  # TrainRequest requires either features or data
    path, length = request.data, config.max_length
    if request.regenerate:
        path = request.out.with_name(request.out.name + "-regenerated.jsonl")
        with progress("reading") as report:
            chats = loaded.open_chats(request.data, progress=report).file
        with progress("rewriting") as report:
            writer = LocalWriter(loaded)
            rewrite_chats(writer, chats, path, progress=report, overwrite=request.overwrite)
            writer.model.release_memory()
    with progress("reading") as report:
        return loaded.open_chats(path, length, report), loaded.fingerprint(path, length)
