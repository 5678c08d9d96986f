"""Rules that restrict another rule, by what a row has emitted so far."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle_fsd.model.verify import AcceptanceRule, Origin, Verification, VerificationInputs


def _same(name: str) -> Any:
    """Return a property that reads the restricted rule's."""
    return property(lambda self: getattr(self.rule, name))


def _restricted(name: str) -> Any:
    """Return a method that calls the restricted rule's, which sees its own state only."""

    def call(self: WrappedRule, inputs: VerificationInputs, *arguments: Any) -> Any:
        state = inputs.state
        if state is not None:
            inputs.state = state[:, : self.rule.state_size]
        found = getattr(self.rule, name)(inputs, *arguments)
        inputs.state = state
        return found

    return call


@dataclass(frozen=True)
class WrappedRule(AcceptanceRule):
    """Base class of rules that restrict another rule, and are otherwise the same.

    A wrapper's own state is the last column, after that of the wrapped rule.

    Attributes:
        rule: The rule to restrict.
    """

    rule: AcceptanceRule

    needs_uniform = _same("needs_uniform")
    needs_drawn = _same("needs_drawn")
    needs_warped_draft = _same("needs_warped_draft")
    judges_paths = _same("judges_paths")
    replaces_samples = _same("replaces_samples")
    capturable = _same("capturable")
    choose = _restricted("choose")
    gate = _restricted("gate")
    admits = _restricted("admits")
    settle = _restricted("settle")
    _advance_restricted = _restricted("advance")

    @property
    def state_size(self) -> int:
        return self.rule.state_size + 1

    def start(self, prompts: Sequence[Tensor]) -> Tensor:
        own = torch.zeros(len(prompts), 1, dtype=torch.float32, device=prompts[0].device)
        return torch.cat([self.rule.start(prompts), own], 1)

    def own_state(self, inputs: VerificationInputs) -> Tensor:
        """Return ``[B]``: the wrapper's own state."""
        assert inputs.state is not None
        return inputs.state[:, self.rule.state_size]

    def advance(self, inputs: VerificationInputs, kept: Verification) -> Tensor:
        return self.with_own(inputs, kept, self.own_state(inputs))

    def with_own(self, inputs: VerificationInputs, kept: Verification, own: Tensor) -> Tensor:
        """Return ``[B, state_size]``: the wrapped rule's next state, then the wrapper's."""
        return torch.cat([self._advance_restricted(inputs, kept), own[:, None]], 1)


@dataclass(frozen=True)
class LimitedRule(WrappedRule):
    """Limit the log-probability that one answer may lose to fuzzy tokens.

    Every fuzzy token costs its regret, ``max log p - log p(x)``. A path is accepted if some of
    ``max_nats`` is left and its fuzzy tokens cost no more than that. With
    :class:`~eagle_fsd.model.acceptance.RegretRule` this is approximate speculative decoding
    (arXiv 2608.03447). Its limit on the number of exceptions per block is not included.

    Attributes:
        max_nats: The budget of an answer; 0 is lossless.

    Raises:
        ValueError: The rule replaces the target's samples (:class:`MixtureRule`), whose cost has no
            limit.
    """

    max_nats: float

    def __post_init__(self) -> None:
        if self.rule.replaces_samples:
            raise ValueError(
                f"max_nats (option max_fuzzy_nats) cannot limit {type(self.rule).__name__}, which"
                " replaces the target's samples"
            )

    judges_paths = True

    def settle(self, inputs: VerificationInputs, exact: Tensor, accepted: Tensor) -> Tensor:
        accepted = super().settle(inputs, exact, accepted)
        cost = inputs.tree.path_sum(torch.where(accepted & ~exact, inputs.regret, 0.0))
        left = (self.max_nats - self.own_state(inputs))[:, None]
        return accepted & (exact | ((cost <= left) & (left > 0.0)))

    def advance(self, inputs: VerificationInputs, kept: Verification) -> Tensor:
        # A fuzzy token is that of the next node on the path.
        regret = inputs.regret.gather(1, kept.path).roll(-1, 1)
        cost = regret.masked_fill_(kept.origins != int(Origin.FUZZY), 0.0).sum(1)
        return self.with_own(inputs, kept, self.own_state(inputs) + cost)


class PartialRule(WrappedRule, ABC):
    """Base class of rules that apply another rule to a part of the answer; the rest is exact."""

    @abstractmethod
    def inside(self, inputs: VerificationInputs) -> Tensor:
        """Return ``[B, N]`` bool: whether the rule applies to the token after each node."""

    def choose(self, inputs: VerificationInputs) -> Tensor:
        return torch.where(self.inside(inputs), super().choose(inputs), inputs.sampled)

    def gate(self, inputs: VerificationInputs) -> Tensor:
        return super().gate(inputs) | ~self.inside(inputs)

    def admits(self, inputs: VerificationInputs, nodes: Tensor, tokens: Tensor) -> Tensor:
        admitted = super().admits(inputs, nodes, tokens)
        return admitted & self.inside(inputs).gather(1, nodes)


@dataclass(frozen=True)
class DelayedRule(PartialRule):
    """Apply a rule after the first tokens of an answer.

    Attributes:
        exact_first: Number of tokens of every answer that are decoded exactly.
    """

    exact_first: int

    def inside(self, inputs: VerificationInputs) -> Tensor:
        return self.own_state(inputs)[:, None] + inputs.tree.depths >= self.exact_first

    def advance(self, inputs: VerificationInputs, kept: Verification) -> Tensor:
        return self.with_own(inputs, kept, self.own_state(inputs) + kept.count)


@dataclass(frozen=True)
class PhaseRule(PartialRule):
    """Apply a rule between two markers only, for instance ``<think>`` and ``</think>``.

    TensorRT-LLM's relaxed acceptance is restricted in this way. Elsewhere decoding is exact.
    Markers count wherever they are: in the prompt, in the emitted tokens, and on the path to a
    node.

    Attributes:
        begin: Token that begins the phase; None if every answer begins in it, whatever its prompt.
        end: Token that ends the phase.
    """

    begin: int | None
    end: int

    def start(self, prompts: Sequence[Tensor]) -> Tensor:
        tokens = torch.nn.utils.rnn.pad_sequence(list(prompts), True, padding_value=-1)
        places = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        if self.begin is None:
            inside = torch.ones_like(tokens[:, 0])
        else:
            begin, end = self._last(tokens, places.expand_as(tokens), tokens >= 0)
            inside = begin > end
        return torch.cat([self.rule.start(prompts), inside.float()[:, None]], 1)

    def inside(self, inputs: VerificationInputs) -> Tensor:
        """Return ``[B, N]`` bool: whether the position after each node is between the markers."""
        tree = inputs.tree
        above = tree.ancestors & (tree.depths > 0)[:, None, :]  # the root is part of the state
        begin, end = self._last(tree.tokens[:, None], tree.depths[:, None], above)
        return (begin > end) | ((begin == end) & (self.own_state(inputs) > 0.0)[:, None])

    def advance(self, inputs: VerificationInputs, kept: Verification) -> Tensor:
        step = torch.arange(1, kept.tokens.shape[1] + 1, device=kept.tokens.device)
        emitted = step <= kept.count[:, None]
        begin, end = self._last(kept.tokens, step.expand_as(kept.tokens), emitted)
        before = self.own_state(inputs)
        inside = torch.where(begin == end, before, (begin > end).to(before))
        return self.with_own(inputs, kept, inside)

    def _last(self, tokens: Tensor, places: Tensor, among: Tensor) -> tuple[Tensor, Tensor]:
        """Return the place of the last begin and end marker along the last dimension, or 0."""
        marks = tokens == (-1 if self.begin is None else self.begin), tokens == self.end
        begin, end = (torch.where(among & mark, places, 0).amax(-1) for mark in marks)
        return begin, end
