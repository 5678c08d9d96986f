"""The cache: its size is what the docstring says, it never grows, and it moves what it is told."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from pairs import (
    ARCHITECTURES,
    DEVICES,
    kindred_pair,
    left_padded,
    prompt,
    small_tree,
    tiny_pair,
    tiny_target,
    untrained_head,
)
from torch import Tensor

from eagle_fsd import EagleFSD
from eagle_fsd.model import pipeline as decode
from eagle_fsd.model.acceptance import ExactRule
from eagle_fsd.model.cache import VIEW_STEP, TreeCache, additive_mask
from eagle_fsd.model.engine import Engine, StepResult
from eagle_fsd.model.target import Target
from eagle_fsd.model.verify import Evidence

LAYERS, KV_HEADS, SIZE = 2, 2, 8  # of the plain tiny target


class RecordedEngine(Engine):
    """An engine that notes where its caches lie in memory and how large they are at every step."""

    made: list[RecordedEngine]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[tuple[int, ...]] = []
        self.made.append(self)

    def step(self) -> StepResult:
        caches = [self.cache] if self.head is None else [self.cache, self.head_cache]
        stores = [store for cache in caches for store in cache.stores.values()]
        self.seen.append(tuple(n for store in stores for n in (store.data_ptr(), store.nbytes)))
        return super().step()


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[RecordedEngine]:
    """The engines that ``generate`` makes during the test."""
    RecordedEngine.made = []
    monkeypatch.setattr(decode, "Engine", RecordedEngine)
    return RecordedEngine.made


def numbered(rows: int = 3, length: int = 11, device: str = "cpu") -> TreeCache:
    """A cache in which every slot holds numbers that say which slot it is."""
    cache = TreeCache(tiny_target().config, rows, length, torch.float32, torch.device(device))
    for store in cache.stores.values():
        store.copy_(torch.arange(store.numel(), dtype=torch.float32).view(store.shape))
    return cache


def contents(cache: TreeCache) -> Tensor:
    """``[layers, 2, rows, length, heads, size]``."""
    (store,) = cache.stores.values()
    return store.clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_cache_is_as_large_as_documented(architecture: str, dtype: torch.dtype) -> None:
    """layers x 2 x rows x length x key-value heads x head size x bytes, for grouped heads too."""
    config = tiny_target(architecture).config
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    numbers = config.num_hidden_layers * 2 * 5 * 37 * config.num_key_value_heads * head_size
    cache = TreeCache(config, 5, 37, dtype, torch.device("cpu"))
    assert cache.nbytes == numbers * dtype.itemsize
    held = {layer.keys.untyped_storage().data_ptr() for layer in cache.layers}
    held |= {layer.values.untyped_storage().data_ptr() for layer in cache.layers}
    assert held == {store.untyped_storage().data_ptr() for store in cache.stores.values()}


@pytest.mark.parametrize("device", DEVICES)
def test_move_reads_everything_before_it_writes(device: str) -> None:
    """Slots that are source and target at once, in both directions, each row by itself."""
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


def test_move_row_copies_one_row_in_every_layer() -> None:
    cache = numbered()
    before = contents(cache)
    cache.move_row(2, 0)
    expected = before.clone()
    expected[:, :, 0] = before[:, :, 2]
    assert torch.equal(contents(cache), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_update_writes_each_row_at_its_own_positions(device: str) -> None:
    """Fewer rows than the cache has, positions out of order and different in every row."""
    cache = numbered(rows=3, length=11, device=device)
    before = contents(cache)
    positions = torch.tensor([[4, 2, 9], [0, 1, 2]], device=device)
    cache.place(positions, 10)
    generator = torch.Generator().manual_seed(1)
    for number, layer in enumerate(cache.layers):
        shape = (2, KV_HEADS, 3, SIZE)
        keys = torch.randn(shape, generator=generator).to(device)
        values = torch.randn(shape, generator=generator).to(device)
        seen_keys, seen_values = layer.update(keys, values)
        for row in range(2):
            before[number, 0, row, positions[row]] = keys[row].transpose(0, 1)
            before[number, 1, row, positions[row]] = values[row].transpose(0, 1)
        assert torch.equal(seen_keys, before[number, 0, :2, :10].transpose(1, 2))
        assert torch.equal(seen_values, before[number, 1, :2, :10].transpose(1, 2))
    assert torch.equal(contents(cache), before)  # and nothing else was touched


def test_what_is_visible_covers_what_is_needed_and_ends_with_the_cache() -> None:
    cache = numbered(length=3 * VIEW_STEP + 5)
    for needed in (1, VIEW_STEP - 1, VIEW_STEP, VIEW_STEP + 1, 3 * VIEW_STEP + 1, cache.length):
        visible = cache.visible(needed)
        assert needed <= visible < needed + VIEW_STEP
        assert visible <= cache.length
        assert visible % VIEW_STEP == 0 or visible == cache.length


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_mask_hides_what_is_not_allowed(dtype: torch.dtype) -> None:
    """Finite, so that no row can become NaN, and low enough to leave exactly no weight."""
    allowed = torch.tensor([[[True, False, True], [False, True, False]]])
    mask = additive_mask(allowed, dtype)
    assert mask.shape == (1, 1, 2, 3)
    assert mask.dtype == dtype
    assert mask.isfinite().all()
    weights = (mask.float() + torch.tensor([3.0, 9.0, -4.0])).softmax(-1)
    assert torch.equal(weights[0, 0] > 0, allowed[0])


@pytest.mark.parametrize("threshold", [0.0, 10.0])
def test_caches_hold_what_the_call_needs_and_stay_where_they_are(
    threshold: float, engines: list[RecordedEngine]
) -> None:
    """The longest prompt, the new tokens and one tree; the head's one layer likewise.

    A prompt's last token is the first root, so it is counted with the tree.
    """
    model = tiny_pair()
    ids, mask = left_padded(prompt(13), prompt(5))
    out = model.generate(ids, attention_mask=mask, max_new_tokens=30, threshold=threshold)
    (engine,) = engines
    tree = model.settings
    length = 12 + 30 + tree.total_tokens
    assert engine.cache.nbytes == LAYERS * 2 * 2 * length * KV_HEADS * SIZE * 4
    drafted = tree.depth * tree.top_k + tree.depth + 2  # drafted pairs, and the newest kept path
    assert engine.head_cache.nbytes == 1 * 2 * 2 * (12 + 30 + drafted) * KV_HEADS * SIZE * 4
    assert len(engine.seen) == out.stats.passes > 5
    assert len(set(engine.seen)) == 1


def test_plain_decoding_has_no_room_for_a_tree_and_no_draft_cache(
    engines: list[RecordedEngine],
) -> None:
    tiny_pair().generate(prompt(9), max_new_tokens=20, method="ar")
    (engine,) = engines
    assert engine.cache.nbytes == LAYERS * 2 * 1 * (8 + 20 + 1) * KV_HEADS * SIZE * 4
    assert not hasattr(engine, "head_cache")
    assert len(set(engine.seen)) == 1


def test_rows_that_end_early_move_within_the_same_memory(engines: list[RecordedEngine]) -> None:
    model = kindred_pair()
    ids, mask = left_padded(prompt(6, 1), prompt(9, 2), prompt(3, 3))
    options = {"attention_mask": mask, "max_new_tokens": 25}
    full = model.generate(ids, **options)
    ended = model.generate(ids, **options, eos_token_id=int(full.sequences[0, 9 + 4]))
    assert (ended.origins == 0).any(), "no row ended before the others"
    assert [len(set(engine.seen)) for engine in engines] == [1, 1]


@pytest.mark.parametrize("threshold", [0.0, 10.0])
@pytest.mark.parametrize("method", ["fsd", "ar"])
def test_no_tensor_outlives_its_step(method: str, threshold: float) -> None:
    """All tensors made since weigh after a late step what they did after an early one."""
    gc.collect()
    gc.freeze()  # what other tests left behind, and their threads may drop meanwhile
    try:
        chunks = tiny_pair().stream(
            prompt(5), max_new_tokens=50, method=method, threshold=threshold, seed=0
        )
        weights = []
        for number, _chunk in enumerate(chunks):
            if number in (2, 8):
                weights.append(_bytes_alive())
    finally:
        gc.unfreeze()
    assert len(weights) == 2
    assert weights[0] == weights[1] > 0


def test_draft_log_probs_are_bounded_by_the_tree() -> None:
    """At most ``(1 + depth x top_k) x V`` numbers a row, whatever lies beneath the tensor."""
    model = tiny_pair(total_tokens=20, depth=4, top_k=3)
    sizes = []

    class Spy(ExactRule):
        def gate(self, evidence: Evidence) -> Tensor:
            draft = evidence.tree.draft_log_probs
            sizes.append((draft.numel(), draft.untyped_storage().nbytes() // 4))
            return super().gate(evidence)

    ids, mask = left_padded(prompt(8, 1), prompt(4, 2))
    model.generate(ids, attention_mask=mask, max_new_tokens=10, rule=Spy())
    bound = 2 * (1 + 4 * 3) * model.target.vocabulary
    assert len(sizes) >= 2
    assert all(count <= bound and stored <= bound for count, stored in sizes)


def test_embedding_and_output_projection_exist_once() -> None:
    """The head reads the target's own tensors: what changes there changes here."""
    model = tiny_target()
    head = untrained_head(model)
    EagleFSD(model, head, small_tree())
    names = set(head.state_dict()) | {name for name, _ in head.named_parameters()}
    assert not [name for name in names if "embed" in name or "lm_head" in name]
    table = model.config.vocab_size * model.config.hidden_size
    assert sum(parameter.numel() for parameter in head.parameters()) < 4 * table
    assert not [item for item in head.parameters() if item.shape[0] == model.config.vocab_size]

    tokens, features = torch.tensor([[3, 4]]), torch.randn(1, 2, 32)
    embedded, read = head.embed(tokens), head.readout(features)
    assert torch.equal(embedded, model.get_input_embeddings()(tokens))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2.0)
        model.lm_head.weight[5] += 1.0
    assert torch.equal(head.embed(tokens), 2.0 * embedded)
    assert not torch.allclose(head.readout(features), read)


def test_the_head_has_its_own_dtype_and_the_shared_tensors_keep_theirs() -> None:
    """Casting the head must not cast the target's embedding behind its back."""
    model = tiny_target()
    pair = EagleFSD(model, untrained_head(model))
    pair.head.to(torch.bfloat16)
    assert Target(model).dtype == model.get_input_embeddings().weight.dtype == torch.float32


def _bytes_alive() -> int:
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, torch.nn.Parameter) and item.device.type != "meta":
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
