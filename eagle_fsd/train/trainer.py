"""The training loop of a draft head, on accelerate.

What a step does follows from the recipe, the data and the step's number alone: the order of the
chats, the noise on the features and the learning rate are computed from them, not carried along.
So a run that goes on from a checkpoint does what it would have done, and several processes do
together what one would do with as large a batch.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from eagle_fsd.model.checkpoint import EMBEDDING
from eagle_fsd.model.drafters.eagle import EagleHead
from eagle_fsd.model.target import Target
from eagle_fsd.train.chats import FAULTS_KEPT
from eagle_fsd.train.config import TrainRecipe
from eagle_fsd.train.dataset import (
    NOTHING,
    Batch,
    ChatDataset,
    SharedBatches,
    collate,
    count_batches,
)
from eagle_fsd.train.features import FeatureStore, batch_features
from eagle_fsd.train.losses import HeadLosses
from eagle_fsd.train.run_folder import RunFolder, TrainingError, step_of
from eagle_fsd.train.validate import decode_validation, validation_losses, validation_prompts

log = logging.getLogger(__name__)

#: Held-out chats are decoded with this many prompts.
DECODED_PROMPTS = 16

Listener = Callable[[dict[str, Any]], None]


class Trainer:
    """Trains one head.

    Args:
        target: What the features and the output projection come from.
        data: Chats, encoded when asked for, or stored features.
        folder: Where checkpoints and metrics go.
        listener: Given the metrics of every logged step and validation, on the main process.
        head: To begin with, attached to ``target``; default: a fresh one.

    Attributes:
        step: Optimiser steps done; ``steps``: to be done in all.
        tokens, seconds: Read by all processes, and spent on training steps.
        cut: Chats this process met that were longer than the limit.
        refused: Chats it met that the template cannot word.
    """

    def __init__(
        self,
        recipe: TrainRecipe,
        target: Target,
        data: ChatDataset | FeatureStore,
        folder: RunFolder,
        accelerator: Accelerator,
        listener: Listener | None = None,
        head: EagleHead | None = None,
    ) -> None:
        self.recipe, self.target, self.data, self.folder = recipe, target, data, folder
        self.accelerator = accelerator
        self.listener = listener
        self.chats, self.held_out = _split(len(data), recipe)
        sizes = data.file.size if isinstance(data, ChatDataset) else data.size
        self.sizes = [sizes(index) for index in self.chats]
        whole = recipe.batch_size * accelerator.num_processes
        self.batches_per_epoch = count_batches(len(self.chats), whole)
        self.steps = -(-recipe.epochs * self.batches_per_epoch // recipe.accumulate)
        self.steps = min(self.steps, recipe.max_steps or self.steps)
        self.step = self.tokens = self.cut = self.refused = 0
        self.seconds = 0.0
        self.stop_asked = self.stopping = False  # here, and agreed on by all processes

        torch.manual_seed(recipe.seed)
        if head is None:
            head = EagleHead(target.config, recipe.bias).attach(target)
        head = head.float().train().requires_grad_(True)
        if head.embed_tokens is not None:  # as published, embeddings are not trained
            head.embed_tokens.requires_grad_(False)
        self.head_shape = head.config, head.fc.bias is not None
        if recipe.compile:
            for layer in [*target.layers, *head.layers]:
                layer.compile(dynamic=True)
        optimiser = torch.optim.AdamW(
            (item for item in head.parameters() if item.requires_grad),
            lr=recipe.learning_rate(target.hidden_size),
            betas=(recipe.beta1, recipe.beta2),
            weight_decay=recipe.weight_decay,
        )
        accelerator.gradient_accumulation_steps = recipe.accumulate
        plugin = accelerator.state.deepspeed_plugin
        if plugin is not None:  # which learns of batches from the data loader otherwise
            plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = recipe.batch_size
            plugin.deepspeed_config["gradient_accumulation_steps"] = recipe.accumulate
        self.losses, self.optimiser = accelerator.prepare(
            HeadLosses(head, recipe.losses()), optimiser
        )
        accelerator.register_for_checkpointing(self)

    # -- what a checkpoint holds beside weights and optimiser --------------------------------------

    def state_dict(self) -> dict[str, Any]:
        names = ("step", "tokens", "cut", "refused", "seconds")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    # -- the loop ----------------------------------------------------------------------------------

    def run(self) -> EagleHead:
        """Train to the end, from the folder's newest checkpoint if there is one.

        Returns:
            The head, in float32 on the main process's device.

        Raises:
            TrainingError: The loss is not finite, memory ran out, or a checkpoint could not be
                written; what was there before is kept.
            KeyboardInterrupt: Somebody asked to stop; a checkpoint was written first.
        """
        newest = self.folder.newest()
        if newest is not None:
            self.accelerator.load_state(str(newest))
            log.info("going on from step %d", self.step)
        if self.accelerator.is_main_process:
            self.folder.rewind_metrics(self.step)
        with _asked_to_stop(self):
            batches = self._batches()
            while self.step < self.steps:
                begun = time.monotonic()
                metrics = self._step(batches)
                self.step += 1
                self.seconds += time.monotonic() - begun
                self._tell(metrics)
                last = self.step == self.steps
                if last or self.step % self.recipe.validate_every == 0:
                    self._validate()
                if last or self.stopping or self.step % self.recipe.checkpoint_every == 0:
                    self._save()
                if self.stopping:
                    raise KeyboardInterrupt
        return self.head_copy(torch.float32)

    def _step(self, batches: Iterator[tuple[int, Batch]]) -> dict[str, float]:
        """One optimiser step: means over the positions of all processes and batches."""
        accelerator, recipe = self.accelerator, self.recipe
        group = [next(batches) for _ in range(recipe.accumulate)]
        counts = [[int(batch.counted.sum()), sum(batch.lengths)] for _, batch in group]
        self.cut += sum(batch.cut for _, batch in group)
        for fault in (fault for _, batch in group for fault in batch.faults):
            self.refused += 1
            if self.refused <= FAULTS_KEPT:
                log.warning("left out: %s", fault)
        totals = torch.tensor(counts, device=accelerator.device).sum(0)
        counted, tokens = accelerator.reduce(totals, "sum").tolist()
        self.tokens += tokens
        rate = recipe.learning_rate(self.target.hidden_size) * recipe.factor(self.step, self.steps)
        for parameters in self.optimiser.param_groups:
            parameters["lr"] = rate
        # The wrapper averages over processes and accumulated batches; what is wanted is a mean
        # over positions, of which each may hold a different number.
        share = accelerator.num_processes * recipe.accumulate / max(1, counted)
        sums: dict[str, Tensor] = {}
        norm: Tensor | None = None
        try:
            for epoch, batch in group:
                with accelerator.accumulate(self.losses):
                    parts = self._losses(epoch, batch.to(accelerator.device))
                    accelerator.backward(parts["loss"] * share)
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(self.losses.parameters(), recipe.clip)
                        if norm is not None and not norm.isfinite():
                            self._fail("the loss is not finite")
                    self.optimiser.step()
                    self.optimiser.zero_grad()
                for name, value in parts.items():
                    sums[name] = sums.get(name, 0.0) + value.detach()
        except torch.OutOfMemoryError as error:
            self._fail(
                "memory ran out: lower batch_size (and raise accumulate by as much) or max_length",
                error,
            )
        asked = torch.tensor(float(self.stop_asked), device=accelerator.device)
        *values, asked = accelerator.reduce(torch.stack([*sums.values(), asked]), "sum").tolist()
        self.stopping = asked > 0  # of any process: all stop after the same step
        metrics = {name: value / max(1, counted) for name, value in zip(sums, values, strict=True)}
        if not math.isfinite(metrics["loss"]):
            self._fail("the loss is not finite")
        metrics |= {"lr": rate, "gradient_norm": float(norm) if norm is not None else None}
        return metrics

    def _losses(self, epoch: int, batch: Batch) -> dict[str, Tensor]:
        features = batch_features(self.target, batch)
        noisy = self._noisy(features[:, :-1], epoch, batch)
        with self.accelerator.autocast():
            return self.losses(noisy, batch.ids[:, 1:], features[:, 1:], batch.counted)

    def _noisy(self, features: Tensor, epoch: int, batch: Batch) -> Tensor:
        """Uniform noise that depends on the chat and the epoch, not on its place in a batch."""
        features = features.float()
        if not self.recipe.noise:
            return features
        noise = torch.zeros_like(features)
        generator = torch.Generator(features.device)
        for row, (chat, length) in enumerate(zip(batch.chats, batch.lengths, strict=True)):
            seed = (self.recipe.seed * 1_000_003 + epoch) * 1_000_000_007 + chat + 1
            generator.manual_seed(seed % 2**63)
            noise[row, : length - 1].uniform_(-1, 1, generator=generator)
        return features + self.recipe.noise * noise

    def _batches(self) -> Iterator[tuple[int, Batch]]:
        """(epoch, batch) from the current step on; after the last epoch, batches of nothing."""
        recipe, accelerator = self.recipe, self.accelerator
        epoch, first = divmod(self.step * recipe.accumulate, self.batches_per_epoch)
        while epoch < recipe.epochs:
            sampler = SharedBatches(
                self.chats,
                self.sizes,
                recipe.batch_size,
                recipe.seed,
                epoch,
                accelerator.process_index,
                accelerator.num_processes,
                first,
            )
            for batch in self._loader(batch_sampler=sampler):
                yield epoch, batch
            epoch, first = epoch + 1, 0
        while True:
            yield epoch, collate([self.data[NOTHING]])

    def _loader(self, **options: Any) -> DataLoader[Batch]:
        pinned = self.accelerator.device.type == "cuda"
        return DataLoader(
            self.data,
            collate_fn=collate,
            num_workers=self.recipe.workers,
            pin_memory=pinned and self.recipe.workers > 0,
            **options,
        )

    # -- what is told and kept ---------------------------------------------------------------------

    def _tell(self, metrics: dict[str, Any]) -> None:
        if self.step % self.recipe.log_every and self.step != self.steps:
            return
        left = self.seconds / self.step * (self.steps - self.step)
        epoch = self.step * self.recipe.accumulate / self.batches_per_epoch
        figures = {"step": self.step, "epoch": round(epoch, 4), **metrics}
        figures |= {"tokens": self.tokens, "tokens_per_second": self.tokens / self.seconds}
        figures |= {"seconds_left": left}
        self._publish(figures, "train")

    def _publish(self, figures: dict[str, Any], kind: str) -> None:
        if not self.accelerator.is_main_process:
            return
        self.folder.append_metrics({"kind": kind, **figures})
        scalars = {
            f"{kind}/{name}": value for name, value in figures.items() if isinstance(value, float)
        }
        for depth, value in enumerate(figures.get("js_by_depth", ())):
            scalars[f"{kind}/js_depth_{depth}"] = value
        self.accelerator.log(scalars, step=self.step)
        if self.listener is not None:
            self.listener({"kind": kind, "steps": self.steps, **figures})

    def _validate(self) -> None:
        head = self.head_copy(self.target.dtype)
        if self.accelerator.is_main_process and self.held_out:
            batches = list(
                self._loader(
                    batch_sampler=[
                        self.held_out[at : at + self.recipe.batch_size]
                        for at in range(0, len(self.held_out), self.recipe.batch_size)
                    ]
                )
            )
            losses = HeadLosses(head, self.recipe.losses())
            figures: dict[str, Any] = validation_losses(losses, self.target, batches)
            prompts = validation_prompts(batches, DECODED_PROMPTS)
            # Layers compiled for training would be compiled anew for many shapes of decoding.
            with torch.compiler.set_stance("force_eager"):
                figures |= decode_validation(head, self.target, prompts)
            self._publish({"step": self.step, **figures}, "validation")
        self.accelerator.wait_for_everyone()

    def _save(self) -> None:
        self.folder.write_checkpoint(
            self.step,
            lambda path: self.accelerator.save_state(str(path)),
            self.accelerator.is_main_process,
            self.accelerator.wait_for_everyone,
        )

    def head_copy(self, dtype: torch.dtype) -> EagleHead:
        """The head as it is, out of whatever the accelerator wrapped it in. All processes call."""
        state = self.accelerator.get_state_dict(self.losses)
        copy = EagleHead(*self.head_shape, dtype).attach(self.target)
        embedding = state.get("head." + EMBEDDING)
        if embedding is not None:
            copy.embed_tokens = nn.Embedding(*embedding.shape, dtype=dtype, device=copy.device)
        if self.accelerator.is_main_process:
            copy.load_state_dict(
                {name.removeprefix("head."): value for name, value in state.items()}
            )
        return copy.eval().requires_grad_(False)

    def _fail(self, reason: str, error: BaseException | None = None) -> None:
        newest = self.folder.newest()
        kept = f"the checkpoint of step {step_of(newest)} is kept" if newest else "none was kept"
        raise TrainingError(f"step {self.step + 1}: {reason}; {kept}") from error


def _split(count: int, recipe: TrainRecipe) -> tuple[list[int], list[int]]:
    """Chats to train on and chats held out, at most a tenth of them."""
    generator = torch.Generator().manual_seed(recipe.seed)
    order = torch.randperm(count, generator=generator).tolist()
    held_out = min(recipe.validation, count // 10)
    return sorted(order[held_out:]), sorted(order[:held_out])


class _asked_to_stop:  # noqa: N801  (used as a context manager, like contextlib's own)
    """Turns the first Ctrl-C or SIGTERM into a wish that the trainer grants after its step."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.before: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self._ask)

    def _ask(self, number: int, frame: Any) -> None:
        if self.trainer.stop_asked:
            raise KeyboardInterrupt
        self.trainer.stop_asked = True
        log.warning("stopping after this step; once more to stop at once")

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
