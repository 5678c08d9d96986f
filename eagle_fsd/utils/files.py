"""Write files that remain readable if the process is interrupted."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Replace a file only once its new content is complete.

    Yield a temporary path in the same folder to write to; a missing folder is created. On success,
    it is flushed to disk and renamed to ``path``, with the permissions of any new file; on an
    exception, it is removed and ``path`` stays as it was. The temporary name ends in ``.tmp``,
    whatever the extension of ``path``.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode
        temporary.unlink()
        yield temporary
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())
        temporary.chmod(mode)  # safetensors replaces the file by one that only its owner can read
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write(path: str | Path, content: str | bytes) -> None:
    """Create or replace a file in one step; strings are UTF-8, their line ends unchanged."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def append_line(path: str | Path, line: str) -> None:
    """Append a line to a file, created if missing, and flush it to disk."""
    with Path(path).open("ab") as file:
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_jsonl(path: str | Path) -> list[Any]:
    """Read the complete lines of a JSON Lines file; an error names the first that is not JSON.

    Blank lines are skipped, and so is a last line without a newline character: another process may
    still be writing it.
    """
    # Split bytes, not decoded text: a partial line may end inside a character, and
    # str.splitlines() also splits at separators such as U+2028 that JSON strings may contain.
    values = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n")[:-1], 1):
        if line.strip():
            try:
                values.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: not JSON") from error
    return values


def truncate_partial_line(path: str | Path) -> None:
    """Remove a last line that an interrupted process left without a newline character."""
    path = Path(path)
    if not path.exists():
        return
    with path.open("r+b") as file:
        complete = sum(len(line) for line in file if line.endswith(b"\n"))
        if complete < path.stat().st_size:
            file.truncate(complete)
