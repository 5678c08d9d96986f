"""Invalid arguments raise one-line errors; broken logits raise, masked tokens are not emitted."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from pairs import (
    ACCEPT_ALL,
    VOCAB_SIZE,
    aligned_pair,
    answers,
    batch,
    greedy_reference,
    prompt,
    random_pair,
    small_tree,
    tiny_target,
    untrained_head,
)
from transformers import (
    LogitsProcessor,
    MaxLengthCriteria,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
)

from eagle_fsd import AcceptanceConfig, EagleFSD, Prompt, SamplingConfig
from eagle_fsd.model.acceptance import RULES, MarginRule


class ReadingWarper(LogitsProcessor):
    """Reads previous tokens, which a warper does not get."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + input_ids.shape[1]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"threshold": -0.1}, "threshold must be a number of at least 0; got -0.1"),
    ({"threshold": math.nan}, "threshold must be a number of at least 0; got nan"),
    ({"threshold": "high"}, "threshold must be a number of at least 0; got 'high'"),
    ({"threshold": True}, "threshold must be a number of at least 0; got True"),
    ({"divergence": "jsd"}, "divergence must be one of js, .*; got 'jsd'"),
    ({"min_ratio": 1.5}, r"min_ratio must be a number in \[0, 1\]; got 1.5"),
    ({"min_ratio": math.nan}, r"min_ratio must be a number in \[0, 1\]; got nan"),
    ({"method": "beam"}, "method must be one of fsd, ar; got 'beam'"),
    ({"max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1; got 0"),
    ({"max_new_tokens": -3}, "max_new_tokens must be an integer of at least 1; got -3"),
    ({"max_new_tokens": 2.5}, "max_new_tokens must be an integer of at least 1; got 2.5"),
    ({"max_new_tokens": math.inf}, "max_new_tokens must be an integer of at least 1; got inf"),
    ({"max_new_tokens": None}, "max_new_tokens must be an integer of at least 1; got None"),
    ({"max_new_tokens": "8"}, "max_new_tokens must be an integer of at least 1; got '8'"),
    ({"temperature": -1.0}, "temperature must be a finite number of at least 0; got -1.0"),
    ({"temperature": math.nan}, "temperature must be a finite number of at least 0; got nan"),
    ({"temperature": math.inf}, "temperature must be a finite number of at least 0; got inf"),
    ({"temperature": 1.0, "top_p": 0.0}, r"top_p must be a number in \(0, 1\]; got 0.0"),
    ({"temperature": 1.0, "top_p": 1.5}, r"top_p must be a number in \(0, 1\]; got 1.5"),
    ({"temperature": 1.0, "top_k": -1}, "top_k must be an integer of at least 0; got -1"),
    ({"temperature": 1.0, "top_k": 97}, "top_k must be at most the vocabulary of 96 tokens"),
    ({"seed": -1}, r"seed must be an integer in \[0, "),
    ({"details": -1}, "details must be an integer of at least 0; got -1"),
    ({"details": 2.5}, "details must be an integer of at least 0; got 2.5"),
    ({"threshold": np.float32(-1)}, "threshold must be a number of at least 0; got -1.0"),
    ({"top_k": np.array([1, 2])}, r"top_k must be an integer of at least 0; got array\(\[1, 2"),
    ({"max_new_tokens": np.int64(0)}, "max_new_tokens must be an integer of at least 1; got 0"),
    ({"input_ids": torch.empty(1, 0, dtype=torch.long)}, "empty prompt"),
    ({"input_ids": torch.empty(0, 3, dtype=torch.long)}, "empty prompt"),
    ({"input_ids": torch.tensor([3, 4, 5])}, r"shape \[B, S\]; got int64 of shape \(3,\)"),
    ({"input_ids": torch.tensor([[[3, 4]]])}, r"shape \[B, S\]; got int64 of shape \(1, 1, 2\)"),
    ({"input_ids": torch.tensor([[3.0, 4.0]])}, "input_ids must be integers .*; got float32"),
    ({"input_ids": torch.ones(1, 4, dtype=torch.bool)}, "input_ids must be integers .*; got bool"),
    ({"input_ids": prompt(4).to(torch.uint8)}, r"\(int32 or int64\) of shape .*; got uint8"),
    ({"input_ids": prompt(4).to(torch.int8)}, r"\(int32 or int64\) of shape .*; got int8"),
    ({"input_ids": prompt(4).to(torch.int16)}, r"\(int32 or int64\) of shape .*; got int16"),
    ({"input_ids": prompt(4).to(torch.uint32)}, r"\(int32 or int64\) of shape .*; got uint32"),
    ({"input_ids": [[3, 4, 5]]}, r"input_ids must be a tensor \[B, S\]; got a list"),
    ({"input_ids": "three"}, r"input_ids must be a tensor \[B, S\]; got a str"),
    ({"input_ids": None}, r"input_ids must be a tensor \[B, S\]; got a NoneType"),
    (
        {"input_ids": torch.tensor([[3, VOCAB_SIZE]])},
        r"input_ids must be in \[0, 95\].*got 3 to 96",
    ),
    ({"input_ids": torch.tensor([[3, -1]])}, r"input_ids must be in \[0, 95\].*got -1 to 3"),
    ({"input_ids": prompt(256)}, "the prompt has 256 tokens, which leaves no room"),
    ({"attention_mask": torch.ones(1, 3)}, r"shape of input_ids, \(1, 5\); got \(1, 3\)"),
    ({"attention_mask": [[1] * 5]}, r"attention_mask must be a tensor \[B, S\]; got a list"),
    ({"attention_mask": torch.zeros(1, 5)}, "empty prompt"),
    ({"rule": "margn"}, "rule must be one of fsd, typical, .*; got 'margn'"),
    ({"rule": "margin", "threshold": 0.2}, "rule 'margin' takes no threshold; got 0.2"),
    ({"rule": MarginRule}, "rule must be an AcceptanceRule or the name of one; got <class"),
    ({"acceptance": {"treshold": 0.1}}, "unknown option treshold; the options are threshold"),
    ({"acceptance": "margin"}, "acceptance must be of type AcceptanceConfig or dict; got 'margin'"),
    ({"sampling": {"top_p": 2.0}}, r"top_p must be a number in \(0, 1\]; got 2.0"),
    ({"sampling": AcceptanceConfig()}, "sampling must be of type SamplingConfig or dict; got Acc"),
    ({"eos_token_id": 1.5}, r"eos_token_id must be an integer in \[-2147483648, .*; got 1.5"),
    ({"eos_token_id": True}, "eos_token_id must be an integer in .*; got True"),
    ({"eos_token_id": [3, "</s>"]}, "eos_token_id must be an integer in .*; got '</s>'"),
    ({"eos_token_id": {3, None}}, "eos_token_id must be an integer in .*; got None"),
    ({"eos_token_id": torch.ones(2)}, "eos_token_id must be an integer in .*; got 1.0"),
    ({"pad_token_id": "x"}, r"pad_token_id must be an integer in \[-2147483648, .*; got 'x'"),
    ({"pad_token_id": 2**70}, r"pad_token_id must be an integer in .*; got 1180591620717411303424"),
    ({"pad_token_id": True}, "pad_token_id must be an integer in .*; got True"),
    ({"prefix_cache": True}, "prefix_cache must be a PrefixCache; got True"),
    ({"stopping_criteria": [5]}, "stopping_criteria must be a Hugging Face object .*; got 5"),
    ({"logits_processor": "x"}, "logits_processor must be a Hugging Face object .*; got 'x'"),
    ({"logits_processor": [TopKLogitsWarper]}, "logits_processor must be .*; got <class"),
    (
        {"logits_warper": ReadingWarper(), "temperature": 1.0},
        "logits_warper ReadingWarper fails without previous tokens .* pass it as logits_processor",
    ),
]
#: Arguments of ``generate_many``.
BAD_BATCHES: list[tuple[Any, dict[str, Any], str]] = [
    ([[5.9, 7.2]], {}, r"a prompt must be a sequence of integers; got \[5.9, 7.2\]"),
    ([np.array([5.0, 7.0])], {}, r"a prompt must be a sequence of integers; got array"),
    ([[True, False]], {}, "a prompt must be a sequence of integers; got"),
    ([[1, None]], {}, "a prompt must be a sequence of integers; got"),
    ([[[1], [2, 3]]], {}, "a prompt must be a sequence of integers; got"),
    ([prompt(5)], {}, r"a prompt must be a sequence of integers; got int64 of shape \(1, 5\)"),
    ([5, 7], {}, "a prompt must be a sequence of integers; got 5"),
    (["three"], {}, "a prompt must be a sequence of integers; got 'three'"),
    ("three", {}, "prompts must be several prompts; got 'three'"),
    (Prompt([5]), {}, "prompts must be several prompts; got <"),
    ([Prompt([5], prefix_cache=True)], {}, "a batch keeps its own caches; leave prefix_cache out"),
    ([[5]], {"max_batch": 1.5}, "max_batch must be an integer of at least 1; got 1.5"),
    ([[5]], {"max_batch": True}, "max_batch must be an integer of at least 1; got True"),
    ([[5]], {"pad_token_id": "x"}, "pad_token_id must be an integer in .*; got 'x'"),
]
PENALTY = RepetitionPenaltyLogitsProcessor(1.5)
#: Options in other forms, and in the form that the documentation names first.
FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"rule": "margin 0.8"}, {"rule": RULES["margin 0.8"]}),
    (
        {"rule": "margin 0.8", "acceptance": {"max_fuzzy_nats": 1.0}},
        {"acceptance": AcceptanceConfig(rule="margin 0.8", max_fuzzy_nats=1.0)},
    ),
    ({"acceptance": {"threshold": ACCEPT_ALL}}, {"threshold": ACCEPT_ALL}),
    (
        {"sampling": {"temperature": 0.7, "seed": 1}},
        {"sampling": SamplingConfig(temperature=0.7, seed=1)},
    ),
    ({"eos_token_id": set(range(0, 96, 5))}, {"eos_token_id": list(range(0, 96, 5))}),
    ({"eos_token_id": np.arange(0, 96, 5)}, {"eos_token_id": list(range(0, 96, 5))}),
    (
        {"eos_token_id": range(0, 96, 5), "pad_token_id": np.int32(7)},
        {"eos_token_id": list(range(0, 96, 5)), "pad_token_id": 7},
    ),
    ({"stopping_criteria": MaxLengthCriteria(11)}, {"stopping_criteria": [MaxLengthCriteria(11)]}),
    ({"logits_processor": PENALTY}, {"logits_processor": (PENALTY,)}),
    (
        {"logits_warper": TopKLogitsWarper(3), "temperature": 1.0, "seed": 1},
        {"logits_warper": [TopKLogitsWarper(3)], "temperature": 1.0, "seed": 1},
    ),
]


@pytest.mark.parametrize("method", ["generate", "stream"])
@pytest.mark.parametrize(("options", "message"), BAD)
def test_invalid_arguments_raise_one_line(
    options: dict[str, Any], message: str, method: str
) -> None:
    arguments = {"input_ids": prompt(5), "max_new_tokens": 4, **options}
    with pytest.raises(ValueError, match=message) as error:
        getattr(random_pair(), method)(**arguments)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(("prompts", "options", "message"), BAD_BATCHES)
def test_invalid_batches_raise_one_line(
    prompts: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        list(random_pair().generate_many(prompts, 4, **options))
    assert str(error.value).isprintable()


def test_invalid_streamer_raises_one_line() -> None:
    with pytest.raises(ValueError, match="streamer must be a Hugging Face streamer; got True"):
        random_pair().generate(prompt(5), max_new_tokens=4, streamer=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(("given", "usual"), FORMS)
def test_options_may_have_other_forms(given: dict[str, Any], usual: dict[str, Any]) -> None:
    pair, (ids, mask) = aligned_pair(), batch()
    found = pair.generate(ids, mask, 16, **given).sequences
    assert torch.equal(found, pair.generate(ids, mask, 16, **usual).sequences)
    assert not torch.equal(found, pair.generate(ids, mask, 16).sequences)


def test_prompts_may_have_other_forms() -> None:
    forms = [(5, 7), [np.int64(5), torch.tensor(7)], np.array([5, 7], np.int16), range(5, 8, 2)]
    found = list(aligned_pair().generate_many([[5, 7], *forms], 8))
    assert [item.tokens for item in found] == [found[0].tokens] * 5


@pytest.mark.parametrize("name", ["treshold", "num_beams"])
def test_unknown_keyword_arguments_raise_type_error(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        random_pair().generate(prompt(5), **{name: 1})


def test_tree_wider_than_the_vocabulary_raises() -> None:
    pair = EagleFSD(random_pair().model, random_pair().drafter, small_tree(top_k=97))
    with pytest.raises(ValueError, match="tree's top_k must be at most the vocabulary of 96"):
        pair.generate(prompt(5))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("method", ["fsd", "ar"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_weights_raise(value: float, method: str, temperature: float) -> None:
    """One bad weight in the projection must not yield an invalid or an arbitrary token."""
    model = tiny_target()
    with torch.no_grad():
        model.lm_head.weight[5] = value
    pair = EagleFSD(model, untrained_head(model), small_tree())
    with pytest.raises(FloatingPointError, match="NaN or infinite") as error:
        pair.generate(prompt(5), max_new_tokens=4, method=method, temperature=temperature, seed=0)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("token", [0, 5, VOCAB_SIZE - 1])
def test_one_broken_logit_in_one_row_of_a_later_step_raises(value: float, token: int) -> None:
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


@pytest.mark.parametrize("threshold", [0.0, ACCEPT_ALL])
def test_tokens_that_the_target_masks_are_never_emitted(threshold: float) -> None:
    """A logit of minus infinity is valid: some models mask the padding of their vocabulary."""
    model = copy.deepcopy(aligned_pair().model)
    ids = prompt(6, 3)
    masked = greedy_reference(model, ids, new=10)[0, 8:16:3]

    def mask(_module: Any, _args: Any, output: Any) -> None:
        output.logits[..., masked] = -math.inf

    model.register_forward_hook(mask)
    pair = EagleFSD(model, aligned_pair().drafter, small_tree())
    out = pair.generate(ids, max_new_tokens=20, threshold=threshold)
    assert not torch.isin(answers(out), masked).any()
    if threshold == 0.0:
        assert torch.equal(out.sequences, greedy_reference(model, ids, new=20))
