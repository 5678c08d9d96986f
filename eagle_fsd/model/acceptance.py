"""Acceptance rules: which drafted tokens may stand although the target chose otherwise.

FSD's own is :class:`FuzzyRule`. The others are the literature's, behind the same seam, so that they
can be compared on equal terms. With ``p`` the target's distribution at a node, ``x`` a child's
token and ``s`` the target's own choice, a child stands when ``x = s`` or

===========================  ====================================================================
:class:`ExactRule`           never otherwise (EAGLE-2)
:class:`FuzzyRule`           ``Div(p, q) < T`` (and ``p(x) >= r max p``)
:class:`TypicalRule`         ``p(x) > min(epsilon, delta exp(-H(p)))`` (Medusa)
:class:`TargetRule`          ``p(x) >= single``, or ``x`` is drawn from ``p`` raised by ``1 / acc``
                             (SGLang)
:class:`TopGapRule`          ``x`` among the ``top`` likeliest and ``p(x) >= max p - gap``
                             (TensorRT-LLM)
:class:`BudgetRule`          ``x`` is drawn from ``p`` raised by a KL budget (Cactus)
:class:`DeferredRule`        ``H(p) >= entropy log V`` and what follows agrees for a window
                             (FLy)
===========================  ====================================================================

Rules about "drawing" raise the probability of a drafted token. When sampling, the draw is the one
that gave ``s``, so a rule that raises nothing changes nothing. At temperature 0 the token stands
when its raised probability is the largest.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_fsd.model.config import FSDSettings
from eagle_fsd.model.divergence import DIVERGENCES
from eagle_fsd.model.verify import AcceptanceRule, Evidence, pick


def _entropy(log_probs: Tensor) -> Tensor:
    """``[B, N, V]`` to ``[B, N]`` nats; what has no probability adds nothing."""
    return -(log_probs.exp() * log_probs.clamp_min(torch.finfo(log_probs.dtype).min)).sum(-1)


@dataclass(frozen=True)
class ExactRule(AcceptanceRule):
    """Nothing is relaxed: EAGLE-2's lossless verification."""

    def gate(self, evidence: Evidence) -> Tensor:
        return torch.zeros_like(evidence.tree.tokens, dtype=torch.bool)

    def admits(self, evidence: Evidence, nodes: Tensor, tokens: Tensor) -> Tensor:
        return torch.zeros_like(nodes, dtype=torch.bool)


@dataclass(frozen=True)
class FuzzyRule(AcceptanceRule):
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
class TypicalRule(AcceptanceRule):
    """Medusa's typical acceptance (arXiv 2401.10774, section 3.3.1).

    A token stands where ``p(x) > min(epsilon, delta * exp(-H(p)))``, ``p`` being the distribution
    sampled from. The defaults are Medusa's.
    """

    epsilon: float = 0.3
    delta: float = 0.09

    def admits(self, evidence: Evidence, nodes: Tensor, tokens: Tensor) -> Tensor:
        log_probs = evidence.warped_log_probs
        entropy = _entropy(log_probs)
        bound = (math.log(self.delta) - entropy).clamp_max(math.log(self.epsilon))  # [B, N]
        return pick(log_probs, nodes, tokens) > bound.gather(1, nodes)


@dataclass(frozen=True)
class TopGapRule(AcceptanceRule):
    """Relaxed acceptance of TensorRT-LLM (``relaxed_topk``, ``relaxed_delta``): among the target's
    ``top`` likeliest tokens, and no less probable than the likeliest by more than ``gap``."""

    top: int = 10
    gap: float = 0.6

    def admits(self, evidence: Evidence, nodes: Tensor, tokens: Tensor) -> Tensor:
        log_probs = evidence.log_probs
        least = log_probs.topk(min(self.top, log_probs.shape[-1]), dim=-1).values[..., -1]
        log_prob = evidence.log_prob(nodes, tokens)
        floor = evidence.peak.exp() - self.gap
        return (log_prob >= least.gather(1, nodes)) & (log_prob.exp() >= floor.gather(1, nodes))


@dataclass(frozen=True)
class DrawnRule(AcceptanceRule, ABC):
    """Raises the probability of each drafted token and draws anew, with the luck that gave ``s``.

    The number ``u`` behind the target's choice is taken to lie where the choice says: in the
    choice's part of the unit interval if it was drafted, the children of a node laid end to end by
    their probabilities, and else beyond them all. The first child whose raised part reaches ``u``
    stands. Raising nothing, that is the choice itself.
    """

    @abstractmethod
    def raised(self, probs: Tensor) -> Tensor:
        """``p(x)`` to its raised value, at most 1."""

    def settle(self, evidence: Evidence, exact: Tensor, accepted: Tensor) -> Tensor:
        tree = evidence.tree
        greedy = evidence.uniform is None
        probs = pick(evidence.warped_log_probs, tree.parents, tree.tokens).exp()  # [B, N]
        raised = self.raised(probs)
        if greedy:
            stands = raised >= evidence.peak.exp().gather(1, tree.parents)
            return accepted & (exact | stands)
        index = torch.arange(tree.size, device=probs.device)
        siblings = (tree.parents[:, :, None] == tree.parents[:, None, :]) & (index > 0)
        up_to = siblings & (index <= index[:, None])  # [B, i, j]: j is i or a sibling before it

        def end(parts: Tensor) -> Tensor:
            """Where each child's part ends when the parts of siblings are laid end to end."""
            return torch.where(up_to, parts[:, None, :], 0.0).sum(-1)

        is_child = (tree.parents[:, None, :] == index[:, None]) & (index > 0)  # [B, node, child]
        # Where the choice's part begins and how long it is: an exact child's, or what is left.
        total = torch.where(is_child, probs[:, None, :], 0.0).sum(-1)
        chosen = is_child & exact[:, None, :]
        found = chosen.any(-1)
        begins = torch.where(chosen, (end(probs) - probs)[:, None, :], 0.0).sum(-1)
        length = torch.where(chosen, probs[:, None, :], 0.0).sum(-1)
        begins = torch.where(found, begins, total)
        length = torch.where(found, length, 1.0 - total)
        u = (begins + evidence.uniform * length).gather(1, tree.parents)  # of each edge's parent
        reached = end(raised)
        return accepted & (exact | ((u <= reached) & (u > reached - raised)))


@dataclass(frozen=True)
class TargetRule(DrawnRule):
    """SGLang's thresholds on the target's probability.

    Attributes:
        single: A token at least this probable always stands; 1 is off.
        acc: Probabilities are raised by ``1 / acc``; 1 is off.
    """

    single: float = 1.0
    acc: float = 1.0

    def raised(self, probs: Tensor) -> Tensor:
        return (probs / self.acc).clamp_max(1.0)

    def settle(self, evidence: Evidence, exact: Tensor, accepted: Tensor) -> Tensor:
        tree = evidence.tree
        probs = pick(evidence.warped_log_probs, tree.parents, tree.tokens).exp()
        return super().settle(evidence, exact, accepted) | (accepted & (probs >= self.single))


@dataclass(frozen=True)
class BudgetRule(DrawnRule):
    """Cactus (arXiv 2604.04987): the most a probability can rise within a KL budget.

    To second order that is ``p + sqrt(2 d p (1 - p))``.

    Attributes:
        budget: ``d``, in nats a step.
    """

    budget: float = 0.1

    def raised(self, probs: Tensor) -> Tensor:
        return (probs + (2.0 * self.budget * probs * (1.0 - probs)).sqrt()).clamp_max(1.0)


@dataclass(frozen=True)
class DeferredRule(AcceptanceRule):
    """FLy (arXiv 2511.22972): a mismatch stands where the target is undecided, and only if the
    draft's next ``window`` tokens agree with the target's choices.

    Attributes:
        entropy: The target's entropy must be at least this share of its largest, ``log V``.
        window: How many tokens after a mismatch must match. A mismatch with fewer tokens below it
            in the tree cannot be judged and does not stand.
    """

    entropy: float = 0.3
    window: int = 6

    def gate(self, evidence: Evidence) -> Tensor:
        least = self.entropy * math.log(evidence.log_probs.shape[-1])
        return _entropy(evidence.log_probs) >= least

    def settle(self, evidence: Evidence, exact: Tensor, accepted: Tensor) -> Tensor:
        tree = evidence.tree
        fuzzy = accepted & ~exact
        fuzzy[:, 0] = False
        # A second mismatch inside the window of a first one above it does not stand.
        below = tree.depths[:, :, None] - tree.depths[:, None, :]  # [B, i, j]: how far j is above i
        near = tree.ancestors & (below > 0) & (below <= self.window) & fuzzy[:, None, :]
        # At most one child is exact, so below each node there is one run of exact edges.
        run = torch.zeros_like(tree.depths)
        follows = exact & accepted
        follows[:, 0] = False
        for _ in range(min(self.window, tree.max_depth)):
            longer = torch.where(follows, run + 1, 0)
            run = torch.zeros_like(run).scatter_reduce(1, tree.parents, longer, "amax")
        return accepted & ~(fuzzy & (near.any(-1) | (run < self.window)))


def rule_for(settings: FSDSettings) -> AcceptanceRule:
    """The rule that ``settings`` ask for; exact where no divergence can be below the threshold."""
    if settings.threshold == 0.0:
        return ExactRule()
    return FuzzyRule(
        settings.threshold, settings.divergence, settings.min_ratio, settings.divergence_on
    )
