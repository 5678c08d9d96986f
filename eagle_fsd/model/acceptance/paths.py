"""Rules that judge a token by what lies above and below it in the tree."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_fsd.model.acceptance.thresholds import entropy
from eagle_fsd.model.verify import AcceptanceRule, VerificationInputs


@dataclass(frozen=True)
class DeferredRule(AcceptanceRule):
    """FLy (arXiv 2511.22972): accept a mismatch where the target's entropy is high.

    The next ``window`` drafted tokens must match the target's samples.

    Attributes:
        entropy: The target's entropy must be at least this fraction of its maximum, ``log V``.
        window: Number of tokens after a mismatch that must match. A mismatch with fewer tokens
            below it in the tree is rejected.
    """

    entropy: float = 0.3
    window: int = 6

    def gate(self, inputs: VerificationInputs) -> Tensor:
        least = self.entropy * math.log(inputs.processed.logits.shape[-1])
        return inputs.processed.map_rows(entropy) >= least

    def settle(self, inputs: VerificationInputs, exact: Tensor, accepted: Tensor) -> Tensor:
        tree = inputs.tree
        fuzzy = accepted & ~exact
        fuzzy[:, 0] = False
        # A second mismatch inside the window of one above it is rejected.
        below = tree.depths[:, :, None] - tree.depths[:, None, :]  # [B, i, j]: levels from j to i
        near = tree.ancestors & (below > 0) & (below <= self.window) & fuzzy[:, None, :]
        # At most one child is exact, so each node has a single run of exact edges below it.
        run = torch.zeros_like(tree.depths)
        follows = exact & accepted
        follows[:, 0] = False
        for _ in range(min(self.window, tree.max_depth)):
            longer = torch.where(follows, run + 1, 0)
            run = torch.zeros_like(run).scatter_reduce(1, tree.parents, longer, "amax")
        return accepted & ~(fuzzy & (near.any(-1) | (run < self.window)))


@dataclass(frozen=True)
class RegretRule(AcceptanceRule):
    """The local gate of approximate speculative decoding (arXiv 2608.03447).

    The regret of a token, ``max z - z(x)`` over the target's logits, must be below ``per_position``
    nats for each position that accepting it can save: those of the longest path in the tree that
    begins with the token. :class:`~eagle_fsd.model.acceptance.LimitedRule` adds the budget of the
    whole answer.

    Attributes:
        per_position: Largest regret per position, in nats; 0 is lossless.
    """

    per_position: float = 0.5

    def settle(self, inputs: VerificationInputs, exact: Tensor, accepted: Tensor) -> Tensor:
        tree = inputs.tree
        lowest = torch.where(tree.ancestors, tree.depths[:, :, None], 0).amax(1)  # below each node
        positions = lowest - tree.depths + 1
        return accepted & (exact | (inputs.regret < self.per_position * positions))
