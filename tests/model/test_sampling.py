"""Sampling options have the meaning that they have in Hugging Face."""

from __future__ import annotations

from typing import Any

import torch
from pairs import aligned_pair, answers, greedy_reference, prompt, random_pair
from transformers import GenerationConfig

from eagle_fsd import SamplingConfig
from eagle_fsd.model.random_numbers import RandomNumbers
from eagle_fsd.model.sampling import Sampler
from eagle_fsd.model.tree import single_node

OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"top_p": 0.6},
    {"top_k": 7},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 0.7, "min_p": 0.3},  # min-p applies after temperature
    {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.05},
]


def test_distribution_equals_that_of_hugging_faces_warpers() -> None:
    """The same support and values, for 400 random rows of logits."""
    model = random_pair().model
    logits = 3 * torch.randn(400, 1, 96, generator=torch.Generator().manual_seed(0))
    tree = single_node(torch.zeros(400, dtype=torch.long))
    for options in OPTIONS:
        sampling = SamplingConfig(**{"temperature": 1.0, **options})
        found = Sampler(sampling)(tree, logits, RandomNumbers.seeded(0, 400)).warped.dense()[:, 0]
        config = GenerationConfig(do_sample=True, **options)
        scores = logits[:, 0].log_softmax(-1)
        for warper in model._get_logits_processor(config, input_ids_seq_length=1):
            scores = warper(None, scores)
        assert torch.equal(found == -torch.inf, scores == -torch.inf)
        torch.testing.assert_close(found, scores.log_softmax(-1))
        assert (options == {"temperature": 0.7}) != bool((found == -torch.inf).any())


def test_min_p_samples_what_hugging_faces_option_samples() -> None:
    """The same tokens for the same seed; without the option they are others."""
    pair, ids = aligned_pair(context=0.3), prompt(6, 3)
    options = {"temperature": 1.3, "top_k": 50, "min_p": 0.2}
    for method in ("fsd", "ar"):
        expected = pair.model.generate(
            ids,
            max_new_tokens=30,
            do_sample=True,
            pad_token_id=0,
            custom_generate=pair.custom_generate,
            method=method,
            seed=4,
            **options,
        )
        for changes, equal in (({}, True), ({"min_p": 0.0}, False)):
            sampling = SamplingConfig(seed=4, **options).updated(**changes)
            found = pair.generate(ids, None, 30, sampling=sampling, method=method).sequences
            assert torch.equal(found, expected) == equal


def test_min_p_of_one_is_greedy_at_any_threshold() -> None:
    pair, ids = aligned_pair(), prompt(6, 3)
    expected = greedy_reference(pair.model, ids, new=16)[:, 6:]
    for threshold in (0.0, 10.0):
        acceptance = pair.acceptance.updated(threshold=threshold)
        sampling = SamplingConfig(temperature=1.0, min_p=1.0)
        out = pair.generate(ids, None, 16, sampling=sampling, acceptance=acceptance)
        assert torch.equal(answers(out), expected)
