"""The same text whatever drafts it and in any company: Hugging Face's greedy, a seed's sample."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from pairs import (
    ARCHITECTURES,
    DEVICES,
    FUZZY,
    NEW,
    PLAIN,
    answers,
    batch,
    greedy_reference,
    kindred_pair,
    left_padded,
    plain_logits,
    prompt,
    reference,
    shared_pair,
    small_tree,
    tiny_target,
    untrained_head,
)
from published import STORIES
from torch import Tensor
from transformers import PreTrainedModel

from eagle_fsd import EagleFSD, FSDSettings, GenerateOutput, Origin
from eagle_fsd.model.acceptance import ExactRule, FuzzyRule
from eagle_fsd.model.divergence import DIVERGENCES

# -- greedy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_is_the_targets_own_greedy(architecture: str, device: str) -> None:
    """A batch of mixed lengths under an untrained head."""
    ids, mask = batch()
    pair = shared_pair(architecture, device)
    out = pair.generate(ids.to(device), attention_mask=mask.to(device), max_new_tokens=NEW)
    assert torch.equal(out.sequences.cpu(), reference(architecture))
    assert not (out.origins == Origin.FUZZY).any()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_is_the_targets_own_greedy_when_much_is_accepted(architecture: str) -> None:
    """Several tokens a step: rows advance at different speed and the caches are closed up."""
    ids, mask = batch()
    pair = kindred_pair(architecture)
    out = pair.generate(ids, attention_mask=mask, max_new_tokens=NEW)
    assert torch.equal(out.sequences, reference(architecture, kindred=True))
    assert out.stats.tau > 1.5
    assert len({tuple(row) for row in out.stats.accepted}) > 1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_single_prompts_and_the_plain_method(architecture: str) -> None:
    """The plain path emits one token a pass; both equal the reference of the prompt alone."""
    pair = shared_pair(architecture)
    ids = prompt(9, 5)
    expected = greedy_reference(pair.model, ids, new=NEW)
    assert torch.equal(pair.generate(ids, max_new_tokens=NEW).sequences, expected)
    plain = pair.generate(ids, max_new_tokens=NEW, method="ar")
    assert torch.equal(plain.sequences, expected)
    assert plain.stats.tau == 1.0
    assert plain.stats.passes == NEW
    assert (plain.origins == Origin.TARGET).all()


def test_the_plain_method_on_a_batch_and_without_a_head() -> None:
    ids, mask = batch()
    model = shared_pair().model
    out = EagleFSD(model, None).generate(ids, attention_mask=mask, max_new_tokens=NEW, method="ar")
    assert torch.equal(out.sequences, reference(PLAIN))
    with pytest.raises(ValueError, match="no draft head"):
        EagleFSD(model, None).generate(ids, max_new_tokens=2)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_prompts_of_few_tokens(length: int) -> None:
    """One token leaves no feature to draft from, two leave one."""
    pair = kindred_pair()
    ids = prompt(length, 8)
    out = pair.generate(ids, max_new_tokens=NEW)
    assert torch.equal(out.sequences, greedy_reference(pair.model, ids, new=NEW))
    assert out.stats.tau > 1.5


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_threshold_zero_is_lossless_with_any_divergence(divergence: str) -> None:
    """Of the settings, and of the fuzzy rule itself, which settings of ``T = 0`` do without."""
    ids, mask = batch()
    options = {"divergence": divergence, "threshold": 0.0}
    for rule in (None, FuzzyRule(0.0, divergence)):
        out = kindred_pair().generate(
            ids, attention_mask=mask, max_new_tokens=16, rule=rule, **options
        )
        assert torch.equal(out.sequences, reference(PLAIN, kindred=True)[:, : ids.shape[1] + 16])


@pytest.mark.parametrize(
    ("total_tokens", "depth", "top_k"),
    [(1, 1, 1), (2, 1, 1), (5, 4, 1), (4, 1, 8), (12, 2, 3), (60, 6, 10), (200, 2, 12), (7, 9, 2)],
)
@pytest.mark.parametrize("kindred", [False, True])
def test_any_tree_is_lossless(total_tokens: int, depth: int, top_k: int, kindred: bool) -> None:
    """Chains, single levels, trees that hold the whole pool and trees of nothing but the root."""
    ids, mask = batch()
    pair = kindred_pair() if kindred else shared_pair()
    out = pair.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=12,
        settings=FSDSettings(total_tokens=total_tokens, depth=depth, top_k=top_k),
    )
    assert torch.equal(out.sequences, reference(PLAIN, kindred)[:, : ids.shape[1] + 12])
    assert max(map(max, out.stats.accepted)) <= min(depth + 2, total_tokens)
    if kindred and total_tokens > 2:
        assert out.stats.tau > 1.5


@pytest.mark.parametrize("selection", ["longest", "target", "sample"])
@pytest.mark.parametrize("fallback", ["exact", "stop"])
def test_threshold_zero_is_lossless_whatever_the_other_settings(
    selection: str, fallback: str
) -> None:
    ids, mask = batch()
    out = kindred_pair().generate(
        ids, attention_mask=mask, max_new_tokens=12, selection=selection, fallback=fallback
    )
    assert torch.equal(out.sequences, reference(PLAIN, kindred=True)[:, : ids.shape[1] + 12])


def test_a_head_full_of_nan_costs_speed_and_nothing_else() -> None:
    """Lossless "with any head": the broken draft is never accepted for want of a comparison."""
    model = tiny_target()
    head = untrained_head(model)
    torch.nn.init.constant_(head.fc.weight, torch.nan)
    pair = EagleFSD(model, head, small_tree())
    ids = prompt(9, 5)
    expected = greedy_reference(model, ids, new=12)
    assert torch.equal(pair.generate(ids, max_new_tokens=12).sequences, expected)
    fuzzy = pair.generate(ids, max_new_tokens=12, threshold=FUZZY)
    assert torch.equal(fuzzy.sequences, expected)


@pytest.mark.parametrize("method", ["fsd", "ar"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs(dtype: torch.dtype, method: str) -> None:
    """Rounding may pick another token than a plain pass would; the call itself must hold."""
    model = tiny_target(dtype=dtype)
    pair = EagleFSD(model, untrained_head(model), small_tree())
    ids, mask = batch()
    out = pair.generate(ids, attention_mask=mask, max_new_tokens=12, method=method)
    assert out.sequences.shape == (4, ids.shape[1] + 12)
    for row, kept in zip(out.sequences, mask, strict=True):
        text = row[int((kept == 0).sum()) :]
        logits = plain_logits(model, text)[0][-13:-1]
        chosen = logits.gather(1, text[-12:, None])[:, 0]
        assert (logits.amax(1) - chosen < 0.5).all()  # the best token, up to rounding
    free = pair.generate(ids, attention_mask=mask, max_new_tokens=12, threshold=1.0, method=method)
    assert free.stats.tau == 1.0 if method == "ar" else free.stats.tau > 2.0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_either_integer_type(dtype: torch.dtype) -> None:
    ids, mask = batch()
    out = kindred_pair().generate(ids.to(dtype), attention_mask=mask, max_new_tokens=8)
    assert torch.equal(out.sequences.long(), reference(PLAIN, kindred=True)[:, : ids.shape[1] + 8])


def test_exact_decoding_goes_on_from_a_fuzzy_text_as_from_any_other() -> None:
    """What a fuzzy call emitted is a prompt like any other: decoding on from it exactly is
    Hugging Face's greedy continuation."""
    pair = kindred_pair()
    out = pair.generate(prompt(6), max_new_tokens=20, threshold=FUZZY)
    assert out.stats.tau > 3.0
    assert (out.origins == Origin.FUZZY).any()
    onward = pair.generate(out.sequences, max_new_tokens=12)
    assert torch.equal(onward.sequences, greedy_reference(pair.model, out.sequences, new=12))


def test_another_rule_may_stand_in() -> None:
    """Whatever the threshold says, the exact rule is lossless."""
    pair, ids = kindred_pair(), prompt(6, 3)
    out = pair.generate(ids, max_new_tokens=16, threshold=FUZZY, rule=ExactRule())
    assert torch.equal(out.sequences, greedy_reference(pair.model, ids, new=16))


# -- batches --------------------------------------------------------------------------------------

#: The one-token prompt is left out: without a feature the whole batch begins with a plain step.
COMPANY = [prompt(length, seed) for length, seed in ((7, 1), (2, 2), (20, 3), (3, 4), (9, 5))]


@lru_cache
def alone(kindred: bool, threshold: float) -> list[GenerateOutput]:
    """Each prompt of ``COMPANY`` by itself."""
    pair = kindred_pair() if kindred else shared_pair()
    return [pair.generate(ids, max_new_tokens=14, threshold=threshold) for ids in COMPANY]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("threshold", [0.0, 0.3, FUZZY])
@pytest.mark.parametrize("kindred", [False, True])
def test_rows_are_independent(kindred: bool, threshold: float, early: bool) -> None:
    """A row in company emits what it emits alone, also after others have ended and it has moved."""
    pair = kindred_pair() if kindred else shared_pair()
    singles = alone(kindred, threshold)
    ids, mask = left_padded(*COMPANY)
    eos: list[int] = []
    if early:
        eos = [int(answers(singles[row])[0, place]) for row, place in ((0, 3), (1, 8), (3, 11))]
    together = pair.generate(
        ids, attention_mask=mask, max_new_tokens=14, threshold=threshold, eos_token_id=eos
    )
    lengths = (together.origins != Origin.PADDING).sum(1).tolist()
    assert together.stats.tau > 1.5 or not kindred
    for row, single in enumerate(singles):
        tokens = answers(single)[0].tolist()
        ends = [place for place, token in enumerate(tokens, 1) if token in eos]
        assert lengths[row] == min([*ends, 14])
        assert answers(together)[row, : lengths[row]].tolist() == tokens[: lengths[row]]
        assert torch.equal(together.origins[row, : lengths[row]], single.origins[0, : lengths[row]])
        steps = len(together.stats.accepted[row])
        assert together.stats.accepted[row][:-1] == single.stats.accepted[0][: steps - 1]
    assert len(set(lengths)) >= 3 or not early


# -- sampling -------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options",
    [
        {"method": "ar"},
        {"threshold": 0.0},
        {"threshold": 0.3},
        {"threshold": 0.3, "selection": "sample", "top_p": 0.9, "temperature": 0.7},
    ],
)
def test_a_seed_makes_sampling_repeatable(options: dict[str, Any], device: str) -> None:
    """Same seed, same text; other seeds, other texts; torch's own generator is left alone."""
    ids, mask = (item.to(device) for item in batch())
    pair = kindred_pair() if device == "cpu" else shared_pair(device=device)

    def sample(seed: int) -> Tensor:
        settings = {"temperature": 1.0, "attention_mask": mask, "max_new_tokens": 12, **options}
        return pair.generate(ids, seed=seed, **settings).sequences

    state = torch.get_rng_state()
    first, again, other = sample(7), sample(7), sample(8)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_without_a_seed_calls_differ_and_follow_torchs_own() -> None:
    pair, ids = kindred_pair(), prompt(6, 3)
    torch.manual_seed(3)
    first, second = (pair.generate(ids, temperature=1.0, max_new_tokens=12) for _ in range(2))
    torch.manual_seed(3)
    again = pair.generate(ids, temperature=1.0, max_new_tokens=12)
    assert torch.equal(first.sequences, again.sequences)
    assert not torch.equal(first.sequences, second.sequences)


def test_low_temperature_is_greedy() -> None:
    pair, ids = kindred_pair(), prompt(6, 3)
    out = pair.generate(ids, temperature=1e-3, max_new_tokens=20, seed=0)
    assert torch.equal(out.sequences, greedy_reference(pair.model, ids, new=20))


# -- a trained model ------------------------------------------------------------------------------


@pytest.mark.skipif(not STORIES.is_dir(), reason="the stories260k model is not beside the checkout")
def test_a_trained_target_is_decoded_as_by_hugging_face() -> None:
    """A real, small Llama with tied embeddings; under an untrained head, exactly and fuzzily."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float32)
    stories = AutoTokenizer.from_pretrained(STORIES)
    texts = ["Once upon a time, there was a little", "Lily and Tom went to", "The dog", "One day"]
    tokens = [stories(text, add_special_tokens=False).input_ids for text in texts]
    ids, mask = left_padded(*(torch.tensor([[1, *item]]) for item in tokens))
    pair = EagleFSD(model, untrained_head(model), small_tree())
    expected = greedy_reference(model, ids, mask, new=48)
    out = pair.generate(ids, attention_mask=mask, max_new_tokens=48)
    assert torch.equal(out.sequences, expected)
    fuzzy = pair.generate(ids, attention_mask=mask, max_new_tokens=48, threshold=FUZZY)
    assert fuzzy.stats.tau > out.stats.tau
    onward = pair.generate(fuzzy.sequences[:1], max_new_tokens=16)
    assert torch.equal(onward.sequences, greedy_reference(model, fuzzy.sequences[:1], new=16))
