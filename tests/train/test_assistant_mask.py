"""Tests for the assistant mask: it covers exactly the assistant's text, with every template."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pairs import tokenizer as plain_tokenizer
from templates import CASES, CHATML, CHATML_TOKENS, OMITTING, case, templated
from transformers import PreTrainedTokenizerFast

from eagle_fsd.train.assistant_mask import EncodedChat, assistant_spans, encode_chat
from eagle_fsd.train.chat_file import Chat
from eagle_fsd.utils.chat_templates import load_chat_template

#: User turns repeat assistant turns and everything but the special tokens of templates.
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


def masked_texts(tokenizer: PreTrainedTokenizerFast, encoded: EncodedChat) -> list[str]:
    """The text of every run of masked tokens, special tokens included."""
    pairs = zip(encoded.assistant_mask, encoded.ids, strict=True)
    runs = [[token for _, token in run] for key, run in groupby(pairs, lambda p: p[0]) if key]
    return [tokenizer.decode(run, skip_special_tokens=False).strip() for run in runs]


def without_spaces(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("first", [0, 1], ids=["system", "no-system"])
def test_mask_covers_assistant_turns_and_their_end_tokens(name: str, first: int) -> None:
    tokenizer, chat_template, end = case(name)
    runs = masked_texts(tokenizer, encode_chat(CHAT[first:], tokenizer, chat_template))
    assert [run.removesuffix(end).rstrip() for run in runs] == ANSWERS
    assert all(run.endswith(end) for run in runs)


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_the_whole_chat(name: str) -> None:
    """With one beginning-of-sequence token, whether the template or the tokenizer adds it."""
    tokenizer, chat_template, _ = case(name)
    encoded = encode_chat(CHAT, tokenizer, chat_template)
    text, _ = assistant_spans(CHAT, chat_template, tokenizer.bos_token)
    decoded = tokenizer.decode(encoded.ids, skip_special_tokens=False)
    begin = tokenizer.bos_token or ""
    assert without_spaces(decoded).removeprefix(begin) == without_spaces(text).removeprefix(begin)
    assert not encoded.truncated
    if begin:
        assert encoded.ids[0] == tokenizer.bos_token_id
        assert encoded.ids[1] != tokenizer.bos_token_id
    for message in CHAT:
        assert message["content"] in text


#: Characters that are not part of any template's special tokens.
WORDS = st.text(st.sampled_from("ab 4.\n"), min_size=1, max_size=12)
ANSWER = WORDS.filter(str.strip)


@pytest.mark.parametrize("name", CASES)
@given(st.lists(st.tuples(WORDS, ANSWER), min_size=1, max_size=4), st.none() | ANSWER)
def test_mask_covers_any_chat_turn_by_turn(
    name: str, turns: list[tuple[str, str]], system: str | None
) -> None:
    tokenizer, chat_template, end = case(name)
    chat: Chat = [{"role": "system", "content": system}] if system else []
    for question, answer in turns:
        chat.append({"role": "user", "content": question})
        chat.append({"role": "assistant", "content": answer})
    runs = masked_texts(tokenizer, encode_chat(chat, tokenizer, chat_template))
    # Without spaces: some templates trim turns, and some tokenizers the beginning of a text.
    expected = [without_spaces(answer) + end for _, answer in turns]
    assert [without_spaces(run) for run in runs] == expected


@pytest.mark.parametrize("name", CASES)
def test_tokens_before_an_answer_are_its_prompt(name: str) -> None:
    tokenizer, chat_template, _ = case(name)
    encoded = encode_chat(CHAT, tokenizer, chat_template)
    text = chat_template.render(CHAT[:2], add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=chat_template.adds_special_tokens)["input_ids"]
    assert encoded.ids[: encoded.assistant_mask.index(True)] == prompt


@pytest.mark.parametrize("name", ["vicuna_v1.1 spaced", "chatml", "bundled"])
def test_long_chat_is_truncated(name: str) -> None:
    tokenizer, chat_template, _ = case(name)
    whole = encode_chat(CHAT, tokenizer, chat_template)
    length = len(whole.ids)
    for limit in (1, 17, length - 1):
        cut = encode_chat(CHAT, tokenizer, chat_template, limit)
        assert cut == EncodedChat(whole.ids[:limit], whole.assistant_mask[:limit], truncated=True)
    for limit in (length, length + 1, None):
        assert encode_chat(CHAT, tokenizer, chat_template, limit) == whole


def test_characters_of_several_tokens_are_masked_entirely() -> None:
    tokenizer, chat_template, end = case("chatml")
    chat: Chat = [
        {"role": "user", "content": "naïve \U0001f600?"},
        {"role": "assistant", "content": "日本 \U0001f600é"},
    ]
    assert masked_texts(tokenizer, encode_chat(chat, tokenizer, chat_template)) == [
        "日本 \U0001f600é" + end
    ]


# -- templates that change earlier turns -----------------------------------------------------------

#: Keeps the thought of the last turn only, and adds an empty thought to it if it has none.
THINKING = (
    "{% for m in messages %}{% set text = m.content %}{% if m.role == 'assistant' %}"
    "{% if not loop.last %}{% set text = text.split('</think>')[-1] %}"
    "{% elif '</think>' not in text %}{% set text = '<think></think>' + text %}"
    "{% endif %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_text_that_the_template_adds_to_the_last_turn_is_tolerated() -> None:
    """A chat rendered up to an earlier turn has it too, and the whole chat does not."""
    tokenizer, chat_template, end = templated(THINKING, CHATML_TOKENS, "<|im_end|>")
    texts = masked_texts(tokenizer, encode_chat(CHAT, tokenizer, chat_template))
    expected = [answer + end for answer in ANSWERS]
    expected[-1] = "<think></think>" + expected[-1]
    assert texts == expected


def test_turn_that_the_template_shortens_is_rejected() -> None:
    tokenizer, chat_template, _ = templated(THINKING, CHATML_TOKENS, "<|im_end|>")
    chat = [dict(message) for message in CHAT]
    for message in chat:
        if message["role"] == "assistant":
            message["content"] = "<think>" + "Let me see. " * 20 + "</think>" + message["content"]
    with pytest.raises(ValueError, match="turn 3 cannot be located"):
        encode_chat(chat, tokenizer, chat_template)


def test_turn_that_the_template_omits_is_rejected() -> None:
    tokenizer, chat_template, _ = templated(OMITTING, CHATML_TOKENS, "<|im_end|>")
    chat = [dict(message) for message in CHAT[1:]]
    chat[1]["content"] = "Four."
    with pytest.raises(ValueError, match="turn 2 cannot be located"):
        encode_chat(chat, tokenizer, chat_template)


def test_omitted_turn_is_not_located_in_a_later_user_turn() -> None:
    _, chat_template, _ = templated(OMITTING, CHATML_TOKENS, "<|im_end|>")
    chat: Chat = [
        {"role": "user", "content": "Spell yes."},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "Say yes again, please."},
        {"role": "assistant", "content": "y e s"},
    ]
    with pytest.raises(ValueError, match="turn 2 cannot be located"):
        assistant_spans(chat, chat_template)


def test_chat_that_the_template_rejects_raises() -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer, chat_template, _ = templated(template, CHATML_TOKENS, "<|im_end|>")
    with pytest.raises(ValueError, match="rejects the chat: no system"):
        encode_chat(CHAT, tokenizer, chat_template)


# -- tools -----------------------------------------------------------------------------------------

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
TOOL_CHAT: Chat = [
    {"role": "system", "content": "Use tools."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "Let me add.", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"sum": "4"}', "name": "add"},
    {"role": "assistant", "content": ANSWERS[0]},
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Again?"},
    {"role": "assistant", "content": ANSWERS[1]},
]
#: Writes calls, and results as JSON strings, as Llama 3.1's does.
TOOLS = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content | tojson if m.role == 'tool' else m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}",
)


def test_loss_covers_neither_tool_calls_nor_their_results() -> None:
    tokenizer, chat_template, end = templated(TOOLS, CHATML_TOKENS, "<|im_end|>")
    encoded = encode_chat(TOOL_CHAT, tokenizer, chat_template)
    text = tokenizer.decode(encoded.ids, skip_special_tokens=False)
    for part in ("Let me add.<call>", '"arguments"', "sum", "<|im_start|>tool", "Be brief."):
        assert part in text
    assert masked_texts(tokenizer, encoded) == [answer + end for answer in ANSWERS[:2]]


def test_answer_before_a_tool_call_without_text_is_located() -> None:
    """The empty content of a call does not limit the search for a rewritten turn."""
    template = TOOLS.replace("{% for m", "{{ messages | length }}{% for m", 1)
    tokenizer, chat_template, end = templated(template, CHATML_TOKENS, "<|im_end|>")
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    chat = [*TOOL_CHAT[:2], TOOL_CHAT[4], TOOL_CHAT[6], call, TOOL_CHAT[3], TOOL_CHAT[7]]
    encoded = encode_chat(chat, tokenizer, chat_template)
    assert masked_texts(tokenizer, encoded) == [answer + end for answer in ANSWERS[:2]]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (CHATML, "omits the tool's part in turn 3"),
        (TOOLS.replace("m.content | tojson", "''"), "omits the tool's part in turn 4"),
    ],
    ids=["calls", "results"],
)
def test_template_that_omits_calls_or_results_is_rejected(template: str, reason: str) -> None:
    tokenizer, chat_template, _ = templated(template, CHATML_TOKENS, "<|im_end|>")
    with pytest.raises(ValueError, match=reason):
        encode_chat(TOOL_CHAT, tokenizer, chat_template)


@pytest.mark.parametrize("chat", [TOOL_CHAT[:5], [*TOOL_CHAT[:2], TOOL_CHAT[4], *TOOL_CHAT[5:]]])
def test_fastchat_template_rejects_tools_and_late_system_turns(chat: Chat) -> None:
    tokenizer, chat_template, _ = case("vicuna_v1.1 bytes")
    with pytest.raises(ValueError, match="FastChat template has no place for tool calls"):
        encode_chat(chat, tokenizer, chat_template)


def test_template_that_fails_on_a_type_rejects_the_chat() -> None:
    template = CHATML + "{{ messages[0].content + 1 }}"
    tokenizer, chat_template, _ = templated(template, CHATML_TOKENS, "<|im_end|>")
    with pytest.raises(ValueError, match="the chat template rejects the chat"):
        encode_chat(CHAT, tokenizer, chat_template)


# -- selection of the template ---------------------------------------------------------------------


def test_unknown_template_raises_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'vicuna9'.* llama-2, .*vicuna_v1\.1"):
        load_chat_template(plain_tokenizer(), "vicuna9")


def test_tokenizer_without_template_needs_a_fastchat_template() -> None:
    with pytest.raises(ValueError, match="select a FastChat template"):
        load_chat_template(plain_tokenizer())
    assert load_chat_template(plain_tokenizer(), "vicuna_v1.1").adds_special_tokens


def test_fastchat_template_overrides_the_tokenizers() -> None:
    tokenizer, own, _ = case("chatml")
    named = load_chat_template(tokenizer, "vicuna_v1.1")
    assert "ASSISTANT: It is 4." in named.render(CHAT[1:])
    assert own.render(CHAT) == load_chat_template(tokenizer).render(CHAT)


def test_fastchat_template_keeps_no_state_between_chats() -> None:
    _, chat_template, _ = case("vicuna_v1.1 bytes")
    before = chat_template.render(CHAT[1:])
    chat_template.render(CHAT)
    assert chat_template.render(CHAT[1:]) == before
