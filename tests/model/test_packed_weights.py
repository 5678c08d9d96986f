"""Packed weights: the products of torch, up to rounding, also after a weight has changed."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pairs import tiny_target, untrained_head

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.model import packed_weights
from eagle_fsd.model.packed_weights import (
    MAX_TOKENS,
    MINIMA,
    SUPPORTED,
    forget_changed,
    linear,
    packed_bytes,
)

WIDTH = 128
#: Makes weights of ``[OUTPUTS, WIDTH]`` large enough in every data type.
OUTPUTS = MINIMA[torch.float32].values // WIDTH


def test_products_are_those_of_torch() -> None:
    torch.manual_seed(0)
    for dtype, error in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        weight, bias = torch.randn(OUTPUTS, WIDTH, dtype=dtype), torch.randn(OUTPUTS, dtype=dtype)
        for shape in ((1,), (2,), (1, 5), (2, 3), (MAX_TOKENS + 1,)):
            x = torch.randn(*shape, WIDTH, dtype=dtype)
            for own in (None, bias):
                with torch.no_grad():
                    found = linear(x, weight, own)
                expected = F.linear(x, weight, own)
                torch.testing.assert_close(found, expected, atol=10 * error, rtol=error)
    weight, x = torch.randn(OUTPUTS, WIDTH), torch.randn(3, WIDTH, requires_grad=True)
    (gradient,) = torch.autograd.grad(linear(x, weight).sum(), x)
    torch.testing.assert_close(gradient, weight.sum(0).expand(3, -1), atol=1e-3, rtol=1e-3)


class _Quantized(torch.Tensor):
    """A weight of another type, which records the functions that it is passed to."""

    @classmethod
    def __torch_function__(cls, function: Any, *arguments: Any) -> Any:
        _called.append(function)
        return super().__torch_function__(function, *arguments)


_called: list[object] = []


@torch.no_grad()
def test_other_types_of_weights_are_passed_to_torch() -> None:
    linear(torch.randn(3, WIDTH), torch.randn(OUTPUTS, WIDTH).as_subclass(_Quantized))
    assert F.linear in _called
    assert torch.ops.eagle_fsd.packed_linear.default not in _called


@pytest.mark.skipif(not SUPPORTED, reason="weights are packed on x86 CPUs only")
@torch.no_grad()
def test_compiled_passes_share_the_packed_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph serves all numbers of tokens that packing pays for, and sees changed weights."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    weight = torch.nn.Parameter(torch.randn(OUTPUTS, WIDTH))
    compiled = torch.compile(linear, fullgraph=True, backend=backend)
    linear(torch.randn(4, WIDTH), weight)
    before = packed_bytes()
    for tokens in (2, 9, MAX_TOKENS):
        x = torch.randn(1, tokens, WIDTH)
        torch._dynamo.mark_dynamic(x, 1)
        assert torch.equal(compiled(x, weight), linear(x, weight))
        weight.mul_(2.0)
    assert packed_bytes() == before
    (graph,) = graphs
    assert torch.ops.eagle_fsd.packed_linear.default in {node.target for node in graph.graph.nodes}


@pytest.mark.parametrize("through_data", [False, True], ids=["in place", "through data"])
@torch.no_grad()
def test_changed_weights_are_packed_again(through_data: bool) -> None:
    """Changes through ``.data`` are found between calls of ``generate``."""
    weight, x = torch.nn.Parameter(torch.randn(OUTPUTS, WIDTH)), torch.randn(4, WIDTH)
    linear(x, weight)
    if through_data:
        weight.data += 1.0
        forget_changed()
    else:
        weight.mul_(2.0)
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight), atol=1e-4, rtol=1e-5)
    weight.data = torch.randn(OUTPUTS, WIDTH)
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight), atol=1e-4, rtol=1e-5)
    weight.data = torch.randn(WIDTH, OUTPUTS).t()
    forget_changed()
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight), atol=1e-4, rtol=1e-5)
    weight, x = torch.nn.Parameter(torch.randn(1024, 1024)), torch.randn(4, 1024)
    linear(x, weight)
    weight.data = weight.data.t()  # of the same memory
    forget_changed()
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight), atol=1e-3, rtol=1e-5)


@pytest.mark.skipif(not SUPPORTED, reason="weights are packed on x86 CPUs only")
@torch.no_grad()
def test_packed_weights_end_with_the_weight_and_have_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, x = torch.randn(OUTPUTS, WIDTH), torch.randn(4, WIDTH)
    before = packed_bytes()
    linear(x, weight)
    assert packed_bytes() == before + 4 * OUTPUTS * WIDTH
    monkeypatch.setattr(packed_weights, "MEMORY_SHARE", 0.0)
    other = torch.randn(OUTPUTS, WIDTH)
    torch.testing.assert_close(linear(x, other), F.linear(x, other))
    assert packed_bytes() == before + 4 * OUTPUTS * WIDTH
    del weight
    gc.collect()
    assert packed_bytes() <= before


def test_trees_decode_as_generate_with_a_large_vocabulary() -> None:
    """Greedy decoding matches ``generate`` before and after the projection changes in place."""
    gc.collect()
    before, target = packed_bytes(), tiny_target(vocab_size=OUTPUTS, hidden_size=WIDTH)
    model = EagleFSD(target, untrained_head(target), TreeConfig(total_tokens=8, depth=3, top_k=2))
    model.drafter.restrict_vocabulary(torch.arange(OUTPUTS))
    prompt = torch.randint(0, OUTPUTS, (1, 9), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        expected = target.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=None)
        found = model.generate(prompt, max_new_tokens=24, threshold=0.0, eos_token_id=[])
        assert found.sequences.tolist() == expected.tolist()
        target.lm_head.weight.data *= -1.0
    assert packed_bytes() > before or not SUPPORTED
    model.release_memory()
    assert packed_bytes() == before
