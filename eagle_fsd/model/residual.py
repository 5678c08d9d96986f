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

Shape letters: ``B`` rows, ``N`` nodes of the chain, ``V`` vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_fsd.model.divergence import LOG_FLOOR


def verify_tokens(
    log_p: Tensor, log_q: Tensor, drafted: Tensor, generator: torch.Generator | None
) -> Tensor:
    """Choose the target's sample at every node but the last, token by token.

    Args:
        log_p: ``[B, N - 1, V]`` the target's log-probabilities, after temperature, top-k and top-p,
            at every node but the last.
        log_q: ``[B, N - 1, V]`` the draft's log-probabilities that the tokens were sampled from.
        drafted: ``[B, N - 1]`` the token sampled at each node.
        generator: Source of randomness; None is torch's global generator.

    Returns:
        ``[B, N - 1]`` token ids. At the last node, the target's sample is one from ``p_n``.
    """
    p, q = log_p.exp(), log_q.exp()
    ratio = _pick(p, drafted) / _pick(q, drafted)
    uniform = torch.empty_like(ratio).uniform_(generator=generator)
    return torch.where(uniform < ratio, drafted, _sample(p - q, p, generator))


def verify_block(
    log_p: Tensor, log_q: Tensor, drafted: Tensor, generator: torch.Generator | None
) -> Tensor:
    """Choose the target's sample at every node but the last, for the whole chain at once.

    Below the node where the path ends, the samples have no meaning: they are never reached. This
    requires that only tokens equal to the samples are accepted.

    Args:
        log_p: ``[B, N - 1, V]`` the target's log-probabilities, after temperature, top-k and top-p,
            at every node but the last.
        log_q: ``[B, N - 1, V]`` the draft's log-probabilities that the tokens were sampled from.
        drafted: ``[B, N - 1]`` the token sampled at each node.
        generator: Source of randomness; None is torch's global generator.

    Returns:
        ``[B, N - 1]`` token ids. At the last node, the target's sample is one from ``p_n``.
    """
    p, q = log_p.exp(), log_q.exp()
    # With sums C_i of log-ratios from C_0 = 0 on, log w_i = C_i - max(C_0, ..., C_i).
    ratio = _pick(log_p, drafted).clamp_min(LOG_FLOOR) - _pick(log_q, drafted)
    total = torch.nn.functional.pad(ratio.cumsum(1), (1, 0))
    weight = (total - total.cummax(1).values).exp()  # [B, N]
    residual = weight[:, :-1, None] * p - q
    mass = residual.clamp_min(0.0).sum(-1)  # [B, N - 1]
    chance = mass / (mass + 1.0 - weight[:, :-1]).clamp_min(torch.finfo(mass.dtype).tiny)
    chance = torch.cat([chance, weight[:, -1:]], 1)
    candidate = torch.empty_like(chance).uniform_(generator=generator) < chance
    node = torch.arange(chance.shape[1], device=chance.device)
    last = torch.where(candidate, node, 0).amax(1, keepdim=True)  # [B, 1]
    return torch.where(node[:-1] < last, drafted, _sample(residual, p, generator))


def _pick(values: Tensor, tokens: Tensor) -> Tensor:
    return values.gather(-1, tokens[..., None])[..., 0]


def _sample(weights: Tensor, otherwise: Tensor, generator: torch.Generator | None) -> Tensor:
    """Sample from the positive part of ``[..., V]`` weights; where there is none, from others.

    There is none where both distributions are equal up to rounding; the sample is then needed with
    a probability of about the rounding error.
    """
    weights = weights.clamp_min(0.0)
    weights = torch.where(weights.sum(-1, keepdim=True) > 0.0, weights, otherwise)
    return (weights / torch.empty_like(weights).exponential_(generator=generator)).argmax(-1)
