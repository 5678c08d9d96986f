"""Chat templates: the tokenizer's own, and FastChat's by name."""

from __future__ import annotations

import copy

import pytest
from fastchat.conversation import conv_templates
from pairs import tokenizer as tokenizer_without_template
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from eagle_fsd.bundled import BUNDLED_TARGET
from eagle_fsd.utils.chat_templates import (
    FastChatTemplate,
    encode_prompt,
    load_chat_template,
)

CHAT = [
    {"role": "user", "content": "How many apples?"},
    {"role": "assistant", "content": "Three."},
    {"role": "user", "content": "And pears?"},
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(BUNDLED_TARGET)


def test_errors_name_the_template() -> None:
    with pytest.raises(ValueError, match="the tokenizer has no chat template; select a FastChat"):
        load_chat_template(tokenizer_without_template())
    with pytest.raises(ValueError, match=r"unknown FastChat template 'vicuna'; .*vicuna_v1.1"):
        load_chat_template(tokenizer_without_template(), "vicuna")
    strict = copy.deepcopy(tokenizer_without_template())
    strict.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(ValueError, match="the chat template rejects the chat: no system role"):
        load_chat_template(strict).render(CHAT)


def test_fastchat_template_matches_fastchat(tokenizer: PreTrainedTokenizerBase) -> None:
    template = load_chat_template(tokenizer, "vicuna_v1.1")
    assert isinstance(template, FastChatTemplate)
    expected = conv_templates["vicuna_v1.1"].copy()
    expected.set_system_message("Be brief.")
    for message in CHAT:
        expected.append_message(message["role"].upper(), message["content"])
    chat = [{"role": "system", "content": "Be brief."}, *CHAT]
    assert template.render(chat) == expected.get_prompt()
    expected.append_message("ASSISTANT", None)
    assert template.render(chat, add_generation_prompt=True) == expected.get_prompt()


def test_fastchat_template_is_not_changed_by_rendering() -> None:
    """Earlier chats and example messages do not change a FastChat template."""
    template = FastChatTemplate("one_shot")
    first = template.render(CHAT[:1])
    template.render([{"role": "system", "content": "Be brief."}, *CHAT])
    assert template.render(CHAT[:1]) == first
    assert conv_templates["one_shot"].messages
    assert "apples" not in str(conv_templates["one_shot"].messages)
    for name, stop, stop_token_ids in (
        ("starchat", ["<|end|>"], [0, 49155]),
        ("aquila-chat", ["###", "</s>", "[UNK]"], []),
    ):
        template = FastChatTemplate(name)
        assert (list(template.stop), list(template.stop_token_ids)) == (stop, stop_token_ids)


def test_encode_prompt_adds_special_tokens_once(tokenizer: PreTrainedTokenizerBase) -> None:
    """A tokenizer's own template writes them itself, a FastChat template does not."""
    for name in (None, "vicuna_v1.1"):
        template = load_chat_template(tokenizer, name)
        text = template.render(CHAT, add_generation_prompt=True)
        expected = tokenizer(text, add_special_tokens=name is not None).input_ids
        assert encode_prompt(CHAT, tokenizer, template).tolist() == [expected]
