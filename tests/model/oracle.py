"""A draft head that knows the target's answers, so that most of what it proposes is accepted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle_fsd.model.cache import TreeCache
from eagle_fsd.model.drafters.levels import LevelDrafter
from eagle_fsd.model.target import LAST, Target

#: Rank of the right token among the drafted ones, by its position: most often the first.
RANKS = torch.tensor([0, 0, 0, 1, 0, 0, 2])
#: Draft log-probabilities of the first three candidates.
LOG_PROBS = (-0.3, -1.5, -2.5)


class OracleHead(LevelDrafter):
    """Propose the right token among wrong ones, as a head that reads features but ignores them.

    For a target that can have no head, it is a drafter that reads none.

    The right token comes first, second or third, so steps accept zero to many tokens, on varying
    branches. A hidden state of this head is a distribution over the next token.

    Args:
        sequences: ``[B, L]`` the prompts and their answers, padded on the right. Prompts have at
            least two tokens.
        vocab_size: Size of the target's vocabulary.
    """

    reads: tuple[int, ...] = (LAST,)
    vocab_size, feature_size = 0, 0
    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, sequences: Tensor, vocab_size: int) -> None:
        self.sequences, self.vocab_size = sequences, vocab_size

    def attach(self, target: Target) -> OracleHead:
        if target.lm_head.weight.shape[1] != target.hidden_size:
            self.reads = ()
        self.feature_size = len(self.reads) * target.hidden_size
        return self

    def new_cache(self, rows: int, length: int) -> TreeCache:
        return _RowCache(rows, length)

    def append(
        self, features: Tensor, tokens: Tensor, lengths: Tensor, keys: Tensor, cache: _RowCache
    ) -> Tensor:
        del features, keys
        positions = lengths[:, None] + torch.arange(tokens.shape[1])
        return self.extend(tokens, tokens, positions, (), tokens, cache)

    def extend(
        self,
        hidden: Tensor,
        tokens: Tensor,
        positions: Tensor,
        rotary: tuple[Tensor, ...],
        mask: Tensor,
        cache: _RowCache,
    ) -> Tensor:
        """Predict the token after one at ``positions``, or after its pair with a feature there."""
        del hidden, tokens, rotary, mask
        index = (positions + 1 + len(self.reads)).clamp_max(self.sequences.shape[1] - 1)
        right = self.sequences[cache.order[: len(index)]].gather(1, index)
        first = right - RANKS[index % len(RANKS)]
        log_probs = torch.full((*index.shape, self.vocab_size), -20.0)
        for rank, value in enumerate(LOG_PROBS):
            candidate = (first + rank) % self.vocab_size
            log_probs.scatter_(2, candidate[:, :, None], value)
        return log_probs

    def log_probs(self, hidden: Tensor) -> Tensor:
        return hidden


class _RowCache(TreeCache):
    """An empty cache that keeps track of rows moved by the engine."""

    def __init__(self, rows: int, length: int) -> None:
        super().__init__(rows, length)
        self.order = torch.arange(rows)

    def copy_rows(self, source: Sequence[int], target: Sequence[int], length: int) -> None:
        self.order[list(target)] = self.order[list(source)]

    def enlarged(self, rows: int, length: int) -> _RowCache:
        return _RowCache(rows, length)
