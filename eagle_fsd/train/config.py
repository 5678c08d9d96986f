"""How a head is trained: :class:`TrainRecipe`, for Python, YAML and the command line alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import yaml

from eagle_fsd.utils.options import Options, choice, flag, number

#: The published learning rate, and the hidden size (of a 7B Llama) it was published for.
PUBLISHED_LR, PUBLISHED_HIDDEN = 3e-5, 4096
#: Divergences worth training for: smooth where the two distributions nearly agree.
DIVERGENCE_LOSSES = ("js", "tv", "kl", "kl_reversed")


@dataclass(frozen=True)
class LossWeights:
    """What the loss is made of.

    Attributes:
        feature, token: Of smooth-L1 and of the cross-entropy.
        divergence: Of the divergence ``kind``, a name in
            :data:`~eagle_fsd.model.divergence.DIVERGENCES`.
        steps: How often the head is run on its own features, the first on the target's.
        decay: Each step counts this much of the one before.
    """

    feature: float = 1.0
    token: float = 0.1
    divergence: float = 0.0
    kind: str = "js"
    steps: int = 1
    decay: float = 1.0


@dataclass(frozen=True)
class TrainRecipe(Options):
    """The hyper-parameters of a head's training; the defaults are EAGLE's where it published them.

    (arXiv 2401.15077, appendix, and the authors' training script.) The divergence loss is not
    EAGLE's: ``eagle_fsd/train/recipes/compare_losses.py`` found heads trained with it accepted more often.
    """

    epochs: int = number(20, 1, 10_000, "times every chat is seen")
    max_steps: int | None = number(
        None, 1, math.inf, "stop after this many optimiser steps", whole=True
    )
    batch_size: int = number(4, 1, 4096, "chats a process reads at a time")
    accumulate: int = number(1, 1, 4096, "batches to an optimiser step")
    max_length: int = number(2048, 8, 1_048_576, "tokens of a chat; what is longer is cut")
    lr: float | None = number(
        None,
        0.0,
        1.0,
        "peak learning rate; by default the published 3e-5, scaled to the target's hidden size",
    )
    warmup: int = number(2000, 0, 10**9, "steps of warm-up, a tenth of the run at most")
    weight_decay: float = number(0.01, 0.0, 1.0, "of AdamW")
    beta1: float = number(0.9, 0.0, 0.9999, "of AdamW")
    beta2: float = number(0.95, 0.0, 0.99999, "of AdamW")
    clip: float = number(0.5, 0.0, math.inf, "largest norm of the gradient")
    noise: float = number(0.1, 0.0, 10.0, "half-width of the uniform noise on the features")
    feature_weight: float = number(1.0, 0.0, 1e6, "of smooth-L1 on the feature")
    token_weight: float = number(0.1, 0.0, 1e6, "of the cross-entropy on the target's distribution")
    divergence_weight: float = number(1.0, 0.0, 1e6, "of a divergence between target and draft")
    divergence_loss: str = choice("js", DIVERGENCE_LOSSES, "which divergence that is")
    unroll: int = number(1, 1, 8, "runs over each chat, the later ones on the head's own features")
    unroll_decay: float = number(1.0, 0.0, 1.0, "weight of each run beside the one before")
    bias: bool = flag(False, "give the fusing layer a bias (vLLM's has none)")
    seed: int = number(0, 0, 2**31 - 1, "of weights, order and noise")
    validation: int = number(32, 0, 100_000, "chats held out for validation")
    validate_every: int = number(1000, 1, 10**9, "steps between validations")
    checkpoint_every: int = number(500, 1, 10**9, "steps between checkpoints")
    log_every: int = number(10, 1, 10**9, "steps between lines of metrics")
    workers: int = number(0, 0, 256, "processes that read and encode chats")
    compile: bool = flag(False, "compile the decoder layers (needs a C++ compiler on a CPU)")

    def learning_rate(self, hidden_size: int) -> float:
        """``lr``, or the published one times 4096 over ``hidden_size``.

        With Adam the step that suits a layer falls as its width grows; narrow heads trained with
        the rate of a 7B one hardly move.
        """
        if self.lr is not None:
            return self.lr
        return PUBLISHED_LR * PUBLISHED_HIDDEN / hidden_size

    def losses(self) -> LossWeights:
        return LossWeights(
            feature=self.feature_weight,
            token=self.token_weight,
            divergence=self.divergence_weight,
            kind=self.divergence_loss,
            steps=self.unroll,
            decay=self.unroll_decay,
        )

    def factor(self, step: int, total: int) -> float:
        """The learning rate at ``step`` of ``total`` by its peak: up and then down, linear."""
        warmup = min(self.warmup, total // 10)
        if step < warmup:
            return (step + 1) / warmup
        return max(0.0, (total - step) / max(1, total - warmup))


def read_recipe(path: str | Path) -> dict[str, object]:
    """The values a YAML file gives, checked; what it leaves out is left out.

    Raises:
        ValueError: The file is not a mapping of known names to values within their bounds.
    """
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
        if not isinstance(values, dict):
            raise ValueError("not a mapping of names to values")
        TrainRecipe.from_dict(values)
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    return values
