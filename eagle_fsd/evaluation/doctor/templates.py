"""Chat templates to try in place of the one in use."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from contextlib import suppress

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


class RawTemplate:
    """No chat template: the contents of the messages, a line each."""

    adds_special_tokens = True
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()

    def render(self, chat: Chat, add_generation_prompt: bool = False) -> str:
        """See :meth:`~eagle_fsd.utils.chat_templates.ChatTemplate.render`."""
        text = "\n".join(message["content"] for message in chat)
        return f"{text}\n" if add_generation_prompt else text


def turn_template(
    tokenizer: PreTrainedTokenizerBase, turn: str, assistant: str = "assistant"
) -> TokenizerTemplate:
    """Return a template that formats all messages in the same way.

    Args:
        tokenizer: The target's tokenizer, which is not changed.
        turn: Format of a message, with ``{role}`` and ``{content}``. The part before ``{content}``
            begins an answer.
        assistant: The assistant's role.
    """
    role = f"{{{{ '{assistant}' if m['role'] == 'assistant' else m['role'] }}}}"
    body = turn.replace("{role}", role).replace("{content}", "{{ m['content'] }}")
    start = turn.partition("{content}")[0].replace("{role}", assistant)
    changed = copy.copy(tokenizer)
    changed.chat_template = (
        f"{tokenizer.bos_token or ''}{{% for m in messages %}}{body}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{start}{{% endif %}}"
    )
    return TokenizerTemplate(changed)


def candidate_templates(tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, ChatTemplate, str]]:
    """Return the templates that could fit a target.

    Args:
        tokenizer: The target's tokenizer.

    Returns:
        The name of each template, for a sentence, the template, and how a user selects it.
    """
    found: list[tuple[str, ChatTemplate, str]] = []
    if tokenizer.chat_template is not None:
        own = TokenizerTemplate(tokenizer)
        found.append(("the tokenizer's own template", own, "do not pass --conv-template"))
    for name, (turn, assistant) in TURN_FORMATS.items():
        template = turn_template(tokenizer, turn, assistant)
        if not unknown_markers(template, tokenizer):
            step = f"the chat_template of the target's tokenizer should format turns as {turn!r}"
            found.append((f"{name} ({turn!r})", template, step))
    with suppress(ImportError):
        found += [
            (f"FastChat's {name}", FastChatTemplate(name), f"pass --conv-template {name}")
            for name in FASTCHAT_NAMES
        ]
    raw = "remove the chat_template of the target's tokenizer: the drafter expects plain text"
    return [*found, ("no template", RawTemplate(), raw)]


def unknown_markers(template: ChatTemplate, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the markers, such as ``<|im_start|>``, that a template writes but no token encodes.

    Args:
        template: The template.
        tokenizer: The target's tokenizer.
    """
    text = template.render([{"role": "user", "content": ""}], add_generation_prompt=True)
    vocabulary = tokenizer.get_vocab()
    markers = dict.fromkeys(_MARKER.findall(text))
    return [marker for marker in markers if marker not in vocabulary]
