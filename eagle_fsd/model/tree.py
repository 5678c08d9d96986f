"""The EAGLE-2 dynamic draft tree (arXiv 2406.16858, section 4), built with tensor operations.

Shape letters: ``B`` rows, ``N`` tree nodes, ``D`` tokens of the draft's vocabulary, ``K`` =
``min(top_k, D)``, ``M`` nodes that the drafter expanded (``1 + depth * K`` by
:class:`TreeBuilder`), ``P`` candidates in the pool (``1 + M * K``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle_fsd.model.config import TreeConfig
from eagle_fsd.model.vocabulary import top_k

#: Samples from distributions ``[B, D]`` with random numbers ``[B]``: ``[B]`` indices.
Draw = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DraftTree:
    """A tree of drafted tokens for each row. Node 0, the root, is the last emitted token.

    Nodes are in level order: a parent precedes its children, and depths only decrease at padding.
    Other nodes of depth 0 are padding, in rows with fewer nodes: each is its own parent and has no
    children, so verification never keeps it.

    Attributes:
        tokens: ``[B, N]`` token of each node.
        parents: ``[B, N]`` index of each node's parent; the root is its own parent.
        depths: ``[B, N]`` edges from the root.
        ancestors: ``[B, N, N]`` bool, true at ``[b, i, j]`` where ``j`` is ``i`` or an ancestor of
            ``i``. This is the tree's attention mask.
        draft_rows: ``[B, N]`` the row of ``draft_log_probs`` that holds the draft's distribution
            at the node, or -1 where the node was not expanded.
        draft_log_probs: ``[B, M, D]`` float32, the draft's distributions at the expanded nodes.
        max_depth: Upper bound of ``depths``.
        token_ids: ``[D]`` the token of each entry of the draft's distributions; None if the draft's
            vocabulary is the target's. The draft gives all other tokens probability 0.
        sampled: Whether the tree is a chain of the draft's own choices: sampled from its
            distributions after the same warpers as the target's, or drafted by another engine.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    draft_rows: Tensor
    draft_log_probs: Tensor
    max_depth: int
    token_ids: Tensor | None = None
    sampled: bool = False

    @property
    def size(self) -> int:
        """``N``, the number of nodes."""
        return self.tokens.shape[1]

    def of_rows(self, rows: Tensor) -> DraftTree:
        """Select rows by their indices."""
        return replace(
            self,
            tokens=self.tokens[rows],
            parents=self.parents[rows],
            depths=self.depths[rows],
            ancestors=self.ancestors[rows],
            draft_rows=self.draft_rows[rows],
            draft_log_probs=self.draft_log_probs[rows],
        )

    def mark_dynamic(self) -> None:
        """Let functions that are compiled with this tree serve trees of other sizes, too."""
        for tensor in (self.tokens, self.parents, self.depths, self.draft_rows):
            torch._dynamo.maybe_mark_dynamic(tensor, 1)
        torch._dynamo.maybe_mark_dynamic(self.ancestors, [1, 2])

    def has_children(self) -> Tensor:
        """Return ``[B, N]`` bool: which nodes are not leaves; true for padding, too."""
        found = torch.zeros_like(self.tokens, dtype=torch.bool)
        return found.scatter_(1, self.parents[:, 1:], True)

    def to_expanded(self, values: Tensor) -> Tensor:
        """Gather values ``[B, N]`` at the expanded nodes: ``[B, M]``, 0 if not in the tree."""
        count = self.draft_log_probs.shape[1]
        rows = torch.where(self.draft_rows < 0, count, self.draft_rows)  # a spare one
        return values.new_zeros(len(values), count + 1).scatter_(1, rows, values)[:, :count]

    def path_sum(self, values: Tensor) -> Tensor:
        """Add up the values ``[B, N]`` on the path from the root to every node: ``[B, N]``."""
        return torch.where(self.ancestors, values[:, None, :], 0.0).sum(-1)


class TreeBuilder:
    """Grow a pool of candidates level by level, then keep the best of them as a tree.

    After :meth:`start`, ``depth`` times, :meth:`choose` selects the nodes to expand and
    :meth:`extend` takes their distributions. :meth:`finish` keeps the ``total_tokens - 1``
    candidates with the largest cumulative log-probability. A child never scores above its parent,
    and ties go to the earlier candidate, so the result is a tree.

    The pool starts with the root and is ordered by level, then by expanded parent: ``1 + e * K +
    c`` is child ``c`` of the ``e``-th expanded candidate, where the root is expanded candidate 0.
    ``draw`` samples the children of a tree with ``top_k = 1``.
    """

    def __init__(
        self,
        config: TreeConfig,
        vocab_size: int,
        device: torch.device | str,
        token_ids: Tensor | None = None,
        draw: Draw | None = None,
    ) -> None:
        self.token_ids, self.draw = token_ids, draw
        self.total_tokens = config.total_tokens
        self.depth = depth = config.depth
        self.width = width = min(config.top_k, vocab_size)
        expanded = torch.arange(1 + depth * width, device=device)  # [M]
        self._draft_rows = expanded
        levels = (expanded + width - 1) // width  # 0 for the root, then 1 to depth
        root = torch.zeros_like(expanded[:1])
        self._parents = torch.cat([root, expanded.repeat_interleave(width)])  # [P], expanded index
        self._depths = torch.cat([root, levels.repeat_interleave(width) + 1])  # [P]
        # Pool index at which the level of each expanded candidate begins.
        self._firsts = (1 + width + (levels - 2) * width**2).where(levels > 1, levels)

    def start(self, log_probs: Tensor, points: Tensor | None = None) -> None:
        """Begin with the root's distribution ``[B, D]``, and points ``[B, depth + 1]`` to draw."""
        self._points = points
        scores, tokens = self._children(log_probs, 0)
        # One entry per level: [B, 1], [B, K], then [B, K * K]. The root has the largest score.
        self.scores = [scores.new_zeros(len(scores), 1), scores]
        self.tokens = [tokens]
        # Of the candidates that are expanded: their indices within a level, and [B, K, D].
        self.chosen = [tokens.new_zeros(len(tokens), 1)]
        self.log_probs = [log_probs[:, None]]

    def choose(self) -> tuple[Tensor, Tensor]:
        """Select the newest level's ``K`` best candidates for expansion: their tokens ``[B, K]``.

        Also return ``[B, K]`` the position of each one's parent in the previous selection.
        """
        scores, tokens = self.scores[-1], self.tokens[-1]
        if len(self.chosen) == 1:
            self.chosen_scores = scores
            # All children of the root are expanded, in their order: 0 to K - 1.
            self.chosen.append(self._draft_rows[: self.width].expand_as(tokens))
            return tokens, torch.zeros_like(tokens)
        if self.width == 1:  # a chain leaves no choice
            self.chosen_scores, zero = scores, self.chosen[0]
            self.chosen.append(zero)
            return tokens, zero
        self.chosen_scores, index = _ranked(scores).topk(self.width)
        self.chosen.append(index)
        return tokens.gather(1, index), index // self.width

    def extend(self, log_probs: Tensor) -> None:
        """Add the children of the selected candidates, given their distributions ``[B, K, D]``."""
        self.log_probs.append(log_probs)
        scores, tokens = self._children(log_probs, len(self.chosen) - 1)  # [B, K, K]
        self.scores.append((scores + self.chosen_scores[:, :, None]).flatten(1))
        self.tokens.append(tokens.flatten(1))

    def _children(self, log_probs: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and tokens of the children: ``[..., K]``."""
        if self.draw is None:
            scores, index = top_k(log_probs, self.width)
        else:
            assert self._points is not None
            index = self.draw(log_probs.flatten(0, -2), self._points[:, level])
            index = index.view(*log_probs.shape[:-1], 1)
            scores = log_probs.gather(-1, index)
        return scores, index if self.token_ids is None else self.token_ids[index]

    def finish(self, root: Tensor) -> DraftTree:
        """Return the tree of the root tokens ``[B]`` and the best candidates."""
        # A stable sort rather than topk: among equal scores the earlier candidate, and so the
        # parent, comes first.
        scores = _ranked(torch.cat(self.scores, 1))
        order = scores.sort(dim=1, descending=True, stable=True).indices
        kept = order[:, : self.total_tokens].sort(1).values  # [B, N] pool indices
        chosen = torch.cat(self.chosen, 1) + self._firsts  # [B, M] pool indices
        parents = torch.searchsorted(kept, chosen.gather(1, self._parents[kept]))
        rows = torch.full_like(order, -1).scatter_(1, chosen, self._draft_rows.expand_as(chosen))
        levels, self.log_probs = self.log_probs, []  # freed before the target's pass
        return DraftTree(
            tokens=torch.cat([root[:, None], *self.tokens], 1).gather(1, kept),
            parents=parents,
            depths=self._depths[kept],
            ancestors=ancestor_matrix(parents, self.depth + 1),
            draft_rows=rows.gather(1, kept),
            draft_log_probs=torch.cat(levels, 1),
            max_depth=self.depth + 1,
            token_ids=self.token_ids,
            sampled=self.draw is not None,
        )


def ancestor_matrix(parents: Tensor, max_depth: int) -> Tensor:
    """Compute the reflexive ancestor relation ``[B, N, N]`` of nodes with parents ``[B, N]``.

    Squaring the relation "is ``n`` or fewer moves up from" doubles the distance that it covers.
    """
    batch, size = parents.shape
    identity = torch.eye(size, device=parents.device).expand(batch, -1, -1)
    above = identity.scatter(2, parents[:, :, None], 1.0)
    covered = 1  # edges upwards from each node
    while covered < max_depth:
        above = (above @ above).clamp_max_(1.0)
        covered *= 2
    return above > 0


def single_node(root: Tensor) -> DraftTree:
    """Return a tree that consists of its root ``[B]``; verifying it is plain decoding."""
    zero = torch.zeros_like(root)[:, None]
    return DraftTree(
        tokens=root[:, None],
        parents=zero,
        depths=torch.zeros_like(zero),  # compiled code must not see one tensor twice
        ancestors=torch.ones_like(zero, dtype=torch.bool)[:, :, None],
        draft_rows=zero - 1,
        draft_log_probs=torch.empty(root.shape[0], 0, 0, device=root.device),
        max_depth=0,
    )


def _ranked(scores: Tensor) -> Tensor:
    """Replace NaN, which a broken head produces, by ``-inf``, so that scores can be ordered."""
    return scores.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
