"""Chats through FastChat untouched: its prompt text carries the turns, and is taken apart again.

FastChat words a chat by a template that it guesses from the model's name, in a process that has no
tokenizer. Here it is given a template that words nothing: every turn stands between control
characters. Whoever decodes takes the text apart and words the turns as the target wants them. Text
without these characters is a raw prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastchat.conversation import Conversation

NAME = "eagle-fsd"
#: Begin a role's name, end it, end a turn; they have no place in anybody's text.
ROLE, TEXT, END = "\x01", "\x02", "\x03"
SYSTEM, USER, ASSISTANT = (f"{ROLE}{name}{TEXT}" for name in ("System", "User", "Assistant"))
ROLES = {"System": "system", "User": "user", "Assistant": "assistant"}
_MARKS = str.maketrans("", "", ROLE + TEXT + END)


def template() -> Conversation:
    """The template, for FastChat's registry."""
    from fastchat.conversation import Conversation, SeparatorStyle

    return Conversation(
        name=NAME,
        system_template=f"{SYSTEM}{{system_message}}{END}",
        roles=(USER, ASSISTANT),
        sep_style=SeparatorStyle.NO_COLON_SINGLE,
        sep=END,
    )


def register() -> None:
    """Put the template into this process's registry of FastChat's."""
    from fastchat.conversation import register_conv_template

    register_conv_template(template(), override=True)


def clean(text: str) -> str:
    """``text`` without the control characters, so that it cannot pass for a turn."""
    return text.translate(_MARKS)


def display(role: str) -> str:
    """A role of the template as people read it."""
    return clean(role)


def unpack(prompt: str) -> list[dict[str, str]] | None:
    """The turns that ``prompt`` carries, the assistant to speak next; None: it is a raw prompt."""
    if not prompt.startswith(ROLE):
        return None
    chat = []
    for part in prompt.split(ROLE)[1:]:
        name, _, text = part.partition(TEXT)
        chat.append({"role": ROLES.get(name, "user"), "content": text.removesuffix(END)})
    if chat and chat[-1] == {"role": "assistant", "content": ""}:
        chat.pop()
    return [turn for turn in chat if turn["role"] != "system" or turn["content"]]
