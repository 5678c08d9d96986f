"""Exact decoding: Hugging Face's greedy output, independent rows, and reproducible sampling."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from pairs import (
    ACCEPT_ALL,
    ARCHITECTURES,
    DEVICES,
    NEW_TOKENS,
    aligned_pair,
    answers,
    batch,
    greedy_reference,
    left_padded,
    plain_logits,
    prompt,
    random_pair,
    reference,
    small_tree,
    tiny_target,
    untrained_head,
)
from published import STORIES
from torch import Tensor
from transformers import PreTrainedModel

from eagle_fsd import AcceptanceConfig, EagleFSD, GenerateOutput, Origin, TreeConfig
from eagle_fsd.model.acceptance import ExactRule, FuzzyRule, PhaseRule
from eagle_fsd.model.verify import AcceptanceRule

# -- greedy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_output_matches_hugging_face(architecture: str, device: str) -> None:
    """A batch of mixed lengths with an untrained head."""
    ids, mask = batch()
    pair = random_pair(architecture, device)
    out = pair.generate(ids.to(device), attention_mask=mask.to(device), max_new_tokens=NEW_TOKENS)
    assert torch.equal(out.sequences.cpu(), reference(architecture))
    assert not (out.origins == Origin.FUZZY).any()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_output_matches_hugging_face_when_many_tokens_are_accepted(
    architecture: str,
) -> None:
    """Rows advance at different speeds and the caches are compacted."""
    ids, mask = batch()
    pair = aligned_pair(architecture)
    out = pair.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS)
    assert torch.equal(out.sequences, reference(architecture, aligned=True))
    assert out.stats.tau > 1.5
    assert len({tuple(row) for row in out.stats.accepted}) > 1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_output_of_one_prompt_matches_hugging_face(architecture: str) -> None:
    """Both methods; plain decoding emits one token per pass."""
    pair = random_pair(architecture)
    ids = prompt(9, 5)
    expected = greedy_reference(pair.model, ids, new=NEW_TOKENS)
    assert torch.equal(pair.generate(ids, max_new_tokens=NEW_TOKENS).sequences, expected)
    plain = pair.generate(ids, max_new_tokens=NEW_TOKENS, method="ar")
    assert torch.equal(plain.sequences, expected)
    assert plain.stats.tau == 1.0
    assert plain.stats.passes == NEW_TOKENS
    assert (plain.origins == Origin.TARGET).all()


def test_model_without_a_head_decodes_plainly_only() -> None:
    ids, mask = batch()
    model = random_pair().model
    out = EagleFSD(model, None).generate(
        ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, method="ar"
    )
    assert torch.equal(out.sequences, reference())
    with pytest.raises(ValueError, match="has no drafter"):
        EagleFSD(model, None).generate(ids, max_new_tokens=2)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_prompt_is_decoded_exactly(length: int) -> None:
    """A prompt of one token has no feature to draft from, one of two tokens has one."""
    pair = aligned_pair()
    ids = prompt(length, 8)
    out = pair.generate(ids, max_new_tokens=NEW_TOKENS)
    assert torch.equal(out.sequences, greedy_reference(pair.model, ids, new=NEW_TOKENS))
    assert out.stats.tau > 1.5


@pytest.mark.parametrize("rule", [ExactRule(), FuzzyRule(0.0), FuzzyRule(0.0, "top_p_kl")])
def test_rule_argument_overrides_the_threshold(rule: AcceptanceRule) -> None:
    """A fuzzy rule with ``T = 0`` is lossless too."""
    ids, mask = batch()
    out = aligned_pair().generate(ids, mask, 16, threshold=ACCEPT_ALL, rule=rule)
    expected = reference(aligned=True)[:, : ids.shape[1] + 16]
    assert torch.equal(out.sequences, expected)


@pytest.mark.parametrize(
    ("total_tokens", "depth", "top_k"),
    [(1, 1, 1), (2, 1, 1), (5, 4, 1), (4, 1, 8), (12, 2, 3), (60, 6, 10), (200, 2, 12), (7, 9, 2)],
)
@pytest.mark.parametrize("aligned", [False, True])
def test_greedy_output_does_not_depend_on_the_tree(
    total_tokens: int, depth: int, top_k: int, aligned: bool
) -> None:
    """Chains, single levels, trees that hold the whole pool, and a root without children."""
    ids, mask = batch()
    base = aligned_pair() if aligned else random_pair()
    tree = TreeConfig(total_tokens=total_tokens, depth=depth, top_k=top_k)
    out = EagleFSD(base.model, base.drafter, tree).generate(ids, mask, max_new_tokens=12)
    assert torch.equal(out.sequences, reference(aligned=aligned)[:, : ids.shape[1] + 12])
    assert max(map(max, out.stats.accepted)) <= min(depth + 2, total_tokens)
    if aligned and total_tokens > 2:
        assert out.stats.tau > 1.5


@pytest.mark.parametrize("selection", ["longest", "target", "sample"])
@pytest.mark.parametrize("fallback", ["exact", "stop"])
@pytest.mark.parametrize("rule", [None, PhaseRule(FuzzyRule(ACCEPT_ALL), 98, 98)], ids=repr)
def test_threshold_zero_is_lossless_with_any_fallback_and_selection(
    rule: PhaseRule | None, selection: str, fallback: str
) -> None:
    """Also outside a phase; and a closed gate does not stop a path of exact tokens."""
    ids, mask = batch()
    acceptance = AcceptanceConfig(selection=selection, fallback=fallback)
    out = aligned_pair().generate(ids, mask, max_new_tokens=12, acceptance=acceptance, rule=rule)
    assert torch.equal(out.sequences, reference(aligned=True)[:, : ids.shape[1] + 12])
    assert out.stats.tau > 1.5


def test_draft_of_nan_is_never_accepted() -> None:
    """A broken head costs speed, not exactness, at any threshold."""
    model = tiny_target()
    head = untrained_head(model)
    torch.nn.init.constant_(head.fc.weight, torch.nan)
    pair = EagleFSD(model, head, small_tree())
    ids = prompt(9, 5)
    expected = greedy_reference(model, ids, new=12)
    assert torch.equal(pair.generate(ids, max_new_tokens=12).sequences, expected)
    fuzzy = pair.generate(ids, max_new_tokens=12, threshold=ACCEPT_ALL)
    assert torch.equal(fuzzy.sequences, expected)


@pytest.mark.parametrize("method", ["fsd", "ar"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_emits_the_best_tokens_up_to_rounding(
    dtype: torch.dtype, method: str
) -> None:
    model = tiny_target(dtype=dtype)
    pair = EagleFSD(model, untrained_head(model), small_tree())
    ids, mask = batch()
    out = pair.generate(ids, attention_mask=mask, max_new_tokens=12, method=method)
    assert out.sequences.shape == (4, ids.shape[1] + 12)
    for row, kept in zip(out.sequences, mask, strict=True):
        text = row[int((kept == 0).sum()) :]
        logits = plain_logits(model, text)[0][-13:-1]
        chosen = logits.gather(1, text[-12:, None])[:, 0]
        assert (logits.amax(1) - chosen < 0.5).all()
    free = pair.generate(ids, attention_mask=mask, max_new_tokens=12, threshold=1.0, method=method)
    assert free.stats.tau == 1.0 if method == "ar" else free.stats.tau > 2.0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_input_ids_may_be_int32_or_int64(dtype: torch.dtype) -> None:
    ids, mask = batch()
    out = aligned_pair().generate(ids.to(dtype), attention_mask=mask, max_new_tokens=8)
    assert torch.equal(out.sequences.long(), reference(aligned=True)[:, : ids.shape[1] + 8])


def test_exact_decoding_continues_fuzzy_output_like_any_prompt() -> None:
    pair = aligned_pair()
    out = pair.generate(prompt(6), max_new_tokens=20, threshold=ACCEPT_ALL)
    assert out.stats.tau > 3.0
    assert (out.origins == Origin.FUZZY).any()
    continued = pair.generate(out.sequences, max_new_tokens=12)
    assert torch.equal(continued.sequences, greedy_reference(pair.model, out.sequences, new=12))


# -- batches --------------------------------------------------------------------------------------

PROMPTS = [prompt(length, seed) for length, seed in ((7, 1), (2, 2), (20, 3), (3, 4), (9, 5))]


@lru_cache
def alone(aligned: bool, threshold: float) -> list[GenerateOutput]:
    """The output for each of ``PROMPTS`` by itself."""
    pair = aligned_pair() if aligned else random_pair()
    return [pair.generate(ids, max_new_tokens=14, threshold=threshold) for ids in PROMPTS]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    ("aligned", "threshold"), [(True, 0.0), (True, 0.3), (True, ACCEPT_ALL), (False, ACCEPT_ALL)]
)
def test_rows_of_a_batch_are_independent(aligned: bool, threshold: float, early: bool) -> None:
    """A row emits what it emits alone, also after other rows have ended and it has been moved."""
    pair = aligned_pair() if aligned else random_pair()
    singles = alone(aligned, threshold)
    ids, mask = left_padded(*PROMPTS)
    eos: list[int] = []
    if early:
        eos = [int(answers(singles[row])[0, place]) for row, place in ((0, 3), (1, 8), (3, 11))]
    together = pair.generate(
        ids, attention_mask=mask, max_new_tokens=14, threshold=threshold, eos_token_id=eos
    )
    lengths = (together.origins != Origin.PADDING).sum(1).tolist()
    assert together.stats.tau > 1.5
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
        {
            "acceptance": AcceptanceConfig(threshold=0.3, selection="sample"),
            "top_p": 0.9,
            "temperature": 0.7,
        },
    ],
)
def test_seeded_sampling_is_reproducible(options: dict[str, Any], device: str) -> None:
    """Another seed gives another output, and torch's own generator is not used."""
    ids, mask = (item.to(device) for item in batch())
    pair = aligned_pair() if device == "cpu" else random_pair(device=device)

    def sample(seed: int) -> Tensor:
        settings = {"temperature": 1.0, "attention_mask": mask, "max_new_tokens": 12, **options}
        return pair.generate(ids, seed=seed, **settings).sequences

    state = torch.get_rng_state()
    first, again, other = sample(7), sample(7), sample(8)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_unseeded_sampling_takes_its_seed_from_torch() -> None:
    """``torch.manual_seed`` makes it reproducible; two calls in a row differ."""
    pair, ids = aligned_pair(), prompt(6, 3)
    torch.manual_seed(3)
    first, second = (pair.generate(ids, temperature=1.0, max_new_tokens=12) for _ in range(2))
    torch.manual_seed(3)
    again = pair.generate(ids, temperature=1.0, max_new_tokens=12)
    assert torch.equal(first.sequences, again.sequences)
    assert not torch.equal(first.sequences, second.sequences)


@pytest.mark.parametrize("threshold", [0.0, ACCEPT_ALL])
def test_greedy_decoding_does_not_use_torchs_generator(threshold: float) -> None:
    before = torch.get_rng_state()
    aligned_pair().generate(prompt(6, 3), max_new_tokens=8, threshold=threshold)
    assert torch.equal(torch.get_rng_state(), before)


def test_low_temperature_is_greedy() -> None:
    pair, ids = aligned_pair(), prompt(6, 3)
    out = pair.generate(ids, temperature=1e-3, max_new_tokens=20, seed=0)
    assert torch.equal(out.sequences, greedy_reference(pair.model, ids, new=20))


# -- a trained model ------------------------------------------------------------------------------


@pytest.mark.skipif(not STORIES.is_dir(), reason="the stories260k model is not available")
def test_trained_target_matches_hugging_face() -> None:
    """A small published Llama with tied embeddings."""
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
    fuzzy = pair.generate(ids, attention_mask=mask, max_new_tokens=48, threshold=ACCEPT_ALL)
    assert fuzzy.stats.tau > out.stats.tau
    continued = pair.generate(fuzzy.sequences[:1], max_new_tokens=16)
    assert torch.equal(continued.sequences, greedy_reference(model, fuzzy.sequences[:1], new=16))
