"""From a chat to token ids, and which of them the assistant says.

The wording around the turns comes from the tokenizer's own chat template, or from a FastChat
template that the user names; it is never guessed from a model's name. Where the assistant speaks is
found in the text, by rendering the chat up to each of its turns, and carried to the tokens by their
character offsets.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Protocol

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from eagle_fsd.train.chats import Chat


@dataclass(frozen=True)
class EncodedChat:
    """Token ids of a chat, and for each whether the assistant says it (its end token included).

    Attributes:
        cut: Whether the chat was longer than the limit.
    """

    ids: list[int]
    spoken: list[bool]
    cut: bool = False


class ChatFormat(Protocol):
    """How turns are worded."""

    #: Whether the tokenizer adds its own special tokens around the text.
    adds_special_tokens: bool

    def render(self, chat: Chat, open_turn: bool = False) -> str:
        """The text of ``chat``; with ``open_turn`` the assistant is to speak next."""


class TokenizerFormat:
    """The tokenizer's own chat template, which writes its special tokens itself.

    Raises:
        ValueError: The tokenizer has none.
    """

    adds_special_tokens = False

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


def spoken_spans(
    chat: Chat, wording: ChatFormat, begin_token: str | None = None
) -> tuple[str, list[tuple[int, int]]]:
    """The text of ``chat`` and the character spans that the assistant says in it.

    A span runs from where the assistant was to speak to the end of its turn, end-of-turn token
    included; the white space and the next turn's begin token that some templates put there are not.

    Raises:
        ValueError: A template that rewrites earlier turns, so that a turn cannot be located.
    """
    text = wording.render(chat)
    spans = []
    for number, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        before = wording.render(chat[:number], open_turn=True)
        start = len(before)
        if not text.startswith(before):
            # What the template opens a turn with (an empty thought, say) is not in a past turn.
            before = wording.render(chat[:number])
            start = text.find(message["content"].strip(), len(before))
            if not text.startswith(before) or start < 0:
                raise ValueError(f"turn {number + 1} cannot be found in the templated text")
        turn = wording.render(chat[: number + 1])
        if text.startswith(turn):
            end = len(turn)
        else:
            end = text.find(message["content"].strip(), start) + len(message["content"].strip())
        said = text[start:end].rstrip()
        while begin_token and said.endswith(begin_token):
            said = said.removesuffix(begin_token).rstrip()
        spans.append((start, start + len(said)))
    return text, spans


def encode_chat(
    chat: Chat,
    tokenizer: PreTrainedTokenizerBase,
    wording: ChatFormat,
    limit: int | None = None,
) -> EncodedChat:
    """Tokens of ``chat``, the first ``limit`` of them.

    Raises:
        ValueError: The template refuses the chat, or the tokenizer knows no offsets (it must be a
            fast one).
    """
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} knows no offsets: a fast tokenizer is needed")
    text, spans = spoken_spans(chat, wording, tokenizer.bos_token)
    encoded = tokenizer(
        text, add_special_tokens=wording.adds_special_tokens, return_offsets_mapping=True
    )
    starts = [start for start, _ in spans]
    spoken = []
    for first, last in encoded["offset_mapping"]:
        span = bisect_right(starts, first) - 1
        spoken.append(first < last and span >= 0 and first < spans[span][1])
    ids = encoded["input_ids"]
    cut = limit is not None and len(ids) > limit
    return EncodedChat(ids[:limit], spoken[:limit], cut)
