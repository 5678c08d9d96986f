"""``target.generate(..., custom_generate=...)``: Hugging Face's interface to EagleFSD."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from pairs import (
    ACCEPT_ALL,
    NEW_TOKENS,
    VOCAB_SIZE,
    aligned_pair,
    batch,
    greedy_reference,
    left_padded,
    prompt,
    random_pair,
    randomize,
    reference,
    tiny_target,
    tokenizer,
)
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    DynamicCache,
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    QuantizedCache,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation import EncoderNoRepeatNGramLogitsProcessor
from transformers.generation.streamers import BaseStreamer

from eagle_fsd import AcceptanceConfig, EagleFSD, SamplingConfig
from eagle_fsd.model.sampling import Sampler
from eagle_fsd.model.verify import VerificationInputs


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("eos", [False, True])
def test_custom_generate_output_matches_hugging_face(rows: int, eos: bool) -> None:
    """Including the call's padding token behind rows that ended."""
    pair = aligned_pair()
    ids, mask = batch()
    ids, mask = ids[:rows], mask[:rows]
    options: dict[str, Any] = {"pad_token_id": 77}
    if eos:
        free = reference(aligned=True)
        options["eos_token_id"] = [int(free[0, ids.shape[1] + 5]), int(free[-1, -9])]
    expected = greedy_reference(pair.model, ids, mask, new=NEW_TOKENS, **options)
    found = greedy_reference(
        pair.model, ids, mask, new=NEW_TOKENS, custom_generate=pair.custom_generate, **options
    )
    assert torch.equal(found, expected)


def test_custom_generate_pads_with_the_first_eos_token_by_default() -> None:
    """As Hugging Face does, also when the first of several is not the smallest."""
    pair = aligned_pair()
    ids, mask = batch()
    free = reference(aligned=True)
    eos = [int(free[0, ids.shape[1] + 5]), int(free[2, ids.shape[1] + 8])]
    for ends in (eos, eos[::-1]):
        options = {"eos_token_id": ends, "pad_token_id": None}
        expected = greedy_reference(pair.model, ids, mask, new=NEW_TOKENS, **options)
        assert (expected[:, -1] == ends[0]).any()
        found = greedy_reference(
            pair.model, ids, mask, new=NEW_TOKENS, custom_generate=pair.custom_generate, **options
        )
        assert torch.equal(found, expected)


def test_custom_generate_accepts_threshold_and_method() -> None:
    pair, ids = random_pair(), prompt(6, 3)
    fuzzy = pair.generate(ids, max_new_tokens=20, threshold=ACCEPT_ALL).sequences
    assert not torch.equal(fuzzy, pair.generate(ids, max_new_tokens=20).sequences)
    found = greedy_reference(
        pair.model, ids, new=20, custom_generate=pair.custom_generate, threshold=ACCEPT_ALL
    )
    assert torch.equal(found, fuzzy)
    plain = greedy_reference(
        pair.model, ids, new=20, custom_generate=pair.custom_generate, method="ar"
    )
    assert torch.equal(plain, greedy_reference(pair.model, ids, new=20))


def test_custom_generate_samples_with_the_options_of_the_call() -> None:
    """Equal seeds give equal outputs, top-k of 1 is greedy, and without a seed torch's decides."""
    pair, ids = aligned_pair(), prompt(6, 3)

    def sample(**options: Any) -> Tensor:
        return pair.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=16,
            do_sample=True,
            pad_token_id=0,
            custom_generate=pair.custom_generate,
            **options,
        )

    first, again, other = (sample(temperature=0.8, top_p=0.9, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(sample(top_k=1, seed=3), greedy_reference(pair.model, ids, new=16))
    torch.manual_seed(11)
    first = sample()
    torch.manual_seed(11)
    assert torch.equal(first, sample())


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[VerificationInputs]:
    """The inputs of every verification from here on."""
    recorded: list[VerificationInputs] = []
    original = Sampler.__call__

    def record(*arguments: Any) -> VerificationInputs:
        recorded.append(original(*arguments))
        return recorded[-1]

    monkeypatch.setattr(Sampler, "__call__", record)
    return recorded


def _penalty(penalty: float, mask: Tensor) -> RepetitionPenaltyLogitsProcessor:
    """As ``generate`` builds it: since transformers 5.21 it ignores the padding on the left."""
    try:
        return RepetitionPenaltyLogitsProcessor(penalty, (mask == 0).sum(1))
    except ValueError:
        return RepetitionPenaltyLogitsProcessor(penalty)


@pytest.mark.parametrize(
    ("threshold", "selection", "divergence_on", "penalty"),
    [
        (0.0, "longest", "raw", None),
        (0.5, "longest", "raw", 1.3),
        (0.5, "longest", "warped", 1.3),
        (0.5, "sample", "raw", None),
        (0.5, "sample", "warped", 1.3),
    ],
)
def test_custom_generate_warps_target_and_draft_like_generate(
    threshold: float,
    selection: str,
    divergence_on: str,
    penalty: float | None,
    steps: list[VerificationInputs],
) -> None:
    """Hugging Face passes temperature and top-p among the logits processors, of which those before
    them apply to the target only."""
    pair = aligned_pair(context=0.3)
    ids, mask = batch()
    # Hugging Face's default of top_k is 50.
    options = {
        "temperature": 0.5,
        "top_p": 0.8,
        "top_k": 0,
        "seed": 5,
        "max_new_tokens": NEW_TOKENS,
    }
    relaxed = {"threshold": threshold, "selection": selection, "divergence_on": divergence_on}
    own = pair.generate(
        ids,
        attention_mask=mask,
        logits_processor=[_penalty(penalty, mask)] if penalty else [],
        acceptance=AcceptanceConfig(**relaxed),
        **options,
    )
    count = len(steps)
    found = pair.model.generate(
        ids,
        attention_mask=mask,
        do_sample=True,
        pad_token_id=0,
        repetition_penalty=penalty,
        custom_generate=pair.custom_generate,
        **options,
        **relaxed,
    )
    assert torch.equal(found, own.sequences)
    assert len(steps) == 2 * count
    for first, second in zip(steps[:count], steps[count:], strict=True):
        assert torch.equal(first.processed.dense(), second.processed.dense())
        assert torch.equal(first.warped.dense(), second.warped.dense())
        if threshold == 0.0 or (divergence_on, selection) == ("raw", "longest"):
            continue  # the draft's distributions are not warped
        draft = second.tree.draft_log_probs.flatten(0, 1)
        expected = TopPLogitsWarper(0.8)(None, TemperatureLogitsWarper(0.5)(None, draft))
        expected = expected.log_softmax(-1).view_as(second.warped_draft.dense())
        assert (expected == -torch.inf).any()
        torch.testing.assert_close(second.warped_draft.dense(), expected)
        assert torch.equal(first.warped_draft.dense(), second.warped_draft.dense())


def test_custom_generate_with_eos_token_none_runs_to_max_new_tokens() -> None:
    """None in the call overrides the target's generation configuration."""
    pair, ids = aligned_pair(), prompt(6, 3)
    free = greedy_reference(pair.model, ids, new=NEW_TOKENS)
    model = copy.deepcopy(pair.model)
    model.generation_config.eos_token_id = int(free[0, ids.shape[1] + 5])
    ending = EagleFSD(model, copy.deepcopy(pair.drafter), pair.tree)
    options = {"custom_generate": ending.custom_generate}
    ended = greedy_reference(model, ids, new=NEW_TOKENS, **options)
    assert torch.equal(ended, free[:, : ids.shape[1] + 6])
    found = greedy_reference(model, ids, new=NEW_TOKENS, eos_token_id=None, **options)
    assert torch.equal(found, free)
    assert torch.equal(greedy_reference(model, ids, new=NEW_TOKENS, eos_token_id=None), free)


def test_custom_generate_rejects_unsupported_options() -> None:
    pair, ids = random_pair(), prompt(6, 3)
    options = {"max_new_tokens": 4, "custom_generate": pair.custom_generate}
    with pytest.raises(ValueError, match="num_beams must be 1"):
        pair.model.generate(ids, num_beams=2, **options)
    with pytest.raises(ValueError, match="leave return_dict_in_generate out") as error:
        pair.model.generate(ids, return_dict_in_generate=True, **options)
    assert str(error.value).isprintable()
    with pytest.raises(ValueError, match="a model other than its target"):
        tiny_target().generate(ids, **options)


# -- model inputs ---------------------------------------------------------------------------------


def _call(pair: EagleFSD, ids: Tensor, **inputs: Any) -> Tensor:
    """Call ``custom_generate`` as Hugging Face would with these model inputs."""
    config = GenerationConfig(max_length=ids.shape[1] + 4)
    criteria = StoppingCriteriaList()
    return pair.custom_generate(pair.model, ids, [], criteria, config, **inputs)


def _filled_cache() -> DynamicCache:
    cache = DynamicCache()
    cache.update(torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8), 0)
    return cache


@pytest.mark.parametrize(
    ("inputs", "name"),
    [
        ({"pixel_values": torch.ones(1, 3, 8, 8)}, "pixel_values"),
        ({"mm_encoder_outputs": {"image": torch.ones(1, 4, 32)}}, "pixel_values"),
        ({"inputs_embeds": torch.ones(1, 5, 32)}, "inputs_embeds"),
        ({"token_type_ids": torch.zeros(1, 5).long()}, "token_type_ids"),
        ({"encoder_outputs": (torch.ones(1, 5, 32),)}, "encoder_outputs"),
        ({"adapter_names": ["first"]}, "adapter_names"),
        ({"is_causal": False}, "is_causal"),
        ({"position_ids": torch.arange(3, 8)[None]}, "position_ids"),
        ({"position_ids": torch.arange(6)[None]}, "position_ids"),
        ({"past_key_values": _filled_cache()}, "past_key_values other than an empty"),
        (
            {"past_key_values": object.__new__(QuantizedCache)},
            "past_key_values other than an empty",
        ),
        ({"synced_gpus": True}, "synced_gpus"),
    ],
)
def test_model_input_that_would_be_dropped_raises(inputs: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"^custom_generate does not support {name}") as error:
        _call(random_pair(), prompt(5), **inputs)
    assert str(error.value).isprintable()


def test_images_are_rejected() -> None:
    """Text alone decodes like ``generate``; an image would be dropped."""
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=tiny_target().config,
        image_token_id=95,
        vision_feature_layer=-1,
    )
    model = LlavaForConditionalGeneration(config)
    randomize(model, 0)
    options = {"custom_generate": EagleFSD(model, None).custom_generate, "method": "ar"}
    found = greedy_reference(model, prompt(6), new=8, **options)
    assert torch.equal(found, greedy_reference(model, prompt(6), new=8))
    ids = torch.tensor([[5, 95, 95, 95, 95, 7]])
    image = torch.rand(1, 3, 8, 8)
    with pytest.raises(ValueError, match=r"^custom_generate does not support pixel_values:"):
        greedy_reference(model, ids, new=8, pixel_values=image, **options)


@pytest.mark.parametrize(
    "inputs",
    [
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"past_key_values": DynamicCache()},
        {"position_ids": (batch()[1].cumsum(1) - 1).clamp_min(0)},
        {"position_ids": (batch()[1].cumsum(1) - 1).expand(3, -1, -1)},  # multimodal RoPE
        {"output_attentions": False, "output_hidden_states": True},
        {"logits_to_keep": 1},
    ],
)
def test_model_inputs_that_change_no_token_are_accepted(inputs: dict[str, Any]) -> None:
    pair, (ids, mask) = random_pair(), batch()
    found = greedy_reference(
        pair.model, ids, mask, new=NEW_TOKENS, custom_generate=pair.custom_generate, **inputs
    )
    assert torch.equal(found, reference())


def test_padding_token_inside_a_prompt_is_read() -> None:
    """Hugging Face passes no mask if it is all ones; the token is not padding then."""
    pair, ids = random_pair(), prompt(6, 3)
    options = {"attention_mask": torch.ones_like(ids), "pad_token_id": int(ids[0, 2])}
    expected = pair.model.generate(ids, max_new_tokens=12, **options)
    options["custom_generate"] = pair.custom_generate
    assert torch.equal(pair.model.generate(ids, max_new_tokens=12, **options), expected)


# -- generation options ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({"prompt_lookup_num_tokens": 3}, "assisted generation"),
        ({"assistant_early_exit": 1}, "assisted generation"),
        ({"assistant_model": tiny_target()}, "assisted generation"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive search"),
        ({"dola_layers": "low"}, "dola generation"),
        ({"force_words_ids": [[5]]}, "constrained beam search"),
    ],
)
def test_other_decoding_methods_are_rejected(options: dict[str, Any], mode: str) -> None:
    pair = random_pair()
    with pytest.raises(
        ValueError, match=f"^custom_generate replaces .* the options select {mode}$"
    ):
        greedy_reference(
            pair.model, prompt(5), new=4, custom_generate=pair.custom_generate, **options
        )


@pytest.mark.parametrize(
    "options",
    [
        {"max_time": 0.0},
        {"max_length": 30},
        {"renormalize_logits": True, "top_k": None, "temperature": None, "top_p": None},
        {"logits_processor": [TypicalLogitsWarper(0.2)]},  # masks the likeliest tokens
    ],
)
def test_generation_options_match_hugging_face(options: dict[str, Any]) -> None:
    pair, (ids, mask) = random_pair(), batch()
    expected = greedy_reference(pair.model, ids, mask, new=NEW_TOKENS, **options)
    found = greedy_reference(
        pair.model, ids, mask, new=NEW_TOKENS, custom_generate=pair.custom_generate, **options
    )
    assert torch.equal(found, expected)


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


def test_none_turns_an_option_off() -> None:
    pair, (ids, mask) = aligned_pair(), batch()
    nothing = _sample(pair, ids, mask, temperature=None, top_k=None, top_p=None, seed=3)
    assert torch.equal(nothing, _sample(pair, ids, mask, temperature=1.0, top_k=0, seed=3))
    assert not torch.equal(nothing, _sample(pair, ids, mask, temperature=0.5, top_k=5, seed=3))


def test_tiny_temperature_is_greedy() -> None:
    pair, (ids, mask) = aligned_pair(), batch()
    greedy = greedy_reference(pair.model, ids, mask, new=16)
    assert torch.equal(_sample(pair, ids, mask, temperature=1e-40), greedy)


@pytest.mark.parametrize("options", [{}, {"encoder_no_repeat_ngram_size": 1}])
def test_num_return_sequences_repeats_every_prompt(options: dict[str, Any]) -> None:
    """Also for processors that hold the tokens of every prompt once."""
    pair = aligned_pair(context=0.3)
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
    if options:
        new = found[:, ids.shape[1] :]
        assert not any(torch.isin(new[row], rows[row]).any() for row in range(6))


# -- streamers and stop strings -------------------------------------------------------------------


class Recorder(BaseStreamer):
    """Record what a streamer receives."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_bound_streamer_receives_the_prompt_and_the_answer() -> None:
    pair, ids = aligned_pair(), prompt(6, 3)
    streamer, expected = Recorder(), Recorder()
    decode = functools.partial(pair.custom_generate, streamer=streamer)
    found = greedy_reference(pair.model, ids, new=16, custom_generate=decode)
    greedy_reference(pair.model, ids, new=16, streamer=expected)
    assert streamer.ended
    assert streamer.tokens == expected.tokens == found[0].tolist()


def test_bound_streamer_needs_a_single_prompt() -> None:
    pair, (ids, mask) = aligned_pair(), batch()
    decode = functools.partial(pair.custom_generate, streamer=Recorder())
    with pytest.raises(ValueError, match=r"^a streamer needs a single prompt; got 4$"):
        greedy_reference(pair.model, ids, mask, new=4, custom_generate=decode)


@pytest.mark.parametrize("rows", [1, 4])
def test_stop_strings_as_a_stopping_criterion_match_hugging_face(rows: int) -> None:
    """With an end-of-sequence token, without which Hugging Face does not pad rows that ended."""
    pair, (ids, mask) = aligned_pair(), batch()
    ids, mask = ids[:rows], mask[:rows]
    free = reference(aligned=True)[:rows, ids.shape[1] :]
    strings = [tokenizer().decode(row[7:9]) for row in free]
    unused = min({*range(VOCAB_SIZE)} - {*free.flatten().tolist()})
    options = {"new": NEW_TOKENS, "eos_token_id": unused}
    expected = greedy_reference(
        pair.model, ids, mask, stop_strings=strings, tokenizer=tokenizer(), **options
    )
    assert expected.shape[1] < ids.shape[1] + NEW_TOKENS
    criteria = [StopStringCriteria(tokenizer(), strings)]
    options["custom_generate"] = pair.custom_generate
    found = greedy_reference(pair.model, ids, mask, stopping_criteria=criteria, **options)
    assert torch.equal(found, expected)
