"""Chat templates to try in place of the one in use."""

from __future__ import annotations

import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from eagle_fsd.utils.chat_templates import Chat, ChatTemplate, FastChatTemplate, TokenizerTemplate

#: Formats of messages by name, with the assistant's role. A format is tried if all of its markers
#: are tokens of the target.
TURN_FORMATS = {
    "ChatML": ("<|im_start|>{role}\n{content}<|im_end|>\n", "assistant"),
    "Llama 3": ("<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>", "assistant"),
    "Gemma": ("<start_of_turn>{role}\n{content}<end_of_turn>\n", "model"),
    "Phi 3": ("<|{role}|>\n{content}<|end|>\n", "assistant"),
    "role tokens": ("<|{role}|>{content}<|end|>", "assistant"),
}
#: FastChat templates that need no tokens of their own.
FASTCHAT_NAMES = ("vicuna_v1.1", "llama-2", "zephyr")
_MARKER = re.compile(r"<\|[^<>|\s]+\|>|<(?:start|end)_of_turn>")


class TurnTemplate:
    """Format all messages as ``turn``, whose part before ``{content}`` begins an answer.

    ``start`` precedes the first message; without it, the tokenizer adds its special tokens.
    """

    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()

    def __init__(self, turn: str, assistant: str = "assistant", start: str | None = None) -> None:
        self.turn, self.assistant, self.start = turn, assistant, start or ""
        self.adds_special_tokens = start is None

    def render(self, chat: Chat, add_generation_prompt: bool = False) -> str:
        """See :meth:`~eagle_fsd.utils.chat_templates.ChatTemplate.render`."""
        roles = {"assistant": self.assistant}
        turns = [
            self.turn.format(role=roles.get(item["role"], item["role"]), content=item["content"])
            for item in chat
        ]
        if add_generation_prompt:
            turns.append(self.turn.partition("{content}")[0].format(role=self.assistant))
        return "".join([self.start, *turns])


#: No chat template: the contents of the messages, a line each.
RAW = TurnTemplate("{content}\n")


def candidate_templates(tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, ChatTemplate, str]]:
    """Return templates that could fit a target: with a description and how to select it."""
    found: list[tuple[str, ChatTemplate, str]] = []
    raw = "do not pass --conv-template"
    if tokenizer.chat_template is not None:
        found.append(("the tokenizer's own template", TokenizerTemplate(tokenizer), raw))
        raw = "remove the chat_template of the target's tokenizer"
    for name, (turn, assistant) in TURN_FORMATS.items():
        template = TurnTemplate(turn, assistant, tokenizer.bos_token)
        if not unknown_markers(template, tokenizer):
            step = f"the chat_template of the target's tokenizer should format turns as {turn!r}"
            found.append((f"{name} ({turn!r})", template, step))
    for name in FASTCHAT_NAMES:
        found.append((f"FastChat's {name}", FastChatTemplate(name), f"pass --conv-template {name}"))
    return [*found, ("no template", RAW, f"{raw}: the drafter expects plain text")]


def unknown_markers(template: ChatTemplate, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the markers, such as ``<|im_start|>``, that a template writes but no token encodes."""
    text = template.render([{"role": "user", "content": "?"}], add_generation_prompt=True)
    vocabulary = tokenizer.get_vocab()
    markers = dict.fromkeys(_MARKER.findall(text))
    return [marker for marker in markers if marker not in vocabulary]
