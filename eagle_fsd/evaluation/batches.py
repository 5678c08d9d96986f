"""Batches of prompts that one method decodes, with the same interface for every method.

:class:`TreeBatch` decodes with draft trees or plainly; whenever an answer ends, another prompt may
take its place. :class:`PaddedBatch` is Hugging Face's ``generate``, which pads its prompts and ends
with the longest answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList

from eagle_fsd.evaluation.config import EvaluationConfig
from eagle_fsd.evaluation.methods import Method
from eagle_fsd.model.pipeline import EagleFSD

#: Tokens that prompt lookup drafts after a match.
LOOKUP_TOKENS = 3


@dataclass(frozen=True)
class Turn:
    """A turn of an answer. A batch knows the first fields; empty ones are not reported."""

    tokens: list[int] = field(default_factory=list)  # including the end token
    passes: int | None = 0  # of the target; None if the method does not report it
    accepted: list[int] = field(default_factory=list)  # tokens that each pass emitted
    origins: list[int] = field(default_factory=list)  # Origin of each token
    phases: dict[str, float] = field(default_factory=dict)  # seconds
    prompt: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))  # [S]
    text: str = ""  # of the assistant's message
    new_tokens: int = 0
    seconds: float = 0.0  # from the step in which it joined the batch
    cut_off: bool = False  # before an end token or a stop string
    error: str | None = None  # why it was not answered


@dataclass(eq=False)
class MethodBatch(ABC):
    """Prompts that a method decodes together."""

    model: EagleFSD
    method: Method
    config: EvaluationConfig
    ends: dict[str, Any]  # see :func:`~eagle_fsd.evaluation.completion.answer_ends`

    @property
    @abstractmethod
    def free(self) -> int:
        """Number of prompts that can be added and start with the next step."""

    @abstractmethod
    def add(self, prompt: Tensor, max_new_tokens: int, seed: int) -> Hashable:
        """Add a prompt, ``[S]`` token ids, and return a key that identifies its turn."""

    @abstractmethod
    def step(self) -> list[tuple[Hashable, Turn]]:
        """Continue to decode, and return the turns that ended, with their keys."""

    @abstractmethod
    def close(self) -> None:
        """Release what later batches of the pair can use."""


@dataclass(eq=False)
class TreeBatch(MethodBatch):
    """Prompts that join and leave between steps of decoding.

    A turn depends on its prompt and seed only, up to rounding.
    """

    def __post_init__(self) -> None:
        self._pair = self.method.pair_for(self.model)
        self._rule = self.method.rule_for(self.model)
        self._batch = self._pair.batch(self.config.batch, compiled_rows=self.config.batch)

    @property
    def free(self) -> int:
        return self._batch.free

    def add(self, prompt: Tensor, max_new_tokens: int, seed: int) -> Hashable:
        return self._batch.add(
            self._pair.request(
                prompt,
                max_new_tokens,
                sampling=self.config.sampling(seed),
                rule=self._rule,
                method=self.method.decoder,
                **self.ends,
            )
        )

    def step(self) -> list[tuple[Hashable, Turn]]:
        """Take a step, or raise the error of a prompt that cannot be decoded."""
        turns: list[tuple[Hashable, Turn]] = []
        for answer, chunk in self._batch.step():
            if answer.error is not None:
                raise answer.error
            if chunk.finished:
                (accepted,) = answer.stats.accepted
                turn = Turn(
                    answer.tokens,
                    passes=len(accepted),
                    accepted=accepted,
                    origins=answer.origins,
                    phases=answer.stats.seconds,
                )
                turns.append((answer, turn))
        return turns

    def close(self) -> None:
        """Let later batches of the pair use the engines, with their CUDA graphs."""
        self._batch.close()


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A prompt that has not been decoded; see :meth:`MethodBatch.add`."""

    prompt: Tensor
    max_new_tokens: int
    seed: int


@dataclass(eq=False)
class PaddedBatch(MethodBatch):
    """Prompts that Hugging Face's ``generate`` decodes to their end.

    Prompts with different limits on new tokens are decoded in separate calls, because ``generate``
    takes a single limit. A call is sampled with the seed of its first prompt.
    """

    def __post_init__(self) -> None:
        self._waiting: list[_Waiting] = []

    @property
    def free(self) -> int:
        return self.config.batch - len(self._waiting)

    def add(self, prompt: Tensor, max_new_tokens: int, seed: int) -> Hashable:
        self._waiting.append(_Waiting(prompt, max_new_tokens, seed))
        return self._waiting[-1]

    def step(self) -> list[tuple[Hashable, Turn]]:
        calls: dict[int, list[_Waiting]] = {}
        for item in self._waiting:
            calls.setdefault(item.max_new_tokens, []).append(item)
        self._waiting = []
        return [turn for items in calls.values() for turn in self._decode(items)]

    def close(self) -> None:
        """Do nothing: ``generate`` keeps nothing."""

    def _decode(self, items: Sequence[_Waiting]) -> list[tuple[Hashable, Turn]]:
        model, sampling = self.model, self.config.sampling(items[0].seed)
        end_tokens = self.ends["eos_token_id"]
        padded = model.tokenizer.pad(
            {"input_ids": [item.prompt.tolist() for item in items]},
            padding_side="left",
            return_tensors="pt",
        ).to(model.target.device)
        pad = _find_padding(model, end_tokens)
        config = GenerationConfig(
            do_sample=bool(sampling.temperature),
            eos_token_id=end_tokens or None,
            pad_token_id=pad,
            bos_token_id=model.model.generation_config.bos_token_id,
            max_new_tokens=items[0].max_new_tokens,
            **(sampling.model_dump(exclude={"seed"}) if sampling.temperature else {}),
        )
        if sampling.temperature:
            torch.manual_seed(items[0].seed)
        with _generation_config_replaced(model.model, config):
            sequences = model.model.generate(  # type: ignore[operator]
                **padded,
                **self._assistance(),
                stopping_criteria=StoppingCriteriaList(self.ends["stopping_criteria"]),
            )
        found: list[tuple[Hashable, Turn]] = []
        for item, row in zip(items, sequences[:, padded["input_ids"].shape[1] :], strict=True):
            tokens = _without_padding(row.tolist(), end_tokens, pad)
            # Assisted generation takes an unknown number of passes.
            passes = len(tokens) if self.method.assistant is None else None
            found.append((item, Turn(tokens, passes)))
        return found

    def _assistance(self) -> dict[str, Any]:
        """Return the arguments of ``generate`` for the method's assistant."""
        assistant = self.method.assistant
        if assistant == "ngram":
            return {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
        return {"assistant_model": assistant}


@contextmanager
def _generation_config_replaced(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """Replace the model's generation configuration.

    Passing ``config`` to ``generate`` is not enough: it fills in unset options from the model's own
    configuration, which may include a repetition penalty that no other method applies.
    """
    own, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = own


def _find_padding(model: EagleFSD, eos_token_ids: Sequence[int]) -> int | None:
    """Choose a padding token, preferably one that is not an end token."""
    tokenizer, own = model.tokenizer, model.model.generation_config.pad_token_id
    candidates = (tokenizer.pad_token_id, tokenizer.unk_token_id, own, *eos_token_ids)
    usable = [item for item in candidates if item is not None]
    return min(usable, key=lambda item: item in eos_token_ids, default=None)


def _without_padding(tokens: list[int], eos_token_ids: Sequence[int], pad: int | None) -> list[int]:
    """Return the tokens of a row up to its first end token, inclusive, or else up to its padding.

    A row that ended with a stop string is padded. If the padding token is itself an end token, one
    padding token is kept.
    """
    for count, token in enumerate(tokens, 1):
        if token in eos_token_ids:
            return tokens[:count]
    while tokens and tokens[-1] == pad:
        tokens.pop()
    return tokens
