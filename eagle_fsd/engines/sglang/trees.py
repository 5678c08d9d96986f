"""The library's verification on the draft trees of SGLang; imports nothing of SGLang.

SGLang describes a tree by each node's first child (``retrieve_next_token``) and next sibling
(``retrieve_next_sibling``), -1 where there is none. It does not keep the draft's distributions.

Shape letters: ``B`` requests, ``N`` nodes of a tree, ``R = B * N`` rows of logits, ``V``
vocabulary, ``W`` numbers in a rule's state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_fsd.engines.bookkeeping import EngineRule
from eagle_fsd.engines.chains import raise_probability
from eagle_fsd.model.tree import DraftTree, ancestor_matrix
from eagle_fsd.model.verify import Verification, VerificationInputs, verify
from eagle_fsd.model.vocabulary import Distributions


def linked_tree(tokens: Tensor, child: Tensor, sibling: Tensor, max_depth: int) -> DraftTree:
    """Return the trees of tokens ``[B, N]``, first children and next siblings ``[B, N]``."""
    size = tokens.shape[1]
    nodes = torch.arange(size, device=tokens.device).expand_as(tokens)
    first = _inverse(sibling)  # the sibling before each node, then the first of all siblings
    for _ in range(size.bit_length()):
        first = first.gather(1, first)
    above = _inverse(child).gather(1, first)
    parents = torch.where(above == first, nodes, above)
    ancestors = ancestor_matrix(parents, size)
    linked = ancestors[:, :, 0]  # the other nodes are padding
    own = torch.eye(size, dtype=torch.bool, device=tokens.device)
    return DraftTree(
        tokens=tokens.long(),
        parents=torch.where(linked, parents, nodes),
        depths=torch.where(linked, ancestors.sum(-1) - 1, 0),
        ancestors=torch.where(linked[:, :, None], ancestors, own),
        draft_rows=torch.full_like(nodes, -1),
        draft_log_probs=tokens.new_empty(len(tokens), 0, 0, dtype=torch.float32),
        max_depth=max_depth,
    )


def _inverse(pointers: Tensor) -> Tensor:
    """Return ``[B, N]``: the node that points to each node, or the node itself if none does."""
    size = pointers.shape[1]
    nodes = torch.arange(size, device=pointers.device).expand_as(pointers)
    spare = torch.nn.functional.pad(nodes, (0, 1))
    target = torch.where(pointers >= 0, pointers, size).long()
    return spare.scatter(1, target, nodes)[:, :size]


@dataclass(frozen=True)
class RequestSampling:
    """Sampling options of requests, as tensors ``[B]``; ``top_k`` is 1 for greedy requests."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor

    def warped(self, logits: Tensor) -> Tensor:
        """Return logits ``[B, N, V]`` after temperature, top-k and top-p; greedy ones unchanged."""
        scaled = logits / self.temperature[:, None, None]
        ordered, order = scaled.sort(-1, descending=True)
        ranks = torch.arange(logits.shape[-1], device=logits.device)
        ordered = ordered.masked_fill(ranks >= self.top_k[:, None, None], -torch.inf)
        weights = ordered.softmax(-1)
        likelier, top_p = weights.cumsum(-1) - weights, self.top_p[:, None, None]
        # Rounded sums can reach 1.
        beyond = (likelier >= top_p) & (top_p < 1.0) & (ranks > 0)
        ordered = ordered.masked_fill(beyond, -torch.inf)
        return torch.where(self.greedy[:, None, None], logits, scaled.scatter(-1, order, ordered))

    @property
    def greedy(self) -> Tensor:
        """``[B]`` bool: the requests that are decoded greedily."""
        return self.top_k <= 1


class TreeVerifier(EngineRule):
    """A rule on the trees of SGLang."""

    def __call__(
        self,
        logits: Tensor,
        rows: Tensor,
        tree: DraftTree,
        sampling: RequestSampling | None,
        state: Tensor | None,
    ) -> Verification:
        """Verify trees, and leave no other tokens than the emitted ones in the logits.

        ``logits`` ``[R, V]`` are changed in place, in the ``rows`` ``[B, N]`` of the kept nodes, so
        that the engine's own verification, greedy or sampling, keeps the same path. Without
        ``sampling``, all requests are greedy. ``state`` is ``[B, W]``.
        """
        at_nodes = logits[rows].float()
        processed = warped = Distributions.of(at_nodes)
        best = at_nodes.argmax(-1)
        if sampling is not None:
            values = sampling.warped(at_nodes)
            warped = Distributions.of(values)
            noise = torch.empty_like(values).exponential_()
            drawn = (values.softmax(-1) / noise).argmax(-1)
            best = torch.where(sampling.greedy[:, None], best, drawn)
        inputs = VerificationInputs(
            tree,
            raw=processed,
            processed=processed,
            warped=warped,
            warped_draft=None,
            sampled=best,
            state=state,
        )
        kept = verify(inputs, self.rule)
        self.record(inputs, kept, advance=state is not None)

        real = torch.arange(kept.path.shape[1], device=logits.device) < kept.count[:, None]
        nodes = torch.where(real, kept.path, tree.size)  # a spare one
        emitted = tree.tokens.new_full((len(tree.tokens), tree.size + 1), -1)
        emitted = emitted.scatter(1, nodes, kept.tokens)[:, :-1]
        by_row = torch.full_like(rows.flatten(), -1).scatter(0, rows.flatten(), emitted.flatten())
        raise_probability(logits, by_row, by_row >= 0)
        return kept
