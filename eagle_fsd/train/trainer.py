"""The training loop of a draft head, on accelerate.

The order of the chats, the noise on the features and the learning rate depend only on the
configuration, the data, the number of processes and the step number, so that training can resume.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, send_to_device
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from eagle_fsd.model.drafters.heads import DraftHead
from eagle_fsd.model.target import Target
from eagle_fsd.train.chat_file import MAX_DESCRIBED
from eagle_fsd.train.config import DRAFT_VOCAB_SIZE, TrainConfig
from eagle_fsd.train.dataset import (
    FILLER,
    ChatDataset,
    TrainingBatch,
    collate,
    count_answer_tokens,
    example_length,
    pack_batches,
    rank_by_frequency,
    read_examples,
    shared_batches,
    shuffled_batches,
    split_validation,
)
from eagle_fsd.train.feature_store import FeatureStore
from eagle_fsd.train.features import add_noise
from eagle_fsd.train.heads import empty_copy, new_head
from eagle_fsd.train.losses import HeadLosses, loss_inputs
from eagle_fsd.train.training_folder import TrainingError, TrainingFolder
from eagle_fsd.train.validation import decode_validation, validation_losses, validation_prompts
from eagle_fsd.utils.errors import is_out_of_memory
from eagle_fsd.utils.host_memory import trim_heap
from eagle_fsd.utils.progress import ProgressFactory, no_progress
from eagle_fsd.utils.signals import StopSignals

log = logging.getLogger(__name__)

#: Maximum number of held-out chats whose prompts are decoded at each validation.
MAX_DECODED_PROMPTS = 16
#: Steps after which freed memory is returned to the system.
TRIM_EVERY = 10

#: Numbers of chats and tokens that were read, and their names in checkpoints. A chat counts once in
#: every epoch; rejected ones could not be encoded, and of unused ones the loss covers no token.
COUNTERS = {name: name for name in ("chats", "tokens", "loss_tokens")}
COUNTERS |= {"truncated": "cut", "rejected": "refused", "unused": "unused"}

MetricsCallback = Callable[[dict[str, Any]], None]


def describe_counts(counts: Mapping[str, int]) -> str | None:
    """Describe chats that were not used in full, in one line; None if there are none."""
    verbs = {
        "truncated": "were truncated",
        "rejected": "could not be encoded",
        "unused": "had no token that the loss covers",
    }
    found = ", ".join(f"{counts[name]:,} {verb}" for name, verb in verbs.items() if counts[name])
    return f"of {counts['chats']:,} chats read in all epochs, {found}" if found else None


#: Signals after which a training process completes the step and ends the training.
SIGNALS = {signal.SIGINT, signal.SIGTERM}


def _leave_process_group(_: int) -> None:
    """Detach a worker from the process group, whose signals its parent handles.

    A signal that is pending is discarded.
    """
    os.setsid()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # with which the parent ends its workers


class _Loader(DataLoader[Any]):
    """A loader whose workers a signal to the process group, such as Ctrl-C, does not end."""

    def __iter__(self) -> Any:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            return super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Trainer:
    """Training loop of one draft head, which starts from ``head`` or from random weights.

    The number of epochs must be set in the configuration. On the main process, ``on_metrics`` is
    called with the numbers of steps and chats, then metrics of logged steps and validations, and
    ``on_checkpoint`` with the head in float32 at every checkpoint but that of the last step.
    ``progress`` reports ``measuring`` and ``counting`` (in chats).
    """

    def __init__(
        self,
        config: TrainConfig,
        target: Target,
        data: ChatDataset | FeatureStore,
        folder: TrainingFolder,
        accelerator: Accelerator,
        on_metrics: MetricsCallback | None = None,
        head: DraftHead | None = None,
        progress: ProgressFactory = no_progress,
        on_checkpoint: Callable[[DraftHead], None] = lambda head: None,
    ) -> None:
        self.config, self.target, self.data, self.folder = config, target, data, folder
        self.accelerator = accelerator
        self.on_metrics, self.on_checkpoint = on_metrics, on_checkpoint
        self.chats, self.held_out = split_validation(len(data), config.validation, config.seed)
        self.packed: list[list[int]] = []
        if config.tokens_per_batch is None:
            self.sizes = [data.sizes[index] for index in self.chats]
        else:
            self.sizes = self._measure_lengths(progress)
            self.packed = pack_batches(self.chats, self.sizes, config.tokens_per_batch, config.seed)
        self.batches_per_epoch = len(self._epoch_batches(0))
        assert config.epochs is not None
        self.epochs = config.epochs
        self.steps = -(-self.epochs * self.batches_per_epoch // config.accumulate)
        self.steps = min(self.steps, config.max_steps or self.steps)
        self.step, self.seconds = 0, 0.0
        self.counts = dict.fromkeys(COUNTERS, 0)
        self._described = 0

        token_ids = self._select_draft_vocabulary(progress) if head is None else None
        torch.manual_seed(config.seed)
        if head is None:
            head = new_head(config, target, token_ids)
        self.head = head.float().train().requires_grad_(True)
        if head.embed_tokens is not None:  # EAGLE does not train the embeddings
            head.embed_tokens.requires_grad_(False)
        if config.compile:
            for layer in [*target.layers, *head.layers]:
                layer.compile(dynamic=True)
        optimizer = torch.optim.AdamW(
            (item for item in head.parameters() if item.requires_grad),
            lr=config.learning_rate(target.hidden_size),
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
        )
        accelerator.gradient_accumulation_steps = config.accumulate
        plugin = accelerator.state.deepspeed_plugin
        if plugin is not None:  # without a prepared data loader it cannot infer these
            plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = config.batch_size
            plugin.deepspeed_config["gradient_accumulation_steps"] = config.accumulate
            plugin.deepspeed_config["gradient_clipping"] = config.clip
        if accelerator.distributed_type == DistributedType.FSDP:
            # Autocast sets the precision, as without FSDP. FSDP's policy would round the losses.
            accelerator.state.fsdp_plugin.mixed_precision_policy = None
        self.losses, self.optimizer = accelerator.prepare(HeadLosses(head, config), optimizer)
        if isinstance(self.losses, DistributedDataParallel):
            self.losses.broadcast_buffers = False  # they are constants
        accelerator.register_for_checkpointing(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the counters that a checkpoint stores in addition to weights and optimizer."""
        counts = {COUNTERS[name]: count for name, count in self.counts.items()}
        return {"step": self.step, "seconds": self.seconds, **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counters from a checkpoint."""
        self.step, self.seconds = state["step"], state["seconds"]
        # Checkpoints of version 0.1.0 lack some of them.
        self.counts = {name: state.get(key, 0) for name, key in COUNTERS.items()}

    def run(self) -> DraftHead:
        """Train to the last step, from the folder's newest checkpoint if there is one.

        The first Ctrl-C or SIGTERM stops training (KeyboardInterrupt) after the current step and a
        checkpoint, the second one at once. Returns the head in float32, see :meth:`copy_head`.
        Raises TrainingError if the loss or its gradient is not finite, a step runs out of memory,
        or a checkpoint could not be written; earlier ones are kept.
        """
        newest = self.folder.newest_checkpoint()
        if newest is not None:
            self.accelerator.load_state(str(newest))
            log.info("resuming from step %d", self.step)
        unvalidated = self.step >= self.steps and not self.folder.is_validated(self.step)
        self.accelerator.wait_for_everyone()  # until all have read the metrics, before they change
        if self.accelerator.is_main_process:
            self.folder.rewind_metrics(self.step)
            if self.on_metrics is not None:
                read = {"chats": len(self.chats), "epochs": self.epochs}
                self.on_metrics({"kind": "start", "step": self.step, "steps": self.steps, **read})
        if unvalidated:
            self._validate()  # a lower limit ended the training at this checkpoint
        with StopSignals("this step") as signals:
            batches = self._batches()
            while self.step < self.steps:
                start = time.monotonic()
                metrics, stopping = self._train_step(batches, signals.requested.is_set)
                self.step += 1
                if self.step % TRIM_EVERY == 0:
                    trim_heap()
                self.seconds += time.monotonic() - start
                is_last = self.step == self.steps
                if is_last or self.step % self.config.log_every == 0:
                    self._log_step(metrics)
                if is_last or self.step % self.config.validate_every == 0:
                    self._validate()
                if is_last or stopping or self.step % self.config.checkpoint_every == 0:
                    self.folder.write_checkpoint(self.step, self.accelerator)
                    head = self.copy_head(torch.float32)
                    if self.accelerator.is_main_process and not is_last:
                        self.on_checkpoint(head)
                if stopping and not is_last:
                    raise KeyboardInterrupt
        return self.copy_head(torch.float32)

    def copy_head(self, dtype: torch.dtype) -> DraftHead:
        """Copy the head. All processes must call this; only the main one's has the weights."""
        state = self.accelerator.get_state_dict(self.losses)
        head = empty_copy(self.head, dtype)
        if self.accelerator.is_main_process:
            head.load_state_dict(
                {name.removeprefix("head."): value for name, value in state.items()}
            )
        return head.eval().requires_grad_(False)

    # -- one step ----------------------------------------------------------------------------------

    def _train_step(
        self, batches: Iterator[tuple[int, TrainingBatch]], stop_requested: Callable[[], bool]
    ) -> tuple[dict[str, Any], bool]:
        """Do one optimizer step.

        Return means over the positions of all processes, and whether any was signaled to stop.
        """
        accelerator, config = self.accelerator, self.config
        group = [next(batches) for _ in range(config.accumulate)]
        positions = self._count(batch for _, batch in group)
        lr = config.learning_rate(self.target.hidden_size)
        lr *= config.learning_rate_factor(self.step, self.steps)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = lr
        # The wrapper averages over processes and accumulated batches, which may differ in their
        # numbers of positions. The result must be the mean over all positions.
        scale = accelerator.num_processes * config.accumulate / max(1, positions)
        sums: dict[str, Tensor] = {}
        norm: float | None = None
        try:
            for epoch, batch in group:
                with accelerator.accumulate(self.losses):
                    batch = send_to_device(batch, accelerator.device, non_blocking=True)
                    losses = self._compute_losses(epoch, batch)
                    accelerator.backward(losses["loss"] * scale)
                    if accelerator.sync_gradients:
                        # A tensor; DeepSpeed returns a float, or None before its first step.
                        found = accelerator.clip_grad_norm_(self.losses.parameters(), config.clip)
                        norm = None if found is None else float(found)
                        if norm is not None and not math.isfinite(norm):
                            self._fail("the loss or its gradient is not finite")
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                for name, value in losses.items():
                    sums[name] = sums.get(name, 0.0) + value.detach()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._fail(
                "out of memory; lower batch_size or tokens_per_batch (and raise accumulate"
                " accordingly), or max_length",
                error,
            )
        stop = torch.tensor(float(stop_requested()), device=accelerator.device)
        *values, stops = accelerator.reduce(torch.stack([*sums.values(), stop]), "sum").tolist()
        metrics: dict[str, Any] = {
            name: value / max(1, positions) for name, value in zip(sums, values, strict=True)
        }
        if not math.isfinite(metrics["loss"]):
            self._fail("the loss is not finite")
        metrics |= {"lr": lr, "gradient_norm": norm}
        return metrics, stops > 0

    def _count(self, batches: Iterator[TrainingBatch]) -> int:
        """Count what all processes read in a step; return how many positions its loss covers."""
        counts = torch.zeros(len(COUNTERS), dtype=torch.long)
        for batch in batches:
            pairs = zip(batch.indices, batch.lengths, strict=True)
            lengths = [length for index, length in pairs if index != FILLER]
            used = len(lengths), sum(lengths), int(batch.loss_mask.sum())
            counts += torch.tensor([*used, batch.truncated, len(batch.errors), batch.unused])
            for error in batch.errors:
                self._described += 1
                if self._described <= MAX_DESCRIBED:
                    log.warning("skipped a chat: %s", error)
        totals = self.accelerator.reduce(counts.to(self.accelerator.device), "sum").tolist()
        read = dict(zip(COUNTERS, totals, strict=True))
        self.counts = {name: count + read[name] for name, count in self.counts.items()}
        return int(read["loss_tokens"])

    def _compute_losses(self, epoch: int, batch: TrainingBatch) -> dict[str, Tensor]:
        inputs = loss_inputs(self.head, batch)
        seed = self.config.seed * 1_000_003 + epoch
        inputs["features"] = add_noise(inputs["features"], batch, self.config.noise, seed)
        with self.accelerator.autocast():
            losses: dict[str, Tensor] = self.losses(**inputs)
        return losses

    def _batches(self) -> Iterator[tuple[int, TrainingBatch]]:
        """Yield (epoch, batch) from the current step on; after the last epoch, empty batches."""
        config = self.config
        epoch, skip = divmod(self.step * config.accumulate, self.batches_per_epoch)
        while epoch < self.epochs:
            for batch in self._data_loader(self._epoch_batches(epoch)[skip:]):
                yield epoch, batch
            epoch, skip = epoch + 1, 0
        while True:
            yield epoch, collate([self.data[FILLER]])

    def _epoch_batches(self, epoch: int) -> list[list[int]]:
        """Return this process's batches of an epoch, as lists of chat indices."""
        config, accelerator = self.config, self.accelerator
        shared = {
            "seed": config.seed,
            "epoch": epoch,
            "process": accelerator.process_index,
            "processes": accelerator.num_processes,
        }
        if config.tokens_per_batch is not None:
            return shared_batches(self.packed, **shared)
        return shuffled_batches(self.chats, self.sizes, config.batch_size, **shared)

    def _measure_lengths(self, progress: ProgressFactory) -> list[int]:
        """Return the number of tokens of each training chat; processes share the encoding."""
        if isinstance(self.data, FeatureStore):
            return [self.data.sizes[index] for index in self.chats]
        accelerator = self.accelerator
        part = slice(accelerator.process_index, None, accelerator.num_processes)
        own: list[int] = []
        with progress("measuring") as report:
            chats, workers = self.chats[part], self.config.workers
            for length in read_examples(example_length, self.data, chats, workers):
                own.append(length)
                report(len(own), len(chats))
        lengths = torch.zeros(len(self.chats), dtype=torch.long)
        lengths[part] = torch.tensor(own, dtype=torch.long)
        lengths = accelerator.reduce(lengths.to(accelerator.device), "sum")
        measured: list[int] = lengths.tolist()
        return measured

    def _select_draft_vocabulary(self, progress: ProgressFactory) -> Tensor | None:
        """Return the tokens ``[D]`` that a new head drafts, most frequent first; None for all."""
        vocab_size = self.target.vocab_size
        size = self.config.draft_vocab_size
        if size is None:
            size = DRAFT_VOCAB_SIZE if self.config.head_type == "eagle3" else vocab_size
        if size >= vocab_size:
            return None
        accelerator, data = self.accelerator, copy(self.data)
        if isinstance(data, FeatureStore):
            data.select(())  # only the tokens are read
        own = self.chats[accelerator.process_index :: accelerator.num_processes]
        with progress("counting") as report:
            workers = self.config.workers
            counts = count_answer_tokens(data, own, vocab_size, workers, progress=report)
        counts = accelerator.reduce(counts.to(accelerator.device), "sum")
        return rank_by_frequency(counts.cpu())[:size]

    def _data_loader(self, batches: list[list[int]]) -> DataLoader[Any]:
        """Load batches of chats, given their indices."""
        on_gpu = self.accelerator.device.type == "cuda"
        return _Loader(
            self.data,
            batch_sampler=batches,
            collate_fn=collate,
            num_workers=self.config.workers,
            worker_init_fn=_leave_process_group,
            pin_memory=on_gpu and self.config.workers > 0,
        )

    # -- metrics, validation, checkpoints ----------------------------------------------------------

    def _log_step(self, metrics: dict[str, Any]) -> None:
        epoch = self.step * self.config.accumulate / self.batches_per_epoch
        self._publish(
            "train",
            {
                "step": self.step,
                "epoch": round(epoch, 4),
                **metrics,
                "tokens": self.counts["tokens"],
                "tokens_per_second": self.counts["tokens"] / self.seconds,
                "seconds_left": self.seconds / self.step * (self.steps - self.step),
            },
        )

    def _validate(self) -> None:
        head = self.copy_head(self.target.dtype)
        if self.accelerator.is_main_process and self.held_out:
            size = self.config.batch_size
            if self.config.tokens_per_batch is not None:
                size = max(1, self.config.tokens_per_batch // self.config.max_length)
            starts = range(0, len(self.held_out), size)
            chats = [self.held_out[start : start + size] for start in starts]
            batches = self._data_loader(chats)
            losses = HeadLosses(head, self.config)
            metrics: dict[str, Any] = validation_losses(losses, batches)
            prompts = validation_prompts(
                self.data, self.held_out, MAX_DECODED_PROMPTS, self.target.stable_length
            )
            # Decoding passes caches and masks, for which layers would be compiled again.
            with torch.compiler.set_stance("force_eager"):
                metrics |= decode_validation(head, self.target, prompts)
            self._publish("validation", {"step": self.step, **metrics})
        self.accelerator.wait_for_everyone()

    def _publish(self, kind: str, metrics: dict[str, Any]) -> None:
        """Write metrics to the folder and TensorBoard, and pass them to ``on_metrics``."""
        if not self.accelerator.is_main_process:
            return
        self.folder.append_metrics({"kind": kind, **metrics})
        scalars = {
            f"{kind}/{name}": value for name, value in metrics.items() if isinstance(value, float)
        }
        for depth, value in enumerate(metrics.get("js_by_depth", ())):
            scalars[f"{kind}/js_depth_{depth}"] = value
        self.accelerator.log(scalars, step=self.step)
        if self.on_metrics is not None:
            self.on_metrics({"kind": kind, "steps": self.steps, **metrics})

    def _fail(self, reason: str, error: BaseException | None = None) -> NoReturn:
        kept = self.folder.describe_newest_checkpoint()
        raise TrainingError(f"step {self.step + 1}: {reason}; {kept}") from error
