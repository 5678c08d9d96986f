"""How turns are worded: the tokenizer's own chat template, or a FastChat template by its name.

Never guessed from a model's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

#: Turns with "role" (system, user, assistant) and "content".
Chat = Sequence[Mapping[str, str]]


class ChatFormat(Protocol):
    """How turns are worded."""

    #: Whether the tokenizer adds its own special tokens around the text.
    adds_special_tokens: bool
    #: Texts and tokens that end an answer, beside the target's own end tokens.
    stop: Sequence[str]
    stop_token_ids: Sequence[int]

    def render(self, chat: Chat, open_turn: bool = False) -> str:
        """The text of ``chat``; with ``open_turn`` the assistant is to speak next."""


class TokenizerFormat:
    """The tokenizer's own chat template, which writes its special tokens itself.

    Raises:
        ValueError: The tokenizer has none.
    """

    adds_special_tokens = False
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if tokenizer.chat_template is None:
            raise ValueError("the tokenizer has no chat template: name a FastChat template")
        self.tokenizer = tokenizer

    def render(self, chat: Chat, open_turn: bool = False) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=open_turn
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses the chat: {error}") from error


class FastChatFormat:
    """A template of FastChat's (``fastchat.conversation``), by its name.

    Raises:
        ValueError: There is none of that name; the message lists what there is.
    """

    adds_special_tokens = True

    def __init__(self, name: str) -> None:
        from fastchat.conversation import conv_templates

        if name not in conv_templates:
            known = ", ".join(sorted(conv_templates))
            raise ValueError(f"FastChat has no template {name!r}; it has {known}")
        self.template = conv_templates[name]
        stop = self.template.stop_str or ()
        self.stop = (stop,) if isinstance(stop, str) else tuple(stop)
        self.stop_token_ids = tuple(self.template.stop_token_ids or ())

    def render(self, chat: Chat, open_turn: bool = False) -> str:
        conversation = self.template.copy()
        conversation.messages = []
        user, assistant = conversation.roles[:2]
        for message in chat:
            if message["role"] == "system":
                conversation.set_system_message(message["content"])
            else:
                speaker = user if message["role"] == "user" else assistant
                conversation.append_message(speaker, message["content"])
        if open_turn:
            conversation.append_message(assistant, None)
        return conversation.get_prompt()


def chat_format(tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> ChatFormat:
    """The FastChat template of that name, or the tokenizer's own where none is named."""
    return FastChatFormat(template) if template else TokenizerFormat(tokenizer)


def encode_prompt(chat: Chat, tokenizer: PreTrainedTokenizerBase, wording: ChatFormat) -> Tensor:
    """Ids ``[1, S]`` of ``chat``, the assistant to speak next."""
    text = wording.render(chat, open_turn=True)
    return tokenizer(
        text, add_special_tokens=wording.adds_special_tokens, return_tensors="pt"
    ).input_ids
