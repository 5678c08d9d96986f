"""The bundled draft head, trained on the bundled target's features.

The published EAGLE losses (arXiv 2401.15077, section 3.2): smooth-L1 between predicted and true
feature, plus 0.1 times the cross-entropy of the draft's distribution under the target's; uniform
noise on the input features. Features are computed beside the trainer and never stored.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup

from eagle_fsd.model.checkpoint import save_head
from eagle_fsd.model.head import EagleHead
from eagle_fsd.model.target import Target
from eagle_fsd.train.bundled_target import TargetRecipe, batches
from eagle_fsd.train.record import write_record

log = logging.getLogger(__name__)


@dataclass
class HeadRecipe:
    """Everything that decides the bundled head; the defaults are what was shipped.

    Attributes:
        noise: Half-width of the uniform noise added to the input features.
        feature_weight, token_weight: Of smooth-L1 and of the cross-entropy, as published.
    """

    steps: int = 800
    tokens_per_batch: int = 6144
    lr: float = 2e-3
    warmup: int = 50
    noise: float = 0.1
    feature_weight: float = 1.0
    token_weight: float = 0.1
    seed: int = 10


def head_losses(
    head: EagleHead, predicted: Tensor, features: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean losses on the feature and on the token over the positions with ``weights``.

    Args:
        predicted, features: ``[B, S, H]``.
        weights: ``[B, S]`` bool.
    """
    predicted, features = predicted[weights], features[weights]  # [n, H]
    feature_loss = F.smooth_l1_loss(predicted, features)
    with torch.no_grad():
        target = head.readout(features).exp()
    token_loss = -(target * head.readout(predicted)).sum(-1).mean()
    return feature_loss, token_loss


def train_head(recipe: HeadRecipe, target_path: Path, out: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(target_path)
    target = Target(model)
    torch.manual_seed(recipe.seed)
    head = EagleHead(model.config).attach(target)
    generator = torch.Generator().manual_seed(recipe.seed)
    for layer in [*model.model.layers, *head.layers]:
        layer.compile(dynamic=True)
    optimiser = torch.optim.AdamW(
        head.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.01
    )
    schedule = get_cosine_schedule_with_warmup(optimiser, recipe.warmup, recipe.steps)
    data = TargetRecipe(tokens_per_batch=recipe.tokens_per_batch, seed=recipe.seed)
    started, seen = time.monotonic(), 0
    endless = batches(tokenizer, data)
    for step, (ids, weights) in zip(range(1, recipe.steps + 1), endless, strict=False):
        with torch.no_grad():
            features = model.model(input_ids=ids, use_cache=False).last_hidden_state
        inputs, wanted = features[:, :-1], features[:, 1:]
        noise = torch.rand(inputs.shape, generator=generator) * 2 - 1
        positions = torch.arange(ids.shape[1] - 1).expand(ids.shape[0], -1)
        predicted = head(inputs + recipe.noise * noise, ids[:, 1:], positions)
        # The feature at t decides the token at t + 1: it counts where the assistant says that.
        counted = F.pad(weights[:, 2:] == 1, (0, 1))
        feature_loss, token_loss = head_losses(head, predicted, wanted, counted)
        loss = recipe.feature_weight * feature_loss + recipe.token_weight * token_loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad(set_to_none=True)
        seen += ids.numel()
        if step % 50 == 0:
            with torch.no_grad():
                guess = head.readout(predicted[counted]).argmax(-1)
                agree = (guess == head.readout(wanted[counted]).argmax(-1)).float().mean()
            log.info(
                "step %d feature %.4f token %.4f agree %.3f seconds %.0f",
                step,
                feature_loss.item(),
                token_loss.item(),
                agree.item(),
                time.monotonic() - started,
            )
    save_head(head, out, dtype=torch.float16)
    write_record(out, recipe, seen, time.monotonic() - started)
