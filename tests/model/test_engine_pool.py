"""CUDA graphs that live longer than a call, with stand-ins for graphs on the CPU."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import aligned_pair, batch, greedy_reference, new_random_pair, prompt, small_tree
from transformers import AutoModelForCausalLM

from eagle_fsd import EagleFSD
from eagle_fsd.bundled import BUNDLED_HEAD, BUNDLED_TARGET
from eagle_fsd.engines.hugging_face import write_repository
from eagle_fsd.model import compilation
from eagle_fsd.model.compilation import StepGraphs
from eagle_fsd.model.engine import Engine
from eagle_fsd.model.step import StepOutput


class _Graph:
    """A graph is the call that was captured; replaying it replaces the result that it gave."""

    def __init__(self, step: partial[StepOutput]) -> None:
        self.step = step
        self.packed = torch.empty(0)
        self.details: list[Any] = []

    def replay(self) -> None:
        vars(self).update(vars(self.step()))


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[StepGraphs]:
    """What captured steps during the test, once per graph."""
    found: list[StepGraphs] = []

    def capture(graphs: StepGraphs, step: partial[Any]) -> Any:
        found.append(graphs)
        graph = _Graph(step)
        return graph, graph

    monkeypatch.setattr(compilation, "GRAPH_DEVICES", ("cpu",))
    monkeypatch.setattr(compilation, "EAGER_STEPS", 1)  # capture shapes when they recur
    monkeypatch.setattr(StepGraphs, "_capture", capture)
    return found


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Engine]]:
    """References to the engines that are created during the test."""
    found: list[weakref.ref[Engine]] = []
    initialize = Engine.__init__

    def record(self: Engine, *arguments: Any, **options: Any) -> None:
        initialize(self, *arguments, **options)
        found.append(weakref.ref(self))

    monkeypatch.setattr(Engine, "__init__", record)
    return found


def fresh() -> EagleFSD:
    """A pair with engines of its own."""
    shared = aligned_pair()
    return EagleFSD(shared.model, shared.drafter, shared.tree)


def test_calls_share_graphs_and_nothing_else(
    captured: list[StepGraphs], engines: list[weakref.ref[Engine]]
) -> None:
    """Prompts of other lengths, one that was just decoded, batches, and an abandoned answer."""
    options: dict[str, Any] = {"temperature": 0.8, "seed": 4, "threshold": 0.1}
    ids, mask = batch()
    inputs = [(prompt(30, 1), None), (prompt(30, 1), None), (ids, mask), (prompt(7, 2), None)]
    kept, plain = fresh(), fresh()
    plain.capture = False
    for tokens, attention in inputs:
        expected = plain.generate(tokens, attention, max_new_tokens=20, **options)
        found = kept.generate(tokens, attention, max_new_tokens=20, **options)
        assert torch.equal(found.sequences, expected.sequences)
        assert torch.equal(found.origins, expected.origins)
        assert found.stats.prefilled == expected.stats.prefilled
        assert found.stats.accepted == expected.stats.accepted
        assert found.stats.seconds.keys() == expected.stats.seconds.keys() | {"graph"}
    with kept.stream(prompt(12, 3), max_new_tokens=20, **options) as stream:
        next(iter(stream))
    assert len(engines) == 4 + 1
    assert sum(item() is not None for item in engines) == 1
    kept.generate(ids, mask, max_new_tokens=20, **options)  # shapes that occurred once, too
    before = len(captured)
    kept.generate(ids, mask, max_new_tokens=20, **options)
    assert len(captured) == before > 0


def test_calls_of_a_custom_generate_repository_share_graphs(
    captured: list[StepGraphs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pair that the target holds is no change of it, and equal warpers are interchangeable."""
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache")
    )
    write_repository(tmp_path / "repository", Path(BUNDLED_HEAD), "0.0.0")
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_TARGET)
    for _ in range(4):
        before = len(captured)
        for threshold in (0.0, 1.0):  # other trees, so other engines
            torch.manual_seed(0)
            model.generate(
                prompt(6),
                max_new_tokens=8,
                do_sample=True,
                temperature=0.7,
                top_k=20,
                custom_generate=str(tmp_path / "repository"),
                trust_remote_code=True,
                threshold=threshold,
            )
    assert len(captured) == before > 0


def test_calls_in_progress_never_share_an_engine(
    captured: list[StepGraphs], engines: list[weakref.ref[Engine]]
) -> None:
    pair, prompts = fresh(), [prompt(length, length) for length in (5, 11, 20)]
    expected = [
        greedy_reference(pair.model, ids, torch.ones_like(ids), new=24).tolist() for ids in prompts
    ]
    for _ in range(2):
        streams = [pair.stream(ids, max_new_tokens=24) for ids in prompts]
        running = {index: iter(stream) for index, stream in enumerate(streams)}
        while running:
            for index, chunks in list(running.items()):
                if next(chunks, None) is None:
                    del running[index]
        assert [stream.output().sequences.tolist() for stream in streams] == expected
    assert len(engines) == 3


#: Changes of weights' places, hooks, the drafter and the trees.
CHANGES: list[Callable[[EagleFSD], object]] = [
    lambda pair: setattr(weight := pair.model.lm_head.weight, "data", -weight.data),
    lambda pair: pair.model.base_model.layers[0].register_forward_hook(lambda *args: -args[2]),
    lambda pair: setattr(pair, "drafter", copy.deepcopy(pair.drafter)),
    lambda pair: setattr(pair, "batch_trees", {2: small_tree(total_tokens=3)}),
]


@pytest.mark.parametrize("change", CHANGES)
def test_graphs_are_captured_again_when_something_they_depend_on_changes(
    change: Callable[[EagleFSD], object], captured: list[StepGraphs]
) -> None:
    pair = new_random_pair()
    for _ in range(2):
        pair.generate(prompt(6), max_new_tokens=12)
    change(pair)
    before = len(captured)
    expected = greedy_reference(pair.model, prompt(6), torch.ones_like(prompt(6)), new=12)
    for _ in range(2):
        found = pair.generate(prompt(6), max_new_tokens=12)
        assert torch.equal(found.sequences, expected)
    assert len(captured) > before


def test_everything_is_freed_with_the_model(
    captured: list[StepGraphs], engines: list[weakref.ref[Engine]]
) -> None:
    """Engines are freed without the garbage collector, and a copied model has its own."""
    pair = fresh()
    expected = pair.generate(prompt(6), max_new_tokens=12).sequences
    assert torch.equal(
        copy.deepcopy(pair).generate(prompt(6), max_new_tokens=12).sequences, expected
    )
    gc.collect()
    assert [item() is not None for item in engines] == [True, False]
    gc.disable()
    try:
        pair.release_memory()
        assert engines[0]() is None
        pair.generate(prompt(6), max_new_tokens=12)
        assert engines[-1]() is not None
        del pair
        assert engines[-1]() is None
    finally:
        gc.enable()
