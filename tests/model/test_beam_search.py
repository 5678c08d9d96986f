"""Beam search: Hugging Face's hypotheses and scores, whatever the drafter, from fewer passes."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from eagle3_heads import untrained_eagle3
from pairs import (
    VOCAB_SIZE,
    aligned_pair,
    batch,
    greedy_reference,
    left_padded,
    prompt,
    random_pair,
    small_tree,
    tiny_target,
    untrained_head,
)
from torch import Tensor
from transformers import PreTrainedModel

from eagle_fsd import AcceptanceConfig, EagleFSD, TreeConfig
from eagle_fsd.model.beam_search import (
    BeamSearchOutput,
)
from eagle_fsd.model.drafters.draft_model import DraftModel
from eagle_fsd.model.drafters.interface import Drafter
from eagle_fsd.model.drafters.ngram import AdaptiveNGramDrafter, NGramDrafter

#: Maximum number of new tokens.
NEW = 12
#: Tokens that end the hypotheses of random targets after a few tokens.
EOS = [3, 5, 9, 17, 25, 33, 35, 40, 50, 60, 61, 70, 77, 90]
WIDE_TREE = TreeConfig(total_tokens=40, depth=3, top_k=8)


def check(
    pair: EagleFSD, ids: Tensor, mask: Tensor, new: int = NEW, method: str = "fsd", **options: Any
) -> BeamSearchOutput:
    """Search, and compare with Hugging Face."""
    out = pair.beam_search(ids, mask, new, method=method, **options)
    options |= {"return_dict_in_generate": True, "output_scores": True}
    expected: Any = greedy_reference(pair.model, ids, mask, new=new, **options)
    assert torch.equal(out.sequences, expected.sequences)
    torch.testing.assert_close(out.scores, expected.sequences_scores, rtol=1e-6, atol=1e-4)
    return out


@cache
def random_pairs(seed: int) -> EagleFSD:
    """Return a random target and a random head with a wide tree."""
    model = tiny_target(seed=seed)
    return EagleFSD(model, untrained_head(model, seed + 100), WIDE_TREE)


def test_hypotheses_that_end() -> None:
    """Every kind of early stopping with several length penalties: the results differ."""
    results = set()
    for penalty, early_stopping in (
        (0.0, False),
        (1.0, True),
        (1.0, "never"),
        (2.0, False),
        (2.0, "never"),
    ):
        out = check(
            random_pairs(2),
            *left_padded(prompt(7, 1), prompt(2, 4)),
            num_beams=3,
            length_penalty=penalty,
            early_stopping=early_stopping,
            eos_token_id=EOS,
        )
        results.add(tuple(out.sequences.flatten().tolist()))
    assert len(results) >= 3


@pytest.mark.slow
def test_random_options() -> None:
    for seed in range(10):
        draw = random.Random(seed)
        beams, rows = draw.randint(2, 5), range(draw.randint(1, 4))
        check(
            random_pairs(seed),
            *left_padded(*(prompt(draw.randint(1, 12), seed + row) for row in rows)),
            new=draw.randint(1, 20),
            num_beams=beams,
            num_return_sequences=draw.randint(1, beams),
            length_penalty=draw.choice([-1.0, 0.0, 0.6, 1.0, 1.7]),
            early_stopping=draw.choice([True, False, "never"]),
            eos_token_id=draw.sample(range(VOCAB_SIZE), draw.randint(1, 20)),
        )


@pytest.mark.parametrize("architecture", ["llama-linear-rope-tied", "mistral-wide-window"])
def test_many_drafted_tokens_are_right(architecture: str) -> None:
    """Caches are compacted and rows copied; acceptance options do not apply."""
    given = aligned_pair(architecture)
    pair = EagleFSD(given.model, given.drafter, given.tree, AcceptanceConfig(threshold=1.0))
    out = check(pair, *batch(), num_beams=2, num_return_sequences=2)
    assert out.stats.tau > 1.2
    assert len({tuple(row) for row in out.stats.accepted}) > 1


DRAFTERS: dict[str, Callable[[PreTrainedModel], Drafter | None]] = {
    "none": lambda _model: None,
    "head": untrained_head,
    "EAGLE-3": untrained_eagle3,
    "another model": lambda _model: DraftModel(tiny_target(seed=11)),
    "the target": lambda _model: DraftModel(tiny_target()),
    "ngram": lambda _model: NGramDrafter(),
    "adaptive-ngram": lambda _model: AdaptiveNGramDrafter(),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafters(name: str) -> None:
    """The drafter, and whether it drafts trees or chains, does not change the result."""
    model, drafted = tiny_target(), name != "none"
    chain = {"top_k": 1, "total_tokens": 5} if name in ("EAGLE-3", "another model") else {}
    pair = EagleFSD(model, DRAFTERS[name](model), small_tree(**chain))
    options = {"num_beams": 3, "num_return_sequences": 3, "eos_token_id": EOS}
    out = check(pair, *batch(), method="fsd" if drafted else "ar", **options)
    if not drafted:
        assert out.stats.tau == 1.0
    if name == "the target":
        assert out.stats.tau > 1.5


def test_invalid_options() -> None:
    for options, message in (
        ({"num_beams": 0}, r"num_beams must be an integer in \[1, 256\]; got 0"),
        ({"num_beams": 2, "num_return_sequences": 3}, "at most num_beams, 2; got 3"),
        ({"num_beams": 2, "length_penalty": math.nan}, "length_penalty must be a number in"),
        ({"num_beams": 2, "early_stopping": "soon"}, "early_stopping must be one of True, False"),
        ({"num_beams": 2, "method": "beam"}, "method must be one of fsd, ar"),
        ({"num_beams": 2, "max_new_tokens": 0}, "max_new_tokens must be an integer"),
        ({"num_beams": 90, "eos_token_id": list(range(7))}, "the vocabulary of 96 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            random_pair().beam_search(prompt(4), **options)


def test_broken_logits() -> None:
    """The target is broken after it has been checked."""
    model = tiny_target()
    pair = EagleFSD(model, untrained_head(model), small_tree())
    pair.generate(prompt(4), max_new_tokens=1)
    with torch.no_grad():
        model.lm_head.weight[3] = torch.inf
    with pytest.raises(FloatingPointError, match="NaN or infinite logits"):
        pair.beam_search(prompt(4), num_beams=2)


def test_command_prints_the_best_hypothesis(run: Callable[..., tuple[int, str, str]]) -> None:
    arguments = ("generate", "--num-beams", 2, "--max-new-tokens", 12, "Mia has 8 apples.")
    status, out, err = run(*arguments)
    assert status == 0
    assert "2 beams" in err
    record = json.loads(run(*arguments, "--json", "--plain")[1])
    first, second = record["hypotheses"]
    assert out.strip() == first["text"].strip()
    assert first["score"] >= second["score"]
    assert record["stats"]["tau"] == 1.0
    assert record["tree"] == {}


def test_command_rejects_options_that_would_be_ignored(
    run: Callable[..., tuple[int, str, str]],
) -> None:
    for option in (("--temperature", 0.5), ("--threshold", 0.1), ("--show-origins",)):
        status, _, err = run("generate", "--num-beams", 2, *option, "Mia has 8 apples.")
        assert status == 2
        assert "--num-beams is exact and deterministic" in err


def test_long_prompts_keep_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are processed in the order in which they were given."""
    monkeypatch.setattr("eagle_fsd.model.engine.PREFILL_CHUNK", 4)
    ids, mask = left_padded(prompt(20, 1), prompt(3, 2), prompt(30, 3))
    check(aligned_pair(), ids, mask, 8, num_beams=2)
