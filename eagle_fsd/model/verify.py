"""Verification: which path of a draft tree is kept, and which token follows it.

One code path for greedy decoding and sampling, every acceptance rule and every batch size, in a
few operations over ``[B, N]`` and without a look at the host.

Shape letters: ``B`` rows, ``N`` tree nodes, ``V`` vocabulary, ``M`` nodes the head expanded,
``A`` = ``max_depth + 1``, the most tokens one step can emit.

Every node ``i`` has the target's distribution ``p_i`` and one token ``s_i`` drawn from it. An edge
into node ``c`` is *exact* when ``c`` carries ``s`` of its parent; it is *relaxed* when the
acceptance rule's gate is open at the parent and the rule admits the token. The deepest path of
accepted edges is kept, and ``s`` of its last node follows it as the bonus token.

With no relaxed edges this is lossless: following the target's own sample while it is in the tree
has the same law as the recursive rejection of EAGLE-2 over deterministic candidates
(arXiv 2406.16858; Leviathan et al., arXiv 2211.17192, for the chain).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from eagle_fsd.model.divergence import DIVERGENCES, LOG_FLOOR
from eagle_fsd.model.settings import FSDSettings
from eagle_fsd.model.tree import DraftTree


class Origin(IntEnum):
    """Where an emitted token came from."""

    PADDING = 0  #: not a token: the row had ended
    EXACT = 1  #: drafted, and the target's own choice
    FUZZY = 2  #: drafted, not the target's choice, let pass by the acceptance rule
    TARGET = 3  #: the target's choice after the kept path (the bonus token)


@dataclass
class Evidence:
    """What is known when a tree is verified; the input of every acceptance rule.

    Attributes:
        tree: The draft tree.
        raw_log_probs: ``[B, N, V]`` float32, the log-softmax of the target's logits as they came.
        log_probs: The same after logits processors, before temperature, top-k and top-p (the same
            tensor where there are none).
        warped_log_probs: The distribution sampled from: after temperature, top-k and top-p too.
            At temperature 0 it is ``log_probs``.
        warped_draft_log_probs: ``[B, M, V]`` the draft's, warped alike; None where neither the
            settings nor a rule of the caller's looks at it.
        sampled: ``[B, N]`` the target's own choice ``s`` at each node.
        drawn: ``[B, N]`` one token of the draft's distribution at each expanded node (anything
            elsewhere); None unless ``selection="sample"``.
    """

    tree: DraftTree
    raw_log_probs: Tensor
    log_probs: Tensor
    warped_log_probs: Tensor
    warped_draft_log_probs: Tensor | None
    sampled: Tensor
    drawn: Tensor | None = None

    @cached_property
    def peak(self) -> Tensor:
        """``[B, N]`` the largest of ``log_probs`` at each node."""
        return self.log_probs.amax(-1)

    def log_prob(self, nodes: Tensor, tokens: Tensor) -> Tensor:
        """``log p`` of each token at each node, both ``[B, ...]`` alike."""
        return _pick(self.log_probs, nodes, tokens)

    def supported(self, nodes: Tensor, tokens: Tensor) -> Tensor:
        """Whether processors, top-k and top-p left the token any probability."""
        return _pick(self.warped_log_probs, nodes, tokens) > -torch.inf


class AcceptanceRule(Protocol):
    """Which drafted tokens may stand although the target chose otherwise."""

    def gate(self, evidence: Evidence) -> Tensor:
        """``[B, N]`` bool: the nodes below which tokens may be relaxed at all."""

    def admits(self, evidence: Evidence, nodes: Tensor, tokens: Tensor) -> Tensor:
        """Bool like ``nodes``: whether ``tokens`` may follow ``nodes`` where the gate is open."""


class ExactRule:
    """Nothing is relaxed: EAGLE-2's lossless verification."""

    def gate(self, evidence: Evidence) -> Tensor:
        return torch.zeros_like(evidence.tree.tokens, dtype=torch.bool)

    def admits(self, evidence: Evidence, nodes: Tensor, tokens: Tensor) -> Tensor:
        return torch.zeros_like(nodes, dtype=torch.bool)


@dataclass(frozen=True)
class FuzzyRule:
    """FSD (arXiv 2502.20704): the gate opens where the two distributions nearly agree.

    Attributes:
        threshold: ``T``; the gate is open where the divergence is below it.
        divergence: A name in :data:`~eagle_fsd.model.divergence.DIVERGENCES`.
        min_ratio: The floor ``r``: a token also needs ``p(x) >= r * max p``. 0 is the paper's rule.
        divergence_on: ``"raw"`` or ``"warped"`` distributions.
    """

    threshold: float
    divergence: str = "js"
    min_ratio: float = 0.0
    divergence_on: str = "raw"

    def divergences(self, evidence: Evidence) -> Tensor:
        """``[B, N]``: the divergence at expanded nodes that have children, ``inf`` elsewhere."""
        tree = evidence.tree
        if not tree.draft_log_probs.shape[1]:
            return torch.full_like(tree.tokens, torch.inf, dtype=torch.float32)
        warped = self.divergence_on == "warped"
        target = evidence.warped_log_probs if warped else evidence.raw_log_probs
        draft = evidence.warped_draft_log_probs if warped else tree.draft_log_probs
        # Whole rows at once: gathering them number by number costs several times as much.
        row = torch.arange(draft.shape[0], device=draft.device)[:, None] * draft.shape[1]
        index = (tree.draft_rows.clamp_min(0) + row).flatten()
        draft = draft.flatten(0, 1).index_select(0, index).view_as(target)
        value = DIVERGENCES[self.divergence](target, draft)
        known = (tree.draft_rows >= 0) & tree.has_children()
        return torch.where(known, value, torch.inf)

    def gate(self, evidence: Evidence) -> Tensor:
        return self.divergences(evidence) < self.threshold

    def admits(self, evidence: Evidence, nodes: Tensor, tokens: Tensor) -> Tensor:
        if self.min_ratio == 0.0:
            return torch.ones_like(nodes, dtype=torch.bool)
        floor = evidence.peak.gather(1, nodes) + math.log(self.min_ratio)
        return evidence.log_prob(nodes, tokens) >= floor


@dataclass(frozen=True)
class TypicalRule:
    """Medusa's typical acceptance (arXiv 2401.10774, section 3.3.1).

    A token stands where ``p(x) > min(epsilon, delta * exp(-H(p)))``, ``p`` being the distribution
    sampled from. The defaults are Medusa's.
    """

    epsilon: float = 0.3
    delta: float = 0.09

    def gate(self, evidence: Evidence) -> Tensor:
        return torch.ones_like(evidence.tree.tokens, dtype=torch.bool)

    def admits(self, evidence: Evidence, nodes: Tensor, tokens: Tensor) -> Tensor:
        log_probs = evidence.warped_log_probs
        probs = log_probs.exp()
        entropy = -(probs * log_probs.clamp_min(torch.finfo(log_probs.dtype).min)).sum(-1)
        bound = (math.log(self.delta) - entropy).clamp_max(math.log(self.epsilon))  # [B, N]
        return _pick(log_probs, nodes, tokens) > bound.gather(1, nodes)


def rule_for(settings: FSDSettings) -> AcceptanceRule:
    """The rule that ``settings`` ask for; exact where no divergence can be below the threshold."""
    if settings.threshold == 0.0:
        return ExactRule()
    return FuzzyRule(
        settings.threshold, settings.divergence, settings.min_ratio, settings.divergence_on
    )


@dataclass(frozen=True)
class Verification:
    """What one step emits.

    Attributes:
        tokens: ``[B, A]``; the first ``count`` of each row are emitted.
        origins: ``[B, A]`` :class:`Origin`, ``PADDING`` from ``count`` on.
        count: ``[B]``, at least 1: the kept path without its root, and the bonus token.
        path: ``[B, A]`` the kept nodes, root first; 0 from ``count`` on.
        accepted: ``[B, N]`` bool: the nodes with an accepted edge from their parent.
    """

    tokens: Tensor
    origins: Tensor
    count: Tensor
    path: Tensor
    accepted: Tensor


def verify(
    evidence: Evidence,
    rule: AcceptanceRule,
    fallback: str = "exact",
    selection: str = "longest",
) -> Verification:
    """Keep one path of the tree.

    Args:
        evidence: The tree and both models' distributions on it.
        rule: Which tokens may be relaxed. The support guard stands above every rule: a token that
            the processors, top-k or top-p masked is never accepted.
        fallback: ``"exact"``: where the gate is closed the target's own choice is still followed
            when it is in the tree; ``"stop"``: it is emitted and the path ends, as in the paper's
            chain algorithm.
        selection: ``"longest"``, ``"target"`` or ``"sample"``, as in
            :class:`~eagle_fsd.model.settings.FSDSettings`.
    """
    tree = evidence.tree
    parents, tokens = tree.parents, tree.tokens
    gate = rule.gate(evidence)
    chosen = evidence.sampled  # what is emitted at a node when the path ends there
    edge_log_prob = evidence.log_prob(parents, tokens)
    supported = evidence.supported(parents, tokens)

    exact = tokens == chosen.gather(1, parents)
    relaxed = gate.gather(1, parents) & rule.admits(evidence, parents, tokens)
    if selection == "target":
        chosen = _favourite_child(tree, exact, relaxed & supported, edge_log_prob, chosen)
    elif selection == "sample":
        chosen = _draft_draw(evidence, rule, gate)
    if selection != "longest":
        relaxed = exact = tokens == chosen.gather(1, parents)
    accepted = exact | relaxed
    if fallback == "stop":
        accepted = accepted & gate.gather(1, parents)
    accepted = accepted & supported
    accepted[:, 0] = True

    # Down a path log-probabilities add up, to -inf where an edge is not accepted.
    edge_score = torch.where(accepted, edge_log_prob.clamp_min(LOG_FLOOR), -torch.inf)
    edge_score[:, 0] = 0.0
    score = torch.where(tree.ancestors, edge_score[:, None, :], 0.0).sum(-1)  # [B, N]
    reach = torch.where(score > -torch.inf, tree.depths, -1)
    deepest = reach == reach.amax(1, keepdim=True)
    end = torch.where(deepest, score, -torch.inf).argmax(1, keepdim=True)  # [B, 1]

    length = tree.max_depth + 1
    on_path = tree.ancestors.gather(1, end[:, :, None].expand(-1, 1, tree.size))[:, 0]
    # What is off the path falls into a spare slot.
    slots = torch.where(on_path, tree.depths, length)
    path = torch.zeros_like(tokens[:, :1]).repeat(1, length + 1)
    nodes = torch.arange(tree.size, device=tokens.device).expand_as(tokens)
    path = path.scatter_(1, slots, nodes)[:, :length]
    count = tree.depths.gather(1, end)[:, 0] + 1

    # The kept nodes without the root, then the token that follows the last of them.
    step = torch.arange(length, device=tokens.device)
    following = torch.cat([path[:, 1:], path.new_zeros(path.shape[0], 1)], 1)
    emitted = tokens.gather(1, following).scatter(1, count[:, None] - 1, chosen.gather(1, end))
    own = emitted == evidence.sampled.gather(1, path)
    origins = torch.where(own, int(Origin.EXACT), int(Origin.FUZZY))
    origins = torch.where(own & (step == count[:, None] - 1), int(Origin.TARGET), origins)
    origins = torch.where(step < count[:, None], origins, int(Origin.PADDING))
    return Verification(emitted, origins, count, path, accepted)


def verify_root(evidence: Evidence) -> Verification:
    """:func:`verify` for a tree of its root alone: the target's token is what is emitted."""
    root = torch.zeros_like(evidence.sampled)
    origins = torch.full_like(root, int(Origin.TARGET))
    accepted = torch.ones_like(root, dtype=torch.bool)
    return Verification(evidence.sampled, origins, torch.ones_like(root[:, 0]), root, accepted)


def _favourite_child(
    tree: DraftTree, exact: Tensor, relaxed: Tensor, edge_log_prob: Tensor, sampled: Tensor
) -> Tensor:
    """``[B, N]``: the sampled token if a child carries it, else the likeliest relaxed child's."""
    score = torch.where(relaxed, edge_log_prob, -torch.inf)
    score = torch.where(exact, torch.inf, score)
    score[:, 0] = -torch.inf
    is_child = tree.parents[:, None, :] == torch.arange(tree.size, device=score.device)[:, None]
    best, child = torch.where(is_child, score[:, None, :], -torch.inf).max(-1)  # [B, N]
    return torch.where(best > -torch.inf, tree.tokens.gather(1, child), sampled)


def _draft_draw(evidence: Evidence, rule: AcceptanceRule, gate: Tensor) -> Tensor:
    """``[B, N]``: the draft's draw where the gate is open and the guards let it pass.

    Where they do not, the target's own draw stands in, so the law of the emitted token is
    ``q`` on what is allowed plus ``q``'s forbidden mass times ``p``. Under the support guard alone
    its total variation from ``p`` is no larger than ``q``'s; a floor (``min_ratio > 0``) moves mass
    to the likelier tokens, which can add to it.
    """
    if evidence.drawn is None:
        raise ValueError('selection="sample" needs a draw from the draft at every node')
    nodes = torch.arange(evidence.tree.size, device=gate.device).expand_as(gate)
    gate = gate & (evidence.tree.draft_rows >= 0)  # elsewhere there is no draft to draw from
    allowed = rule.admits(evidence, nodes, evidence.drawn)
    allowed = allowed & evidence.supported(nodes, evidence.drawn)
    return torch.where(gate & allowed, evidence.drawn, evidence.sampled)


def _pick(values: Tensor, nodes: Tensor, tokens: Tensor) -> Tensor:
    """``values[b, nodes[b, i], tokens[b, i]]`` for every ``i``; ``values`` is ``[B, N, V]``."""
    return values.flatten(1).gather(1, nodes * values.shape[-1] + tokens)
