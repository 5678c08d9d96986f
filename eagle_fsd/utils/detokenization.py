"""Decode a stream of token ids to text, in constant time per token."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase


def fast_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Return the Rust object behind a fast tokenizer; raises ValueError for other tokenizers."""
    if not tokenizer.is_fast:
        raise ValueError(f"streaming needs a fast tokenizer; {type(tokenizer).__name__} is not one")
    backend: Tokenizer = tokenizer.backend_tokenizer
    return backend


class IncrementalDetokenizer:
    """Decode tokens one by one as they are generated, with a fast tokenizer.

    A character that spans several tokens appears with the last of them. Special tokens are skipped.
    Bytes that are not valid UTF-8 become U+FFFD.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = fast_backend(tokenizer)
        self._stream = DecodeStream(skip_special_tokens=True)
        self._pending: list[int] = []  # tokens since the last returned text

    def step(self, token: int) -> str:
        """Return the text that a token completes, which may be empty."""
        self._pending.append(token)
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception:  # tokenizers raises no specific type
            # Invalid bytes can change how the bytes before them decode, whose text was returned
            # already. Decode the pending tokens separately, and continue with a new stream.
            text = self._tokenizer.decode(self._pending, skip_special_tokens=True)
            self._stream = DecodeStream(ids=[token], skip_special_tokens=True)
        if text:
            self._pending.clear()
        return text or ""
