"""One decoding step: draft a tree for every row, score it, verify it, commit the kept path.

A step changes a :class:`StepState` in place and returns a :class:`StepOutput`.

Shape letters: ``B`` rows, ``N`` tree nodes, ``F`` values of the features, ``V`` vocabulary, ``A``
the largest number of tokens that one step can emit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from eagle_fsd.model.acceptance import FuzzyRule
from eagle_fsd.model.cache import TreeCache
from eagle_fsd.model.drafters.interface import Drafter, DraftState, NoDrafter
from eagle_fsd.model.random_numbers import RandomNumbers
from eagle_fsd.model.request import Answer, Decision
from eagle_fsd.model.target import Target, TargetPass
from eagle_fsd.model.tree import DraftTree
from eagle_fsd.model.verify import Verification, VerificationInputs, verify, verify_root

#: Begins a phase of a step, see :meth:`PhaseClock.enter`.
EnterPhase = Callable[[str], None]
#: Returns a part of a step as it is, or compiled. Takes the part, the module that it runs, and
#: whether it consists of tensor operations with static shapes only.
Prepare = Callable[[Any, nn.Module | None, bool], Any]


@dataclass(frozen=True)
class TokenDetail:
    """Log-probability, divergence and alternatives of one emitted token.

    Attributes:
        log_prob: The target's log-probability, before processors and sampling options; nats.
        divergence: Between target and draft at the token's parent, by the divergence that the
            acceptance options select; None if the parent is a leaf or was not expanded.
        top: The target's most likely tokens at this position and their log-probabilities, in
            descending order.
    """

    log_prob: float
    divergence: float | None
    top: list[tuple[int, float]]


@dataclass(eq=False)
class RowGroup:
    """Rows with equal decisions; ``index`` ``[G]``: ``places`` on the device, None for all rows."""

    decision: Decision
    answers: list[Answer]
    places: list[int]
    index: Tensor | None


@dataclass(eq=False)
class StepState:
    """What a step reads and changes: the rows' tensors, caches and acceptance rules."""

    target: Target
    drafter: Drafter
    draft: DraftState
    cache: TreeCache
    groups: list[RowGroup]  # the rows, by decision
    order: Tensor | None  # [B] index of each row among those of all groups; None for one group
    roots: Tensor  # [B] last token of each row, which is not in the target's cache
    lengths: Tensor  # [B] tokens in the target's cache
    rule_state: Tensor  # [B, W] state of the rows' acceptance rules
    keys: Tensor  # [B] keys of the rows' random numbers
    folds: int  # query heads per key head that tree attention folds, see `attention`

    @property
    def verifies_on_device(self) -> bool:
        """Whether verification consists of tensor operations with static shapes only."""
        return len(self.groups) == 1 and self.groups[0].decision.on_device


#: Indices of rows, and what :func:`_describe` returned for them.
GroupDetails = tuple[list[int], Tensor, Tensor]


@dataclass
class StepOutput:
    """The emitted tokens of a step, on the device.

    ``packed`` is ``[B, 2 + 2 A]``: count, fault (see :meth:`VerificationInputs.row_faults`), tokens
    and origins.
    """

    packed: Tensor
    details: list[GroupDetails]


def ignore_phase(_: str) -> None:
    """Begin no phase."""


def decoding_step(
    state: StepState,
    draft_keys: Tensor | None,
    keys: Tensor,
    prepare: Prepare,
    enter: EnterPhase = ignore_phase,
) -> StepOutput:
    """Take a step; ``draft_keys`` and ``keys`` are the visible slots of both caches."""
    tree, scored = draft_and_score(state, draft_keys, keys, prepare=prepare, enter=enter)
    enter("verify")
    conclude = prepare(verify_and_commit, state.target.model, state.verifies_on_device)
    return conclude(state, tree, scored, enter)


def draft_and_score(
    state: StepState,
    draft_keys: Tensor | None,
    keys: Tensor,
    prepare: Prepare,
    enter: EnterPhase,
) -> tuple[DraftTree, TargetPass]:
    """Draft a tree for every row, and run the target on it."""
    target, drafter = state.target, state.drafter
    if not isinstance(drafter, NoDrafter):  # its roots take no time worth a phase
        enter("draft")
    draft = prepare(type(state.draft).draft, drafter.network, state.draft.on_device)
    tree = draft(state.draft, state.roots, draft_keys, RandomNumbers(state.keys, state.lengths))
    enter("target")
    forward = prepare(Target.forward_tree, target.model, True)
    return tree, forward(target, tree, state.lengths, keys, state.cache, drafter.reads, state.folds)


def verify_and_commit(
    state: StepState, tree: DraftTree, scored: TargetPass, enter: EnterPhase = ignore_phase
) -> StepOutput:
    """Verify the trees, rows with equal decisions together, and commit the paths that are kept."""
    random = RandomNumbers(state.keys, state.lengths)
    results, faults, details = [], [], []
    for group in state.groups:
        decision, index = group.decision, group.index
        part, logits, rule_state, numbers = tree, scored.logits, state.rule_state, random
        if index is not None:
            part, logits, rule_state = tree.of_rows(index), logits[index], rule_state[index]
            numbers = RandomNumbers(random.keys[index], random.positions[index])
        prefixes = [row.prefix for row in group.answers] if decision.sampler.needs_prefix else []
        inputs = decision.sampler(part, logits, numbers, prefixes)
        inputs.state = rule_state[:, : decision.rule.state_size]
        if tree.size == 1:
            kept = verify_root(inputs)
        else:
            kept = verify(inputs, decision.rule, decision.acceptance)
        results.append(kept)
        faults.append(inputs.row_faults(kept))
        if decision.details is not None:
            details.append((group.places, *_describe(decision, inputs, kept)))
        _advance(state, group, inputs, kept=kept, numbers=numbers)
    kept, fault = results[0], faults[0]
    if state.order is not None:
        kept = Verification.joined(results, state.order)
        fault = torch.cat(faults)[state.order]
    if not torch.compiler.is_compiling():
        enter("cache")
    commit(state, tree, scored.features, kept)
    packed = torch.cat([kept.count[:, None], fault[:, None], kept.tokens, kept.origins], 1)
    return StepOutput(packed, details)


def _advance(
    state: StepState,
    group: RowGroup,
    inputs: VerificationInputs,
    kept: Verification,
    numbers: RandomNumbers,
) -> None:
    """Set the random numbers and the rules' states of a group for the next step."""
    decision, index = group.decision, group.index
    keys = numbers.keys if decision.sampler.greedy else numbers.next_keys(inputs.tree, kept)
    after = decision.rule.advance(inputs, kept)
    if index is None:
        state.keys.copy_(keys)
        state.rule_state[:, : after.shape[1]] = after
    else:
        state.keys[index] = keys
        state.rule_state[index, : after.shape[1]] = after


def commit(state: StepState, tree: DraftTree, features: Tensor, kept: Verification) -> None:
    """Compact the target's cache to the kept path, and set the rows' state for the next step.

    ``features`` ``[B, N, F]`` are the hidden states that the drafter reads.
    """
    if tree.size > 1:
        source = state.lengths[:, None] + kept.path
        slots = torch.arange(kept.path.shape[1], device=source.device)
        # Beyond the path, copy the root's slot onto itself.
        slots = torch.where(slots < kept.count[:, None], slots, kept.path)
        state.cache.move(source, state.lengths[:, None] + slots)
    state.lengths.add_(kept.count)
    state.roots.copy_(kept.tokens.gather(1, kept.count[:, None] - 1)[:, 0])
    state.draft.commit(features, kept)


def _describe(
    decision: Decision, inputs: VerificationInputs, kept: Verification
) -> tuple[Tensor, Tensor]:
    """Collect the details of a group's emitted tokens, see :class:`TokenDetail`.

    With ``K`` alternatives (``decision.details``, at most ``V``), returns ``[B, A, 2 + K]``:
    log-probability, divergence, and the ``K`` largest log-probabilities; and ``[B, A, K]``: the
    tokens of the latter.
    """
    first = torch.arange(len(kept.path), device=kept.path.device)[:, None] * inputs.tree.size
    log_probs = inputs.raw.rows((kept.path + first).flatten()).unflatten(0, kept.path.shape)
    own = log_probs.gather(-1, kept.tokens[:, :, None])
    options = decision.acceptance
    rule = FuzzyRule(0.0, options.divergence, divergence_on=options.divergence_on)
    divergence = rule.divergences(inputs).gather(1, kept.path)[:, :, None]
    assert decision.details is not None
    top = log_probs.topk(min(decision.details, log_probs.shape[-1]), -1)
    return torch.cat([own, divergence, top.values], -1), top.indices


def token_details(
    values: Sequence[Sequence[float]], alternatives: Sequence[list[int]], count: int
) -> list[TokenDetail]:
    """Convert the first ``count`` tokens of a row of the result of :func:`_describe`."""
    return [
        TokenDetail(
            log_prob,
            None if math.isinf(divergence) else divergence,
            list(zip(tokens, top, strict=True)),
        )
        for (log_prob, divergence, *top), tokens in zip(
            values[:count], alternatives[:count], strict=True
        )
    ]
