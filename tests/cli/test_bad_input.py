"""Calls that are refused, each with one clear line, and logits that are broken or only masked."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from pairs import (
    FUZZY,
    VOCABULARY,
    answers,
    batch,
    greedy_reference,
    kindred_pair,
    prompt,
    shared_pair,
    small_tree,
    tiny_target,
    untrained_head,
)

from eagle_fsd import EagleFSD, FSDSettings

BAD: list[tuple[dict[str, Any], str]] = [
    ({"threshold": -0.1}, "threshold must be at least 0; got -0.1"),
    ({"threshold": math.nan}, "threshold must be at least 0; got nan"),
    ({"divergence": "jsd"}, "divergence must be one of js, .*; got 'jsd'"),
    ({"min_ratio": 1.5}, "min_ratio must be between 0 and 1; got 1.5"),
    ({"min_ratio": math.nan}, "min_ratio must be between 0 and 1; got nan"),
    ({"fallback": "give up"}, "fallback must be one of exact, stop"),
    ({"selection": "best"}, "selection must be one of longest, target, sample"),
    ({"divergence_on": "both"}, "divergence_on must be one of raw, warped"),
    ({"method": "beam"}, "method must be one of fsd, ar; got 'beam'"),
    ({"max_new_tokens": 0}, "max_new_tokens .* at least 1; got 0"),
    ({"max_new_tokens": -3}, "max_new_tokens .* at least 1; got -3"),
    ({"max_new_tokens": 2.5}, "max_new_tokens .* whole number .*got 2.5"),
    ({"max_new_tokens": math.nan}, "max_new_tokens"),
    ({"max_new_tokens": math.inf}, "max_new_tokens"),
    ({"max_new_tokens": None}, "max_new_tokens .* whole number .*got None"),
    ({"max_new_tokens": "8"}, "max_new_tokens .* whole number .*got '8'"),
    ({"temperature": -1.0}, "temperature must be .* at least 0; got -1.0"),
    ({"temperature": math.nan}, "temperature must be .* at least 0; got nan"),
    ({"temperature": math.inf}, "temperature"),
    ({"temperature": 1.0, "top_p": 0.0}, "top_p must be above 0 and at most 1; got 0.0"),
    ({"temperature": 1.0, "top_p": 1.5}, "top_p must be above 0 and at most 1; got 1.5"),
    ({"temperature": 1.0, "top_p": math.nan}, "top_p must be above 0 and at most 1; got nan"),
    ({"temperature": 1.0, "top_k": -1}, "top_k must be a whole number"),
    ({"temperature": 1.0, "top_k": 97}, "^top_k is 97, more than the vocabulary of 96"),
    ({"settings": FSDSettings(top_k=97)}, "top_k is 97, more than the vocabulary of 96"),
    ({"input_ids": torch.empty(1, 0, dtype=torch.long)}, "empty prompt"),
    ({"input_ids": torch.empty(0, 3, dtype=torch.long)}, "empty prompt"),
    ({"input_ids": torch.tensor([3, 4, 5])}, r"shape \[B, S\]; got \(3,\)"),
    ({"input_ids": torch.tensor([[[3, 4]]])}, r"shape \[B, S\]; got \(1, 1, 2\)"),
    ({"input_ids": torch.tensor([[3.0, 4.0]])}, "input_ids must be whole numbers.* of float32"),
    ({"input_ids": torch.ones(1, 4, dtype=torch.bool)}, "must be whole numbers.* of bool"),
    ({"input_ids": [[3, 4, 5]]}, r"input_ids must be a tensor \[B, S\]; got a list"),
    ({"input_ids": "three"}, r"input_ids must be a tensor \[B, S\]; got a str"),
    ({"input_ids": None}, r"input_ids must be a tensor \[B, S\]; got a NoneType"),
    ({"input_ids": torch.tensor([[3, VOCABULARY]])}, "outside the target's vocabulary of 96"),
    ({"input_ids": torch.tensor([[3, -1]])}, "outside the target's vocabulary of 96"),
    ({"input_ids": prompt(256)}, "prompt has 256 tokens; the target's context holds 256"),
    ({"attention_mask": torch.ones(1, 3)}, r"attention_mask is \(1, 3\), input_ids \(1, 5\)"),
    ({"attention_mask": torch.zeros(1, 5)}, "empty prompt"),
]


@pytest.mark.parametrize("way", ["generate", "stream"])
@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_input_is_one_clear_line(options: dict[str, Any], message: str, way: str) -> None:
    arguments = {"input_ids": prompt(5), "max_new_tokens": 4, **options}
    with pytest.raises(ValueError, match=message) as error:
        getattr(shared_pair(), way)(**arguments)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"treshold": 0.1}, "treshold"),
        ({"num_beams": 2}, "num_beams"),
        ({"threshold": "high"}, "threshold must be a number; got 'high'"),
        ({"threshold": True}, "threshold must be a number; got True"),
    ],
)
def test_unknown_options_and_other_types_are_type_errors(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        shared_pair().generate(prompt(5), **options)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("method", ["fsd", "ar"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_an_error_that_says_so(
    value: float, method: str, temperature: float
) -> None:
    """One poisoned weight of the projection; never an id out of range, never a quiet token."""
    model = tiny_target()
    with torch.no_grad():
        model.lm_head.weight[5] = value
    pair = EagleFSD(model, untrained_head(model), small_tree())
    with pytest.raises(FloatingPointError, match="NaN or infinite") as error:
        pair.generate(prompt(5), max_new_tokens=4, method=method, temperature=temperature, seed=0)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("token", [0, 5, VOCABULARY - 1])
def test_one_broken_logit_in_one_row_of_a_later_step_is_found(value: float, token: int) -> None:
    model = tiny_target()
    passes: list[int] = []

    def poison(_module: Any, _args: Any, output: Any) -> None:
        passes.append(1)
        if len(passes) == 4:
            output.logits[2, 0, token] = value

    model.register_forward_hook(poison)
    pair = EagleFSD(model, untrained_head(model), small_tree())
    ids, mask = batch()
    with pytest.raises(FloatingPointError, match="NaN or infinite"):
        pair.generate(ids, attention_mask=mask, max_new_tokens=12)
    assert len(passes) == 4


@pytest.mark.parametrize("threshold", [0.0, FUZZY])
def test_a_target_may_rule_tokens_out(threshold: float) -> None:
    """Minus infinity is no fault: some models mask the rows that pad their vocabulary."""
    model = copy.deepcopy(kindred_pair().model)
    ids = prompt(6, 3)
    ruled_out = greedy_reference(model, ids, new=10)[0, 8:16:3]

    def mask(_module: Any, _args: Any, output: Any) -> None:
        output.logits[..., ruled_out] = -math.inf

    model.register_forward_hook(mask)
    pair = EagleFSD(model, kindred_pair().head, small_tree())
    out = pair.generate(ids, max_new_tokens=20, threshold=threshold)
    assert not torch.isin(answers(out), ruled_out).any()
    if threshold == 0.0:
        assert torch.equal(out.sequences, greedy_reference(model, ids, new=20))
