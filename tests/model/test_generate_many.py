"""Many prompts in one batch: every answer is the one that its prompt gets alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pairs import ACCEPT_ALL, VOCAB_SIZE, aligned_pair, prompt, random_pair
from transformers import MaxLengthCriteria, RepetitionPenaltyLogitsProcessor

from eagle_fsd import EagleFSD, Prompt
from eagle_fsd.model import engine
from eagle_fsd.model.acceptance import FuzzyRule, LimitedRule, TypicalRule

PENALTY = [RepetitionPenaltyLogitsProcessor(1.5)]
#: Options that the rows of a batch mix.
WAYS: list[dict[str, Any]] = [
    {},
    {"method": "ar"},
    {"threshold": 0.3},
    {"threshold": ACCEPT_ALL, "min_ratio": 0.1},
    {"rule": TypicalRule()},
    {"rule": LimitedRule(FuzzyRule(ACCEPT_ALL), 3.0)},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.0, "top_p": 0.8, "seed": 4, "threshold": 0.4},
    {"temperature": 1.0, "seed": 3, "method": "ar"},
    {"logits_processor": PENALTY},
    {"details": 2},
    {"eos_token_id": list(range(0, VOCAB_SIZE, 4))},
    {"stopping_criteria": [MaxLengthCriteria(11)]},
]


@st.composite
def requests(draw: st.DrawFn) -> list[Prompt]:
    """Prompts of different lengths and options."""
    found = []
    for number in range(draw(st.integers(1, 9))):
        way = draw(st.sampled_from(WAYS))
        ids = prompt(draw(st.integers(1, 30)), number)[0]
        found.append(Prompt(ids, max_new_tokens=draw(st.integers(1, 20)), **way))
    return found


def alone(pair: EagleFSD, item: Prompt) -> tuple[list[int], list[int]]:
    """The answer to a single prompt, and its origins."""
    ids = torch.as_tensor(item.ids)[None]
    out = pair.generate(ids, torch.ones_like(ids), **item.options)
    return out.sequences[0, ids.shape[1] :].tolist(), out.origins[0].tolist()


@given(requests(), st.integers(1, 5), st.sampled_from([2, 7, 512]), st.booleans())
def test_every_answer_is_the_one_that_its_prompt_gets_alone(
    items: list[Prompt], rows: int, chunk: int, aligned: bool
) -> None:
    """Whatever the order, lengths, stop conditions, settings and sizes of the batch."""
    pair = aligned_pair() if aligned else random_pair()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "PREFILL_CHUNK", chunk)
        found = {item.index: item for item in pair.generate_many(items, max_batch=rows)}
    assert sorted(found) == list(range(len(items)))
    for index, item in enumerate(items):
        tokens, origins = alone(pair, item)
        assert found[index].tokens == tokens
        assert found[index].origins == origins
        assert len(found[index].details) == (len(tokens) if "details" in item.options else 0)
        assert found[index].stats.tokens == len(tokens)
        assert found[index].stats.prefilled <= len(item.ids) - 1
