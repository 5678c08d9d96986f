"""The draft tree: its invariants for any size, and what is kept against a brute force in Python."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from eagle_fsd.model.tree import DraftTree, TreeBuilder, ancestor_matrix, single_node

Path = tuple[int, ...]

#: What a head may say beyond ordinary distributions; all of them make ties.
STRANGE = ("equal", "certain", "impossible", "nan", "some nan", "two values")


@dataclass(frozen=True)
class Head:
    """A stand-in for the draft head: one fixed distribution for every path of every row."""

    seed: int
    vocabulary: int
    kind: str = "random"

    def __call__(self, row: int, path: Path) -> np.ndarray:
        """``[V]`` float32 log-probabilities after ``path`` (tokens below the root)."""
        random = np.random.default_rng([self.seed, row, *path])
        size = self.vocabulary
        if self.kind == "equal":
            return np.full(size, -np.log(size), np.float32)
        if self.kind == "certain":
            values = np.full(size, -np.inf, np.float32)
            values[random.integers(size)] = 0.0
            return values
        if self.kind == "impossible":
            return np.full(size, -np.inf, np.float32)
        if self.kind == "nan":
            return np.full(size, np.nan, np.float32)
        if self.kind == "two values":
            return random.choice([-1.0, -2.0], size).astype(np.float32)
        values = torch.tensor(random.normal(0, 2, size)).log_softmax(0).float().numpy()
        if self.kind == "some nan" and random.random() < 0.3:
            values[random.integers(size)] = np.nan
        return values


def _grow(
    head: Head, batch: int, total_tokens: int, depth: int, top_k: int
) -> tuple[DraftTree, list[list[Path]]]:
    """Drive the builder as a decoding step does; also each row's expanded paths, in order."""
    builder = TreeBuilder(total_tokens, depth, top_k, head.vocabulary, "cpu")
    builder.start(torch.tensor(np.stack([head(row, ()) for row in range(batch)])))
    expanded: list[list[Path]] = [[()] for _ in range(batch)]
    before: list[list[Path]] = [[()] for _ in range(batch)]
    for _ in range(depth):
        tokens, slots = builder.choose()
        assert tokens.shape == slots.shape == (batch, builder.width)
        before = [
            [
                (*paths[slot], token)
                for token, slot in zip(tokens[row].tolist(), slots[row].tolist(), strict=True)
            ]
            for row, paths in enumerate(before)
        ]
        for row, paths in enumerate(before):
            expanded[row] += paths
        said = [np.stack([head(row, path) for path in paths]) for row, paths in enumerate(before)]
        builder.extend(torch.tensor(np.stack(said)))
    root = torch.arange(batch) + 100
    return builder.finish(root), expanded


def _paths(tree: DraftTree, row: int) -> list[Path]:
    """The tokens from below the root to every node, by walking up one parent at a time."""
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    found = []
    for node in range(tree.size):
        path: Path = ()
        while node:
            path = (tokens[node], *path)
            node = parents[node]
        found.append(path)
    return found


def _brute_force(
    head: Head, row: int, total_tokens: int, depth: int, top_k: int
) -> tuple[set[Path], set[Path], bool]:
    """EAGLE-2's tree with dictionaries: kept paths, expanded paths, and whether scores tie.

    Scores are float32 and summed from the root down, so equal means equal to the bit. A vocabulary
    smaller than ``top_k`` takes its place, both for children and for nodes expanded at each level.
    """
    top_k = min(top_k, head.vocabulary)

    def children(path: Path, score: np.float32) -> dict[Path, np.float32]:
        log_probs = head(row, path)
        best = sorted(range(len(log_probs)), key=lambda token: -log_probs[token])[:top_k]
        return {(*path, token): np.float32(score + log_probs[token]) for token in best}

    newest = children((), np.float32(0.0))
    pool = dict(newest)
    expanded: set[Path] = {()}
    for _ in range(depth):
        frontier = sorted(newest, key=lambda path: -newest[path])[:top_k]
        expanded.update(frontier)
        newest = {}
        for path in frontier:
            newest.update(children(path, pool[path]))
        pool.update(newest)
    kept = sorted(pool, key=lambda path: (-pool[path], len(path)))[: total_tokens - 1]
    return set(kept), expanded, len(set(pool.values())) < len(pool)


def _reachable(parents: list[int]) -> np.ndarray:
    """``[i, j]``: whether walking up from ``i`` meets ``j``; ``i`` itself counts."""
    matrix = np.zeros((len(parents), len(parents)), bool)
    for node in range(len(parents)):
        above = node
        matrix[node, above] = True
        while above:
            above = parents[above]
            matrix[node, above] = True
    return matrix


def _check_valid(tree: DraftTree, batch: int, total: int, depth: int, top_k: int, v: int) -> None:
    """Everything that makes it a tree, whatever the scores were."""
    width = min(top_k, v)
    size = min(total, 1 + width + depth * width**2)
    assert tree.size == size
    for name in ("tokens", "parents", "depths", "draft_rows"):
        assert getattr(tree, name).shape == (batch, size), name
        assert getattr(tree, name).dtype == torch.long, name
    assert tree.ancestors.shape == (batch, size, size)
    assert tree.draft_log_probs.shape == (batch, 1 + depth * width, v)
    assert tree.max_depth == depth + 1
    for row in range(batch):
        parents, depths = tree.parents[row].tolist(), tree.depths[row].tolist()
        tokens = tree.tokens[row].tolist()
        assert parents[0] == 0
        assert depths[0] == 0
        assert tokens[0] == 100 + row
        assert all(0 <= token < v for token in tokens[1:])
        for node in range(1, size):
            # An index of a node that is in the tree and came earlier: ancestor-closed by induction.
            assert 0 <= parents[node] < node
            assert depths[node] == depths[parents[node]] + 1
        assert depths == sorted(depths)
        assert max(depths) <= tree.max_depth
        assert len(set(zip(parents[1:], tokens[1:], strict=True))) == size - 1  # siblings differ
        assert (tree.ancestors[row].numpy() == _reachable(parents)).all()
        children = set(parents[1:])
        assert tree.has_children()[row].tolist() == [node in children for node in range(size)]
        # Only expanded nodes have children, and no two nodes share a distribution.
        rows = [found for found in tree.draft_rows[row].tolist() if found >= 0]
        assert len(set(rows)) == len(rows)
        assert all(tree.draft_rows[row, node] >= 0 for node in children)


totals, depths, widths = st.integers(1, 60), st.integers(1, 4), st.integers(1, 6)
vocabularies, batches, seeds = st.integers(1, 10), st.integers(1, 3), st.integers(0, 2**31)


@given(totals, depths, widths, vocabularies, batches, seeds)
def test_invariants_and_the_kept_set(
    total: int, depth: int, top_k: int, vocabulary: int, batch: int, seed: int
) -> None:
    """A valid tree of exactly the best ``total - 1`` candidates, with the right distributions.

    Sizes cover a vocabulary smaller than ``top_k`` and a pool smaller than ``total``.
    """
    head = Head(seed, vocabulary)
    tree, order = _grow(head, batch, total, depth, top_k)
    _check_valid(tree, batch, total, depth, top_k, vocabulary)
    for row in range(batch):
        kept, expanded, tied = _brute_force(head, row, total, depth, top_k)
        assume(not tied or vocabulary == 1)
        paths = _paths(tree, row)
        assert set(paths[1:]) == kept
        assert set(order[row]) == expanded
        for node, path in enumerate(paths):
            index = tree.draft_rows[row, node].item()
            assert (index >= 0) == (path in expanded)
            if index >= 0:
                said = tree.draft_log_probs[row, index].numpy()
                np.testing.assert_array_equal(said, head(row, path))


@given(st.sampled_from(STRANGE), totals, depths, widths, vocabularies, batches, seeds)
def test_ties_and_broken_heads_still_give_a_tree(
    kind: str, total: int, depth: int, top_k: int, vocabulary: int, batch: int, seed: int
) -> None:
    """All-equal scores, probabilities of exactly 1 and 0, and NaN: never an invalid tree."""
    head = Head(seed, vocabulary, kind)
    tree, order = _grow(head, batch, total, depth, top_k)
    _check_valid(tree, batch, total, depth, top_k, vocabulary)
    for row in range(batch):
        for node, path in enumerate(_paths(tree, row)):
            index = tree.draft_rows[row, node].item()
            if index >= 0:
                assert order[row][index] == path
                said = tree.draft_log_probs[row, index].numpy()
                np.testing.assert_array_equal(said, head(row, path))


@given(totals, depths, widths, vocabularies, seeds)
def test_rows_do_not_touch_each_other(
    total: int, depth: int, top_k: int, vocabulary: int, seed: int
) -> None:
    """A row's tree is the one it gets alone."""
    head = Head(seed, vocabulary)
    together = _grow(head, 3, total, depth, top_k)[0]
    alone = _grow(head, 1, total, depth, top_k)[0]
    for name in ("tokens", "parents", "depths", "draft_rows", "ancestors", "draft_log_probs"):
        assert torch.equal(getattr(together, name)[0], getattr(alone, name)[0]), name


@given(totals, depths, widths, vocabularies, seeds)
def test_a_larger_budget_only_adds_nodes(
    total: int, depth: int, top_k: int, vocabulary: int, seed: int
) -> None:
    """The candidates are the same whatever is kept of them, so trees of growing size are nested."""
    head = Head(seed, vocabulary)
    small = set(_paths(_grow(head, 1, total, depth, top_k)[0], 0))
    large = set(_paths(_grow(head, 1, total + 5, depth, top_k)[0], 0))
    assert small <= large


# -- a tree drawn by hand ------------------------------------------------------------------------
#
# Probabilities, tokens a to d, two children each, two expansions; kept nodes numbered:
#
#   root --a .60 [1]--c .50 [3]--b .80 [6]      acb .2400      aca .0300 dropped
#     |        +------d .25                     ad  .1500 dropped
#     +----b .35 [2]--a .90 [4]--d .50 [5]      bad .1575      bac .0945 dropped
#              +------d .05                     bd  .0175 dropped
#
# On the third level b-a (.315) was chosen before a-c (.300), so its child comes first.
A, B, C, D = range(4)
DRAWN = {
    (): [0.60, 0.35, 0.04, 0.01],
    (A,): [0.15, 0.10, 0.50, 0.25],
    (B,): [0.90, 0.01, 0.04, 0.05],
    (B, A): [0.15, 0.05, 0.30, 0.50],
    (A, C): [0.10, 0.80, 0.06, 0.04],
}
MASK = [
    [1, 0, 0, 0, 0, 0, 0],
    [1, 1, 0, 0, 0, 0, 0],
    [1, 0, 1, 0, 0, 0, 0],
    [1, 1, 0, 1, 0, 0, 0],
    [1, 0, 1, 0, 1, 0, 0],
    [1, 0, 1, 0, 1, 1, 0],
    [1, 1, 0, 1, 0, 0, 1],
]


def _drawn(path: Path) -> Tensor:
    return torch.tensor(DRAWN[path]).log()


def test_a_tree_drawn_by_hand() -> None:
    """Every tensor of the tree above, the mask written out."""
    builder = TreeBuilder(7, 2, 2, len(DRAWN[()]), "cpu")
    builder.start(_drawn(())[None])
    tokens, slots = builder.choose()
    assert tokens.tolist() == [[A, B]]
    assert slots.tolist() == [[0, 0]]
    builder.extend(torch.stack([_drawn((A,)), _drawn((B,))])[None])
    tokens, slots = builder.choose()
    assert tokens.tolist() == [[A, C]]
    assert slots.tolist() == [[1, 0]]  # below b, below a
    builder.extend(torch.stack([_drawn((B, A)), _drawn((A, C))])[None])
    tree = builder.finish(torch.tensor([9]))
    assert tree.tokens.tolist() == [[9, A, B, C, A, D, B]]
    assert tree.parents.tolist() == [[0, 0, 0, 1, 2, 4, 3]]
    assert tree.depths.tolist() == [[0, 1, 1, 2, 2, 3, 3]]
    assert tree.draft_rows.tolist() == [[0, 1, 2, 4, 3, -1, -1]]
    assert tree.ancestors.long().tolist() == [MASK]
    assert tree.has_children().tolist() == [[True, True, True, True, True, False, False]]
    for row, path in enumerate(DRAWN):
        assert torch.equal(tree.draft_log_probs[0, row], _drawn(path))


@pytest.mark.parametrize(
    ("parents", "matrix"),
    [
        ([0, 0, 1, 2], [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]),  # a chain
        ([0, 0, 0, 0], [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]),  # a star
        ([0], [[1]]),
    ],
)
def test_ancestor_matrix(parents: list[int], matrix: list[list[int]]) -> None:
    """Chain, star and lone root, written out."""
    assert ancestor_matrix(torch.tensor([parents]))[0].long().tolist() == matrix


def test_single_node() -> None:
    """Nothing but the root, with no draft distribution: verifying it is plain decoding."""
    tree = single_node(torch.tensor([5, 7]), vocabulary=11)
    assert tree.size == 1
    assert tree.max_depth == 0
    assert tree.tokens.tolist() == [[5], [7]]
    assert tree.parents.tolist() == tree.depths.tolist() == [[0], [0]]
    assert tree.draft_rows.tolist() == [[-1], [-1]]
    assert tree.ancestors.tolist() == [[[True]], [[True]]]
    assert tree.has_children().tolist() == [[False], [False]]
    assert tree.draft_log_probs.shape == (2, 0, 11)


def test_budget_of_one_is_the_root_alone() -> None:
    """``total_tokens=1`` keeps the root; its distribution is known but it has no children."""
    tree, _ = _grow(Head(0, 5), 2, total_tokens=1, depth=2, top_k=3)
    assert tree.size == 1
    assert tree.draft_rows.tolist() == [[0], [0]]
    assert not tree.has_children().any()


def test_the_default_tree() -> None:
    """EAGLE-2's own size (60/6/10) over a larger vocabulary, against the brute force."""
    head = Head(1, 300)
    tree, _ = _grow(head, 1, total_tokens=60, depth=6, top_k=10)
    _check_valid(tree, 1, 60, 6, 10, 300)
    kept, _, tied = _brute_force(head, 0, total_tokens=60, depth=6, top_k=10)
    assert not tied
    assert set(_paths(tree, 0)[1:]) == kept
