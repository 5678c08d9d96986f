"""The decoding loop: what its steps see, what it returns, and Hugging Face's interface to it."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from pairs import (
    ARCHITECTURES,
    DEVICES,
    FUZZY,
    NEW,
    PLAIN,
    Recorder,
    batch,
    greedy_reference,
    kindred_pair,
    left_padded,
    path_to,
    plain_logits,
    prompt,
    reference,
    shared_pair,
    tiny_target,
)
from torch import Tensor
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from eagle_fsd import EagleFSD, Origin
from eagle_fsd.model.sampling import Sampler
from eagle_fsd.model.verify import Evidence

# -- what a step sees -----------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_after_every_step_both_caches_are_as_if_never_speculated(
    architecture: str, device: str
) -> None:
    """Whole paths are accepted at every step. Each tree node's target distribution is recomputed
    from its full text without a cache, and so is the draft's at every node the head expanded.

    The draft of the prompt of one token opens with zeros in the place of a feature.
    """
    pair = shared_pair(architecture, device)
    ids, mask = left_padded(prompt(6, 1), prompt(1, 3), prompt(11, 2))
    ids, mask = ids.to(device), mask.to(device)
    rule = Recorder.make()
    texts = [[row[kept.bool()]] for row, kept in zip(ids, mask, strict=True)]  # before each step
    for chunk in pair.stream(ids, attention_mask=mask, max_new_tokens=12, rule=rule):
        new = torch.tensor(chunk.tokens, device=device)
        texts[chunk.row].append(torch.cat([texts[chunk.row][-1], new]))
    assert len(rule.shown) >= 3
    assert 12 / len(rule.shown) > 1.5
    for step, evidence in enumerate(rule.shown):
        tree = evidence.tree
        for row, node in itertools.product(range(3), range(tree.size)):
            text = texts[row][step]
            path = torch.tensor(path_to(tree, row, node)[1:], dtype=torch.long, device=device)
            logits, features = plain_logits(pair.model, torch.cat([text, path]))
            expected = logits[-1].log_softmax(-1)
            torch.testing.assert_close(
                evidence.raw_log_probs[row, node], expected, atol=1e-3, rtol=1e-3
            )
            if tree.draft_rows[row, node] >= 0:
                drafted = tree.draft_log_probs[row, tree.draft_rows[row, node]]
                known, pairs = features[: len(text) - 1], text[1:]
                if len(texts[row][0]) == 1:
                    known, pairs = torch.cat([torch.zeros_like(features[:1]), known]), text
                expected = _draft_from_scratch(pair, known, pairs, path)
                # Relative to the largest: a chain of passes without a norm has large features.
                scale = expected.abs().max()
                torch.testing.assert_close(drafted / scale, expected / scale, atol=1e-3, rtol=0.0)


def _draft_from_scratch(pair: EagleFSD, features: Tensor, text: Tensor, path: Tensor) -> Tensor:
    """The head's log-probabilities after ``path``, without a cache: one causal pass a token.

    Args:
        features: What the head is given with each token of ``text``.
    """
    with torch.inference_mode():
        for extent in range(len(path) + 1):
            tokens = torch.cat([text, path[:extent]])
            positions = torch.arange(len(tokens), device=tokens.device)
            predicted = pair.head(features[None], tokens[None], positions[None])[0]
            features = torch.cat([features, predicted[-1:]])
        return pair.head.readout(predicted[-1])


def test_a_node_marked_exact_or_target_carries_the_targets_arg_max() -> None:
    """Origins against a fresh pass over the emitted text, fuzzy tokens against it too."""
    pair = kindred_pair()
    out = pair.generate(prompt(6), max_new_tokens=40, threshold=FUZZY)
    text = out.sequences[0]
    best = plain_logits(pair.model, text)[0].argmax(-1)[5:-1]
    agrees = best == text[6:]
    assert torch.equal(agrees, out.origins[0] != Origin.FUZZY)
    assert not agrees.all()


# -- Hugging Face's own interface -----------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("eos", [False, True])
def test_custom_generate_is_generate(rows: int, eos: bool) -> None:
    """Also the padding behind rows that ended, which is the call's own padding token."""
    pair = kindred_pair()
    ids, mask = batch()
    ids, mask = ids[:rows], mask[:rows]
    options: dict[str, Any] = {"pad_token_id": 77}
    if eos:
        free = reference(PLAIN, kindred=True)
        options["eos_token_id"] = [int(free[0, ids.shape[1] + 5]), int(free[-1, -9])]
    expected = greedy_reference(pair.model, ids, mask, new=NEW, **options)
    found = greedy_reference(
        pair.model, ids, mask, new=NEW, custom_generate=pair.custom_generate, **options
    )
    assert torch.equal(found, expected)


def test_custom_generate_pads_with_the_first_end_of_sequence_token_by_default() -> None:
    """Hugging Face's rule, also when the first of several is not the smallest."""
    pair = kindred_pair()
    ids, mask = batch()
    free = reference(PLAIN, kindred=True)
    eos = [int(free[0, ids.shape[1] + 5]), int(free[2, ids.shape[1] + 8])]
    for ends in (eos, eos[::-1]):
        options = {"eos_token_id": ends, "pad_token_id": None}
        expected = greedy_reference(pair.model, ids, mask, new=NEW, **options)
        assert (expected[:, -1] == ends[0]).any()
        found = greedy_reference(
            pair.model, ids, mask, new=NEW, custom_generate=pair.custom_generate, **options
        )
        assert torch.equal(found, expected)


def test_custom_generate_takes_fsd_options_and_plain_ones() -> None:
    pair, ids = shared_pair(), prompt(6, 3)
    fuzzy = pair.generate(ids, max_new_tokens=20, threshold=FUZZY).sequences
    assert not torch.equal(fuzzy, pair.generate(ids, max_new_tokens=20).sequences)
    found = greedy_reference(
        pair.model, ids, new=20, custom_generate=pair.custom_generate, threshold=FUZZY
    )
    assert torch.equal(found, fuzzy)
    plain = greedy_reference(
        pair.model, ids, new=20, custom_generate=pair.custom_generate, method="ar"
    )
    assert torch.equal(plain, greedy_reference(pair.model, ids, new=20))


def test_custom_generate_samples_with_the_calls_options() -> None:
    """One seed gives one text, two give two; top-k of one is greedy again."""
    pair, ids = kindred_pair(), prompt(6, 3)

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
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Evidence]:
    """What verification is shown, step by step, of every call from here on."""
    shown: list[Evidence] = []
    original = Sampler.__call__

    def keep(*arguments: Any) -> Evidence:
        shown.append(original(*arguments))
        return shown[-1]

    monkeypatch.setattr(Sampler, "__call__", keep)
    return shown


def _penalty(penalty: float, mask: Tensor) -> RepetitionPenaltyLogitsProcessor:
    """As ``generate`` makes it: it passes over the padding on the left, since transformers 5.21."""
    try:
        return RepetitionPenaltyLogitsProcessor(penalty, (mask == 0).sum(1))
    except ValueError:
        return RepetitionPenaltyLogitsProcessor(penalty)


@pytest.mark.parametrize("penalty", [None, 1.3])
@pytest.mark.parametrize("divergence_on", ["raw", "warped"])
@pytest.mark.parametrize(
    ("threshold", "selection"), [(0.0, "longest"), (0.5, "longest"), (0.5, "sample")]
)
def test_custom_generate_warps_target_and_draft_alike(
    threshold: float,
    selection: str,
    divergence_on: str,
    penalty: float | None,
    steps: list[Evidence],
) -> None:
    """Hugging Face hands temperature and top-p over among the processors, which are the target's
    alone. Both ways to the same settings compare and draw from the same distributions."""
    pair = kindred_pair(context=0.3)
    ids, mask = batch()
    # Hugging Face's own default of top-k is 50.
    options = {"temperature": 0.5, "top_p": 0.8, "top_k": 0, "seed": 5, "max_new_tokens": NEW}
    options |= {"threshold": threshold, "selection": selection, "divergence_on": divergence_on}
    processors = [_penalty(penalty, mask)] if penalty else []
    own = pair.generate(ids, attention_mask=mask, logits_processor=processors, **options)
    count = len(steps)
    found = pair.model.generate(
        ids,
        attention_mask=mask,
        do_sample=True,
        pad_token_id=0,
        repetition_penalty=penalty,
        custom_generate=pair.custom_generate,
        **options,
    )
    assert torch.equal(found, own.sequences)
    assert len(steps) == 2 * count
    for first, second in zip(steps[:count], steps[count:], strict=True):
        assert torch.equal(first.log_probs, second.log_probs)
        assert torch.equal(first.warped_log_probs, second.warped_log_probs)
        if threshold == 0.0 or (divergence_on, selection) == ("raw", "longest"):
            continue  # nothing looks at the draft's
        draft = second.tree.draft_log_probs.flatten(0, 1)
        expected = TopPLogitsWarper(0.8)(None, TemperatureLogitsWarper(0.5)(None, draft))
        expected = expected.log_softmax(-1).view_as(second.warped_draft_log_probs)
        assert (expected == -torch.inf).any()
        assert torch.equal(second.warped_draft_log_probs, expected)
        assert torch.equal(first.warped_draft_log_probs, expected)


def test_custom_generate_without_an_end_token_runs_to_its_length() -> None:
    """None in the call stands above an end token in the target's own configuration."""
    pair, ids = kindred_pair(), prompt(6, 3)
    free = greedy_reference(pair.model, ids, new=NEW)
    model = copy.deepcopy(pair.model)
    model.generation_config.eos_token_id = int(free[0, ids.shape[1] + 5])
    ending = EagleFSD(model, copy.deepcopy(pair.head), pair.settings)
    options = {"custom_generate": ending.custom_generate}
    ended = greedy_reference(model, ids, new=NEW, **options)
    assert torch.equal(ended, free[:, : ids.shape[1] + 6])
    found = greedy_reference(model, ids, new=NEW, eos_token_id=None, **options)
    assert torch.equal(found, free)
    assert torch.equal(greedy_reference(model, ids, new=NEW, eos_token_id=None), free)


def test_custom_generate_refuses_what_it_cannot_do() -> None:
    pair, ids = shared_pair(), prompt(6, 3)
    options = {"max_new_tokens": 4, "custom_generate": pair.custom_generate}
    with pytest.raises(ValueError, match="beam"):
        pair.model.generate(ids, num_beams=2, **options)
    with pytest.raises(ValueError, match="leave return_dict_in_generate out") as error:
        pair.model.generate(ids, return_dict_in_generate=True, **options)
    assert str(error.value).isprintable()
    with pytest.raises(ValueError, match="another target"):
        tiny_target().generate(ids, **options)


# -- what is returned -----------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0.0, 0.6, FUZZY])
def test_figures_agree_with_what_was_emitted(threshold: float) -> None:
    pair = kindred_pair()
    ids, mask = batch()
    eos = int(reference(PLAIN, kindred=True)[0, ids.shape[1] + 5])
    out = pair.generate(
        ids, attention_mask=mask, max_new_tokens=20, threshold=threshold, eos_token_id=eos
    )
    figures = out.stats.as_dict()
    emitted = out.origins != Origin.PADDING
    assert figures["tokens"] == int(emitted.sum()) == sum(figures["origins"].values())
    for origin in (Origin.EXACT, Origin.FUZZY, Origin.TARGET):
        count = int((out.origins == origin).sum())
        assert figures["origins"][origin.name.lower()] == count
        assert out.stats.share(origin) == pytest.approx(count / figures["tokens"])
    assert [sum(row) for row in out.stats.accepted] == emitted.sum(1).tolist()
    assert figures["steps"] == sum(len(row) for row in out.stats.accepted)
    assert figures["passes"] == max(len(row) for row in out.stats.accepted)
    assert figures["tau"] == pytest.approx(figures["tokens"] / figures["steps"])
    # A step emits at most one token of the target's own, always its last.
    for row, accepted in enumerate(out.stats.accepted):
        ends = torch.tensor(accepted).cumsum(0) - 1
        inner = torch.ones(int(emitted[row].sum()), dtype=torch.bool)
        inner[ends] = False
        assert not (out.origins[row, : len(inner)][inner] == Origin.TARGET).any()
    assert (figures["origins"]["fuzzy"] > 0) == (threshold > 0)
    assert figures["tokens_per_second"] > 0
    assert set(figures["seconds"]) >= {"prefill", "draft", "tree", "target", "verify", "cache"}
    assert all(value >= 0 for value in figures["seconds"].values())
    assert figures["seconds"]["target"] > 0


def test_accepted_lengths_grow_with_the_threshold() -> None:
    """On the same prompts: nothing fuzzy, some, all."""
    pair, (ids, mask) = kindred_pair(), batch()
    taus = [
        pair.generate(ids, attention_mask=mask, max_new_tokens=60, threshold=threshold).stats.tau
        for threshold in (0.0, 0.5, FUZZY)
    ]
    assert taus[0] < taus[1] < taus[2]
    assert taus[2] > pair.settings.depth + 1


def test_prompts_come_back_as_they_were_given() -> None:
    """Padding included, and the caller's tensors are not written to."""
    ids, mask = batch()
    before = ids.clone(), mask.clone()
    out = kindred_pair().generate(ids, attention_mask=mask, max_new_tokens=5)
    assert torch.equal(ids, before[0])
    assert torch.equal(mask, before[1])
    assert torch.equal(out.sequences[:, : ids.shape[1]], ids)
    assert out.sequences.dtype == ids.dtype
    assert out.origins.dtype == torch.uint8
