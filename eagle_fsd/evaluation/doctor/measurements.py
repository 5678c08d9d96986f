"""Decode questions with a pair, and count what was accepted."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from eagle_fsd.evaluation.completion import answer_ends
from eagle_fsd.evaluation.doctor.agreement import Agreement
from eagle_fsd.model.config import AcceptanceConfig, TreeConfig
from eagle_fsd.model.drafters.heads import DraftHead
from eagle_fsd.model.drafters.levels import LevelDrafter
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.model.probe import gate_divergences
from eagle_fsd.utils.chat_templates import Chat, ChatTemplate, encode_prompt
from eagle_fsd.utils.detokenization import answer_text

#: Questions answered at once.
BATCH = 16
#: Maximum number of exchanges before a question, to measure longer contexts.
MAX_HISTORY = 6
#: Contexts in the first row of the table are shorter than this; the limit doubles in every row.
FIRST_LENGTHS = 128


@dataclass(frozen=True)
class MeasuredAnswer:
    """A prompt and the target's greedy answer to it."""

    ids: Tensor  # [S] of both
    start: int  # number of prompt tokens
    accepted: list[int]  # number of tokens that each step emitted
    slower_than_plain: bool = False  # see DecodeStats


@dataclass(eq=False)
class Measurements:
    """A pair's answers to questions, decoded exactly and greedily on first use."""

    model: EagleFSD
    questions: Sequence[str]
    chat_template: ChatTemplate
    max_new_tokens: int

    @cached_property
    def chats(self) -> list[Chat]:
        """The questions that leave room for an answer; raises ValueError if none does."""
        found: list[Chat] = [[{"role": "user", "content": item}] for item in self.questions]
        found = [chat for chat in found if self._prompts([chat], self.chat_template)]
        if not found:
            raise ValueError("no question leaves room for an answer in the context of the pair")
        return found

    @cached_property
    def short(self) -> list[MeasuredAnswer]:
        """Answers to the questions."""
        return self.answer(self.chat_template, self.chats)

    @cached_property
    def chains(self) -> list[MeasuredAnswer]:
        """Answers to the questions, drafted as chains; none unless the drafter is a head."""
        if not isinstance(self.model.drafter, DraftHead):
            return []
        depth = self.model.tree.depth
        tree = TreeConfig(total_tokens=depth + 2, depth=depth, top_k=1)
        return self.answer(self.chat_template, self.chats, tree)

    @cached_property
    def long(self) -> list[MeasuredAnswer]:
        """Answers to the questions after up to :data:`MAX_HISTORY` others and their answers.

        There are none for a single question, which would repeat :attr:`short`.
        """
        if len(self.chats) < 2:
            return []
        exchanges = []
        for chat, answer in zip(self.chats, self.short, strict=True):
            text = answer_text(self.model.tokenizer, answer.ids[answer.start :].tolist())
            exchanges.append([*chat, {"role": "assistant", "content": text.strip()}])
        chats: list[Chat] = []
        for index, chat in enumerate(self.chats):
            others = [*exchanges[index + 1 :], *exchanges[:index]]
            chats.append([*chain(*others[: 1 + index % MAX_HISTORY]), *chat])
        return self.answer(self.chat_template, chats)

    def answer(
        self, chat_template: ChatTemplate, chats: Sequence[Chat], tree: TreeConfig | None = None
    ) -> list[MeasuredAnswer]:
        """Answer chats, with the model's tree or another; skip those without room for an answer."""
        model = self.model
        if tree is not None:
            model = copy(model)
            model.tree = tree
        prompts = self._prompts(chats, chat_template)
        found = model.generate_many(
            prompts,
            self.max_new_tokens,
            max_batch=BATCH,
            acceptance=AcceptanceConfig(),
            **answer_ends(model, chat_template),
        )
        answers = []
        for item in sorted(found, key=lambda item: item.index):
            prompt, (accepted,) = prompts[item.index], item.stats.accepted
            ids = torch.cat([prompt, prompt.new_tensor(item.tokens)]).to(model.target.device)
            slower = item.stats.slower_than_plain
            answers.append(MeasuredAnswer(ids, len(prompt), accepted, slower))
        return answers

    def _prompts(self, chats: Sequence[Chat], chat_template: ChatTemplate) -> list[Tensor]:
        """Tokenize chats, ``[S]`` each; those that leave no room for an answer are left out."""
        model = self.model
        config = getattr(model.drafter.network, "config", None)
        own = getattr(config, "max_position_embeddings", None)
        context = min(model.target.stable_length, own or torch.inf)
        prompts = (encode_prompt(chat, model.tokenizer, chat_template)[0] for chat in chats)
        # A head reads a feature and the token after it, so it predicts the third token first.
        return [item for item in prompts if 1 < len(item) <= context - self.max_new_tokens]

    @cached_property
    def divergences(self) -> Tensor:
        """``[n]`` divergences between target and drafter where answers were drafted."""
        prompts = [answer.ids[: answer.start] for answer in self.short]
        name = self.model.acceptance.divergence
        return gate_divergences(self.model, prompts, self.max_new_tokens, name)

    @cached_property
    def agreement(self) -> Agreement | None:
        """The drafter's agreement with the target; None if it is not a network."""
        drafter = self.model.drafter
        if not isinstance(drafter, LevelDrafter):
            return None
        answers = [(answer.ids, answer.start) for answer in (*self.short, *self.long)]
        return Agreement(drafter, self.model.target, answers)

    @cached_property
    def by_length(self) -> list[dict[str, Any]]:
        """Tau and agreement, over ``tokens`` answer tokens, by the context length before them."""
        steps, hits = [], []
        for answer in (*self.short, *self.long):
            position = answer.start
            for accepted in complete_steps([answer]):
                steps.append((position, accepted))
                position += accepted
        if self.agreement is not None:
            positions, own = self.agreement.positions, self.agreement.own.nan_to_num(0.0)
            hits = list(zip(positions.tolist(), own.tolist(), strict=True))
        rows, first, last = [], 0, FIRST_LENGTHS - 1
        while any(position >= first for position, _ in steps):
            here = [accepted for position, accepted in steps if first <= position <= last]
            found = [hit for position, hit in hits if first <= position <= last]
            if here:
                row = {"first": first, "last": last, "steps": len(here), "tau": fmean(here)}
                share = fmean(found) if found else None
                rows.append({**row, "tokens": len(found), "agreement": share})
            first, last = last + 1, 2 * last + 1
        return rows

    @cached_property
    def by_depth(self) -> list[dict[str, Any]]:
        """The share of steps that accepted the token at each depth of a chain.

        Only ``steps`` that accepted all tokens before it count: this is EAGLE's n-alpha (arXiv
        2401.15077, section 4.1). Empty without a head.
        """
        lengths, rows = complete_steps(self.chains), []
        for depth in range(1, self.model.tree.depth + 2):
            reached = [length for length in lengths if length >= depth]
            if reached:
                accepted = fmean(length > depth for length in reached)
                rows.append({"depth": depth, "steps": len(reached), "accepted": accepted})
        return rows


def complete_steps(answers: Sequence[MeasuredAnswer]) -> list[int]:
    """Return accepted lengths without each answer's last step, which may have been cut off.

    The only step of an answer is kept.
    """
    return [length for answer in answers for length in answer.accepted[:-1] or answer.accepted]
