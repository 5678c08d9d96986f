"""Decode a stream of token ids to text, in constant time per token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

#: Tokens without text after which invalid bytes are decoded; a character has at most 4 bytes.
MAX_PENDING = 16
#: Maximum number of tokens in an incomplete character.
MAX_INCOMPLETE = 3
#: Tokens of a text before its continuation, on which the continuation's spaces depend.
CONTEXT_TOKENS = 8
#: Special tokens of gpt-oss before a role, before a channel's name, and before its message.
CHANNEL_MARKS = ("<|start|>", "<|channel|>", "<|message|>")


def fast_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Return the Rust object behind a fast tokenizer; raises ValueError for other tokenizers."""
    if not tokenizer.is_fast:
        raise ValueError(f"streaming needs a fast tokenizer; {type(tokenizer).__name__} is not one")
    backend: Tokenizer = tokenizer.backend_tokenizer
    return backend


def special_tokens(tokenizer: PreTrainedTokenizerBase, texts: Collection[str]) -> dict[str, int]:
    """Return the ids of those texts that are special tokens, which decoded text does not hold."""
    added = tokenizer.added_tokens_decoder.items()
    return {item.content: token for token, item in added if item.special and item.content in texts}


class FinalChannel:
    """Tells which tokens of an answer are shown, where the target writes channels (gpt-oss).

    Of ``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...``,
    only the message of the final channel is. Without channels, all tokens are shown.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._shows, self._name = tokenizer, True, list[int]()
        marks = special_tokens(tokenizer, CHANNEL_MARKS)
        self._marks = {token: text for text, token in marks.items()} if len(marks) > 2 else {}

    def shows(self, token: int) -> bool:
        """Whether the next token of the answer is shown."""
        mark = self._marks.get(token)
        if mark is not None:
            name = str(self._tokenizer.decode(self._name)) if mark == CHANNEL_MARKS[-1] else ""
            self._shows, self._name = name.strip().startswith("final"), []
        elif not self._shows:
            self._name.append(token)
        return self._shows


def answer_text(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], context: Sequence[int] = ()
) -> str:
    """Return the text of an answer's tokens after ``context``, on which its first space depends."""
    channel = FinalChannel(tokenizer)
    shown = [token for token in tokens if channel.shows(token)]
    return _decode_after(partial(tokenizer.decode, skip_special_tokens=True), list(context), shown)


def _decode_after(decode: Callable[[list[int]], Any], context: list[int], tokens: list[int]) -> str:
    """Return the text of tokens after others, on which their leading spaces depend."""
    before, text = str(decode(context)), str(decode(context + tokens))
    if text.startswith(before):
        return text[len(before) :]
    # Invalid bytes can change how the bytes before them decode, whose text was returned.
    return str(decode(tokens))


class IncrementalDetokenizer:
    """Decode tokens one by one as they are generated, with a fast tokenizer.

    A character that spans several tokens appears with the last of them. Special tokens are skipped,
    and so is what :class:`FinalChannel` does not show. Bytes that are not valid UTF-8 become
    U+FFFD, up to ``MAX_PENDING`` tokens later; the last ones may not appear. The tokens continue
    those of ``context``, on which their leading spaces depend.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context: Sequence[int] = ()) -> None:
        self._tokenizer = fast_backend(tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token for token, item in added.items() if item.special}
        # Tokens of the last returned text, or of the text before.
        self._context = [token for token in context if token not in self._special]
        self._pending: list[int] = []  # tokens since then
        self._channel = FinalChannel(tokenizer)

    def step(self, token: int) -> str:
        """Return the text that a token completes, which may be empty."""
        if not self._channel.shows(token) or token in self._special:
            return ""
        self._pending.append(token)
        done = self._pending
        text = _decode_after(self._tokenizer.decode, self._context, done)
        if not text or text.endswith("\ufffd"):
            if len(done) < MAX_PENDING:
                return ""
            done = done[:-MAX_INCOMPLETE]
            text = _decode_after(self._tokenizer.decode, self._context, done)
        self._context, self._pending = done, self._pending[len(done) :]
        return text
