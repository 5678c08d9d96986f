"""Decode a stream of token ids to text, in constant time per token."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

#: Tokens without text after which invalid bytes are decoded; a character has at most 4 bytes.
MAX_PENDING = 16
#: Maximum number of tokens in an incomplete character.
MAX_INCOMPLETE = 3


def fast_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Return the Rust object behind a fast tokenizer; raises ValueError for other tokenizers."""
    if not tokenizer.is_fast:
        raise ValueError(f"streaming needs a fast tokenizer; {type(tokenizer).__name__} is not one")
    backend: Tokenizer = tokenizer.backend_tokenizer
    return backend


def special_tokens(tokenizer: PreTrainedTokenizerBase, texts: Collection[str]) -> dict[str, int]:
    """Return those of the texts that are special tokens, which do not occur in decoded text."""
    added = tokenizer.added_tokens_decoder.items()
    return {item.content: token for token, item in added if item.special and item.content in texts}


class IncrementalDetokenizer:
    """Decode tokens one by one as they are generated, with a fast tokenizer.

    A character that spans several tokens appears with the last of them. Special tokens are skipped.
    Bytes that are not valid UTF-8 become U+FFFD, up to ``MAX_PENDING`` tokens later. The tokens
    continue those of ``context``, on which their leading spaces depend.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context: Sequence[int] = ()) -> None:
        self._tokenizer = fast_backend(tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token for token, item in added.items() if item.special}
        # Tokens of the last returned text, or of the text before.
        self._context = [token for token in context if token not in self._special]
        self._pending: list[int] = []  # tokens since then

    def step(self, token: int) -> str:
        """Return the text that a token completes, which may be empty."""
        if token in self._special:
            return ""
        self._pending.append(token)
        done = self._pending
        text = self._decode(done)
        if not text or text.endswith("\ufffd"):
            if len(done) < MAX_PENDING:
                return ""
            done = done[:-MAX_INCOMPLETE]
            text = self._decode(done)
        self._context, self._pending = done, self._pending[len(done) :]
        return text

    def _decode(self, tokens: list[int]) -> str:
        """Return the text of tokens after the context, on which their leading spaces depend."""
        before = self._tokenizer.decode(self._context)
        text = self._tokenizer.decode(self._context + tokens)
        if text.startswith(before):
            return text[len(before) :]
        # Invalid bytes can change how the bytes before them decode, whose text was returned.
        return self._tokenizer.decode(tokens)
