"""Compiled steps: one graph per shape, the same tokens, and what happens without a compiler.

The fast tests compile with a backend that runs the traced graph as it is: what they check, tracing
and guards, comes before the code generator.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from eagle3_heads import target_model, untrained_eagle3
from pairs import (
    NEEDS_COMPILER,
    aligned_pair,
    forget_compiled,
    greedy_reference,
    prompt,
    small_tree,
    tiny_target,
    untrained_head,
)
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import InfNanRemoveLogitsProcessor

from eagle_fsd import EagleFSD, PrefixCache
from eagle_fsd.model import compilation, engine, packed_weights
from eagle_fsd.model.config import AcceptanceConfig
from eagle_fsd.model.drafters.draft_model import DraftModel
from eagle_fsd.model.drafters.levels import LevelState
from eagle_fsd.model.drafters.ngram import NGramDrafter
from eagle_fsd.model.packed_weights import SUPPORTED
from eagle_fsd.model.random_numbers import RandomNumbers
from eagle_fsd.model.tree import DraftTree


@pytest.fixture(autouse=True)
def _compilation_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")


def compile_with(backend: Callable[..., Any]) -> Callable[..., Any]:
    """Return a substitute for ``compile_graph`` that uses a backend."""

    def compile_graph(function: Callable[..., Any], options: Any) -> Callable[..., Any]:
        return torch.compile(function, fullgraph=True, backend=backend, options=options)

    return compile_graph


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.fx.GraphModule]]:
    """The graphs that are compiled during the test."""
    found: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any, **__: Any) -> Callable[..., Any]:
        found.append(graph)
        return graph.forward

    monkeypatch.setattr(compilation, "compile_graph", compile_with(backend))
    forget_compiled()
    yield found
    forget_compiled()


#: A small tree: tracing takes time for every level.
TREE = small_tree(total_tokens=5, depth=1, top_k=2)
#: Processors are not traced, which saves most of the time of tests about the models' passes.
EAGER_VERIFICATION: dict[str, Any] = {"logits_processor": InfNanRemoveLogitsProcessor()}
PAIRS: dict[str, Callable[[], EagleFSD]] = {
    "eagle": lambda: EagleFSD(aligned_pair().model, aligned_pair().drafter, TREE),
    "eagle3": lambda: EagleFSD(model := target_model(), untrained_eagle3(model), TREE),
    "draft-model": lambda: EagleFSD(
        tiny_target(num_hidden_layers=1),
        DraftModel(tiny_target(seed=4, num_hidden_layers=1)),
        small_tree(top_k=1, total_tokens=3, depth=1),
    ),
    "ngram": lambda: EagleFSD(tiny_target(num_hidden_layers=1), NGramDrafter(), TREE),
}


def both(pair: EagleFSD, ids: Tensor, mask: Tensor | None = None, **options: Any) -> None:
    """Assert that a call gives the same tokens with and without compilation."""
    results = []
    for compiled in (False, True):
        pair.compile = compiled
        out = pair.generate(ids, mask, **{"max_new_tokens": 24, **options})
        results.append((out.sequences.tolist(), out.origins.tolist()))
    pair.compile = False
    assert results[0] == results[1]


class _OwnState(LevelState):
    """The state of a user's drafter."""

    def draft(self, roots: Tensor, keys: Tensor | None, random: RandomNumbers) -> DraftTree:
        return super().draft(roots, keys, random)


def test_one_version_serves_all_lengths_thresholds_and_floors(
    graphs: list[torch.fx.GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A constant of the first version becomes an input of the second one when it changes."""
    pair = PAIRS["eagle"]()
    monkeypatch.setattr(pair.drafter, "start", partial(_OwnState, pair.drafter))
    for length in (3, 150):
        both(pair, prompt(length), max_new_tokens=6, threshold=0.1, min_ratio=0.3)
    assert len(graphs) == 3  # drafting, target and verification
    for threshold, ratio in ((0.05, 0.1), (0.3, 0.05)):
        both(pair, prompt(20), threshold=threshold, min_ratio=ratio, max_new_tokens=6)
    assert len(graphs) == 4
    budget = AcceptanceConfig(threshold=0.2, max_fuzzy_nats=3.0)
    both(pair, prompt(20), acceptance=budget, temperature=0.8, top_p=0.9, seed=3, max_new_tokens=6)
    assert len(graphs) == 5


def test_a_prompt_of_one_token_is_decoded_eagerly(graphs: list[torch.fx.GraphModule]) -> None:
    """The caches are allocated in its first step, which a compiled pass cannot do."""
    pair = PAIRS["eagle"]()
    pair.compile = True
    found = pair.generate(prompt(1), max_new_tokens=6).sequences
    assert torch.equal(found, greedy_reference(pair.model, prompt(1), new=6))
    assert not graphs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("eagle", {"acceptance": AcceptanceConfig(rule="budget", selection="priced")}),
        ("eagle3", {"temperature": 0.8, "top_k": 5, "seed": 3, "rule": "cascade"}),
        ("draft-model", {"temperature": 0.8, "seed": 3}),
    ],
)
def test_all_parts_of_a_step_are_compiled(
    name: str, options: dict[str, Any], graphs: list[torch.fx.GraphModule]
) -> None:
    pair = PAIRS[name]()
    both(pair, prompt(12), max_new_tokens=6, **options)
    drafted = len(graphs)
    assert drafted >= 3  # drafting, target and verification
    both(pair, prompt(12), max_new_tokens=6, method="ar")
    assert len(graphs) >= drafted + 2


@pytest.mark.usefixtures("graphs")
def test_changes_of_attributes_are_seen() -> None:
    """Compiled passes, and what a prefix cache or an open batch hold, follow the model."""
    config = LoraConfig(
        r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    torch.manual_seed(0)
    model = get_peft_model(tiny_target(num_hidden_layers=1), config).eval()
    model.add_adapter("other", config)
    pair, ids, kept = EagleFSD(model, NGramDrafter(), TREE), prompt(40), PrefixCache()
    pair.compile, open_batch = True, pair.batch(1)
    options: Any = {"max_new_tokens": 6, "method": "ar", **EAGER_VERIFICATION}
    layer = model.base_model.model.model.layers[0]
    query = layer.self_attn.q_proj
    changes: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "scale of an adapter": lambda: query.scale_layer(8.0),
        "adapter": lambda: model.set_adapter("other"),
    }
    seen = []
    for name, change in changes.items():
        change()
        seen.append(greedy_reference(model, ids, new=6))
        answer = open_batch.add(pair.request(ids[0], **options))
        while not answer.finished:
            open_batch.step()
        for found in (
            pair.generate(ids, **options).sequences,
            pair.generate(ids, prefix_cache=kept, **options).sequences,
            torch.cat([ids, torch.tensor([answer.tokens])], 1),
        ):
            assert torch.equal(found, seen[-1]), name
    assert len({tuple(item[0].tolist()) for item in seen}) == len(changes)
    out = pair.generate(ids, prefix_cache=kept, **options)
    assert out.stats.prefilled < 8  # an unchanged model's tokens are kept


def test_functions_with_too_many_versions_run_as_they_are(
    graphs: list[torch.fx.GraphModule],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(compilation, "RECOMPILE_LIMIT", 1)
    monkeypatch.setattr(torch._dynamo.config, "cache_size_limit", 1)
    compilation._warn_once.cache_clear()
    pair = PAIRS["eagle"]()
    for threshold in (0.0, 0.3):  # each takes a version of verification
        both(pair, prompt(12), threshold=threshold, max_new_tokens=6)
    assert len(graphs) == 3  # drafting, target and verification
    assert [item for item in caplog.messages if item.startswith("not compiled: ")]


def test_versions_belong_to_one_model_and_data_type(graphs: list[torch.fx.GraphModule]) -> None:
    """Compiled versions are kept per model and data type, and they are freed with their model."""
    targets = [tiny_target(num_hidden_layers=1, seed=seed) for seed in (1, 2)]
    first, second = (EagleFSD(target, NGramDrafter(), TREE) for target in targets)
    options = {"method": "ar", "max_new_tokens": 6, **EAGER_VERIFICATION}
    for pair, dtype in ((first, torch.float32), (second, torch.float32), (first, torch.float64)):
        pair.model.to(dtype)
        both(pair, prompt(12), **options)
    with pytest.raises(ValueError, match=r"^compile must be True, False or 'auto'; got 'yes'$"):
        first.compile = "yes"  # type: ignore[assignment]
    del targets, first, second, pair
    gc.collect()
    assert not compilation._versions  # they have ended with their models


def wait_for_compilation() -> None:
    """Block until nothing is being compiled in the background."""
    with compilation._tracing:
        pass


def test_background_compilation(
    monkeypatch: pytest.MonkeyPatch, graphs: list[torch.fx.GraphModule]
) -> None:
    """Enough decoding starts it; it never delays an answer, and the next ones use it."""
    traced: list[str] = []
    runs: list[torch.fx.GraphModule] = []
    tracing, proceed = threading.Event(), threading.Event()
    interval = sys.getswitchinterval()

    def backend(graph: torch.fx.GraphModule, _: Any, **__: Any) -> Callable[..., Any]:
        traced.append(threading.current_thread().name)
        tracing.set()
        assert proceed.wait(60)

        def run(*args: Any) -> Any:
            runs.append(graph)
            return graph.forward(*args)

        return run

    monkeypatch.setattr(compilation, "compile_graph", compile_with(backend))
    monkeypatch.setattr(compilation, "BACKGROUND_SECONDS", 0.0)
    monkeypatch.setattr(compilation, "BACKGROUND_TOKENS", 100)
    pair = EagleFSD(tiny_target(num_hidden_layers=1), NGramDrafter(), small_tree())
    pair.compile = "auto"
    expected = greedy_reference(pair.model, prompt(20), new=48)

    def decode(new: int, method: str = "fsd") -> None:
        out = pair.generate(prompt(20), max_new_tokens=new, method=method)
        assert torch.equal(out.sequences, expected[:, : 20 + new])

    for _ in range(10):
        decode(8)
    assert not tracing.is_set()
    for _ in range(3):
        decode(48)
    assert tracing.wait(60)
    decode(48)  # while the thread waits
    assert sys.getswitchinterval() < interval  # decoding waits less for it
    proceed.set()
    wait_for_compilation()
    assert sys.getswitchinterval() == interval
    count = len(traced)
    for method in ("fsd", "ar"):
        decode(48, method)
    assert traced == ["compilation"] * count  # no other thread compiled
    assert compilation._versions[pair.model][1]
    parts = []  # compiled parts of a step: the target's pass and the verification
    for threshold in (0.0, 0.3):
        options: Any = {"threshold": threshold, "min_ratio": 0.0, "max_new_tokens": 48}
        for _ in range(3):
            pair.generate(prompt(20), **options)
        wait_for_compilation()
        runs.clear()
        steps = pair.generate(prompt(20), **options).stats.steps
        parts.append(round(len(runs) / steps))
    assert parts == [2, 2]
    tracing.clear()
    monkeypatch.setattr(engine, "compile_steps", lambda *_, **__: tracing.set())
    pair.release_memory()
    assert pair.model not in compilation._versions
    for _ in range(3):
        decode(48)
    assert tracing.wait(60)  # what was dropped is compiled again
    wait_for_compilation()


def test_one_model_is_compiled_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose turn it is not yet is compiled later."""
    monkeypatch.setattr(compilation, "missing_compiler", lambda: None)
    compiler, compiled = compilation.BackgroundCompiler(), []
    work = partial(compiled.append, 1)
    with compilation._tracing:  # the passes of another model are being compiled
        compiler.count("kind", 1000, 1000.0, work)
    assert not compiled
    compiler.count("kind", 1, 1.0, work)
    wait_for_compilation()
    assert compiled == [1]


@pytest.mark.slow
@NEEDS_COMPILER
def test_generated_code_gives_the_same_tokens(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real compiler keeps the tokens of answers that cross several numbers of visible slots.

    On x86 CPUs, the projection to the vocabulary is a packed weight, which compiled passes share.
    """
    forget_compiled()
    packed: list[Tensor] = []
    can_pack = packed_weights._can_pack
    monkeypatch.setattr(
        packed_weights, "_can_pack", lambda weight: packed.append(weight) or can_pack(weight)
    )
    model = tiny_target(num_hidden_layers=1, vocab_size=4096, hidden_size=128)
    pair = EagleFSD(model, untrained_head(model), TREE)
    with caplog.at_level(logging.WARNING):
        options = {"temperature": 0.9, "top_p": 0.9, "threshold": 0.2, "seed": 3}
        both(pair, prompt(20), max_new_tokens=100, **options)
    assert not [item.getMessage() for item in caplog.records]
    assert len(packed) == SUPPORTED
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
            both(PAIRS["ngram"](), prompt(9), max_new_tokens=8)
    finally:
        compilation.missing_compiler.cache_clear()
        forget_compiled()
    (message,) = [record.getMessage() for record in caplog.records]
    words = {"compiler": "needs a C++ compiler: install", "headers": "needs Python's headers"}
    assert words[missing] in message
    assert "\n" not in message
