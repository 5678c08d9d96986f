"""EagleFSD: what its steps see, what it returns, and Hugging Face's interface to it."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from pairs import (
    ACCEPT_ALL,
    ARCHITECTURES,
    DEVICES,
    NEW_TOKENS,
    RecordingRule,
    aligned_pair,
    batch,
    greedy_reference,
    left_padded,
    path_to,
    plain_logits,
    prompt,
    random_pair,
    reference,
    tiny_target,
)
from torch import Tensor
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from eagle_fsd import (
    AcceptanceConfig,
    EagleFSD,
    Origin,
    SamplingConfig,
)
from eagle_fsd.model.sampling import Sampler
from eagle_fsd.model.verify import VerificationInputs

# -- what a step sees -----------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_distributions_at_tree_nodes_match_recomputation_without_a_cache(
    architecture: str, device: str
) -> None:
    """Whole paths are accepted at every step, so a wrong slot in either cache would show.

    The target's distribution is recomputed at every node and the draft's at every expanded node.
    For a prompt of one token the draft starts with zeros in place of a feature.
    """
    pair = random_pair(architecture, device)
    ids, mask = left_padded(prompt(6, 1), prompt(1, 3), prompt(11, 2))
    ids, mask = ids.to(device), mask.to(device)
    rule = RecordingRule()
    prefixes = [[row[kept.bool()]] for row, kept in zip(ids, mask, strict=True)]  # of each step
    for chunk in pair.stream(ids, attention_mask=mask, max_new_tokens=12, rule=rule):
        new = torch.tensor(chunk.tokens, device=device)
        prefixes[chunk.row].append(torch.cat([prefixes[chunk.row][-1], new]))
    assert len(rule.steps) >= 3
    assert 12 / len(rule.steps) > 1.5
    for step, inputs in enumerate(rule.steps):
        tree = inputs.tree
        for row, node in itertools.product(range(3), range(tree.size)):
            prefix = prefixes[row][step]
            path = torch.tensor(path_to(tree, row, node)[1:], dtype=torch.long, device=device)
            logits, features = plain_logits(pair.model, torch.cat([prefix, path]))
            expected = logits[-1].log_softmax(-1)
            torch.testing.assert_close(
                inputs.raw_log_probs[row, node], expected, atol=1e-3, rtol=1e-3
            )
            if tree.draft_rows[row, node] >= 0:
                drafted = tree.draft_log_probs[row, tree.draft_rows[row, node]]
                known, tokens = features[: len(prefix) - 1], prefix[1:]
                if len(prefixes[row][0]) == 1:
                    known, tokens = torch.cat([torch.zeros_like(features[:1]), known]), prefix
                expected = _draft_without_cache(pair, known, tokens, path)
                # Relative to the largest value: features grow in a chain of passes without a norm.
                scale = expected.abs().max()
                torch.testing.assert_close(drafted / scale, expected / scale, atol=1e-3, rtol=0.0)


def _draft_without_cache(pair: EagleFSD, features: Tensor, tokens: Tensor, path: Tensor) -> Tensor:
    """The head's log-probabilities after ``path``, with one causal pass per token.

    ``features`` are the head's inputs together with ``tokens``, the tokens before ``path``.
    """
    with torch.inference_mode():
        for extent in range(len(path) + 1):
            extended = torch.cat([tokens, path[:extent]])
            positions = torch.arange(len(extended), device=tokens.device)
            predicted = pair.head(features[None], extended[None], positions[None])[0]
            features = torch.cat([features, predicted[-1:]])
        return pair.head.log_probs(predicted[-1])


def test_origin_is_fuzzy_exactly_where_the_target_prefers_another_token() -> None:
    """Compared with a plain pass over the emitted tokens."""
    pair = aligned_pair()
    out = pair.generate(prompt(6), max_new_tokens=40, threshold=ACCEPT_ALL)
    text = out.sequences[0]
    best = plain_logits(pair.model, text)[0].argmax(-1)[5:-1]
    agrees = best == text[6:]
    assert torch.equal(agrees, out.origins[0] != Origin.FUZZY)
    assert not agrees.all()


# -- custom_generate ------------------------------------------------------------------------------


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
        assert torch.equal(first.log_probs, second.log_probs)
        assert torch.equal(first.warped_log_probs, second.warped_log_probs)
        if threshold == 0.0 or (divergence_on, selection) == ("raw", "longest"):
            continue  # the draft's distributions are not warped
        draft = second.tree.draft_log_probs.flatten(0, 1)
        expected = TopPLogitsWarper(0.8)(None, TemperatureLogitsWarper(0.5)(None, draft))
        expected = expected.log_softmax(-1).view_as(second.warped_draft_log_probs)
        assert (expected == -torch.inf).any()
        assert torch.equal(second.warped_draft_log_probs, expected)
        assert torch.equal(first.warped_draft_log_probs, expected)


def test_custom_generate_with_eos_token_none_runs_to_max_new_tokens() -> None:
    """None in the call overrides the target's generation configuration."""
    pair, ids = aligned_pair(), prompt(6, 3)
    free = greedy_reference(pair.model, ids, new=NEW_TOKENS)
    model = copy.deepcopy(pair.model)
    model.generation_config.eos_token_id = int(free[0, ids.shape[1] + 5])
    ending = EagleFSD(model, copy.deepcopy(pair.head), pair.tree)
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


# -- options and results --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0.1, "acceptance": AcceptanceConfig()}, "either acceptance or threshold,"),
        (
            {"min_ratio": 0.0, "divergence": "kl", "acceptance": AcceptanceConfig()},
            "either acceptance or min_ratio, divergence,",
        ),
        ({"temperature": 0.0, "sampling": SamplingConfig()}, "either sampling or temperature,"),
        ({"seed": 0, "sampling": SamplingConfig(temperature=1.0)}, "either sampling or seed,"),
    ],
)
def test_scalar_together_with_its_config_object_raises(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^pass {message} not both$"):
        random_pair().generate(prompt(4), **options)


def test_scalars_equal_their_config_objects() -> None:
    pair, (ids, mask) = aligned_pair(), batch()
    scalars = pair.generate(
        *(ids, mask, 12),
        **{"threshold": 0.4, "min_ratio": 0.1, "divergence": "tv"},
        **{"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 4},
    )
    objects = pair.generate(
        *(ids, mask, 12),
        acceptance=AcceptanceConfig(threshold=0.4, min_ratio=0.1, divergence="tv"),
        sampling=SamplingConfig(temperature=0.8, top_p=0.9, top_k=20, seed=4),
    )
    assert torch.equal(scalars.sequences, objects.sequences)
    assert torch.equal(scalars.origins, objects.origins)


def test_scalar_overrides_one_field_of_the_models_acceptance() -> None:
    """A config object replaces all of them."""
    base, ids = random_pair(), prompt(6, 3)
    acceptance = AcceptanceConfig(threshold=ACCEPT_ALL, selection="target")
    pair = EagleFSD(base.model, base.head, base.tree, acceptance)

    def answer(pair: EagleFSD, **options: Any) -> list[int]:
        return pair.generate(ids, max_new_tokens=20, **options).sequences[0].tolist()

    assert answer(pair) == answer(base, acceptance=acceptance)
    assert answer(pair, acceptance=AcceptanceConfig()) == answer(base)
    changed = acceptance.updated(min_ratio=0.5)
    assert answer(pair, min_ratio=0.5) == answer(base, acceptance=changed)
    assert answer(base) != answer(pair) != answer(pair, min_ratio=0.5)


def test_custom_rule_gets_the_inputs_it_declares() -> None:
    """Uniform numbers and warped draft distributions are computed on request only."""

    class Rule(RecordingRule):
        @property
        def needs_uniform(self) -> bool:
            return True

        @property
        def needs_warped_draft(self) -> bool:
            return True

    options = {"max_new_tokens": 6, "temperature": 0.7, "seed": 1}
    for rule, wanted in ((Rule(), True), (RecordingRule(), False)):
        aligned_pair().generate(prompt(6, 3), rule=rule, **options)
        assert all((inputs.uniform is not None) == wanted for inputs in rule.steps)
        assert all((inputs.warped_draft_log_probs is not None) == wanted for inputs in rule.steps)
    rule = Rule()
    aligned_pair().generate(prompt(6, 3), rule=rule, max_new_tokens=6)
    assert all(inputs.uniform is None for inputs in rule.steps)  # greedy


@pytest.mark.parametrize("threshold", [0.0, 0.6, ACCEPT_ALL])
def test_statistics_agree_with_the_emitted_tokens(threshold: float) -> None:
    pair = aligned_pair()
    ids, mask = batch()
    eos = int(reference(aligned=True)[0, ids.shape[1] + 5])
    out = pair.generate(
        ids, attention_mask=mask, max_new_tokens=20, threshold=threshold, eos_token_id=eos
    )
    stats = out.stats.as_dict()
    emitted = out.origins != Origin.PADDING
    assert stats["tokens"] == int(emitted.sum()) == sum(stats["origins"].values())
    for origin in (Origin.EXACT, Origin.FUZZY, Origin.TARGET):
        count = int((out.origins == origin).sum())
        assert stats["origins"][origin.name.lower()] == count
        assert out.stats.share(origin) == pytest.approx(count / stats["tokens"])
    assert [sum(row) for row in out.stats.accepted] == emitted.sum(1).tolist()
    assert stats["steps"] == sum(len(row) for row in out.stats.accepted)
    assert stats["passes"] == max(len(row) for row in out.stats.accepted)
    assert stats["tau"] == pytest.approx(stats["tokens"] / stats["steps"])
    # A step emits at most one bonus token, always as its last.
    for row, accepted in enumerate(out.stats.accepted):
        ends = torch.tensor(accepted).cumsum(0) - 1
        inner = torch.ones(int(emitted[row].sum()), dtype=torch.bool)
        inner[ends] = False
        assert not (out.origins[row, : len(inner)][inner] == Origin.TARGET).any()
    assert (stats["origins"]["fuzzy"] > 0) == (threshold > 0)
    assert stats["tokens_per_second"] > 0
    assert set(stats["seconds"]) >= {"prefill", "draft", "tree", "target", "verify", "cache"}
    assert all(value >= 0 for value in stats["seconds"].values())
    assert stats["seconds"]["target"] > 0


def test_accepted_length_grows_with_the_threshold() -> None:
    pair, (ids, mask) = aligned_pair(), batch()
    taus = [
        pair.generate(ids, attention_mask=mask, max_new_tokens=60, threshold=threshold).stats.tau
        for threshold in (0.0, 0.5, ACCEPT_ALL)
    ]
    assert taus[0] < taus[1] < taus[2]
    assert taus[2] > pair.tree.depth + 1


def test_output_starts_with_the_prompts_unchanged() -> None:
    """Including their padding; the caller's tensors are not modified."""
    ids, mask = batch()
    before = ids.clone(), mask.clone()
    out = aligned_pair().generate(ids, attention_mask=mask, max_new_tokens=5)
    assert torch.equal(ids, before[0])
    assert torch.equal(mask, before[1])
    assert torch.equal(out.sequences[:, : ids.shape[1]], ids)
    assert out.sequences.dtype == ids.dtype
    assert out.origins.dtype == torch.uint8
