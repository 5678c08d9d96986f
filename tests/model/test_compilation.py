"""Compiled steps: one graph per shape, the same tokens, and what happens without a compiler.

The fast tests compile with a backend that runs the traced graph as it is: what they check, tracing
and guards, comes before the code generator. CUDA graphs are replaced by a recorder.
"""

from __future__ import annotations

import copy
import gc
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from eagle3_heads import target_model, untrained_eagle3
from pairs import (
    NEEDS_COMPILER,
    aligned_pair,
    batch,
    forget_compiled,
    greedy_reference,
    left_padded,
    prompt,
    small_tree,
    tiny_target,
)
from peft import LoraConfig, PeftModel, get_peft_model
from peft.helpers import rescale_adapter_scale
from torch import Tensor

from eagle_fsd import EagleFSD, PrefixCache
from eagle_fsd.model import compilation, execution
from eagle_fsd.model.acceptance import (
    DeferredRule,
    LimitedRule,
    RegretRule,
    TypicalRule,
    thresholds,
)
from eagle_fsd.model.compilation import StepGraphs, compile_graph, compiled
from eagle_fsd.model.config import AcceptanceConfig, SamplingConfig, TreeConfig
from eagle_fsd.model.drafters.draft_model import DraftModel
from eagle_fsd.model.drafters.ngram import NGramDrafter
from eagle_fsd.model.engine import Engine
from eagle_fsd.model.request import Answer, Decision, Request
from eagle_fsd.model.step import decoding_step
from eagle_fsd.model.vocabulary import Warp, arg_max


@pytest.fixture(autouse=True)
def _compilation_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.fx.GraphModule]]:
    """The graphs that are compiled during the test."""
    found: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any, **__: Any) -> Callable[..., Any]:
        found.append(graph)
        return graph.forward

    monkeypatch.setattr(compilation, "compile_graph", partial(compile_graph, backend=backend))
    forget_compiled()
    yield found
    forget_compiled()


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
    for pair.compile in (False, True):
        out = pair.generate(ids, mask, **{"max_new_tokens": 24, **options})
        results.append((out.sequences.tolist(), out.origins.tolist()))
    pair.compile = False
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


WHOLE_STEPS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("eagle", {}, {}),
    ("eagle", {"temperature": 0.8, "top_p": 0.9}, {"threshold": 0.2, "max_fuzzy_nats": 3.0}),
    ("eagle", {"temperature": 0.8}, {"threshold": 0.2, "selection": "sample"}),
    ("eagle", {}, {"rule": "budget", "selection": "priced"}),
    ("eagle3", {"temperature": 0.8, "top_k": 5}, {"rule": "cascade"}),
    ("draft-model", {}, {"threshold": 0.2}),
    ("draft-model", {"temperature": 0.8}, {}),
]


@pytest.mark.parametrize(
    ("name", "sampling", "acceptance"),
    [
        pytest.param(*case, marks=() if number == 1 else pytest.mark.slow)
        for number, case in enumerate(WHOLE_STEPS)
    ],
)
@pytest.mark.usefixtures("graphs")
def test_a_whole_step_is_a_single_graph(
    name: str, sampling: dict[str, Any], acceptance: dict[str, Any]
) -> None:
    """Nothing in the function that a CUDA graph captures depends on data, or waits for them."""
    pair = pairs()[name]()
    decision = Decision.of(SamplingConfig(**sampling), AcceptanceConfig(**acceptance))
    draw = decision.sampler.draw_draft if pair.drafter.draws_chains and sampling else None
    results = []
    for step in (decoding_step, torch.compile(decoding_step, fullgraph=True, backend="eager")):
        steps = Engine(pair.target, pair.drafter, pair.tree, draw)
        prompts = [(prompt(length)[0].tolist(), length) for length in (12, 9)]
        steps.admit([Answer(Request(ids, 40, decision, key)) for ids, key in prompts])
        steps.prefill()
        results.append([])
        with torch.inference_mode(), steps.execution.folded(steps.state):
            for _ in range(3):
                packed = step(steps.state, *steps._visible_slots(), lambda part, *_: part).packed
                results[-1].append(packed.tolist())
                for row, (count, *_) in zip(steps.rows, packed.tolist(), strict=True):
                    row.length += count
    assert results[0] == results[1]


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


class Louder(torch.nn.Module):
    """A layer that a user puts in the place of another one."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        return 3.0 * self.layer(hidden)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["target", "head"])
def test_changed_modules_are_compiled_again(part: str, graphs: list[torch.fx.GraphModule]) -> None:
    """What is inside of them is not checked at every step, but between calls."""
    pair = copy.deepcopy(aligned_pair())
    both(pair, prompt(20))
    assert len(graphs) == 3
    both(pair, prompt(20, seed=1))
    assert len(graphs) == 3
    layers = pair.model.model.layers if part == "target" else pair.drafter.layers
    layers[0].mlp.down_proj = Louder(layers[0].mlp.down_proj)
    both(pair, prompt(20))
    assert len(graphs) == (6 if part == "target" else 4)  # the head runs modules of the target
    handle = layers[0].mlp.register_forward_hook(lambda *_: _[2] * 0.5)
    both(pair, prompt(20))
    handle.remove()
    assert len(graphs) == (9 if part == "target" else 5)
    with torch.no_grad():
        pair.model.lm_head.weight.mul_(-1.0)
    both(pair, prompt(20))


def lora_pair() -> tuple[PeftModel, EagleFSD]:
    """Return a model with one layer and two adapters, and a pair that decodes with it."""
    config = LoraConfig(
        r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    torch.manual_seed(0)
    model = get_peft_model(tiny_target(num_hidden_layers=1), config)
    model.add_adapter("other", config)
    return model.eval(), EagleFSD(model, NGramDrafter(), small_tree())


@contextmanager
def scaled_activation(model: PeftModel) -> Iterator[None]:
    """Replace the function of a module by one that refers to a number."""
    mlp, factor = model.base_model.model.model.layers[0].mlp, 4.0
    original = mlp.forward
    mlp.forward = lambda hidden: factor * original(hidden)
    try:
        yield
    finally:
        del mlp.forward


@contextmanager
def scaled_attention(model: PeftModel) -> Iterator[None]:
    attention = model.base_model.model.model.layers[0].self_attn
    attention.scaling *= 4
    try:
        yield
    finally:
        attention.scaling /= 4


@contextmanager
def other_adapter(model: PeftModel) -> Iterator[None]:
    model.set_adapter("other")
    try:
        yield
    finally:
        model.set_adapter("default")


CHANGES: dict[str, Callable[[PeftModel], AbstractContextManager[Any]]] = {
    "scale of an adapter": lambda model: rescale_adapter_scale(model, 8.0),
    "scale of attention": scaled_attention,
    "function of a module": scaled_activation,
    "adapter": other_adapter,
}


@pytest.mark.usefixtures("graphs")
def test_changes_of_attributes_are_seen() -> None:
    """Compiled passes, and what a prefix cache or an open batch hold, follow the model."""
    model, pair = lora_pair()
    ids, wrong = prompt(40), []
    pair.compile = True
    kept, batch = PrefixCache(), pair.batch(2)
    options: Any = {"max_new_tokens": 8, "method": "ar"}  # verification takes long to trace
    before = greedy_reference(model, ids, new=8)

    def decode() -> list[Tensor]:
        answer = batch.add(pair.request(ids[0], **options))
        while not answer.finished:
            batch.step()
        return [
            pair.generate(ids, **options).sequences,
            pair.generate(ids, prefix_cache=kept, **options).sequences,
            torch.cat([ids, torch.tensor([answer.tokens])], 1),
        ]

    assert all(torch.equal(found, before) for found in decode())
    for name, change in CHANGES.items():
        with change(model):
            expected = greedy_reference(model, ids, new=8)
            assert not torch.equal(expected, before), name  # the change matters
            if not all(torch.equal(found, expected) for found in decode()):
                wrong.append(name)
    assert not wrong
    assert all(torch.equal(found, before) for found in decode())
    out = pair.generate(ids, prefix_cache=kept, **options)
    assert out.stats.prefilled < 8  # an unchanged model's tokens are kept


def test_released_versions_are_compiled_again(graphs: list[torch.fx.GraphModule]) -> None:
    pair = EagleFSD(tiny_target(num_hidden_layers=1), NGramDrafter(), small_tree())
    both(pair, prompt(20), method="ar")
    count = len(graphs)
    pair.release_memory()
    both(pair, prompt(20), method="ar")
    assert len(graphs) == count + 2  # drafting runs no model here


@pytest.mark.usefixtures("graphs")
def test_several_models_and_data_types_in_one_process() -> None:
    """Their compiled passes take turns, with batches of several rows."""
    ids, mask = left_padded(prompt(12), prompt(5))
    targets = [tiny_target(num_hidden_layers=1, seed=seed) for seed in (1, 2)]
    pairs = [EagleFSD(target, NGramDrafter(), small_tree()) for target in targets]
    kept = PrefixCache()
    for dtype in (torch.float32, torch.float64):
        for pair in pairs:
            pair.model.to(dtype)
            both(pair, ids, mask, method="ar", max_new_tokens=8)
        pairs[0].compile = True
        first, expected = prompt(12), greedy_reference(pairs[0].model, prompt(12), new=8)
        out = pairs[0].generate(first, max_new_tokens=8, prefix_cache=kept, method="ar")
        assert torch.equal(out.sequences, expected)
    with pytest.raises(ValueError, match=r"^compile must be True, False or 'auto'; got 'yes'$"):
        pairs[0].compile = "yes"  # type: ignore[assignment]


def test_background_compilation(
    monkeypatch: pytest.MonkeyPatch, graphs: list[torch.fx.GraphModule]
) -> None:
    """Enough decoding starts it; it never delays an answer, and the next ones use it."""
    traced: list[str] = []
    tracing, proceed = threading.Event(), threading.Event()

    def backend(graph: torch.fx.GraphModule, _: Any, **__: Any) -> Callable[..., Any]:
        traced.append(threading.current_thread().name)
        tracing.set()
        assert proceed.wait(60)
        return graph.forward

    monkeypatch.setattr(compilation, "compile_graph", partial(compile_graph, backend=backend))
    monkeypatch.setattr(compilation, "BACKGROUND_SECONDS", 0.0)
    pair = EagleFSD(tiny_target(num_hidden_layers=1), NGramDrafter(), small_tree())
    pair.compile = "auto"
    expected = greedy_reference(pair.model, prompt(20), new=200)

    def decode(new: int) -> None:
        out = pair.generate(prompt(20), max_new_tokens=new, method="ar")
        assert torch.equal(out.sequences, expected[:, : 20 + new])

    for _ in range(10):
        decode(8)
    assert not tracing.is_set()
    for _ in range(3):
        decode(200)
    assert tracing.wait(60)
    decode(200)  # while the thread waits
    proceed.set()
    pair._background.wait()
    count = len(traced)
    decode(200)
    assert traced == ["compilation"] * count  # no other thread compiled
    assert compilation._versions[pair.model][1]


@pytest.mark.slow
def test_hooks_of_a_drafter_precede_its_compiled_passes(graphs: list[torch.fx.GraphModule]) -> None:
    pair = pairs()["eagle3"]()
    pair.compile = True
    for length in (20, 9):
        pair.generate(prompt(length), max_new_tokens=24)
    assert len(graphs) == 3


@pytest.mark.slow
@NEEDS_COMPILER
def test_generated_code_gives_the_same_tokens(caplog: pytest.LogCaptureFixture) -> None:
    """Greedily and sampled, with answers that cross several numbers of visible slots."""
    forget_compiled()
    with caplog.at_level(logging.WARNING):
        for length, new in ((20, 100), (70, 60)):
            both(aligned_pair(), prompt(length), max_new_tokens=new)
        both(aligned_pair(), prompt(20), temperature=0.9, top_p=0.9, threshold=0.2, seed=3)
    assert not [item.getMessage() for item in caplog.records]
    forget_compiled()


@pytest.mark.slow
def test_versions_belong_to_one_model(graphs: list[torch.fx.GraphModule]) -> None:
    """Of two models, nothing else tells apart the arguments of their passes."""
    for layers in (1, 3, 2):
        target = tiny_target(num_hidden_layers=layers)
        both(EagleFSD(target, DraftModel(tiny_target(seed=layers)), small_tree()), prompt(20))
    del target
    gc.collect()
    assert not compilation._versions  # they have ended with their models


def test_only_what_differs_between_calls_is_checked_at_every_step(
    monkeypatch: pytest.MonkeyPatch, graphs: list[torch.fx.GraphModule]
) -> None:
    counts: Counter[bool] = Counter()
    decide = compilation._is_about_calls

    def is_about_calls(guard: Any) -> bool:
        counts[decide(guard)] += 1
        return decide(guard)

    monkeypatch.setattr(compilation, "_is_about_calls", is_about_calls)
    both(aligned_pair(), prompt(20))
    assert len(graphs) == 3
    assert 0 < counts[True] < 0.3 * counts[False]


def test_one_version_serves_all_lengths(graphs: list[torch.fx.GraphModule]) -> None:
    """Prompts of different lengths, and answers that cross several numbers of visible slots."""
    pair = aligned_pair()
    for length, new in ((3, 8), (20, 100), (70, 60), (150, 80), (40, 8)):
        both(pair, prompt(length), max_new_tokens=new)
    assert len(graphs) == 3


@pytest.mark.slow
def test_one_version_of_the_target_serves_trees_of_all_sizes(
    graphs: list[torch.fx.GraphModule],
) -> None:
    """Of drafting and of verification, there is one per tree."""
    pair = copy.copy(aligned_pair())
    trees = (8, 3), (20, 5), (12, 4)
    for total_tokens, depth in trees:
        pair.tree = TreeConfig(total_tokens=total_tokens, depth=depth, top_k=4)
        both(pair, prompt(20), threshold=0.2)
    assert len(graphs) == 1 + 2 * len(trees)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(40, 96, 1000, 7), (7, 513, 512)], ids=str)
def test_vocabularies_of_any_size(
    sizes: tuple[int, ...],
    graphs: list[torch.fx.GraphModule],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """From the second size on, the size is a variable of the compiled code."""
    warp, best = compiled(Warp(0.7, top_p=0.8)._rows), compiled(arg_max)
    generator = torch.Generator().manual_seed(0)
    for size in sizes:
        values = torch.randn(3, size, generator=generator)
        uniform = torch.rand(3, dtype=torch.double, generator=generator)
        assert torch.equal(best(values), values.argmax(-1))
        for found, expected in zip(
            warp(values, uniform), Warp(0.7, top_p=0.8)._rows(values, uniform), strict=True
        ):
            torch.testing.assert_close(found, expected)
    assert graphs
    assert not [item for item in caplog.records if item.levelno >= logging.WARNING]


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
    def backend(graph: torch.fx.GraphModule, _: Any, **__: Any) -> Callable[..., Any]:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(compilation, "compile_graph", partial(compile_graph, backend=backend))
    compilation._warn_once.cache_clear()
    forget_compiled()
    pair = aligned_pair()
    with caplog.at_level(logging.WARNING):
        both(pair, prompt(20))
        both(pair, prompt(9))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) <= 3  # drafter, target, verification
    assert all("no C++ compiler" in message and "\n" not in message for message in messages)
    forget_compiled()


@pytest.mark.parametrize("missing", ["compiler", "headers"])
def test_what_is_missing_is_found_before_tracing(
    missing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch._inductor import config

    found = {"cpp.cxx": ("no-such-compiler",)} if missing == "compiler" else {}
    if missing == "headers":
        monkeypatch.setattr(compilation.sysconfig, "get_path", lambda _: "/no/such/folder")
    monkeypatch.setattr(torch, "compile", None)
    compilation.missing_compiler.cache_clear()
    compilation._warn_once.cache_clear()
    forget_compiled()
    try:
        with caplog.at_level(logging.WARNING), config.patch(found):
            both(aligned_pair(), prompt(9))
            both(aligned_pair(), prompt(20), temperature=0.5, seed=1)
    finally:
        compilation.missing_compiler.cache_clear()
        forget_compiled()
    (message,) = [record.getMessage() for record in caplog.records]
    words = {"compiler": "needs a C++ compiler: install", "headers": "needs Python's headers"}
    assert words[missing] in message
    assert "\n" not in message


def test_errors_of_the_model_are_raised(
    monkeypatch: pytest.MonkeyPatch, graphs: list[torch.fx.GraphModule]
) -> None:
    """Only failed compilations are replaced by eager calls."""
    pair = aligned_pair()

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("broken on purpose")

    monkeypatch.setattr(execution, "compiled", lambda *_, **__: broken)
    pair.compile = True
    try:
        with pytest.raises(ZeroDivisionError):
            pair.generate(prompt(9), max_new_tokens=4)
    finally:
        pair.compile = False


MAIN, SIDE = (SimpleNamespace(device=torch.device("cpu:0"), name=name) for name in ("main", "side"))


class _Recorder:
    """Stands in for ``torch.cuda``, with the state that a failed capture leaves behind.

    Args:
        monkeypatch: Replaces what :class:`StepGraphs` calls.
        breaks: The part of the first capture that raises an exception: ``enter``, ``body``, where
            the end of the capture raises another one, as CUDA does, or nothing.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, breaks: str = "") -> None:
        self.captured, self.replayed, self.attempts = 0, 0, 0
        self.stream = MAIN
        self.pools: Counter[int] = Counter()  # references
        self.handles = 0
        self.underway: list[int] = []  # pools of captures, as the allocator knows them
        self.generator_captures = False
        self.broken = False  # the capture in progress
        recorder = self

        class Graph:
            def __init__(self) -> None:
                self.pool: int | None = None

            def replay(self) -> None:
                assert self.pool is not None
                recorder.replayed += 1

            def __del__(self) -> None:
                if self.pool is not None:
                    recorder.pools[self.pool] -= 1

        class Capture:
            def __init__(
                self, graph: Graph, pool: int, stream: object, capture_error_mode: str
            ) -> None:
                assert capture_error_mode == "thread_local"
                assert stream is SIDE
                self.graph, self.pool = graph, pool

            def __enter__(self) -> None:
                assert not recorder.underway  # or torch cannot empty its cache
                self.before, recorder.stream = recorder.stream, SIDE
                recorder.attempts += 1
                recorder.broken = bool(breaks) and recorder.attempts == 1
                if recorder.broken and breaks == "enter":
                    raise RuntimeError("operation not permitted when stream is capturing")
                recorder.underway.append(self.pool)
                recorder.pools[self.pool] += 1
                recorder.generator_captures = True

            def __exit__(self, *_: object) -> None:
                if recorder.broken:
                    raise RuntimeError("failed due to a previous error during capture")
                recorder.underway.remove(self.pool)
                recorder.generator_captures = False
                recorder.stream, self.graph.pool = self.before, self.pool
                recorder.captured += 1

        def end(device: int, pool: int) -> None:
            assert device == 0
            if pool not in recorder.underway:
                raise RuntimeError("not currently recording to mempool_id")
            recorder.underway.remove(pool)

        def release(device: int, pool: int) -> None:
            recorder.pools[pool] -= 1

        def new_handle() -> int:
            recorder.handles += 1
            return recorder.handles

        replaced = {
            "CUDAGraph": Graph,
            "graph": Capture,
            "graph_pool_handle": new_handle,
            "current_stream": lambda: recorder.stream,
            "set_stream": lambda stream: setattr(recorder, "stream", stream),
            "Stream": lambda _: SIDE,
        }
        for name, value in replaced.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(compilation, "EAGER_STEPS", 1)
        for name, function in (("endAllocateToPool", end), ("releasePool", release)):
            monkeypatch.setattr(torch._C, f"_cuda_{name}", function, raising=False)

    def check_clean(self) -> None:
        """Assert that nothing of a capture is left but the graphs in use."""
        assert self.stream is MAIN
        assert not self.underway
        assert not self.generator_captures


def _graphs() -> StepGraphs:
    return StepGraphs(torch.nn.Identity())


def test_steps_are_captured_once_per_shape_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, runs = _Recorder(monkeypatch), []
    graphs = _graphs()
    for shapes in ["a"] * 4 + ["b"] * 3 + ["a"] * 2:
        result = graphs.run(shapes, lambda shapes=shapes: runs.append(shapes) or shapes)
        assert result == shapes
    assert runs == ["a", "a", "b", "b"]  # once eagerly and once while capturing
    assert (recorder.captured, recorder.replayed) == (2, 7)
    assert recorder.pools == {1: 2}
    recorder.check_clean()
    graphs.clear()
    assert not +recorder.pools
    for _ in range(2):
        graphs.run("a", lambda: None)
    assert +recorder.pools == {2: 1}  # a pool without graphs cannot be used again


@pytest.mark.parametrize("eager", [1, 3])
def test_shapes_are_captured_after_some_eager_steps(
    eager: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of other shapes between them do not matter."""
    recorder, runs = _Recorder(monkeypatch), []
    monkeypatch.setattr(compilation, "EAGER_STEPS", eager)
    graphs = _graphs()
    for number in range(6):
        graphs.run("a", lambda: runs.append("a"))
        graphs.run(number, lambda: None)
    assert len(runs) == eager + 1
    assert recorder.captured == 1


def test_the_least_recently_used_graphs_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape that comes back runs eagerly once, like a new one."""
    recorder = _Recorder(monkeypatch)
    monkeypatch.setattr(compilation, "MAX_GRAPHS", 2)
    graphs, captured = _graphs(), []
    for shapes in "aabbaccabb":
        before = recorder.captured
        graphs.run(shapes, lambda: None)
        captured.append(recorder.captured > before)
    assert captured == [False, True, False, True, False, False, True, False, False, True]
    assert +recorder.pools == {1: 2}


def test_eager_shapes_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    _Recorder(monkeypatch)
    graphs = _graphs()
    for shapes in range(3 * compilation.MAX_SEEN):
        graphs.run(shapes, lambda: None)
    assert len(graphs) == compilation.MAX_SEEN


@pytest.mark.parametrize("breaks", ["enter", "body"])
def test_steps_that_cannot_be_captured_run_eagerly(
    breaks: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That is found once per target, and torch is as it was before."""
    recorder, runs = _Recorder(monkeypatch, breaks), []

    def step() -> int:
        runs.append(recorder.stream is SIDE)
        if recorder.stream is SIDE:
            raise ValueError("no step while capturing")
        return len(runs)

    target = torch.nn.Identity()
    with caplog.at_level(logging.WARNING):
        for graphs in (StepGraphs(target), StepGraphs(target)):
            for _ in range(5):
                assert graphs.run("a", step) == len(runs)
                recorder.check_clean()
    assert sum(runs) == (breaks == "body")
    assert len(runs) - sum(runs) == 10
    assert recorder.attempts == 2  # the second one resets the random number generator
    assert not +recorder.pools
    assert len(caplog.records) == 1
    assert "without CUDA graphs" in caplog.records[0].getMessage()
    other = _graphs()
    for _ in range(3):
        other.run("a", lambda: None)
    assert recorder.replayed == 2


def test_a_capture_without_memory_says_nothing_about_the_target(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = _Recorder(monkeypatch)
    target = torch.nn.Identity()

    def step() -> None:
        if recorder.stream is SIDE and recorder.attempts == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    for graphs, replayed in ((StepGraphs(target), 0), (StepGraphs(target), 3)):
        for _ in range(4):
            graphs.run("a", step)
        assert recorder.replayed == replayed
        recorder.check_clean()
    assert len(caplog.records) == 1


def test_errors_of_a_captured_step_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    _Recorder(monkeypatch)
    graphs, calls = _graphs(), []

    def step() -> None:
        calls.append(1)
        if len(calls) > 1:
            raise ZeroDivisionError("broken on purpose")

    graphs.run("a", step)
    with pytest.raises(ZeroDivisionError):
        graphs.run("a", step)
    assert len(calls) == 3


@pytest.mark.parametrize("compile", [False, True])
def test_divergences_are_compiled_where_steps_with_other_rows_are(
    compile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA; by default, no command compiles anything."""
    calls: list[str] = []

    def record(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *inputs: calls.append(function.__name__) or function(*inputs)

    monkeypatch.setattr(thresholds, "FUSED_DEVICES", ("cpu",))
    monkeypatch.setattr(thresholds, "compiled", record)
    pair = copy.copy(aligned_pair())
    pair.compile = compile
    (out,) = pair.generate_many([prompt(9)[0]], 12, max_batch=2, threshold=0.2)
    assert calls == ["_eager"] * (out.stats.steps if compile else 0)


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
