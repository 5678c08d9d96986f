"""Logits processors of requests: penalties, biases and the minimum length of an answer.

Processors with the same options are equal, so that requests with equal options are verified
together, see :class:`~eagle_fsd.model.request.Decision`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor

from eagle_fsd.model.sampling import AnswerProcessor

#: The bias that OpenAI's API documents as a ban.
MASKING_BIAS = -100.0


@dataclass(frozen=True)
class RepetitionPenalty(LogitsProcessor):
    """Hugging Face's repetition penalty, of the tokens of prompt and answer."""

    penalty: float

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the penalized logits."""
        penalized: Tensor = RepetitionPenaltyLogitsProcessor(self.penalty)(input_ids, scores)
        return penalized


@dataclass(frozen=True)
class AnswerPenalty(AnswerProcessor):
    """OpenAI's presence and frequency penalties."""

    presence: float
    frequency: float

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the penalized logits."""
        counts = torch.zeros_like(scores).scatter_add_(
            1, input_ids, torch.ones_like(input_ids, dtype=scores.dtype)
        )
        return scores - self.presence * (counts > 0) - self.frequency * counts


@dataclass(frozen=True)
class LogitBias(LogitsProcessor):
    """OpenAI's bias of single tokens; -100 masks a token, also for fuzzy acceptance."""

    biases: tuple[tuple[int, float], ...]
    reads_prefix: ClassVar[bool] = False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the biased logits."""
        tokens, values = zip(*self.biases, strict=True)
        added = [-torch.inf if value == MASKING_BIAS else value for value in values]
        index = torch.tensor(tokens, device=scores.device)
        biases = torch.tensor(added, device=scores.device, dtype=scores.dtype)
        return scores.index_add(1, index, biases.expand(len(scores), -1))


@dataclass(frozen=True)
class MinTokens(AnswerProcessor):
    """Mask the tokens that end an answer until it has a minimum length."""

    count: int
    end_tokens: tuple[int, ...]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the masked logits."""
        if input_ids.shape[1] >= self.count:
            return scores
        ends = torch.tensor(self.end_tokens, device=scores.device)
        return scores.index_fill(1, ends, -torch.inf)
