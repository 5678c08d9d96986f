"""Question files in their published formats."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from eagle_fsd.evaluation.questions import QuestionError, bundled_questions, read_questions

DATA = Path(__file__).parents[3] / "shared" / "data"


@pytest.mark.parametrize(
    ("name", "count", "turns", "scored_by"),
    [
        ("mt_bench_question.jsonl", 80, 2, ""),
        ("spec_bench_question.jsonl", 480, None, ""),
        ("alpaca_question.jsonl", 80, 1, ""),
        ("gsm8k_test.jsonl", 1319, 1, "number"),
        ("HumanEval.jsonl.gz", 164, 1, "code"),
    ],
)
def test_published_files(name: str, count: int, turns: int | None, scored_by: str) -> None:
    if not (DATA / name).exists():
        pytest.skip(f"{name} is not beside the project")
    questions = read_questions(DATA / name)
    assert len(questions) == count
    assert len({item.question_id for item in questions}) == count
    assert {item.scored_by for item in questions} == {scored_by}
    assert turns is None or {len(item.turns) for item in questions} == {turns}


def test_commonsense_qa_and_mmlu(tmp_path: Path) -> None:
    """Their published fields, MMLU both as CSV and as the Hub has it."""
    commonsense = {
        "id": "a1",
        "question": {
            "stem": "Where is a fish?",
            "choices": [{"label": "A", "text": "sea"}, {"label": "B", "text": "sky"}],
        },
        "answerKey": "A",
    }
    hub = {"question": "2 + 2?", "subject": "math", "choices": ["3", "4", "5", "6"], "answer": 1}
    (tmp_path / "c.jsonl").write_text(json.dumps(commonsense))
    (tmp_path / "m.jsonl").write_text(json.dumps(hub))
    (tmp_path / "abstract_algebra_test.csv").write_text('"2 + 2, say?",3,4,5,6,B\n')
    (found,) = read_questions(tmp_path / "c.jsonl")
    assert (found.answer, found.scored_by, found.category) == ("A", "letter", "commonsense-qa")
    assert "B. sky" in found.turns[0]
    (found,) = read_questions(tmp_path / "m.jsonl")
    assert (found.answer, found.category) == ("B", "math")
    (found,) = read_questions(tmp_path / "abstract_algebra_test.csv")
    assert (found.answer, found.category) == ("B", "abstract_algebra")
    assert "2 + 2, say?" in found.turns[0]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: not a JSON object"),
        ('{"question_id": 1, "turns": []}', 'line 2: "turns" is not a list of texts'),
        ('{"turns": ["hi"]}', "line 2: 'question_id' is missing"),
        ('{"question": "q", "answer": "no number"}', 'line 2: "answer" does not end'),
        ('{"question": "q", "choices": ["x"], "answer": "Z"}', "line 2: the answer 'Z' is none"),
        ('{"hello": 1}', "line 2: no known format has these fields: hello"),
    ],
)
def test_a_malformed_line_is_named_by_its_number(line: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question_id": 1, "turns": ["hi"]}\n' + line + "\n")
    with pytest.raises(QuestionError) as error:
        read_questions(path)
    assert reason in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"question_id": [1], "turns": ["a"]}', "neither a number nor a text"),
        ('{"question_id": true, "turns": ["a"]}', "neither a number nor a text"),
        ('{"question_id": 7, "turns": ["a"]}', "another question has the id 7"),
        ('{"question_id": 8, "turns": ["\\ud800"]}', "half of a character"),
        ('{"question_id": 8, "category": "\\ud800", "turns": ["a"]}', "half of a character"),
    ],
)
def test_questions_that_could_not_be_answered_or_written_down(
    line: str, reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text('{"question_id": 7, "turns": ["a"]}\n' + line + "\n")
    with pytest.raises(QuestionError, match=f"q.jsonl, line 2: .*{reason}"):
        read_questions(file)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("q.tar", b"no archive"),
        ("q.csv", b'"' + b"a" * 200_000 + b'",1,2,3,4,A\n'),
        ("q.jsonl.gz", gzip.compress(b'{"question_id": 1, "turns": ["a"]}\n')[:-9]),
        ("q.jsonl.gz", b"not compressed"),
        ("q.jsonl", b'{"question_id": 1, "turns": ["\xff"]}\n'),
    ],
)
def test_damaged_files_are_named(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(QuestionError, match=f"{name} is damaged"):
        read_questions(tmp_path / name)


def test_bundled_questions_are_unseen_problems() -> None:
    questions = bundled_questions(5)
    assert [item.scored_by for item in questions] == ["number"] * 5
    assert all(item.answer.lstrip("-").isdigit() for item in questions)
