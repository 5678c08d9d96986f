"""Answer files: FastChat's ``model_answer`` lines, written so that a kill at any moment loses one.

Each method has a file of its own, named after it, and beside it what the answers depend on. Several
processes write a part each; the parts become one file in the questions' order. Every answer names
the session that it was drawn in: one process of one run, on one machine.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

Record = dict[str, Any]

#: What a choice must hold, a list with an entry a turn each, for a report to be made of it.
CHOICE_LISTS = (
    "turns",
    "idxs",
    "new_tokens",
    "wall_time",
    "accepted",
    "origins",
    "log_likelihood",
    "memory",
    "cut_off",
    "errors",
)


class Session:
    """One process of one run: what its answers were drawn with, written down once one is.

    Args:
        folder: Of the answers; the session's file goes to its folder ``sessions``.
        provenance: Machine, versions, revision, date: what answers should not depend on.
    """

    def __init__(self, folder: str | Path, provenance: dict[str, Any]) -> None:
        self.folder, self.provenance = Path(folder), provenance
        self.id = uuid.uuid4().hex[:12]
        self._path = self.folder / "sessions" / f"{self.id}.json"

    def begin(self) -> str:
        """Write the file if it is not there yet; the session's id."""
        if not self._path.exists():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, json.dumps(self.provenance, indent=2) + "\n")
        return self.id


def read_sessions(folder: str | Path, ids: Collection[str]) -> dict[str, dict[str, Any]]:
    """The provenance of sessions by id, the earliest first.

    Raises:
        ValueError: A session's file is missing or damaged.
    """
    found = []
    for name in ids:
        path = Path(folder) / "sessions" / f"{name}.json"
        try:
            session = json.loads(path.read_text(encoding="utf-8"))
            found.append((session["environment"]["date"], name, session))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is missing or damaged: put it back, or delete the folder's answers"
            ) from error
    return {name: session for _, name, session in sorted(found, key=lambda item: item[:2])}


class AnswerStore:
    """The answers of one method.

    Args:
        folder: Where the file is; made if missing.
        name: Of the method: the file's base name, and FastChat's name of the model.
        made_from: What the answers depend on: questions, target, head, settings, seed. A file made
            from something else is refused.
        order: The ids of the questions; an answer to any other is refused.
        process, processes: Which part is written here. The first process has to be there first.

    Raises:
        ValueError: The file that is there was made from something else, or is damaged.
    """

    def __init__(
        self,
        folder: str | Path,
        name: str,
        made_from: dict[str, Any],
        order: Sequence[int | str],
        process: int = 0,
        processes: int = 1,
    ) -> None:
        self.folder, self.name, self.order = Path(folder), name, list(order)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / f"{name}.jsonl"
        part = "" if processes == 1 else f".part{process}"
        self.part = self.folder / f"{name}{part}.jsonl"
        self._check(made_from)
        if process == 0:
            write_whole(self._about, json.dumps({"made_from": made_from}, indent=2) + "\n")
        cut_half_line(self.part)
        self.records = self._read()

    @property
    def _about(self) -> Path:
        return self.folder / f"{self.name}.meta.json"

    def _check(self, made_from: dict[str, Any]) -> None:
        if not any(path.stat().st_size for path in self._files()):
            return
        advice = "name another folder, or delete it"
        try:
            before = dict(json.loads(self._about.read_text(encoding="utf-8"))["made_from"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.path} holds answers, but {self._about.name}, which tells what they were"
                f" made from, is missing or damaged: {advice}"
            ) from error
        plain = json.loads(json.dumps(made_from))
        changed = [
            f"{key} was {before.get(key)!r}, is {plain.get(key)!r}"
            for key in sorted({*before, *plain})
            if before.get(key) != plain.get(key)
        ]
        if changed:
            raise ValueError(
                f"{self.path} holds answers of other settings ({'; '.join(changed)}): {advice}"
            )

    def _files(self) -> list[Path]:
        found = [self.path, *self.folder.glob(f"{self.name}.part*.jsonl")]
        return [path for path in found if path.exists()]

    def _read(self) -> dict[int | str, Record]:
        """The answers of every process by question."""
        asked = set(self.order)
        found = {}
        for path in self._files():
            for line, record in enumerate(read_records(path), 1):
                problem = _problem(record, asked)
                if problem:
                    raise ValueError(f"{path}, line {line}: {problem}")
                found[record["question_id"]] = record
        return found

    def __contains__(self, question_id: int | str) -> bool:
        return question_id in self.records

    def append(self, record: Record) -> None:
        """Write one line, through to the disk."""
        self.records[record["question_id"]] = record
        append_line(self.part, json.dumps(record, ensure_ascii=False))

    def merge(self) -> list[Record]:
        """All parts as one file in the questions' order, once every process has finished.

        Returns:
            Its records.
        """
        found = self._read()
        self.records = {key: found[key] for key in self.order if key in found}
        lines = [json.dumps(item, ensure_ascii=False) + "\n" for item in self.records.values()]
        text = "".join(lines)
        parts = list(self.folder.glob(f"{self.name}.part*.jsonl"))
        if parts or not self.path.exists() or self.path.read_bytes() != text.encode():
            write_whole(self.path, text)
        for part in parts:
            part.unlink()
        return list(self.records.values())


def _problem(record: Any, asked: Collection[int | str]) -> str | None:
    """Why ``record`` is no answer to one of the questions ``asked``; None: it is one."""
    if not isinstance(record, dict) or "question_id" not in record:
        return "not an answer: it has no question_id"
    key = record["question_id"]
    if not isinstance(key, (int, str)) or key not in asked:
        return f"an answer to question {key!r}, which is none of those asked"
    choices = record.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    lists = [choice.get(name) for name in CHOICE_LISTS] if isinstance(choice, dict) else [None]
    if not all(isinstance(item, list) for item in lists) or len({len(item) for item in lists}) != 1:
        return "not an answer as this program writes it"
    if not isinstance(record.get("session"), str):
        return "the answer does not name the session that it was drawn in"
    return None


@contextmanager
def folder_lock(folder: str | Path) -> Iterator[None]:
    """Nobody else writes into ``folder`` meanwhile; a kill sets it free.

    Raises:
        ValueError: Somebody else does.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    lock = FileLock(Path(folder) / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(f"another run is writing into {folder}: wait, or name another") from error
    try:
        yield
    finally:
        lock.release()


def append_line(path: Path, line: str) -> None:
    """Write ``line`` and its end, through to the disk."""
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_records(path: Path) -> list[Record]:
    """The whole lines of ``path``; the last one may be half written by another process.

    Raises:
        ValueError: A whole line is not JSON.
    """
    # Bytes, as a half line may end within a character; and not splitlines(): JSON leaves other
    # separators of lines, U+2028 for one, as they are.
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        if line.strip():
            try:
                records.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: not JSON") from error
    return records


def cut_half_line(path: Path) -> None:
    """Cut off a last line that a kill left half written."""
    if not path.exists():
        return
    text = path.read_bytes()
    whole = text.rfind(b"\n") + 1
    if whole < len(text):
        with path.open("r+b") as file:
            file.truncate(whole)


def write_whole(path: Path, text: str) -> None:
    """Write a file such that it is never seen half written, nor lost by a power cut."""
    part = path.with_name(path.name + f".{os.getpid()}.writing")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
