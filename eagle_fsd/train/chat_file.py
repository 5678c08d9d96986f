"""Read chat files in ShareGPT's and OpenAI's layouts, as a JSON array or as JSON Lines.

Opening a file reads it once to validate every record and to note its position. A chat is then read
from disk when it is accessed, in any order. Memory use is about 24 bytes per chat, whatever the
file size.
"""

from __future__ import annotations

import json
import os
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from eagle_fsd.utils.progress import Progress

#: Bytes read at a time.
CHUNK_BYTES = 1 << 20
#: Number of skipped records to describe; further ones are only counted.
MAX_DESCRIBED = 20
#: Keys of a turn's role and content, by the key of the turns: ShareGPT's layout, then OpenAI's.
LAYOUTS = {"conversations": ("from", "value"), "messages": ("role", "content")}
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "assistant": "assistant",
    "system": "system",
}
#: Messages with a "role" (system, user or assistant) and a "content".
Chat = list[dict[str, str]]


@dataclass(frozen=True)
class SkippedRecord:
    """A record that was skipped.

    Attributes:
        line: The line that the record starts on, counted from 1.
        reason: Why it was skipped.
    """

    line: int
    reason: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}"


class ChatFile(Sequence[Chat]):
    """The valid chats of a file.

    Args:
        path: JSON Lines, or one JSON array, of ``{"conversations": [{"from", "value"}]}`` or
            ``{"messages": [{"role", "content"}]}``.
        progress: Called with the bytes read and the size of the file, about once per megabyte.

    Attributes:
        skipped: Number of invalid records.
        skipped_records: The first :data:`MAX_DESCRIBED` invalid records.

    Raises:
        ValueError: No record is valid; the message describes the first one.
        OSError: The file cannot be read.
    """

    def __init__(self, path: str | Path, progress: Progress | None = None) -> None:
        self.path = Path(path)
        self.skipped_records: list[SkippedRecord] = []
        self.skipped = 0
        self._offsets, self._sizes, self._lines = array("Q"), array("Q"), array("Q")
        self._file: BinaryIO | None = None
        self._owner = -1
        total, reported = self.path.stat().st_size, 0
        with self.path.open("rb") as file:
            for offset, line, text in _records(file):
                try:
                    parse_chat(text)
                except ValueError as error:
                    self.skipped += 1
                    if self.skipped <= MAX_DESCRIBED:
                        self.skipped_records.append(SkippedRecord(line, str(error)))
                else:
                    self._offsets.append(offset)
                    self._sizes.append(len(text))
                    self._lines.append(line)
                end = offset + len(text)
                if progress is not None and end - reported >= CHUNK_BYTES:
                    reported = end
                    progress(end, total)
        if not len(self):
            first = f": {self.skipped_records[0]}" if self.skipped else ""
            raise ValueError(f"{self.path} holds no valid chat{first}")

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Chat:  # type: ignore[override]
        # Each worker process opens the file itself: a shared file object has a shared position.
        if self._file is None or self._owner != os.getpid():
            self._file, self._owner = self.path.open("rb"), os.getpid()
        self._file.seek(self._offsets[index])
        return parse_chat(self._file.read(self._sizes[index]))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None, "_owner": -1}

    def size(self, index: int) -> int:
        """Return a chat's size in bytes, which estimates its length without reading it.

        Args:
            index: The chat's index.
        """
        return self._sizes[index]

    def line(self, index: int) -> int:
        """Return the line that a chat starts on, counted from 1.

        Args:
            index: The chat's index.
        """
        return self._lines[index]


def parse_chat(text: bytes) -> Chat:
    """Parse one record: an optional system turn, then alternating user and assistant turns.

    Assistant turns before the first user turn (ShareGPT splits long chats) and a final user turn
    are dropped.

    Args:
        text: The record, a JSON object in UTF-8.

    Raises:
        ValueError: The record is malformed or has no assistant turn.
    """
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or "not UTF-8 or nested too deeply"
        raise ValueError(f"not JSON: {reason}") from None
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    key = next((name for name in LAYOUTS if name in record), None)
    if key is None:
        raise ValueError('neither "conversations" nor "messages" is present')
    if not isinstance(record[key], list):
        raise ValueError(f'"{key}" is not a list')
    chat: Chat = []
    for number, turn in enumerate(record[key], 1):
        message = _parse_turn(number, turn, *LAYOUTS[key])
        if message["role"] == "assistant" and (not chat or chat[-1]["role"] == "system"):
            continue
        expected = "user" if not chat or chat[-1]["role"] != "user" else "assistant"
        if message["role"] != expected and (message["role"] != "system" or chat):
            raise ValueError(f"turn {number} has the role {message['role']}, not {expected}")
        chat.append(message)
    if chat and chat[-1]["role"] == "user":
        chat.pop()
    if not any(message["role"] == "assistant" for message in chat):
        raise ValueError("no assistant turn")
    return chat


def _parse_turn(number: int, turn: Any, role_key: str, content_key: str) -> dict[str, str]:
    if not isinstance(turn, dict):
        raise ValueError(f"turn {number} is not an object")
    content, role = turn.get(content_key), turn.get(role_key)
    if isinstance(content, list):  # OpenAI's content parts
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        content = "".join(texts) if len(texts) == len(parts) else None
    if not isinstance(content, str):
        raise ValueError(f'turn {number} has no string "{content_key}"')
    if any("\ud800" <= character <= "\udfff" for character in content):
        raise ValueError(f"turn {number} contains a lone surrogate")
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f'turn {number} has the unknown "{role_key}" {role!r}')
    if not content.strip() and ROLES[role] == "assistant":
        raise ValueError(f"turn {number} is an empty assistant turn")
    return {"role": ROLES[role], "content": content}


def _records(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """Yield the byte offset, line number and bytes of every record."""
    first = file.read(CHUNK_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    file.seek(0)
    if first == b"[":
        yield from _array_records(file)
        return
    offset = 0
    for line, text in enumerate(file, 1):
        body = text.lstrip(b"\xef\xbb\xbf") if line == 1 else text
        if body.strip():
            yield offset + len(text) - len(body), line, body
        offset += len(text)


_OUTSIDE_STRING = re.compile(rb'["\[\]{},]')
_INSIDE_STRING = re.compile(rb'"|\\.', re.DOTALL)


def _array_records(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """Split a JSON array into its elements by counting brackets, one chunk in memory at a time.

    Elements that are not objects, or not valid JSON between their brackets, are yielded as well.
    """
    depth, in_string = 0, False
    record = bytearray()  # bytes since the last comma between elements
    offset, lines = 0, 1
    while chunk := file.read(CHUNK_BYTES):
        while chunk.endswith(b"\\") and (more := file.read(1)):
            chunk += more  # keep an escape sequence in one chunk
        position = record_start = 0
        while found := (_INSIDE_STRING if in_string else _OUTSIDE_STRING).search(chunk, position):
            start, position, symbol = found.start(), found.end(), found.group()
            if symbol == b'"':
                in_string = not in_string
                continue
            if in_string:
                continue
            if symbol in b"[{":
                depth += 1
            elif symbol in b"]}":
                depth -= 1
            if depth == 1 and symbol == b"[":
                record_start = position
            elif (depth == 1 and symbol == b",") or (depth == 0 and symbol == b"]"):
                record += chunk[record_start:start]
                if record.strip():
                    line = lines + chunk.count(b"\n", 0, start)
                    yield _element(record, offset + start, line)
                record.clear()
                record_start = position
        if depth:
            record += chunk[record_start:]
        lines += chunk.count(b"\n")
        offset += len(chunk)
    if record.strip():
        yield _element(record, offset, lines)


def _element(record: bytearray, end: int, line: int) -> tuple[int, int, bytes]:
    """Return offset, line number and bytes of an element, given where its whitespace ends."""
    text = bytes(record.lstrip())
    return end - len(text), line - text.count(b"\n"), text.rstrip()
