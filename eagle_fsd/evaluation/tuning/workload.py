"""The prompts that trees are measured on, and how they are decoded."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence

from torch import Tensor
from transformers import StopStringCriteria

from eagle_fsd.evaluation.config import EvaluationConfig
from eagle_fsd.evaluation.methods import Method, synchronize
from eagle_fsd.evaluation.processes import from_first
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.model.pipeline import Completion, EagleFSD
from eagle_fsd.utils.chat_templates import ChatTemplate, encode_prompt


class Workload:
    """The first turns of some questions.

    Args:
        model: The pair; its tokenizer is used.
        questions: The questions. Those whose prompt fills the context are left out.
        chat_template: How chats are formatted.
        config: How answers are decoded.

    Attributes:
        prompts: ``[S]`` token ids of each prompt.

    Raises:
        ValueError: No prompt fits the context.
    """

    def __init__(
        self,
        model: EagleFSD,
        questions: Sequence[Question],
        chat_template: ChatTemplate,
        config: EvaluationConfig,
    ) -> None:
        self.model, self.config = model, config
        encoded = [
            encode_prompt(question.first_chat(), model.tokenizer, chat_template)[0]
            for question in questions
        ]
        room = model.target.context_length
        self.prompts = [prompt for prompt in encoded if len(prompt) < room]
        if not self.prompts:
            raise ValueError(f"every prompt fills the target's context of {room} tokens")
        self._eos = [*model.eos_token_ids, *chat_template.stop_token_ids]
        stop = list(chat_template.stop)
        self._criteria = [StopStringCriteria(model.tokenizer, stop)] if stop else []

    def with_model(self, model: EagleFSD) -> Workload:
        """Return the same prompts for another copy of the pair, such as one in bfloat16.

        Args:
            model: The other pair.
        """
        other = copy.copy(self)
        other.model = model
        return other

    def with_batch(self, rows: int) -> Workload:
        """Return the same prompts for another batch size.

        Args:
            rows: Number of prompts that are decoded at once.
        """
        other = copy.copy(self)
        other.config = self.config.updated(batch=rows)
        return other

    def subset(self, count: int) -> Workload:
        """Return the first prompts.

        Args:
            count: Number of prompts; there may be fewer.
        """
        other = copy.copy(self)
        other.prompts = self.prompts[:count]
        return other

    @property
    def groups(self) -> int:
        """Number of groups of prompts that are decoded at once."""
        return math.ceil(len(self.prompts) / self.config.batch)

    def pair(self) -> EagleFSD:
        """Return a copy of the pair whose drafter has learned nothing."""
        pair = copy.copy(self.model)
        pair.drafter = self.model.drafter.fresh().attach(pair.target)
        return pair

    def take(self, first: int, count: int) -> list[Tensor]:
        """Return some prompts.

        Args:
            first: Index of the first prompt; indices beyond the last prompt start again.
            count: Number of prompts.
        """
        return [self.prompts[(first + at) % len(self.prompts)] for at in range(count)]

    def decode(
        self, pair: EagleFSD, method: Method, first: int, count: int
    ) -> tuple[list[Completion], float]:
        """Decode some prompts at once.

        Args:
            pair: The pair to decode with, see :meth:`pair`.
            method: The method.
            first: Index of the first prompt, see :meth:`take`.
            count: Number of prompts.

        Returns:
            The answers in the order of the prompts, and the seconds they took.
        """
        synchronize(pair)
        begin = time.perf_counter()
        answers = method.pair_for(pair).generate_many(
            self.take(first, count),
            self.config.max_new_tokens,
            max_batch=count,
            sampling=self.config.sampling(self.config.seed + first),
            rule=method.rule_for(pair),
            method=method.decoder,
            eos_token_id=self._eos,
            stopping_criteria=self._criteria,
        )
        found = sorted(answers, key=lambda answer: answer.index)
        synchronize(pair)
        seconds = time.perf_counter() - begin
        return found, from_first(pair.target, lambda: seconds)
