"""Chat templates of evaluations, also for base models, and where their answers end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date
from typing import Any

from transformers import PreTrainedTokenizerBase, StopStringCriteria

from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.utils.chat_templates import (
    Chat,
    ChatTemplate,
    FastChatTemplate,
    TokenizerTemplate,
)
from eagle_fsd.utils.detokenization import special_tokens

#: The date that chat templates state in evaluations.
DATE = date(2026, 1, 1)
#: How a template states the current date, such as ``strftime_now("%d %b %Y")``.
_NOW = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")


class CompletionTemplate:
    """Format a chat as text that a base model continues.

    With worked examples, a chat reads ``Question: ...``, ``Answer: ...`` and so on, and an answer
    ends where the next question would begin. Without, the messages follow each other line by line.
    """

    adds_special_tokens = True
    stop_token_ids: Sequence[int] = ()

    def __init__(self, few_shot: int) -> None:
        self.labeled = few_shot > 0
        self.stop: Sequence[str] = ("\nQuestion:",) if self.labeled else ()

    def render(self, chat: Chat, add_generation_prompt: bool = False) -> str:
        """See :meth:`~eagle_fsd.utils.chat_templates.ChatTemplate.render`."""
        if not self.labeled:
            return "\n".join(message["content"] for message in chat)
        forms = {"system": "{}\n\n", "user": "Question: {}\n", "assistant": "Answer: {}\n\n"}
        text = "".join(forms[message["role"]].format(message["content"]) for message in chat)
        return text + "Answer:" if add_generation_prompt else text


def evaluation_template(
    tokenizer: PreTrainedTokenizerBase, name: str | None = None, few_shot: int | None = None
) -> ChatTemplate:
    """Return the chat template ``name``, else the tokenizer's, else a completion template.

    The tokenizer's states :data:`DATE` instead of the current date: all methods answer the same
    prompts, also if a run is resumed on another day. Raises ValueError if a completion template
    would be used without ``few_shot``.
    """
    if name is not None:
        return FastChatTemplate(name)
    if tokenizer.chat_template is None:
        if few_shot is None:
            raise ValueError(
                "the tokenizer has no chat template; select a FastChat template with"
                " --conv-template, or set --few-shot for a base model"
            )
        return CompletionTemplate(few_shot)
    text = _NOW.sub(lambda found: repr(DATE.strftime(found[2])), tokenizer.get_chat_template())
    return TokenizerTemplate(tokenizer, {"chat_template": text})


def answer_ends(model: EagleFSD, template: ChatTemplate) -> dict[str, Any]:
    """Return the arguments of ``generate`` that end answers where a chat template ends them."""
    special = special_tokens(model.tokenizer, template.stop)
    stop = [item for item in template.stop if item not in special]
    return {
        "eos_token_id": [*model.eos_token_ids, *template.stop_token_ids, *special.values()],
        "stopping_criteria": [StopStringCriteria(model.tokenizer, stop)] if stop else [],
    }
