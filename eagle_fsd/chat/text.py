"""From tokens to text as they come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from eagle_fsd.model.engine import TokenDetail
from eagle_fsd.model.verify import Origin


@dataclass(frozen=True)
class Piece:
    """The text that one token completes; empty where it completes none.

    Attributes:
        origin: Where the token came from. detail: What is known of it, where that was asked for.
    """

    text: str
    token: int
    origin: Origin
    detail: TokenDetail | None = None


class TextStream:
    """Turns tokens into pieces of text, up to the first stop string.

    A stop string may begin in one token and end in a later one: text that could be the beginning
    of one is held back until it is clear.

    Attributes:
        stopped: Whether a stop string was met; nothing of it or after it is ever told.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()) -> None:
        if not tokenizer.is_fast:
            raise ValueError(f"{type(tokenizer).__name__} cannot tell text token by token")
        self._backend = tokenizer.backend_tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._stop = [text for text in stop if text]
        self._held: list[Piece] = []
        self.stopped = False

    def push(
        self,
        tokens: Iterable[int],
        origins: Iterable[int],
        details: Sequence[TokenDetail] | None = None,
    ) -> list[Piece]:
        """The pieces that are certain now, in order."""
        for place, (token, origin) in enumerate(zip(tokens, origins, strict=True)):
            text = self._decoder.step(self._backend, token) or ""
            detail = details[place] if details is not None else None
            self._held.append(Piece(text, token, Origin(origin), detail))
            if text and self._stop_in_held() is not None:
                break  # what the same step emitted after it is not looked at
        return self._release()

    def finish(self) -> list[Piece]:
        """What was held back, once no more tokens come."""
        if self.stopped:
            return []
        held, self._held = self._held, []
        return held

    def _text(self) -> str:
        return "".join(piece.text for piece in self._held)

    def _stop_in_held(self) -> int | None:
        """Where the first stop string begins."""
        text = self._text()
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        return min(found, default=None)

    def _release(self) -> list[Piece]:
        text = self._text()
        end = self._stop_in_held()
        if end is not None:
            self.stopped = True
        else:
            end = len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)
        ready, held = _cut(self._held, end)
        if self.stopped:
            left = end - sum(len(piece.text) for piece in ready)
            if left:
                ready.append(replace(held[0], text=held[0].text[:left]))
            held = []
        self._held = held
        return ready


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0


def _cut(pieces: Sequence[Piece], end: int) -> tuple[list[Piece], list[Piece]]:
    """The pieces that lie within the first ``end`` characters, and the rest.

    None is divided: a token told in two parts would be counted twice.
    """
    for place, piece in enumerate(pieces):
        if len(piece.text) > end:
            return list(pieces[:place]), list(pieces[place:])
        end -= len(piece.text)
    return list(pieces), []


#: Control characters, each as the picture that Unicode has of it; new lines and tabs may stay,
#: and carriage returns go.
_PICTURES: dict[int, int | None] = {
    code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"
}
_PICTURES |= {0x0D: None, 0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}


def harmless(text: str) -> str:
    """``text`` as a terminal shows it, and does not obey it."""
    return text.translate(_PICTURES)
