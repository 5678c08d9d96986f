"""Templates that rewrite earlier turns: left out of test_train_prompts.py until they are."""

from __future__ import annotations

import pytest
from test_train_prompts import ANSWERS, CHAT, said
from wordings import CHATML_TOKENS, FORGETFUL, templated

from eagle_fsd.train.chats import Chat
from eagle_fsd.train.encoding import encode_chat, spoken_spans

#: Thoughts are shown in the last turn only: earlier ones lose what stands before </think>, and the
#: last one is given an empty thought if it has none.
THINKING = (
    "{% for m in messages %}{% set text = m.content %}{% if m.role == 'assistant' %}"
    "{% if not loop.last %}{% set text = text.split('</think>')[-1] %}"
    "{% elif '</think>' not in text %}{% set text = '<think></think>' + text %}"
    "{% endif %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_thought_that_the_template_adds_to_the_last_turn_does_no_harm() -> None:
    """Rendered up to a turn that turn is the last, and has one that it has not in the whole."""
    tokenizer, format_, end = templated(THINKING, CHATML_TOKENS, "<|im_end|>")
    runs = said(tokenizer, encode_chat(CHAT, tokenizer, format_))
    expected = [answer + end for answer in ANSWERS]
    expected[-1] = "<think></think>" + expected[-1]
    assert runs == expected


def test_earlier_thoughts_that_the_template_drops_are_located_or_refused() -> None:
    """Never is something else marked in their place."""
    tokenizer, format_, end = templated(THINKING, CHATML_TOKENS, "<|im_end|>")
    chat = [dict(message) for message in CHAT]
    for message in chat:
        if message["role"] == "assistant":
            message["content"] = "<think>" + "Let me see. " * 20 + "</think>" + message["content"]
    try:
        runs = said(tokenizer, encode_chat(chat, tokenizer, format_))
    except ValueError:
        return
    assert runs == [*(answer + end for answer in ANSWERS[:2]), chat[-1]["content"] + end]


def test_what_the_template_dropped_is_not_found_in_a_turn_of_the_users() -> None:
    """The second turn stands nowhere; the user happens to say the same word later."""
    _, format_, _ = templated(FORGETFUL, CHATML_TOKENS, "<|im_end|>")
    chat: Chat = [
        {"role": "user", "content": "Spell yes."},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "Say yes again, please."},
        {"role": "assistant", "content": "y e s"},
    ]
    with pytest.raises(ValueError, match="turn 2 cannot be found"):
        spoken_spans(chat, format_)
