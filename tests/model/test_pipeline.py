"""EagleFSD: what its steps see, its options, and what it returns."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from pairs import (
    ACCEPT_ALL,
    DEFAULT_ARCHITECTURE,
    RecordingRule,
    aligned_pair,
    batch,
    greedy_reference,
    left_padded,
    path_to,
    plain_logits,
    prompt,
    random_pair,
    small_tree,
)
from torch import Tensor
from trees import dense

from eagle_fsd import AcceptanceConfig, EagleFSD, SamplingConfig
from eagle_fsd.model.config import MIN_TEMPERATURE
from eagle_fsd.model.step import TokenDetail


@pytest.mark.parametrize(
    "architecture", [DEFAULT_ARCHITECTURE, "llama-linear-rope-tied", "mistral-wide-window"]
)
def test_distributions_at_tree_nodes_match_recomputation_without_a_cache(
    architecture: str,
) -> None:
    """Whole paths are accepted at every step, so a wrong slot in either cache would show."""
    pair = random_pair(architecture)
    ids, mask = left_padded(prompt(6, 1), prompt(1, 3), prompt(11, 2))
    rule = RecordingRule()
    prefixes = [[row[kept.bool()]] for row, kept in zip(ids, mask, strict=True)]  # of each step
    for chunk in pair.stream(ids, attention_mask=mask, max_new_tokens=12, rule=rule):
        new = torch.tensor(chunk.tokens)
        prefixes[chunk.row].append(torch.cat([prefixes[chunk.row][-1], new]))
    assert len(rule.steps) >= 3
    assert 12 / len(rule.steps) > 1.5
    for step, inputs in enumerate(rule.steps):
        tree = inputs.tree
        for row, node in itertools.product(range(3), range(tree.size)):
            prefix = prefixes[row][step]
            path = torch.tensor(path_to(tree, row, node)[1:], dtype=torch.long)
            logits, features = plain_logits(pair.model, torch.cat([prefix, path]))
            expected = logits[-1].log_softmax(-1)
            torch.testing.assert_close(dense(inputs.raw)[row, node], expected, atol=1e-3, rtol=1e-3)
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
            predicted = pair.drafter(features[None], extended[None], positions[None])[0]
            features = torch.cat([features, predicted[-1:]])
        return pair.drafter.log_probs(predicted[-1])


def test_custom_rule_gets_the_inputs_it_declares() -> None:
    """Uniform numbers and warped draft distributions are computed on request only."""

    class Rule(RecordingRule):
        needs_uniform = needs_warped_draft = True

    options = {"max_new_tokens": 6, "temperature": 0.7, "seed": 1}
    for rule, wanted in ((Rule(), True), (RecordingRule(), False)):
        aligned_pair().generate(prompt(6, 3), rule=rule, **options)
        assert all((inputs.uniform is not None) == wanted for inputs in rule.steps)
        assert all((inputs.warped_draft is not None) == wanted for inputs in rule.steps)
    rule = Rule()
    aligned_pair().generate(prompt(6, 3), rule=rule, max_new_tokens=6)
    assert all(inputs.uniform is None for inputs in rule.steps)  # greedy


def test_numpy_scalars_and_tensors_count_as_numbers() -> None:
    """All numeric options of a call and of the tree accept NumPy scalars and scalar tensors."""
    pair, ids = aligned_pair(), prompt(6, 3)
    options: dict[str, Any] = {
        "max_new_tokens": 12,
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 20,
        "seed": 7,
        "threshold": 0.25,
        "min_ratio": 0.125,
        "eos_token_id": 95,
        "pad_token_id": 94,
        "details": 2,
    }

    def decode(pair: EagleFSD, **options: Any) -> list[tuple[list[int], list[TokenDetail] | None]]:
        return [(chunk.tokens, chunk.details) for chunk in pair.stream(ids, **options)]

    expected = decode(pair, **options)
    for integer, number in ((np.int64, np.float32), (np.uint16, np.float16), (torch.tensor,) * 2):
        scalars = {
            name: number(value) if isinstance(value, float) else integer(value)
            for name, value in options.items()
        }
        tree = pair.tree.updated(total_tokens=integer(12), depth=integer(3), top_k=integer(3))
        assert tree == pair.tree
        assert decode(EagleFSD(pair.model, pair.drafter, tree), **scalars) == expected
    listed = {**options, "eos_token_id": np.array([95, 93])}
    assert decode(pair, **listed) == expected


def test_temperature_below_the_minimum_is_greedy() -> None:
    """The minimum itself decodes also where dividing huge logits by it overflows."""
    pair, ids = aligned_pair(), prompt(6, 3)
    expected = greedy_reference(pair.model, ids, new=16)
    for temperature, options in ((5e-324, {}), (0.99 * MIN_TEMPERATURE, {"top_p": 0.5})):
        assert SamplingConfig(temperature=temperature).temperature == 0.0
        found = pair.generate(ids, None, 16, temperature=temperature, **options).sequences
        assert torch.equal(found, expected)
    model = copy.deepcopy(pair.model)
    with torch.no_grad():
        model.lm_head.weight.mul_(1e4)
    huge = EagleFSD(model, copy.deepcopy(pair.drafter), small_tree())
    found = huge.generate(ids, None, 16, temperature=MIN_TEMPERATURE, seed=0).sequences
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"threshold": ACCEPT_ALL},
        {"method": "ar"},
        {"temperature": 0.7, "acceptance": AcceptanceConfig(divergence_on="warped"), "seed": 1},
    ],
)
def test_log_probabilities_match_a_plain_pass(options: dict[str, Any]) -> None:
    """Reported log-probabilities equal a plain pass's; chunks have no details unless requested."""
    pair = aligned_pair()
    ids, mask = batch()
    options = {"max_new_tokens": 16, "eos_token_id": [], **options}
    assert all(chunk.details is None for chunk in pair.stream(ids, mask, max_new_tokens=2))
    stream = pair.stream(ids, mask, details=3, **options)
    found: list[list] = [[] for _ in ids]
    tokens: list[list[int]] = [[] for _ in ids]
    for chunk in stream:
        assert len(chunk.details) == len(chunk.tokens)
        found[chunk.row] += chunk.details
        tokens[chunk.row] += chunk.tokens
    for row, details in enumerate(found):
        whole = torch.cat([ids[row][mask[row].bool()], torch.tensor(tokens[row])])
        with torch.no_grad():
            log_probs = pair.model(whole[None]).logits[0].float().log_softmax(-1)
        places = log_probs[len(whole) - len(details) - 1 : -1]
        for detail, token, expected in zip(details, tokens[row], places, strict=True):
            assert detail.log_prob == pytest.approx(float(expected[token]), abs=1e-4)
            top = expected.topk(3)
            assert [value for _, value in detail.top] == pytest.approx(
                top.values.tolist(), abs=1e-4
            )
            assert detail.top[0][0] == int(top.indices[0])
            if options.get("method") == "ar":
                assert detail.divergence is None
    assert (stream.output().sequences == pair.generate(ids, mask, **options).sequences).all()
