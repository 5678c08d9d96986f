"""Compiled steps: one graph per shape, the same tokens, and what happens without a compiler.

The fast tests compile with a backend that runs the traced graph as it is: what they check, tracing
and guards, comes before the code generator. CUDA graphs are replaced by a recorder.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from eagle3_heads import target_model, untrained_eagle3
from pairs import aligned_pair, batch, left_padded, prompt, small_tree, tiny_target
from torch import Tensor

from eagle_fsd import EagleFSD
from eagle_fsd.model import compilation, engine, pipeline
from eagle_fsd.model.acceptance import DeferredRule, LimitedRule, RegretRule, TypicalRule
from eagle_fsd.model.compilation import StepGraphs, compiled
from eagle_fsd.model.drafters.draft_model import DraftModel
from eagle_fsd.model.drafters.ngram import NGramDrafter


@pytest.fixture(autouse=True)
def _compilation_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.fx.GraphModule]]:
    """The graphs that are compiled during the test."""
    found: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        found.append(graph)
        return graph.forward

    def compile_graph(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, fullgraph=True, backend=backend)

    monkeypatch.setattr(compilation, "compile_graph", compile_graph)
    compiled.cache_clear()
    yield found
    compiled.cache_clear()
    torch._dynamo.reset()


def pairs() -> dict[str, Callable[[], EagleFSD]]:
    return {
        "eagle": aligned_pair,
        "eagle3": lambda: EagleFSD(model := target_model(), untrained_eagle3(model), small_tree()),
        "draft-model": lambda: EagleFSD(
            tiny_target(), DraftModel(tiny_target(seed=4)), small_tree(top_k=1, total_tokens=5)
        ),
        "ngram": lambda: EagleFSD(tiny_target(), NGramDrafter(), small_tree()),
    }


def both(pair: EagleFSD, ids: Tensor, mask: Tensor | None = None, **options: Any) -> None:
    """Assert that a call gives the same tokens with and without compilation."""
    results = []
    for pair.compiled in (0, len(ids)):
        out = pair.generate(ids, mask, **{"max_new_tokens": 24, **options})
        results.append((out.sequences.tolist(), out.origins.tolist()))
    pair.compiled = 0
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        pytest.param(
            name,
            temperature,
            marks=() if (name, temperature) == ("eagle", 0.8) else pytest.mark.slow,
        )
        for name in pairs()
        for temperature in (0.0, 0.8)
    ],
)
def test_same_tokens(name: str, temperature: float, graphs: list[torch.fx.GraphModule]) -> None:
    """N-grams are looked up on the host: only the target and verification are compiled."""
    pair = pairs()[name]()
    both(pair, prompt(20), temperature=temperature, top_p=0.9, seed=3, threshold=0.1)
    # An n-gram drafter may find nothing, which is another shape.
    assert len(graphs) == 3 or (name == "ngram" and len(graphs) <= 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", [TypicalRule(), DeferredRule(), LimitedRule(RegretRule(), 5.0)], ids=repr
)
def test_rules(rule: Any, graphs: list[torch.fx.GraphModule]) -> None:
    both(aligned_pair(), prompt(20), rule=rule, temperature=0.9, seed=5)
    assert len(graphs) == 3


@pytest.mark.slow
@pytest.mark.parametrize("selection", ["longest", "priced", "target", "sample"])
def test_selections(selection: str, graphs: list[torch.fx.GraphModule]) -> None:
    acceptance = aligned_pair().acceptance.updated(threshold=0.2, selection=selection)
    both(aligned_pair(), prompt(20), acceptance=acceptance, temperature=0.9, seed=5)
    assert len(graphs) == 3


def test_one_version_serves_all_lengths(graphs: list[torch.fx.GraphModule]) -> None:
    """Prompts of different lengths, and answers that cross several numbers of visible slots."""
    pair = aligned_pair()
    for length, new in ((3, 8), (20, 100), (70, 60), (150, 80), (40, 8)):
        both(pair, prompt(length), max_new_tokens=new)
    assert len(graphs) == 3


@pytest.mark.slow
def test_batches_of_any_size(graphs: list[torch.fx.GraphModule]) -> None:
    """Rows of different lengths that end one by one: at most one version per number of rows."""
    ids, mask = left_padded(*[prompt(length) for length in (30, 5, 17, 9, 2)])
    both(aligned_pair(), ids, mask, max_new_tokens=40)
    both(aligned_pair(), *batch(), max_new_tokens=30)
    assert len(graphs) <= 5 * 3


@pytest.mark.slow
def test_one_version_serves_all_thresholds_and_floors(graphs: list[torch.fx.GraphModule]) -> None:
    """A constant of the first version becomes an input of the second one when it changes."""
    pair = aligned_pair()
    values = (0.05, 0.3), (0.1, 0.2), (0.2, 0.1), (0.3, 0.05), (0.15, 0.25), (0.4, 0.15)
    for threshold, ratio in values:
        both(pair, prompt(20), threshold=threshold, min_ratio=ratio)
    assert len(graphs) == 4


@pytest.mark.slow
def test_processors_run_uncompiled(graphs: list[torch.fx.GraphModule]) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    processors = [RepetitionPenaltyLogitsProcessor(1.2)]
    both(aligned_pair(), prompt(20), logits_processor=processors)
    assert len(graphs) == 2  # draft and target


def test_a_missing_compiler_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(
        compilation,
        "compile_graph",
        lambda function: torch.compile(function, fullgraph=True, backend=backend),
    )
    compiled.cache_clear()
    with caplog.at_level(logging.WARNING):
        both(aligned_pair(), prompt(20))
        both(aligned_pair(), prompt(9))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 3  # drafter, target, verification
    assert all("no C++ compiler" in message and "\n" not in message for message in messages)
    compiled.cache_clear()
    torch._dynamo.reset()


def test_errors_of_the_model_are_raised(
    monkeypatch: pytest.MonkeyPatch, graphs: list[torch.fx.GraphModule]
) -> None:
    """Only failed compilations are replaced by eager calls."""
    pair = aligned_pair()

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("broken on purpose")

    monkeypatch.setattr(engine, "compiled", lambda _: broken)
    pair.compiled = 1
    try:
        with pytest.raises(ZeroDivisionError):
            pair.generate(prompt(9), max_new_tokens=4)
    finally:
        pair.compiled = 0


def test_trial_needs_enough_work_and_a_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    clock = {"now": 0.0}
    cost = {0: 0.1, 2: 0.05}

    class Fake:
        def __init__(self, *_: Any, compiled: int = 0) -> None:
            self.compiled = compiled

        def admit(self, rows: list[engine.Row]) -> None:
            assert len(rows) == 2

        def prefill(self) -> None:
            pass

        def step(self) -> Any:
            calls.append(self.compiled)
            clock["now"] += cost[self.compiled]
            return engine.StepResult([[1, 2], [1]], [[1, 3], [3]], [False, False])

    monkeypatch.setattr(pipeline, "Engine", Fake)
    monkeypatch.setattr(pipeline.time, "perf_counter", lambda: clock["now"])
    pair = aligned_pair()
    assert not pair.compile_if_faster(tokens=1999, rows=2)
    assert not calls
    assert not pair.compile_if_faster(tokens=3000, rows=2)  # 100 s eager
    assert calls
    assert not any(calls)
    assert pair.compile_if_faster(tokens=4500, rows=2)  # 150 s eager
    assert any(calls)
    assert pair.compiled
    assert not pair.compile_if_faster(tokens=4500, rows=2, trees=1000)  # too many compilations
    cost[2] = 0.099
    assert not pair.compile_if_faster(rows=2)
    assert not pair.compiled


class _Recorder:
    """Stands in for ``torch.cuda``: a graph is the function that was captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: bool = False) -> None:
        self.captured = self.replayed = 0
        recorder = self

        class Graph:
            def replay(self) -> None:
                recorder.replayed += 1

            def pool(self) -> str:
                return "pool"

        class Capture:
            def __init__(self, graph: Graph, pool: str | None) -> None:
                assert pool == ("pool" if recorder.captured else None)

            def __enter__(self) -> None:
                if fails:
                    raise RuntimeError("operation not permitted when stream is capturing")
                recorder.captured += 1

            def __exit__(self, *_: object) -> None:
                return

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", Capture)


def test_steps_are_captured_once_per_shape_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, runs = _Recorder(monkeypatch), []
    graphs = StepGraphs()
    for shapes in ["a"] * 4 + ["b"] * 3 + ["a"] * 2:
        result = graphs.run(shapes, lambda shapes=shapes: runs.append(shapes) or shapes)
        assert result == shapes
    assert runs == ["a", "a", "b", "b"]  # once eagerly and once while capturing
    assert (recorder.captured, recorder.replayed) == (2, 7)


def test_steps_that_cannot_be_captured_run_eagerly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _Recorder(monkeypatch, fails=True)
    graphs, runs = StepGraphs(), []
    with caplog.at_level(logging.WARNING):
        for number in range(5):
            assert graphs.run("a", lambda number=number: runs.append(number) or number) == number
    assert runs == list(range(5))
    assert len(caplog.records) == 1
    assert "without CUDA graphs" in caplog.records[0].getMessage()


@pytest.mark.slow
def test_compiled_to_machine_code() -> None:
    """With the real compiler, if there is one."""
    import shutil

    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("there is no C++ compiler")
    pair = EagleFSD.from_pretrained()
    chat = [{"role": "user", "content": "Mia has 7 boxes with 6 pens. How many pens are there?"}]
    inputs = pair.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    both(pair, inputs["input_ids"], threshold=0.0, max_new_tokens=64)
    both(pair, inputs["input_ids"], threshold=0.1, temperature=0.7, seed=1, max_new_tokens=64)
