"""What ends a row: its length, end-of-sequence tokens, stopping criteria and the context."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import (
    ACCEPT_ALL,
    NEW_TOKENS,
    aligned_pair,
    answers,
    batch,
    greedy_reference,
    left_padded,
    prompt,
    random_pair,
    reference,
    small_tree,
    tiny_target,
    untrained_head,
)
from torch import Tensor
from transformers import (
    StoppingCriteriaList,
)

from eagle_fsd import EagleFSD, Origin


@pytest.mark.parametrize("threshold", [0.0, ACCEPT_ALL])
def test_max_new_tokens_truncates_the_last_step(threshold: float) -> None:
    """Steps emit up to five tokens."""
    pair, (ids, mask) = aligned_pair(), batch()
    longer = pair.generate(ids, mask, 14, threshold=threshold)
    for new in (1, 2, 3, 4, 5, 12):
        out = pair.generate(ids, mask, new, threshold=threshold)
        assert torch.equal(out.sequences, longer.sequences[:, : ids.shape[1] + new])
        assert out.origins.shape == (4, new)
        assert (out.origins != Origin.PADDING).all()
        assert out.stats.tokens == 4 * new


@pytest.mark.parametrize(
    ("method", "aligned", "count"), [("fsd", True, 2), ("fsd", False, 1), ("ar", False, 2)]
)
def test_eos_tokens_end_rows_as_in_hugging_face(method: str, aligned: bool, count: int) -> None:
    ids, mask = batch()
    pair = aligned_pair() if aligned else random_pair()
    free = reference(aligned=aligned)[:, ids.shape[1] :]
    eos = [int(free[0, 6]), int(free[2, 17])][:count]
    expected = greedy_reference(
        pair.model, ids, mask, new=NEW_TOKENS, eos_token_id=eos, pad_token_id=0
    )
    out = pair.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=eos[0] if count == 1 else eos,
        method=method,
    )
    for row, origins in enumerate(out.origins):
        length = int((origins != Origin.PADDING).sum())
        emitted = answers(out)[row, :length]
        assert (origins[:length] != Origin.PADDING).all()
        assert torch.equal(emitted, expected[row, ids.shape[1] :][:length])
        assert (expected[row, ids.shape[1] + length :] == 0).all()
        ended = torch.isin(emitted, torch.tensor(eos))
        assert not ended[:-1].any()
        assert ended[-1] or length == NEW_TOKENS
    assert out.sequences.shape == expected.shape
    assert (out.origins[0] == Origin.PADDING).any()


def test_tokens_of_the_target_mark_prompts_end_rows_and_fill_them() -> None:
    """Without an attention mask, padding tokens are not part of a prompt, as in Hugging Face."""
    model = tiny_target(pad_token_id=0)
    model.generation_config.pad_token_id = 0
    pair = EagleFSD(model, untrained_head(model), small_tree())
    ids, mask = batch()
    free = greedy_reference(model, ids, mask, new=NEW_TOKENS)
    model.generation_config.eos_token_id = [int(free[0, ids.shape[1] + at]) for at in (4, 15)]
    expected = greedy_reference(model, ids, mask, new=NEW_TOKENS)
    out = pair.generate(ids, max_new_tokens=NEW_TOKENS)
    assert torch.equal(out.sequences, expected)
    assert (out.sequences[0, -5:] == 0).all()


def test_stopping_criteria_are_checked_after_every_token() -> None:
    ids, mask = batch()
    pair = aligned_pair()

    def criterion(input_ids: Tensor, *_: Any, **_options: Any) -> Tensor:
        """End a row when the sum of its ids is a multiple of seven."""
        return input_ids.sum(1) % 7 == 0

    expected = greedy_reference(
        pair.model, ids, mask, new=NEW_TOKENS, stopping_criteria=StoppingCriteriaList([criterion])
    )
    out = pair.generate(ids, mask, NEW_TOKENS, stopping_criteria=[criterion])
    assert (out.origins == Origin.PADDING).any()
    for row in range(4):
        length = ids.shape[1] + int((out.origins[row] != Origin.PADDING).sum())
        assert torch.equal(out.sequences[row, :length], expected[row, :length])
        # Without an eos token Hugging Face does not pad rows that its criteria ended.
        stopped = [
            bool(criterion(out.sequences[row : row + 1, :end], None).all())
            for end in range(ids.shape[1] + 1, length + 1)
        ]
        assert not any(stopped[:-1])
        assert stopped[-1] or length == ids.shape[1] + NEW_TOKENS


def test_stopping_criterion_that_fails_ends_its_row_only() -> None:
    """The other answers come first; a stream yields all tokens of its output before the error."""
    pair, (ids, mask) = aligned_pair(), left_padded(prompt(6, 1), prompt(6, 2))

    def fail(input_ids: Tensor, scores: Any, **_options: Any) -> Tensor:
        if input_ids[0, 0] == ids[0, 0] and input_ids.shape[1] > 12:
            raise KeyError(7)
        return torch.tensor([False])

    stream = pair.stream(ids, mask, max_new_tokens=20, stopping_criteria=fail)
    chunks = []
    with pytest.raises(KeyError):
        chunks.extend(stream)
    out = stream.output()
    for row in range(2):
        new = [token for chunk in chunks if chunk.row == row for token in chunk.tokens]
        assert answers(out)[row, : len(new)].tolist() == new
        assert int((out.origins[row] != Origin.PADDING).sum()) == len(new) > 0
    found = []
    with pytest.raises(KeyError):
        found.extend(pair.generate_many([*ids, *ids], 20, max_batch=2, stopping_criteria=fail))
    assert sorted(item.index for item in found) == [1, 3]


def test_context_length_limits_rows() -> None:
    """A prompt that fills the context is rejected."""
    model = tiny_target(max_position_embeddings=24)
    pair = EagleFSD(model, untrained_head(model), small_tree())
    ids = prompt(15)
    for threshold in (0.0, ACCEPT_ALL):
        out = pair.generate(ids, max_new_tokens=100, threshold=threshold)
        assert out.sequences.shape == (1, 24)
        assert (out.origins != Origin.PADDING).all()
    expected = greedy_reference(model, ids, new=9)
    assert torch.equal(pair.generate(ids, max_new_tokens=100).sequences, expected)
    assert pair.generate(prompt(23), max_new_tokens=100).sequences.shape == (1, 24)
    for length in (24, 30):
        with pytest.raises(ValueError, match=rf"prompt has {length} tokens.*context of 24"):
            pair.generate(prompt(length), max_new_tokens=1)


def test_rows_beside_a_long_prompt_keep_their_room(caplog: pytest.LogCaptureFixture) -> None:
    """The context limits each row by itself."""
    model = tiny_target(max_position_embeddings=48)
    pair = EagleFSD(model, untrained_head(model), small_tree())
    long, short = prompt(44, 1), prompt(5, 2)
    ids, mask = left_padded(long, short)
    out = pair.generate(ids, mask, max_new_tokens=30)
    assert (out.origins != Origin.PADDING).sum(1).tolist() == [4, 30]
    assert "has room for only 4 new tokens" in caplog.text
    assert torch.equal(out.sequences[:1, 44:48], greedy_reference(model, long, new=4)[:, 44:])
    assert torch.equal(answers(out)[1:], greedy_reference(model, short, new=30)[:, 5:])
