"""Engine: prefill, steps and dropped rows, used directly."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from pairs import aligned_pair, batch, greedy_reference, prompt, small_tree
from torch import Tensor

from eagle_fsd import AcceptanceConfig
from eagle_fsd.model.acceptance import ExactRule, FuzzyRule
from eagle_fsd.model.cache import TreeCache
from eagle_fsd.model.engine import Engine
from eagle_fsd.model.sampling import Sampler
from eagle_fsd.model.target import Target


def _engine(acceptance: AcceptanceConfig | None = None, drafted: bool = True) -> Engine:
    pair = aligned_pair()
    head = pair.head if drafted else None
    return Engine(pair.target, head, Sampler(), small_tree(), acceptance or AcceptanceConfig())


def _prompts() -> list[Tensor]:
    return [ids[mask.bool()] for ids, mask in zip(*batch(), strict=True)]


@pytest.mark.parametrize("drafted", [True, False])
def test_steps_after_prefill_give_the_greedy_output(drafted: bool) -> None:
    """Rows are dropped as soon as they are long enough."""
    new, engine = 12, _engine(drafted=drafted)
    with torch.inference_mode():
        engine.prefill(_prompts(), new)
        assert engine.rows == 4
        assert engine.prefilled == sum(len(ids) - 1 for ids in _prompts())
        emitted: list[list[int]] = [[] for _ in range(4)]
        live = list(range(4))
        while live:
            result = engine.step()
            for place, row in enumerate(live):
                assert len(result.tokens[place]) == len(result.origins[place]) >= 1
                emitted[row] += result.tokens[place]
            ended = [place for place, row in enumerate(live) if len(emitted[row]) >= new]
            live = [live[place] for place in engine.drop(ended)]
            assert engine.rows == len(live)
    ids, mask = batch()
    expected = greedy_reference(aligned_pair().model, ids, mask, new=new)[:, ids.shape[1] :]
    assert [row[:new] for row in emitted] == expected.tolist()


def test_drop_returns_previous_indices_in_the_new_order() -> None:
    """The last row replaces a dropped one."""
    engine = _engine()
    with torch.inference_mode():
        engine.prefill(_prompts(), 8)
        before = engine.roots.tolist()
        order = engine.drop([1])
        assert sorted(order) == [0, 2, 3]
        assert order == [0, 3, 2]
        assert engine.roots.tolist() == [before[row] for row in order]
        assert engine.drop([]) == [0, 1, 2]
        assert engine.drop([0, 1, 2]) == []


def test_constructor_allocates_nothing() -> None:
    engine = _engine()
    assert not hasattr(engine, "cache")
    assert not hasattr(engine, "head_cache")


def test_stream_prefills_on_the_first_iteration() -> None:
    stream = aligned_pair().stream(prompt(6), max_new_tokens=4)
    assert stream.stats.prefilled == 0
    next(iter(stream))
    assert stream.stats.prefilled == 5


@pytest.mark.parametrize("finish", [True, False])
def test_caches_are_freed_when_a_stream_ends(finish: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or when it is closed, although the caller keeps the stream for its output."""
    caches: list[weakref.ref[TreeCache]] = []
    new_cache = Target.new_cache

    def record(*arguments: Any) -> TreeCache:
        cache = new_cache(*arguments)
        caches.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(Target, "new_cache", record)
    stream = aligned_pair().stream(prompt(6), max_new_tokens=20)
    steps = iter(stream)
    next(steps)
    assert caches[0]() is not None
    if finish:
        assert list(steps)
    else:
        steps.close()
    gc.collect()
    assert [cache() for cache in caches] == [None]
    assert stream.output().stats.tokens > 0


def test_rule_defaults_to_the_one_that_acceptance_selects() -> None:
    assert _engine().rule == ExactRule()
    assert _engine(AcceptanceConfig(threshold=0.2)).rule == FuzzyRule(0.2)
