"""Rules that accept a drafted token at random, with a probability other than the target's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_fsd.model.residual import draft_tokens
from eagle_fsd.model.verify import AcceptanceRule, VerificationInputs
from eagle_fsd.model.vocabulary import exp


@dataclass(frozen=True)
class DrawnRule(AcceptanceRule, ABC):
    """Raise the probability of each drafted token and resample with the same random number.

    Intervals as long as the probabilities of a node's children are laid end to end, from 0. The
    random number ``u`` behind the target's sample is uniform in the sample's interval if the sample
    was drafted, and between the last interval and 1 otherwise. The same is done with the raised
    probabilities, and the child whose interval contains ``u`` is accepted, besides the sample. If
    nothing is raised, that is the sample itself. A token ``x`` that was sampled from ``q`` is
    instead accepted with the probability ``min(1, raised / q(x))``.
    """

    needs_uniform = True

    @abstractmethod
    def raised(self, probs: Tensor) -> Tensor:
        """Raise probabilities of any shape, to at most 1."""

    def settle(self, inputs: VerificationInputs, exact: Tensor, accepted: Tensor) -> Tensor:
        tree = inputs.tree
        probs = inputs.warped.log_prob(tree.parents, tree.tokens).exp()  # [B, N]
        raised = self.raised(probs)
        if inputs.uniform is None:  # greedy
            stands = raised >= inputs.peak.exp().gather(1, tree.parents)
            return accepted & (exact | stands)
        if tree.sampled:  # the sample is the drafted token with the probability min(1, p / q)
            assert inputs.warped_draft is not None
            rows = tree.draft_rows.gather(1, tree.parents).clamp_min(0)
            own = draft_tokens(tree.tokens, tree.token_ids, inputs.warped.logits.shape[-1])
            drafted = inputs.warped_draft.log_prob(rows, own).exp()
            kept, wanted = ((law / drafted).clamp_max(1.0) for law in (probs, raised))
            u = inputs.uniform.gather(1, tree.parents)
            return accepted & (exact | (u * (1.0 - kept) < wanted - kept))
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
        probs = inputs.warped.log_prob(tree.parents, tree.tokens).exp()
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
class MixtureRule(AcceptanceRule):
    """Verify against ``w p + (1 - w) q`` (static ensemble, arXiv 2604.07622).

    Where the draft's distribution is known, the token that would be the target's sample is drawn
    from the mixture instead: with probability ``1 - w`` it is the draft's own draw, unless
    processors or warpers mask that, else the target's sample. It is followed while it is in the
    tree, then emitted. On a chain sampled from the draft, a token that is not masked is accepted
    with probability ``min(1, 1 - w + w p(x) / q(x))``, as with ``assistant_ensemble_weight`` in
    transformers. At temperature 0 the mixture's likeliest unmasked token replaces the target's.

    Attributes:
        weight: ``w``, the target's weight; 1 is lossless.
    """

    weight: float = 0.8

    needs_uniform = True
    needs_drawn = True

    def admits(self, inputs: VerificationInputs, nodes: Tensor, tokens: Tensor) -> Tensor:
        return torch.zeros_like(nodes, dtype=torch.bool)

    def choose(self, inputs: VerificationInputs) -> Tensor:
        tree, sampled = inputs.tree, inputs.sampled
        if not tree.draft_log_probs.shape[1]:
            return sampled
        known = tree.draft_rows >= 0
        nodes = torch.arange(tree.size, device=sampled.device).expand_as(sampled)
        if inputs.uniform is None:  # greedy
            tokens: list[Tensor] = []
            rest = sampled.flatten()
            for log_p, log_q in inputs.pairs(nodes, warped=True):
                own, rest = rest[: len(log_p), None], rest[len(log_p) :]
                law, draft = self.weight * exp(log_p), (1.0 - self.weight) * exp(log_q)
                if tree.token_ids is None:
                    law += draft
                else:
                    law.index_add_(-1, tree.token_ids, draft)
                best, token = law.masked_fill_(log_p == -torch.inf, 0.0).max(-1, keepdim=True)
                tokens.append(torch.where(best > law.gather(-1, own), token, own))
            return torch.where(known, torch.cat(tokens).view_as(sampled), sampled)
        assert inputs.drawn is not None
        known = known & inputs.supported(nodes, inputs.drawn)
        return torch.where(known & (inputs.uniform < 1.0 - self.weight), inputs.drawn, sampled)
