"""Engine: prefill, steps and dropped rows, used directly."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pairs import aligned_pair, batch, greedy_reference, prompt, small_tree

from eagle_fsd import AcceptanceConfig
from eagle_fsd.model.acceptance import ExactRule, FuzzyRule
from eagle_fsd.model.cache import TreeCache
from eagle_fsd.model.drafters.interface import NoDrafter
from eagle_fsd.model.engine import Engine
from eagle_fsd.model.request import Answer, Decision, Request


def _engine(drafted: bool = True) -> Engine:
    pair = aligned_pair()
    return Engine(pair.target, pair.drafter if drafted else NoDrafter(), small_tree())


def _rows(new: int) -> list[Answer]:
    decision = Decision.of()
    prompts = [ids[mask.bool()] for ids, mask in zip(*batch(), strict=True)]
    return [Answer(Request(ids.tolist(), new, decision)) for ids in prompts]


@pytest.mark.parametrize("drafted", [True, False])
def test_steps_after_prefill_give_the_greedy_output(drafted: bool) -> None:
    """Rows are dropped as soon as they are long enough."""
    new, engine = 12, _engine(drafted=drafted)
    with torch.inference_mode():
        rows = _rows(new)
        engine.admit(rows)
        assert engine.joining == 4
        assert engine.prefill() == rows == engine.rows
        assert [row.prefilled for row in rows] == [len(row.prompt) - 1 for row in rows]
        emitted: list[list[int]] = [[] for _ in range(4)]
        live = list(range(4))
        while live:
            result = engine.step()
            for place, row in enumerate(live):
                assert len(result.tokens[place]) == len(result.origins[place]) >= 1
                emitted[row] += result.tokens[place]
            ended = [place for place, row in enumerate(live) if len(emitted[row]) >= new]
            live = [live[place] for place in engine.drop(ended)]
            assert len(engine.rows) == len(live)
    ids, mask = batch()
    expected = greedy_reference(aligned_pair().model, ids, mask, new=new)[:, ids.shape[1] :]
    assert [row[:new] for row in emitted] == expected.tolist()


def test_drop_returns_previous_indices_in_the_new_order() -> None:
    """The last row replaces a dropped one."""
    engine = _engine()
    with torch.inference_mode():
        engine.admit(_rows(8))
        engine.prefill()
        before = engine.state.roots.tolist()
        order = engine.drop([1])
        assert sorted(order) == [0, 2, 3]
        assert order == [0, 3, 2]
        assert engine.state.roots.tolist() == [before[row] for row in order]
        assert engine.drop([]) == [0, 1, 2]
        assert engine.drop([0, 1, 2]) == []


def test_constructor_allocates_nothing() -> None:
    engine = _engine()
    assert not hasattr(engine, "cache")
    assert engine.caches.target_cache is None


def test_stream_prefills_on_the_first_iteration() -> None:
    stream = aligned_pair().stream(prompt(6), max_new_tokens=4)
    assert stream.stats.prefilled == 0
    next(iter(stream))
    assert stream.stats.prefilled == 5


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


@pytest.mark.parametrize("end", ["finish", "close", "with", "drop"])
def test_caches_are_freed_when_a_stream_ends(
    end: str, caches: list[weakref.ref[TreeCache]]
) -> None:
    """Or when it is closed, although the caller keeps the stream for its output."""
    stream = aligned_pair().stream(prompt(6), max_new_tokens=20)
    next(iter(stream))
    assert all(cache() is not None for cache in caches)
    if end == "finish":
        assert list(stream)
    elif end == "close":
        stream.close()
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


def test_rule_defaults_to_the_one_that_acceptance_selects() -> None:
    assert Decision.of().rule == ExactRule()
    assert Decision.of(acceptance=AcceptanceConfig(threshold=0.2)).rule == FuzzyRule(0.2)
