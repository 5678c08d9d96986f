"""The library's acceptance rules on the ragged chains that engines draft.

An engine verifies a batch of requests, each with its own number of drafted tokens, and draws the
target's samples itself. :func:`acceptance` finds the drafted tokens that a rule accepts whatever
the engine draws; the engine's own lossless verification then decides about the others. This
changes nothing at tokens that no rule accepts, so with ``T = 0`` the engine is unchanged.

Shape letters: ``B`` requests, ``K`` most drafted tokens of a request, ``N = K + 1`` nodes of a
chain, ``T`` drafted tokens of all requests, ``V`` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

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
from eagle_fsd.model.vocabulary import Distributions, arg_max

#: A sample that no token equals.
UNKNOWN = -1


@dataclass(frozen=True)
class Layout:
    """The positions of the drafted tokens of ragged chains, flattened and as trees.

    Attributes:
        counts: ``[B]`` number of drafted tokens of each request.
        rows: ``[T]`` the request of each drafted token.
        places: ``[T]`` its node in the request's tree, from 1.
        index: ``[B, N]`` the flattened token that is verified at each node; at a leaf, and at
            padding, another one of the batch.
    """

    counts: Tensor
    rows: Tensor
    places: Tensor
    index: Tensor

    @classmethod
    def of(cls, ends: Tensor, total: int, longest: int) -> Layout:
        """Lay out chains, given the end of each request among ``total`` drafted tokens ``[B]``."""
        ends = ends.long()
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        counts = ends - starts
        requests = torch.arange(len(ends), device=ends.device)
        rows = torch.repeat_interleave(requests, counts, output_size=total)
        flat = torch.arange(total, device=ends.device)
        steps = torch.arange(longest + 1, device=ends.device)
        index = torch.minimum(starts[:, None] + steps, ends[:, None] - 1).clamp(0, total - 1)
        return cls(counts, rows, flat - starts[rows] + 1, index)

    def tree(self, tokens: Tensor, draft_logits: Tensor | None = None) -> DraftTree:
        """Return the chains as trees, given drafted tokens ``[T]``.

        ``draft_logits`` are those of the draft ``[T, V]``, of the distributions from which the
        tokens were chosen.
        """
        size = self.index.shape[1]
        nodes = torch.arange(size, device=tokens.device)
        chain = torch.nn.functional.pad(tokens[self.index[:, :-1]].long(), (1, 0))
        # The root and the drafted tokens; a negative token, a placeholder, ends the chain.
        real = (nodes <= self.counts[:, None]) & (chain >= 0).cumprod(1).bool()
        before = (nodes - 1).clamp_min(0)
        expanded = nodes < self.counts[:, None]
        below = (nodes[:, None] >= nodes) & real[:, :, None] & real[:, None, :]
        own = torch.eye(size, dtype=torch.bool, device=tokens.device)
        if draft_logits is None:
            laws = tokens.new_empty(len(self.counts), 0, 0, dtype=torch.float32)
            expanded = torch.zeros_like(expanded)
        else:
            laws = draft_logits.log_softmax(-1)[self.index]
        return DraftTree(
            tokens=chain.clamp_min(0),
            parents=torch.where(real, before, nodes),
            depths=torch.where(real, nodes, 0),
            ancestors=below | own,
            draft_rows=torch.where(expanded, nodes, -1),
            draft_log_probs=laws,
            max_depth=size - 1,
        )


def acceptance(
    rule: AcceptanceRule,
    tree: DraftTree,
    raw: Distributions,
    processed: Distributions,
    warped: Distributions,
    greedy: Tensor,
    state: Tensor | None,
) -> tuple[VerificationInputs, Tensor]:
    """Apply a rule to chains, before the engine draws the target's samples.

    ``raw``, ``processed`` and ``warped`` are those of
    :class:`~eagle_fsd.model.verify.VerificationInputs`, ``greedy`` ``[B]`` marks requests at
    temperature 0, and ``state`` is ``[B, W]``.

    Returns:
        What was verified, in which a greedy request's most likely tokens are exact, and none of a
        sampled request; and ``[B, N]`` the least probability with which the engine must accept each
        drafted token, 0 to leave the decision to the engine.
    """
    best = arg_max(processed.logits)
    sampled = torch.where(greedy[:, None], best, UNKNOWN)
    inputs = VerificationInputs(
        tree,
        raw=raw,
        processed=processed,
        warped=warped,
        warped_draft=None,
        sampled=sampled,
        state=state,
    )
    least = accepted_edges(inputs, rule)[2].float()
    inner = innermost(rule)
    if isinstance(inner, BudgetRule):  # it accepts at random, unless decoding is greedy
        parents, tokens = tree.parents, tree.tokens
        admitted = rule.admits(inputs, parents, tokens) & inputs.supported(parents, tokens)
        raised = inner.raised(warped.log_prob(parents, tokens).exp())
        least = torch.where(greedy[:, None], least, torch.where(admitted, raised, 0.0))
    least = torch.where(tree.depths > 0, least, 0.0)
    return inputs, least


def raise_probability(
    logits: Tensor, tokens: Tensor, least: Tensor, certain: bool = False, greedy: bool = False
) -> None:
    """Give tokens ``[T]`` at least the probabilities ``[T]`` in the softmax of ``[T, V]`` logits.

    The others keep their ratios. A probability of 1 leaves no other token; logits where it is 0
    are unchanged. ``certain`` says that there are no probabilities between, and ``greedy`` that
    only the most likely token of a row matters.
    """
    index, least = tokens.long().clamp_min(0)[:, None], least[:, None]
    own = logits.gather(1, index)
    if certain and greedy:
        logits.scatter_(1, index, torch.where(least > 0.0, torch.inf, own))
        return
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
    that a rule accepted. In a sampled request, all of these count as fuzzy.
    """
    steps = torch.arange(tokens.shape[1], device=tokens.device)
    count = (tokens >= 0).sum(1)
    real = steps < count[:, None]
    path = torch.where(real, steps, 0)
    tokens = torch.where(real, tokens.long(), 0)
    by_rule = torch.nn.functional.pad(accepted[:, 1:], (0, 1))
    fuzzy = real & by_rule & (steps < count[:, None] - 1)
    fuzzy &= tokens != inputs.sampled.gather(1, path)
    origins = torch.where(fuzzy, int(Origin.FUZZY), int(Origin.EXACT))
    origins = torch.where(steps == count[:, None] - 1, int(Origin.TARGET), origins)
    origins = torch.where(real, origins, int(Origin.PADDING))
    return Verification(tokens, origins, count=count, path=path, accepted=accepted)


class ChainVerifier(EngineRule):
    """A rule on the chains of an engine."""

    _step: tuple[VerificationInputs, Tensor, bool] | None = None

    def relax(
        self,
        logits: Tensor,
        layout: Layout,
        tree: DraftTree,
        raw: Distributions,
        processed: Distributions,
        warped: Distributions,
        greedy: Tensor,
        state: Tensor | None,
        all_greedy: bool = False,
    ) -> None:
        """Raise the probabilities of the tokens that the rule accepts, in place.

        ``logits`` ``[T, V]`` are those that the engine verifies; for the other arguments see
        :func:`acceptance`. Without a state, as in an engine's warm-up, it is that of new requests,
        and is not kept. If all requests are greedy, the other logits of a row are left as they are.
        """
        kept = state is not None
        if state is None and self.rule.state_size:
            state = raw.peak.new_zeros(len(greedy), self.rule.state_size)
        inputs, least = acceptance(
            self.rule, tree, raw=raw, processed=processed, warped=warped, greedy=greedy, state=state
        )
        flat = least[layout.rows, layout.places]
        certain = not isinstance(innermost(self.rule), BudgetRule)
        tokens = tree.tokens[layout.rows, layout.places]
        raise_probability(logits, tokens, flat, certain=certain, greedy=all_greedy)
        self._step = inputs, least > 0.0, kept

    def finish(self, tokens: Tensor) -> None:
        """Count the tokens ``[B, N]`` that the engine emitted, negative where there are none.

        Advances the rule's states. Does nothing unless :meth:`relax` was called before.
        """
        if self._step is None:
            return
        inputs, accepted, kept = self._step
        self._step = None
        self.record(inputs, emitted(inputs, tokens, accepted), kept)
