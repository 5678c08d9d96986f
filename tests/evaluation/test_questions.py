"""The published file formats, and subsets of questions."""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published import published

from eagle_fsd.evaluation.questions import sets
from eagle_fsd.evaluation.questions.formats import QuestionError, read_questions
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.questions.sets import (
    QuestionSetError,
    balanced_subset,
    find_questions,
)


def test_published_files_are_read() -> None:
    for name, count, turns, scored_by in [
        ("mt_bench_question.jsonl", 80, 2, ""),
        ("spec_bench_question.jsonl", 480, None, ""),
        ("alpaca_question.jsonl", 80, 1, ""),
        ("gsm8k_test.jsonl", 1319, 1, "number"),
        ("HumanEval.jsonl.gz", 164, 1, "code"),
    ]:
        questions = read_questions(published(name))
        assert len(questions) == count
        assert len({item.question_id for item in questions}) == count
        assert {item.scored_by for item in questions} == {scored_by}
        assert turns is None or {len(item.turns) for item in questions} == {turns}


def test_commonsense_qa_and_mmlu_are_read(tmp_path: Path) -> None:
    """MMLU both as CSV and in the Hub's format."""
    for name, content, letter, category, text in (
        ("c.jsonl", json.dumps(COMMONSENSE), "A", "commonsense-qa", "B. sky"),
        ("m.jsonl", json.dumps(MMLU), "B", "math", "A. 3"),
        ("law_test.csv", '"2 + 2, say?",3,4,5,6,B\n\n', "B", "law", "2 + 2, say?"),
        ("law_test.csv.gz", '"2 + 2, say?",3,4,5,6,B\n\n', "B", "law", "2 + 2, say?"),
    ):
        data = content.encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        (found,) = read_questions(tmp_path / name)
        assert (found.answer, found.scored_by, found.category) == (letter, "letter", category)
        assert text in found.turns[0]


def test_an_invalid_line_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    for line, reason in [
        ("{", "not JSON; if every line is a prompt, rename the file to .txt"),
        ('{"turns": ' + "[" * 200_000, "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"question_id": 7, "turns": ["a"]}', "duplicate question id 7"),
        ('{"question_id": "7", "turns": ["a"]}', "question id '7' is a string, but"),
        ('{"question_id": 8, "turns": ["\\ud800"]}', "a string contains a lone surrogate"),
        ('{"question_id": 8, "category": "\\ud800", "turns": ["a"]}', "a string contains a lone"),
        ('{"hello": 1}', "no known format has these fields: hello"),
    ]:
        path.write_text('{"question_id": 7, "turns": ["hi"]}\n' + line + "\n")
        with pytest.raises(QuestionError) as error:
            read_questions(path)
        assert str(error.value).startswith(f"{path}, line 2: {reason}")


TURNS = {"question_id": 1, "turns": ["hi"], "category": "c", "reference": ["r"]}
GSM8K = {"question": "q", "answer": "so\n#### 4"}
CHOICES = [{"label": "A", "text": "sea"}, {"label": "B", "text": "sky"}]
COMMONSENSE = {"id": "a", "question": {"stem": "q", "choices": CHOICES}, "answerKey": "A"}
MMLU = {"question": "q", "subject": "math", "choices": ["3", "4", "5", "6"], "answer": 1}
HUMAN_EVAL = {
    "task_id": "h/0",
    "prompt": "def f():\n",
    "entry_point": "f",
    "canonical_solution": "    return 1\n",
    "test": "def check(f):\n    assert f() == 1\n",
}
#: For each format a valid row, and invalid values of its fields.
FORMATS = {
    "turns": (TURNS, {
        "question_id": [None, 1.5, True], "turns": [None, "hi", [1], [], [""], ["a", None]],
        "category": [5], "reference": [5, {}, [5]],
    }),
    "gsm8k": (GSM8K, {
        "question": [None, 5, " "], "answer": [None, ["#### 4"], "#### four", "####", "#### 1/0"],
    }),
    "commonsense-qa": (COMMONSENSE, {"id": [None, 1.5], "answerKey": [None, "", "C", "AB"]}),
    "mmlu": (MMLU, {
        "question": [None, []], "subject": [5], "answer": [None, 4, -1, 1.0, True, "Z", "BC"],
        "choices": [None, "abcd", {"a": 1}, ["3"], ["3", 4], list("123456")],
    }),
    "humaneval": (HUMAN_EVAL, {
        "task_id": [None, 1.5], "prompt": [None, ["def f()"], ""], "canonical_solution": [5],
        "entry_point": [None, "", "f()", "a b", "def"], "test": [None, ""],
    }),
}  # fmt: skip
OPTIONAL = {"category", "reference", "subject", "canonical_solution"}


def without(row: dict[str, object], field: str) -> dict[str, object]:
    return {key: row[key] for key in row if key != field}


def test_invalid_and_missing_fields_are_named(tmp_path: Path) -> None:
    """Optional fields may be missing or null."""
    path = tmp_path / "q.jsonl"
    for row, fields in FORMATS.values():
        optional = OPTIONAL & fields.keys()
        nulls = [{**row, field: None} for field in optional]
        for changed in (row, *nulls, *(without(row, field) for field in optional)):
            path.write_text(json.dumps(changed))
            assert len(read_questions(path)) == 1
        for field, values in fields.items():
            for value in values:
                path.write_text("\n" + json.dumps({**row, field: value}) + "\n")
                with pytest.raises(QuestionError) as error:
                    read_questions(path)
                assert f"{path}, line 2: " in str(error.value)
                assert f'"{field}"' in str(error.value)
                assert "\n" not in str(error.value)
        for field in fields.keys() - OPTIONAL - {"turns", "choices", "question", "entry_point"}:
            path.write_text(json.dumps(without(row, field)))
            with pytest.raises(QuestionError, match=f"line 1: '{field}' is missing"):
                read_questions(path)


def write_archive(path: Path, files: dict[str, bytes]) -> None:
    """Write an archive like MMLU's."""
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"data/test/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def write_file(path: Path, content: bytes) -> None:
    """Write a file, compressed or as an archive's only member if its name says so."""
    if path.suffix == ".tar":
        write_archive(path, {"math_test.csv": content} if content else {})
    else:
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def test_byte_order_marks_and_line_ends_are_ignored(tmp_path: Path) -> None:
    """A file without questions is rejected."""
    names = ("q.jsonl", "q.jsonl.gz", "math_test.csv", "q.tar")
    for name in names:
        lines = ['"2 + 2, say?",3,4,5,6,B'] * 2
        if "jsonl" in name:
            lines = [json.dumps({**TURNS, "question_id": key}) for key in (1, 2)]
        write_file(tmp_path / name, ("\ufeff" + "\r\n".join([*lines, ""])).encode())
        questions = read_questions(tmp_path / name)
        assert [item.category for item in questions] == (["c"] if "jsonl" in name else ["math"]) * 2
        assert not {"\r", "\ufeff"} & set(questions[0].turns[0])
        write_file(tmp_path / name, b"")
        with pytest.raises(QuestionError, match=f"{name} contains no questions"):
            read_questions(tmp_path / name)
    # Errors name the member of an archive, and the last line of a row.
    write_archive(tmp_path / "mmlu.tar", {"law_test.csv": b'"two\nlines",1,2,3,4,A\nq,1,2,3,4,F\n'})
    with pytest.raises(QuestionError, match=r"mmlu.tar.*law_test.csv, line 3: .*\"answer\""):
        read_questions(tmp_path / "mmlu.tar")


def test_a_folder_is_not_a_question_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the name of a set does not hide the set, which is in the data folder."""
    with pytest.raises(QuestionSetError, match="is a folder"):
        find_questions(str(tmp_path))
    with pytest.raises(IsADirectoryError):
        read_questions(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EAGLE_FSD_DATA", str(tmp_path / "data"))
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "gsm8k_test.jsonl").write_text(json.dumps(GSM8K))
    assert len(find_questions("gsm8k")) == 1


def test_a_failed_download_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says where to put the file instead."""
    monkeypatch.setenv("EAGLE_FSD_DATA", str(tmp_path / "data"))
    changed, missing = tmp_path / "source.jsonl", tmp_path / "missing.jsonl"
    changed.write_text('{"question_id": 1, "turns": ["another question"]}\n')
    for source in (changed, missing):
        published_file = sets.PublishedFile("set.jsonl", source.as_uri(), "0" * 64)
        monkeypatch.setitem(sets.SETS, "gsm8k", published_file)
        with pytest.raises(QuestionSetError) as error:
            find_questions("gsm8k")
        assert str(tmp_path / "data" / "set.jsonl") in str(error.value)
        assert not list((tmp_path / "data").iterdir())


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 12)
    | st.floats()
    | st.text(st.characters(codec=None), max_size=5)
    | st.sampled_from(["A", "B", "#### 5", "####", "f", "a\nb"]),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(
            st.sampled_from(["label", "text", "stem", "choices"]) | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
#: Users' own rows.
_OWN_ROWS: list[dict[str, object]] = [
    {"prompt": "p", "answer": 4, "id": 1, "category": "c"},
    {"messages": [{"role": "user", "content": "m"}], "answer": "4"},
    {"question": "q", "answer": "yes"},
]
_VALID_ROWS = [*(row for row, _ in FORMATS.values()), *_OWN_ROWS]
_FIELDS = sorted({name for row in _VALID_ROWS for name in row})
_ROWS = st.dictionaries(st.sampled_from(_FIELDS) | st.text(max_size=3), _VALUES, max_size=7)
#: Valid rows with some fields replaced, which get further than arbitrary objects.
_CHANGED_ROWS = st.tuples(
    st.sampled_from(_VALID_ROWS),
    st.dictionaries(st.sampled_from(_FIELDS), _VALUES, max_size=2),
).map(lambda pair: {**pair[0], **pair[1]})


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(row=_ROWS | _CHANGED_ROWS)
def test_any_object_gives_a_question_or_a_one_line_error(
    row: dict[str, object], tmp_path: Path
) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(row))
    try:
        (question,) = read_questions(path)
    except QuestionError as error:
        message = str(error)
        assert message.startswith(f"{path}, line 1: ")
        assert len(message.splitlines()) == 1
        message.encode()
    else:
        assert isinstance(question, Question)
        assert question.turns
        assert all(isinstance(turn, str) and turn.strip() for turn in question.turns)
        json.dumps([question.question_id, question.category, question.reference]).encode()


def test_balanced_subset_takes_the_first_of_each_category() -> None:
    """A larger one holds the smaller ones; otherwise earlier answers could not be used."""
    for categories, count, expected in (
        ("aaaaaabbbbbbcccccc", 6, [0, 1, 6, 7, 12, 13]),
        ("aaaaaabbbbbbcccccc", 99, list(range(18))),
        ("aabbccddeeffgghhiijj", 5, [0, 4, 8, 12, 16]),  # not only the first categories
        ("abbbbcccc", 7, [0, 1, 2, 3, 5, 6, 7]),  # the share of a small one goes to the others
        ("abababab", 4, [0, 1, 2, 3]),
    ):
        questions = [Question(at, name, ("?",)) for at, name in enumerate(categories)]
        found = [
            [item.question_id for item in balanced_subset(questions, size)]
            for size in (count, *range(1, len(questions) + 1))
        ]
        assert found[0] == expected
        before: set[int | str] = set()
        for ids in found[1:]:
            assert (len(ids), ids) == (len(before) + 1, sorted(ids))
            assert before < set(ids)
            before = set(ids)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    compressed = gzip.compress(b'{"question_id": 1, "turns": ["a"]}\n')
    for name, content in [
        ("q.tar", b"no archive"),
        ("q.csv", b'"' + b"a" * 200_000 + b'",1,2,3,4,A\n'),
        ("q.jsonl.gz", compressed[:-9]),
        ("q.jsonl.gz", b"not compressed"),
        ("q.jsonl", b'{"question_id": 1, "turns": ["\xff"]}\n'),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(QuestionError, match=f"{name} is damaged"):
            read_questions(tmp_path / name)


def test_bundled_edits_ask_for_the_same_number_in_every_turn() -> None:
    found = find_questions("bundled-edits", 5, seed=4)
    assert [item.question_id for item in found] == [0, 1, 2, 3, 4]
    assert find_questions("bundled-edits", 3, seed=4) == found[:3]
    for item in found:
        assert (item.category, item.scored_by, len(item.turns)) == ("bundled-edits", "number", 3)
        numbers = [re.findall(r"\d+", turn) for turn in item.turns]
        assert numbers[0] == numbers[1] == numbers[2]
        assert len(set(item.turns)) == 3
