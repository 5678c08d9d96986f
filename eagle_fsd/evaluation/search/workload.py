"""The prompts that trees are measured on, and how they are decoded."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from eagle_fsd.evaluation.completion import answer_ends, evaluation_template
from eagle_fsd.evaluation.config import EvaluationConfig, EvaluationRequest
from eagle_fsd.evaluation.methods import Method, fresh_pair, synchronize
from eagle_fsd.evaluation.processes import from_first
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.questions.sets import interleaved
from eagle_fsd.model.pipeline import Completion, EagleFSD
from eagle_fsd.model.request import Prompt
from eagle_fsd.utils.chat_templates import encode_prompt


@dataclass(frozen=True, eq=False)
class Workload:
    """Prompts, ``[S]`` token ids each, with the pair that decodes them and the options for that.

    ``ends`` are those of :func:`answer_ends`.
    """

    model: EagleFSD
    prompts: Sequence[Tensor]
    config: EvaluationConfig
    ends: dict[str, Any]

    @classmethod
    def of(
        cls,
        model: EagleFSD,
        questions: Sequence[Question],
        request: EvaluationRequest,
        config: EvaluationConfig,
    ) -> Workload:
        """Encode the first turns of questions as an evaluation does, without too long ones.

        Any number of the first prompts is spread over the categories.
        """
        template = evaluation_template(model.tokenizer, request.chat_template, request.few_shot)
        encoded = [
            encode_prompt(question.first_chat(), model.tokenizer, template)[0]
            for question in interleaved(questions)
        ]
        room = model.target.stable_length
        prompts = [prompt for prompt in encoded if len(prompt) < room]
        if not prompts:
            raise ValueError(f"every prompt has at least {room} tokens, the target's maximum")
        return cls(model, prompts, config, answer_ends(model, template))

    @property
    def groups(self) -> int:
        """Number of groups of prompts that are decoded at once."""
        return math.ceil(len(self.prompts) / self.config.batch)

    def pair(self) -> EagleFSD:
        """Return a copy of the pair whose drafter has learned nothing."""
        return fresh_pair(self.model)

    def take(self, first: int, count: int) -> list[Tensor]:
        """Return some prompts; indices beyond the last prompt start again."""
        return [self.prompts[(first + at) % len(self.prompts)] for at in range(count)]

    def generate(
        self, pair: EagleFSD, prompts: Sequence[Tensor], seed: int, **options: Any
    ) -> list[Completion]:
        """Answer prompts with the options of this workload and others of ``generate_many``."""
        room, limit = pair.target.stable_length, self.config.max_new_tokens
        limited = [Prompt(ids, max_new_tokens=min(limit, room - len(ids))) for ids in prompts]
        sampling = self.config.sampling(seed=seed)
        answers = pair.generate_many(limited, sampling=sampling, **self.ends, **options)
        return sorted(answers, key=lambda answer: answer.index)

    def decode(
        self, pair: EagleFSD, method: Method, first: int, count: int
    ) -> tuple[list[Completion], float]:
        """Return the answers to some prompts, decoded at once, and the seconds."""
        synchronize(pair)
        begin = time.perf_counter()
        found = self.generate(
            method.pair_for(pair),
            self.take(first, count),
            self.config.seed + first,
            max_batch=count,
            rule=method.rule_for(pair),
            method=method.decoder,
        )
        synchronize(pair)
        seconds = time.perf_counter() - begin
        return found, from_first(pair.target, lambda: seconds)
