"""PrefixCache: the same answers as without one, at the cost of the new tokens only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from eagle3_heads import aligned_eagle3_pair
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import ACCEPT_ALL, aligned_pair, small_tree

from eagle_fsd import DecodeStats, DraftModel, EagleFSD, NGramDrafter, PrefixCache
from eagle_fsd.model import memory
from eagle_fsd.model.engine import Engine

NEW = 12


def decode(
    model: EagleFSD, ids: list[int], cache: PrefixCache | None, **options: Any
) -> tuple[list[int], list[int], DecodeStats]:
    """Return the whole sequence, the origins and the statistics of one turn."""
    options = {"max_new_tokens": NEW, "eos_token_id": [], **options}
    out = model.generate(torch.tensor([ids]), prefix_cache=cache, **options)
    return out.sequences[0].tolist(), out.origins[0].tolist(), out.stats


DRAFTERS: dict[str, Callable[[], EagleFSD]] = {
    "eagle": aligned_pair,
    "eagle3": aligned_eagle3_pair,
    "draft model": lambda: EagleFSD(
        aligned_pair().model, DraftModel(aligned_pair().model), small_tree(top_k=1, total_tokens=5)
    ),
    "ngram": lambda: EagleFSD(aligned_pair(cycle=8).model, NGramDrafter(), small_tree()),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_turns_process_only_new_tokens_and_give_the_same_answers(drafter: str) -> None:
    """A turn reprocesses at most the tokens of the last step before it."""
    model = DRAFTERS[drafter]()
    ways: list[tuple[list[int], dict[str, Any]]] = [
        ([3], {"threshold": ACCEPT_ALL}),
        ([3, 17, 5], {"temperature": 1.0, "seed": 3}),
    ]
    if drafter == "eagle":
        ways += [([3, 17, 5, 40, 8], {}), ([3, 17], {"method": "ar"})]
    for start, options in ways:
        cache, ids = PrefixCache(), start
        for turn in range(3):
            expected, origins, whole = decode(model, ids, None, **options)
            found, found_origins, kept = decode(model, ids, cache, **options)
            assert (found, found_origins) == (expected, origins)
            assert kept.accepted == whole.accepted
            assert whole.prefilled == len(ids) - 1
            if turn > (len(start) == 1):
                assert kept.prefilled <= 3 + model.tree.depth + 2 < whole.prefilled
            ids = [*found, 7 + turn, 30, 31]


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=5))
@settings(max_examples=settings().max_examples // 6)
def test_answers_do_not_depend_on_earlier_turns(turns: list[tuple[int, int]]) -> None:
    """Each turn keeps a prefix of the sequence, adds tokens, and decodes in one of four ways."""
    model, cache = aligned_pair(), PrefixCache()
    ids: list[int] = []
    ways = [{}, {"threshold": ACCEPT_ALL}, {"method": "ar"}, {"temperature": 1.0, "seed": 3}]
    for place, (kept, way) in enumerate(turns):
        ids = [*ids[:kept], 10 + place, 20 + kept % 7]
        options = {"max_new_tokens": 5, **ways[way]}
        expected, *_ = decode(model, ids, None, **options)
        found, *_ = decode(model, ids, cache, **options)
        assert found == expected
        ids = found


def test_interrupted_call_leaves_the_cache_usable() -> None:
    """A cache stays usable after a stream ends early and after an exception in a target pass."""
    model, cache = aligned_pair(), PrefixCache()
    ids = [3, 17, 5, 40, 8]
    with model.stream(torch.tensor([ids]), max_new_tokens=NEW, prefix_cache=cache) as stream:
        next(iter(stream))
        next(iter(stream))
    longer = [*stream.output().sequences[0].tolist(), 11]

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    hook = model.model.base_model.layers[-1].register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        decode(model, longer, cache)
    hook.remove()
    assert decode(model, longer, cache)[0] == decode(model, longer, None)[0]


def test_turns_that_fit_in_the_cache_need_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that has to grow, and cannot beside the old one, is dropped and filled again."""
    monkeypatch.setattr(PrefixCache, "spare", 20)
    model, cache = aligned_pair(), PrefixCache()
    ids, *_ = decode(model, [3, 17, 5, 40, 8], cache)
    turns = [ids, [*ids, *range(90)]]
    expected = [decode(model, turn, None)[0] for turn in turns]
    row = Engine(model.target, model.drafter, model.tree).row_bytes(len(turns[1]) + NEW)
    enough = int(row.total() / memory.USABLE_SHARE) + 1
    monkeypatch.setattr(memory, "free_bytes", lambda _: max(0, enough - cache.nbytes))
    for turn, whole in zip(turns, expected, strict=True):
        found, _, stats = decode(model, turn, cache)
        assert found == whole
        assert (stats.prefilled == len(turn) - 1) == (turn is turns[1])
    with pytest.raises(MemoryError, match=r"a row of .* tokens needs"):
        decode(model, [*expected[1], *range(90)], cache)


def test_a_cache_is_for_one_prompt_of_its_own_model_at_a_time() -> None:
    """The first of two streams goes on undisturbed, and frees the cache when it ends."""
    model, cache = aligned_pair(), PrefixCache()
    ids = torch.tensor([[3, 17, 5]])
    with pytest.raises(ValueError, match="needs a single prompt; got 2"):
        model.generate(torch.tensor([[3, 4], [5, 6]]), prefix_cache=cache)
    expected = model.generate(ids, max_new_tokens=NEW).sequences
    first = model.stream(ids, max_new_tokens=NEW, prefix_cache=cache)
    next(iter(first))
    with pytest.raises(ValueError, match="in use by another call"):
        next(iter(model.stream(ids, max_new_tokens=NEW, prefix_cache=cache)))
    assert torch.equal(first.finish().sequences, expected)
    again = model.generate(ids, max_new_tokens=NEW, prefix_cache=cache).sequences
    assert torch.equal(again, expected)
    with pytest.raises(ValueError, match="belongs to another model"):
        decode(EagleFSD(model.model, model.drafter), [3, 17, 5], cache)
