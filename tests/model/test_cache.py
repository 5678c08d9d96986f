"""The memory of caches: its documented size, and what calls and thousands of steps leave behind."""

from __future__ import annotations

import ctypes
import gc
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from pairs import (
    aligned_pair,
    finish,
    prompt,
    tiny_target,
)

from eagle_fsd import AcceptanceConfig
from eagle_fsd.model.cache import TreeCache
from eagle_fsd.model.target import Target


def resident_memory() -> int:
    """Return the bytes in use, without what has been freed but not returned to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize("architecture", ["llama-linear-rope-tied", "qwen2"])
def test_cache_has_the_documented_size(architecture: str) -> None:
    """layers x 2 x rows x length x key-value heads x head size x bytes."""
    dtype = torch.bfloat16 if architecture == "qwen2" else torch.float32
    target = Target(tiny_target(architecture, dtype=torch.float64))
    with torch.no_grad():  # what it used before it is converted does not count
        target.prefill(torch.ones(1, 3, dtype=torch.long), 0, target.new_cache(1, 37))
    target.model.to(dtype)
    config = target.config
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    numbers = config.num_hidden_layers * 2 * 5 * 37 * config.num_key_value_heads * head_size
    for _ in range(2):  # the first cache learns the layout
        cache = target.new_cache(5, 37)
        assert cache.nbytes == 0
        with torch.no_grad():
            target.prefill(torch.ones(5, 3, dtype=torch.long), 0, cache)
        assert cache.nbytes == numbers * dtype.itemsize
    assert sum(count * kind.dtype.itemsize for kind, count in target.layout.items()) == (
        config.num_hidden_layers * 2 * dtype.itemsize
    )


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[TreeCache]]]:
    """References to the caches created during the test, without garbage collection."""
    found: list[weakref.ref[TreeCache]] = []
    initialize = TreeCache.__init__

    def record(self: TreeCache, *arguments: Any) -> None:
        initialize(self, *arguments)
        found.append(weakref.ref(self))

    aligned_pair().generate(prompt(3), max_new_tokens=2)  # the target's self-check has caches, too
    monkeypatch.setattr(TreeCache, "__init__", record)
    gc.collect()  # what earlier tests left, so that none of it is freed during this one
    gc.disable()
    yield found
    gc.enable()


@pytest.mark.parametrize("end", ["finish", "with", "drop"])
def test_caches_are_freed_when_a_stream_ends(
    end: str, caches: list[weakref.ref[TreeCache]]
) -> None:
    """A finished or closed stream frees its caches, although the caller keeps it for its output."""
    stream = aligned_pair().stream(prompt(6), max_new_tokens=20)
    next(iter(stream))
    assert all(cache() is not None for cache in caches)
    if end == "finish":
        assert list(stream)
    elif end == "with":
        with stream:
            next(iter(stream))
    else:
        del stream
    assert [cache() for cache in caches] == [None, None]
    if end != "drop":
        assert stream.output().stats.tokens > 0
        assert not list(stream)


LIMITED = AcceptanceConfig(threshold=0.2, max_fuzzy_nats=4.0)
BATCHED: list[dict[str, Any]] = [
    {},
    {"threshold": 0.3, "min_ratio": 0.1},
    {"temperature": 0.8, "top_p": 0.9, "seed": 1, "acceptance": LIMITED},
    {"method": "ar"},
]


def tensors() -> tuple[int, int]:
    """Return the number of tensors that Python holds, and their bytes."""
    gc.collect()
    found = [item for item in gc.get_objects() if type(item) is torch.Tensor]
    return len(found), sum(item.nbytes for item in found)


@pytest.mark.slow
def test_memory_is_flat_over_thousands_of_steps() -> None:
    """There are no more tensors than after the first ones, and at most 2 % more memory."""
    pair = aligned_pair()
    batch = pair.batch(max_rows=4, max_length=120)
    numbers = itertools.count()

    def run(steps: int) -> None:
        """Decode answers of different lengths and options until so many steps have been taken."""
        while batch.passes < steps:
            while batch.free:
                number = next(numbers)
                ids = prompt(1 + number % 40, number)[0]
                options = BATCHED[number % len(BATCHED)]
                batch.add(pair.request(ids, 60 + number % 7, **options))
            for answer, _ in batch.step():
                assert answer.error is None
        finish(batch)

    run(500)
    before = resident_memory(), tensors()
    run(3000)
    after = resident_memory(), tensors()
    assert after[1][0] <= before[1][0]
    assert after[1][1] <= before[1][1]
    assert after[0] <= 1.02 * before[0]
