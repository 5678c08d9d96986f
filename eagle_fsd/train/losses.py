"""The training loss: EAGLE's losses, unrolled training, and a divergence.

EAGLE's losses (arXiv 2401.15077, section 3.2) compare the head's predicted feature with the
target's feature (smooth L1), and the distributions that the target's output projection computes
from both (cross-entropy). FSD's gate compares the divergence of these distributions with ``T``.

Unrolled training: during decoding, the head reads the target's features up to the root of the tree
and its own predictions below. With ``unroll`` above 1, training therefore runs the head over the
chat repeatedly: first on the target's features, then on those predicted by the previous run.
``docs/training.md`` compares this with published methods.

A head with a reduced vocabulary is compared as in ``eagle/traineagle3/cnets.py`` of EAGLE's
authors: the target's distribution is the softmax of its logits of that vocabulary, and positions
where its most likely token is another are left out.

Shape letters: ``B`` chats, ``S`` pairs (tokens - 1), ``F`` values of the head's input, ``H`` hidden
size, ``V`` vocabulary, ``D`` vocabulary of the head, ``R`` runs, ``n`` positions that the loss
covers.

The losses over the vocabulary are computed in chunks of positions. The forward pass also computes
their gradients, chunk by chunk, so distributions are neither stored nor computed twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache

from eagle_fsd.model.cache import additive_mask
from eagle_fsd.model.divergence import DIVERGENCES
from eagle_fsd.model.drafters.eagle3 import Eagle3Head
from eagle_fsd.model.drafters.heads import DraftHead
from eagle_fsd.model.weights import whole
from eagle_fsd.train.config import TrainConfig
from eagle_fsd.train.dataset import TrainingBatch
from eagle_fsd.train.features import compute_features, max_logits, most_likely_tokens
from eagle_fsd.train.heads import split_features, training_states


class HeadLosses(nn.Module):
    """The head and its losses in one module, so that a parallel wrapper sees one forward pass.

    Losses are sums over positions, because the mean is over the batches of all processes.
    """

    def __init__(self, head: DraftHead, config: TrainConfig) -> None:
        super().__init__()
        self.head = head
        self.config = config
        self._rows: tuple[Tensor, Tensor | None] | None = None

    def forward(
        self,
        features: Tensor,
        tokens: Tensor,
        labels: Tensor,
        loss_mask: Tensor,
        best: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Sum the losses over positions; average over runs, weighted by powers of ``unroll_decay``.

        ``features`` ``[B, S, F]`` are the hidden states that the head reads, noise included,
        ``tokens`` ``[B, S]`` the token after each, ``labels`` ``[B, S, H]`` the target's last
        hidden state at that token, ``loss_mask`` ``[B, S]`` whether its loss counts, and ``best``
        ``[B, S]`` the target's most likely tokens after the labels (default: computed, with the
        whole output projection). The result has ``loss``, its parts ``feature``, ``token`` and
        ``divergence``, and for the first run ``top1`` and ``top3``: the number of positions where
        the target's most likely token is the head's first, or among its first three.
        """
        config = self.config
        outputs = unroll(self.head, features, tokens, config.unroll)
        predicted = torch.stack([output[loss_mask] for output in outputs])  # [R, n, H]
        labels, best = labels[loss_mask], None if best is None else best[loss_mask]
        runs = torch.arange(config.unroll, device=tokens.device)[:, None]
        weights = torch.full_like(runs, config.unroll_decay, dtype=torch.float32) ** runs
        # Nothing was predicted before the first position.
        valid = loss_mask.nonzero()[:, 1] >= runs
        weights = weights / weights.sum() * valid  # [R, n]
        differentiate = torch.is_grad_enabled()
        values = _VocabularyLoss.apply(
            self, differentiate, labels, best, weights, predicted, *self.output_parameters()
        )
        sums = dict(zip(("loss", "token", "divergence", "top1", "top3"), values, strict=True))
        sums["feature"] = torch.zeros_like(sums["token"])
        if config.feature_weight:
            feature = F.smooth_l1_loss(
                predicted.float(), labels.float().expand_as(predicted), reduction="none"
            )
            sums["feature"] = (feature.mean(-1) * weights).sum()
        sums["loss"] = sums["loss"] + config.feature_weight * sums["feature"]
        return sums

    def output_parameters(self) -> list[nn.Parameter]:
        """Return the head's parameters that its distributions depend on, given its output."""
        head = self.head
        parts: list[nn.Module] = []
        if isinstance(head, Eagle3Head):
            parts = [head.norm] if head.projects else [head.norm, head.lm_head]
        return [item for part in parts for item in part.parameters() if item.requires_grad]

    def targets(
        self, labels: Tensor, best: Tensor | None
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield chunks: rows of ``[n, H]`` labels, ``[rows, D]`` log-probabilities, best tokens.

        The target's distribution is in its own precision, not in the training's.
        """
        head, reduced = self.head, self.head.token_ids is not None
        size = max(1, max_logits(labels.device) // head.vocab_size)
        for start in range(0, len(labels), size):
            rows = slice(start, start + size)
            with torch.no_grad(), torch.autocast(labels.device.type, enabled=False):
                logits = head.target.project(labels[rows], self._target_rows() if reduced else None)
                if best is not None:
                    likely = best[rows]
                elif reduced:
                    likely = most_likely_tokens(head.target, labels[rows])
                else:
                    likely = logits.argmax(-1)
                log_probs = logits.log_softmax(-1)
            yield rows, log_probs, likely

    def _target_rows(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of the target's output projection for the head's vocabulary."""
        if self._rows is None:
            projection, token_ids = self.head.target.lm_head, self.head.token_ids
            bias = getattr(projection, "bias", None)
            self._rows = (
                whole(projection.weight).detach()[token_ids],
                None if bias is None else whole(bias).detach()[token_ids],
            )
        return self._rows

    def compare(self, target: Tensor, hidden: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        """Return loss, cross-entropy, divergence, and ``[rows, D]`` log-probabilities of the head.

        ``target`` ``[rows, D]`` are log-probabilities, ``hidden`` ``[rows, H]`` is the head's
        output, and the losses are sums over rows, weighted by ``weights`` ``[rows]``.
        """
        config = self.config
        draft = self.head.log_probs(hidden)
        token = -((target.exp() * draft).sum(-1) * weights).sum()
        divergence = torch.zeros_like(token)
        if config.divergence_weight:
            divergences = DIVERGENCES[config.divergence_loss](target, draft)
            divergence = (divergences * weights).sum()
        loss = config.token_weight * token + config.divergence_weight * divergence
        return loss, token, divergence, draft.detach()


def loss_inputs(head: DraftHead, batch: TrainingBatch) -> dict[str, Any]:
    """Return the arguments of :meth:`HeadLosses.forward`, with stored or computed features."""
    features = batch.features
    if features is None:
        features = compute_features(head.target, batch.ids, training_states(head.reads))
    inputs, labels = split_features(head, features)
    return {
        "features": inputs,
        "tokens": batch.ids[:, 1:],
        "labels": labels,
        "loss_mask": batch.loss_mask,
        "best": None if batch.best is None else batch.best[:, 1:],
    }


class _VocabularyLoss(torch.autograd.Function):
    """Sum the losses over the vocabulary, and compute their gradients in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        losses: HeadLosses,
        differentiate: bool,
        labels: Tensor,
        best: Tensor | None,
        weights: Tensor,
        predicted: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return loss, cross-entropy, divergence, ``top1`` and ``top3``."""
        sums = weights.new_zeros(5)
        gradients = [torch.zeros_like(item) for item in (predicted, *parameters)]
        token_ids, device = losses.head.token_ids, predicted.device.type
        # A cached conversion of a weight would belong to the graph of the first chunk.
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        for rows, target, likely in losses.targets(labels, best):
            known = 1.0 if token_ids is None else torch.isin(likely, token_ids)
            for run, weight in enumerate(weights[:, rows] * known):
                hidden = predicted[run, rows].detach().requires_grad_(differentiate)
                with (
                    torch.set_grad_enabled(differentiate),
                    torch.autocast(device, dtype, enabled=enabled, cache_enabled=False),
                ):
                    *values, draft = losses.compare(target, hidden, weight)
                if differentiate:
                    own, *others = torch.autograd.grad(values[0], (hidden, *parameters))
                    gradients[0][run, rows] = own
                    for total, gradient in zip(gradients[1:], others, strict=True):
                        total += gradient
                sums[:3] += torch.stack([value.detach() for value in values])
                if run == 0:
                    top = draft.topk(min(3, draft.shape[-1])).indices
                    hits = (top if token_ids is None else token_ids[top]) == likely[:, None]
                    sums[3:] += torch.stack([hits[:, 0].sum(), hits.sum()])
        ctx.save_for_backward(*gradients)
        results = sums.unbind()
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the loss, scaled by the incoming gradient."""
        return (*[None] * 5, *(outputs[0] * gradient for gradient in ctx.saved_tensors))


def unroll(head: DraftHead, features: Tensor, tokens: Tensor, runs: int) -> list[Tensor]:
    """Run the head over chats several times, each time on the features of the previous run.

    ``[B, S, F]`` features of the target and the ``[B, S]`` tokens after them give ``[B, S, H]``
    predicted features of each run, which are not detached.

    In run ``j > 1`` pair ``t`` holds the feature that run ``j - 1`` predicted at ``t - 1``. It
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
        outputs.append(head(x, tokens, positions, mask=mask, cache=cache))
    return outputs
