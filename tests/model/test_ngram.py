"""Drafting from counts: look-ups, trees, padding, and decoding with them."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pairs import (
    aligned_pair,
    greedy_reference,
    left_padded,
    prompt,
    small_tree,
    small_vocabulary_config,
)
from sampling_laws import MODES, assert_target_law, generate, target_law
from transformers import LlamaForCausalLM
from trees import first_numbers

from eagle_fsd import EagleFSD, Origin, TreeConfig
from eagle_fsd.model.drafters.interface import Drafter
from eagle_fsd.model.drafters.ngram import AdaptiveNGramDrafter, NGramDrafter, grow
from eagle_fsd.model.tree import DraftTree

DRAFTERS = {
    "ngram": NGramDrafter,
    "ngram-short": lambda: NGramDrafter(max_match=2, min_match=2),
    "adaptive": AdaptiveNGramDrafter,
    "adaptive-unigram": lambda: AdaptiveNGramDrafter(order=4, min_order=1),
}
#: A chain, a small tree, and a tree with more nodes than the counts usually fill.
TREES = [
    TreeConfig(total_tokens=7, depth=5, top_k=1),
    small_tree(),
    TreeConfig(total_tokens=40, depth=4, top_k=8),
]
#: Few tokens, so that n-grams repeat.
sequences = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def followers(drafter: NGramDrafter | AdaptiveNGramDrafter, tokens: list[int], path=()) -> list:
    """Return what the drafter looks up after ``tokens`` and then ``path``."""
    row = drafter.new_row()
    for token in tokens:
        row.append(token)
    return row.look_up()(list(path))


@given(sequences, st.integers(1, 5), st.integers(0, 4), st.lists(st.integers(0, 3), max_size=3))
def test_prompt_lookup_agrees_with_its_definition(
    tokens: list[int], min_match: int, more: int, path: list[int]
) -> None:
    """Compare every earlier position with the end of the row."""
    max_match = min_match + more

    def match(end: int) -> int:
        length = 0
        while length < min(end, max_match) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        return length

    lengths = {end: match(end) for end in range(1, len(tokens))}
    longest = max([*lengths.values(), min_match])
    continuations = [tokens[end:] for end in lengths if lengths[end] == longest]
    counts = Counter(
        item[len(path)]
        for item in continuations
        if item[: len(path)] == path and len(item) > len(path)
    )
    found = followers(NGramDrafter(max_match, min_match), tokens, path)
    assert dict(found) == counts
    assert [count for _, count in found] == sorted(counts.values(), reverse=True)


@given(st.lists(sequences, min_size=1, max_size=3), st.integers(1, 4), st.integers(0, 3))
def test_table_counts_every_ngram(rows: list[list[int]], min_order: int, more: int) -> None:
    """Counts include all rows, and lookup backs off to the longest context that was seen."""
    order = min_order + more
    drafter = AdaptiveNGramDrafter(order, min_order)
    for row in rows:
        found = followers(drafter, row)
    context = rows[-1]
    expected: Counter[int] = Counter()
    for length in range(order - 1, min_order - 2, -1):
        end = context[len(context) - length :]
        if length > len(context):
            continue
        for row in rows:
            for place in range(length, len(row)):
                if row[place - length : place] == end:
                    expected[row[place]] += 1
        if expected:
            break
    assert dict(found) == expected
    assert [count for _, count in found] == sorted(expected.values(), reverse=True)


def test_invalid_option_is_named() -> None:
    for make, message in (
        (lambda: NGramDrafter(1, 2), "1 <= min_match <= max_match; got 2 and 1"),
        (lambda: NGramDrafter(1, 0), "got 0 and 1"),
        (lambda: AdaptiveNGramDrafter(2, 3), "1 <= min_order <= order; got 3 and 2"),
        (lambda: AdaptiveNGramDrafter(2, 0), "got 0 and 2"),
        (lambda: AdaptiveNGramDrafter(capacity=0), "capacity must be at least 1; got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=25),
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_tree_holds_the_most_probable_nodes(
    tokens: list[int], size: int, depth: int, width: int
) -> None:
    """The tree's nodes are the most probable ones of all enumerated paths."""
    drafter = AdaptiveNGramDrafter(3, 1)
    row = drafter.new_row()
    for token in tokens:
        row.append(token)
    look_up = row.look_up()

    def paths(path: list[int], score: float):
        yield path, score
        if len(path) < depth:
            found = look_up(path)
            total = sum(count for _, count in found)
            for token, count in found[:width]:
                yield from paths([*path, token], score * count / total)

    every = {tuple(path): score for path, score in paths([], 1.0)}
    nodes = grow(look_up, size, depth, width)
    assert len(nodes) == min(size, len(every))
    assert nodes[0].path == []
    for node in nodes[1:]:
        assert nodes[node.parent].path == node.path[:-1]
    lengths = [len(node.path) for node in nodes]
    assert lengths == sorted(lengths)
    kept = sorted((every[tuple(node.path)] for node in nodes), reverse=True)
    best = sorted(every.values(), reverse=True)[:size]
    assert kept == pytest.approx(best)
    parents = {node.parent for node in nodes[1:]}
    for index, node in enumerate(nodes):
        assert bool(node.q) == (index in parents)
        assert not node.q or math.fsum(math.exp(value) for _, value in node.q) == pytest.approx(1)


def draft(drafter: Drafter, rows: list[list[int]], tree: TreeConfig) -> DraftTree:
    """Draft from rows of tokens."""
    drafter.attach(aligned_pair().target)
    state = drafter.start(tree, None)
    state.reserve(len(rows), 100, None)
    state.admit(0, rows)
    state.show(len(rows))
    roots = torch.tensor([row[-1] for row in rows])
    return state.draft(roots, None, first_numbers(0, len(rows)))


@given(
    st.lists(sequences, min_size=1, max_size=3),
    st.sampled_from(sorted(DRAFTERS)),
    st.sampled_from(TREES),
)
def test_drafted_trees_are_valid(rows: list[list[int]], name: str, config: TreeConfig) -> None:
    """Level order, ancestors, distributions, and isolated nodes as padding."""
    tree = draft(DRAFTERS[name](), rows, config)
    assert tree.tokens[:, 0].tolist() == [row[-1] for row in rows]
    if tree.size == 1:
        assert tree.max_depth == 0
        return
    assert tree.size == DRAFTERS[name]().max_nodes(config) <= config.total_tokens
    assert not tree.sampled
    torch.testing.assert_close(
        tree.draft_log_probs.exp().sum(-1), torch.ones(len(rows), tree.size - 1)
    )
    for row in range(len(rows)):
        parents, depths = tree.parents[row].tolist(), tree.depths[row].tolist()
        assert depths == sorted(depths)
        assert max(depths) <= tree.max_depth == config.depth + 1
        for node, parent in enumerate(parents):
            own = torch.zeros(tree.size, dtype=torch.bool)
            own[node] = True
            if depths[node]:
                assert depths[node] == depths[parent] + 1
                siblings = [i for i in range(tree.size) if depths[i] and parents[i] == parent]
                tokens = tree.tokens[row, siblings].tolist()
                assert len(set(tokens)) == len(tokens) <= config.top_k
                index = tree.draft_rows[row, parent]
                assert tree.draft_log_probs[row, index, tree.tokens[row, node]] > -math.inf
                assert torch.equal(tree.ancestors[row, node], tree.ancestors[row, parent] | own)
            else:
                assert parent == node
                assert torch.equal(tree.ancestors[row, node], own)
        inner = {parent for parent, depth in zip(parents, depths, strict=True) if depth}
        assert {i for i in range(tree.size) if tree.draft_rows[row, i] >= 0} == inner
        used = sorted(tree.draft_rows[row, sorted(inner)].tolist())
        assert used == list(range(len(inner)))


PROMPTS = [prompt(7, 1), prompt(1, 2), prompt(20, 3), prompt(2, 4)]


@pytest.mark.parametrize(
    ("name", "tree"),
    list(zip(DRAFTERS, [TREES[0], TREES[1], TREES[2], TREES[1]], strict=True)),
    ids=str,
)
def test_greedy_output_matches_hugging_face(name: str, tree: TreeConfig) -> None:
    """A batch of mixed lengths, twice, so that the table has learned the answers."""
    pair = EagleFSD(aligned_pair(cycle=8).model, DRAFTERS[name](), tree)  # it repeats itself
    ids, mask = left_padded(*PROMPTS)
    expected = greedy_reference(pair.model, ids, mask, new=40)
    first, second = (pair.generate(ids, mask, max_new_tokens=40) for _ in range(2))
    for out in (first, second):
        assert torch.equal(out.sequences, expected)
        assert not (out.origins == Origin.FUZZY).any()
        assert out.stats.tau > 1.5
    assert len({tuple(row) for row in first.stats.accepted}) > 1
    assert (second.stats.tau > first.stats.tau) == name.startswith("adaptive")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "temperature", "top_p"),
    [("ngram", *MODES[0]), ("adaptive-unigram", *MODES[1])],
)
def test_sampling_at_threshold_zero_has_the_distribution_of_the_target(
    name: str, temperature: float, top_p: float
) -> None:
    """3000 identical prompts and three new tokens; see ``sampling_laws.py`` for the bounds."""
    config = small_vocabulary_config(8, initializer_range=0.3)
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = LlamaForCausalLM(config)
    pair = EagleFSD(model, DRAFTERS[name](), TreeConfig(total_tokens=7, depth=2, top_k=3))
    options = {
        "prompt": [3, 1, 4, 3, 2, 4, 3, 1, 4, 3],
        "temperature": temperature,
        "top_p": top_p,
    }
    generate(pair, 200, 3, seed=2, **options)  # learned by the table
    assert_target_law(generate(pair, 3000, 3, seed=1, **options), target_law(model, 3, **options))
