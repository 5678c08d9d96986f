"""Answer files: FastChat's ``model_answer`` format, written so that a run can be resumed.

Each method has a file named after it, and a ``.meta.json`` file that records everything its answers
depend on. Every line is flushed to disk as it is written, so a killed process loses at most the
answers it was generating. With several processes, each writes a part; the parts are merged in the
order of the questions. Every answer names its session: one process of one run, on one machine.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from eagle_fsd.utils.files import append_line, atomic_write, read_jsonl, truncate_partial_line

Record = dict[str, Any]

#: The values of a turn, by field of a choice, if it was not answered.
NO_TURN: dict[str, Any] = {
    "turns": "",  # the text of the assistant's message
    "idxs": 0,  # target passes; None if the method does not report them
    "new_tokens": 0,
    "wall_time": 0.0,  # the turn's share of the seconds of its group
    "latency": 0.0,  # seconds in the batch, or until a server's reply
    "accepted": [],  # tokens that each pass emitted
    "origins": [],  # Origin of each token
    "prompt_ids": [],
    "token_ids": [],  # including the end token
    "log_likelihood": None,
    "regrets": [],  # of the fuzzy tokens
    "memory": None,  # peak while its group was answered, in bytes
    "cut_off": False,  # before an end token or a stop string
    "errors": None,  # why it was not answered
}
#: Fields of a choice that reports require: lists with an entry per turn.
CHOICE_LISTS = tuple(NO_TURN)


def all_turns(record: Record) -> dict[str, list[Any]]:
    """Return the values of all turns of all choices of a record by field."""
    first, *others = record["choices"]
    return {
        name: [*values, *(value for choice in others for value in choice[name])]
        for name, values in first.items()
        if isinstance(values, list)
    }


class Session:
    """One process of one run. Its provenance is saved in ``sessions`` with its first answer."""

    def __init__(self, folder: str | Path, provenance: dict[str, Any]) -> None:
        self.folder, self.provenance = Path(folder), provenance
        self.id = uuid.uuid4().hex[:12]

    def begin(self) -> str:
        """Save the session if it is not saved yet, and return its id."""
        path = self.folder / "sessions" / f"{self.id}.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, json.dumps(self.provenance, indent=2) + "\n")
        return self.id


def read_sessions(folder: str | Path, ids: Collection[str]) -> dict[str, dict[str, Any]]:
    """Read the provenance of sessions by id, the earliest first."""
    found = []
    for name in ids:
        path = Path(folder) / "sessions" / f"{name}.json"
        try:
            session = json.loads(path.read_text(encoding="utf-8"))
            found.append((session["environment"]["date"], name, session))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is missing or damaged; restore it, or delete the answers in this folder"
            ) from error
    return {name: session for _, name, session in sorted(found, key=lambda item: item[:2])}


class AnswerStore:
    """The answers of one method. Call :meth:`open` before anything else.

    ``fingerprint_inputs`` is everything that all answers depend on, and ``questions`` a fingerprint
    of each question by id, in order. The index of the process determines the part that it writes.
    """

    def __init__(
        self,
        folder: str | Path,
        name: str,
        fingerprint_inputs: dict[str, Any],
        questions: Mapping[int | str, str],
        process: int = 0,
        processes: int = 1,
    ) -> None:
        self.folder, self.name, self.questions = Path(folder), name, dict(questions)
        self.fingerprint_inputs = fingerprint_inputs
        self.process = process
        self.path = self.folder / f"{name}.jsonl"
        suffix = "" if processes == 1 else f".part{process}"
        self.part = self.folder / f"{name}{suffix}.jsonl"
        self.records: dict[int | str, Record] = {}

    def open(self) -> AnswerStore:
        """Read the answers that all processes of an earlier run wrote.

        The first process calls this before the others. Raises ValueError if the answers are damaged
        or were made from other inputs.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._check_fingerprint_inputs()
        if self.process == 0:
            text = json.dumps({"made_from": self.fingerprint_inputs}, indent=2) + "\n"
            atomic_write(self._meta_path, text)
        truncate_partial_line(self.part)
        self.records = self._read()
        return self

    @property
    def _meta_path(self) -> Path:
        return self.folder / f"{self.name}.meta.json"

    def _check_fingerprint_inputs(self) -> None:
        """Raise ValueError where answers exist that were made from other inputs."""
        if not any(path.stat().st_size for path in self._files()):
            return
        advice = "choose another output folder, or delete this one"
        try:
            before = dict(json.loads(self._meta_path.read_text(encoding="utf-8"))["made_from"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.path} holds answers, but {self._meta_path.name}, which records their"
                f" settings, is missing or damaged: {advice}"
            ) from error
        now = json.loads(json.dumps(self.fingerprint_inputs))
        changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
        if changed:
            if changed == ["count"]:
                advice = (
                    "bounds do not hold for a run whose size changes, so the number of questions is"
                    " fixed before the first answer; choose another output folder, and leave out"
                    f" these questions with --skip {before.get('skip', 0) + before['count']}"
                )
            found = "; ".join(
                f"{key} was {before.get(key)!r}, is {now.get(key)!r}" for key in changed
            )
            raise ValueError(f"{self.path} holds answers with other settings ({found}): {advice}")

    def _files(self) -> list[Path]:
        """List the existing files with answers: the merged one and the parts."""
        files = [self.path, *self.folder.glob(f"{self.name}.part*.jsonl")]
        return [path for path in files if path.exists()]

    def _read(self) -> dict[int | str, Record]:
        """Read the answers of all processes, by question."""
        found = {}
        for path in self._files():
            for line, record in enumerate(read_jsonl(path), 1):
                if problem := _find_problem(record, self.questions):
                    raise ValueError(f"{path}, line {line}: {problem}")
                found[record["question_id"]] = record
        return found

    def __contains__(self, question_id: int | str) -> bool:
        return question_id in self.records

    def append(self, record: Record) -> None:
        """Add an answer and its question's fingerprint, and flush it to disk."""
        record = {**record, "fingerprint": self.questions[record["question_id"]]}
        self.records[record["question_id"]] = record
        append_line(self.part, json.dumps(record, ensure_ascii=False))

    def merge(self) -> list[Record]:
        """Merge all parts, in the order of the questions, once every process has finished.

        A file that is already merged is not rewritten.
        """
        found = self._read()
        self.records = {key: found[key] for key in self.questions if key in found}
        lines = [json.dumps(item, ensure_ascii=False) + "\n" for item in self.records.values()]
        content = "".join(lines).encode()
        parts = list(self.folder.glob(f"{self.name}.part*.jsonl"))
        if parts or not self.path.exists() or self.path.read_bytes() != content:
            atomic_write(self.path, content)
        for part in parts:
            part.unlink()
        return list(self.records.values())


def _find_problem(record: Any, questions: Mapping[int | str, str]) -> str | None:
    """Return why ``record`` is not an answer to one of ``questions``, or None if it is one."""
    if not isinstance(record, dict) or "question_id" not in record:
        return "not an answer: question_id is missing"
    key = record["question_id"]
    if not isinstance(key, (int, str)) or key not in questions:
        return f"question_id {key!r} is not among the questions"
    if record.get("fingerprint") != questions[key]:
        return (
            f"question {key!r} was answered with another text or context: choose another output"
            " folder"
        )
    choices = record.get("choices")
    if not isinstance(choices, list) or not choices or not all(map(_is_complete, choices)):
        return "not an answer written by eagle-fsd: fields of its choice are missing or malformed"
    if not isinstance(record.get("session"), str) or not isinstance(record.get("batch"), int):
        return "not an answer written by eagle-fsd: session or batch is missing"
    return None


def _is_complete(choice: Any) -> bool:
    fields = [choice.get(name) for name in CHOICE_LISTS] if isinstance(choice, dict) else []
    lists = [item for item in fields if isinstance(item, list)]
    return len(lists) == len(CHOICE_LISTS) and len({len(item) for item in lists}) == 1


@contextmanager
def folder_lock(folder: str | Path) -> Iterator[None]:
    """Lock a folder against other runs, or raise ValueError if another run holds the lock.

    The run that holds the lock may lock the folder again.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    lock = FileLock(Path(folder) / ".lock", timeout=0, is_singleton=True)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(
            f"another run is writing to {folder}: wait for it, or choose another output folder"
        ) from error
    try:
        yield
    finally:
        lock.release()
