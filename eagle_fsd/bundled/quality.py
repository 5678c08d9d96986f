"""How well a pair answers the bundled problems, and how its answers were decoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import BatchEncoding, PreTrainedTokenizerBase

from eagle_fsd.bundled.problems import Problem, final_number
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.model.stats import DecodeStats


@dataclass
class Quality:
    """Sums over problems; greedy results do not depend on how they were batched.

    Attributes:
        correct, problems: Answers whose final number is right, of how many.
        tokens, steps: Tokens emitted and target passes, prefill not counted.
        origins: Tokens by origin.
    """

    correct: int = 0
    problems: int = 0
    tokens: int = 0
    steps: int = 0
    origins: Counter[str] = field(default_factory=Counter)

    @property
    def accuracy(self) -> float:
        return self.correct / self.problems

    @property
    def tau(self) -> float | None:
        """Tokens per target pass; None where nothing was counted."""
        return self.tokens / self.steps if self.steps else None

    def add_answers(self, texts: Sequence[str], problems: Sequence[Problem]) -> None:
        self.problems += len(problems)
        self.correct += sum(
            final_number(text) == problem.final
            for text, problem in zip(texts, problems, strict=True)
        )

    def add_stats(self, stats: DecodeStats) -> None:
        self.tokens += stats.tokens
        self.steps += stats.steps
        for row in stats.origins:
            self.origins.update(row)


def encode_problems(
    tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]
) -> BatchEncoding:
    """``input_ids`` and ``attention_mask`` of the questions, padded on the left."""
    return tokenizer.apply_chat_template(
        [[{"role": "user", "content": problem.question}] for problem in problems],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )


def decode_answers(tokenizer: PreTrainedTokenizerBase, new: Tensor | Sequence[Tensor]) -> list[str]:
    """New tokens, ``[B, S]`` or a row each, to texts."""
    return tokenizer.batch_decode(new, skip_special_tokens=True)


def measure_quality(
    model: EagleFSD, problems: Sequence[Problem], batch: int = 16, **options: Any
) -> Quality:
    """Answer ``problems`` with ``options`` for :meth:`EagleFSD.generate`."""
    quality = Quality()
    for start in range(0, len(problems), batch):
        part = problems[start : start + batch]
        encoded = encode_problems(model.tokenizer, part).to(model.target.device)
        output = model.generate(**encoded, **options)
        new = output.sequences[:, encoded["input_ids"].shape[1] :]
        quality.add_answers(decode_answers(model.tokenizer, new), part)
        quality.add_stats(output.stats)
    return quality
