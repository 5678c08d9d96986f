"""Finding and downloading published question sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_fsd.evaluation.questions import sets
from eagle_fsd.evaluation.questions.sets import QuestionSetError, find_questions


def test_a_set_is_read_from_the_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_FSD_DATA", str(tmp_path))
    line = '{"question_id": %d, "category": "w", "turns": ["a", "b"]}\n'
    (tmp_path / "mt_bench_question.jsonl").write_text(line % 81 + line % 82)
    assert [question.question_id for question in find_questions("mt-bench", 1)] == [81]


@pytest.mark.parametrize("fault", ["unreachable", "changed"])
def test_a_failed_download_leaves_no_file(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says where to put the file instead."""
    source = tmp_path / "source.jsonl"
    if fault == "changed":
        source.write_text('{"question_id": 1, "turns": ["another question"]}\n')
    monkeypatch.setenv("EAGLE_FSD_DATA", str(tmp_path / "data"))
    changed = sets.PublishedFile("set.jsonl", source.as_uri(), "0" * 64)
    monkeypatch.setitem(sets.SETS, "gsm8k", changed)
    with pytest.raises(QuestionSetError) as error:
        find_questions("gsm8k")
    assert str(tmp_path / "data" / "set.jsonl") in str(error.value)
    assert not list((tmp_path / "data").iterdir())
