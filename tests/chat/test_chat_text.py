"""Text as it comes: whole characters, and stop strings that tokens cut across."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_fsd.bundled import BUNDLED_TARGET
from eagle_fsd.chat.text import Piece, TextStream
from eagle_fsd.model.loading import load_tokenizer
from eagle_fsd.model.verify import Origin

TOKENIZER = load_tokenizer(BUNDLED_TARGET)


def said(text: str, stop: list[str], step: int = 1) -> tuple[list[str], bool]:
    """What is told of ``text`` at each step of ``step`` tokens, and at the end."""
    ids = TOKENIZER(text, add_special_tokens=False).input_ids
    stream = TextStream(TOKENIZER, stop)
    told = []
    for start in range(0, len(ids), step):
        part = ids[start : start + step]
        told.append("".join(piece.text for piece in stream.push(part, [Origin.EXACT] * len(part))))
        if stream.stopped:
            break
    told.append("".join(piece.text for piece in stream.finish()))
    return told, stream.stopped


def test_only_whole_characters_are_told() -> None:
    """The bundled tokenizer spells what is not its language in bytes."""
    told, stopped = said("5 € 4 = 20 你 ünï", [])
    assert "".join(told) == "5 € 4 = 20 你 ünï"
    assert not any("\ufffd" in part for part in told)
    assert told.count("") >= 5
    assert not stopped


@pytest.mark.parametrize("step", [1, 2, 5])
@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one two three four", ["three"], "one two "),
        ("one two three four", ["wo th"], "one t"),
        ("one two three four", ["four", "two"], "one "),
        ("one two", ["one"], ""),
        ("one two", ["two three"], "one two"),
        ("aab aac", ["aac"], "aab "),
        ("one two", ["", "zzz"], "one two"),
    ],
)
def test_stop_strings(text: str, stop: list[str], expected: str, step: int) -> None:
    told, stopped = said(text, stop, step)
    assert "".join(told) == expected
    assert stopped == any(item and item in text for item in stop)


@given(
    text=st.text("ab €", max_size=24),
    stop=st.lists(st.text("ab €", min_size=1, max_size=4), max_size=3),
    step=st.integers(1, 4),
)
def test_whatever_the_text_it_ends_before_the_first_stop_string(
    text: str, stop: list[str], step: int
) -> None:
    """And at no step is anything told that is taken back later."""
    whole = TOKENIZER.decode(TOKENIZER(text, add_special_tokens=False).input_ids)
    found = [whole.find(item) for item in stop if item in whole]
    told, stopped = said(text, stop, step)
    assert "".join(told) == (whole[: min(found)] if found else whole)
    assert stopped == bool(found)


def test_a_token_is_told_once() -> None:
    """`there` is one token; the stop string may begin inside it, or does."""
    ids = TOKENIZER(" there", add_special_tokens=False).input_ids
    assert len(ids) == 1
    stream = TextStream(TOKENIZER, ["ere!"])
    assert stream.push(ids, [Origin.FUZZY]) == []
    assert stream.finish() == [Piece(" there", ids[0], Origin.FUZZY)]
    stream = TextStream(TOKENIZER, ["ere"])
    assert stream.push(ids, [Origin.FUZZY]) == [Piece(" th", ids[0], Origin.FUZZY)]
    assert stream.finish() == []


def test_special_tokens_have_no_text() -> None:
    stream = TextStream(TOKENIZER)
    (piece,) = stream.push([TOKENIZER.eos_token_id], [Origin.TARGET])
    assert piece.text == ""
