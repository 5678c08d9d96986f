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

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import torch
from torch import Tensor

from eagle_fsd.model.divergence import LOG_FLOOR
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
        uniform: ``[B, N]`` uniform draws, independent of ``sampled``, for rules of the caller's
            that draw; None at temperature 0.
    """

    tree: DraftTree
    raw_log_probs: Tensor
    log_probs: Tensor
    warped_log_probs: Tensor
    warped_draft_log_probs: Tensor | None
    sampled: Tensor
    drawn: Tensor | None = None
    uniform: Tensor | None = None

    @cached_property
    def peak(self) -> Tensor:
        """``[B, N]`` the largest of ``log_probs`` at each node."""
        return self.log_probs.amax(-1)

    def log_prob(self, nodes: Tensor, tokens: Tensor) -> Tensor:
        """``log p`` of each token at each node, both ``[B, ...]`` alike."""
        return pick(self.log_probs, nodes, tokens)

    def supported(self, nodes: Tensor, tokens: Tensor) -> Tensor:
        """Whether processors, top-k and top-p left the token any probability."""
        return pick(self.warped_log_probs, nodes, tokens) > -torch.inf


class AcceptanceRule:
    """Which drafted tokens may stand although the target chose otherwise: the seam for such rules.

    A drafted token is relaxed where :meth:`gate` is open at its parent and :meth:`admits` lets it
    through; :meth:`settle` has the last word, with the whole tree in view. The rules there are, are
    in ``rules.py``; a rule of one's own overrides what it needs.
    """

    def gate(self, evidence: Evidence) -> Tensor:
        """``[B, N]`` bool: the nodes below which tokens may be relaxed at all; here all."""
        return torch.ones_like(evidence.tree.tokens, dtype=torch.bool)

    def admits(self, evidence: Evidence, nodes: Tensor, tokens: Tensor) -> Tensor:
        """Bool like ``nodes``: whether ``tokens`` may follow ``nodes`` where the gate is open."""
        return torch.ones_like(nodes, dtype=torch.bool)

    def settle(self, evidence: Evidence, exact: Tensor, accepted: Tensor) -> Tensor:
        """``[B, N]`` bool: which of the ``accepted`` edges stand; ``exact`` says which are so."""
        return accepted


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
            :class:`~eagle_fsd.model.config.FSDSettings`.

    Raises:
        ValueError: ``selection`` keeps one child a node, and the rule judges whole paths.
    """
    tree = evidence.tree
    if selection != "longest" and type(rule).settle is not AcceptanceRule.settle:
        raise ValueError(f'{type(rule).__name__} judges whole paths: it needs selection="longest"')
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
    accepted = exact | relaxed
    if selection != "longest":
        accepted = tokens == chosen.gather(1, parents)
    if fallback == "stop":
        accepted = accepted & gate.gather(1, parents)
    accepted = rule.settle(evidence, exact, accepted & supported)
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


def pick(values: Tensor, nodes: Tensor, tokens: Tensor) -> Tensor:
    """``values[b, nodes[b, i], tokens[b, i]]`` for every ``i``; ``values`` is ``[B, N, V]``."""
    return values.flatten(1).gather(1, nodes * values.shape[-1] + tokens)
