"""TreeCache: its documented size, its constant memory, and the slots it moves and writes."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from pairs import (
    ARCHITECTURES,
    DEVICES,
    aligned_pair,
    left_padded,
    new_random_pair,
    prompt,
    small_tree,
    tiny_target,
    untrained_head,
)
from torch import Tensor

from eagle_fsd import EagleFSD
from eagle_fsd.model.acceptance import ExactRule
from eagle_fsd.model.cache import VIEW_STEP, Layout, TreeCache, additive_mask
from eagle_fsd.model.self_check import check_target
from eagle_fsd.model.target import Target
from eagle_fsd.model.verify import VerificationInputs

LAYERS, KV_HEADS, HEAD_SIZE = 2, 2, 8  # of the default tiny target


class CacheSizes(ExactRule):
    """Record the sizes in bytes of a pair's caches at every step, and the caches themselves."""

    def __init__(self, pair: EagleFSD) -> None:
        sizes: list[list[int]] = []
        caches: list[TreeCache] = []
        object.__setattr__(self, "sizes", sizes)  # the rule itself is frozen
        object.__setattr__(self, "caches", caches)
        check_target(pair.target)  # with caches of its own
        for owner in (pair.target, pair.drafter):
            owner.new_cache = partial(self._record, owner.new_cache)

    def _record(self, new_cache: Callable[[int, int], TreeCache], *shape: int) -> TreeCache:
        self.caches.append(new_cache(*shape))
        return self.caches[-1]

    def gate(self, inputs: VerificationInputs) -> Tensor:
        self.sizes.append([cache.nbytes for cache in self.caches])
        return super().gate(inputs)


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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
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


def test_caches_are_allocated_once_with_the_size_of_the_call() -> None:
    """The longest prompt without its last token, the new tokens, and one tree."""
    model = new_random_pair()
    rule, tree = CacheSizes(model), model.tree
    ids, mask = left_padded(prompt(13), prompt(5))
    out = model.generate(ids, attention_mask=mask, max_new_tokens=30, rule=rule)
    length = 12 + 30 + tree.total_tokens
    drafted = 12 + 30 + tree.depth * tree.top_k + tree.depth + 2  # drafted and pending pairs
    slot = 2 * KV_HEADS * HEAD_SIZE * 4  # bytes of keys and values
    assert len(rule.sizes) == out.stats.passes > 5
    assert rule.sizes == [[LAYERS * 2 * length * slot, 2 * drafted * slot]] * len(rule.sizes)
    model.generate(prompt(9), max_new_tokens=20, method="ar")  # without a tree and a head
    assert [cache.nbytes for cache in rule.caches[2:]] == [LAYERS * (8 + 20 + 1) * slot]


def test_dropping_rows_keeps_the_memory() -> None:
    base = aligned_pair()
    model = EagleFSD(base.model, copy.deepcopy(base.drafter), base.tree)
    ids, mask = left_padded(prompt(6, 1), prompt(9, 2), prompt(3, 3))
    full = base.generate(ids, mask, max_new_tokens=25)
    rule = CacheSizes(model)
    ended = model.generate(ids, mask, 25, rule=rule, eos_token_id=int(full.sequences[0, 9 + 4]))
    assert (ended.origins == 0).any(), "no row ended before the others"
    assert len(rule.caches) == 2
    assert rule.sizes == rule.sizes[:1] * len(rule.sizes)


@pytest.mark.parametrize(("method", "threshold"), [("fsd", 0.0), ("fsd", 10.0), ("ar", 0.0)])
def test_memory_does_not_grow_with_steps(method: str, threshold: float) -> None:
    """All tensors together take the same number of bytes after an early and after a late step."""
    gc.collect()
    gc.freeze()  # objects of other tests, which their threads may release meanwhile
    try:
        chunks = new_random_pair().stream(
            prompt(5), max_new_tokens=50, method=method, threshold=threshold, seed=0
        )
        sizes = [_bytes_alive() for number, _chunk in enumerate(chunks) if number in (2, 8)]
    finally:
        gc.unfreeze()
    assert len(sizes) == 2
    assert sizes[0] == sizes[1] > 0


def test_draft_log_probs_have_the_documented_size() -> None:
    """At most ``(1 + depth x top_k) x V`` numbers per row, also in the underlying storage."""
    model = new_random_pair(total_tokens=20, depth=4, top_k=3)
    sizes = []

    class Spy(ExactRule):
        def gate(self, inputs: VerificationInputs) -> Tensor:
            draft = inputs.tree.draft_log_probs
            sizes.append((draft.numel(), draft.untyped_storage().nbytes() // 4))
            return super().gate(inputs)

    ids, mask = left_padded(prompt(8, 1), prompt(4, 2))
    model.generate(ids, attention_mask=mask, max_new_tokens=10, rule=Spy())
    bound = 2 * (1 + 4 * 3) * model.target.vocab_size
    assert len(sizes) >= 2
    assert all(count <= bound and stored <= bound for count, stored in sizes)


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


def _bytes_alive() -> int:
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, torch.nn.Parameter) and item.device.type != "meta":
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
