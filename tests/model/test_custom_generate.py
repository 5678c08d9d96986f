"""``target.generate(..., custom_generate=...)``: Hugging Face's interface to EagleFSD."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from pairs import (
    NEW_TOKENS,
    aligned_pair,
    batch,
    greedy_reference,
    left_padded,
    prompt,
    raises_one_line,
    random_pair,
    reference,
    tiny_target,
)
from torch import Tensor
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    QuantizedCache,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TypicalLogitsWarper,
)
from transformers.generation import EncoderNoRepeatNGramLogitsProcessor

from eagle_fsd import AcceptanceConfig, EagleFSD, SamplingConfig


@pytest.mark.parametrize("eos", [False, True])
def test_custom_generate_output_matches_hugging_face(eos: bool) -> None:
    """Output equals Hugging Face's, including the call's padding token after rows that ended."""
    pair = aligned_pair()
    for rows in (1, 4):
        ids, mask = (item[:rows] for item in batch())
        options: dict[str, Any] = {"pad_token_id": 77}
        if eos:
            free = reference(aligned=True)
            options["eos_token_id"] = [int(free[0, ids.shape[1] + 5]), int(free[-1, -9])]
        expected = greedy_reference(pair.model, ids, mask, new=NEW_TOKENS, **options)
        options["custom_generate"] = pair.custom_generate
        found = greedy_reference(pair.model, ids, mask, new=NEW_TOKENS, **options)
        assert torch.equal(found, expected)


def test_custom_generate_samples_with_the_options_of_the_call() -> None:
    """Equal seeds give equal outputs, top-k of 1 is greedy, and without a seed torch's decides."""
    pair, ids = aligned_pair(), prompt(6, 3)
    sample = functools.partial(_sample, pair, ids, torch.ones_like(ids))
    first, again, other = (sample(temperature=0.8, top_p=0.9, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(sample(top_k=1, seed=3), greedy_reference(pair.model, ids, new=16))
    nothing = sample(temperature=None, top_k=None, top_p=None, seed=3)
    assert torch.equal(nothing, sample(temperature=1.0, top_k=0, seed=3))
    torch.manual_seed(11)
    first = sample()
    torch.manual_seed(11)
    assert torch.equal(first, sample())
    with pytest.raises(ValueError, match=r"rule must be one of .*; got 'unknown'"):
        sample(rule="unknown")


def _penalty(penalty: float, mask: Tensor) -> RepetitionPenaltyLogitsProcessor:
    """Build the processor like ``generate``: since transformers 5.21 it ignores left padding."""
    try:
        return RepetitionPenaltyLogitsProcessor(penalty, (mask == 0).sum(1))
    except ValueError:
        return RepetitionPenaltyLogitsProcessor(penalty)


@pytest.mark.parametrize(
    ("threshold", "selection", "divergence_on", "penalty"),
    [(0.0, "longest", "raw", None), (0.5, "longest", "warped", 1.3), (0.5, "sample", "raw", 1.3)],
)
def test_custom_generate_warps_target_and_draft_like_generate(
    threshold: float, selection: str, divergence_on: str, penalty: float | None
) -> None:
    """Logits processors before temperature and top-p apply to the target only."""
    pair, (ids, mask) = aligned_pair(context=0.3), batch()
    options = {"temperature": 0.5, "top_p": 0.8, "top_k": 0, "seed": 5}
    relaxed = {"threshold": threshold, "selection": selection, "divergence_on": divergence_on}
    processors = [_penalty(penalty, mask)] if penalty else []
    acceptance = AcceptanceConfig(**relaxed)
    own = pair.generate(
        ids, mask, 16, logits_processor=processors, acceptance=acceptance, **options
    )
    found = _sample(pair, ids, mask, repetition_penalty=penalty, **options, **relaxed)
    assert torch.equal(found, own.sequences)


def test_model_input_that_would_be_dropped_raises() -> None:
    pair, ids, config = random_pair(), prompt(5), GenerationConfig(max_length=9)
    filled, quantized = DynamicCache(), object.__new__(QuantizedCache)
    filled.update(torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8), 0)
    for name, value, words in (
        ("pixel_values", torch.ones(1, 3, 8, 8), "pixel_values"),
        ("mm_encoder_outputs", {"image": torch.ones(1, 4, 32)}, "pixel_values"),
        ("inputs_embeds", torch.ones(1, 5, 32), "inputs_embeds"),
        ("token_type_ids", torch.zeros(1, 5).long(), "token_type_ids"),
        ("encoder_outputs", (torch.ones(1, 5, 32),), "encoder_outputs"),
        ("adapter_names", ["first"], "adapter_names"),
        ("is_causal", False, "is_causal"),
        ("position_ids", torch.arange(3, 8)[None], "position_ids"),
        ("position_ids", torch.arange(6)[None], "position_ids"),
        ("past_key_values", filled, "past_key_values other than an empty"),
        ("past_key_values", quantized, "past_key_values other than an empty"),
        ("synced_gpus", True, "synced_gpus"),
    ):
        inputs, criteria = {name: value}, StoppingCriteriaList()
        with raises_one_line(f"^custom_generate does not support {words}"):
            pair.custom_generate(pair.model, ids, [], criteria, config, **inputs)


def test_model_inputs_that_change_no_token_are_accepted() -> None:
    pair, (ids, mask) = random_pair(), batch()
    positions = mask.cumsum(1) - 1
    cases: list[dict[str, Any]] = [
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"past_key_values": DynamicCache()},
        {"position_ids": positions.clamp_min(0)},
        {"position_ids": positions.expand(3, -1, -1)},  # multimodal RoPE
        {"output_attentions": False, "output_hidden_states": True},
        {"logits_to_keep": 1},
    ]
    expected = reference()[:, : ids.shape[1] + 8]
    for inputs in cases:
        found = greedy_reference(
            pair.model, ids, mask, new=8, custom_generate=pair.custom_generate, **inputs
        )
        assert torch.equal(found, expected), inputs


def test_other_decoding_methods_are_rejected() -> None:
    pair = random_pair()
    for options, mode in (
        ({"prompt_lookup_num_tokens": 3}, "assisted generation"),
        ({"assistant_early_exit": 1}, "assisted generation"),
        ({"assistant_model": tiny_target()}, "assisted generation"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive search"),
        ({"dola_layers": "low"}, "dola generation"),
        ({"force_words_ids": [[5]]}, "constrained beam search"),
        ({"num_beams": 2}, "num_beams must be 1"),
        ({"return_dict_in_generate": True}, "leave return_dict_in_generate out"),
        ({"synced_gpus": True}, "does not support synced_gpus"),
    ):
        options["custom_generate"] = pair.custom_generate
        with raises_one_line(mode):
            greedy_reference(pair.model, prompt(5), new=4, **options)
    with pytest.raises(ValueError, match="a model other than its target"):
        tiny_target().generate(prompt(5), custom_generate=pair.custom_generate)


def test_generation_options_match_hugging_face() -> None:
    pair, (ids, mask) = random_pair(), batch()
    answer = reference()[0, ids.shape[1] :].tolist()
    cases: list[dict[str, Any]] = [
        {"max_time": 0.0},
        {"max_length": 30},
        {"renormalize_logits": True, "top_k": None, "temperature": None, "top_p": None},
        {"logits_processor": [TypicalLogitsWarper(0.2)]},  # masks the likeliest tokens
        # They replace those of the configuration.
        {"stopping_criteria": [MaxLengthCriteria(3)]},
        {"stopping_criteria": [MaxLengthCriteria(ids.shape[1] + 7)]},
        {"stopping_criteria": [MaxLengthCriteria(ids.shape[1] + 15)]},
        {"stopping_criteria": [EosTokenCriteria(answer[8])], "eos_token_id": answer[3]},
    ]
    for options in cases:
        expected = greedy_reference(pair.model, ids, mask, new=12, **options)
        options["custom_generate"] = pair.custom_generate
        found = greedy_reference(pair.model, ids, mask, new=12, **options)
        assert torch.equal(found, expected), options


def _sample(pair: EagleFSD, ids: Tensor, mask: Tensor, **options: Any) -> Tensor:
    return pair.model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=16,
        do_sample=True,
        pad_token_id=0,
        custom_generate=pair.custom_generate,
        **options,
    )


def test_num_return_sequences_repeats_every_prompt() -> None:
    """Processors that hold the tokens of each prompt once apply to all of its sequences."""
    pair, options = aligned_pair(context=0.3), {"encoder_no_repeat_ngram_size": 1}
    ids, mask = left_padded(prompt(9, 1), prompt(4, 2))
    found = _sample(pair, ids, mask, num_return_sequences=3, seed=2, **options)
    rows, row_masks = ids.repeat_interleave(3, 0), mask.repeat_interleave(3, 0)
    processors = [EncoderNoRepeatNGramLogitsProcessor(size, rows) for size in options.values()]
    expected = pair.generate(
        rows,
        row_masks,
        16,
        sampling=SamplingConfig(temperature=1.0, top_k=50, seed=2),
        logits_processor=processors,
    )
    assert torch.equal(found, expected.sequences)
    assert len(found.unique(dim=0)) == 6
    new = found[:, ids.shape[1] :]
    assert not any(torch.isin(new[row], rows[row]).any() for row in range(6))
