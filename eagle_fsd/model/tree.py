"""The EAGLE-2 dynamic draft tree (arXiv 2406.16858, section 4), built with tensor operations.

Shape letters: ``B`` rows, ``N`` tree nodes, ``V`` vocabulary, ``K`` = ``top_k``, ``M`` nodes the
head expanded (``1 + depth * K``), ``P`` candidates in the pool (``1 + M * K``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftTree:
    """A tree of drafted tokens for each row. Node 0 is the last emitted token, the root.

    Nodes are in level order: a parent's index is below its children's, and depths never fall.

    Attributes:
        tokens: ``[B, N]`` token of each node.
        parents: ``[B, N]`` index of the parent; the root is its own.
        depths: ``[B, N]`` edges from the root.
        ancestors: ``[B, N, N]`` bool; ``[b, i, j]`` where ``j`` is ``i`` or an ancestor of it.
            It is the tree's attention mask and its reachability matrix.
        draft_rows: ``[B, N]`` the row of ``draft_log_probs`` with the draft's distribution at the
            node, or -1 where the head did not expand it.
        draft_log_probs: ``[B, M, V]`` float32.
        max_depth: No node is deeper.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    draft_rows: Tensor
    draft_log_probs: Tensor
    max_depth: int

    @property
    def size(self) -> int:
        return self.tokens.shape[1]

    def has_children(self) -> Tensor:
        """``[B, N]`` bool."""
        found = torch.zeros_like(self.tokens, dtype=torch.bool)
        return found.scatter_(1, self.parents[:, 1:], True)


class TreeBuilder:
    """Grows the pool of candidates level by level, then keeps the best of it as a tree.

    The head is asked for one level at a time: :meth:`start` takes its distribution after the root,
    then ``depth`` times :meth:`choose` names the nodes to expand and :meth:`extend` takes what the
    head says of them. :meth:`finish` keeps the ``total_tokens - 1`` candidates with the largest
    cumulative log-probability. A child never scores above its parent, and ties go to the earlier
    candidate, so what is kept is a tree.

    The pool opens with the root and is laid out by level, within a level by expanded parent. So
    where a candidate hangs follows from its index: ``1 + e * K + c`` is child ``c`` of the ``e``-th
    expanded candidate, the root being the first. These tables are the same at every step, so one
    builder serves a whole call.
    """

    def __init__(
        self, total_tokens: int, depth: int, top_k: int, vocabulary: int, device: torch.device | str
    ) -> None:
        self.total_tokens = total_tokens
        self.depth = depth
        self.width = width = min(top_k, vocabulary)
        expanded = torch.arange(1 + depth * width, device=device)  # [M]
        self._draft_rows = expanded
        levels = (expanded + width - 1) // width  # 0 for the root, then 1 to depth
        root = torch.zeros_like(expanded[:1])
        self._parents = torch.cat([root, expanded.repeat_interleave(width)])  # [P], expanded index
        self._depths = torch.cat([root, levels.repeat_interleave(width) + 1])  # [P]
        # Where in the pool the level of each expanded candidate begins.
        self._firsts = (1 + width + (levels - 2) * width**2).where(levels > 1, levels)

    def start(self, log_probs: Tensor) -> None:
        """``log_probs``: ``[B, V]``, the draft's distribution after the root."""
        batch, vocabulary = log_probs.shape
        self.draft_log_probs = log_probs.new_empty(batch, len(self._draft_rows), vocabulary)
        self.draft_log_probs[:, 0] = log_probs
        scores, tokens = log_probs.topk(self.width)
        # The root's score is the best there is. A level each: [B, 1], [B, K], then [B, K * K].
        self.scores = [scores.new_zeros(batch, 1), _ranked(scores)]
        self.tokens = [tokens]
        self.chosen = [tokens.new_zeros(batch, 1)]  # index in its level of each expanded candidate

    def choose(self) -> tuple[Tensor, Tensor]:
        """The newest level's ``K`` best candidates: their tokens and their parents' slots.

        Returns:
            ``[B, K]`` tokens, and ``[B, K]`` the slot (0 to ``K - 1``) of each one's parent among
            the nodes expanded one level before; 0 on the first level, where the root is the parent.
        """
        scores, tokens = self.scores[-1], self.tokens[-1]
        if len(self.chosen) == 1:
            self.chosen_scores = scores
            self.chosen.append(self._draft_rows[: self.width].expand_as(tokens))
            return tokens, torch.zeros_like(tokens)
        self.chosen_scores, index = scores.topk(self.width)
        self.chosen.append(index)
        return tokens.gather(1, index), index // self.width

    def extend(self, log_probs: Tensor) -> None:
        """``log_probs``: ``[B, K, V]``, the draft's distributions at the chosen candidates."""
        first = 1 + (len(self.chosen) - 2) * self.width
        self.draft_log_probs[:, first : first + self.width] = log_probs
        scores, tokens = log_probs.topk(self.width)  # [B, K, K]
        self.scores.append(_ranked(scores + self.chosen_scores[:, :, None]).flatten(1))
        self.tokens.append(tokens.flatten(1))

    def finish(self, root: Tensor) -> DraftTree:
        """The tree over ``root`` (``[B]`` tokens), with ``min(total_tokens, P)`` nodes."""
        # A stable sort, not topk: among equals the earlier, and so the parent, comes first.
        order = torch.cat(self.scores, 1).sort(dim=1, descending=True, stable=True).indices
        kept = order[:, : self.total_tokens].sort(1).values  # [B, N] places in the pool
        chosen = torch.cat(self.chosen, 1) + self._firsts  # [B, M] likewise
        parents = torch.searchsorted(kept, chosen.gather(1, self._parents[kept]))
        rows = torch.full_like(order, -1).scatter_(1, chosen, self._draft_rows.expand_as(chosen))
        return DraftTree(
            tokens=torch.cat([root[:, None], *self.tokens], 1).gather(1, kept),
            parents=parents,
            depths=self._depths[kept],
            ancestors=ancestor_matrix(parents),
            draft_rows=rows.gather(1, kept),
            draft_log_probs=self.draft_log_probs,
            max_depth=self.depth + 1,
        )


def ancestor_matrix(parents: Tensor) -> Tensor:
    """``[B, N]`` parents, each before its children, to the ``[B, N, N]`` matrix of "is or descends
    from": ``I + P + P^2 + ... = (I - P)^-1`` for the matrix ``P`` of "is a child of"."""
    batch, size = parents.shape
    identity = torch.eye(size, device=parents.device).expand(batch, -1, -1)
    # What this writes on the diagonal, for the root, is not read.
    system = identity.scatter(2, parents[:, :, None], -1.0)
    reach = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
    return reach > 0.5


def single_node(root: Tensor, vocabulary: int) -> DraftTree:
    """The tree of nothing but its root (``[B]``): verifying it is plain decoding."""
    zero = torch.zeros_like(root)[:, None]
    return DraftTree(
        tokens=root[:, None],
        parents=zero,
        depths=zero,
        ancestors=torch.ones_like(zero, dtype=torch.bool)[:, :, None],
        draft_rows=zero - 1,
        draft_log_probs=torch.empty(root.shape[0], 0, vocabulary, device=root.device),
        max_depth=0,
    )


def _ranked(scores: Tensor) -> Tensor:
    """Scores with the NaN of a broken head as ``-inf``, so that they can be ordered."""
    return scores.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
