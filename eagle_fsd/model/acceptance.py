"""Acceptance rules: which drafted tokens are accepted although the target sampled another token.

:class:`FuzzyRule` is FSD's. The others are rules from the literature behind the same interface, so
that they can be compared on equal terms. With ``p`` and ``q`` the target's and the draft's
distributions at a node, ``x`` a child's token and ``s`` the target's sample, the child is accepted
if ``x = s`` or if

===========================  ====================================================================
:class:`ExactRule`           (never; EAGLE-2)
:class:`FuzzyRule`           ``Div(p, q) < T`` (and ``p(x) >= r max p``)
:class:`TypicalRule`         ``p(x) > min(epsilon, delta exp(-H(p)))`` (Medusa)
:class:`TargetRule`          ``p(x) >= single``, or ``x`` is sampled from ``p`` raised by
                             ``1 / acc`` (SGLang)
:class:`TopGapRule`          ``x`` among the ``top`` likeliest and ``p(x) >= max p - gap``
                             (TensorRT-LLM)
:class:`BudgetRule`          ``x`` is sampled from ``p`` raised by a KL budget (Cactus)
:class:`DeferredRule`        ``H(p) >= entropy log V`` and the next tokens agree for a window
                             (FLy)
===========================  ====================================================================

Rules that sample raise the probabilities of drafted tokens and reuse the random number behind
``s``, so a rule that raises nothing accepts only ``s``. At temperature 0 they accept a token if its
raised probability reaches ``max p``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_fsd.model.config import AcceptanceConfig
from eagle_fsd.model.divergence import DIVERGENCES, on_draft_vocabulary
from eagle_fsd.model.verify import AcceptanceRule, VerificationInputs, pick


def _entropy(log_probs: Tensor) -> Tensor:
    """Entropy of ``[B, N, V]`` log-probabilities: ``[B, N]`` nats."""
    return -(log_probs.exp() * log_probs.clamp_min(torch.finfo(log_probs.dtype).min)).sum(-1)


@dataclass(frozen=True)
class ExactRule(AcceptanceRule):
    """Relax nothing: EAGLE-2's lossless verification."""

    def gate(self, inputs: VerificationInputs) -> Tensor:
        return torch.zeros_like(inputs.tree.tokens, dtype=torch.bool)

    def admits(self, inputs: VerificationInputs, nodes: Tensor, tokens: Tensor) -> Tensor:
        return torch.zeros_like(nodes, dtype=torch.bool)


@dataclass(frozen=True)
class FuzzyRule(AcceptanceRule):
    """FSD (arXiv 2502.20704): relax tokens where the two distributions nearly agree.

    Attributes:
        threshold: ``T``; the gate is open where the divergence is below it.
        divergence: A key of :data:`~eagle_fsd.model.divergence.DIVERGENCES`.
        min_ratio: The floor ``r``: a token also needs ``p(x) >= r * max p``. 0 is the paper's rule.
        divergence_on: Distributions to compare, ``"raw"`` or ``"warped"``.
    """

    threshold: float
    divergence: str = "js"
    min_ratio: float = 0.0
    divergence_on: str = "raw"

    @property
    def needs_warped_draft(self) -> bool:
        return self.divergence_on == "warped"

    def divergences(self, inputs: VerificationInputs) -> Tensor:
        """Compute the divergence at every node.

        Args:
            inputs: The tree and both models' distributions on it.

        Returns:
            ``[B, N]``; ``inf`` at leaves and at nodes that were not expanded.

        Raises:
            ValueError: The rule compares warped distributions, but the inputs lack the draft's.
        """
        tree = inputs.tree
        if not tree.draft_log_probs.shape[1]:
            return torch.full_like(tree.tokens, torch.inf, dtype=torch.float32)
        target, draft = inputs.raw_log_probs, tree.draft_log_probs
        if self.divergence_on == "warped":
            if inputs.warped_draft_log_probs is None:
                raise ValueError('divergence_on="warped" needs the warped draft distributions')
            target, draft = inputs.warped_log_probs, inputs.warped_draft_log_probs
        # Select whole rows: an elementwise gather costs several times as much.
        row = torch.arange(draft.shape[0], device=draft.device)[:, None] * draft.shape[1]
        index = (tree.draft_rows.clamp_min(0) + row).flatten()
        draft = draft.flatten(0, 1).index_select(0, index).view(*target.shape[:2], -1)
        if tree.token_ids is not None:
            target, draft = on_draft_vocabulary(target, draft, tree.token_ids)
        value = DIVERGENCES[self.divergence](target, draft)
        known = (tree.draft_rows >= 0) & tree.has_children()
        return torch.where(known, value, torch.inf)

    def gate(self, inputs: VerificationInputs) -> Tensor:
        return self.divergences(inputs) < self.threshold

    def admits(self, inputs: VerificationInputs, nodes: Tensor, tokens: Tensor) -> Tensor:
        if self.min_ratio == 0.0:
            return torch.ones_like(nodes, dtype=torch.bool)
        floor = inputs.peak.gather(1, nodes) + math.log(self.min_ratio)
        return inputs.log_prob(nodes, tokens) >= floor


@dataclass(frozen=True)
class TypicalRule(AcceptanceRule):
    """Medusa's typical acceptance (arXiv 2401.10774, section 3.3.1).

    A token is accepted where ``p(x) > min(epsilon, delta * exp(-H(p)))``, with ``p`` the
    distribution that is sampled from. The defaults are Medusa's.

    Attributes:
        epsilon: Probability above which a token is always accepted.
        delta: Factor of the entropy-dependent bound.
    """

    epsilon: float = 0.3
    delta: float = 0.09

    def admits(self, inputs: VerificationInputs, nodes: Tensor, tokens: Tensor) -> Tensor:
        log_probs = inputs.warped_log_probs
        entropy = _entropy(log_probs)
        bound = (math.log(self.delta) - entropy).clamp_max(math.log(self.epsilon))  # [B, N]
        return pick(log_probs, nodes, tokens) > bound.gather(1, nodes)


@dataclass(frozen=True)
class TopGapRule(AcceptanceRule):
    """Relaxed acceptance as in TensorRT-LLM (``relaxed_topk``, ``relaxed_delta``).

    Attributes:
        top: Number of the target's most likely tokens that may be accepted.
        gap: Maximum difference between the largest probability and the token's.
    """

    top: int = 10
    gap: float = 0.6

    def admits(self, inputs: VerificationInputs, nodes: Tensor, tokens: Tensor) -> Tensor:
        log_probs = inputs.log_probs
        least = log_probs.topk(min(self.top, log_probs.shape[-1]), dim=-1).values[..., -1]
        log_prob = inputs.log_prob(nodes, tokens)
        floor = inputs.peak.exp() - self.gap
        return (log_prob >= least.gather(1, nodes)) & (log_prob.exp() >= floor.gather(1, nodes))


@dataclass(frozen=True)
class DrawnRule(AcceptanceRule, ABC):
    """Raise the probability of each drafted token and resample with the same random number.

    Intervals as long as the probabilities of a node's children are laid end to end, from 0. The
    random number ``u`` behind the target's sample is uniform in the sample's interval if the sample
    was drafted, and between the last interval and 1 otherwise. The same is done with the raised
    probabilities, and the child whose interval contains ``u`` is accepted. If nothing is raised,
    that is the sample itself.
    """

    @property
    def needs_uniform(self) -> bool:
        return True

    @abstractmethod
    def raised(self, probs: Tensor) -> Tensor:
        """Raise probabilities.

        Args:
            probs: Probabilities of any shape.

        Returns:
            Values of at least ``probs`` and at most 1.
        """

    def settle(self, inputs: VerificationInputs, exact: Tensor, accepted: Tensor) -> Tensor:
        tree = inputs.tree
        probs = pick(inputs.warped_log_probs, tree.parents, tree.tokens).exp()  # [B, N]
        raised = self.raised(probs)
        if inputs.uniform is None:  # greedy
            stands = raised >= inputs.peak.exp().gather(1, tree.parents)
            return accepted & (exact | stands)
        index = torch.arange(tree.size, device=probs.device)
        siblings = (tree.parents[:, :, None] == tree.parents[:, None, :]) & (index > 0)
        up_to = siblings & (index <= index[:, None])  # [B, i, j]: j is i or a sibling before it

        def end(parts: Tensor) -> Tensor:
            """Return the upper end of each child's interval."""
            return torch.where(up_to, parts[:, None, :], 0.0).sum(-1)

        is_child = (tree.parents[:, None, :] == index[:, None]) & (index > 0)  # [B, node, child]
        # Start and length of the sample's interval: an exact child's, or the rest up to 1.
        total = torch.where(is_child, probs[:, None, :], 0.0).sum(-1)
        chosen = is_child & exact[:, None, :]
        found = chosen.any(-1)
        begins = torch.where(chosen, (end(probs) - probs)[:, None, :], 0.0).sum(-1)
        length = torch.where(chosen, probs[:, None, :], 0.0).sum(-1)
        begins = torch.where(found, begins, total)
        length = torch.where(found, length, 1.0 - total)
        u = (begins + inputs.uniform * length).gather(1, tree.parents)  # of each edge's parent
        reached = end(raised)
        return accepted & (exact | ((u <= reached) & (u > reached - raised)))


@dataclass(frozen=True)
class TargetRule(DrawnRule):
    """SGLang's thresholds on the target's probability.

    Attributes:
        single: A token of at least this probability is always accepted; 1 is off.
        acc: Probabilities are divided by this; 1 is off.
    """

    single: float = 1.0
    acc: float = 1.0

    def raised(self, probs: Tensor) -> Tensor:
        return (probs / self.acc).clamp_max(1.0)

    def settle(self, inputs: VerificationInputs, exact: Tensor, accepted: Tensor) -> Tensor:
        tree = inputs.tree
        probs = pick(inputs.warped_log_probs, tree.parents, tree.tokens).exp()
        return super().settle(inputs, exact, accepted) | (accepted & (probs >= self.single))


@dataclass(frozen=True)
class BudgetRule(DrawnRule):
    """Cactus (arXiv 2604.04987): raise a probability as far as a KL budget allows.

    To second order the raised probability is ``p + sqrt(2 d p (1 - p))``.

    Attributes:
        budget: ``d``, in nats per token.
    """

    budget: float = 0.1

    def raised(self, probs: Tensor) -> Tensor:
        return (probs + (2.0 * self.budget * probs * (1.0 - probs)).sqrt()).clamp_max(1.0)


@dataclass(frozen=True)
class DeferredRule(AcceptanceRule):
    """FLy (arXiv 2511.22972): accept a mismatch where the target's entropy is high.

    The next ``window`` drafted tokens must match the target's samples.

    Attributes:
        entropy: The target's entropy must be at least this fraction of its maximum, ``log V``.
        window: Number of tokens after a mismatch that must match. A mismatch with fewer tokens
            below it in the tree is rejected.
    """

    entropy: float = 0.3
    window: int = 6

    def gate(self, inputs: VerificationInputs) -> Tensor:
        least = self.entropy * math.log(inputs.log_probs.shape[-1])
        return _entropy(inputs.log_probs) >= least

    def settle(self, inputs: VerificationInputs, exact: Tensor, accepted: Tensor) -> Tensor:
        tree = inputs.tree
        fuzzy = accepted & ~exact
        fuzzy[:, 0] = False
        # A second mismatch inside the window of one above it is rejected.
        below = tree.depths[:, :, None] - tree.depths[:, None, :]  # [B, i, j]: levels from j to i
        near = tree.ancestors & (below > 0) & (below <= self.window) & fuzzy[:, None, :]
        # At most one child is exact, so each node has a single run of exact edges below it.
        run = torch.zeros_like(tree.depths)
        follows = exact & accepted
        follows[:, 0] = False
        for _ in range(min(self.window, tree.max_depth)):
            longer = torch.where(follows, run + 1, 0)
            run = torch.zeros_like(run).scatter_reduce(1, tree.parents, longer, "amax")
        return accepted & ~(fuzzy & (near.any(-1) | (run < self.window)))


def rule_for(acceptance: AcceptanceConfig) -> AcceptanceRule:
    """Return the rule for acceptance options: FSD's, or exact verification if ``T`` is 0.

    Args:
        acceptance: The acceptance options.
    """
    if acceptance.threshold == 0.0:
        return ExactRule()
    return FuzzyRule(
        acceptance.threshold,
        acceptance.divergence,
        acceptance.min_ratio,
        acceptance.divergence_on,
    )
