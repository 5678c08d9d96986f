"""The EAGLE-2 dynamic draft tree (arXiv 2406.16858, section 4), built with tensor operations.

Shape letters: ``B`` rows, ``N`` tree nodes, ``V`` vocabulary, ``K`` = ``top_k``, ``M`` nodes the
head expanded (``1 + depth * K``), ``P`` candidates in the pool (``K + depth * K * K``).
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
    """

    def __init__(self, total_tokens: int, depth: int, top_k: int) -> None:
        self.total_tokens = total_tokens
        self.depth = depth
        self.top_k = top_k

    def start(self, log_probs: Tensor) -> None:
        """``log_probs``: ``[B, V]``, the draft's distribution after the root."""
        batch, vocabulary = log_probs.shape
        self.width = min(self.top_k, vocabulary)
        self.draft_log_probs = log_probs.new_empty(batch, 1 + self.depth * self.width, vocabulary)
        self.draft_log_probs[:, 0] = log_probs
        scores, tokens = _sorted_top_k(log_probs, self.width)
        self.tokens = [tokens]  # a level each: [B, K], then [B, K * K]
        self.scores = [scores]
        self.parents = [torch.full_like(tokens, -1)]  # index in the pool; -1 is the root
        self.chosen: list[Tensor] = []  # index in the pool of each expanded candidate, [B, K]
        self.level = 0

    def choose(self) -> tuple[Tensor, Tensor]:
        """The newest level's ``K`` best candidates: their tokens and their parents' slots.

        Returns:
            ``[B, K]`` tokens, and ``[B, K]`` the slot (0 to ``K - 1``) of each one's parent among
            the nodes expanded one level before; 0 on the first level, where the root is the parent.
        """
        if self.level == 0:
            index = torch.arange(self.width, device=self.tokens[0].device)
            index = index.expand_as(self.tokens[0])
            first = 0
        else:
            index = _sorted_top_k(self.scores[-1], self.width)[1]
            first = self.width + (self.level - 1) * self.width**2
        self.chosen.append(index + first)
        self.chosen_scores = self.scores[-1].gather(1, index)
        slots = index // self.width if self.level else torch.zeros_like(index)
        return self.tokens[-1].gather(1, index), slots

    def extend(self, log_probs: Tensor) -> None:
        """``log_probs``: ``[B, K, V]``, the draft's distributions at the chosen candidates."""
        batch = log_probs.shape[0]
        first = 1 + self.level * self.width
        self.draft_log_probs[:, first : first + self.width] = log_probs
        best, tokens = _sorted_top_k(log_probs, self.width)  # [B, K, K]
        self.tokens.append(tokens.reshape(batch, -1))
        self.scores.append((self.chosen_scores[:, :, None] + best).reshape(batch, -1))
        parents = self.chosen[-1][:, :, None].expand_as(tokens)
        self.parents.append(parents.reshape(batch, -1))
        self.level += 1

    def finish(self, root: Tensor) -> DraftTree:
        """The tree over ``root`` (``[B]`` tokens), with ``min(total_tokens, 1 + P)`` nodes."""
        scores = torch.cat(self.scores, 1)  # [B, P]
        parents = torch.cat(self.parents, 1)
        batch, pool = scores.shape
        # A stable sort, not topk: among equals the earlier, and so the parent, comes first.
        order = scores.sort(dim=1, descending=True, stable=True).indices
        kept = order[:, : self.total_tokens - 1].sort(1).values  # [B, N - 1], level order

        expanded = torch.full_like(parents, -1)
        if self.chosen:
            chosen = torch.cat(self.chosen, 1)
            rows = torch.arange(1, chosen.shape[1] + 1, device=root.device)
            expanded.scatter_(1, chosen, rows.expand_as(chosen))

        level = torch.arange(pool, device=root.device)
        level = (level - self.width).clamp_min(-1).div(self.width**2, rounding_mode="floor") + 2

        zero = torch.zeros_like(root)[:, None]
        # -1, the root of the pool, sorts before every kept index and so maps to node 0.
        node_parents = torch.searchsorted(kept, parents.gather(1, kept)) + (
            parents.gather(1, kept) >= 0
        )
        node_parents = torch.cat([zero, node_parents], 1)
        return DraftTree(
            tokens=torch.cat([root[:, None], torch.cat(self.tokens, 1).gather(1, kept)], 1),
            parents=node_parents,
            depths=torch.cat([zero, level[kept]], 1),
            ancestors=ancestor_matrix(node_parents, self.level + 1),
            draft_rows=torch.cat([zero, expanded.gather(1, kept)], 1),
            draft_log_probs=self.draft_log_probs,
            max_depth=self.level + 1,
        )


def ancestor_matrix(parents: Tensor, max_depth: int) -> Tensor:
    """``[B, N]`` parents to the ``[B, N, N]`` matrix of "is or descends from"."""
    batch, size = parents.shape
    matrix = torch.zeros(batch, size, size, dtype=torch.bool, device=parents.device)
    node = torch.arange(size, device=parents.device).expand(batch, size)
    for _ in range(max_depth + 1):
        matrix.scatter_(2, node[:, :, None], True)
        node = parents.gather(1, node)
    return matrix


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


def _sorted_top_k(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest ``count`` along the last axis; the all-NaN row of a broken head scores ``-inf``."""
    best, index = values.topk(count, dim=-1)
    return torch.where(best.isnan(), -torch.inf, best), index
