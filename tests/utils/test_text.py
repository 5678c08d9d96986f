"""Strings for messages and terminals."""

from __future__ import annotations

from eagle_fsd.utils.text import escape_control_chars, one_line


def test_one_line_collapses_whitespace() -> None:
    assert one_line(ValueError("first\n  second\t third ")) == "first second third"
    assert one_line(" a \n b ") == "a b"
    assert one_line("") == one_line(" \n") == ""
    assert one_line(KeyError()) == "KeyError"


def test_escape_control_chars_makes_them_visible() -> None:
    escaped = escape_control_chars("\x1b[31mred\x07\x7f\x9b1m")
    assert escaped == "\u241b[31mred\u2407\u2421\ufffd1m"
    text = "Zürich\n\t日本 🙂 'quoted'"
    assert escape_control_chars(text) == text
    assert escape_control_chars("a\r\nb") == "a\nb"
