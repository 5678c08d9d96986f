"""From a chat to token ids, and which of them the assistant says.

Where the assistant speaks is found in the templated text, by rendering the chat up to each of its
turns, and carried to the tokens by their character offsets.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from eagle_fsd.train.chats import Chat
from eagle_fsd.utils.chat_templates import ChatFormat


@dataclass(frozen=True)
class EncodedChat:
    """Token ids of a chat, and for each whether the assistant says it (its end token included).

    Attributes:
        cut: Whether the chat was longer than the limit.
    """

    ids: list[int]
    spoken: list[bool]
    cut: bool = False


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
        turn = wording.render(chat[: number + 1])
        if text.startswith(turn) and turn.startswith(before):
            start, end = len(before), len(turn)
        else:
            start, end = _rewritten_span(chat, number, text, turn, wording)
        said = text[start:end].rstrip()
        while begin_token and said.endswith(begin_token):
            said = said.removesuffix(begin_token).rstrip()
        spans.append((start, start + len(said)))
    return text, spans


def _rewritten_span(
    chat: Chat, number: int, text: str, turn: str, wording: ChatFormat
) -> tuple[int, int]:
    """Where a turn is that the template words otherwise once others follow it.

    It is looked for between what comes before it and the next turn of the user's.
    """
    content = chat[number]["content"].strip()
    begin = _common_length(text, wording.render(chat[:number]))
    later = text.find(chat[number + 1]["content"], begin) if number + 1 < len(chat) else len(text)
    start = text.find(content, begin, later if later >= 0 else len(text))
    if not content or start < 0:
        raise ValueError(f"turn {number + 1} cannot be found in the templated text")
    end = start + len(content)
    # What closes the turn where it is the last one, closes it here too.
    closing = turn[turn.rfind(content) + len(content) :].rstrip()
    return start, end + len(closing) * text.startswith(closing, end)


def _common_length(one: str, other: str) -> int:
    """How many signs the two texts begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


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
