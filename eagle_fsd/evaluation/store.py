"""Answer files: FastChat's ``model_answer`` lines, written so that a kill at any moment loses one.

Each method has a file of its own, named after it, and beside it what the answers depend on. Several
processes write a part each; the parts become one file in the questions' order.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class AnswerStore:
    """The answers of one method.

    Args:
        folder: Where the file is; made if missing.
        name: Of the method: the file's base name, and FastChat's name of the model.
        made_from: What the answers depend on: questions, target, head, settings, seed. A file made
            from something else is refused.
        provenance: What they do not depend on (machine, versions, revision), kept beside them.
        process, processes: Which part is written here.

    Raises:
        ValueError: The file that is there was made from something else.
    """

    def __init__(
        self,
        folder: str | Path,
        name: str,
        made_from: dict[str, Any],
        provenance: dict[str, Any] | None = None,
        process: int = 0,
        processes: int = 1,
    ) -> None:
        self.folder, self.name = Path(folder), name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / f"{name}.jsonl"
        part = "" if processes == 1 else f".part{process}"
        self.part = self.folder / f"{name}{part}.jsonl"
        self._check(made_from)
        if process == 0:
            write_whole(
                self._about, json.dumps({"made_from": made_from, **(provenance or {})}, indent=2)
            )
        cut_half_line(self.part)
        self.records = {
            item["question_id"]: item for path in self._files() for item in read_records(path)
        }

    @property
    def _about(self) -> Path:
        return self.folder / f"{self.name}.meta.json"

    def _check(self, made_from: dict[str, Any]) -> None:
        if not self._about.exists() or not self._files():
            return
        before = json.loads(self._about.read_text(encoding="utf-8"))["made_from"]
        plain = json.loads(json.dumps(made_from))
        changed = [
            f"{key} was {before.get(key)!r}, is {plain.get(key)!r}"
            for key in sorted({*before, *plain})
            if before.get(key) != plain.get(key)
        ]
        if changed:
            raise ValueError(
                f"{self.path} holds answers of other settings ({'; '.join(changed)}): name another"
                " folder, or delete it"
            )

    def _files(self) -> list[Path]:
        found = [self.path, *self.folder.glob(f"{self.name}.part*.jsonl")]
        return [path for path in found if path.exists()]

    def __contains__(self, question_id: int | str) -> bool:
        return question_id in self.records

    def append(self, record: Record) -> None:
        """Write one line, through to the disk."""
        self.records[record["question_id"]] = record
        append_line(self.part, json.dumps(record, ensure_ascii=False))

    def merge(self, order: Sequence[int | str]) -> list[Record]:
        """All parts as one file in ``order``, once every process has finished; its records."""
        records = {
            item["question_id"]: item for path in self._files() for item in read_records(path)
        }
        self.records = {key: records[key] for key in order if key in records}
        lines = (json.dumps(item, ensure_ascii=False) + "\n" for item in self.records.values())
        write_whole(self.path, "".join(lines))
        for part in self.folder.glob(f"{self.name}.part*.jsonl"):
            part.unlink()
        return list(self.records.values())


def append_line(path: Path, line: str) -> None:
    """Write ``line`` and its end, through to the disk."""
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_records(path: Path) -> list[Record]:
    """The whole lines of ``path``; the last one may be half written by another process."""
    # Bytes, as a half line may end within a character; and not splitlines(): JSON leaves other
    # separators of lines, U+2028 for one, as they are.
    lines = path.read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines if line.strip()]


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
    """Write a file such that it is never seen half written."""
    part = path.with_name(path.name + f".{os.getpid()}.writing")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
