"""What a head is trained on: the published EAGLE losses, several steps, and a divergence.

The published losses (EAGLE, arXiv 2401.15077, section 3.2) compare the head's feature with the
target's (smooth-L1) and the distributions the target's output projection makes of the two
(cross-entropy), with uniform noise on the features that go in.

*Several steps* (HASS, arXiv 2408.15766; training-time test in EAGLE-3, arXiv 2503.01840): when
decoding, the head sees the target's features only up to the root of the tree and its own below. So
it is run over the chat again, each time on the features it predicted the time before, and what it
then says is held against the target as in the first step.

*A divergence*: FSD keeps a token where ``Div(target, draft)`` is small, so that divergence can be
part of the loss.

Shape letters: ``B`` chats, ``S`` pairs (one less than tokens), ``H`` hidden size, ``V`` vocabulary,
``n`` positions that count.
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
from eagle_fsd.train.config import LossWeights

#: Positions whose distributions over the vocabulary are in memory at a time.
READOUT_ROWS = 1024


class HeadLosses(nn.Module):
    """The head and its losses as one module, so that a parallel wrapper sees one forward pass.

    The result is sums over positions, not means: what they are to be divided by is known only to
    who sees the batches of all processes.
    """

    def __init__(self, head: EagleHead, weights: LossWeights) -> None:
        super().__init__()
        self.head = head
        self.weights = weights

    def forward(
        self, features: Tensor, tokens: Tensor, wanted: Tensor, counted: Tensor
    ) -> dict[str, Tensor]:
        """Sums over the counted positions, the steps weighted and averaged.

        Args:
            features: ``[B, S, H]`` what the head is given, noise included.
            tokens: ``[B, S]`` the token after each.
            wanted: ``[B, S, H]`` the feature after each.
            counted: ``[B, S]`` bool.

        Returns:
            ``loss``, its parts ``feature``, ``token``, ``divergence``, and, of the first step,
            ``top1`` and ``top3``: how often the target's likeliest token is the head's likeliest,
            and among its three likeliest.
        """
        weights = self.weights
        shares = torch.tensor([weights.decay**step for step in range(weights.steps)])
        shares = (shares / shares.sum()).tolist()
        total: dict[str, Tensor] = {}
        for step, predicted in enumerate(unroll(self.head, features, tokens, weights.steps)):
            valid = counted.clone()
            valid[:, :step] = False  # nothing was predicted before the first position
            sums = self._compare(predicted[valid], wanted[valid])
            for name, value in sums.items():
                if step == 0 or not name.startswith("top"):
                    share = shares[step] if not name.startswith("top") else 1.0
                    total[name] = total.get(name, 0.0) + share * value
        total["loss"] = (
            weights.feature * total["feature"]
            + weights.token * total["token"]
            + weights.divergence * total["divergence"]
        )
        return total

    def _compare(self, predicted: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        """Sums over ``[n, H]`` predicted and wanted features."""
        names = ("token", "divergence", "top1", "top3")
        sums = [predicted.sum() * 0.0] * len(names)  # differentiable even where nothing counts
        for start in range(0, len(predicted), READOUT_ROWS):
            here = slice(start, start + READOUT_ROWS)
            # Distributions are computed again on the way back rather than kept: V is large.
            parts = checkpoint(self._read_out, predicted[here], wanted[here], use_reentrant=False)
            sums = [sum_ + part for sum_, part in zip(sums, parts, strict=True)]
        feature = F.smooth_l1_loss(predicted.float(), wanted.float(), reduction="none")
        return {"feature": feature.mean(-1).sum(), **dict(zip(names, sums, strict=True))}

    def _read_out(self, predicted: Tensor, wanted: Tensor) -> tuple[Tensor, ...]:
        draft = self.head.readout(predicted)  # [rows, V]
        with torch.no_grad():
            target = self.head.readout(wanted)
            best = target.argmax(-1, keepdim=True)
            ranked = draft.topk(min(3, draft.shape[-1]), dim=-1).indices == best
        token = -(target.exp() * draft).sum()
        if self.weights.divergence:
            divergence = DIVERGENCES[self.weights.kind](target, draft).sum()
        else:
            divergence = token.detach() * 0.0
        return token, divergence, ranked[:, 0].sum().float(), ranked.sum().float()


def unroll(head: EagleHead, features: Tensor, tokens: Tensor, steps: int) -> list[Tensor]:
    """The head's predictions ``[B, S, H]`` in each of ``steps`` runs over the chat.

    In run ``j`` (from 1) pair ``t`` holds the feature that run ``j - 1`` predicted at ``t - 1``.
    It attends as it would in a draft tree: to the target's features up to ``t - j + 1`` (the first
    run's keys), then to one predicted feature of each run, run ``i`` at ``t - j + i``.
    """
    batch, length = tokens.shape
    positions = torch.arange(length, device=tokens.device).expand(batch, -1)
    if steps == 1:
        return [head(features, tokens, positions)]
    cache = DynamicCache()
    key, query = positions[:1], positions[0][:, None]  # [1, S], [S, 1]
    outputs: list[Tensor] = []
    for step in range(steps):
        if step:
            features = F.pad(outputs[-1][:, :-1], (0, 0, 1, 0))
        seen = [key <= query - step]
        seen += [key == query - step + earlier for earlier in range(1, step + 1)]
        mask = additive_mask(torch.cat(seen, -1)[None], head.dtype).expand(batch, -1, -1, -1)
        outputs.append(head(features, tokens, positions, mask, cache))
    return outputs
