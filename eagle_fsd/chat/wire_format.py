"""Encode chats as prompts, the only form that FastChat's servers transport.

FastChat's API server formats a chat in a process without a tokenizer, with a FastChat template that
the worker sends to it. Here that template only separates messages by control characters. The worker
decodes the prompt into messages and applies the pair's chat template. A prompt that does not begin
with such a character is a raw prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastchat.conversation import Conversation

TEMPLATE_NAME = "eagle-fsd"
#: Markers: before a role's name, between the name and the content, after the content.
ROLE, TEXT, END = "\x01", "\x02", "\x03"
SYSTEM, USER, ASSISTANT = (f"{ROLE}{name}{TEXT}" for name in ("System", "User", "Assistant"))
_MARKERS = str.maketrans("", "", ROLE + TEXT + END)


def decode_chat(prompt: str) -> list[dict[str, str]] | None:
    """Decode a prompt into messages; return None for a raw prompt.

    Empty system messages and the assistant's open turn are left out.
    """
    if not prompt.startswith(ROLE):
        return None
    chat = []
    for part in prompt.split(ROLE)[1:]:
        name, _, text = part.partition(TEXT)
        role = name.lower() if name in ("System", "Assistant") else "user"
        chat.append({"role": role, "content": text.removesuffix(END)})
    if chat and chat[-1] == {"role": "assistant", "content": ""}:
        chat.pop()
    return [message for message in chat if message["role"] != "system" or message["content"]]


def strip_markers(text: str) -> str:
    """Remove markers from text, so that its author cannot forge messages."""
    return text.translate(_MARKERS)


def conversation_template() -> Conversation:
    """Return the FastChat conversation template that encodes chats."""
    from fastchat.conversation import Conversation, SeparatorStyle

    return Conversation(
        name=TEMPLATE_NAME,
        system_template=f"{SYSTEM}{{system_message}}{END}",
        roles=(USER, ASSISTANT),
        sep_style=SeparatorStyle.NO_COLON_SINGLE,
        sep=END,
    )


def register_template() -> None:
    """Add the template to FastChat's registry in this process."""
    from fastchat.conversation import register_conv_template

    register_conv_template(conversation_template(), override=True)
