"""Answer files survive kills, know what they were made from, and are put together in order."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from eagle_fsd.evaluation.store import AnswerStore

MADE = {"questions": "few", "seed": 0}


def _record(number: int) -> dict[str, object]:
    return {"question_id": number, "choices": [{"turns": [f"é {number}\n"]}]}


def test_every_line_is_there_when_it_was_appended(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path, "exact", MADE)
    for number in range(3):
        store.append(_record(number))
        lines = (tmp_path / "exact.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line) for line in lines] == [_record(n) for n in range(number + 1)]
    assert 2 in store
    assert 3 not in store


@pytest.mark.parametrize("seed", range(10))
def test_a_kill_at_any_byte_loses_one_answer_at_most(seed: int, tmp_path: Path) -> None:
    """And what goes on after it ends as an undisturbed file."""
    store = AnswerStore(tmp_path, "exact", MADE)
    for number in range(5):
        store.append(_record(number))
    whole = (tmp_path / "exact.jsonl").read_bytes()
    cut = random.Random(seed).randrange(len(whole))
    (tmp_path / "exact.jsonl").write_bytes(whole[:cut])
    again = AnswerStore(tmp_path, "exact", MADE)
    assert len(again.records) == whole[:cut].count(b"\n")
    for number in range(5):
        if number not in again:
            again.append(_record(number))
    assert (tmp_path / "exact.jsonl").read_bytes() == whole


def test_answers_of_other_settings_are_refused(tmp_path: Path) -> None:
    AnswerStore(tmp_path, "exact", MADE).append(_record(0))
    before = (tmp_path / "exact.meta.json").read_bytes()
    with pytest.raises(ValueError, match="seed was 0, is 1") as error:
        AnswerStore(tmp_path, "exact", {**MADE, "seed": 1})
    assert str(error.value).isprintable()
    assert (tmp_path / "exact.meta.json").read_bytes() == before
    AnswerStore(tmp_path, "other", {**MADE, "seed": 1})


def test_settings_of_a_file_without_answers_may_change(tmp_path: Path) -> None:
    AnswerStore(tmp_path, "exact", MADE)
    AnswerStore(tmp_path, "exact", {**MADE, "seed": 1})


def test_parts_of_several_processes_become_one_file_in_order(tmp_path: Path) -> None:
    parts = [AnswerStore(tmp_path, "exact", MADE, process=part, processes=3) for part in range(3)]
    for number in (5, 4, 3, 2, 1, 0):
        parts[number % 3].append(_record(number))
    records = parts[0].merge([0, 1, 2, 3, 4, 5])
    assert [record["question_id"] for record in records] == [0, 1, 2, 3, 4, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exact.jsonl", "exact.meta.json"]
    alone = AnswerStore(tmp_path / "alone", "exact", MADE)
    for number in range(6):
        alone.append(_record(number))
    assert (tmp_path / "exact.jsonl").read_bytes() == alone.path.read_bytes()


def test_another_number_of_processes_goes_on_with_what_is_there(tmp_path: Path) -> None:
    for part in range(2):
        AnswerStore(tmp_path, "exact", MADE, process=part, processes=2).append(_record(part))
    alone = AnswerStore(tmp_path, "exact", MADE)
    assert set(alone.records) == {0, 1}
    alone.append(_record(2))
    assert [item["question_id"] for item in alone.merge([0, 1, 2])] == [0, 1, 2]


def test_a_part_cut_within_a_character_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    """The process that would repair it is not there any more."""
    store = AnswerStore(tmp_path, "m", {}, process=1, processes=2)
    store.append({"question_id": 1, "text": "whole"})
    store.append({"question_id": 2, "text": "\u00e9"})
    part = tmp_path / "m.part1.jsonl"
    data = part.read_bytes()
    part.write_bytes(data[: data.index("\u00e9".encode()) + 1])
    assert list(AnswerStore(tmp_path, "m", {}).records) == [1]
