"""Format strings for display: one-line messages, and text without control characters."""

from __future__ import annotations

from collections.abc import Iterable

#: Replacements of control characters, by code point. Newlines and tabs are kept, carriage returns
#: are removed, and the 8-bit control characters become U+FFFD.
_CONTROL_PICTURES: dict[int, int | None] = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
    0x0D: None,
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}


def one_line(message: str | BaseException) -> str:
    """Return a string, or the message of an exception, with runs of whitespace collapsed.

    An exception without a message gives its class name.
    """
    text = " ".join(str(message).split())
    return text if text or isinstance(message, str) else type(message).__name__


def before_stop(text: str, stop: Iterable[str]) -> str:
    """Return a text up to the first of the stop strings."""
    return min((text.split(item, 1)[0] for item in stop if item), key=len, default=text)


def escape_control_chars(text: str) -> str:
    """Replace control characters by visible symbols, so that a terminal does not act on them."""
    return text.translate(_CONTROL_PICTURES)
