"""Exact acceptance, and rules that compare distributions or probabilities with thresholds.

Two rules also depend on the rest of the tree: :class:`DeferredRule` on the mismatches above and the
matches below a token, :class:`RegretRule` on the depth of the tree below it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_fsd.model.config import DIVERGENCE_ALIASES
from eagle_fsd.model.divergence import DIVERGENCES, on_draft_vocabulary
from eagle_fsd.model.verify import AcceptanceRule, VerificationInputs
from eagle_fsd.model.vocabulary import arg_max, exp, top_k


def entropy(log_probs: Tensor) -> Tensor:
    """Compute the entropy of log-probabilities ``[..., V]``: ``[...]`` nats."""
    return -(exp(log_probs) * log_probs.clamp_min(torch.finfo(log_probs.dtype).min)).sum(-1)


def divergences(inputs: VerificationInputs, name: str, warped: bool = False) -> Tensor:
    """Compute the divergence at every node: ``[B, N]``, ``inf`` at leaves and nodes not expanded.

    ``name`` is a key of :data:`~eagle_fsd.model.divergence.DIVERGENCES` or of
    :data:`~eagle_fsd.model.config.DIVERGENCE_ALIASES`. With ``warped``, the distributions after the
    warpers are compared; raises ``ValueError`` if there are none of the draft.
    """
    tree = inputs.tree
    expanded = tree.draft_log_probs.shape[1]
    result = torch.full_like(tree.tokens, torch.inf, dtype=torch.float32)
    if not expanded or tree.size == 1:
        return result
    known = (tree.draft_rows >= 0) & tree.has_children()
    nodes = known.long().argsort(dim=1, descending=True, stable=True)
    if known.device.type == "cpu" and not torch.compiler.is_compiling():
        count = int(known.sum(1).max())  # the host can read it without waiting
    else:
        # Every node below the root is one of at most `max_depth` on the path to a leaf.
        least_leaves = -(-(tree.size - 1) // tree.max_depth)
        count = min(expanded, tree.size - least_leaves)
    nodes = nodes[:, :count]
    name, values, token_ids = DIVERGENCE_ALIASES.get(name, name), [], tree.token_ids
    for log_p, log_q in inputs.pairs(nodes, warped):
        if token_ids is not None and name.startswith(("top_k_", "top_p_")):  # buckets of all tokens
            log_q = torch.full_like(log_p, -torch.inf).index_copy_(-1, token_ids, log_q)
        elif token_ids is not None:
            log_p, log_q = on_draft_vocabulary(log_p, log_q, token_ids)
        values.append(DIVERGENCES[name](log_p, log_q))
    result.scatter_(1, nodes, torch.cat(values).view_as(nodes))
    return torch.where(known, result, torch.inf)


@dataclass(frozen=True)
class ExactRule(AcceptanceRule):
    """Relax nothing: EAGLE-2's lossless verification, whatever the fallback."""

    def admits(self, inputs: VerificationInputs, nodes: Tensor, tokens: Tensor) -> Tensor:
        return torch.zeros_like(nodes, dtype=torch.bool)


@dataclass(frozen=True)
class FuzzyRule(AcceptanceRule):
    """FSD (arXiv 2502.20704): relax tokens where the two distributions nearly agree.

    Attributes:
        threshold: ``T``; the gate is open where the divergence is below it.
        divergence: A name as in :func:`divergences`.
        min_ratio: The floor ``r``: a token also needs ``p(x) >= r * max p``. 0 is the paper's rule.
        divergence_on: Distributions to compare, ``"raw"`` or ``"warped"``.
    """

    threshold: float
    divergence: str = "js"
    min_ratio: float = 0.0
    divergence_on: str = "raw"

    def __post_init__(self) -> None:
        if DIVERGENCE_ALIASES.get(self.divergence, self.divergence) not in DIVERGENCES:
            names = ", ".join(DIVERGENCES)
            raise ValueError(f"divergence must be one of {names}; got {self.divergence!r}")
        if self.divergence_on not in ("raw", "warped"):
            raise ValueError(f"divergence_on must be raw or warped; got {self.divergence_on!r}")

    @property
    def needs_warped_draft(self) -> bool:
        return self.divergence_on == "warped"

    def divergences(self, inputs: VerificationInputs) -> Tensor:
        """Compute the divergence at every node; see :func:`divergences`."""
        return divergences(inputs, self.divergence, self.divergence_on == "warped")

    def gate(self, inputs: VerificationInputs) -> Tensor:
        return self.divergences(inputs) < self.threshold

    def admits(self, inputs: VerificationInputs, nodes: Tensor, tokens: Tensor) -> Tensor:
        return inputs.above_floor(nodes, tokens, self.min_ratio)


@dataclass(frozen=True)
class TypicalRule(AcceptanceRule):
    """Medusa's typical acceptance (arXiv 2401.10774, section 3.3.1).

    A token is accepted where ``p(x) > min(epsilon, delta * exp(-H(p)))``, ``p`` after the warpers.
    The defaults are Medusa's in ``evaluate_posterior``; its ``medusa_generate`` exchanges the two.

    Attributes:
        epsilon: Probability above which a token is always accepted.
        delta: Factor of the entropy-dependent bound.
    """

    epsilon: float = 0.3
    delta: float = 0.09

    def admits(self, inputs: VerificationInputs, nodes: Tensor, tokens: Tensor) -> Tensor:
        bound = math.log(self.delta) - inputs.warped.map_rows(entropy)  # [B, N]
        bound = bound.clamp_max(math.log(self.epsilon))
        return inputs.warped.log_prob(nodes, tokens) > bound.gather(1, nodes)


@dataclass(frozen=True)
class TopKRule(AcceptanceRule):
    """Accept the target's most likely tokens, unless they are much less likely than the best.

    ``gap`` is TensorRT-LLM's relaxed acceptance (``relaxed_topk``, ``relaxed_delta``), ``ratio``
    the one proposed for vLLM (pull requests 22238 and 45229, with ``top = 3`` and ``ratio = 0.5``)
    and, as ``exp(-accept_tolerance)``, the one that the speculators layout declares. All three are
    meant for greedy decoding.

    Attributes:
        top: Number of the target's most likely tokens that may be accepted.
        gap: Maximum difference between the largest probability and the token's; 1 is off.
        ratio: The token's least probability as a fraction of the largest; 0 is off.
    """

    top: int = 10
    gap: float = 1.0
    ratio: float = 0.0

    def admits(self, inputs: VerificationInputs, nodes: Tensor, tokens: Tensor) -> Tensor:
        logits = inputs.processed.logits
        last = top_k(logits, min(self.top, logits.shape[-1]))[1][..., -1]  # [B, N]
        least = inputs.log_prob(nodes, last.gather(1, nodes))
        floor = inputs.peak.gather(1, nodes).exp() - self.gap
        log_prob = inputs.log_prob(nodes, tokens)
        enough = (log_prob >= least) & (log_prob.exp() >= floor)
        return enough & inputs.above_floor(nodes, tokens, self.ratio)


@dataclass(frozen=True)
class MarginRule(AcceptanceRule):
    """MARS (arXiv 2601.15498): accept the runner-up where its logit is close to the best.

    The gate is open where the second largest logit, divided by the largest, exceeds ``ratio``. The
    ratio changes if a constant is added to all logits, which leaves the distribution as it is, so
    a value for one model means something else for another. Where the largest logit is not positive,
    the ratio has no meaning and the gate stays closed. (MARS relaxes sampling only; here the rule
    also applies to greedy decoding.)

    Attributes:
        ratio: Least ratio of the two logits; 1 is lossless. 0.9 is the authors' value.
    """

    ratio: float = 0.9

    def gate(self, inputs: VerificationInputs) -> Tensor:
        best, second = top_k(inputs.processed.logits, 2)[0].unbind(-1)
        return (best > 0.0) & (second > self.ratio * best)

    def admits(self, inputs: VerificationInputs, nodes: Tensor, tokens: Tensor) -> Tensor:
        logits = inputs.processed.logits
        second = top_k(logits, 2)[0][..., 1].gather(1, nodes)
        return logits.flatten(1).gather(1, nodes * logits.shape[-1] + tokens) >= second


@dataclass(frozen=True)
class CascadeRule(AcceptanceRule):
    """Speculative cascades (arXiv 2405.19261): follow the draft where it is confident enough.

    The gate is open where ``max q >= max p - alpha TV(p, q)``, the complement of the paper's
    optimal deferral rule with estimated probabilities. There the draft's own token is accepted: on
    a chain sampled from the draft the drafted one, on a tree the draft's most likely one. (A
    confident draft says nothing for its other children.)

    Attributes:
        alpha: Weight of the total variation distance; larger values accept more, ``-inf`` nothing.
    """

    alpha: float = 0.1

    def gate(self, inputs: VerificationInputs) -> Tensor:
        tree, distance = inputs.tree, divergences(inputs, "tv")
        if not tree.draft_log_probs.shape[1]:
            return torch.zeros_like(tree.tokens, dtype=torch.bool)
        draft = tree.draft_log_probs.amax(-1).exp().gather(1, tree.draft_rows.clamp_min(0))
        target = inputs.raw.max_log_prob.exp()
        return distance.isfinite() & (draft >= target - self.alpha * distance)

    def admits(self, inputs: VerificationInputs, nodes: Tensor, tokens: Tensor) -> Tensor:
        tree = inputs.tree
        if tree.sampled or not tree.draft_log_probs.shape[1]:
            return torch.ones_like(nodes, dtype=torch.bool)
        best = arg_max(tree.draft_log_probs)
        best = best if tree.token_ids is None else tree.token_ids[best]
        return tokens == best.gather(1, tree.draft_rows.clamp_min(0)).gather(1, nodes)


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
        least = self.entropy * math.log(inputs.processed.logits.shape[-1])
        return inputs.processed.map_rows(entropy) >= least

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


@dataclass(frozen=True)
class RegretRule(AcceptanceRule):
    """The local gate of approximate speculative decoding (arXiv 2608.03447).

    The regret of a token, ``max z - z(x)`` over the target's logits, must be below ``per_position``
    nats for each position that accepting it can save: those of the longest path in the tree that
    begins with the token. :class:`~eagle_fsd.model.acceptance.LimitedRule` adds the budget of the
    whole answer.

    Attributes:
        per_position: Largest regret per position, in nats; 0 is lossless.
    """

    per_position: float = 0.5

    def settle(self, inputs: VerificationInputs, exact: Tensor, accepted: Tensor) -> Tensor:
        tree = inputs.tree
        lowest = torch.where(tree.ancestors, tree.depths[:, :, None], 0).amax(1)  # below each node
        positions = lowest - tree.depths + 1
        return accepted & (exact | (inputs.regret < self.per_position * positions))
