"""Convert generated tokens to text as they arrive, in whole characters and up to stop strings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from eagle_fsd.model.step import TokenDetail
from eagle_fsd.model.verify import Origin
from eagle_fsd.utils.detokenization import IncrementalDetokenizer, fast_backend

MAX_CACHED_TOKENS = 1 << 16
#: The characters that byte-level vocabularies write bytes with.
BYTE_ALPHABET = {character: byte for byte, character in bytes_to_unicode().items()}


@dataclass(frozen=True)
class Piece:
    """One token of an answer and the text that it completes, which may be empty.

    ``detail`` is None unless log-probabilities are requested.
    """

    text: str
    token: int
    origin: Origin
    detail: TokenDetail | None = None


class TokenDecoder:
    """Decode single tokens of a fast tokenizer; raises ValueError for others.

    A token of a byte-level vocabulary, or of byte fallback, may be a part of a character. Spaces at
    the beginning of a token are kept, even where a tokenizer drops the first one of a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.added_tokens_decoder
        decoder = fast_backend(tokenizer).decoder  # None if tokens are joined by spaces
        self._byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
        self.bytes = lru_cache(MAX_CACHED_TOKENS)(self._bytes)
        self.text = lru_cache(MAX_CACHED_TOKENS)(self._text)

    def _bytes(self, token: int) -> bytes:
        """Return a token's part of the answer in UTF-8; special tokens have none."""
        if token in self._added:
            added = self._added[token]
            return b"" if added.special else added.content.encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if isinstance(piece, str):
            if self._byte_level and BYTE_ALPHABET.keys() >= set(piece):
                return bytes(BYTE_ALPHABET[character] for character in piece)
            if match := re.fullmatch("<0x([0-9A-F]{2})>", piece):
                return bytes.fromhex(match[1])
            if piece.startswith("\u2581"):  # SentencePiece's space
                return piece.replace("\u2581", " ").encode()
        return str(self._tokenizer.decode([token])).encode()

    def _text(self, token: int) -> str:
        """Return a token as text, in which invalid UTF-8 is U+FFFD."""
        if token in self._added:
            return str(self._added[token].content)
        return self.bytes(token).decode(errors="replace")


class TextStream:
    """Convert tokens to pieces of text, up to the first stop string.

    A stop string may begin in one token and end in a later one, so text that could be the beginning
    of a stop string is held back until the following tokens decide. Once ``stopped``, the string
    and what follows it are dropped; empty strings are ignored. The text continues that of the
    tokens ``context``. Raises ValueError unless the tokenizer is a fast one.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str] = (),
        context: Sequence[int] = (),
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, context)
        self._stop = [item for item in stop if item]
        self._held: list[Piece] = []
        self.stopped = False

    def push(
        self,
        tokens: Iterable[int],
        origins: Iterable[int],
        details: Sequence[TokenDetail] | None = None,
    ) -> list[Piece]:
        """Add tokens, and return the pieces that can no longer be part of a stop string."""
        for index, (token, origin) in enumerate(zip(tokens, origins, strict=True)):
            text = self._detokenizer.step(token)
            detail = None if details is None else details[index]
            self._held.append(Piece(text, token, Origin(origin), detail))
            if self._stop and text and self._find_stop() is not None:
                break
        return self._release() if self._stop else self.flush()

    def flush(self) -> list[Piece]:
        """Return the pieces that were held back. Call this after the last token."""
        held, self._held = self._held, []
        return held

    def _held_text(self) -> str:
        return "".join(piece.text for piece in self._held)

    def _find_stop(self) -> int | None:
        """Return the position of the first stop string in the held text; None if there is none."""
        text = self._held_text()
        positions = [text.find(item) for item in self._stop if item in text]
        return min(positions, default=None)

    def _release(self) -> list[Piece]:
        """Return the held pieces that cannot begin a stop string, or those before a stop string."""
        text, end = self._held_text(), self._find_stop()
        if end is None:
            undecided = max((overlap(text, item) for item in self._stop), default=0)
            ready, self._held = _split(self._held, len(text) - undecided)
            return ready
        self.stopped = True
        ready, rest = _split(self._held, end)
        before_stop = end - sum(len(piece.text) for piece in ready)
        if before_stop:
            ready.append(replace(rest[0], text=rest[0].text[:before_stop]))
        self._held = []
        return ready


def overlap(text: str, stop: str) -> int:
    """Count the characters at the end of ``text`` that may be the beginning of ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0


def _split(pieces: Sequence[Piece], end: int) -> tuple[list[Piece], list[Piece]]:
    """Split into the pieces that lie within the first ``end`` characters, and the rest.

    No piece is divided: a token reported in two parts would be counted twice.
    """
    for index, piece in enumerate(pieces):
        if len(piece.text) > end:
            return list(pieces[:index]), list(pieces[index:])
        end -= len(piece.text)
    return list(pieces), []
