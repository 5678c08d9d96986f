"""Answer files: resumption after a kill, fingerprint inputs, and merging of parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_fsd.evaluation.answer_store import CHOICE_LISTS, AnswerStore, Session, read_sessions

INPUTS = {"questions": "few", "seed": 0}
QUESTIONS: dict[int | str, str] = {number: f"text {number}" for number in range(6)}


def open_store(folder: Path, inputs: dict[str, Any] = INPUTS, **share: int) -> AnswerStore:
    return AnswerStore(folder, "exact", inputs, QUESTIONS, **share).open()


def record_of(number: int) -> dict[str, Any]:
    choice: dict[str, Any] = {name: [0] for name in CHOICE_LISTS}
    choice["turns"] = [f"é {number}\n"]
    return {
        "question_id": number,
        "session": "a",
        "batch": 0,
        "choices": [choice],
        "fingerprint": QUESTIONS[number],
    }


def test_a_kill_at_any_byte_loses_at_most_one_answer(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in range(3):
        store.append(record_of(number))
    complete = store.path.read_bytes()
    for cut in range(0, len(complete), 11):
        store.path.write_bytes(complete[:cut])
        resumed = open_store(tmp_path)
        assert len(resumed.records) == complete[:cut].count(b"\n")
        for number in range(3):
            if number not in resumed:
                resumed.append(record_of(number))
                lines = store.path.read_text(encoding="utf-8").splitlines()
                assert [json.loads(line) for line in lines[-1:]] == [record_of(number)]
        assert store.path.read_bytes() == complete


def test_inputs_may_change_while_there_is_no_answer(tmp_path: Path) -> None:
    open_store(tmp_path, {**INPUTS, "seed": 1})
    open_store(tmp_path).append(record_of(0))


def test_a_part_of_a_missing_process_is_read_up_to_its_last_complete_line(tmp_path: Path) -> None:
    """No process repairs that part, whose last line ends inside a character."""
    open_store(tmp_path)
    store = open_store(tmp_path, process=1, processes=2)
    store.append(record_of(1))
    store.append(record_of(2))
    content = store.part.read_bytes()
    store.part.write_bytes(content[: content.rindex("é".encode()) + 1])
    assert list(open_store(tmp_path).records) == [1]


def test_a_merged_file_is_not_rewritten(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in (1, 0):
        store.append(record_of(number))
    store.merge()
    before = store.path.stat()
    assert [item["question_id"] for item in open_store(tmp_path).merge()] == [0, 1]
    after = store.path.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_answers_without_their_inputs_are_rejected(tmp_path: Path) -> None:
    open_store(tmp_path).append(record_of(0))
    path = tmp_path / "exact.meta.json"
    path.unlink()
    for meta in (None, "", "{}", "[]", '{"made_from": 3}'):
        if meta is not None:
            path.write_text(meta)
        with pytest.raises(ValueError, match=r"exact.meta.json, .* is missing or damaged: choose"):
            open_store(tmp_path)


def test_a_line_that_is_not_an_answer_is_named(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.append(record_of(0))
    whole = store.path.read_text()
    incomplete = record_of(1)
    del incomplete["choices"][0]["errors"]
    for line, words in [
        ("nonsense", "not JSON"),
        ("[]", "question_id is missing"),
        ('{"question_id": 1}', "question 1 was answered with another text"),
        ('{"question_id": 1, "fingerprint": "text 1"}', "fields of its choice"),
        ('{"question_id": 9, "choices": []}', "question_id 9 is not among"),
        ('{"question_id": [1]}', "is not among"),
        (json.dumps(incomplete), "fields of its choice"),
        (json.dumps({**record_of(1), "session": None}), "session or batch is missing"),
    ]:
        store.path.write_text(f"{whole}{line}\n")
        with pytest.raises(ValueError, match=rf"exact.jsonl, line 2: .*{words}"):
            open_store(tmp_path)


def test_a_session_is_saved_with_its_first_answer(tmp_path: Path) -> None:
    late = Session(tmp_path, {"environment": {"date": "2026-02-02"}})
    early = Session(tmp_path, {"environment": {"date": "2026-01-01"}})
    assert not (tmp_path / "sessions").exists()
    ids = [late.begin(), early.begin(), late.begin()]
    assert list(read_sessions(tmp_path, ids).values()) == [early.provenance, late.provenance]
    (tmp_path / "sessions" / f"{early.id}.json").write_text("{")
    with pytest.raises(ValueError, match=rf"{early.id}.json is missing or damaged"):
        read_sessions(tmp_path, ids)
