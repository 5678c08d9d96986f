"""Log-probabilities of prompts, and options that decide where an answer ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import SEEDS, VOCAB_SIZE, finish, prompt, tiny_target
from prompts import request, tokenize

from eagle_fsd import EagleFSD
from eagle_fsd.chat import session
from eagle_fsd.chat.session import ChatAnswer, score_prompt

QUESTION = [{"role": "user", "content": "Mia has 8 apples. How many apples are left?"}]


def test_prompt_scores_equal_those_of_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 5 tokens give the scores of one pass, also with sliding windows of 8 tokens."""
    monkeypatch.setattr(session, "SCORE_CHUNK", 5)
    for architecture in SEEDS:
        window = {"sliding_window": 8} if "window" in architecture else {}
        pair = EagleFSD(tiny_target(architecture, **window), None)
        for length in (1, 2, 6, 31):
            ids = prompt(length, 3)
            details = score_prompt(pair, ids, 2).details()
            with torch.no_grad():
                log_probs = pair.model(ids).logits[0].log_softmax(-1)
            assert len(details) == length - 1
            for position, detail in enumerate(details):
                row = log_probs[position]
                assert detail.log_prob == pytest.approx(float(row[ids[0, position + 1]]), abs=1e-4)
                tokens, top = zip(*detail.top, strict=True)
                assert [*tokens] == row.topk(2).indices.tolist()
                assert [*top] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)


def test_likeliest_token_has_the_largest_score_exactly() -> None:
    """Clients recognize greedy tokens by comparing the numbers."""
    pair, ids = EagleFSD(tiny_target(), None), prompt(5, 1)
    ids = pair.generate(ids, max_new_tokens=20, method="ar").sequences
    for detail in score_prompt(pair, ids, 1).details(4):
        assert detail.log_prob == detail.top[0][1]
    (detail,) = score_prompt(pair, ids[:, :2], 10**6).details()
    assert len(detail.top) == VOCAB_SIZE


def test_cancelled_scoring_ends_between_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "SCORE_CHUNK", 5)
    calls = 0

    def cancelled() -> bool:
        nonlocal calls
        calls += 1
        return calls > 2

    pair = EagleFSD(tiny_target(), None)
    assert len(score_prompt(pair, prompt(31), 0, cancelled)) == 10


def test_broken_logits_of_a_prompt_raise() -> None:
    pair = EagleFSD(tiny_target(), None)
    with torch.no_grad():
        pair.model.lm_head.weight[7] = torch.nan
    with pytest.raises(FloatingPointError, match="NaN or infinite logits"):
        score_prompt(pair, prompt(5), 0)


END_OPTIONS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"min_tokens": 48}, {"min_new_tokens": 48}),
    ({"ignore_eos": True}, {"eos_token_id": -1}),
    (
        {"stop_token_ids": [46, 48, 684], "min_tokens": 12, "ignore_eos": True},
        {"eos_token_id": [46, 48, 684], "min_new_tokens": 12},
    ),
    (
        {"repetition_penalty": 3.0, "min_tokens": 40},
        {"repetition_penalty": 3.0, "min_new_tokens": 40},
    ),
)


PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}


def test_requests_with_different_options_share_a_batch(model: EagleFSD) -> None:
    """Prompts differ in length; the answers are those that each request gets alone."""
    ids = tokenize(model, QUESTION)[0].tolist()
    changes = ({}, {"presence_penalty": 0.6}, {"repetition_penalty": 1.0}, {"min_tokens": 9})
    reads = [
        request(
            model,
            prompt=None,
            prompt_token_ids=ids[: len(ids) - 3 * index],
            **{"max_new_tokens": 20, "min_tokens": 12, **PENALTIES, **change},
        )
        for index, change in enumerate(changes)
    ]
    batch = model.batch(len(reads))
    answers = [ChatAnswer(model, read).join(batch) for read in reads]
    finish(batch)
    alone = [tokens_of(ChatAnswer(model, read)) for read in reads]
    assert [answer.tokens for answer in answers] == alone


def tokens_of(answer: ChatAnswer) -> list[int]:
    """Decode an answer alone."""
    return [piece.token for pieces in answer.stream() for piece in pieces]


def test_options_have_the_meaning_of_hugging_faces(model: EagleFSD) -> None:
    """Greedy answers of up to 48 tokens; each option changes the answer."""
    ids = tokenize(model, QUESTION)

    def hugging_face(**options: Any) -> list[int]:
        output = model.model.generate(ids, max_new_tokens=48, do_sample=False, **options)
        return output[0, ids.shape[1] :].tolist()

    plain = hugging_face()
    for params, options in END_OPTIONS:
        read = request(
            model, prompt=None, prompt_token_ids=ids[0].tolist(), **{"max_new_tokens": 48, **params}
        )
        answer = ChatAnswer(model, read)
        tokens = tokens_of(answer)
        assert tokens == hugging_face(**options), params
        assert tokens != plain
        last = options.get("eos_token_id", 2)
        ended = tokens[-1] in (last if isinstance(last, list) else [last])
        assert answer.finish_reason == ("stop" if ended else "length")
