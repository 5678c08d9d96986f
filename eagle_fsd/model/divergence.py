"""Divergences between the target's and the draft's next-token distributions.

All take natural-log probabilities ``log p`` of the target and ``log q`` of the draft in float32 and
return nats (``tv`` is a probability mass):

=================  ==========================================  ==============
name               formula, with ``m = (p + q) / 2``           range
=================  ==========================================  ==============
``js``             ``KL(p||m) / 2 + KL(q||m) / 2``             ``[0, ln 2]``
``js_reference``   ``KL(m||p) / 2 + KL(m||q) / 2``             ``[0, inf)``
``kl``             ``KL(q||p)``                                ``[0, inf)``
``kl_reversed``    ``KL(p||q)``                                ``[0, inf)``
``tv``             ``sum |p - q| / 2``                         ``[0, 1]``
=================  ==========================================  ==============

In the code released with the FSD paper (arXiv 2502.20704), ``js_div`` is ``js_reference``,
``kl_div`` is ``kl`` and ``kl_div_reversed`` is ``kl_reversed``. The options accept ``reverse_kl``
for ``kl_reversed``: the name under which the paper's author later published it, and with which he
says the paper's results were obtained; see :func:`js_reference`.

Each divergence also exists as ``top_k_<name>``, over the target's 50 most likely tokens plus one
bucket for all others, and as ``top_p_<name>``, over the target's nucleus of mass 0.95 plus one
bucket. Of tokens that are equally likely under the target, the 50 include those that are likelier
under the draft, and the nucleus includes all or none, so no divergence depends on the order of
the vocabulary. Merging tokens into a bucket can only lower a divergence (data-processing
inequality).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from eagle_fsd.model.vocabulary import MIN_LOG_PROB, exp, top_k, top_p_radius

#: ``(log p, log q)``, both ``[..., V]`` float32, to ``[...]`` float32.
Divergence = Callable[[Tensor, Tensor], Tensor]

#: Log-probabilities are clamped to this value: ``exp`` of it is 0 in float32, so no probability
#: changes, and products such as ``p * log p`` stay finite where a probability is 0.
LOG_FLOOR = -1e4
#: Tokens outside the bucket of ``top_k_*`` divergences.
TOP_K = 50
#: Probability mass outside the bucket of ``top_p_*`` divergences, at least.
TOP_P = 0.95


def _exp(log_probs: Tensor) -> Tensor:
    """Return ``exp``, at least about 1e-38."""
    return log_probs.clamp_min(MIN_LOG_PROB).exp()


def _kl(a: Tensor, b: Tensor) -> Tensor:
    """``KL(exp a || exp b)``."""
    return (_exp(a) * (a - b)).sum(-1).clamp_min(0.0)


def js(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Jensen-Shannon divergence, in ``[0, ln 2]`` nats.

    Computed from ``s = p + q`` as ``sum (p log(p/s) + q log(q/s)) / 2 + ln 2``, which takes three
    transcendental functions per token.
    """
    p, q = _exp(log_p), _exp(log_q)
    s = p + q
    log_s = s.clamp_min(torch.finfo(s.dtype).tiny).log()
    value = torch.addcmul(p * (log_p - log_s), q, log_q - log_s).sum(-1)
    return torch.add(math.log(2.0), value, alpha=0.5).clamp(0.0, math.log(2.0))


def js_reference(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Reversed, unbounded form of ``js``; ``js_div`` in the FSD authors' code.

    ``_speculative_backoff_sampling`` in ``fsd_utils.py`` of github.com/maxholsman/fsd, in every
    commit up to e92a157 (2025-03-03), averages ``F.kl_div(log p, m)`` and ``F.kl_div(log q, m)``,
    which are ``KL(m||p)`` and ``KL(m||q)``. Thresholds used with that code belong to this function.

    The author states that "the empirical results in the paper therefore correspond to
    ``reverse_kl``" (pull request 12853 of NVIDIA/TensorRT-LLM, 2026-04-08), which is
    :func:`kl_reversed` there. The released code computes that as ``js_div`` in no commit. Where the
    distributions nearly agree, ``js_reference`` and :func:`js` are a quarter of it; elsewhere no
    factor converts them.
    """
    log_m = torch.logaddexp(log_p, log_q) - math.log(2.0)
    return 0.5 * (_kl(log_m, log_p) + _kl(log_m, log_q))


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """``KL(q||p)``, the draft relative to the target; ``kl_div`` in the FSD authors' code."""
    return _kl(log_q, log_p)


def kl_reversed(log_p: Tensor, log_q: Tensor) -> Tensor:
    """``KL(p||q)``, the target relative to the draft."""
    return _kl(log_p, log_q)


def tv(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Total variation distance, in ``[0, 1]``."""
    return (0.5 * (_exp(log_p) - _exp(log_q)).abs().sum(-1)).clamp_max(1.0)


def _top_k_buckets(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Merge all but the target's ``TOP_K`` likeliest tokens: ``[..., TOP_K + 1]``.

    Of tokens that are equally likely, the draft's likeliest are kept.
    """
    count = min(TOP_K, log_p.shape[-1])
    least = top_k(log_p, count)[0][..., -1:]
    rank = torch.where(log_p > least, torch.inf, log_q).masked_fill_(log_p < least, -torch.inf)
    index = top_k(rank, count)[1]

    def bucketed(log_x: Tensor) -> Tensor:
        rest = _log_mass(log_x.scatter(-1, index, -torch.inf))
        return torch.cat([log_x.gather(-1, index), rest], -1).clamp_min(LOG_FLOOR)

    return bucketed(log_p), bucketed(log_q)


def _top_p_buckets(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Move the mass outside the target's nucleus to a bucket: ``[..., V + 1]``."""
    below = log_p - log_p.amax(-1, keepdim=True)
    flat = below.reshape(-1, below.shape[-1])
    outside = below < -top_p_radius(flat, exp(flat), TOP_P).view(*below.shape[:-1], 1)

    def bucketed(log_x: Tensor) -> Tensor:
        rest = _log_mass(log_x.masked_fill(~outside, -torch.inf))
        return torch.cat([log_x.masked_fill(outside, -torch.inf), rest], -1).clamp_min(LOG_FLOOR)

    return bucketed(log_p), bucketed(log_q)


def _log_mass(log_probs: Tensor) -> Tensor:
    """Return ``[..., 1]``: the log of the sum of probabilities, without denormal numbers."""
    peak = log_probs.amax(-1, keepdim=True).clamp_min(LOG_FLOOR)
    return exp(log_probs - peak).sum(-1, keepdim=True).log() + peak


def on_draft_vocabulary(log_p: Tensor, log_q: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Express both distributions over the draft's tokens ``[D]`` and one bucket: ``[..., D + 1]``.

    The draft gives the bucket no mass. So ``js``, ``tv`` and ``kl`` are those over the whole
    vocabulary, where the other two would be infinite; :data:`LOG_FLOOR` keeps them finite here.
    """
    rest = _log_mass(log_p.index_fill(-1, token_ids, -torch.inf))
    log_p = torch.cat([log_p.index_select(-1, token_ids), rest], -1)
    return log_p, torch.nn.functional.pad(log_q, (0, 1), value=-torch.inf)


def _build(
    name: str, buckets: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None
) -> Divergence:
    """Return the divergence ``name`` of clamped distributions, merged by ``buckets`` if given."""
    base = _BASE[name]

    def divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
        log_p = log_p.float().clamp_min(LOG_FLOOR)
        log_q = log_q.float().clamp_min(LOG_FLOOR)
        if buckets is not None:
            log_p, log_q = buckets(log_p, log_q)
        return base(log_p, log_q)

    return divergence


_BASE: dict[str, Divergence] = {
    "js": js,
    "js_reference": js_reference,
    "kl": kl,
    "kl_reversed": kl_reversed,
    "tv": tv,
}

#: Every divergence by name. Inputs are clamped to :data:`LOG_FLOOR`, so they may contain
#: ``-inf``; values are finite.
DIVERGENCES: dict[str, Divergence] = {
    prefix + name: _build(name, buckets)
    for prefix, buckets in (("", None), ("top_k_", _top_k_buckets), ("top_p_", _top_p_buckets))
    for name in _BASE
}
