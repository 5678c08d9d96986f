"""Hugging Face's ``generate`` with the interface of a batch of requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from eagle_fsd.evaluation.methods import Method
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.model.request import Answer, Request

#: Maximum number of tokens that prompt lookup drafts after a match.
LOOKUP_TOKENS = 3


class PaddedBatch:
    """Requests that ``generate`` decodes to their end, with padded prompts.

    It is used as a :class:`~eagle_fsd.model.batch.Batch` is. Requests with different limits on new
    tokens are decoded in separate calls, because ``generate`` takes a single limit. A call is
    sampled with the key of its first request as seed.
    """

    def __init__(self, model: EagleFSD, method: Method, max_rows: int) -> None:
        self.model, self.method, self.max_rows = model, method, max_rows
        self._waiting: list[Answer] = []

    @property
    def free(self) -> int:
        """Number of requests that can be added before the next step."""
        return self.max_rows - len(self._waiting)

    def add(self, request: Request) -> Answer:
        """Add a request."""
        self._waiting.append(Answer(request))
        return self._waiting[-1]

    def step(self) -> list[tuple[Answer, None]]:
        """Decode all requests, and return their answers."""
        calls: dict[int, list[Answer]] = {}
        for answer in self._waiting:
            calls.setdefault(answer.request.max_new_tokens, []).append(answer)
        self._waiting = []
        for answers in calls.values():
            self._decode(answers)
        return [(answer, None) for answers in calls.values() for answer in answers]

    def close(self) -> None:
        """Do nothing: ``generate`` keeps nothing."""

    def _decode(self, answers: Sequence[Answer]) -> None:
        """Decode answers in one call."""
        model, first = self.model, answers[0].request
        sampling, end_tokens = first.decision.sampling, first.eos_token_ids
        padded = model.tokenizer.pad(
            {"input_ids": [answer.request.tokens for answer in answers]},
            padding_side="left",
            return_tensors="pt",
        ).to(model.target.device)
        pad = _find_padding(model, end_tokens)
        config = GenerationConfig(
            do_sample=bool(sampling.temperature),
            eos_token_id=end_tokens or None,
            pad_token_id=pad,
            bos_token_id=model.model.generation_config.bos_token_id,
            max_new_tokens=first.max_new_tokens,
            **(sampling.model_dump(exclude={"seed"}) if sampling.temperature else {}),
        )
        if sampling.temperature:
            torch.manual_seed(first.key)
        # An argument would be completed from the model's own configuration, which may include a
        # repetition penalty that no other method applies.
        own, model.model.generation_config = model.model.generation_config, config
        try:
            sequences = model.model.generate(  # type: ignore[operator]
                **padded, **self._assistance(), stopping_criteria=first.criteria
            )
        finally:
            model.model.generation_config = own
        new = sequences[:, padded["input_ids"].shape[1] :]
        for answer, row in zip(answers, new.tolist(), strict=True):
            answer.tokens, answer.finished = _without_padding(row, end_tokens, pad), True

    def _assistance(self) -> dict[str, Any]:
        """Return the arguments of ``generate`` for the method's assistant."""
        assistant = self.method.assistant
        if assistant == "ngram":
            return {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
        return {"assistant_model": assistant}


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
