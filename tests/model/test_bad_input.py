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
    raises_one_line,
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

from eagle_fsd import AcceptanceConfig, EagleFSD, Prompt, SamplingConfig, TreeConfig
from eagle_fsd.model.acceptance import RULES, DeferredRule, ExactRule, MarginRule


class ReadingWarper(LogitsProcessor):
    """Reads previous tokens, which a warper does not get."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + input_ids.shape[1]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"threshold": 0.1, "acceptance": AcceptanceConfig()}, "^pass either acceptance or threshold,"),
    ({"seed": 0, "sampling": SamplingConfig()}, "^pass either sampling or seed, not both$"),
    ({"streamer": True}, "streamer must be a Hugging Face streamer; got True"),
    ({"threshold": -0.1}, "threshold must be a number of at least 0; got -0.1"),
    ({"method": "beam"}, "method must be one of fsd, ar; got 'beam'"),
    ({"max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1; got 0"),
    ({"temperature": 1.0, "top_k": 97}, "top_k must be at most the vocabulary of 96 tokens"),
    ({"details": -1}, "details must be an integer of at least 0; got -1"),
    ({"top_k": np.array([1, 2])}, r"top_k must be an integer of at least 0; got array\(\[1, 2"),
    ({"input_ids": torch.empty(1, 0, dtype=torch.long)}, "every prompt must have a token"),
    ({"input_ids": torch.empty(0, 3, dtype=torch.long)}, "must be at least one prompt"),
    ({"input_ids": torch.tensor([3, 4, 5])}, r"shape \[B, S\]; got int64 of shape \(3,\)"),
    ({"input_ids": torch.tensor([[3.0, 4.0]])}, "input_ids must be integers .*; got float32"),
    ({"input_ids": prompt(4).to(torch.uint32)}, r"\(int32 or int64\) of shape .*; got uint32"),
    ({"input_ids": [[3, 4, 5]]}, r"input_ids must be a tensor \[B, S\]; got a list"),
    (
        {"input_ids": torch.tensor([[3, VOCAB_SIZE]])},
        r"token ids must be in \[0, 95\].*got 3 to 96",
    ),
    ({"input_ids": torch.tensor([[3, -1]])}, r"token ids must be in \[0, 95\].*got -1 to 3"),
    ({"input_ids": prompt(256)}, "the prompt has 256 tokens, which leaves no room"),
    ({"attention_mask": torch.ones(1, 3)}, r"shape of input_ids, \(1, 5\); got \(1, 3\)"),
    ({"attention_mask": [[1] * 5]}, r"attention_mask must be a tensor \[B, S\]; got a list"),
    ({"rule": "margn"}, "rule must be one of fsd, typical, .*; got 'margn'"),
    ({"rule": "margin", "threshold": 0.2}, "rule 'margin' takes no threshold; got 0.2"),
    ({"rule": MarginRule(), "threshold": 0.2}, "^pass either a rule object or threshold, not both"),
    (
        {"rule": DeferredRule(), "acceptance": {"selection": "target"}},
        "DeferredRule judges whole paths: it needs selection longest or priced; got target",
    ),
    ({"rule": MarginRule}, "rule must be an AcceptanceRule or the name of one; got <class"),
    ({"acceptance": {"treshold": 0.1}}, "unknown option treshold; the options are threshold"),
    ({"acceptance": "margin"}, "acceptance must be of type AcceptanceConfig or dict; got 'margin'"),
    ({"sampling": AcceptanceConfig()}, "sampling must be of type SamplingConfig or dict; got Acc"),
    ({"eos_token_id": 1.5}, r"eos_token_id must be an integer in \[-2147483648, .*; got 1.5"),
    ({"eos_token_id": [3, "</s>"]}, "eos_token_id must be an integer in .*; got '</s>'"),
    ({"pad_token_id": 2**70}, r"pad_token_id must be an integer in .*; got 1180591620717411303424"),
    ({"prefix_cache": True}, "prefix_cache must be a PrefixCache; got True"),
    ({"stopping_criteria": [5]}, "stopping_criteria must be a Hugging Face object .*; got 5"),
    ({"logits_processor": "x"}, "logits_processor must be a Hugging Face object .*; got 'x'"),
    (
        {"logits_warper": ReadingWarper(), "temperature": 1.0},
        "logits_warper ReadingWarper fails without previous tokens .* pass it as logits_processor",
    ),
]
#: Arguments of ``generate_many``.
BAD_BATCHES: list[tuple[Any, dict[str, Any], str]] = [
    ([[5.9, 7.2]], {}, r"a prompt must be a sequence of integers; got \[5.9, 7.2\]"),
    ([prompt(5)], {}, r"a prompt must be a sequence of integers; got int64 of shape \(1, 5\)"),
    ([5, 7], {}, "a prompt must be a sequence of integers; got 5"),
    ("three", {}, "prompts must be several prompts; got 'three'"),
    (Prompt([5]), {}, "prompts must be several prompts; got <"),
    ([Prompt([5], prefix_cache=True)], {}, "a batch keeps its own caches; leave prefix_cache out"),
    ([[5]], {"pad_token_id": 0}, "a batch fills no rows; leave pad_token_id out"),
    ([[5]], {"max_batch": 1.5}, "max_batch must be an integer of at least 1; got 1.5"),
]
PENALTY = RepetitionPenaltyLogitsProcessor(1.5)
#: Options in other forms, and in the form that the documentation names first.
FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"rule": "margin 0.8"}, {"rule": RULES["margin 0.8"]}),
    (
        {"rule": "margin 0.8", "acceptance": {"max_fuzzy_nats": 1.0}},
        {"acceptance": AcceptanceConfig(rule="margin 0.8", max_fuzzy_nats=1.0)},
    ),
    (
        {"rule": RULES["margin 0.8"], "acceptance": {"max_fuzzy_nats": 0.1}},
        {"acceptance": AcceptanceConfig(rule="margin 0.8", max_fuzzy_nats=0.1)},
    ),
    ({"acceptance": {"threshold": ACCEPT_ALL}}, {"threshold": ACCEPT_ALL}),
    (
        {"sampling": {"temperature": 0.7, "seed": 1}},
        {"sampling": SamplingConfig(temperature=0.7, seed=1)},
    ),
    ({"eos_token_id": set(range(0, 96, 5))}, {"eos_token_id": list(range(0, 96, 5))}),
    ({"eos_token_id": np.arange(0, 96, 5)}, {"eos_token_id": list(range(0, 96, 5))}),
    ({"stopping_criteria": MaxLengthCriteria(11)}, {"stopping_criteria": [MaxLengthCriteria(11)]}),
    ({"logits_processor": PENALTY}, {"logits_processor": (PENALTY,)}),
    (
        {"logits_warper": TopKLogitsWarper(3), "temperature": 1.0, "seed": 1},
        {"logits_warper": [TopKLogitsWarper(3)], "temperature": 1.0, "seed": 1},
    ),
]


def test_invalid_arguments_raise_one_line() -> None:
    """``stream`` rejects invalid arguments before it is iterated."""
    for options, message in BAD:
        arguments = {"input_ids": prompt(5), "max_new_tokens": 4, **options}
        for call in (random_pair().generate, random_pair().stream):
            if "streamer" in options and call == random_pair().stream:
                continue
            with raises_one_line(message):
                call(**arguments)
    with pytest.raises(TypeError, match="treshold"):
        random_pair().generate(prompt(5), treshold=1)
    with pytest.raises(ValueError, match="has no drafter"):
        EagleFSD(random_pair().model, None).generate(prompt(5))
    with pytest.raises(TypeError, match="must be a Hugging Face model; got Linear"):
        EagleFSD(torch.nn.Linear(2, 2), None)
    with pytest.raises(TypeError, match="draft model must be a Hugging Face model; got Linear"):
        EagleFSD.from_pretrained(random_pair().model, torch.nn.Linear(2, 2))


def test_invalid_batches_raise_one_line() -> None:
    for prompts, options, message in BAD_BATCHES:
        with raises_one_line(message):
            list(random_pair().generate_many(prompts, 4, **options))
    with raises_one_line("compiled_rows must be an integer of at least 1; got -3"):
        random_pair().batch(1, compiled_rows=-3)


def test_options_may_have_other_forms() -> None:
    pair, (ids, mask) = aligned_pair(), batch()
    plain = pair.generate(ids, mask, 16).sequences
    for given, usual in FORMS:
        found = pair.generate(ids, mask, 16, **given).sequences
        assert torch.equal(found, pair.generate(ids, mask, 16, **usual).sequences), given
        assert not torch.equal(found, plain), given
    loaded = EagleFSD.from_pretrained(
        pair.model, pair.drafter, tree={"depth": 2}, acceptance={"threshold": ACCEPT_ALL}
    )
    assert loaded.tree == TreeConfig(depth=2)
    assert loaded.acceptance == AcceptanceConfig(threshold=ACCEPT_ALL)


def test_a_rule_has_the_same_tree_by_name_and_as_an_object() -> None:
    """Exact verification has a tree of its own."""
    pair = EagleFSD(random_pair().model, random_pair().drafter, small_tree())
    pair.exact_tree = small_tree(total_tokens=3)
    for rule, tree in (
        ("margin", pair.tree),
        (MarginRule(), pair.tree),
        ("fsd", pair.exact_tree),
        (ExactRule(), pair.exact_tree),
    ):
        assert pair.request([5], rule=rule).tree == tree
    pair.acceptance = AcceptanceConfig(threshold=0.2)
    assert pair.request([5], rule=ExactRule()).tree == pair.exact_tree


@pytest.mark.parametrize(
    ("value", "token", "options"),
    [
        (math.nan, 0, {}),
        (math.inf, VOCAB_SIZE - 1, {"temperature": 1.0, "seed": 0}),
        (math.nan, 5, {"method": "ar"}),
    ],
)
def test_one_broken_logit_in_one_row_of_a_later_step_raises(
    value: float, token: int, options: dict[str, Any]
) -> None:
    model = tiny_target()
    passes: list[int] = []

    def poison(_module: Any, _args: Any, output: Any) -> None:
        passes.append(1)
        if len(passes) == 4:
            output.logits[2, 0, token] = value

    model.register_forward_hook(poison)
    pair = EagleFSD(model, untrained_head(model), small_tree())
    ids, mask = batch()
    with raises_one_line("NaN or infinite", FloatingPointError):
        pair.generate(ids, attention_mask=mask, max_new_tokens=12, **options)
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
