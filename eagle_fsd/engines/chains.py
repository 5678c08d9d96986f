"""The library's acceptance rules on the ragged chains that engines draft.

An engine verifies a batch of requests, each with its own number of drafted tokens, and draws the
target's samples itself. :func:`acceptance` finds the drafted tokens that a rule accepts whatever
the engine draws; the engine's own lossless verification then decides about the others. This
changes nothing at tokens that the rule does not accept, so with ``T = 0`` the engine is unchanged.

Shape letters: ``B`` requests, ``K`` maximum number of drafted tokens per request, ``N = K + 1``
nodes of a chain, ``T`` drafted tokens of all requests, ``V`` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle_fsd.engines.bookkeeping import EngineRule
from eagle_fsd.engines.settings import innermost
from eagle_fsd.model.acceptance import BudgetRule
from eagle_fsd.model.tree import DraftTree
from eagle_fsd.model.verify import (
    AcceptanceRule,
    Origin,
    Verification,
    VerificationInputs,
    accepted_edges,
)

#: A sample that no token equals.
UNKNOWN = -1


@dataclass(frozen=True)
class Layout:
    """The positions of the drafted tokens of ragged chains, flattened and as trees.

    Attributes:
        rows: ``[T]`` the request of each drafted token.
        nodes: ``[T]`` its node in the request's tree, from 1.
        index: ``[B, N]`` the flattened token that is verified at each node; at a leaf, and at
            padding, another one of the batch.
        shape: The trees, without tokens and distributions.
    """

    rows: Tensor
    nodes: Tensor
    index: Tensor
    shape: DraftTree

    @classmethod
    def of(cls, ends: Tensor, total: int, max_length: int) -> Layout:
        """Lay out chains, given the ``ends`` ``[B]`` of requests among ``total`` drafted tokens."""
        ends = ends.long()
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        counts = ends - starts
        requests = torch.arange(len(ends), device=ends.device)
        rows = torch.repeat_interleave(requests, counts, output_size=total)
        flat = torch.arange(total, device=ends.device)
        steps = torch.arange(max_length + 1, device=ends.device)
        index = torch.minimum(starts[:, None] + steps, ends[:, None] - 1).clamp(0, total - 1)
        real = steps <= counts[:, None]
        chain = steps[:, None] >= steps
        shape = DraftTree(
            tokens=torch.empty_like(index),
            parents=torch.where(real, (steps - 1).clamp_min(0), steps),
            depths=torch.where(real, steps, 0),
            ancestors=torch.where(real[:, :, None], chain, steps[:, None] == steps),
            draft_rows=torch.where(steps < counts[:, None], steps, -1),
            draft_log_probs=ends.new_empty(len(ends), 0, 0, dtype=torch.float32),
            max_depth=max_length,
        )
        return cls(rows, flat - starts[rows] + 1, index, shape)

    def tree(self, tokens: Tensor, draft_logits: Tensor | None = None) -> DraftTree:
        """Return the chains as trees, given drafted tokens ``[T]``.

        A negative token, a placeholder, ends a chain: it and what follows have depth 0.
        ``draft_logits`` ``[T, V]`` are the draft's logits from which each token was sampled, or
        chosen greedily, which rules treat alike. The token of the root is unknown, and set to 0.
        """
        chain = torch.nn.functional.pad(tokens.long()[self.index[:, :-1]], (1, 0))
        depths = self.shape.depths * (chain >= 0).cumprod(1)
        tree = replace(self.shape, tokens=chain.clamp_min(0), depths=depths)
        if draft_logits is None:
            return replace(tree, draft_rows=torch.full_like(chain, -1))
        return replace(tree, draft_log_probs=draft_logits.log_softmax(-1)[self.index], sampled=True)


def acceptance(
    rule: AcceptanceRule, inputs: VerificationInputs, greedy: Tensor | None = None
) -> Tensor:
    """Apply a rule to chains, before the engine draws the target's samples.

    ``inputs.sampled`` are the most likely tokens; those of requests that are not ``greedy`` ``[B]``
    (None: all are) become :data:`UNKNOWN`, in place.

    Returns ``[B, N]`` the least probability with which the engine must accept each drafted token, 0
    to leave the decision to the engine: bool if there are only 0 and 1.
    """
    if greedy is not None:
        inputs.sampled = torch.where(greedy[:, None], inputs.sampled, UNKNOWN)
    least = accepted_edges(inputs, rule)[2]
    inner = innermost(rule)
    if isinstance(inner, BudgetRule) and greedy is not None:  # sampled requests: at random
        parents, tokens = inputs.tree.parents, inputs.tree.tokens
        admitted = rule.admits(inputs, parents, tokens) & inputs.supported(parents, tokens)
        raised = inner.raised(inputs.warped.log_prob(parents, tokens).exp())
        least = torch.where(greedy[:, None], least.float(), torch.where(admitted, raised, 0.0))
    return least * (inputs.tree.depths > 0)


def raise_probability(logits: Tensor, tokens: Tensor, least: Tensor, greedy: bool = False) -> None:
    """Give tokens ``[T]`` at least the probabilities ``[T]`` in the softmax of ``[T, V]`` logits.

    The others keep their ratios. A probability of 1 leaves no other token; logits where it is 0
    are unchanged. ``least`` may be bool, for probabilities of 1 and 0. ``greedy`` says that only
    the most likely token of a row matters.
    """
    index, least = tokens.long().clamp_min(0)[:, None], least[:, None]
    certain = least.dtype == torch.bool
    if certain and greedy:  # an accepted token is finite
        boost = torch.zeros_like(least, dtype=logits.dtype).masked_fill_(least, torch.inf)
        logits.scatter_add_(1, index, boost)
        return
    own = logits.gather(1, index)
    raised = torch.zeros_like(own)
    if not certain:
        rest = logits.scatter(1, index, -torch.inf).logsumexp(1, keepdim=True)
        odds = least.logit()  # -inf at 0, inf at 1
        raised = torch.where(least < 1.0, torch.maximum(own, odds + rest), raised)
    logits.masked_fill_(least >= 1.0, -torch.inf)
    logits.scatter_(1, index, torch.where(least > 0.0, raised, own))


def emitted(inputs: VerificationInputs, tokens: Tensor, accepted: Tensor) -> Verification:
    """Describe what an engine emitted, for :meth:`AcceptanceRule.advance`.

    ``tokens`` are ``[B, N]``, negative where there are none; ``accepted`` ``[B, N]`` marks nodes
    whose token the rule accepts, or whose probability it raises. In a sampled request, all of these
    that were emitted count as fuzzy.
    """
    real = tokens >= 0
    steps = torch.arange(tokens.shape[1], device=tokens.device)
    count = real.sum(1)
    last = count[:, None] - 1
    path, tokens = steps * real, tokens.long().clamp_min(0)
    fuzzy = (steps < last) & (tokens != inputs.sampled.gather(1, path))
    fuzzy[:, :-1] &= accepted[:, 1:]
    origins = real.long()  # Origin.EXACT, or else Origin.PADDING
    origins.masked_fill_(fuzzy, int(Origin.FUZZY)).masked_fill_(steps == last, int(Origin.TARGET))
    return Verification(tokens, origins, count=count, path=path, accepted=accepted)


class ChainVerifier(EngineRule):
    """A rule on the chains of an engine."""

    _step: tuple[VerificationInputs, Tensor, bool] | None = None

    def relax(
        self, logits: Tensor, layout: Layout, inputs: VerificationInputs, greedy: Tensor | None
    ) -> Tensor:
        """Raise the probabilities of the tokens that the rule accepts, in place.

        ``logits`` ``[T, V]`` are those that the engine samples from, after temperature, top-k and
        top-p; for ``inputs`` and ``greedy`` see :func:`acceptance`. Without a state, as in an
        engine's warm-up, it is that of new requests, and is not kept. If all requests are greedy,
        the other logits of a row are left as they are. Returns ``[T]`` bool: the rows that changed.
        """
        kept = inputs.state is not None
        if inputs.state is None and self.rule.state_size:
            inputs.state = inputs.raw.peak.new_zeros(len(inputs.sampled), self.rule.state_size)
        least = acceptance(self.rule, inputs, greedy)
        tokens, flat = (item[layout.rows, layout.nodes] for item in (inputs.tree.tokens, least))
        raise_probability(logits, tokens, flat, greedy=greedy is None)
        self._step = inputs, least > 0, kept
        return flat > 0

    def finish(self, tokens: Tensor) -> None:
        """Count the tokens ``[B, N]`` that the engine emitted, negative where there are none.

        Advances the rule's states. Does nothing unless :meth:`relax` was called before.
        """
        if self._step is None:
            return
        inputs, accepted, kept = self._step
        self._step = None
        self.record(inputs, emitted(inputs, tokens, accepted), advance=kept)
