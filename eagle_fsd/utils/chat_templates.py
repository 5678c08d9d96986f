"""Chat templates: the tokenizer's own, or a FastChat template selected by name.

A template is never guessed from a model's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from jinja2 import TemplateError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

#: Messages with a "role" (system, user, assistant or tool) and a "content". An assistant's message
#: may have "tool_calls" and "reasoning_content".
Chat = Sequence[Mapping[str, Any]]


class ChatTemplate(Protocol):
    """Interface of objects that format a chat as a prompt.

    ``adds_special_tokens`` says whether the tokenizer must add its special tokens to the rendered
    text. ``stop`` strings and ``stop_token_ids`` end an answer, in addition to the target's
    end-of-sequence tokens.
    """

    adds_special_tokens: bool
    stop: Sequence[str]
    stop_token_ids: Sequence[int]

    def render(self, chat: Chat, add_generation_prompt: bool = False) -> str:
        """Format a chat as text; raises ValueError if the template rejects it."""


class TokenizerTemplate:
    """The tokenizer's own chat template, which writes special tokens itself.

    ``arguments`` are passed to it, such as ``enable_thinking``.
    """

    adds_special_tokens = False
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] | None = None
    ) -> None:
        if tokenizer.chat_template is None:
            raise ValueError("the tokenizer has no chat template; select a FastChat template")
        self.tokenizer, self.arguments = tokenizer, dict(arguments or {})

    def render(self, chat: Chat, add_generation_prompt: bool = False) -> str:
        """See :meth:`ChatTemplate.render`."""
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in chat],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.arguments,
            )
        except (TemplateError, TypeError) as error:  # content may be of another type
            raise ValueError(f"the chat template rejects the chat: {error}") from error
        return str(text)


class FastChatTemplate:
    """A template from ``fastchat.conversation``, such as ``vicuna_v1.1``."""

    adds_special_tokens = True

    def __init__(self, name: str) -> None:
        from fastchat.conversation import conv_templates

        if name not in conv_templates:
            known = ", ".join(sorted(conv_templates))
            raise ValueError(f"unknown FastChat template {name!r}; the templates are {known}")
        self.template = conv_templates[name]
        stop = self.template.stop_str or ()
        self.stop: Sequence[str] = (stop,) if isinstance(stop, str) else tuple(stop)
        self.stop_token_ids: Sequence[int] = tuple(self.template.stop_token_ids or ())

    def render(self, chat: Chat, add_generation_prompt: bool = False) -> str:
        """See :meth:`ChatTemplate.render`."""
        conversation = self.template.copy()
        conversation.messages = []
        user, assistant = conversation.roles[:2]
        for index, message in enumerate(chat):
            role = message["role"]
            if role == "system" and index == 0:
                conversation.set_system_message(message["content"])
            elif role not in ("user", "assistant") or "tool_calls" in message:
                raise ValueError(
                    "a FastChat template has no place for tool calls, their results, or system"
                    " turns after the first turn"
                )
            else:
                speaker = user if role == "user" else assistant
                conversation.append_message(speaker, message["content"])
        if add_generation_prompt:
            conversation.append_message(assistant, None)
        prompt: str = conversation.get_prompt()
        return prompt


def load_chat_template(tokenizer: PreTrainedTokenizerBase, name: str | None = None) -> ChatTemplate:
    """Return a FastChat template by name, or the tokenizer's own."""
    return FastChatTemplate(name) if name else TokenizerTemplate(tokenizer)


def encode_prompt(
    chat: Chat, tokenizer: PreTrainedTokenizerBase, chat_template: ChatTemplate
) -> Tensor:
    """Format and tokenize a chat that the assistant continues: ``[1, S]`` token ids."""
    text = chat_template.render(chat, add_generation_prompt=True)
    ids: Tensor = tokenizer(
        text, add_special_tokens=chat_template.adds_special_tokens, return_tensors="pt"
    ).input_ids
    return ids
