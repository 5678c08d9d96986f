"""Chat files, read record by record: ShareGPT's and OpenAI's layouts, as a JSON array or as lines.

A file is read through once when it is opened, to check every record and to note where it lies; from
then on a chat is read from disk when it is asked for. So memory holds some twenty bytes a record,
whatever the size of the file, and chats can be visited in any order.
"""

from __future__ import annotations

import json
import os
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

#: Bytes read at a time.
CHUNK = 1 << 20
#: Faults kept word for word; the rest is only counted.
FAULTS_KEPT = 20
#: Where the turns are, and in a turn who speaks and what is said: ShareGPT's names and OpenAI's.
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


class Message(TypedDict):
    """One turn; ``role`` is ``system``, ``user`` or ``assistant``."""

    role: str
    content: str


Chat = list[Message]


@dataclass(frozen=True)
class Fault:
    """A record that was skipped: the line it begins on, counted from 1, and why."""

    line: int
    reason: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}"


class ChatFile(Sequence[Chat]):
    """The usable chats of one file.

    Attributes:
        faults: The first records that were skipped; ``skipped`` counts all.

    Args:
        path: JSON Lines, or one JSON array, of ``{"conversations": [{"from", "value"}]}`` or
            ``{"messages": [{"role", "content"}]}``.
        progress: Called now and then with (bytes read, bytes in all).

    Raises:
        ValueError: No record is usable; the message names the first fault.
        OSError: The file cannot be read.
    """

    def __init__(
        self, path: str | Path, progress: Callable[[int, int], None] | None = None
    ) -> None:
        self.path = Path(path)
        self.faults: list[Fault] = []
        self.skipped = 0
        self._offsets, self._sizes, self._lines = array("Q"), array("Q"), array("Q")
        self._file: BinaryIO | None = None
        self._owner = -1
        total = self.path.stat().st_size
        with self.path.open("rb") as file:
            for offset, line, text in _records(file):
                try:
                    read_chat(text)
                except ValueError as error:
                    self.skipped += 1
                    if len(self.faults) < FAULTS_KEPT:
                        self.faults.append(Fault(line, str(error)))
                else:
                    self._offsets.append(offset)
                    self._sizes.append(len(text))
                    self._lines.append(line)
                if progress is not None:
                    progress(offset + len(text), total)
        if not len(self):
            first = f": {self.faults[0]}" if self.faults else ""
            raise ValueError(f"{self.path} holds no usable chat{first}")

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Chat:  # type: ignore[override]
        if self._file is None or self._owner != os.getpid():  # a worker process reads for itself
            self._file, self._owner = self.path.open("rb"), os.getpid()
        self._file.seek(self._offsets[index])
        return read_chat(self._file.read(self._sizes[index]))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None, "_owner": -1}

    def size(self, index: int) -> int:
        """Bytes of a record: what is known of its length without reading it."""
        return self._sizes[index]

    def line(self, index: int) -> int:
        """The line a chat begins on, counted from 1."""
        return self._lines[index]


def read_chat(text: bytes) -> Chat:
    """One record's turns: a system turn or none, then user and assistant by turns.

    Assistant turns before the first user turn (ShareGPT splits long chats) and a last turn of the
    user's are left out.

    Raises:
        ValueError: The record is malformed, or the assistant says nothing in it.
    """
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or "not UTF-8 text or nested too deeply"
        raise ValueError(f"not JSON: {reason}") from None
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    turns = next((name for name in LAYOUTS if name in record), None)
    if turns is None:
        raise ValueError('neither "conversations" nor "messages"')
    if not isinstance(record[turns], list):
        raise ValueError(f'"{turns}" is not a list')
    chat: Chat = []
    for number, turn in enumerate(record[turns], 1):
        message = _message(number, turn, *LAYOUTS[turns])
        if message["role"] == "assistant" and (not chat or chat[-1]["role"] == "system"):
            continue
        expected = "user" if not chat or chat[-1]["role"] != "user" else "assistant"
        if message["role"] != expected and (message["role"] != "system" or chat):
            raise ValueError(f"turn {number} is the {message['role']}'s, not the {expected}'s")
        chat.append(message)
    if chat and chat[-1]["role"] == "user":
        chat.pop()
    if not any(message["role"] == "assistant" for message in chat):
        raise ValueError("no assistant turn")
    return chat


def _message(number: int, turn: Any, role: str, content: str) -> Message:
    if not isinstance(turn, dict):
        raise ValueError(f"turn {number} is not an object")
    said, name = turn.get(content), turn.get(role)
    if isinstance(said, list):  # OpenAI's content parts
        parts = [part.get("text") if isinstance(part, dict) else None for part in said]
        said = "".join(parts) if all(isinstance(part, str) for part in parts) else None
    if not isinstance(said, str):
        raise ValueError(f'turn {number} has no text under "{content}"')
    if any("\ud800" <= sign <= "\udfff" for sign in said):
        raise ValueError(f"turn {number} holds half a character (a lone surrogate)")
    if not isinstance(name, str) or name not in ROLES:
        raise ValueError(f'turn {number} has the unknown "{role}" {name!r}')
    if not said.strip() and ROLES[name] == "assistant":
        raise ValueError(f"turn {number}, the assistant's, is empty")
    return {"role": ROLES[name], "content": said}


def _records(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """(offset, line, bytes) of every record."""
    begin = file.read(CHUNK).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    file.seek(0)
    if begin == b"[":
        yield from _array_records(file)
        return
    offset = 0
    for line, text in enumerate(file, 1):
        body = text.lstrip(b"\xef\xbb\xbf") if line == 1 else text
        if body.strip():
            yield offset + len(text) - len(body), line, body
        offset += len(text)


_OUTSIDE = re.compile(rb'["\[\]{},]')
_INSIDE = re.compile(rb'"|\\.', re.DOTALL)


def _array_records(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """The elements of a JSON array, told apart by their brackets, one chunk in memory at a time.

    An element that is no object, or no JSON inside its brackets, is yielded like any other.
    """
    depth, inside = 0, False  # of brackets; of a string
    record = bytearray()  # since the last comma between elements
    offset, lines = 0, 1
    while chunk := file.read(CHUNK):
        while chunk.endswith(b"\\") and (more := file.read(1)):
            chunk += more  # an escape is never cut
        position = kept = 0
        while found := (_INSIDE if inside else _OUTSIDE).search(chunk, position):
            begin, position, sign = found.start(), found.end(), found.group()
            if sign == b'"':
                inside = not inside
                continue
            if inside:
                continue
            depth += (sign in b"[{") - (sign in b"]}")
            if depth == 1 and sign == b"[":
                kept = position
            elif (depth == 1 and sign == b",") or (depth == 0 and sign == b"]"):
                record += chunk[kept:begin]
                if record.strip():
                    here = lines + chunk.count(b"\n", 0, begin)
                    yield _element(record, offset + begin, here)
                record.clear()
                kept = position
        if depth:
            record += chunk[kept:]
        lines += chunk.count(b"\n")
        offset += len(chunk)
    if record.strip():
        yield _element(record, offset, lines)


def _element(record: bytearray, end: int, line: int) -> tuple[int, int, bytes]:
    """(offset, line, bytes) of an element whose text, white space and all, ends at ``end``."""
    text = bytes(record.lstrip())
    return end - len(text), line - text.count(b"\n"), text.rstrip()
