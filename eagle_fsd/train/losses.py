"""The training loss: EAGLE's losses, unrolled training, and a divergence.

EAGLE's losses (arXiv 2401.15077, section 3.2) compare the head's predicted feature with the
target's feature (smooth L1), and the distributions that the target's output projection computes
from both (cross-entropy). Uniform noise is added to the input features.

Unrolled training: during decoding, the head reads the target's features up to the root of the tree
and its own predictions below. Training therefore runs the head over the chat several times, each
time on the features predicted by the previous run, and compares the predictions of every run with
the target. The loss is the weighted mean over the runs, and its gradient flows through predicted
features into all earlier runs. The training-time test of EAGLE-3 (arXiv 2503.01840) does this with
a weighted sum and no loss on features. HASS (arXiv 2408.15766) runs the head in the same way, but
detaches the features between runs, sums the losses of the runs, and adds the cross-entropy on the
target's ten most likely tokens.

Divergence: FSD accepts a token where ``Div(target, draft)`` is small, so training can minimize it.

Shape letters: ``B`` chats, ``S`` pairs (tokens - 1), ``H`` hidden size, ``V`` vocabulary, ``n``
positions that the loss covers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from eagle_fsd.model.cache import additive_mask
from eagle_fsd.model.divergence import DIVERGENCES
from eagle_fsd.model.drafters.eagle import EagleHead
from eagle_fsd.train.config import TrainConfig

#: Positions whose distributions over the vocabulary are in memory at a time.
LOGIT_ROWS = 1024


class HeadLosses(nn.Module):
    """The head and its losses in one module, so that a parallel wrapper sees one forward pass.

    Losses are sums over positions, because the mean is over the batches of all processes.

    Args:
        head: The head, attached to its target.
        config: The loss weights, ``divergence_loss``, ``unroll`` and ``unroll_decay``.
    """

    def __init__(self, head: EagleHead, config: TrainConfig) -> None:
        super().__init__()
        self.head = head
        self.config = config

    def forward(
        self, features: Tensor, tokens: Tensor, labels: Tensor, loss_mask: Tensor
    ) -> dict[str, Tensor]:
        """Compute the losses, averaged over all runs with the weights of ``unroll_decay``.

        Args:
            features: ``[B, S, H]`` input features, noise included.
            tokens: ``[B, S]`` the token after each feature.
            labels: ``[B, S, H]`` the target's feature after each input feature.
            loss_mask: ``[B, S]`` bool, the positions that the loss covers.

        Returns:
            Sums over positions: ``loss``, its parts ``feature``, ``token`` and ``divergence``, and
            for the first run ``top1`` and ``top3``: the number of positions where the target's most
            likely token is the head's most likely token, or among the head's three most likely.
        """
        config = self.config
        weights = torch.tensor([config.unroll_decay**run for run in range(config.unroll)])
        weights = weights / weights.sum()
        total: dict[str, Tensor] = {}
        for run, predicted in enumerate(unroll(self.head, features, tokens, config.unroll)):
            mask = loss_mask.clone()
            mask[:, :run] = False  # nothing was predicted before the first position
            sums = self._compare(predicted[mask], labels[mask])
            for name, value in sums.items():
                if not name.startswith("top"):
                    total[name] = total.get(name, 0.0) + weights[run].item() * value
                elif run == 0:
                    total[name] = value
        total["loss"] = (
            config.feature_weight * total["feature"]
            + config.token_weight * total["token"]
            + config.divergence_weight * total["divergence"]
        )
        return total

    def _compare(self, predicted: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Sum the losses over ``[n, H]`` predicted and true features."""
        names = ("token", "divergence", "top1", "top3")
        sums = [predicted.sum() * 0.0] * len(names)  # differentiable even without any position
        for start in range(0, len(predicted), LOGIT_ROWS):
            rows = slice(start, start + LOGIT_ROWS)
            # Recompute the distributions in the backward pass instead of storing them: V is large.
            parts = checkpoint(
                self._compare_logits, predicted[rows], labels[rows], use_reentrant=False
            )
            sums = [sum_ + part for sum_, part in zip(sums, parts, strict=True)]
        feature = F.smooth_l1_loss(predicted.float(), labels.float(), reduction="none")
        return {"feature": feature.mean(-1).sum(), **dict(zip(names, sums, strict=True))}

    def _compare_logits(self, predicted: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        draft = self.head.log_probs(predicted)  # [rows, V]
        with torch.no_grad():
            target = self.head.log_probs(labels)
            best = target.argmax(-1, keepdim=True)
            hits = draft.topk(min(3, draft.shape[-1]), dim=-1).indices == best
        token = -(target.exp() * draft).sum()
        if self.config.divergence_weight:
            divergence = DIVERGENCES[self.config.divergence_loss](target, draft).sum()
        else:
            divergence = token.detach() * 0.0
        return token, divergence, hits[:, 0].sum().float(), hits.sum().float()


def unroll(head: EagleHead, features: Tensor, tokens: Tensor, runs: int) -> list[Tensor]:
    """Run the head over chats several times, each time on the features of the previous run.

    The features are not detached: the gradient of a run's loss reaches all earlier runs.

    In run ``j`` (from 1) pair ``t`` holds the feature that run ``j - 1`` predicted at ``t - 1``. It
    attends as it would in a draft tree: to the target's features up to ``t - j + 1`` (the keys of
    the first run), then to one predicted feature of each later run, that of run ``i`` at
    ``t - j + i``.

    Args:
        head: The head, attached to its target.
        features: ``[B, S, H]`` features of the first run.
        tokens: ``[B, S]`` the token after each feature.
        runs: Number of runs.

    Returns:
        For each run, ``[B, S, H]`` predicted features.
    """
    batch, length = tokens.shape
    positions = torch.arange(length, device=tokens.device).expand(batch, -1)
    if runs == 1:
        return [head(features, tokens, positions)]
    cache = DynamicCache()
    key, query = positions[:1], positions[0][:, None]  # [1, S], [S, 1]
    outputs: list[Tensor] = []
    for run in range(runs):
        if run:
            features = F.pad(outputs[-1][:, :-1], (0, 0, 1, 0))
        visible = [key <= query - run]
        visible += [key == query - run + earlier for earlier in range(1, run + 1)]
        mask = additive_mask(torch.cat(visible, -1)[None], head.dtype).expand(batch, -1, -1, -1)
        outputs.append(head(features, tokens, positions, mask, cache))
    return outputs
