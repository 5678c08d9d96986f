"""Measure a pair: accepted lengths, and which answer tokens the drafter predicts.

Shape letters: ``S`` tokens of a sequence, ``T`` answer tokens of all sequences, ``H`` hidden size
of the target, ``D`` tokens of the draft's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from eagle_fsd.evaluation.doctor.variants import network_of, other_reads
from eagle_fsd.model.config import AcceptanceConfig, TreeConfig
from eagle_fsd.model.drafters.levels import LevelDrafter
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.model.target import Target
from eagle_fsd.utils.chat_templates import Chat, ChatTemplate, encode_prompt
from eagle_fsd.utils.progress import Progress

#: Maximum number of exchanges before a question, to measure longer contexts.
MAX_HISTORY = 6
#: Context lengths of the first row of the table; each further row covers twice as many.
FIRST_LENGTHS = 128
#: Maximum number of positions whose distributions are in memory at once.
CHUNK = 512


@dataclass(frozen=True)
class Answer:
    """A prompt and the target's greedy answer to it.

    Attributes:
        ids: ``[S]`` token ids.
        start: Number of prompt tokens.
        accepted: Number of tokens that each step emitted.
    """

    ids: Tensor
    start: int
    accepted: list[int]


@dataclass(frozen=True)
class LengthRow:
    """Tau and agreement at contexts of similar length.

    Attributes:
        first: Smallest number of tokens before a step.
        last: Largest number of tokens before a step.
        steps: Number of steps.
        tau: Mean number of tokens that these steps emit.
        agreement: Share of the answer tokens that the drafter predicts from the target's states;
            None if the drafter is not a network.
    """

    first: int
    last: int
    steps: int
    tau: float
    agreement: float | None


@dataclass(frozen=True)
class DepthRow:
    """Acceptance of a chain's token, given that those before it are accepted.

    These are the n-alpha acceptance rates of EAGLE (arXiv 2401.15077, section 4.1).

    Attributes:
        depth: The token's position in the chain, from 1.
        steps: Number of steps that accepted all tokens before it.
        accepted: Share of these steps that accepted it.
    """

    depth: int
    steps: int
    accepted: float


class Agreement:
    """Let a network predict answer tokens from the target's states, without decoding.

    Args:
        drafter: The network.
        target: Its target.
        answers: The target's answers.

    Attributes:
        truth: ``[T]`` the answer tokens.
        positions: ``[T]`` number of tokens before each of them.
    """

    def __init__(self, drafter: LevelDrafter, target: Target, answers: Sequence[Answer]) -> None:
        self.drafter, self.target = drafter, target
        # The first token that a pair of a feature and the next token predicts is the third one.
        self._sequences = [(answer.ids, max(answer.start, 2)) for answer in answers]
        self.truth = torch.cat([ids[start:] for ids, start in self._sequences])
        self.positions = torch.cat(
            [torch.arange(start, len(ids), device=ids.device) for ids, start in self._sequences]
        )

    @cached_property
    @torch.no_grad()
    def _states(self) -> list[dict[int, Tensor]]:
        """The hidden states of each sequence that any variant reads, ``[S, H]`` by index."""
        target = self.target
        others = other_reads(self.drafter, len(target.layers)) if self.drafter.reads else []
        indices = sorted({*self.drafter.reads, *sum(others, ())})
        found = []
        for ids, _ in self._sequences:
            features = target.prefill(ids[None], 0, target.new_cache(1, len(ids)), indices)[0]
            found.append(dict(zip(indices, features.split(target.hidden_size, -1), strict=True)))
        return found

    @torch.no_grad()
    def predict(self, reads: Sequence[int] | None = None) -> Tensor:
        """Return the drafter's most likely entries at the answer tokens.

        Args:
            reads: Indices of the hidden states to read; default: the drafter's own.

        Returns:
            ``[T]`` indices into the draft's vocabulary; -1 where the distribution is not finite.
        """
        drafter, found = self.drafter, []
        reads = drafter.reads if reads is None else reads
        for number, (ids, start) in enumerate(self._sequences):
            size = len(ids)
            if drafter.reads:
                states = self._states[number]
                features = torch.cat([states[index] for index in reads], -1)[None, :-1]
                tokens = ids[None, 1:]
            else:
                features, tokens = torch.empty(1, size, 0, device=ids.device), ids[None]
            lengths = torch.zeros(1, dtype=torch.long, device=ids.device)
            hidden = drafter.append(features, tokens, lengths, 0, drafter.new_cache(1, size))[0]
            # The last output predicts the token after the sequence.
            for rows in hidden[start - size - 1 : -1].split(CHUNK):
                best = drafter.log_probs(rows).max(-1)
                found.append(best.indices.where(best.values.isfinite(), -1))
        return torch.cat(found)

    def hits(self, entries: Tensor, token_ids: Tensor | None) -> Tensor:
        """Return which answer tokens are predicted under a vocabulary map: ``[T]`` bool.

        Args:
            entries: ``[T]`` result of :meth:`predict`.
            token_ids: ``[D]`` the target's token for each of the draft's; None if they are the
                same.
        """
        tokens = entries if token_ids is None else token_ids[entries]
        return (tokens == self.truth) & (entries >= 0)

    def measure(self, reads: Sequence[int] | None = None) -> Tensor:
        """Return which answer tokens the drafter predicts with its present settings: ``[T]`` bool.

        Args:
            reads: Indices of the hidden states to read; default: the drafter's own.
        """
        return self.hits(self.predict(reads), self.drafter.token_ids)

    @cached_property
    def entries(self) -> Tensor:
        """``[T]`` result of :meth:`predict` on first use."""
        return self.predict()

    @cached_property
    def own(self) -> Tensor:
        """``[T]`` bool, which answer tokens the drafter predicts."""
        return self.hits(self.entries, self.drafter.token_ids)

    @cached_property
    def estimated(self) -> Tensor:
        """``[T]`` bool, which answer tokens are predicted under an estimated vocabulary map.

        Each half of the tokens is predicted with a map estimated from the other half, which maps
        every entry to the token that it coincides with most often.
        """
        entries, truth = self.entries, self.truth
        hits = torch.zeros_like(truth, dtype=torch.bool)
        half = torch.arange(len(truth), device=truth.device) % 2 == 0
        for fitted, tested in ((half, ~half), (~half, half)):
            pairs, counts = torch.stack([entries[fitted], truth[fitted]]).unique(
                dim=1, return_counts=True
            )
            order = counts.argsort()  # of several pairs with the same entry, the last one remains
            best = dict(zip(pairs[0, order].tolist(), pairs[1, order].tolist(), strict=True))
            found = [best.get(entry, -1) for entry in entries[tested].tolist()]
            hits[tested] = torch.tensor(found, device=truth.device) == truth[tested]
        return hits & (entries >= 0)

    @cached_property
    def chance(self) -> float:
        """Share of the most frequent answer token, which a constant prediction would reach."""
        return int(self.truth.bincount().max()) / len(self.truth)

    def between(self, first: int, last: int) -> Tensor:
        """Return :attr:`own` at the tokens with ``first`` to ``last`` tokens before them.

        Args:
            first: Smallest number of tokens.
            last: Largest number of tokens.
        """
        return self.own[(self.positions >= first) & (self.positions <= last)]


class Measurements:
    """A pair's answers to questions, decoded exactly and greedily.

    Args:
        model: The pair, with a tokenizer.
        questions: Messages of users, at least one.
        chat_template: How chats are formatted.
        max_new_tokens: Maximum number of tokens per answer.

    Attributes:
        short: Answers to the questions.
        long: Answers to the questions after up to :data:`MAX_HISTORY` other exchanges.
        chains: Answers to the questions, drafted as chains.
    """

    def __init__(
        self,
        model: EagleFSD,
        questions: Sequence[str],
        chat_template: ChatTemplate,
        max_new_tokens: int,
    ) -> None:
        self.model, self.chat_template = model, chat_template
        self.questions, self.max_new_tokens = questions, max_new_tokens
        self.short: list[Answer] = []
        self.long: list[Answer] = []
        self.chains: list[Answer] = []

    def decode(self, progress: Progress) -> None:
        """Decode the questions.

        Args:
            progress: Reports progress.

        Raises:
            ValueError: No question leaves room for an answer, or the chat template rejects one.
        """
        depth = self.model.tree.depth
        chains = TreeConfig(total_tokens=depth + 2, depth=depth, top_k=1)
        progress(0, 3)
        self.questions = [item for item in self.questions if self._prompts([[_user(item)]])]
        if not self.questions:
            raise ValueError("no question leaves room for an answer in the context of the pair")
        self.short = self.answer(self.chat_template)
        progress(1, 3)
        self.chains = self.answer(self.chat_template, tree=chains)
        progress(2, 3)
        self.long = self.answer(self.chat_template, self._with_history())
        progress(3, 3)

    def _with_history(self) -> list[Chat]:
        """Return each question after some of the others and their answers."""
        tokenizer = self.model.tokenizer
        exchanges = []
        for question, answer in zip(self.questions, self.short, strict=True):
            text = tokenizer.decode(answer.ids[answer.start :], skip_special_tokens=True)
            exchanges.append([_user(question), {"role": "assistant", "content": str(text).strip()}])
        chats: list[Chat] = []
        for index, question in enumerate(self.questions):
            numbers = range(index + 1, index + 2 + index % MAX_HISTORY)
            before = chain.from_iterable(exchanges[item % len(exchanges)] for item in numbers)
            chats.append([*before, _user(question)])
        return chats

    def answer(
        self,
        chat_template: ChatTemplate,
        chats: Sequence[Chat] | None = None,
        tree: TreeConfig | None = None,
    ) -> list[Answer]:
        """Answer chats; those that leave no room for an answer are left out.

        Args:
            chat_template: How the chats are formatted.
            chats: The chats; default: the questions.
            tree: Shape of the draft trees; default: the model's.
        """
        model = self.model
        if tree is not None:
            model = EagleFSD(model.model, model.drafter, tree, tokenizer=model.tokenizer)
        if chats is None:
            chats = [[_user(question)] for question in self.questions]
        prompts = self._prompts(chats, chat_template)
        if not prompts:
            return []
        width = max(map(len, prompts))
        ids = torch.stack([nn.functional.pad(item, (width - len(item), 0)) for item in prompts])
        mask = torch.stack([torch.arange(width) >= width - len(item) for item in prompts])
        output = model.generate(
            ids.to(model.target.device),
            mask.to(model.target.device),
            self.max_new_tokens,
            acceptance=AcceptanceConfig(),
            eos_token_id=[*model.eos_token_ids, *chat_template.stop_token_ids],
        )
        rows = zip(prompts, output.sequences, output.stats.accepted, strict=True)
        return [
            Answer(row[width - len(prompt) : width + sum(accepted)], len(prompt), accepted)
            for prompt, row, accepted in rows
        ]

    def _prompts(
        self, chats: Sequence[Chat], chat_template: ChatTemplate | None = None
    ) -> list[Tensor]:
        """Tokenize chats, ``[S]`` each; those that leave no room for an answer are left out."""
        model, template = self.model, chat_template or self.chat_template
        prompts = (encode_prompt(chat, model.tokenizer, template)[0] for chat in chats)
        room = _context_length(model) - self.max_new_tokens
        return [prompt for prompt in prompts if 1 < len(prompt) <= room]

    @cached_property
    def agreement(self) -> Agreement | None:
        """The drafter's predictions; None if it is not a network."""
        drafter = self.model.drafter
        if not isinstance(drafter, LevelDrafter):
            return None
        return Agreement(drafter, self.model.target, [*self.short, *self.long])

    @cached_property
    def by_length(self) -> list[LengthRow]:
        """Tau and agreement by context length."""
        steps = []
        for answer in (*self.short, *self.long):
            position = answer.start
            for accepted in complete_steps([answer]):
                steps.append((position, accepted))
                position += accepted
        rows, first, last = [], 0, FIRST_LENGTHS - 1
        while any(position >= first for position, _ in steps):
            here = [accepted for position, accepted in steps if first <= position <= last]
            if here:
                share = None
                if self.agreement is not None:
                    share = mean(self.agreement.between(first, last).tolist())
                rows.append(LengthRow(first, last, len(here), mean(here), share))
            first, last = last + 1, 2 * last + 1
        return rows

    @cached_property
    def by_depth(self) -> list[DepthRow]:
        """Acceptance by depth in a chain."""
        lengths, rows = complete_steps(self.chains), []
        for depth in range(1, self.model.tree.depth + 2):
            lengths = [length for length in lengths if length >= depth]
            if lengths:
                accepted = mean([length > depth for length in lengths])
                rows.append(DepthRow(depth, len(lengths), accepted))
        return rows


def complete_steps(answers: Sequence[Answer]) -> list[int]:
    """Return accepted lengths without the last step of each answer, which may have been cut off.

    The only step of an answer counts.

    Args:
        answers: The answers.
    """
    return [length for answer in answers for length in answer.accepted[:-1] or answer.accepted]


def mean(values: Sequence[float]) -> float:
    """Return the mean, 0 if there are no values.

    Args:
        values: The values.
    """
    return sum(values) / len(values) if values else 0.0


def _user(question: str) -> dict[str, Any]:
    return {"role": "user", "content": question}


def _context_length(model: EagleFSD) -> int:
    """Return the number of tokens that both target and drafter can process."""
    network = network_of(model.drafter)
    config = getattr(network, "config", None)
    own = getattr(config, "max_position_embeddings", None)
    limit = model.target.stable_rope_length
    return min(limit, own) if own else limit
