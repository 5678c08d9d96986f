"""Tests for the assistant mask: it covers exactly the assistant's text, with every template."""

from __future__ import annotations

import copy
import itertools
from itertools import groupby

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from templates import CASES, CHATML, CHATML_TOKENS, OMITTING, case, templated
from transformers import PreTrainedTokenizerFast

from eagle_fsd.train.assistant_mask import Example, assistant_spans, encode_chat
from eagle_fsd.train.chat_file import Chat

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


def masked_texts(tokenizer: PreTrainedTokenizerFast, encoded: Example) -> list[str]:
    """The text of every run of masked tokens, special tokens included."""
    pairs = zip(encoded.assistant_mask, encoded.ids, strict=True)
    runs = [[token for _, token in run] for key, run in groupby(pairs, lambda p: p[0]) if key]
    return [tokenizer.decode(run, skip_special_tokens=False).strip() for run in runs]


def without_spaces(text: str) -> str:
    return "".join(text.split())


def test_mask_covers_assistant_turns_and_their_end_tokens() -> None:
    """The tokens are those of the whole chat, with one beginning-of-sequence token."""
    for name, chat in itertools.product(CASES, (CHAT, CHAT[1:])):
        tokenizer, chat_template, end = case(name)
        encoded = encode_chat(chat, tokenizer, chat_template)
        runs = masked_texts(tokenizer, encoded)
        assert [run.removesuffix(end).rstrip() for run in runs] == ANSWERS
        assert all(run.endswith(end) for run in runs)
        text, _ = assistant_spans(chat, chat_template, tokenizer.bos_token)
        decoded = tokenizer.decode(encoded.ids, skip_special_tokens=False)
        begin = tokenizer.bos_token or ""
        assert without_spaces(decoded).removeprefix(begin) == without_spaces(text).removeprefix(
            begin
        )
        assert all(message["content"] in text for message in chat)
        if begin:
            assert encoded.ids[0] == tokenizer.bos_token_id != encoded.ids[1]
        before = [message for message in chat[:2] if message["role"] != "assistant"]
        text = chat_template.render(before, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=chat_template.adds_special_tokens)["input_ids"]
        assert encoded.ids[: encoded.assistant_mask.index(True)] == prompt


def test_masks_include_the_end_of_every_answer() -> None:
    """Also if it is the token that begins texts, or the last turn ends with one more."""
    for template, specials in (
        (CHATML, ("<|im_end|>", "<|im_start|>")),
        (
            CHATML + "{% if not add_generation_prompt %}<|end|>{% endif %}",
            ("<|end|>", *CHATML_TOKENS),
        ),
    ):
        tokenizer, chat_template, _ = templated(template, specials, "<|im_end|>")
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.bos_token = tokenizer.eos_token = specials[0]
        runs = masked_texts(tokenizer, encode_chat(CHAT, tokenizer, chat_template))
        assert [run.removesuffix("<|end|>").strip() for run in runs] == [
            f"{answer}<|im_end|>" for answer in ANSWERS
        ]


#: Characters that are not part of any template's special tokens.
WORDS = st.text(st.sampled_from("ab 4.\n"), min_size=1, max_size=12)
ANSWER = WORDS.filter(str.strip)


@given(
    st.sampled_from(CASES),
    st.lists(st.tuples(WORDS, ANSWER), min_size=1, max_size=4),
    st.none() | ANSWER,
)
@settings(max_examples=150)
@example("chatml", [("naïve \U0001f600?", "日本 \U0001f600é")], None)  # several tokens each
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


def test_long_chat_is_truncated() -> None:
    for name in ("vicuna_v1.1 spaced", "chatml", "bundled"):
        tokenizer, chat_template, _ = case(name)
        whole = encode_chat(CHAT, tokenizer, chat_template)
        length = len(whole.ids)
        for limit in (1, 17, length - 1):
            cut = encode_chat(CHAT, tokenizer, chat_template, limit)
            assert cut == Example(0, whole.ids[:limit], whole.assistant_mask[:limit], True)
        for maximum in (length, length + 1, None):
            assert encode_chat(CHAT, tokenizer, chat_template, maximum) == whole


# -- templates that change earlier turns -----------------------------------------------------------

#: Trims texts, keeps the thought of the last turn only, and adds an empty one if it has none.
THINKING = (
    "{% for m in messages %}{% set text = m.content.strip() %}{% if m.role == 'assistant' %}"
    "{% if not loop.last %}{% set text = text.split('</think>')[-1] %}"
    "{% elif '</think>' not in text %}{% set text = '<think></think>' + text %}"
    "{% endif %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

THOUGHTFUL: Chat = [
    {**message, "content": "<think>" + "Let me see. " * 20 + "</think>" + message["content"]}
    if message["role"] == "assistant"
    else message
    for message in CHAT
]


def test_text_that_the_template_adds_to_the_last_turn_is_tolerated() -> None:
    """A chat rendered up to an earlier turn has it too, and the whole chat does not."""
    tokenizer, chat_template, end = templated(THINKING, CHATML_TOKENS, "<|im_end|>")
    expected = [answer + end for answer in ANSWERS]
    expected[-1] = "<think></think>" + expected[-1]
    # The second answer contains the question " it ", which the template trims.
    for chat in (CHAT, [*CHAT[:5], {"role": "user", "content": " it "}, CHAT[6]]):
        assert masked_texts(tokenizer, encode_chat(chat, tokenizer, chat_template)) == expected
    # The header of an answer, "<|im_start|>assistant", contains "a", and its end contains "d".
    for answer in ("a", "d"):
        chat = [*CHAT[1:2], {"role": "assistant", "content": answer}, *CHAT[5:]]
        texts = masked_texts(tokenizer, encode_chat(chat, tokenizer, chat_template))
        assert texts == [answer + end, expected[-1]]
    # Only the last answer keeps its thought.
    expected[-1] = THOUGHTFUL[-1]["content"] + end
    assert masked_texts(tokenizer, encode_chat(THOUGHTFUL, tokenizer, chat_template)) == expected


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


# -- rejected chats --------------------------------------------------------------------------------

#: The first answer is in the next question, too.
REPEATED: Chat = [
    {"role": "user", "content": "Spell yes."},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "Say yes again, please."},
    {"role": "assistant", "content": "y e s"},
]
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
#: A template, a chat, and the error.
REJECTED: dict[str, tuple[str, Chat, str]] = {
    "omitted turn": (OMITTING, [{**CHAT[1]}, {**CHAT[2], "content": "Four."}, *CHAT[3:]], "turn 2"),
    "omitted turn in a question": (OMITTING, REPEATED, "turn 2 cannot be located"),
    "omitted call": (CHATML, TOOL_CHAT, "omits the tool call in turn 3"),
    "omitted result": (
        TOOLS.replace("m.content | tojson", "''"),
        TOOL_CHAT,
        "omits the tool result in turn 4",
    ),
    "rejected": (NO_SYSTEM, CHAT, "rejects the chat: no system"),
    "wrong type": (CHATML + "{{ messages[0].content + 1 }}", CHAT, "the chat template rejects"),
}


def test_chat_that_the_template_changes_too_much_is_rejected() -> None:
    for template, chat, reason in REJECTED.values():
        tokenizer, chat_template, _ = templated(template, CHATML_TOKENS, "<|im_end|>")
        with pytest.raises(ValueError, match=reason):
            encode_chat(chat, tokenizer, chat_template)
    tokenizer, chat_template, _ = case("vicuna_v1.1 bytes")
    for chat in (TOOL_CHAT[:5], [*TOOL_CHAT[:2], TOOL_CHAT[4], *TOOL_CHAT[5:]]):
        with pytest.raises(ValueError, match="FastChat template has no place for tool calls"):
            encode_chat(chat, tokenizer, chat_template)
