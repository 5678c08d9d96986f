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

EAGLE-3 heads predict no features. As in the training code of EAGLE's authors
(``eagle/traineagle3/cnets.py``), the target's distribution is restricted to the head's vocabulary
and renormalized: it is the softmax of those logits. Positions where the target's most likely token
is outside that vocabulary are left out. The divergence is that of the same two distributions.

Shape letters: ``B`` chats, ``S`` pairs (tokens - 1), ``F`` values of the head's input, ``H`` hidden
size, ``V`` vocabulary, ``D`` vocabulary of the head, ``R`` runs, ``n`` positions that the loss
covers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from eagle_fsd.model.cache import additive_mask
from eagle_fsd.model.divergence import DIVERGENCES
from eagle_fsd.model.drafters.heads import DraftHead
from eagle_fsd.train.config import TrainConfig

#: Logits of one distribution that are in memory at a time, over all positions and runs.
MAX_LOGITS = 1 << 27


class HeadLosses(nn.Module):
    """The head and its losses in one module, so that a parallel wrapper sees one forward pass.

    Losses are sums over positions, because the mean is over the batches of all processes.
    """

    def __init__(self, head: DraftHead, config: TrainConfig) -> None:
        super().__init__()
        self.head = head
        self.config = config

    def forward(
        self, features: Tensor, tokens: Tensor, labels: Tensor, loss_mask: Tensor
    ) -> dict[str, Tensor]:
        """Sum the losses over positions, averaged over the runs with weights of ``unroll_decay``.

        ``features`` ``[B, S, F]`` are the hidden states that the head reads, noise included,
        ``tokens`` ``[B, S]`` the token after each, ``labels`` ``[B, S, H]`` the target's last
        hidden state at that token, and ``loss_mask`` ``[B, S]`` the positions that the loss covers.
        The result has ``loss``, its parts ``feature``, ``token`` and ``divergence``, and for the
        first run ``top1`` and ``top3``: the number of positions where the target's most likely
        token is the head's most likely token, or among the head's three most likely.
        """
        config = self.config
        outputs = unroll(self.head, features, tokens, config.unroll)
        predicted = torch.stack([output[loss_mask] for output in outputs])  # [R, n, H]
        runs = torch.arange(config.unroll, device=tokens.device)[:, None]
        weights = torch.full_like(runs, config.unroll_decay, dtype=torch.float32) ** runs
        # Nothing was predicted before the first position.
        valid = loss_mask.nonzero()[:, 1] >= runs
        weights = weights / weights.sum() * valid  # [R, n]
        sums = self._compare(predicted, labels[loss_mask], weights)
        sums["loss"] = (
            config.feature_weight * sums["feature"]
            + config.token_weight * sums["token"]
            + config.divergence_weight * sums["divergence"]
        )
        return sums

    def _compare(self, predicted: Tensor, labels: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """Sum the losses over ``[R, n, H]`` predicted and ``[n, H]`` true features."""
        names = ("token", "divergence", "top1", "top3")
        sums: dict[str, Tensor] = {}
        size = max(1, MAX_LOGITS // (len(predicted) * self.head.target.vocab_size))
        for start in range(0, max(1, len(labels)), size):  # weights need gradients even if n is 0
            rows = slice(start, start + size)
            part = predicted[:, rows], labels[rows], weights[:, rows]
            if len(labels) <= size:
                found = self._compare_logits(*part)
            else:  # recompute the distributions in the backward pass instead of storing all
                found = checkpoint(self._compare_logits, *part, use_reentrant=False)
            for name, value in zip(names, found, strict=True):
                sums[name] = sums.get(name, 0.0) + value
        sums["feature"] = predicted.sum() * 0.0
        if self.config.feature_weight:
            feature = F.smooth_l1_loss(
                predicted.float(), labels.float().expand_as(predicted), reduction="none"
            )
            sums["feature"] = (feature.mean(-1) * weights).sum()
        return sums

    def _compare_logits(
        self, predicted: Tensor, labels: Tensor, weights: Tensor
    ) -> tuple[Tensor, ...]:
        config = self.config
        # The target's distribution is in its own precision, not in the training's.
        with torch.no_grad(), torch.autocast(labels.device.type, enabled=False):
            logits = self.head.target.project(labels)  # [rows, V]
            best = logits.argmax(-1)
            token_ids = self.head.token_ids
            if token_ids is not None:
                logits, weights = logits[:, token_ids], weights * torch.isin(best, token_ids)
            target = logits.log_softmax(-1)  # [rows, D]
            probs = target.exp()
        drafts = [self.head.log_probs(features) for features in predicted]  # [rows, D] per run
        token = divergence = probs.new_zeros(())
        for draft, weight in zip(drafts, weights, strict=True):
            token = token - ((probs * draft).sum(-1) * weight).sum()
            if config.divergence_weight:
                divergences = DIVERGENCES[config.divergence_loss](target, draft)
                divergence = divergence + (divergences * weight).sum()
        likely = drafts[0].detach().topk(min(3, target.shape[-1])).indices
        hits = (likely if token_ids is None else token_ids[likely]) == best[:, None]
        return token, divergence, hits[:, 0].sum().float(), hits.sum().float()


def unroll(head: DraftHead, features: Tensor, tokens: Tensor, runs: int) -> list[Tensor]:
    """Run the head over chats several times, each time on the features of the previous run.

    ``[B, S, F]`` features of the target and the ``[B, S]`` tokens after them give ``[B, S, H]``
    predicted features of each run. They are not detached: the gradient of a run's loss reaches all
    earlier runs.

    In run ``j`` (from 1) pair ``t`` holds the feature that run ``j - 1`` predicted at ``t - 1``. It
    attends as it would in a draft tree: to the target's features up to ``t - j + 1`` (the keys of
    the first run), then to one predicted feature of each later run, that of run ``i`` at ``t-j+i``.
    """
    batch, length = tokens.shape
    positions = torch.arange(length, device=tokens.device).expand(batch, -1)
    x = head.fuse(features)
    if runs == 1:
        return [head(x, tokens, positions)]
    cache = DynamicCache()
    key, query = positions[:1], positions[0][:, None]  # [1, S], [S, 1]
    outputs: list[Tensor] = []
    for run in range(runs):
        if run:
            x = F.pad(head.carry(outputs[-1][:, :-1]), (0, 0, 1, 0))
        visible = [key <= query - run]
        visible += [key == query - run + earlier for earlier in range(1, run + 1)]
        mask = additive_mask(torch.cat(visible, -1)[None], head.dtype).expand(batch, -1, -1, -1)
        outputs.append(head(x, tokens, positions, mask, cache))
    return outputs
