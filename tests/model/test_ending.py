"""What ends an answer: its length, end-of-sequence tokens, stopping criteria and the context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pairs import (
    FUZZY,
    NEW,
    PLAIN,
    answers,
    batch,
    by_row_and_last_token,
    greedy_reference,
    kindred_pair,
    prompt,
    reference,
    shared_pair,
    small_tree,
    tiny_pair,
    tiny_target,
    tokenizer,
    untrained_head,
)
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MaxLengthCriteria,
    PrefixConstrainedLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from eagle_fsd import EagleFSD, Origin


@pytest.mark.parametrize("new", range(1, 13))
@pytest.mark.parametrize("threshold", [0.0, FUZZY])
def test_max_new_tokens_is_kept_to_the_token(new: int, threshold: float) -> None:
    """Steps emit up to five tokens: the last one is cut, the text before it is the same."""
    pair = kindred_pair()
    ids, mask = batch()
    out = pair.generate(ids, attention_mask=mask, max_new_tokens=new, threshold=threshold)
    longer = pair.generate(ids, attention_mask=mask, max_new_tokens=14, threshold=threshold)
    assert torch.equal(out.sequences, longer.sequences[:, : ids.shape[1] + new])
    assert out.origins.shape == (4, new)
    assert (out.origins != Origin.PADDING).all()
    assert out.stats.tokens == 4 * new
    assert longer.stats.tau > 1.5


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kindred", [False, True])
@pytest.mark.parametrize("method", ["fsd", "ar"])
def test_end_of_sequence_as_in_hugging_face(method: str, kindred: bool, count: int) -> None:
    """Nothing after the first, padding behind it, rows that go on are not disturbed."""
    ids, mask = batch()
    pair = kindred_pair() if kindred else shared_pair()
    free = reference(PLAIN, kindred)[:, ids.shape[1] :]
    eos = [int(free[0, 6]), int(free[2, 17])][:count]
    expected = greedy_reference(pair.model, ids, mask, new=NEW, eos_token_id=eos, pad_token_id=0)
    out = pair.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW,
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
        assert ended[-1] or length == NEW
    assert out.sequences.shape == expected.shape
    assert (out.origins[0] == Origin.PADDING).any()


@pytest.mark.parametrize("position", range(6))
def test_end_of_sequence_anywhere_in_a_fuzzy_step(position: int) -> None:
    pair = kindred_pair()
    ids = prompt(6, 3)
    free = answers(pair.generate(ids, max_new_tokens=12, threshold=FUZZY))[0]
    eos = int(free[position])
    first = free.tolist().index(eos)
    out = pair.generate(ids, max_new_tokens=12, threshold=FUZZY, eos_token_id=eos)
    assert answers(out)[0].tolist() == free[: first + 1].tolist()


def test_the_targets_own_end_of_sequence_is_the_default() -> None:
    ids = prompt(6, 3)
    model = tiny_target()
    free = greedy_reference(model, ids, new=20)[0, 6:]
    model.generation_config.eos_token_id = [int(free[9]), int(free[15])]
    model.generation_config.pad_token_id = 0
    out = EagleFSD(model, untrained_head(model), small_tree()).generate(ids, max_new_tokens=20)
    expected = model.generate(ids, max_new_tokens=20, do_sample=False)
    assert torch.equal(out.sequences, expected)
    assert expected.shape[1] < 26


def test_the_targets_padding_token_fills_rows_that_ended_and_marks_prompts() -> None:
    """Without an attention mask the padding token is what is not a prompt, as in Hugging Face."""
    model = tiny_target(pad_token_id=0)
    model.generation_config.pad_token_id = 0
    pair = EagleFSD(model, untrained_head(model), small_tree())
    ids, mask = batch()
    free = greedy_reference(model, ids, mask, new=NEW)
    eos = int(free[0, ids.shape[1] + 4])
    expected = greedy_reference(model, ids, mask, new=NEW, eos_token_id=eos)
    out = pair.generate(ids, max_new_tokens=NEW, eos_token_id=eos)
    assert torch.equal(out.sequences, expected)
    assert (out.sequences[0, -5:] == 0).all()


class EverySeventh(StoppingCriteria):
    """Ends a row when the sum of its ids is a multiple of seven; answers with one flag a row."""

    def __call__(self, input_ids: Tensor, scores: Any, **_options: Any) -> Tensor:
        return input_ids.sum(1) % 7 == 0


@pytest.mark.parametrize("make", [EverySeventh, lambda: MaxLengthCriteria(max_length=33)])
@pytest.mark.parametrize("kindred", [False, True])
def test_stopping_criteria_are_asked_after_every_token(
    make: Callable[[], StoppingCriteria], kindred: bool
) -> None:
    ids, mask = batch()
    pair = kindred_pair() if kindred else shared_pair()
    expected = greedy_reference(
        pair.model, ids, mask, new=NEW, stopping_criteria=StoppingCriteriaList([make()])
    )
    out = pair.generate(ids, attention_mask=mask, max_new_tokens=NEW, stopping_criteria=[make()])
    width = out.sequences.shape[1]
    assert width < ids.shape[1] + NEW or isinstance(make(), EverySeventh)
    assert (out.origins == Origin.PADDING).any() or isinstance(make(), MaxLengthCriteria)
    for row in range(4):
        length = ids.shape[1] + int((out.origins[row] != Origin.PADDING).sum())
        assert torch.equal(out.sequences[row, :length], expected[row, :length])
        # Hugging Face only pads behind a row that its criteria ended when there is an eos token.
        stopped = [
            bool(make()(out.sequences[row : row + 1, :end], None).all())
            for end in range(ids.shape[1] + 1, length + 1)
        ]
        assert not any(stopped[:-1])
        assert stopped[-1] or length == ids.shape[1] + NEW


@pytest.mark.parametrize("threshold", [0.0, FUZZY])
def test_stopping_criteria_within_a_step_of_many_tokens(threshold: float) -> None:
    """Any length of text can be the last."""
    pair = kindred_pair()
    ids = prompt(6, 3)
    free = pair.generate(ids, max_new_tokens=10, threshold=threshold).sequences
    for length in range(7, 16):
        stop = StoppingCriteriaList([MaxLengthCriteria(max_length=length)])
        out = pair.generate(ids, max_new_tokens=10, threshold=threshold, stopping_criteria=stop)
        assert torch.equal(out.sequences, free[:, :length])


@pytest.mark.parametrize("threshold", [0.0, FUZZY])
def test_stop_strings(threshold: float) -> None:
    """A string over several tokens ends the text with the token that completes it."""
    pair, ids = kindred_pair(), prompt(6, 3)
    free = pair.generate(ids, max_new_tokens=20, threshold=threshold).sequences
    text = tokenizer().decode(free[0, 15:18])
    criteria = StopStringCriteria(tokenizer(), text)
    out = pair.generate(ids, max_new_tokens=20, threshold=threshold, stopping_criteria=[criteria])
    assert torch.equal(out.sequences, free[:, :18])
    if threshold == 0.0:
        expected = greedy_reference(
            pair.model, ids, new=20, stop_strings=[text], tokenizer=tokenizer()
        )
        assert torch.equal(out.sequences, expected)


def test_the_context_ends_the_answer() -> None:
    """A row never grows beyond the positions the target has; a full prompt is refused."""
    model = tiny_target(max_position_embeddings=24)
    pair = EagleFSD(model, untrained_head(model), small_tree())
    ids = prompt(15)
    for threshold in (0.0, FUZZY):
        out = pair.generate(ids, max_new_tokens=100, threshold=threshold)
        assert out.sequences.shape == (1, 24)
        assert (out.origins != Origin.PADDING).all()
    expected = greedy_reference(model, ids, new=9)
    assert torch.equal(pair.generate(ids, max_new_tokens=100).sequences, expected)
    assert pair.generate(prompt(23), max_new_tokens=100).sequences.shape == (1, 24)
    for length in (24, 30):
        with pytest.raises(ValueError, match=rf"prompt has {length} tokens.*holds 24"):
            pair.generate(prompt(length), max_new_tokens=1)


def test_rows_that_ended_cost_nothing_more() -> None:
    """The batch of later passes is smaller, and processors stay with their rows."""
    pair = tiny_pair()
    ids, mask = batch()
    free = reference(PLAIN)[:, ids.shape[1] :]
    eos = [int(free[0, 2]), int(free[2, 5])]
    rows = []
    pair.model.lm_head.register_forward_hook(lambda _m, args, _o: rows.append(args[0].shape))
    processor = PrefixConstrainedLogitsProcessor(by_row_and_last_token, num_beams=1)
    options = {"attention_mask": mask, "max_new_tokens": 20}
    pair.generate(ids, **options, eos_token_id=eos, method="ar")
    counts = [shape[0] for shape in rows]
    assert counts[0] == 4
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] < 4
    expected = greedy_reference(
        pair.model, ids, mask, new=20, logits_processor=LogitsProcessorList([processor])
    )[:, ids.shape[1] :]
    eos = [int(expected[0, 2]), int(expected[2, 5])]
    out = pair.generate(ids, **options, eos_token_id=eos, logits_processor=[processor])
    for row, origins in enumerate(out.origins):
        length = int((origins != Origin.PADDING).sum())
        assert torch.equal(answers(out)[row, :length], expected[row, :length])
    assert (out.origins == Origin.PADDING).any()
