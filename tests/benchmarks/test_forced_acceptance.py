"""Forced acceptance: the right number of tokens per step, and never any text."""

from __future__ import annotations

import pytest
import torch
from measurement import (
    QUICK,
    ForcedAcceptance,
    contenders,
    random_prompt,
    step_bytes,
    time_steps,
)
from pairs import new_random_pair, prompt, random_pair
from shapes import SHAPES, random_head, random_target

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.model.acceptance import ExactRule, FuzzyRule


def test_forced_number_of_tokens_per_step() -> None:
    pair = new_random_pair(total_tokens=4, depth=2, top_k=1)  # a chain of three tokens
    for accepted, rows in ((0, 3), (1, 1), (2, 3), (3, 1)):
        ids = random_prompt(pair, rows, 5)
        times = time_steps(contenders(pair), ids, QUICK, "test", accepted)
        assert times.pop("plain").tau == 1.0
        assert len(times) == 2
        for steps in times.values():
            assert steps.tau == accepted + 1
            assert len(steps.blocks) == QUICK.blocks
            assert steps.seconds > 0.0


def test_forced_acceptance_never_yields_text() -> None:
    pair = random_pair()
    for inner in (ExactRule(), FuzzyRule(0.1)):
        rule = ForcedAcceptance(2, inner)
        with pytest.raises(RuntimeError, match="returns no text"):
            pair.generate(prompt(4), rule=rule)
        with pytest.raises(RuntimeError, match="returns no text"):
            next(iter(pair.stream(prompt(4), rule=rule)))


def test_random_weights_draft_deep_trees() -> None:
    model = random_target(SHAPES["tiny"], "cpu", torch.float32)
    for draft_vocab in (None, 64):
        pair = EagleFSD(model, random_head(model, draft_vocab), TreeConfig(total_tokens=60))
        times = time_steps(contenders(pair), random_prompt(pair, 1, 8), QUICK, "test", 4)
        assert times["exact"].tau == 5.0


def test_floor_counts_what_a_step_reads() -> None:
    config = SHAPES["tiny"]
    model = random_target(config, "cpu", torch.float32)
    tree = TreeConfig(total_tokens=8, depth=3, top_k=2)
    size, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    layer = 4 * size**2 + 3 * size * inner + 2 * size
    cache = 2 * size  # keys and values of one layer and token
    context, rows = 10, 2
    target = 4 * layer + size + vocab * size + rows * context * 4 * cache
    plain, exact, _ = contenders(EagleFSD(model, random_head(model), tree))
    assert step_bytes(plain, context, rows) == 4 * target
    head = 2 * size**2 + layer - size + vocab * size + rows * context * cache
    assert step_bytes(exact, context, rows) == 4 * (target + 4 * head)
    _, exact, _ = contenders(EagleFSD(model, random_head(model, 64), tree))
    head -= (vocab - 64) * size
    assert step_bytes(exact, context, rows) == 4 * (target + 4 * head)
