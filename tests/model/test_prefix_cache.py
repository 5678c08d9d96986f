"""Caches kept between turns: the same answers as without, for the new tokens' cost alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pairs import FUZZY, kindred_pair

from eagle_fsd import EagleFSD
from eagle_fsd.model.engine import PREFILL_CHUNK
from eagle_fsd.model.prefix_cache import Conversation

NEW = 12


def pair() -> EagleFSD:
    return kindred_pair()


def ask(model: EagleFSD, ids: list[int], conversation: Conversation | None, **options: object):
    options = {"max_new_tokens": NEW, "eos_token_id": [], **options}
    out = model.generate(torch.tensor([ids]), conversation=conversation, **options)
    return out.sequences[0].tolist(), out.origins[0].tolist(), out.stats


@pytest.mark.parametrize("options", [{}, {"threshold": FUZZY}, {"method": "ar"}])
def test_turns_say_the_same_and_read_the_new_tokens_only(options: dict[str, object]) -> None:
    """Of the earlier turns no more is read again than what the last step's draft did not see."""
    model, conversation = pair(), Conversation()
    ids = [3, 17, 5, 40, 8]
    for turn in range(4):
        expected, origins, whole = ask(model, ids, None, **options)
        found, found_origins, kept = ask(model, ids, conversation, **options)
        assert found == expected
        assert found_origins == origins
        assert whole.prefilled == len(ids) - 1
        most = model.settings.depth + 2
        if turn:
            assert kept.prefilled <= 3 + most < whole.prefilled
        ids = [*found, 7 + turn, 30, 31]


def test_methods_may_change_between_turns() -> None:
    model, conversation = pair(), Conversation()
    ids = [3, 17, 5, 40, 8]
    for method in ("ar", "fsd", "ar", "ar", "fsd", "fsd"):
        expected, *_ = ask(model, ids, None)
        found, *_ = ask(model, ids, conversation, method=method)
        assert found == expected
        ids = [*found, 9]


def test_an_edited_history_is_cut_back_to_what_it_shares() -> None:
    model, conversation = pair(), Conversation()
    first, *_ = ask(model, [3, 17, 5, 40, 8], conversation)
    edited = [*first[:9], 50, 51, 52]
    found, _, stats = ask(model, edited, conversation)
    assert found == ask(model, edited, None)[0]
    assert stats.prefilled == 3  # 8, of which the feature is wanted, and the edit but its last
    other = [60, 61, 62]
    assert ask(model, other, conversation)[0] == ask(model, other, None)[0]


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=5))
def test_whatever_the_history_the_answer_is_the_same(turns: list[tuple[int, int]]) -> None:
    """Each turn keeps some tokens of what there is, adds a few, and decodes in one of four ways."""
    model, conversation = pair(), Conversation()
    ids: list[int] = []
    ways = [{}, {"threshold": FUZZY}, {"method": "ar"}, {"temperature": 1.0, "seed": 3}]
    for place, (kept, way) in enumerate(turns):
        ids = [*ids[:kept], 10 + place, 20 + kept % 7]
        options = {"max_new_tokens": 5, **ways[way]}
        expected, *_ = ask(model, ids, None, **options)
        found, *_ = ask(model, ids, conversation, **options)
        assert found == expected
        ids = found


@pytest.mark.parametrize("length", [1, 2])
def test_short_prompts(length: int) -> None:
    model, conversation = pair(), Conversation()
    ids = [3, 17][:length]
    for _ in range(3):
        expected, *_ = ask(model, ids, None)
        found, *_ = ask(model, ids, conversation)
        assert found == expected
        ids = [*found, 4]


def test_a_call_broken_off_leaves_it_fit() -> None:
    """After two steps, and in the middle of a pass of the target."""
    model, conversation = pair(), Conversation()
    ids = [3, 17, 5, 40, 8]
    stream = model.stream(torch.tensor([ids]), max_new_tokens=NEW, conversation=conversation)
    next(iter(stream))
    next(iter(stream))
    longer = [*ids, *stream.new[0], 11]

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    hook = model.model.base_model.layers[-1].register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        ask(model, longer, conversation)
    hook.remove()
    assert ask(model, longer, conversation)[0] == ask(model, longer, None)[0]


def test_caches_grow_with_the_conversation_and_keep_what_they_hold() -> None:
    model, conversation = pair(), Conversation()
    ids, *_ = ask(model, [3, 17, 5], conversation, max_new_tokens=4)
    small = conversation._cache
    conversation._cache = model.target.new_cache(1, 24)
    conversation._cache.copy_beginning(small, len(conversation.tokens))
    longer = [*ids, *range(20, 60)]
    found, _, stats = ask(model, longer, conversation)
    assert found == ask(model, longer, None)[0]
    assert stats.prefilled < len(longer) - 1
    assert conversation._cache.length > 24
    assert PREFILL_CHUNK > 60  # or the test would have to be longer to see several chunks


def test_one_conversation_one_prompt_one_model() -> None:
    model, conversation = pair(), Conversation()
    with pytest.raises(ValueError, match="a conversation is one prompt's"):
        model.generate(torch.tensor([[3, 4], [5, 6]]), conversation=conversation)
    ask(model, [3, 17, 5], conversation)
    other = EagleFSD(model.model, model.head)
    with pytest.raises(ValueError, match="another model's"):
        ask(other, [3, 17, 5], conversation)
