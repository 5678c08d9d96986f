"""Chats to tokens: exactly what the assistant says counts, whatever the template around it."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pairs import tokenizer as plain_tokenizer
from transformers import PreTrainedTokenizerFast
from wordings import (
    CHATML_TOKENS,
    FORGETFUL,
    WORDINGS,
    templated,
    wording,
)

from eagle_fsd.train.chats import Chat
from eagle_fsd.train.encoding import EncodedChat, encode_chat, spoken_spans
from eagle_fsd.utils.chat_templates import chat_format

#: The user's turns hold what the assistant says and what templates put around it, short of tokens.
ANSWERS = ["It is 4.", "Yes: It is 4. And\n\nmore, it is 16!", "I do not know."]
CHAT: Chat = [
    {"role": "system", "content": "Answer as ASSISTANT: It is 4."},
    {"role": "user", "content": "What is 2 + 2? Do not say: It is 4."},
    {"role": "assistant", "content": ANSWERS[0]},
    {"role": "user", "content": "It is 4. ASSISTANT: assistant\n\nIs it [INST] so?"},
    {"role": "assistant", "content": ANSWERS[1]},
    {"role": "user", "content": "I do not know."},
    {"role": "assistant", "content": ANSWERS[2]},
]


def said(tokenizer: PreTrainedTokenizerFast, encoded: EncodedChat) -> list[str]:
    """The text of every run of spoken tokens, special ones written out."""
    pairs = zip(encoded.spoken, encoded.ids, strict=True)
    runs = [[token for _, token in run] for key, run in groupby(pairs, lambda p: p[0]) if key]
    return [tokenizer.decode(run, skip_special_tokens=False).strip() for run in runs]


def without_spaces(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("name", WORDINGS)
@pytest.mark.parametrize("first", [0, 1], ids=["system", "no-system"])
def test_what_is_marked_is_what_the_assistant_says_and_its_end(name: str, first: int) -> None:
    """Word for word and nothing of the user's; llama-2 writes a space before the end token."""
    tokenizer, format_, end = wording(name)
    runs = said(tokenizer, encode_chat(CHAT[first:], tokenizer, format_))
    assert [run.removesuffix(end).rstrip() for run in runs] == ANSWERS
    assert all(run.endswith(end) for run in runs)


@pytest.mark.parametrize("name", WORDINGS)
def test_the_tokens_are_those_of_the_whole_prompt(name: str) -> None:
    """One begin token, wherever it comes from, and the text as the template words it."""
    tokenizer, format_, _ = wording(name)
    encoded = encode_chat(CHAT, tokenizer, format_)
    text, _ = spoken_spans(CHAT, format_, tokenizer.bos_token)
    decoded = tokenizer.decode(encoded.ids, skip_special_tokens=False)
    begin = tokenizer.bos_token or ""
    assert without_spaces(decoded).removeprefix(begin) == without_spaces(text).removeprefix(begin)
    assert not encoded.cut
    if begin:
        assert encoded.ids[0] == tokenizer.bos_token_id
        assert encoded.ids[1] != tokenizer.bos_token_id
    for message in CHAT:
        assert message["content"] in text


#: Letters, digits, marks and spaces: whatever a template's own tokens are not made of.
WORDS = st.text(st.sampled_from("ab 4.\n"), min_size=1, max_size=12)
SPOKEN = WORDS.filter(str.strip)


@pytest.mark.parametrize("name", WORDINGS)
@given(st.lists(st.tuples(WORDS, SPOKEN), min_size=1, max_size=4), st.none() | SPOKEN)
def test_any_chat_is_marked_turn_by_turn(
    name: str, turns: list[tuple[str, str]], system: str | None
) -> None:
    """Whatever is said, and however often the same thing is said by both."""
    tokenizer, format_, end = wording(name)
    chat: Chat = [{"role": "system", "content": system}] if system else []
    for asked, answered in turns:
        chat.append({"role": "user", "content": asked})
        chat.append({"role": "assistant", "content": answered})
    runs = said(tokenizer, encode_chat(chat, tokenizer, format_))
    # Spaces apart: some templates trim a turn, and some tokenizers one at the text's begin.
    expected = [without_spaces(answered) + end for _, answered in turns]
    assert [without_spaces(run) for run in runs] == expected


@pytest.mark.parametrize("name", WORDINGS)
def test_what_the_target_reads_before_an_answer_is_not_marked(name: str) -> None:
    """The tokens before the first spoken one are those of the prompt that decoding starts from."""
    tokenizer, format_, _ = wording(name)
    encoded = encode_chat(CHAT, tokenizer, format_)
    text = format_.render(CHAT[:2], open_turn=True)
    prompt = tokenizer(text, add_special_tokens=format_.adds_special_tokens)["input_ids"]
    assert encoded.ids[: encoded.spoken.index(True)] == prompt


@pytest.mark.parametrize("name", ["vicuna_v1.1 spaced", "chatml", "bundled"])
def test_a_long_chat_is_cut_and_says_so(name: str) -> None:
    tokenizer, format_, _ = wording(name)
    whole = encode_chat(CHAT, tokenizer, format_)
    length = len(whole.ids)
    for limit in (1, 17, length - 1):
        cut = encode_chat(CHAT, tokenizer, format_, limit)
        assert cut == EncodedChat(whole.ids[:limit], whole.spoken[:limit], cut=True)
    for limit in (length, length + 1, None):
        assert encode_chat(CHAT, tokenizer, format_, limit) == whole


def test_unicode_is_marked_whole() -> None:
    """A character of several tokens has one place in the text."""
    tokenizer, format_, end = wording("chatml")
    chat: Chat = [
        {"role": "user", "content": "naïve \U0001f600?"},
        {"role": "assistant", "content": "日本 \U0001f600é"},
    ]
    assert said(tokenizer, encode_chat(chat, tokenizer, format_)) == ["日本 \U0001f600é" + end]


# -- templates that rewrite ------------------------------------------------------------------------


def test_a_template_that_forgets_what_was_said_is_refused() -> None:
    """What the assistant said in the second turn stands nowhere."""
    tokenizer, format_, _ = templated(FORGETFUL, CHATML_TOKENS, "<|im_end|>")
    chat = [dict(message) for message in CHAT[1:]]
    chat[1]["content"] = "Four."
    with pytest.raises(ValueError, match="turn 2 cannot be found"):
        encode_chat(chat, tokenizer, format_)


# -- refusals --------------------------------------------------------------------------------------


def test_an_unknown_template_is_told_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'vicuna9'.* llama-2, .*vicuna_v1\.1"):
        chat_format(plain_tokenizer(), "vicuna9")


def test_a_tokenizer_without_a_template_asks_for_one() -> None:
    with pytest.raises(ValueError, match="name a FastChat template"):
        chat_format(plain_tokenizer())
    assert chat_format(plain_tokenizer(), "vicuna_v1.1").adds_special_tokens


def test_a_named_template_stands_above_the_tokenizers_own() -> None:
    tokenizer, own, _ = wording("chatml")
    named = chat_format(tokenizer, "vicuna_v1.1")
    assert "ASSISTANT: It is 4." in named.render(CHAT[1:])
    assert own.render(CHAT) == chat_format(tokenizer).render(CHAT)


def test_what_a_template_refuses_is_a_value_error() -> None:
    """Gemma's has no system turn, say."""
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer, format_, _ = templated(template, CHATML_TOKENS, "<|im_end|>")
    with pytest.raises(ValueError, match="refuses the chat: no system"):
        encode_chat(CHAT, tokenizer, format_)


def test_a_chat_does_not_leak_into_the_next() -> None:
    """FastChat's templates are shared objects."""
    _, format_, _ = wording("vicuna_v1.1 bytes")
    fresh = format_.render(CHAT[1:])
    format_.render(CHAT)
    assert format_.render(CHAT[1:]) == fresh
