"""Draft without a model, from counts of the tokens that followed the same n-gram before.

:class:`NGramDrafter` looks up the last tokens of a row in the row itself (prompt lookup).
:class:`AdaptiveNGramDrafter` counts n-grams over all rows and calls. Both run on the host.

``q`` at a node is the share of each token in the counts. After an n-gram that was seen once, it is
a point mass on a token ``x``, whose JS divergence from ``p`` depends on ``p(x)`` alone and is ``3/4
ln(4/3) = 0.216`` at ``p(x) = 1/2``: below that threshold FSD's gate is open there only if ``x`` is
the target's most likely token.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from eagle_fsd.model.cache import TreeCache
from eagle_fsd.model.compilation import upload
from eagle_fsd.model.config import TreeConfig
from eagle_fsd.model.drafters.interface import Drafter, DraftState
from eagle_fsd.model.tree import DraftTree, Draw, ancestor_matrix, single_node

if TYPE_CHECKING:
    from eagle_fsd.model.random_numbers import RandomNumbers
    from eagle_fsd.model.target import Target

#: Maximum number of tokens in ``q``, and of children of a node.
MAX_FOLLOWERS = 32
#: Maximum number of earlier occurrences in a look-up, the latest ones.
MAX_OCCURRENCES = 64

#: Given the tokens on the path from the root to a node, without the root: the tokens that followed
#: and their counts, the most frequent first, of equally frequent ones the latest.
Followers = Callable[[list[int]], list[tuple[int, int]]]


class _CountingDrafter(Drafter):
    """Common part of the drafters that count on the host."""

    @abstractmethod
    def new_row(self) -> _Occurrences | _TableRow:
        """Return a row without tokens. What its ``look_up`` returns is valid until ``append``."""

    def attach(self, target: Target) -> Self:
        self.vocab_size = target.vocab_size
        return self

    def max_nodes(self, tree: TreeConfig) -> int:
        width = min(tree.top_k, MAX_FOLLOWERS)
        complete = sum(width**level for level in range(tree.depth + 2))
        return min(tree.total_tokens, complete)

    def start(self, tree: TreeConfig, draw: Draw | None) -> _CountingState:
        return _CountingState(self, tree)


class NGramDrafter(_CountingDrafter):
    """Prompt lookup: propose what followed earlier occurrences of a row's last tokens.

    The earlier occurrences of the longest match are looked up in the row's own tokens, prompt and
    answer. Their continuations, merged into a tree, are the draft. Follows prompt lookup decoding
    (Saxena, 2023, https://github.com/apoorvumang/prompt-lookup-decoding), which drafts the
    continuation of one occurrence.

    Args:
        max_match: Number of last tokens beyond which a longer match is not preferred.
        min_match: Minimum number of last tokens that must match.

    Raises:
        ValueError: The bounds are not ``1 <= min_match <= max_match``.
    """

    def __init__(self, max_match: int = 8, min_match: int = 1) -> None:
        if not 1 <= min_match <= max_match:
            raise ValueError(
                "min_match and max_match must satisfy 1 <= min_match <= max_match; got"
                f" {min_match} and {max_match}"
            )
        self.max_match, self.min_match = max_match, min_match

    def __repr__(self) -> str:
        return f"NGramDrafter(max_match={self.max_match}, min_match={self.min_match})"

    def new_row(self) -> _Occurrences:
        return _Occurrences(self.max_match, self.min_match)


class _Occurrences:
    """A row's tokens, with links between the occurrences of the same ``min_match`` tokens."""

    def __init__(self, max_match: int, min_match: int) -> None:
        self.max_match, self.min_match = max_match, min_match
        self.tokens: list[int] = []
        self.latest: dict[tuple[int, ...], int] = {}  # where each n-gram ends
        self.previous: list[int] = []  # where the n-gram that ends here ended before; -1: nowhere

    def append(self, token: int) -> None:
        self.tokens.append(token)
        ngram = tuple(self.tokens[-self.min_match :])
        self.previous.append(self.latest.get(ngram, -1))
        self.latest[ngram] = len(self.tokens) - 1

    def look_up(self) -> Followers:
        tokens, starts = self.tokens, self._matches()

        def followers(path: list[int]) -> list[tuple[int, int]]:
            counts: Counter[int] = Counter()
            for start in starts:
                end = start + len(path)
                if end < len(tokens) and tokens[start:end] == path:
                    counts[tokens[end]] += 1
            return counts.most_common()

        return followers

    def _matches(self) -> list[int]:
        """Return the positions after the longest matches, the latest first."""
        tokens, last = self.tokens, len(self.tokens) - 1
        found: list[int] = []
        longest = 0
        end = self.previous[-1]
        for _ in range(MAX_OCCURRENCES):
            if end < 0:
                break
            length = self.min_match
            while (
                length < min(self.max_match, end + 1)
                and tokens[end - length] == tokens[last - length]
            ):
                length += 1
            if length > longest:
                found, longest = [], length
            if length == longest:
                found.append(end + 1)
            end = self.previous[end]
        return found

    def copy(self) -> Self:
        row = type(self)(self.max_match, self.min_match)
        row.tokens, row.previous = self.tokens.copy(), self.previous.copy()
        row.latest = self.latest.copy()
        return row


class AdaptiveNGramDrafter(_CountingDrafter):
    """A table of n-grams learned from the prompts and from every token that is decoded.

    As in ADED (Adaptix, arXiv 2407.12021), the table also learns from what the target emits. It
    looks up the longest end of the last ``order - 1`` tokens that it has seen, so it backs off to
    shorter n-grams. (ADED counts tri-grams only, starts from a corpus and searches the table with
    Monte Carlo tree search; here the table starts empty, and the most probable paths are found
    exactly.)

    The table belongs to the drafter and grows over its calls, so unless decoding is lossless, an
    answer depends on what was decoded before. Use the drafter from one thread at a time.

    Args:
        order: ``n`` of the longest n-grams, the predicted token included.
        min_order: ``n`` of the shortest n-grams to back off to; 1 for uni-grams.
        capacity: Maximum number of contexts; beyond it, the oldest are forgotten.

    Raises:
        ValueError: The bounds are not ``1 <= min_order <= order``, or ``capacity`` is less than 1.
    """

    learns = True

    def __init__(self, order: int = 5, min_order: int = 2, capacity: int = 1_000_000) -> None:
        if not 1 <= min_order <= order:
            raise ValueError(
                "min_order and order must satisfy 1 <= min_order <= order; got"
                f" {min_order} and {order}"
            )
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1; got {capacity}")
        self.order, self.min_order, self.capacity = order, min_order, capacity
        #: For each context, the tokens that followed, in the order of their last occurrence, and
        #: how often.
        self.table: OrderedDict[tuple[int, ...], dict[int, int]] = OrderedDict()

    def __repr__(self) -> str:
        values = f"order={self.order}, min_order={self.min_order}, capacity={self.capacity}"
        return f"AdaptiveNGramDrafter({values})"

    def fresh(self) -> AdaptiveNGramDrafter:
        return AdaptiveNGramDrafter(self.order, self.min_order, self.capacity)

    def attach(self, target: Target) -> Self:
        known = getattr(self, "vocab_size", target.vocab_size)  # unknown before the first target
        if self.table and known != target.vocab_size:
            raise ValueError(
                f"this table was learned with a vocabulary of {known} tokens, but the target has"
                f" {target.vocab_size}; create a new drafter"
            )
        return super().attach(target)

    def new_row(self) -> _TableRow:
        return _TableRow(self, [])

    def learn(self, context: list[int], token: int) -> None:
        """Count ``token`` after the last tokens of ``context``, once for each length of n-gram."""
        for length in range(self.min_order - 1, min(self.order - 1, len(context)) + 1):
            key = tuple(context[len(context) - length :])
            counts = self.table.get(key)
            if counts is None:
                if len(self.table) == self.capacity:
                    self.table.popitem(last=False)
                counts = self.table[key] = {}
            count = counts.pop(token, 0) + 1
            if len(counts) == MAX_FOLLOWERS:
                del counts[min(counts, key=counts.__getitem__)]
            counts[token] = count

    def followers(self, context: list[int]) -> list[tuple[int, int]]:
        """Return what followed the longest known end of ``context``; see :data:`Followers`."""
        for length in range(min(self.order - 1, len(context)), self.min_order - 2, -1):
            counts = self.table.get(tuple(context[len(context) - length :]))
            if counts is not None:
                return sorted(counts.items(), key=lambda item: item[1])[::-1]
        return []


class _TableRow:
    """The last tokens of a row, whose n-grams a table learns."""

    def __init__(self, drafter: AdaptiveNGramDrafter, tokens: list[int]) -> None:
        self.drafter, self.tokens = drafter, tokens

    def append(self, token: int) -> None:
        self.drafter.learn(self.tokens, token)
        self.tokens.append(token)
        del self.tokens[: max(0, len(self.tokens) - self.drafter.order + 1)]

    def look_up(self) -> Followers:
        return lambda path: self.drafter.followers([*self.tokens, *path])

    def copy(self) -> Self:
        return type(self)(self.drafter, self.tokens.copy())


@dataclass
class _Node:
    """A node on the host: tokens below the root, the parent's index, and log-probabilities."""

    path: list[int]
    parent: int
    q: list[tuple[int, float]] = field(default_factory=list)


def grow(followers: Followers, size: int, depth: int, width: int) -> list[_Node]:
    """Find the ``size`` most probable nodes, or all, in level order, the root first.

    A child's probability is at most its parent's, so taking the best candidate repeatedly finds
    them.
    """
    nodes: list[_Node] = []
    # Negative log-probability of the path, number of earlier candidates to break ties, node.
    candidates = [(0.0, 0, _Node([], 0))]
    count = 0
    while candidates and len(nodes) < size:
        score, _, node = heappop(candidates)
        if len(node.path) < depth:
            found = followers(node.path)[:MAX_FOLLOWERS]
            total = sum(times for _, times in found)
            node.q = [(token, math.log(times / total)) for token, times in found]
            for token, log_prob in node.q[:width]:
                count += 1
                child = _Node([*node.path, token], len(nodes))
                heappush(candidates, (score - log_prob, count, child))
        nodes.append(node)
    parents = {node.parent for node in nodes[1:]}
    order = sorted(range(len(nodes)), key=lambda index: len(nodes[index].path))
    place = {index: position for position, index in enumerate(order)}
    return [
        _Node(nodes[i].path, place[nodes[i].parent], nodes[i].q if i in parents else [])
        for i in order
    ]


class _CountingState(DraftState):
    """The state of a drafter that counts on the host."""

    on_device = False
    waits = True

    def __init__(self, drafter: _CountingDrafter, tree: TreeConfig) -> None:
        self.drafter, self.rows = drafter, list[_Occurrences | _TableRow]()
        self._shown = 0
        self.use(tree)

    def use(self, tree: TreeConfig) -> None:
        self.size, self.depth = self.drafter.max_nodes(tree), tree.depth + 1
        self.width = tree.top_k

    def reserve(self, rows: int, max_length: int, cache: TreeCache | None) -> None:
        self.rows += [self.drafter.new_row() for _ in range(rows - len(self.rows))]

    def admit(self, first: int, prompts: Sequence[Sequence[int]]) -> None:
        for index, prompt in enumerate(prompts, first):
            self.rows[index] = self.drafter.new_row()
            for token in prompt:
                self.rows[index].append(token)

    def show(self, rows: int) -> None:
        self._shown = rows

    def draft(self, roots: Tensor, keys: Tensor | None, random: RandomNumbers) -> DraftTree:
        """Propose the most probable nodes of each row, padded with nodes that are never kept."""
        live = self.rows[: self._shown]
        rows = [grow(row.look_up(), self.size, self.depth, self.width) for row in live]
        if all(len(nodes) == 1 for nodes in rows):
            return single_node(roots)
        batch, size = len(rows), self.size
        tokens, depths = np.zeros((2, batch, size), np.int64)
        draft_rows = np.full_like(tokens, -1)
        parents = np.tile(np.arange(size), (batch, 1))
        # Rows of q that belong to no node are a point mass on token 0.
        support = np.zeros((batch, size - 1, MAX_FOLLOWERS), np.int64)
        log_probs = np.full(support.shape, -np.inf, np.float32)
        log_probs[:, :, 0] = 0.0
        for row, nodes in enumerate(rows):
            padding = size - len(nodes)  # between the root and its children
            expanded = 0
            for index, node in enumerate(nodes):
                place = index + padding if index else 0
                if index:
                    tokens[row, place], depths[row, place] = node.path[-1], len(node.path)
                    parents[row, place] = node.parent + padding if node.parent else 0
                if node.q:
                    draft_rows[row, place] = expanded
                    ids, values = zip(*node.q, strict=True)
                    support[row, expanded, : len(ids)] = ids
                    log_probs[row, expanded, : len(ids)] = values
                    expanded += 1
        device = roots.device
        shape = batch, size - 1, self.drafter.vocab_size
        draft_log_probs = torch.full(shape, -torch.inf, dtype=torch.float32, device=device)
        sparse = upload(support, device), upload(log_probs, device)
        draft_log_probs.scatter_reduce_(2, *sparse, "amax")
        parent_nodes = upload(parents, device)
        return DraftTree(
            tokens=torch.cat([roots[:, None], upload(tokens[:, 1:], device)], 1),
            parents=parent_nodes,
            depths=upload(depths, device),
            ancestors=ancestor_matrix(parent_nodes, self.depth),
            draft_rows=upload(draft_rows, device),
            draft_log_probs=draft_log_probs,
            max_depth=self.depth,
        )

    def observe(self, tokens: list[list[int]]) -> None:
        for row, new in zip(self.rows, tokens, strict=False):
            for token in new:
                row.append(token)

    def copy_rows(self, source: Sequence[int], target: Sequence[int]) -> None:
        read = [self.rows[row].copy() for row in source]
        for row, copied in zip(target, read, strict=True):
            self.rows[row] = copied
