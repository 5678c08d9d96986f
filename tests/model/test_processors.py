"""Logits processors: Hugging Face's output, the prefix of every tree node, and masked tokens."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from pairs import (
    ACCEPT_ALL,
    VOCAB_SIZE,
    RecordingRule,
    aligned_pair,
    allowed_tokens,
    answers,
    batch,
    greedy_reference,
    path_to,
    prompt,
    raises_one_line,
    random_pair,
)
from torch import Tensor
from transformers import (
    ClassifierFreeGuidanceLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitsProcessor,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkingConfig,
    SynthIDTextWatermarkLogitsProcessor,
)

from eagle_fsd import AcceptanceConfig, EagleFSD

PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.6},
    "no repeated bigrams": {"no_repeat_ngram_size": 2},
    "minimum length": {"min_new_tokens": 9, "eos_token_id": list(range(40))},
    "suppressed tokens": {"suppress_tokens": list(range(0, VOCAB_SIZE, 2))},
    "suppressed at the beginning": {"begin_suppress_tokens": list(range(0, VOCAB_SIZE, 2))},
    "allowed by prefix": {"prefix_allowed_tokens_fn": allowed_tokens},
    "bad words": {"bad_words_ids": [[44], [77], [58, 65], [41, 74]]},
    "sequence bias": {"sequence_bias": [[[9], -30.0], [[58, 8], 30.0], [[15, 31], 30.0]]},
    "forced eos": {"forced_eos_token_id": 5, "eos_token_id": 5, "pad_token_id": 5},
    "growing eos": {
        "exponential_decay_length_penalty": (4, 1.5),
        "eos_token_id": 5,
        "pad_token_id": 5,
    },
    "prompt repetition": {"encoder_repetition_penalty": 8.0},
    "no tokens of the prompt": {"encoder_no_repeat_ngram_size": 1},
}


def test_processor_of_a_generation_config_matches_hugging_face() -> None:
    """Hugging Face builds the processor from its options, for its own loop and for ours."""
    pair = aligned_pair(cycle=12)
    ids, mask = batch()
    plain = greedy_reference(pair.model, ids, mask, new=14)
    for name, given in PROCESSORS.items():
        options = {"pad_token_id": 0, **given}
        expected = greedy_reference(pair.model, ids, mask, new=14, **options)
        assert expected.shape != plain.shape or not torch.equal(expected, plain), name
        options["custom_generate"] = pair.custom_generate
        assert torch.equal(greedy_reference(pair.model, ids, mask, new=14, **options), expected)


def test_processor_is_called_with_prefixes_of_the_tree_only() -> None:
    """A processor sees prefixes without padding, so it may parse them and reject invalid ones."""
    pair = aligned_pair()
    rule, ids = RecordingRule(), prompt(6, 3)
    seen: set[tuple[int, ...]] = set()

    def record(input_ids: Tensor, scores: Tensor) -> Tensor:
        seen.update(map(tuple, input_ids.tolist()))
        return scores

    prefixes, expected = [ids[0].tolist()], set()
    chunks = pair.stream(ids, max_new_tokens=12, rule=rule, logits_processor=[record])
    for chunk in chunks:
        prefixes.append(prefixes[-1] + chunk.tokens)
    for prefix, inputs in zip(prefixes, rule.steps, strict=False):
        paths = (path_to(inputs.tree, 0, node)[1:] for node in range(inputs.tree.size))
        expected.update(tuple(prefix + path) for path in paths)
    assert seen == expected


def test_constrained_decoding_matches_hugging_face_when_the_draft_violates_it() -> None:
    """The constraint is a table of allowed sequences, as for structured output."""
    pair, ids = aligned_pair(), prompt(6, 3)
    free = greedy_reference(pair.model, ids, new=12)[0, 6:].tolist()
    allowed: dict[tuple[int, ...], list[int]] = {}
    for sequence in (free[:5], [*free[:2], 90, 91, 92], [94, *free[3:8]]):
        for end, token in enumerate([*sequence, 95]):
            allowed.setdefault(tuple(sequence[:end]), []).append(token)

    def follow(raises: bool, _row: int, prefix: Tensor) -> list[int]:
        generated = tuple(prefix[6:].tolist())
        return allowed[generated] if raises else allowed.get(generated, [])

    for raises in (False, True):
        options = {
            "prefix_allowed_tokens_fn": partial(follow, raises),
            "eos_token_id": 95,
            "pad_token_id": 0,
        }
        expected = greedy_reference(pair.model, ids, new=12, **options)
        assert expected[0, 6:].tolist() == [*free[:5], 95]
        found = greedy_reference(
            pair.model, ids, new=12, custom_generate=pair.custom_generate, **options
        )
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("value", "method"), [(-math.inf, "fsd"), (math.nan, "fsd"), (-math.inf, "ar")]
)
def test_dead_ends_outside_the_answer_do_not_matter(value: float, method: str) -> None:
    """Hugging Face's loop never asks for prefixes beside the answer or beyond its end."""
    pair, ids = aligned_pair(), prompt(6, 3)
    free = greedy_reference(pair.model, ids, new=16)[0].tolist()
    dead: set[tuple[int, ...]] = set()

    def only_the_answer(input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row, prefix in enumerate(input_ids.tolist()):
            if prefix != free[: len(prefix)]:
                dead.add(tuple(prefix))
                scores[row] = value
        return scores

    options = {"logits_processor": only_the_answer, "method": method}
    assert pair.generate(ids, None, 16, **options).sequences[0].tolist() == free
    assert bool(dead) == (method == "fsd")
    assert any(list(prefix[: len(free)]) == free for prefix in dead) == (method == "fsd")
    del free[12:]
    dead.clear()
    out = pair.generate(ids, None, 16, eos_token_id=free[11], **options)
    assert out.sequences[0].tolist() == free
    assert not any(list(prefix[:12]) == free for prefix in dead)


def test_masked_tokens_are_never_emitted_at_any_threshold() -> None:
    """Accepting every draft emits no suppressed token and none outside a top-k of 1."""
    pair, ids = aligned_pair(), prompt(6, 3)
    expected = greedy_reference(pair.model, ids, new=16)
    for selection in ("longest", "target", "sample"):
        acceptance = AcceptanceConfig(threshold=ACCEPT_ALL, selection=selection)
        free = answers(pair.generate(ids, max_new_tokens=30, acceptance=acceptance))
        suppressed = free[0].unique()[::2].tolist()
        processors = [SuppressTokensLogitsProcessor(suppressed)]
        out = pair.generate(ids, None, 30, logits_processor=processors, acceptance=acceptance)
        assert len(suppressed) > 5
        assert not torch.isin(answers(out), torch.tensor(suppressed)).any()
        out = pair.generate(ids, None, 16, temperature=1.0, top_k=1, acceptance=acceptance)
        assert torch.equal(out.sequences, expected)


def mask_tokens(masked: Tensor, _ids: Tensor | None, scores: Tensor) -> Tensor:
    """Mask some of the target's tokens, ``[V]``."""
    return scores.masked_fill(masked, -torch.inf)


def mask_in_place(masked: Tensor, _ids: Tensor | None, scores: Tensor) -> Tensor:
    scores[:, masked] = -torch.inf
    return scores


def overflow(_ids: Tensor, scores: Tensor) -> Tensor:
    """Return infinity for the most likely token."""
    return scores.masked_fill(scores == scores.amax(-1, keepdim=True), math.inf)


def test_a_processor_may_repair_what_another_one_returned() -> None:
    """The tokens are still the most likely ones; without the repair, no token can be chosen."""
    pair, ids = aligned_pair(), prompt(6, 3)
    decode = partial(pair.generate, ids, max_new_tokens=12)
    processors = [overflow, InfNanRemoveLogitsProcessor()]
    expected = greedy_reference(pair.model, ids, new=12)
    assert torch.equal(decode(logits_processor=processors).sequences, expected)
    with pytest.raises(FloatingPointError, match=r"overflow returned NaN or \+inf scores"):
        decode(logits_processor=processors[::-1])


def test_warpers_see_the_target_s_vocabulary(model: EagleFSD) -> None:
    """A head that drafts fewer tokens, in another order, is warped as the target is."""
    pair = EagleFSD.from_pretrained(model.model, "bundled-eagle3")
    assert pair.drafter.vocab_size < pair.target.vocab_size
    ids = model.tokenizer("Mia has 8 apples and", return_tensors="pt").input_ids
    for changes in ({"selection": "sample"}, {"divergence_on": "warped"}):
        acceptance = AcceptanceConfig(threshold=ACCEPT_ALL, **changes)
        options = {"temperature": 1.0, "seed": 5, "acceptance": acceptance}
        masked = torch.zeros(pair.target.vocab_size, dtype=torch.bool)
        for _ in range(3):
            warper = partial(mask_tokens, masked)
            out = pair.generate(ids, max_new_tokens=40, logits_warper=warper, **options)
            emitted = out.sequences[0, ids.shape[1] :]
            assert not masked[emitted].any()
            assert out.stats.tau > 1.5
            masked[emitted.unique()[::2]] = True


@pytest.mark.parametrize("option", ["logits_warper", "logits_processor"])
def test_processors_may_change_their_scores(option: str) -> None:
    """Details and divergences are those of the models' own distributions."""
    pair, masked = aligned_pair(), torch.arange(VOCAB_SIZE) % 3 > 0
    options = {"max_new_tokens": 20, "temperature": 1.0, "seed": 5, "threshold": 0.2, "details": 3}
    found = []
    for change in (mask_tokens, mask_in_place):
        item: Any = partial(change, masked)
        item.reads_prefix = False
        found.append(list(pair.stream(prompt(6), **{option: item}, **options)))
    assert found[0] == found[1]


WATERMARK_KEYS = [654, 400, 836, 123]
UNSUPPORTED: list[tuple[LogitsProcessor, str]] = [
    (
        SynthIDTextWatermarkLogitsProcessor(5, WATERMARK_KEYS, 2**8, 0, 16, torch.device("cpu")),
        "keeps state from call to call",
    ),
    (ClassifierFreeGuidanceLogitsProcessor(1.5), "combines the rows of a batch"),
]


def test_unsupported_processor_raises_one_line() -> None:
    pair = random_pair()
    for (processor, reason), option in itertools.product(
        UNSUPPORTED, ("logits_processor", "logits_warper")
    ):
        message = f"^{type(processor).__name__} is not supported, .* {reason}"
        for method in ("fsd", "ar"):
            with raises_one_line(message):
                pair.stream(prompt(5), method=method, temperature=0.5, **{option: [processor]})
    watermark = SynthIDTextWatermarkingConfig(5, WATERMARK_KEYS)
    for options, name in (
        ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor"),
        ({"watermarking_config": watermark}, "SynthIDTextWatermarkLogitsProcessor"),
    ):
        with pytest.raises(ValueError, match=f"^{name} is not supported"):
            greedy_reference(pair.model, prompt(5), custom_generate=pair.custom_generate, **options)
