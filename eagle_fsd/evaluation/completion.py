"""Chat templates of evaluations, also for base models, and where their answers end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase, StopStringCriteria

from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.utils.chat_templates import Chat, ChatTemplate, load_chat_template


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

    Raises ValueError if the last one would be used without ``few_shot``.
    """
    if name is None and tokenizer.chat_template is None:
        if few_shot is None:
            raise ValueError(
                "the tokenizer has no chat template; select a FastChat template with"
                " --conv-template, or set --few-shot for a base model"
            )
        return CompletionTemplate(few_shot)
    return load_chat_template(tokenizer, name)


def answer_ends(model: EagleFSD, template: ChatTemplate) -> dict[str, Any]:
    """Return the arguments of ``generate`` that end answers where a chat template ends them."""
    stop = list(template.stop)
    return {
        "eos_token_id": [*model.eos_token_ids, *template.stop_token_ids],
        "stopping_criteria": [StopStringCriteria(model.tokenizer, stop)] if stop else [],
    }
