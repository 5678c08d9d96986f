"""Text of streamed answers: whole characters, and stop strings that span tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from eagle_fsd.bundled import BUNDLED_TARGET
from eagle_fsd.chat.text import Piece, TextStream, TokenDecoder
from eagle_fsd.model.loading import load_tokenizer
from eagle_fsd.model.verify import Origin

TOKENIZER = load_tokenizer(BUNDLED_TARGET)
#: Has characters of several tokens.
TEXT = "5 \u20ac 4 = 20 \u4f60 \u00fcn\u00ef \U0001f600 apples"


def stream_text(text: str, stop: list[str], step: int = 1) -> tuple[list[str], bool]:
    """Push a text in steps of some tokens; return what each step yields, and whether it stopped."""
    ids = TOKENIZER(text, add_special_tokens=False).input_ids
    stream = TextStream(TOKENIZER, stop)
    parts = []
    for start in range(0, len(ids), step):
        tokens = ids[start : start + step]
        pieces = stream.push(tokens, [Origin.EXACT] * len(tokens))
        parts.append("".join(piece.text for piece in pieces))
        if stream.stopped:
            break
    parts.append("".join(piece.text for piece in stream.flush()))
    return parts, stream.stopped


def test_bytes_of_tokens_add_up_to_the_text() -> None:
    """A token may be a part of a character, and special tokens have a name but no bytes."""
    decoder = TokenDecoder(TOKENIZER)
    ids = TOKENIZER(TEXT, add_special_tokens=False).input_ids
    parts = [decoder.bytes(token) for token in ids]
    assert b"".join(parts).decode() == TEXT
    assert any("\ufffd" in decoder.text(token) for token in ids)
    end = TOKENIZER.convert_tokens_to_ids("<|end|>")
    assert (decoder.text(end), decoder.bytes(end)) == ("<|end|>", b"")
    (piece,) = TextStream(TOKENIZER).push([end], [Origin.TARGET])
    assert piece.text == ""


def test_tokenizers_without_a_decoder_and_slow_ones() -> None:
    """The first are supported; the others are an error, not a crash of the server."""
    words = Tokenizer(WordLevel({"apples": 0}, unk_token="apples"))
    decoder = TokenDecoder(PreTrainedTokenizerFast(tokenizer_object=words))
    assert (decoder.text(0), decoder.bytes(0)) == ("apples", b"apples")
    slow: Any = SimpleNamespace(is_fast=False, added_tokens_decoder={})
    for make in (TokenDecoder, TextStream):
        with pytest.raises(ValueError, match="needs a fast tokenizer; SimpleNamespace is not"):
            make(slow)


@given(
    text=st.text("ab €", max_size=24),
    stop=st.lists(st.text("ab €", max_size=4), max_size=3),
    step=st.integers(1, 4),
)
def test_random_text_ends_before_the_first_complete_stop_string(
    text: str, stop: list[str], step: int
) -> None:
    """Empty stop strings have no effect."""
    ids = TOKENIZER(text, add_special_tokens=False).input_ids
    expected, stopped = TOKENIZER.decode(ids), False
    for end in range(1, len(ids) + 1):
        beginning = TOKENIZER.decode(ids[:end])
        positions = [beginning.find(item) for item in stop if item and item in beginning]
        if positions:
            expected, stopped = beginning[: min(positions)], True
            break
    parts, found = stream_text(text, stop, step)
    assert "".join(parts) == expected
    assert found == stopped


def test_token_that_may_begin_a_stop_string_is_held_back_whole() -> None:
    ids = TOKENIZER(" there", add_special_tokens=False).input_ids
    assert len(ids) == 1
    stream = TextStream(TOKENIZER, ["ere!"])
    assert stream.push(ids, [Origin.FUZZY]) == []
    assert stream.flush() == [Piece(" there", ids[0], Origin.FUZZY)]
    stream = TextStream(TOKENIZER, ["ere"])
    assert stream.push(ids, [Origin.FUZZY]) == [Piece(" th", ids[0], Origin.FUZZY)]
    assert stream.flush() == []
