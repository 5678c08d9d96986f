"""TreeCache: its documented size, its constant memory, and the slots it moves and writes."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pairs import (
    DEVICES,
    aligned_pair,
    batch,
    prompt,
    small_tree,
    tiny_target,
    untrained_head,
)
from torch import Tensor

from eagle_fsd import EagleFSD
from eagle_fsd.model.cache import VIEW_STEP, Layout, TreeCache, additive_mask
from eagle_fsd.model.target import Target

LAYERS, KV_HEADS, HEAD_SIZE = 2, 2, 8  # of the default tiny target


def numbered(rows: int = 3, length: int = 11, device: str = "cpu") -> TreeCache:
    """A cache in which every number is different."""
    layout = Layout()
    for _ in range(2):  # the first cache learns the layout, so the second has a single store
        cache = TreeCache(rows, length, layout)
        slots = torch.zeros(rows, 1, dtype=torch.long, device=device)
        cache.place(slots, cache.keys(1, slots.device))
        for layer in range(LAYERS):
            states = torch.zeros(rows, KV_HEADS, 1, HEAD_SIZE, device=device)
            cache.update(states, states, layer)
    (store,) = cache._stores
    store.copy_(torch.arange(store.numel(), dtype=torch.float32).view(store.shape))
    return cache


def contents(cache: TreeCache) -> Tensor:
    """A copy of everything in the cache, ``[layers, 2, rows, length, heads, head size]``."""
    (store,) = cache._stores
    return store.unflatten(0, (LAYERS, 2)).clone()


@pytest.mark.parametrize("architecture", ["llama-linear-rope-tied", "qwen2"])
def test_cache_has_the_documented_size(architecture: str) -> None:
    """layers x 2 x rows x length x key-value heads x head size x bytes."""
    dtype = torch.bfloat16 if architecture == "qwen2" else torch.float32
    target = Target(tiny_target(architecture, dtype=dtype))
    config = target.config
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    numbers = config.num_hidden_layers * 2 * 5 * 37 * config.num_key_value_heads * head_size
    for stores in (2 * config.num_hidden_layers, 1):  # the first cache learns the layout
        cache = target.new_cache(5, 37)
        assert cache.nbytes == 0
        with torch.no_grad():
            target.prefill(torch.ones(5, 3, dtype=torch.long), 0, cache)
        assert cache.nbytes == numbers * dtype.itemsize
        assert len(cache._stores) == stores


@pytest.mark.parametrize("device", DEVICES)
def test_moves_read_everything_before_writing(device: str) -> None:
    """Slots are both source and target, in both directions, and differ between rows."""
    cache = numbered(device=device)
    before = contents(cache)
    source = torch.tensor([[3, 4, 5, 9], [2, 0, 1, 10], [7, 7, 7, 7]], device=device)
    target = torch.tensor([[2, 3, 4, 5], [0, 1, 2, 3], [7, 7, 7, 7]], device=device)
    cache.move(source, target)
    expected = before.clone()
    for row in range(3):
        expected[:, :, row, target[row]] = before[:, :, row, source[row]]
    assert torch.equal(contents(cache), expected)
    assert not torch.equal(expected, before)
    cache.copy_rows([2, 0], [0, 2], 5)
    swapped = expected.clone()
    swapped[:, :, 0, :5], swapped[:, :, 2, :5] = expected[:, :, 2, :5], expected[:, :, 0, :5]
    assert torch.equal(contents(cache), swapped)


@pytest.mark.parametrize("device", DEVICES)
def test_update_writes_each_row_at_its_own_positions(device: str) -> None:
    """With fewer rows than the cache has, and positions that are out of order."""
    cache = numbered(rows=3, length=11, device=device)
    before = contents(cache)
    positions = torch.tensor([[4, 2, 9], [0, 1, 2]], device=device)
    cache.place(positions, cache.keys(10, positions.device))
    generator = torch.Generator().manual_seed(1)
    for number in range(LAYERS):
        shape = (2, KV_HEADS, 3, HEAD_SIZE)
        keys = torch.randn(shape, generator=generator).to(device)
        values = torch.randn(shape, generator=generator).to(device)
        seen_keys, seen_values = cache.update(keys, values, number)
        for row in range(2):
            before[number, 0, row, positions[row]] = keys[row].transpose(0, 1)
            before[number, 1, row, positions[row]] = values[row].transpose(0, 1)
        assert torch.equal(seen_keys, before[number, 0, :2].transpose(1, 2))
        assert torch.equal(seen_values, before[number, 1, :2].transpose(1, 2))
    assert torch.equal(contents(cache), before)  # nothing else was changed


def test_few_numbers_of_keys_and_none_much_too_large() -> None:
    for length in (1, VIEW_STEP, 5 * VIEW_STEP + 5, 3000):
        cache = TreeCache(1, length)
        sizes = set()
        for needed in range(1, length + 1):
            keys = cache.keys(needed, torch.device("cpu"))
            assert torch.equal(keys, torch.arange(len(keys)))
            assert keys.data_ptr() == cache.keys(1, keys.device).data_ptr()
            assert needed <= len(keys) <= length
            assert len(keys) < max(needed + VIEW_STEP, 1.125 * needed)
            sizes.add(len(keys))
        assert len(sizes) <= 16 + 8 * max(0, math.log2(length / (16 * VIEW_STEP))) + 1


def test_additive_mask_gives_hidden_keys_zero_weight() -> None:
    """It is finite, so that no row can become NaN."""
    allowed = torch.tensor([[[True, False, True], [False, True, False]]])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        mask = additive_mask(allowed, dtype)
        assert (mask.shape, mask.dtype) == ((1, 1, 2, 3), dtype)
        assert mask.isfinite().all()
        weights = (mask.float() + torch.tensor([3.0, 9.0, -4.0])).softmax(-1)
        assert torch.equal(weights[0, 0] > 0, allowed[0])


def test_head_shares_embedding_and_output_projection_with_the_target() -> None:
    """It has no copy of them, and a change in the target is visible in the head."""
    model = tiny_target()
    head = untrained_head(model)
    EagleFSD(model, head, small_tree())
    names = set(head.state_dict()) | {name for name, _ in head.named_parameters()}
    assert not [name for name in names if "embed" in name or "lm_head" in name]
    table = model.config.vocab_size * model.config.hidden_size
    assert sum(parameter.numel() for parameter in head.parameters()) < 4 * table
    assert not [item for item in head.parameters() if item.shape[0] == model.config.vocab_size]

    tokens, features = torch.tensor([[3, 4]]), torch.randn(1, 2, 32)
    embedded, log_probs = head.embed(tokens), head.log_probs(features)
    assert torch.equal(embedded, model.get_input_embeddings()(tokens))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2.0)
        model.lm_head.weight[5] += 1.0
    assert torch.equal(head.embed(tokens), 2.0 * embedded)
    assert not torch.allclose(head.log_probs(features), log_probs)


# -- what calls leave behind ----------------------------------------------------------------------


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
    """Or when it is closed, although the caller keeps the stream for its output."""
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


@pytest.mark.parametrize("method", ["fsd", "ar"])
def test_nothing_survives_a_call(method: str, caches: list[weakref.ref[TreeCache]]) -> None:
    options = {"max_new_tokens": 8, "method": method}
    aligned_pair().generate(prompt(6), **options)
    alive = _bytes_alive()
    for seed in range(3):
        aligned_pair().generate(prompt(6, seed), **options)
        ids, mask = batch()
        aligned_pair().generate(ids, mask, **options, temperature=1.0)
    assert len(caches) == (7 if method == "ar" else 14)
    assert not any(cache() for cache in caches)
    assert _bytes_alive() == alive


def test_caches_are_freed_after_an_exception(caches: list[weakref.ref[TreeCache]]) -> None:
    pair = aligned_pair()

    def fail(*_: object) -> None:
        if len(calls := pair.model.__dict__.setdefault("calls", [])) > 2:
            raise RuntimeError("broken on purpose")
        calls.append(1)

    handle = pair.model.lm_head.register_forward_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="broken on purpose"):
            pair.generate(prompt(6), max_new_tokens=20)
    finally:
        handle.remove()
        del pair.model.calls
    assert [cache() for cache in caches] == [None, None]


def _bytes_alive() -> int:
    """Count the bytes of all tensors that the garbage collector tracks."""
    storages = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, torch.nn.Parameter) and item.device.type != "meta":
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
