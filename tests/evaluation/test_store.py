"""Answer files survive kills, know what they were made from, and are put together in order."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from eagle_fsd.evaluation.answer_store import (
    CHOICE_LISTS,
    AnswerStore,
    Session,
    folder_lock,
    read_sessions,
)

MADE = {"questions": "few", "seed": 0}
ORDER = list(range(6))


def _store(folder: Path, made_from: dict[str, Any] = MADE, **share: int) -> AnswerStore:
    return AnswerStore(folder, "exact", made_from, ORDER, **share)


def _record(number: int) -> dict[str, Any]:
    choice: dict[str, Any] = {name: [0] for name in CHOICE_LISTS}
    choice["turns"] = [f"é {number}\n"]
    return {"question_id": number, "session": "a", "choices": [choice]}


def test_every_line_is_there_when_it_was_appended(tmp_path: Path) -> None:
    store = _store(tmp_path)
    for number in range(3):
        store.append(_record(number))
        lines = (tmp_path / "exact.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line) for line in lines] == [_record(n) for n in range(number + 1)]
    assert 2 in store
    assert 3 not in store


@pytest.mark.parametrize("seed", range(10))
def test_a_kill_at_any_byte_loses_one_answer_at_most(seed: int, tmp_path: Path) -> None:
    """And what goes on after it ends as an undisturbed file."""
    store = _store(tmp_path)
    for number in range(5):
        store.append(_record(number))
    whole = (tmp_path / "exact.jsonl").read_bytes()
    cut = random.Random(seed).randrange(len(whole))
    (tmp_path / "exact.jsonl").write_bytes(whole[:cut])
    again = _store(tmp_path)
    assert len(again.records) == whole[:cut].count(b"\n")
    for number in range(5):
        if number not in again:
            again.append(_record(number))
    assert (tmp_path / "exact.jsonl").read_bytes() == whole


def test_answers_of_other_settings_are_refused(tmp_path: Path) -> None:
    _store(tmp_path).append(_record(0))
    before = (tmp_path / "exact.meta.json").read_bytes()
    with pytest.raises(ValueError, match="seed was 0, is 1") as error:
        _store(tmp_path, {**MADE, "seed": 1})
    assert str(error.value).isprintable()
    assert (tmp_path / "exact.meta.json").read_bytes() == before
    AnswerStore(tmp_path, "other", {**MADE, "seed": 1}, ORDER)


def test_settings_of_a_file_without_answers_may_change(tmp_path: Path) -> None:
    _store(tmp_path)
    _store(tmp_path, {**MADE, "seed": 1})


def test_parts_of_several_processes_become_one_file_in_order(tmp_path: Path) -> None:
    parts = [_store(tmp_path, process=part, processes=3) for part in range(3)]
    for number in (5, 4, 3, 2, 1, 0):
        parts[number % 3].append(_record(number))
    records = parts[0].merge()
    assert [record["question_id"] for record in records] == [0, 1, 2, 3, 4, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exact.jsonl", "exact.meta.json"]
    alone = _store(tmp_path / "alone")
    for number in range(6):
        alone.append(_record(number))
    assert (tmp_path / "exact.jsonl").read_bytes() == alone.path.read_bytes()


def test_another_number_of_processes_goes_on_with_what_is_there(tmp_path: Path) -> None:
    for part in range(2):
        _store(tmp_path, process=part, processes=2).append(_record(part))
    alone = _store(tmp_path)
    assert set(alone.records) == {0, 1}
    alone.append(_record(2))
    assert [item["question_id"] for item in alone.merge()] == [0, 1, 2]


def test_a_part_cut_within_a_character_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    """The process that would repair it is not there any more."""
    _store(tmp_path)
    store = _store(tmp_path, process=1, processes=2)
    store.append(_record(1))
    store.append(_record(2))
    part = tmp_path / "exact.part1.jsonl"
    data = part.read_bytes()
    part.write_bytes(data[: data.rindex("\u00e9".encode()) + 1])
    assert list(_store(tmp_path).records) == [1]


def test_a_file_in_order_is_left_as_it_is(tmp_path: Path) -> None:
    store = _store(tmp_path)
    for number in (1, 0):
        store.append(_record(number))
    store.merge()
    before = store.path.stat()
    assert [item["question_id"] for item in _store(tmp_path).merge()] == [0, 1]
    assert (store.path.stat().st_ino, store.path.stat().st_mtime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
    )


@pytest.mark.parametrize("meta", [None, "", "{}", "[]", '{"made_from": 3}'])
def test_answers_of_unknown_origin_are_refused(meta: str | None, tmp_path: Path) -> None:
    _store(tmp_path).append(_record(0))
    about = tmp_path / "exact.meta.json"
    about.unlink() if meta is None else about.write_text(meta)
    with pytest.raises(ValueError, match=r"exact.meta.json, .* is missing or damaged: name an"):
        _store(tmp_path)


def _without(name: str) -> str:
    record = _record(1)
    del record["choices"][0][name]
    return json.dumps(record)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nonsense", "not JSON"),
        ("[]", "no question_id"),
        ('{"question_id": 1}', "not an answer as this program writes it"),
        ('{"question_id": 1, "choices": [{"turns": ["FastChat\'s own"]}]}', "as this program"),
        ('{"question_id": 9, "choices": []}', "question 9, which is none of those asked"),
        ('{"question_id": [1]}', "none of those asked"),
        (_without("errors"), "as this program"),
        (json.dumps({**_record(1), "session": None}), "does not name the session"),
    ],
)
def test_a_line_that_is_no_answer_is_named(line: str, words: str, tmp_path: Path) -> None:
    store = _store(tmp_path)
    store.append(_record(0))
    with store.path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=rf"exact.jsonl, line 2: .*{words}"):
        _store(tmp_path)


def test_a_session_is_written_down_with_its_first_answer(tmp_path: Path) -> None:
    late = Session(tmp_path, {"environment": {"date": "2026-02-02"}})
    early = Session(tmp_path, {"environment": {"date": "2026-01-01"}})
    assert not (tmp_path / "sessions").exists()
    ids = [late.begin(), early.begin(), late.begin()]
    assert list(read_sessions(tmp_path, ids).values()) == [early.provenance, late.provenance]
    (tmp_path / "sessions" / f"{early.id}.json").write_text("{")
    with pytest.raises(ValueError, match=rf"{early.id}.json is missing or damaged"):
        read_sessions(tmp_path, ids)


def test_a_folder_is_one_runs_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    with folder_lock(folder), pytest.raises(ValueError, match="another run"), folder_lock(folder):
        pass
    with folder_lock(folder):
        pass
