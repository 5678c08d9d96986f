"""``depth="auto"``: the shapes, the policy that chooses among them, and that no token changes.

The policy is tested with made-up lengths and times. Decoding is tested with choices that are drawn
at random, because those of the policy depend on timings.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle3_heads import target_model, untrained_eagle3
from hypothesis import given
from hypothesis import strategies as st
from pairs import VOCAB_SIZE, aligned_pair, forget_compiled, left_padded, prompt, tiny_target
from torch import Tensor

from eagle_fsd import DraftModel, EagleFSD, NGramDrafter, Prompt, TreeConfig
from eagle_fsd.cli.options import given_settings
from eagle_fsd.model import compilation
from eagle_fsd.model.compilation import compile_graph
from eagle_fsd.model.config import Settings, settings_dict
from eagle_fsd.model.depth import (
    EXPLORE_EVERY,
    MAX_SHAPES,
    MIN_TIMES,
    AcceptanceRates,
    DepthPolicy,
    levels_of,
    shapes_of,
)
from eagle_fsd.model.engine import Decision, Engine, Row
from eagle_fsd.model.tree import TreeBuilder

CHAIN = TreeConfig(total_tokens=26, depth=24, top_k=1, adaptive=True)
BUSHY = TreeConfig(total_tokens=20, depth=10, top_k=2, adaptive=True)
SMALL = TreeConfig(total_tokens=14, depth=6, top_k=2, adaptive=True)
TREES = st.builds(
    TreeConfig,
    total_tokens=st.integers(1, 80),
    depth=st.integers(1, 64),
    top_k=st.integers(1, 12),
    adaptive=st.just(True),
)


# -- shapes ----------------------------------------------------------------------------------------


@given(TREES)
def test_shapes_are_few_and_ever_shallower(tree: TreeConfig) -> None:
    shapes = shapes_of(tree)
    assert shapes[0] == tree
    assert len(shapes) <= MAX_SHAPES
    for deep, shallow in itertools.pairwise(shapes):
        assert shallow.adaptive
        assert shallow.top_k == tree.top_k
        assert shallow.depth < deep.depth
        assert shallow.total_tokens < deep.total_tokens
        assert 2 <= levels_of(shallow) <= levels_of(deep) // 2 + 1
    assert shapes_of(tree.updated(adaptive=False)) == (tree.updated(adaptive=False),)


def test_shapes_of_a_chain_are_chains() -> None:
    found = [(shape.total_tokens, shape.depth, shape.top_k) for shape in shapes_of(CHAIN)]
    assert found == [(26, 24, 1), (14, 12, 1), (8, 6, 1), (5, 3, 1)]


@pytest.mark.parametrize("top_k", [1, 3])
def test_probability_of_the_best_path(top_k: int) -> None:
    """By depth, from all paths of a tree over three tokens."""
    generator = torch.Generator().manual_seed(0)
    law = torch.randn(2, 4, 3, generator=generator).log_softmax(-1)  # by row and depth
    config = TreeConfig(total_tokens=20, depth=3, top_k=top_k, adaptive=True)
    builder = TreeBuilder(config, 3, "cpu")
    builder.start(law[:, 0])
    for level in range(1, 4):
        builder.choose()
        builder.extend(law[:, level, None].expand(-1, top_k, -1))
    found = builder.finish(torch.zeros(2, dtype=torch.long)).best_path
    expected = torch.cat([torch.zeros(2, 1), law.amax(-1).cumsum(1)], 1).exp()
    assert found is not None
    torch.testing.assert_close(found, expected)


# -- the policy ------------------------------------------------------------------------------------


def choices(
    policy: DepthPolicy,
    tree: TreeConfig,
    accepted: int,
    seconds: Callable[[TreeConfig], float],
    steps: int = 200,
    rows: int = 1,
) -> list[int]:
    """Take steps whose rows all accept so many tokens, as far as the tree allows."""
    shapes, found = shapes_of(tree), []
    for _ in range(steps):
        index = policy.choose(shapes, rows)
        found.append(index)
        levels = levels_of(shapes[index])
        policy.add_time(shapes, rows, index, seconds(shapes[index]))
        policy.add_step([(min(accepted, levels), [])] * rows, levels)
    return found


def linear(level: float) -> Callable[[TreeConfig], float]:
    """Seconds of a step that takes one second and those of its levels."""
    return lambda shape: 1.0 + level * levels_of(shape)


def usual(found: Sequence[int]) -> int:
    """The choice of most of the last steps."""
    last = list(found[-40:])
    return max(set(last), key=last.count)


@pytest.mark.parametrize("tree", [CHAIN, BUSHY])
@pytest.mark.parametrize("rows", [1, 5])
def test_depth_follows_what_is_accepted(tree: TreeConfig, rows: int) -> None:
    """Shallow where nothing is accepted, deep where all is, and back."""
    policy = DepthPolicy()
    for accepted, expected in ((0, MAX_SHAPES - 1), (64, 0), (0, MAX_SHAPES - 1), (64, 0)):
        found = choices(policy, tree, accepted, linear(0.1), rows=rows)
        assert usual(found) == expected


def test_depth_in_between() -> None:
    """Chains of 25, 13, 7 and 4 levels, of which 6 are accepted."""
    assert usual(choices(DepthPolicy(), CHAIN, 6, linear(0.1))) == 2


def test_costly_levels_are_avoided() -> None:
    assert usual(choices(DepthPolicy(), CHAIN, 64, linear(0.01))) == 0
    always = choices(DepthPolicy(), CHAIN, 64, lambda shape: float(levels_of(shape) ** 2))
    assert usual(always) == MAX_SHAPES - 1


def test_number_of_rows_has_costs_of_its_own() -> None:
    """What is learned of acceptance serves both."""
    policy = DepthPolicy()
    assert usual(choices(policy, CHAIN, 64, linear(0.1), rows=1)) == 0
    steep = choices(policy, CHAIN, 64, lambda shape: float(levels_of(shape) ** 2), rows=8)
    assert usual(steep) == MAX_SHAPES - 1
    assert usual(choices(policy, CHAIN, 64, linear(0.1), steps=40, rows=1)) == 0


def test_slow_first_steps_do_not_count() -> None:
    """Each shape is compiled in its first step."""
    seen: set[TreeConfig] = set()

    def seconds(shape: TreeConfig) -> float:
        first = shape not in seen
        seen.add(shape)
        return 1000.0 if first else linear(0.1)(shape)

    assert usual(choices(DepthPolicy(), CHAIN, 64, seconds)) == 0


def test_other_depths_are_tried_now_and_then() -> None:
    policy = DepthPolicy()
    found = choices(policy, CHAIN, 64, linear(0.1), steps=200)
    assert found[:MIN_TIMES] == [0] * MIN_TIMES
    assert set(found) == set(range(MAX_SHAPES))
    later = choices(policy, CHAIN, 64, linear(0.1), steps=10 * EXPLORE_EVERY)
    others = [index for index in later if index]
    assert set(others) == set(range(1, MAX_SHAPES))
    assert len(others) <= 10


def test_rates_of_a_geometric_law() -> None:
    """Every level is accepted with probability 0.8, and trees of two depths censor the lengths."""
    rates, generator = AcceptanceRates(), random.Random(0)
    for step in range(300):
        levels = (12, 5)[step % 2]
        rates.forget()
        for _ in range(30):
            drawn = (generator.random() < 0.8 for _ in range(levels))
            rates.add(sum(itertools.takewhile(bool, drawn)), levels)
    expected = [sum(0.8**level for level in range(count + 1)) for count in range(13)]
    assert rates.lengths(12) == pytest.approx(expected, rel=0.1)


def test_shallow_trees_say_what_deep_ones_would_gain() -> None:
    rates = AcceptanceRates()
    for _ in range(50):
        rates.forget()
        rates.add(2, 2)
    assert rates.lengths(25)[-1] > 15.0
    for _ in range(150):
        rates.forget()
        rates.add(0, 2)
    assert rates.lengths(25)[-1] < 2.0


def test_probabilities_of_the_draft_count_where_nothing_was_verified() -> None:
    lengths = []
    for rate in (0.3, 0.95):
        rates = AcceptanceRates()
        for _ in range(50):
            rates.forget()
            rates.add(1, 12, [rate**level for level in range(13)])
        lengths.append(rates.lengths(12)[-1])
    assert lengths[0] < lengths[1]
    broken = AcceptanceRates()
    broken.add(3, 4, [1.0, 0.5, 0.0, 0.0, 0.0])
    assert 1.0 < broken.lengths(4)[-1] < 5.0


# -- tokens ----------------------------------------------------------------------------------------


class RandomPolicy(DepthPolicy):
    """Choose at random, and record the choices."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = random.Random(seed)
        self.chosen: list[TreeConfig] = []
        self.levels: list[int] = []

    def choose(self, shapes: Sequence[TreeConfig], setting: Hashable) -> int:
        index = self._generator.randrange(len(shapes))
        self.chosen.append(shapes[index])
        return index

    def add_step(self, rows: Sequence[tuple[int, Sequence[float]]], levels: int) -> None:
        super().add_step(rows, levels)
        self.levels.append(levels)
        for accepted, best_path in rows:
            assert 0 <= accepted <= levels
            if best_path:
                assert best_path[0] == 1.0
                assert len(best_path) > levels
                assert all(0.0 <= value <= 1.0 for value in best_path)
                assert list(best_path) == sorted(best_path, reverse=True)


def adaptive_pair(given: EagleFSD, tree: TreeConfig = SMALL, seed: int = 0) -> EagleFSD:
    pair = EagleFSD(given.model, given.drafter, tree)
    pair._depths = RandomPolicy(seed)
    return pair


def policy_of(pair: EagleFSD) -> RandomPolicy:
    assert isinstance(pair._depths, RandomPolicy)
    return pair._depths


PAIRS: dict[str, Callable[[], EagleFSD]] = {
    "eagle": aligned_pair,
    "eagle3": lambda: EagleFSD(model := target_model(), untrained_eagle3(model), SMALL),
    "draft-model": lambda: EagleFSD(aligned_pair().model, DraftModel(aligned_pair().model), SMALL),
    "ngram": lambda: EagleFSD(aligned_pair().model, NGramDrafter(), SMALL),
}
LOSSLESS: list[dict[str, Any]] = [{}, {"temperature": 1.1, "top_p": 0.9, "seed": 5}]


def mixed_lengths() -> tuple[Tensor, Tensor]:
    return left_padded(*[prompt(length) for length in (12, 3, 20, 1)])


@pytest.mark.slow
@pytest.mark.parametrize("options", LOSSLESS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", PAIRS)
def test_tokens_are_those_of_a_fixed_depth(name: str, options: dict[str, Any]) -> None:
    given = PAIRS[name]()
    pair, fixed = adaptive_pair(given), EagleFSD(given.model, given.drafter, SMALL.updated(depth=6))
    ids, mask = mixed_lengths()
    out = pair.generate(ids, mask, max_new_tokens=60, **options)
    expected = fixed.generate(ids, mask, max_new_tokens=60, **options)
    assert torch.equal(out.sequences, expected.sequences)
    assert set(policy_of(pair).chosen) == set(shapes_of(SMALL))
    assert len(policy_of(pair).levels) == len(policy_of(pair).chosen)


def test_chains_of_a_draft_model() -> None:
    """Lossless chains vary greedily. Sampled ones are tokens of the draft, which depend on it."""
    given = PAIRS["draft-model"]()
    tree = TreeConfig(total_tokens=10, depth=8, top_k=1, adaptive=True)
    pair = adaptive_pair(given, tree)
    fixed = EagleFSD(given.model, given.drafter, tree.updated(depth=8))
    ids, mask = mixed_lengths()
    for options in LOSSLESS:
        policy_of(pair).chosen.clear()
        out = pair.generate(ids, mask, max_new_tokens=40, **options)
        expected = fixed.generate(ids, mask, max_new_tokens=40, **options)
        assert torch.equal(out.sequences, expected.sequences)
        assert bool(policy_of(pair).chosen) == (not options)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_fuzzy_answers_keep_the_full_depth(temperature: float) -> None:
    """Their tokens depend on the tree."""
    pair = adaptive_pair(aligned_pair())
    fixed = EagleFSD(pair.model, pair.drafter, SMALL.updated(depth=6))
    options: dict[str, Any] = {"threshold": 0.4, "temperature": temperature, "seed": 2}
    out = pair.generate(prompt(6), max_new_tokens=50, **options)
    expected = fixed.generate(prompt(6), max_new_tokens=50, **options)
    assert torch.equal(out.sequences, expected.sequences)
    assert out.stats.accepted == expected.stats.accepted
    assert not policy_of(pair).chosen


def test_plain_calls_say_nothing_about_depths() -> None:
    """Their steps have one node, and are neither counted nor timed."""
    pair = adaptive_pair(aligned_pair())
    pair.generate(prompt(6), max_new_tokens=20, method="ar")
    assert not policy_of(pair).chosen


def test_rows_of_a_running_batch() -> None:
    """Lossless and fuzzy rows that join and end, with trees that follow the number of rows."""
    pair = adaptive_pair(aligned_pair())
    fixed = EagleFSD(pair.model, pair.drafter, SMALL.updated(depth=6))
    pair.batch_trees = {3: TreeConfig(total_tokens=6, depth=3, top_k=2, adaptive=True)}
    items = [
        Prompt(prompt(3 + number, number)[0], max_new_tokens=9 + 5 * number, **options)
        for number, options in enumerate([*LOSSLESS, {"threshold": 0.4}] * 2)
    ]
    expected = {item.index: item.tokens for item in fixed.generate_many(items, max_batch=1)}
    found = {item.index: item.tokens for item in pair.generate_many(items, max_batch=4)}
    assert found == expected
    chosen = set(policy_of(pair).chosen)
    assert chosen <= {*shapes_of(SMALL), *shapes_of(pair.batch_trees[3])}
    assert len(chosen & {*shapes_of(pair.batch_trees[3])}) > 1


def test_beam_search_keeps_its_tree() -> None:
    pair = adaptive_pair(aligned_pair())
    fixed = EagleFSD(pair.model, pair.drafter, SMALL.updated(depth=6))
    found = [item.beam_search(prompt(6), max_new_tokens=20, num_beams=3) for item in (pair, fixed)]
    assert torch.equal(found[0].sequences, found[1].sequences)
    assert not policy_of(pair).chosen


def test_measured_choices_are_lossless_too() -> None:
    pair = EagleFSD(aligned_pair().model, aligned_pair().drafter, SMALL)
    fixed = EagleFSD(pair.model, pair.drafter, SMALL.updated(depth=6))
    for length in (4, 9):
        outs = [item.generate(prompt(length), max_new_tokens=120) for item in (pair, fixed)]
        assert torch.equal(outs[0].sequences, outs[1].sequences)
    ((shapes, _), times), *others = pair._depths._times.items()
    assert not others
    assert shapes == SMALL
    assert all(item.seconds for item in times)
    assert all(0.0 < value < 60.0 for item in times for value in item.seconds)


# -- steps on a GPU --------------------------------------------------------------------------------


class _Graphs:
    """Runs all steps eagerly; equal keys must stand for equal shapes."""

    def __init__(self) -> None:
        self.shapes: dict[Hashable, list[tuple[int, ...]]] = {}

    def run(self, key: Hashable, step: Callable[[], Any], eager: Callable[[], Any]) -> Any:
        packed, tokens, details = eager()
        shapes = [tuple(packed.shape), tuple(tokens.shape)]
        assert self.shapes.setdefault(key, shapes) == shapes
        return packed, tokens, details


def test_steps_that_are_launched_ahead() -> None:
    """As on a GPU, the next step is launched before the last one's tokens are read."""
    pair, policy, graphs = aligned_pair(), RandomPolicy(1), _Graphs()
    rows = [Row(prompt(length)[0].tolist(), 100, Decision.of()) for length in (4, 11)]
    engine = Engine(pair.target, pair.drafter, SMALL, depths=policy)
    found: list[list[int]] = [[], []]
    with torch.inference_mode():
        engine.admit(rows)
        engine.prefill()
        engine._overlaps, engine._captures, engine._captured = True, True, 0
        engine._graphs = graphs  # type: ignore[assignment]
        while min(map(len, found)) < 60:
            for row, new in zip(found, engine.step().tokens, strict=True):
                row += new
    for row, tokens in zip(rows, found, strict=True):
        expected = pair.generate(torch.tensor([row.ids]), max_new_tokens=60)
        assert tokens[:60] == expected.sequences[0, len(row.ids) :].tolist()
    assert len(policy.levels) == len(policy.chosen) - 1
    assert policy.levels == [levels_of(tree) for tree in policy.chosen[:-1]]
    assert len({width for _, (_, width) in graphs.shapes.values()}) == len(shapes_of(SMALL))


@pytest.mark.slow
def test_compiled_once_per_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft, target and verification, each in a single graph."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any, **__: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(compilation, "compile_graph", partial(compile_graph, backend=backend))
    forget_compiled()
    try:
        pair = adaptive_pair(aligned_pair())
        expected = pair.generate(prompt(20), max_new_tokens=120).sequences
        pair.compile = True
        for _ in range(2):
            out = pair.generate(prompt(20), max_new_tokens=120)
            assert torch.equal(out.sequences, expected)
    finally:
        forget_compiled()
    assert set(policy_of(pair).chosen) == set(shapes_of(SMALL))
    assert len(graphs) <= 3 * len(shapes_of(SMALL))


# -- options ---------------------------------------------------------------------------------------


def test_auto_is_a_depth() -> None:
    tree = TreeConfig.from_dict({"depth": "auto"})
    assert tree == TreeConfig(adaptive=True)
    assert TreeConfig(depth=3).updated(depth="auto") == TreeConfig(depth=3, adaptive=True)
    assert tree.updated(depth=4) == TreeConfig(depth=4)
    assert tree.updated(top_k=3, depth=None).adaptive
    assert tree.updated(depth=4, adaptive=True) == TreeConfig(depth=4, adaptive=True)
    with pytest.raises(ValueError, match=r"depth must be an integer in \[1, 64\]; got 'deep'"):
        TreeConfig.from_dict({"depth": "deep"})


def test_files_and_reports_mention_adaptive_trees_only() -> None:
    assert "adaptive" not in TreeConfig().model_dump()
    dumped = TreeConfig(depth=3, adaptive=True).model_dump()
    assert TreeConfig.from_dict(dumped) == TreeConfig(depth=3, adaptive=True)
    settings = Settings.from_dict({"depth": "auto", "exact": {"depth": "auto", "top_k": 2}})
    assert settings.tree == {"adaptive": True}
    assert settings.exact == TreeConfig(top_k=2, adaptive=True)
    acceptance = aligned_pair().acceptance
    assert settings_dict(TreeConfig(adaptive=True), acceptance)["adaptive"]
    assert "adaptive" not in settings_dict(TreeConfig(), acceptance)


def test_auto_keeps_the_trees_of_the_settings() -> None:
    given = aligned_pair()
    pair = EagleFSD(given.model, given.drafter)
    trees = {"depth": 20, "exact": {"depth": 9}, "batch": {"4": {"depth": 2}}}
    pair.configure(Settings.from_dict(trees))
    pair.configure(Settings.from_dict({"depth": "auto"}))
    assert (pair.tree.depth, pair.exact_tree.depth, pair.batch_trees[4].depth) == (20, 9, 2)
    assert pair.tree.adaptive
    assert pair.exact_tree.adaptive
    assert pair.batch_trees[4].adaptive
    pair.configure(Settings.from_dict({"depth": 5}))
    assert (pair.exact_tree.depth, pair.exact_tree.adaptive) == (5, False)
    loaded = EagleFSD.from_pretrained(given.model, given.drafter, depth="auto", top_k=3)
    default = TreeConfig.for_device(given.target.device.type)
    assert loaded.exact_tree == default.updated(top_k=3, adaptive=True)


def test_auto_can_be_switched_off(tmp_path: Path) -> None:
    """By a later file, by ``adaptive``, and by a number for the depth."""
    file = tmp_path / "fsd.json"
    file.write_text('{"depth": 9, "adaptive": true, "exact": {"depth": 7, "adaptive": true}}')
    for tree, depth in ((TreeConfig(adaptive=False), 7), (TreeConfig(depth=4), 4)):
        pair = EagleFSD(aligned_pair().model, None)
        pair.configure(given_settings(file, tree, pair.acceptance))
        assert (pair.exact_tree.depth, pair.exact_tree.adaptive) == (depth, False)
        assert not pair.tree.adaptive
    pair.configure(given_settings(file, TreeConfig(), pair.acceptance))
    assert pair.tree.adaptive
    pair.configure(Settings.from_dict({"adaptive": False}))
    assert (pair.tree.adaptive, pair.exact_tree.adaptive) == (False, False)


def test_auto_replaces_the_schedule_of_a_draft_model() -> None:
    draft = tiny_target(seed=4)
    draft.generation_config.num_assistant_tokens_schedule = "heuristic"
    pair = adaptive_pair(EagleFSD(tiny_target(), DraftModel(draft), SMALL))
    reference = pair.generate(prompt(5), max_new_tokens=30, method="ar").sequences
    assert torch.equal(pair.generate(prompt(5), max_new_tokens=30).sequences, reference)
    assert policy_of(pair).levels == [levels_of(tree) for tree in policy_of(pair).chosen]
    assert reference.max() < VOCAB_SIZE
