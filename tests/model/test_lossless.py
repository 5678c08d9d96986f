"""Exact decoding: Hugging Face's greedy output, independent rows, and reproducible sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from eagle3_heads import aligned_eagle3_pair
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

from eagle_fsd import AcceptanceConfig, EagleFSD, NGramDrafter, Origin, TreeConfig
from eagle_fsd.model.acceptance import (
    DelayedRule,
    FuzzyRule,
    LimitedRule,
    MixtureRule,
    PhaseRule,
    RegretRule,
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_output_matches_hugging_face(architecture: str, device: str) -> None:
    """A batch of mixed lengths, with a head that is never right and one that often is."""
    ids, mask = (item.to(device) for item in batch())
    pair = random_pair(architecture, device)
    for method in ("fsd", "ar"):
        out = pair.generate(ids, mask, NEW_TOKENS, method=method)
        assert torch.equal(out.sequences.cpu(), reference(architecture))
        assert not (out.origins == Origin.FUZZY).any()
    assert (out.stats.tau, out.stats.passes) == (1.0, NEW_TOKENS)
    assert (out.origins == Origin.TARGET).all()
    out = aligned_pair(architecture).generate(*batch(), NEW_TOKENS)
    assert torch.equal(out.sequences, reference(architecture, aligned=True))
    assert out.stats.tau > 1.5
    assert len({tuple(row) for row in out.stats.accepted}) > 1


@pytest.mark.parametrize(
    ("total_tokens", "depth", "top_k", "aligned"),
    [
        (1, 1, 1, True),
        (5, 4, 1, True),
        (60, 6, 10, True),
        (200, 2, 12, False),
        (7, 9, 2, True),
    ],
)
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


def test_threshold_zero_is_lossless_with_any_fallback_and_selection() -> None:
    """Decoding is lossless also outside a phase, and a closed gate lets exact tokens pass."""
    ids, mask = batch()
    phase = PhaseRule(FuzzyRule(ACCEPT_ALL), 98, 98)
    for rule, selection, fallback in (
        (None, "longest", "stop"),
        (None, "target", "exact"),
        (None, "sample", "stop"),
        (phase, "longest", "exact"),
        (phase, "target", "stop"),
        (phase, "sample", "exact"),
        (MixtureRule(1.0), "longest", "stop"),
    ):
        acceptance = AcceptanceConfig(selection=selection, fallback=fallback)
        out = aligned_pair().generate(ids, mask, 12, acceptance=acceptance, rule=rule)
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


@pytest.mark.parametrize(("dtype", "method"), [(torch.bfloat16, "fsd"), (torch.float16, "ar")])
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


PROMPTS = [prompt(length, seed) for length, seed in ((7, 1), (2, 2), (20, 3), (3, 4), (9, 5))]


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (aligned_pair, {}),
        (aligned_pair, {"threshold": 0.3}),
        (random_pair, {"threshold": ACCEPT_ALL}),
        (lambda: aligned_eagle3_pair(70), {"threshold": 0.3}),
        (
            lambda: EagleFSD(aligned_pair(cycle=8).model, NGramDrafter(), small_tree()),
            {"threshold": 0.3},
        ),
        (random_pair, {"rule": LimitedRule(RegretRule(1.0), 6.0)}),
        (random_pair, {"rule": PhaseRule(LimitedRule(FuzzyRule(ACCEPT_ALL), 6.0), None, 9)}),
        (random_pair, {"rule": LimitedRule(DelayedRule(FuzzyRule(ACCEPT_ALL), 7), 6.0)}),
    ],
    ids=["exact", "fuzzy", "all", "eagle3", "ngram", "limited", "phase", "delayed"],
)
def test_rows_of_a_batch_are_independent(
    make: Callable[[], EagleFSD], options: dict[str, Any]
) -> None:
    """A row emits what it emits alone, also after other rows have ended and it has been moved.

    The state of its rule follows it.
    """
    pair = make()
    singles = [pair.generate(ids, max_new_tokens=14, **options) for ids in PROMPTS]
    ids, mask = left_padded(*PROMPTS)
    eos = [int(answers(singles[row])[0, place]) for row, place in ((0, 3), (1, 8), (3, 11))]
    together = pair.generate(ids, mask, 14, eos_token_id=eos, **options)
    lengths = (together.origins != Origin.PADDING).sum(1).tolist()
    for row, single in enumerate(singles):
        tokens = answers(single)[0].tolist()
        ends = [place for place, token in enumerate(tokens, 1) if token in eos]
        assert lengths[row] == min([*ends, 14])
        assert answers(together)[row, : lengths[row]].tolist() == tokens[: lengths[row]]
        assert torch.equal(together.origins[row, : lengths[row]], single.origins[0, : lengths[row]])
        steps = len(together.stats.accepted[row])
        assert together.stats.accepted[row][:-1] == single.stats.accepted[0][: steps - 1]
    assert len(set(lengths)) > 1


@pytest.mark.parametrize(
    "acceptance", [AcceptanceConfig(), AcceptanceConfig(threshold=0.3, selection="sample")]
)
def test_seeded_sampling_is_reproducible(acceptance: AcceptanceConfig) -> None:
    """Another seed gives another output, and torch's own generator is not used.

    All bits of a seed count.
    """
    ids, mask = batch()
    options = {"temperature": 0.7, "top_p": 0.9, "acceptance": acceptance}
    state = torch.get_rng_state()
    first, again, *others = (
        aligned_pair().generate(ids, mask, 12, seed=seed, **options).sequences
        for seed in (7, 7, 8, 7 + 2**32)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again)
    assert not any(torch.equal(first, other) for other in others)


def test_unseeded_sampling_takes_its_seed_from_torch() -> None:
    """``torch.manual_seed`` makes it reproducible; two calls in a row differ."""
    pair, ids = aligned_pair(), prompt(6, 3)
    torch.manual_seed(3)
    first, second = (pair.generate(ids, temperature=1.0, max_new_tokens=12) for _ in range(2))
    torch.manual_seed(3)
    again = pair.generate(ids, temperature=1.0, max_new_tokens=12)
    assert torch.equal(first.sequences, again.sequences)
    assert not torch.equal(first.sequences, second.sequences)
