"""Read chat files in ShareGPT's and OpenAI's layouts, as a JSON array or as JSON Lines.

Opening a file reads it once to validate every record and to note its position. A chat is then read
from disk when it is accessed. Memory use is about 24 bytes per chat, whatever the file size.

A malformed turn ends its chat: the exchanges before it are kept, and a record without any is
skipped. Only the assistant's answers are trained on; see :func:`is_answer`.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, BinaryIO

from eagle_fsd.bundled import problems
from eagle_fsd.utils.files import atomic_write
from eagle_fsd.utils.progress import Progress

#: Bytes between two reports of progress.
REPORT_BYTES = 1 << 20
#: Number of skipped records whose reasons are kept or logged; further ones are only counted.
MAX_DESCRIBED = 20
#: Keys of a turn's role and content, by the key of the turns: ShareGPT's layout, then OpenAI's.
LAYOUTS = {"conversations": ("from", "value"), "messages": ("role", "content")}
#: A message's role, by the name of the turn's. A ``function_call`` is a tool call of the assistant.
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bard", "bing", "assistant", "function_call"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
#: Keys that a template may need to render the result of a tool call.
TOOL_KEYS = ("name", "tool_call_id")
#: Messages with a "role" (system, user, assistant or tool) and a "content"; an assistant's may have
#: "tool_calls" and "reasoning_content".
Chat = list[dict[str, Any]]


def is_answer(message: Mapping[str, Any]) -> bool:
    """Return whether a message is an answer of the assistant, which the loss covers.

    Tool calls are context: they depend on definitions of tools that the target is not shown.
    """
    return message["role"] == "assistant" and "tool_calls" not in message


class RecordError(ValueError):
    """A record, or a turn, is malformed; ``reason`` leaves out the particulars."""

    def __init__(self, reason: str, details: str | None = None) -> None:
        super().__init__(details or reason)
        self.reason = reason


class ChatFile(Sequence[Chat]):
    """The valid chats of a file, JSON Lines or one JSON array; raises ValueError if there are none.

    Counts skipped records by reason, and those whose chat ends before a malformed turn. ``sizes``
    are the chats' bytes, which estimate their lengths, and ``lines`` the lines that they start on,
    from 1. ``progress`` is called with the bytes read and the size of the file.
    """

    def __init__(self, path: str | Path, progress: Progress | None = None) -> None:
        self.path = Path(path)
        self.records = 0
        self.skip_reasons: Counter[str] = Counter()
        self.shorten_reasons: Counter[str] = Counter()
        self.skipped_records: list[str] = []
        self._offsets, self.sizes, self.lines = array("Q"), array("Q"), array("Q")
        self._file: BinaryIO | None = None
        total, reported = self.path.stat().st_size, 0
        with self.path.open("rb") as file:
            for offset, line, text in _records(file):
                self.records += 1
                try:
                    _, problem = parse_chat(text)
                except RecordError as error:
                    self.skip_reasons[error.reason] += 1
                    if self.skipped <= MAX_DESCRIBED:
                        self.skipped_records.append(f"line {line}: {error}")
                else:
                    if problem is not None:
                        self.shorten_reasons[problem.reason] += 1
                    self._offsets.append(offset)
                    self.sizes.append(len(text))
                    self.lines.append(line)
                if progress is not None and offset - reported >= REPORT_BYTES:
                    reported = offset
                    progress(offset, total)
        if not len(self):
            first = f": {self.skipped_records[0]}" if self.skipped else ""
            raise ValueError(f"{self.path} holds no valid chat{first}")

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Chat:  # type: ignore[override]
        # Another thread may open the file, too; the reference keeps this one open meanwhile.
        if (file := self._file) is None:
            file = self._file = self.path.open("rb")
        # Worker processes share the file's position, which this does not use.
        text = os.pread(file.fileno(), self.sizes[index], self._offsets[index])
        chat, _ = parse_chat(text)
        return chat

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    @property
    def skipped(self) -> int:
        """Number of skipped records."""
        return self.skip_reasons.total()

    def counts(self) -> dict[str, Any]:
        """Return the numbers of records, and of skipped and shortened ones by reason."""
        return {
            "records": self.records,
            "skipped": dict(self.skip_reasons),
            "shortened": dict(self.shorten_reasons),
        }

    def summary(self) -> str | None:
        """Describe skipped and shortened records by reason, in one line; None if there are none."""
        parts = []
        for verb, reasons in (("shortened", self.shorten_reasons), ("skipped", self.skip_reasons)):
            if reasons:
                counts = ", ".join(f"{count:,} {reason}" for reason, count in reasons.most_common())
                parts.append(f"{verb} {reasons.total():,} of {self.records:,} records: {counts}")
        if self.skipped:
            parts.append(f"first skipped: {', '.join(self.skipped_records[:3])}")
        return "; ".join(parts) or None


def write_chats(path: Path, count: int, seed: int = 3) -> Path:
    """Write generated chats of word problems as JSON Lines, unless the file exists."""
    if not path.exists():
        generated = itertools.islice(problems.chats("train", seed), count)
        lines = [json.dumps({"messages": chat}) + "\n" for chat in generated]
        atomic_write(path, "".join(lines))
    return path


def parse_chat(text: bytes) -> tuple[Chat, RecordError | None]:
    """Parse one record; also return what is wrong with the turn that ended the chat, if one did.

    User and assistant turns alternate, except that either may follow a tool call or its result.
    System turns may stand anywhere, results of tools after the first user turn. What precedes the
    first user turn (ShareGPT splits long chats) is dropped, apart from system turns, and so is what
    follows the last answer. Raises RecordError if the record is malformed or has no answer.
    """
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        details = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise RecordError("not JSON", f"not JSON: {details}") from None
    if not isinstance(record, dict):
        raise RecordError("not a JSON object")
    key = next((name for name in LAYOUTS if name in record), None)
    if key is None:
        raise RecordError('neither "conversations" nor "messages" is present')
    if not isinstance(record[key], list):
        raise RecordError("turns are not a list", f'"{key}" is not a list')
    chat: Chat = []
    problem: RecordError | None = None
    previous: str | None = None  # the role before; that of a tool call is "tool"
    for number, turn in enumerate(record[key], 1):
        try:
            message = _parse_turn(number, turn, *LAYOUTS[key])
            role = message["role"]
            if previous is None and role not in ("system", "user"):
                continue
            if role == previous != "tool":
                expected = "assistant" if role == "user" else "user"
                raise RecordError(
                    "roles out of order", f"turn {number} has the role {role}, not {expected}"
                )
        except RecordError as error:
            problem = error
            break
        chat.append(message)
        if role != "system":
            previous = "tool" if "tool_calls" in message else role
    while chat and not is_answer(chat[-1]):
        chat.pop()
    if not chat:
        raise problem or RecordError("no answer to a user turn")
    return chat, problem


def _parse_turn(number: int, turn: Any, role_key: str, content_key: str) -> dict[str, Any]:
    """Convert a turn of a record to a message; raises RecordError."""
    if not isinstance(turn, dict):
        raise RecordError("turn is not an object", f"turn {number} is not an object")
    content, name = turn.get(content_key), turn.get(role_key)
    role = ROLES.get(name) if isinstance(name, str) else None
    calls = _parse_tool_calls(number, turn, name, content) if role == "assistant" else []
    if calls and (content is None or name == "function_call"):
        content = ""
    if isinstance(content, list):  # OpenAI's content parts
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        content = "".join(texts) if len(texts) == len(parts) else None
    if not isinstance(content, str):
        raise RecordError("turn without text", f'turn {number} has no string "{content_key}"')
    if role is None:
        raise RecordError("unknown role", f'turn {number} has the unknown "{role_key}" {name!r}')
    message: dict[str, Any] = {"role": role, "content": content}
    if calls:
        message["tool_calls"] = calls
    elif role == "assistant" and not content.strip():
        raise RecordError("empty assistant turn", f"turn {number} is an empty assistant turn")
    if role == "assistant" and isinstance(turn.get("reasoning_content"), str):
        message["reasoning_content"] = turn["reasoning_content"]  # templates may show it
    if role == "tool":
        message |= {key: turn[key] for key in TOOL_KEYS if isinstance(turn.get(key), str)}
    try:
        json.dumps(message, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        details = f"turn {number} contains a lone surrogate"
        raise RecordError("lone surrogate", details) from None
    except RecursionError:
        details = f"turn {number} has a tool call that is nested too deeply"
        raise RecordError("malformed tool call", details) from None
    return message


def _parse_tool_calls(
    number: int, turn: dict[str, Any], name: Any, content: Any
) -> list[dict[str, Any]]:
    """Return an assistant turn's tool calls in OpenAI's layout, with decoded arguments."""
    try:
        if name == "function_call":  # ShareGPT's
            functions = json.loads(content) or [None]  # nothing is called: malformed, too
            functions = functions if isinstance(functions, list) else [functions]
            calls = [{"function": function} for function in functions]
        elif turn.get("function_call"):  # OpenAI's earlier layout
            calls = [{"function": turn["function_call"]}]
        else:
            calls = turn.get("tool_calls") or []
        parsed = []
        for call in calls:
            function, arguments = call["function"]["name"], call["function"]["arguments"]
            if isinstance(arguments, str):
                arguments = json.loads(arguments or "{}")
            if not isinstance(function, str) or not isinstance(arguments, dict):
                raise TypeError
            identifier = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
            function = {"name": function, "arguments": arguments}
            parsed.append({**identifier, "type": "function", "function": function})
        return parsed
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        details = f"turn {number} has a malformed tool call"
        raise RecordError("malformed tool call", details) from None


def _records(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """Yield the byte offset, line number and bytes of every record."""
    first = file.read(1 << 20).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    file.seek(0)
    if first == b"[":
        with mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            line, counted = 1, 0  # `line` is that of byte `counted`
            for start, end in _array_elements(data):
                text = data[start:end]
                start += len(text) - len(text.lstrip())
                line += data[counted:start].count(b"\n")
                counted = start
                if text := text.strip():
                    yield start, line, text
        return
    offset = 0
    for line, text in enumerate(file, 1):
        body = text.lstrip(b"\xef\xbb\xbf") if line == 1 else text
        if body.strip():
            yield offset + len(text) - len(body), line, body
        offset += len(text)


_OUTSIDE_STRING = re.compile(rb'["\[\]{},]')
_INSIDE_STRING = re.compile(rb'"|\\.', re.DOTALL)


def _array_elements(data: mmap) -> Iterator[tuple[int, int]]:
    """Yield where the elements of a JSON array begin and end, by counting brackets.

    Elements that are not objects, or not valid JSON between their brackets, are yielded as well.
    """
    depth = position = start = 0
    in_string = False
    while found := (_INSIDE_STRING if in_string else _OUTSIDE_STRING).search(data, position):
        symbol, position = found.group(), found.end()
        if symbol == b'"':
            in_string = not in_string
        elif in_string:  # an escape sequence
            continue
        elif symbol in b"[{":
            depth += 1
            if depth == 1:
                start = position
        else:
            if symbol != b",":
                depth -= 1
            if (depth, symbol) in ((1, b","), (0, b"]")):
                yield start, found.start()
                start = position
    if depth:
        yield start, len(data)
