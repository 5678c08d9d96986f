"""The draft tree: invariants for any size, and the kept nodes against a brute-force search."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from eagle_fsd.model.config import TreeConfig
from eagle_fsd.model.tree import DraftTree, TreeBuilder

Path = tuple[int, ...]

#: Degenerate distributions; all of them give ties.
DEGENERATE = ("equal", "certain", "impossible", "nan", "some nan", "two values")


@dataclass(frozen=True)
class FakeHead:
    """A draft head with one fixed distribution for every path of every row."""

    seed: int
    vocab_size: int
    kind: str = "random"

    def __call__(self, row: int, path: Path) -> np.ndarray:
        """``[V]`` float32 log-probabilities after ``path`` (tokens below the root)."""
        random = np.random.default_rng([self.seed, row, *path])
        size = self.vocab_size
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
    head: FakeHead, batch: int, total_tokens: int, depth: int, top_k: int
) -> tuple[DraftTree, list[list[Path]]]:
    """Drive the builder as a decoding step does, and check the tree; also return expanded paths."""
    config = TreeConfig(total_tokens=total_tokens, depth=depth, top_k=top_k)
    builder = TreeBuilder(config, head.vocab_size, "cpu")
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
        drafted = [
            np.stack([head(row, path) for path in paths]) for row, paths in enumerate(before)
        ]
        builder.extend(torch.tensor(np.stack(drafted)))
    tree = builder.finish(torch.arange(batch) + 100)
    _check_valid(tree, expanded, head, config)
    return tree, expanded


def _paths(tree: DraftTree, row: int) -> list[Path]:
    """The tokens from below the root to every node."""
    found: list[Path] = [()]
    nodes = zip(tree.parents[row, 1:].tolist(), tree.tokens[row, 1:].tolist(), strict=True)
    for parent, token in nodes:
        found.append((*found[parent], token))
    return found


def _brute_force(
    head: FakeHead, row: int, total_tokens: int, depth: int, top_k: int
) -> tuple[set[Path], set[Path], bool]:
    """EAGLE-2's tree with dictionaries: kept paths, expanded paths, and whether scores tie.

    Scores are float32 and summed from the root down, as in the builder. ``top_k`` is limited to the
    vocabulary.
    """
    top_k = min(top_k, head.vocab_size)

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


def _check_valid(
    tree: DraftTree, order: list[list[Path]], head: FakeHead, config: TreeConfig
) -> None:
    """Check every invariant that does not depend on the scores."""
    batch, depth, v = len(order), config.depth, head.vocab_size
    width = min(config.top_k, v)
    size = min(config.total_tokens, 1 + width + depth * width**2)
    assert tree.size == size
    for name in ("tokens", "parents", "depths", "draft_rows"):
        assert getattr(tree, name).shape == (batch, size), name
        assert getattr(tree, name).dtype == torch.long, name
    assert tree.ancestors.shape == (batch, size, size)
    assert tree.draft_log_probs.shape == (batch, 1 + depth * width, v)
    assert tree.max_depth == depth + 1
    for row, expanded in enumerate(order):
        parents, depths = tree.parents[row].tolist(), tree.depths[row].tolist()
        tokens = tree.tokens[row].tolist()
        assert parents[0] == 0
        assert depths[0] == 0
        assert tokens[0] == 100 + row
        assert all(0 <= token < v for token in tokens[1:])
        for node in range(1, size):
            # Parents come earlier, so by induction every ancestor is in the tree.
            assert 0 <= parents[node] < node
            assert depths[node] == depths[parents[node]] + 1
        assert depths == sorted(depths)
        assert max(depths) <= tree.max_depth
        assert len(set(zip(parents[1:], tokens[1:], strict=True))) == size - 1  # siblings differ
        paths = _paths(tree, row)
        reached = [[path[: len(above)] == above for above in paths] for path in paths]
        assert tree.ancestors[row].tolist() == reached
        children = set(parents[1:])
        assert tree.has_children()[row].tolist() == [node in children for node in range(size)]
        # Only expanded nodes have children, and no two nodes share a distribution.
        rows = [found for found in tree.draft_rows[row].tolist() if found >= 0]
        assert len(set(rows)) == len(rows)
        assert all(tree.draft_rows[row, node] >= 0 for node in children)
        for index, path in zip(tree.draft_rows[row].tolist(), paths, strict=True):
            if index >= 0:
                assert expanded[index] == path
                found = tree.draft_log_probs[row, index].numpy()
                np.testing.assert_array_equal(found, head(row, path))


totals, depths, widths = st.integers(1, 60), st.integers(1, 4), st.integers(1, 6)
vocab_sizes, batches, seeds = st.integers(1, 10), st.integers(1, 3), st.integers(0, 2**31)


@given(totals, depths, widths, vocab_sizes, batches, seeds)
def test_tree_keeps_the_best_candidates(
    total: int, depth: int, top_k: int, vocab_size: int, batch: int, seed: int
) -> None:
    """Exactly the best ``total - 1`` candidates of each row, with the right distributions."""
    head = FakeHead(seed, vocab_size)
    tree, order = _grow(head, batch, total, depth, top_k)
    for row in range(batch):
        kept, expanded, tied = _brute_force(head, row, total, depth, top_k)
        assume(not tied or vocab_size == 1)
        paths = _paths(tree, row)
        assert set(paths[1:]) == kept
        assert set(order[row]) == expanded
        assert (tree.draft_rows[row] >= 0).tolist() == [path in expanded for path in paths]


@given(st.sampled_from(DEGENERATE), totals, depths, widths, vocab_sizes, batches, seeds)
def test_tree_is_valid_with_ties_and_broken_heads(
    kind: str, total: int, depth: int, top_k: int, vocab_size: int, batch: int, seed: int
) -> None:
    """All scores equal, probabilities of exactly 1 and 0, and NaN."""
    _grow(FakeHead(seed, vocab_size, kind), batch, total, depth, top_k)
