"""Lossless verification of chains whose tokens were sampled from the draft's distributions.

A drafted token that was chosen deterministically is accepted where the target samples the same
token. For one that was itself sampled, two better rules exist. Both are written as a choice of the
target's sample ``s_i`` at every node ``i``, so that verification need not know about them: follow
``s`` while it is in the tree, then emit it.

With ``p_i`` and ``q_i`` the target's and the draft's distributions at node ``i`` and ``x_i`` the
token drafted there:

*Token by token* (Leviathan et al., arXiv 2211.17192, algorithm 1): ``s_i = x_i`` with probability
``min(1, p_i(x_i) / q_i(x_i))``, else ``s_i`` is a sample from ``max(p_i - q_i, 0)``, normalized. By
itself, ``s_i`` is a sample from ``p_i``.

*As a block* (Sun et al., arXiv 2403.10444, algorithm 2 and equations 3 and 4): with the weights
``w_0 = 1`` and ``w_{i+1} = min(1, w_i p_i(x_i) / q_i(x_i))``, the masses of the residuals
``R_i = sum max(w_i p_i - q_i, 0)``, and the chain's last node ``n``, node ``i`` is a candidate with
probability ``R_i / (R_i + 1 - w_i)`` if ``0 < i < n`` and ``w_n`` if ``i = n``. The path is kept up
to the last candidate, or the root if there is none. At that node, ``s`` is a sample from
``max(w_i p_i - q_i, 0)``, normalized, or from ``p_n``. The expected number of accepted tokens is at
least that of the rule above.

Shape letters: ``B`` rows, ``N`` nodes of the chain, ``V`` vocabulary, ``D`` tokens of the draft's
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_fsd.model.divergence import LOG_FLOOR
from eagle_fsd.model.vocabulary import Distributions, chunks, draw, exp


@dataclass(frozen=True)
class SampledChain:
    """A chain whose tokens were sampled, and both models' distributions on it.

    Attributes:
        target: The target's distributions at the nodes, after the warpers.
        draft: The draft's, likewise; entry ``i`` of their second dimension belongs to node ``i``.
        token_ids: ``[D]`` the target's tokens for the draft's; None if they are the same.
        drafted: ``[B, N - 1]`` the token drafted at each node, as a token of the target.
        uniform: ``[2, B, N]`` float64 in ``[0, 1)``: to accept tokens, and to sample residuals.
    """

    target: Distributions
    draft: Distributions
    token_ids: Tensor | None
    drafted: Tensor
    uniform: Tensor

    def log_ratio(self) -> Tensor:
        """Return ``[B, N - 1]``: ``log p(x) - log q(x)`` of the drafted tokens."""
        nodes = torch.arange(self.drafted.shape[1], device=self.drafted.device)
        nodes = nodes.expand_as(self.drafted)
        log_p = self.target.log_prob(nodes, self.drafted).clamp_min(LOG_FLOOR)
        own = draft_tokens(self.drafted, self.token_ids, self.target.logits.shape[-1])
        return log_p - self.draft.log_prob(nodes, own)

    def residuals(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Sample from ``max(w p - q, 0)`` at every node but the last; return its mass, too.

        All are ``[B, N - 1]``. Where the mass is 0 or NaN, the sample is one from ``p``. Where it
        is 0, verification ends there only if ``w`` is 1 and the distributions are equal up to
        rounding, with a probability of about the rounding error.
        """
        nodes = torch.arange(weight.shape[1], device=weight.device)
        row = torch.arange(len(weight), device=weight.device)[:, None]
        at_target = (nodes + row * self.target.logits.shape[1]).flatten()
        at_draft = (nodes + row * self.draft.logits.shape[1]).flatten()
        weights, points = weight.flatten()[:, None], self.uniform[1, :, :-1].flatten()
        tokens, masses = [], []
        for part in chunks(len(at_target), self.target.logits):
            p = exp(self.target.rows(at_target[part]))
            q = exp(self.draft.rows(at_draft[part]))
            residual = weights[part] * p
            if self.token_ids is None:
                residual -= q
            else:
                residual.index_add_(-1, self.token_ids, q, alpha=-1)
            mass = residual.clamp_min_(0.0).sum(-1)
            residual = torch.where((mass > 0.0)[:, None], residual, p)
            tokens.append(draw(residual, points[part])[0])
            masses.append(mass)
        return torch.cat(tokens).view_as(weight), torch.cat(masses).view_as(weight)


def draft_tokens(tokens: Tensor, token_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Return the draft's index of each of the target's tokens ``[B, N]``; 0 if it has none."""
    if token_ids is None:
        return tokens
    numbers = torch.arange(len(token_ids), device=token_ids.device)
    return numbers.new_zeros(vocab_size).scatter_(0, token_ids, numbers)[tokens]


def verify_tokens(chain: SampledChain) -> Tensor:
    """Choose the target's sample at every node but the last, token by token: ``[B, N - 1]``."""
    ratio = chain.log_ratio().exp()
    token, _ = chain.residuals(torch.ones_like(ratio))
    return torch.where(chain.uniform[0, :, :-1] < ratio, chain.drafted, token)


def verify_block(chain: SampledChain) -> Tensor:
    """Choose the target's sample at every node but the last, for the chain as a whole.

    Samples below the node where the path ends have no meaning. This requires that only tokens equal
    to the samples are accepted.
    """
    # With sums C_i of log-ratios from C_0 = 0 on, log w_i = C_i - max(C_0, ..., C_i).
    total = torch.nn.functional.pad(chain.log_ratio().cumsum(1), (1, 0))
    weight = (total - total.cummax(1).values).exp()  # [B, N]
    token, mass = chain.residuals(weight[:, :-1])
    chance = mass / (mass + 1.0 - weight[:, :-1]).clamp_min(torch.finfo(mass.dtype).tiny)
    candidate = chain.uniform[0] < torch.cat([chance, weight[:, -1:]], 1)
    node = torch.arange(candidate.shape[1], device=candidate.device)
    last = torch.where(candidate, node, 0).amax(1, keepdim=True)  # [B, 1]
    return torch.where(node[:-1] < last, chain.drafted, token)
