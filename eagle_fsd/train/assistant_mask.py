"""Tokenize a chat and mark the tokens that the assistant generates.

The assistant's turns are located in the formatted text by rendering the chat up to each turn, and
mapped to tokens by character offsets.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eagle_fsd.train.chat_file import Chat, is_answer
from eagle_fsd.utils.chat_templates import ChatTemplate

#: Index of an empty chat, which fills incomplete batches.
FILLER = -1


@dataclass
class Example:
    """One chat, or why it could not be encoded (``error``); ``index`` may be :data:`FILLER`.

    ``features`` ``[S, F]`` are stored hidden states of the target, those of one or several layers,
    and ``best`` ``[S]`` the tokens that are its most likely after them, where the loss needs one.
    """

    index: int
    ids: list[int]
    assistant_mask: list[bool]
    truncated: bool = False
    features: Tensor | None = None
    best: Tensor | None = None
    error: str | None = None

    @property
    def contributes(self) -> bool:
        """Whether the loss covers a token of the chat; see :attr:`TrainingBatch.loss_mask`."""
        return any(self.assistant_mask[2:])


def encode_chat(
    chat: Chat,
    tokenizer: PreTrainedTokenizerBase,
    chat_template: ChatTemplate,
    max_length: int | None = None,
    index: int = 0,
) -> Example:
    """Tokenize a chat and mark the assistant's tokens, keeping at most ``max_length``.

    Raises ValueError if the template rejects the chat or omits a tool call or its result, an
    assistant turn cannot be located, or the tokenizer is not a fast one.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"training needs a fast tokenizer; {type(tokenizer).__name__} is not one")
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    text, spans = assistant_spans(chat, chat_template, None if bos == eos else bos, eos)
    encoded = tokenizer(
        text, add_special_tokens=chat_template.adds_special_tokens, return_offsets_mapping=True
    )
    starts = [start for start, _ in spans]
    mask = []
    for first, _ in encoded["offset_mapping"]:  # tokens of spaces may have empty offsets
        span = bisect_right(starts, first) - 1
        mask.append(span >= 0 and first < spans[span][1])
    ids = encoded["input_ids"]
    truncated = max_length is not None and len(ids) > max_length
    return Example(index, ids[:max_length], mask[:max_length], truncated)


def assistant_spans(
    chat: Chat,
    chat_template: ChatTemplate,
    bos_token: str | None = None,
    eos_token: str | None = None,
) -> tuple[str, list[tuple[int, int]]]:
    """Format a chat, and locate the assistant's answers as (start, end) offsets of the text.

    A span includes the end-of-turn token, and neither whitespace nor ``bos_token`` after it. Some
    templates write ``eos_token`` after the last turn only.
    """
    text = chat_template.render(chat)
    spans = []
    for index, message in enumerate(chat):
        if not is_answer(message):
            _check_tool_turn(chat, index, text, chat_template)
            continue
        prompt = chat_template.render(chat[:index], add_generation_prompt=True)
        prefix = chat_template.render(chat[: index + 1])
        if text.startswith(prefix) and prefix.startswith(prompt):
            start, end = len(prompt), len(prefix)
        else:
            start, end = _find_rewritten_turn(
                chat, index, text, prefix=prefix, chat_template=chat_template, eos=eos_token or ""
            )
        turn = text[start:end].rstrip()
        while bos_token and turn.endswith(bos_token):
            turn = turn.removesuffix(bos_token).rstrip()
        spans.append((start, start + len(turn)))
    return text, spans


def _check_tool_turn(chat: Chat, index: int, text: str, chat_template: ChatTemplate) -> None:
    """Reject a template that omits a tool call or its result, on which later answers depend."""
    message = chat[index]
    if "tool_calls" in message:
        part, changed = "call", {key: message[key] for key in message if key != "tool_calls"}
    elif message["role"] == "tool" and message["content"].strip():
        part, changed = "result", {**message, "content": ""}
    else:
        return
    try:
        omitted = chat_template.render([*chat[:index], changed, *chat[index + 1 :]]) == text
    except ValueError:  # the template needs what was removed
        return
    if omitted:
        raise ValueError(f"the chat template omits the tool {part} in turn {index + 1}")


def _find_rewritten_turn(
    chat: Chat, index: int, text: str, prefix: str, chat_template: ChatTemplate, eos: str
) -> tuple[int, int]:
    """Locate a turn that the template formats differently if other turns follow.

    It is searched for between the text of the earlier turns and the next user or system message,
    which is located from the end, because the turn may contain the same words. A short answer may
    also occur in the turn's header, so the search begins after the header where it is that of the
    generation prompt.
    """
    content = chat[index]["content"].strip()
    if content not in text:  # templates drop the reasoning of earlier answers, some of all
        content = content.rpartition("</think>")[2].strip()
    begin = _common_length(text, chat_template.render(chat[:index]))
    prompt = chat_template.render(chat[:index], add_generation_prompt=True)
    limit = len(text)
    for message in reversed(chat[index + 1 :]):
        if message["role"] in ("user", "system"):
            found = text.rfind(message["content"].strip(), begin, limit)
            limit = limit if found < 0 else found
    start = text.find(content, _common_length(text, prompt), limit)
    if start < 0:
        start = text.find(content, begin, limit)
    if not content or start < 0:
        raise ValueError(f"turn {index + 1} cannot be located in the formatted chat")
    end = start + len(content)
    # The end-of-turn token, as the template writes it after the last turn of a chat. It may contain
    # a short answer, too.
    place = prefix.rfind(content, begin)
    while place >= 0:
        closing = prefix[place + len(content) :].rstrip()
        for part in (closing, closing.removesuffix(eos).rstrip()):
            if part and text.startswith(part, end):
                return start, end + len(part)
        place = prefix.rfind(content, begin, place + len(content) - 1)
    return start, end


def _common_length(one: str, other: str) -> int:
    """Return the length of the common beginning of two strings."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
