"""Beam search: Hugging Face's hypotheses and scores, whatever the drafter, from fewer passes."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from eagle3_heads import untrained_eagle3
from pairs import (
    ARCHITECTURES,
    DEVICES,
    VOCAB_SIZE,
    aligned_pair,
    batch,
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
    Beam,
    BeamSearchOutput,
    ScoredTrees,
    Search,
)
from eagle_fsd.model.config import BeamSearchConfig
from eagle_fsd.model.drafters.draft_model import DraftModel
from eagle_fsd.model.drafters.interface import Drafter
from eagle_fsd.model.drafters.ngram import AdaptiveNGramDrafter, NGramDrafter

#: Maximum number of new tokens.
NEW = 12
#: Tokens that end the hypotheses of random targets after a few tokens.
EOS = [3, 5, 9, 17, 25, 33, 35, 40, 50, 60, 61, 70, 77, 90]
WIDE_TREE = TreeConfig(total_tokens=40, depth=3, top_k=8)


def hugging_face(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, new: int = NEW, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return the sequences and scores of Hugging Face's beam search."""
    options = {"pad_token_id": 0, **options}
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    return out.sequences, out.sequences_scores


def check(
    pair: EagleFSD, ids: Tensor, mask: Tensor, new: int = NEW, method: str = "fsd", **options: Any
) -> BeamSearchOutput:
    """Search, and compare with Hugging Face."""
    out = pair.beam_search(ids, mask, new, method=method, **options)
    sequences, scores = hugging_face(pair.model, ids, mask, new, **options)
    assert torch.equal(out.sequences, sequences)
    torch.testing.assert_close(out.scores, scores, rtol=0.0, atol=1e-4)
    return out


@cache
def random_pairs(seed: int) -> EagleFSD:
    """Return a random target and a random head with a wide tree."""
    model = tiny_target(seed=seed)
    return EagleFSD(model, untrained_head(model, seed + 100), WIDE_TREE)


# -- agreement with Hugging Face ------------------------------------------------------------------


@pytest.mark.parametrize("beams", [2, 3, 4, 5])
def test_hypotheses_of_a_random_target(beams: int) -> None:
    """A batch of mixed lengths; no hypothesis ends early."""
    out = check(random_pairs(beams), *batch(), num_beams=beams, num_return_sequences=beams)
    assert (out.scores.view(-1, beams).diff() <= 0.0).all()


def test_hypotheses_that_end() -> None:
    """Every kind of early stopping with several length penalties: the results differ."""
    results = set()
    for penalty, early_stopping in product((0.0, 1.0, 2.0), (False, True, "never")):
        out = check(
            random_pairs(2),
            *left_padded(prompt(7, 1), prompt(2, 4)),
            num_beams=3,
            length_penalty=penalty,
            early_stopping=early_stopping,
            eos_token_id=EOS,
        )
        results.add(tuple(out.sequences.flatten().tolist()))
    assert len(results) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_options(seed: int) -> None:
    draw = random.Random(seed)
    beams = draw.randint(2, 5)
    check(
        random_pairs(seed),
        *left_padded(*(prompt(draw.randint(1, 12), seed + i) for i in range(draw.randint(1, 4)))),
        new=draw.randint(1, 20),
        num_beams=beams,
        num_return_sequences=draw.randint(1, beams),
        length_penalty=draw.choice([-1.0, 0.0, 0.6, 1.0, 1.7]),
        early_stopping=draw.choice([True, False, "never"]),
        eos_token_id=draw.sample(range(VOCAB_SIZE), draw.randint(1, 20)),
    )


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("pad", [0, 3])
def test_number_of_returned_hypotheses_and_padding(count: int, pad: int) -> None:
    """The sequences are as wide as the longest of the returned ones."""
    check(
        random_pairs(1),
        *batch(),
        num_beams=4,
        num_return_sequences=count,
        early_stopping=True,
        eos_token_id=EOS,
        pad_token_id=pad,
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architectures(architecture: str) -> None:
    """Many drafted tokens are right, so that caches are compacted and rows copied."""
    out = check(aligned_pair(architecture), *batch(), num_beams=2, num_return_sequences=2)
    assert out.stats.tau > 1.2
    assert len({tuple(row) for row in out.stats.accepted}) > 1


def test_window_shorter_than_the_prompt() -> None:
    model = tiny_target("mistral-wide-window", sliding_window=6)
    pair = EagleFSD(model, untrained_head(model), WIDE_TREE)
    check(pair, *batch(), num_beams=3, num_return_sequences=3)


@pytest.mark.parametrize("device", DEVICES)
def test_devices(device: str) -> None:
    pair = random_pair(device=device)
    ids, mask = (item.to(device) for item in batch())
    check(pair, ids, mask, num_beams=3)


@pytest.mark.parametrize("seed", range(3))
def test_one_beam_is_greedy_decoding(seed: int) -> None:
    ids, mask = batch()
    pair = random_pairs(seed)
    out = pair.beam_search(ids, mask, NEW, num_beams=1)
    assert torch.equal(out.sequences, pair.generate(ids, mask, NEW).sequences)


def test_acceptance_options_do_not_apply() -> None:
    pair = aligned_pair()
    fuzzy = EagleFSD(pair.model, pair.drafter, pair.tree, AcceptanceConfig(threshold=1.0))
    check(fuzzy, *batch(), num_beams=2)


def test_answers_are_limited_by_the_context() -> None:
    pair = random_pair()
    ids = prompt(pair.target.context_length - 5)
    out = pair.beam_search(ids, max_new_tokens=NEW, num_beams=3)
    expected, _ = hugging_face(pair.model, ids, torch.ones_like(ids), new=5, num_beams=3)
    assert torch.equal(out.sequences, expected)


# -- drafters -------------------------------------------------------------------------------------

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
@pytest.mark.parametrize("shape", [{}, {"top_k": 1, "total_tokens": 5}])
def test_drafters(name: str, shape: dict[str, int]) -> None:
    """The drafter, and whether it drafts trees or chains, does not change the result."""
    model = tiny_target()
    pair = EagleFSD(model, DRAFTERS[name](model), small_tree(**shape))
    method = "ar" if name == "none" else "fsd"
    for options in ({}, {"eos_token_id": EOS}):
        out = check(pair, *batch(), method=method, num_beams=3, num_return_sequences=3, **options)
    if name == "the target" and not shape:
        assert out.stats.tau > 1.5


def test_plain_search_takes_a_pass_per_token() -> None:
    out = check(aligned_pair(), *batch(), method="ar", num_beams=3)
    assert out.stats.passes == NEW
    assert out.stats.tau == 1.0


def test_bundled_pair() -> None:
    pair = EagleFSD.from_pretrained(total_tokens=32, depth=6, top_k=4)
    texts = [
        "Mia has 8 apples at home. Then she gives 3 apples to Tom. How many apples are left?",
        "Anna gathers 12 buckets of 4 shells each. How many shells does she have?",
    ]
    tokens = pair.tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    out = check(
        pair,
        tokens.input_ids,
        tokens.attention_mask,
        new=48,
        num_beams=3,
        num_return_sequences=3,
        pad_token_id=pair.model.generation_config.pad_token_id,
    )
    assert out.stats.tau > 1.5


# -- replay ---------------------------------------------------------------------------------------


def search(beams: int = 2, limit: int = 9, eos: int = 99, **options: Any) -> Search:
    """Return a search at its first step, whose beams are rows 0 to ``beams - 1``."""
    config = BeamSearchConfig(num_beams=beams, **options)
    return Search(list(range(beams)), config, limit, frozenset([eos]))


def trees(
    *rows: list[dict[int, float]], children: dict[tuple[int, int], int] | None = None
) -> ScoredTrees:
    """Return trees with the given log-probabilities by token, at every node of every row.

    All rows have the same edges.
    """
    ranked = [[sorted(node.items(), key=lambda item: -item[1]) for node in row] for row in rows]
    return ScoredTrees(
        [[[value for _, value in node] for node in row] for row in ranked],
        [[[token for token, _ in node] for node in row] for row in ranked],
        [children or {} for _ in rows],
    )


def test_beam_outside_its_tree_ends_the_replay() -> None:
    """Token 2 was not drafted, and its continuations might be selected."""
    found = search()
    root, child = {1: -0.1, 2: -0.5, 3: -9.0}, {4: -0.2, 5: -0.6, 6: -9.0}
    scored = trees([root, child], [root, child], children={(0, 1): 1})
    assert found.replay(scored) == 1
    assert [(beam.tokens, beam.node) for beam in found.beams] == [([1], 1), ([2], None)]


def test_beam_that_scores_below_all_continuations_needs_no_node() -> None:
    """All continuations of token 2 score less than both continuations of token 1."""
    found = search()
    root, child = {1: -0.1, 2: -2.0, 3: -9.0}, {4: -0.2, 5: -0.6, 6: -9.0}
    scored = trees([root, child], [root, child], children={(0, 1): 1})
    assert found.replay(scored) == 2
    assert [beam.tokens for beam in found.beams] == [[1, 4], [1, 5]]
    assert [beam.score for beam in found.beams] == pytest.approx([-0.3, -0.7])
    assert [beam.path for beam in found.beams] == [[0, 1], [0, 1]]


def test_beam_that_scores_as_a_continuation_ends_the_replay() -> None:
    """A continuation of token 2 of probability 1 would tie with one of token 1."""
    found = search()
    root, child = {1: 0.0, 2: -1.0, 3: -9.0}, {4: -0.5, 5: -1.0, 6: -9.0}
    scored = trees([root, child], [root, child], children={(0, 1): 1})
    assert found.replay(scored) == 1


def test_ending_outside_the_best_candidates_is_dropped() -> None:
    """As in Hugging Face: only the best ``num_beams`` candidates of a step may finish."""
    root = {1: -0.1, 2: -0.2, 99: -0.3, 3: -0.4}
    found = search()
    found.replay(trees([root], [root]))
    assert found.finished == []
    root = {1: -0.1, 99: -0.2, 2: -0.3, 3: -0.4}
    found = search()
    found.replay(trees([root], [root]))
    assert found.finished == [(-0.2, [99])]
    assert [beam.tokens for beam in found.beams] == [[1], [2]]


def test_rows_are_copied_from_shared_rows_to_free_ones() -> None:
    found = search(beams=4)
    found.beams = [Beam(row, 0.0, [token]) for token, row in enumerate([2, 2, 0, 2])]
    copies = found.settle()
    assert found.beams[0].row == 2
    assert found.beams[2].row == 0
    assert {source for source, _ in copies} == {2}
    assert {target for _, target in copies} == {1, 3}
    assert {beam.row for beam in found.beams} == {0, 1, 2, 3}
    found.renumber({0: 4, 1: 5, 2: 6, 3: 7})
    assert found.rows == [4, 5, 6, 7]
    assert {beam.row for beam in found.beams} == {4, 5, 6, 7}


@pytest.mark.parametrize(
    ("options", "done"),
    [
        ({"early_stopping": True}, True),
        ({"early_stopping": False}, True),  # -3 / 1 < -2
        ({"early_stopping": "never"}, False),  # -3 / 9 > -2
        ({"early_stopping": "never", "length_penalty": -1.0}, True),
        ({"early_stopping": False, "length_penalty": 0.0}, True),
    ],
)
def test_when_a_search_with_enough_hypotheses_ends(options: dict[str, Any], done: bool) -> None:
    found = search(beams=1, **options)
    found.beams = [Beam(0, -3.0, [1])]
    assert not found.done
    found.finished = [(-2.0, [1, 99])]
    assert found.done is done


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 0}, r"num_beams must be an integer in \[1, 256\]; got 0"),
        ({"num_beams": 2, "num_return_sequences": 3}, "at most num_beams, 2; got 3"),
        ({"num_beams": 2, "length_penalty": math.nan}, "length_penalty must be a number in"),
        ({"num_beams": 2, "early_stopping": "soon"}, "early_stopping must be one of True, False"),
        ({"num_beams": 2, "method": "beam"}, "method must be one of fsd, ar"),
        ({"num_beams": 2, "max_new_tokens": 0}, "max_new_tokens must be an integer"),
        ({"num_beams": 90, "eos_token_id": list(range(7))}, "the 96 tokens of the vocabulary"),
    ],
)
def test_invalid_options(options: dict[str, Any], message: str) -> None:
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


# -- command line ---------------------------------------------------------------------------------


def test_command_prints_the_best_hypothesis(run: Callable[..., tuple[int, str, str]]) -> None:
    arguments = ("generate", "--num-beams", 2, "--max-new-tokens", 12, "Mia has 8 apples.")
    status, out, err = run(*arguments)
    assert status == 0
    assert "2 beams" in err
    status, printed, _ = run(*arguments, "--json")
    assert status == 0
    record = json.loads(printed)
    first, second = record["hypotheses"]
    assert out.strip() == first["text"].strip()
    assert first["score"] >= second["score"]
    assert record["stats"]["tau"] > 1.0
    plain = json.loads(run(*arguments, "--json", "--plain")[1])
    assert plain["hypotheses"][0]["text"] == first["text"]


@pytest.mark.parametrize(
    "option", [("--temperature", 0.5), ("--threshold", 0.1), ("--show-origins",)]
)
def test_command_rejects_options_that_would_be_ignored(
    run: Callable[..., tuple[int, str, str]], option: tuple[object, ...]
) -> None:
    status, _, err = run("generate", "--num-beams", 2, *option, "Mia has 8 apples.")
    assert status == 2
    assert "--num-beams is exact and deterministic" in err
