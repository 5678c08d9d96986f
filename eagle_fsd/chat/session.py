"""One answer to one chat or prompt: what the terminal, the worker and the web page all show."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor

from eagle_fsd.chat.config import AnswerOptions
from eagle_fsd.chat.text import Piece, TextStream
from eagle_fsd.model.config import FSDSettings
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.model.prefix_cache import Conversation
from eagle_fsd.utils.chat_templates import Chat, ChatFormat, encode_prompt

#: Tokens an answer gets at least: older turns make room for them.
LEAST_ANSWER = 64
#: Characters that a token may stand for on average: text that is longer is not even tokenized.
CHARACTERS_A_TOKEN = 32


class ContextError(ValueError):
    """The prompt leaves no room for an answer."""


class PenaltyProcessor(LogitsProcessor):
    """OpenAI's presence and frequency penalties: of the answer's tokens alone.

    Args:
        prompt: How many tokens of each row are the prompt.
    """

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self.prompt, self.presence, self.frequency = prompt, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """``[B, S]`` tokens so far and ``[B, V]`` logits to penalised logits."""
        said = input_ids[:, self.prompt :]
        counts = torch.zeros_like(scores).scatter_add_(
            1, said, torch.ones_like(said, dtype=scores.dtype)
        )
        return scores - self.presence * (counts > 0) - self.frequency * counts


def most_characters(tokens: int) -> int:
    """Characters of a text that may be tried to fit into so many tokens."""
    return tokens * CHARACTERS_A_TOKEN


def fit_chat(model: EagleFSD, wording: ChatFormat, chat: Chat) -> tuple[Tensor, int]:
    """Ids ``[1, S]`` of a chat that leave room for an answer, and how many messages were dropped.

    The oldest turns go first, a question with its answer; what the system says stays, and so does
    the last question.

    Raises:
        ContextError: The last question alone does not fit.
    """
    system = [message for message in chat if message["role"] == "system"]
    turns = [message for message in chat if message["role"] != "system"]
    context = model.target.context
    room = context - min(LEAST_ANSWER, context // 4)
    later_questions = (at for at in range(1, len(turns)) if turns[at]["role"] == "user")
    cuts = [0, *later_questions]

    def length(messages: Chat) -> int:
        return sum(len(message["content"]) for message in messages)

    def fits(cut: int) -> bool:
        tried[cut] = encode_prompt([*system, *turns[cut:]], model.tokenizer, wording)
        return tried[cut].shape[1] <= room

    # A client may send any number of turns: cuts are tried by halves, not one after the other.
    tried: dict[int, Tensor] = {}
    left = most_characters(room) - length(system)
    place = bisect_left(cuts, True, key=lambda cut: length(turns[cut:]) <= left)
    if place < len(cuts) and not fits(cuts[place]):
        place = bisect_left(cuts, True, place + 1, key=fits)
    if place < len(cuts):
        return tried[cuts[place]], cuts[place]
    if cuts[-1] in tried:
        size = f"{tried[cuts[-1]].shape[1]} tokens"
    else:
        size = f"{length([*system, *turns[cuts[-1] :]])} characters"
    raise ContextError(
        f"the prompt's {size} leave no room for an answer: the context is {context} tokens"
    )


class Answer:
    """An answer on its way: iterate for its pieces; afterwards, or at any time, its figures.

    Args:
        ids: ``[1, S]``, shorter than the target's context.
        stop: Texts that end the answer; they are not part of it.
        stop_token_ids: Tokens that end it, beside the target's own.
        settings: FSD's, in the place of the model's.
        plain: Decode without the draft head.
        conversation: Keeps the caches for the next turn.
        details: Of every token its log-probability, divergence, and so many alternatives.

    Attributes:
        text: What was said so far. finish_reason: ``"stop"`` or ``"length"`` at the end, else None.

    Raises:
        ValueError, FloatingPointError: As :meth:`EagleFSD.stream` does.
    """

    def __init__(
        self,
        model: EagleFSD,
        ids: Tensor,
        options: AnswerOptions,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        settings: FSDSettings | None = None,
        plain: bool = False,
        conversation: Conversation | None = None,
        details: int | None = None,
    ) -> None:
        if ids.shape[1] >= model.target.context:
            raise ContextError(
                f"the prompt's {ids.shape[1]} tokens fill the context of"
                f" {model.target.context} tokens"
            )
        self.prompt_tokens = ids.shape[1]
        self.text = ""
        self.finish_reason: str | None = None
        self._ends = {*model.end_tokens, *stop_token_ids}
        self._stream = TextStream(model.tokenizer, stop)
        self.decoding = model.stream(
            ids.to(model.target.device),
            torch.ones_like(ids),
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=min(options.top_k, model.target.vocabulary),
            settings=settings,
            method="ar" if plain else "fsd",
            eos_token_id=sorted(self._ends),
            logits_processor=_processors(options, ids.shape[1]),
            seed=options.seed,
            conversation=conversation,
            details=details,
        )

    def __iter__(self) -> Iterator[list[Piece]]:
        """What each step of decoding makes certain; the last one has what was held back."""
        for chunk in self.decoding:
            pieces = self._stream.push(chunk.tokens, chunk.origins, chunk.details)
            if self._stream.stopped:
                self.finish_reason = "stop"
            elif chunk.finished:
                pieces += self._stream.finish()
                self.finish_reason = "stop" if chunk.tokens[-1] in self._ends else "length"
            self.text += "".join(piece.text for piece in pieces)
            yield pieces
            if self.finish_reason is not None:
                return

    @property
    def new_tokens(self) -> int:
        return self.decoding.stats.tokens

    def figures(self) -> dict[str, Any]:
        """How it was decoded: ``tau``, ``fuzzy_tokens``, ``tokens_per_second``, ..."""
        stats = self.decoding.stats
        origins = stats.as_dict()["origins"]
        speed = stats.tokens_per_second
        return {
            "tau": stats.tau,
            "steps": stats.steps,
            "fuzzy_tokens": origins["fuzzy"],
            "exact_tokens": origins["exact"],
            "target_tokens": origins["target"],
            "tokens_per_second": speed if math.isfinite(speed) else 0.0,
            "prefilled_tokens": stats.prefilled,
        }

    def usage(self) -> dict[str, int]:
        """As OpenAI counts."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.new_tokens,
            "total_tokens": self.prompt_tokens + self.new_tokens,
        }


def _processors(options: AnswerOptions, prompt: int) -> list[LogitsProcessor]:
    found: list[LogitsProcessor] = []
    if options.repetition_penalty != 1.0:
        found.append(RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    if options.presence_penalty or options.frequency_penalty:
        found.append(PenaltyProcessor(prompt, options.presence_penalty, options.frequency_penalty))
    return found
