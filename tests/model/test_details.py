"""Details of every token: its log-probability, the divergence, and the alternatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import ACCEPT_ALL, aligned_pair, batch

from eagle_fsd import AcceptanceConfig, Origin
from eagle_fsd.model.acceptance import ExactRule


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"threshold": ACCEPT_ALL},
        {"method": "ar"},
        {"temperature": 0.7, "seed": 1},
        {"temperature": 0.7, "acceptance": AcceptanceConfig(divergence_on="warped"), "seed": 1},
        {"temperature": 0.7, "rule": ExactRule(), "seed": 1},
    ],
)
def test_log_probabilities_match_a_plain_pass(options: dict[str, Any]) -> None:
    """Over each finished sequence."""
    pair = aligned_pair()
    ids, mask = batch()
    options = {"max_new_tokens": 16, "eos_token_id": [], **options}
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


def test_divergence_of_a_fuzzy_token_is_below_the_threshold() -> None:
    pair = aligned_pair()
    ids, mask = batch()
    fuzzy = 0
    for threshold in (0.05, 0.2, 0.5):
        stream = pair.stream(ids, mask, max_new_tokens=24, threshold=threshold, details=0)
        for chunk in stream:
            for origin, detail in zip(chunk.origins, chunk.details, strict=True):
                assert detail.top == []
                if origin == Origin.FUZZY:
                    fuzzy += 1
                    assert 0.0 <= detail.divergence < threshold
    assert fuzzy >= 5


def test_chunks_have_no_details_unless_requested() -> None:
    pair = aligned_pair()
    ids, mask = batch()
    assert all(chunk.details is None for chunk in pair.stream(ids, mask, max_new_tokens=4))
