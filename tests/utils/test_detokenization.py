"""Incremental detokenization: the same text as decoding everything at once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from eagle_fsd.bundled import BUNDLED_TARGET
from eagle_fsd.utils.detokenization import MAX_PENDING, IncrementalDetokenizer, answer_text


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(BUNDLED_TARGET)


def _pieces(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [detokenizer.step(token) for token in ids]


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=40), min_size=2, max_size=2))
@example(["Mia has 8 apples", "xyz"])
def test_pieces_add_up_to_the_decoded_text(
    tokenizer: PreTrainedTokenizerBase, texts: list[str]
) -> None:
    """Those of answers that are streamed in turn, without special tokens."""
    streams = [IncrementalDetokenizer(tokenizer) for _ in texts]
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    pieces = [""] * len(texts)
    for tokens in itertools.zip_longest(*ids, fillvalue=tokenizer.eos_token_id):
        for row, token in enumerate(tokens):
            pieces[row] += streams[row].step(token)
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    assert pieces == [tokenizer.decode(row, **options) for row in ids]


def test_character_of_several_tokens_appears_with_the_last(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    ids = tokenizer("🙂", add_special_tokens=False).input_ids
    assert len(ids) > 1
    assert _pieces(tokenizer, ids) == [*[""] * (len(ids) - 1), "🙂"]


def test_invalid_bytes_without_end_are_not_decoded_again_with_every_token(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """They appear while more follow, and a character after them is decoded."""
    (byte,) = tokenizer.convert_tokens_to_ids(["\u00e2"])  # begins a character of three
    smile = tokenizer("🙂!", add_special_tokens=False).input_ids
    for count in range(30, 50):
        pieces = _pieces(tokenizer, [byte] * count)
        assert len("".join(pieces)) > count - MAX_PENDING
        assert "".join(_pieces(tokenizer, [byte] * count + smile)) == "\ufffd" * count + "🙂!"


@pytest.fixture(scope="module")
def byte_fallback() -> PreTrainedTokenizerFast:
    """A tokenizer with Llama 2's byte fallback: 256 byte tokens and a few words."""
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), "\u2581he", "llo", "<unk>"]
    vocab = {token: index for index, token in enumerate(tokens)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core)


def test_byte_tokens_are_decoded_with_the_last_byte_of_a_character(
    byte_fallback: PreTrainedTokenizerFast,
) -> None:
    ids = [256, 257, *"\n🙂".encode(), 256, 257]
    assert _pieces(byte_fallback, ids) == ["he", "llo", "\n", "", "", "", "🙂", " he", "llo"]


def test_a_continuation_keeps_its_leading_space(byte_fallback: PreTrainedTokenizerFast) -> None:
    continued = IncrementalDetokenizer(byte_fallback, [256, 257])
    assert [continued.step(256), IncrementalDetokenizer(byte_fallback).step(256)] == [" he", "he"]


def test_only_the_final_channel_is_shown() -> None:
    """As gpt-oss writes them; an answer that is cut off before it has none."""
    core = Tokenizer(models.WordLevel({}, "?"))
    words = "analysis final Why? Because. <|start|> assistant <|channel|> <|message|> <|end|>"
    core.add_tokens([word for word in words.split() if "|" not in word])
    core.add_special_tokens([word for word in words.split() if "|" in word])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    thought = "<|channel|> analysis <|message|> Why? <|end|> "
    answer = "<|start|> assistant <|channel|> final <|message|> Because. <|end|>"
    for text, expected in (
        (thought + answer, "Because."),
        (thought, ""),
        ("Because.", "Because."),
    ):
        ids = tokenizer.convert_tokens_to_ids(text.split())
        assert answer_text(tokenizer, ids) == "".join(_pieces(tokenizer, ids)) == expected


@given(ids=st.lists(st.integers(0, 257), max_size=20))
@example(ids=[256, 10, 0xF0, 256, 257])  # the first byte of an emoji after a newline
def test_invalid_bytes_become_replacement_characters(
    byte_fallback: PreTrainedTokenizerFast, ids: list[int]
) -> None:
    """A sampled token sequence need not be valid UTF-8; words after it must appear."""
    text = "".join(_pieces(byte_fallback, [*ids, 256, 257]))
    assert text.endswith("hello")
    if all(token > 255 for token in ids):
        assert "\ufffd" not in text
