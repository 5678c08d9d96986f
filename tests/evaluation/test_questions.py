"""Question files in their published formats."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published import published

from eagle_fsd.evaluation.questions.formats import QuestionError, bundled_questions, read_questions
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.questions.sets import QuestionSetError, find_questions, spread


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
    questions = read_questions(published(name))
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
        (
            '{"question": "q", "choices": ["x", "y"], "answer": "Z"}',
            "line 2: \"answer\" is 'Z', none of",
        ),
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
#: A format by its name; its fields, and a value of each that is none.
FORMATS = {
    "turns": (TURNS, {
        "question_id": [None, 1.5, [1], True],
        "turns": [None, "hi", {}, [1], [], [""], ["a", None]],
        "category": [5, ["c"]], "reference": [5, {}, [5], [[5]]],
    }),
    "gsm8k": (GSM8K, {"question": [None, 5, ["q"], "", " "],
        "answer": [None, 4, ["#### 4"], "4", "#### four", "####", "#### nan", "#### 1/0"]}),
    "commonsense-qa": (COMMONSENSE, {
        "id": [None, 1.5, ["a"]], "answerKey": [None, 0, "", "C", "a", "AB", ["A"]]}),
    "mmlu": (MMLU, {
        "question": [None, 5, []], "subject": [5, ["math"]],
        "choices": [None, 5, "abcd", {"a": 1}, [], ["3"], ["3", 4], list("123456"), [None] * 4],
        "answer": [None, 4, 9, -1, 1.0, True, "Z", "", "BC", [1]],
    }),
    "humaneval": (HUMAN_EVAL, {
        "task_id": [None, 1.5, []], "prompt": [None, 5, ["def f()"], ""],
        "entry_point": [None, 5, "", "f()", "a b", "def"], "test": [None, 5, [], ""],
        "canonical_solution": [5, []],
    }),
}  # fmt: skip
WRONG_FIELDS = [
    (kind, field, value)
    for kind, (_, fields) in FORMATS.items()
    for field, values in fields.items()
    for value in values
]
OPTIONAL = {"category", "reference", "subject", "canonical_solution"}


@pytest.mark.parametrize("kind", FORMATS)
def test_the_lines_that_are_to_be_spoilt_are_questions(kind: str, tmp_path: Path) -> None:
    row, fields = FORMATS[kind]
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(row))
    assert len(read_questions(path)) == 1
    for field in OPTIONAL & fields.keys():
        path.write_text(json.dumps({key: row[key] for key in row if key != field}))
        assert len(read_questions(path)) == 1
        path.write_text(json.dumps({**row, field: None}))
        assert len(read_questions(path)) == 1


@pytest.mark.parametrize(("kind", "field", "value"), WRONG_FIELDS)
def test_a_field_of_a_wrong_type_is_named(
    kind: str, field: str, value: object, tmp_path: Path
) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text("\n" + json.dumps({**FORMATS[kind][0], field: value}) + "\n")
    with pytest.raises(QuestionError) as error:
        read_questions(path)
    assert f"{path}, line 2: " in str(error.value)
    assert f'"{field}"' in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_field_that_is_missing_is_named(kind: str, tmp_path: Path) -> None:
    row, fields = FORMATS[kind]
    for field in fields.keys() - OPTIONAL - {"turns", "choices", "question", "entry_point"}:
        path = tmp_path / "q.jsonl"
        path.write_text(json.dumps({key: row[key] for key in row if key != field}))
        with pytest.raises(QuestionError, match=f"line 1: '{field}' is missing"):
            read_questions(path)


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ({"stem": 5, "choices": CHOICES}, '"stem" is not a text'),
        ({"choices": CHOICES}, "'stem' is missing"),
        ({"stem": "q"}, "'choices' is missing"),
        ({"stem": "q", "choices": None}, '"choices" is not a list'),
        ({"stem": "q", "choices": []}, '"choices" is not a list'),
        ({"stem": "q", "choices": ["sea", "sky"]}, '"choices" is not a list'),
        ({"stem": "q", "choices": [{"text": "sea"}] * 2}, "'label' is missing"),
        ({"stem": "q", "choices": [{"label": "A"}] * 2}, "'text' is missing"),
        ({"stem": "q", "choices": [{"label": "A", "text": 1}] * 2}, '"text" is not a text'),
        ({"stem": "q", "choices": [{"label": 1, "text": "x"}] * 2}, '"label" is not a text'),
        ({"stem": "q", "choices": [{"label": "1", "text": "x"}] * 2}, "labels"),
        ({"stem": "q", "choices": [{"label": "A", "text": "x"}] * 2}, "labels"),
    ],
)
def test_what_is_wrong_inside_a_question_of_commonsense_qa(
    question: object, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({**COMMONSENSE, "question": question}))
    with pytest.raises(QuestionError, match=f"line 1: .*{reason}"):
        read_questions(path)


def test_ids_are_all_numbers_or_all_texts(tmp_path: Path) -> None:
    """FastChat sorts by them."""
    path = tmp_path / "q.jsonl"
    lines = [json.dumps({**TURNS, "question_id": key}) for key in (7, 8, "7")]
    path.write_text("\n".join(lines))
    with pytest.raises(QuestionError, match=r'line 3: .*"question_id" is a text'):
        read_questions(path)


@pytest.mark.parametrize("name", ["q.jsonl", "q.jsonl.gz", "math_test.csv", "q.tar"])
@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_byte_order_mark_and_other_ends_of_lines_do_not_matter(
    name: str, ends: str, mark: str, tmp_path: Path
) -> None:
    lines = ['"2 + 2, say?",3,4,5,6,B'] * 2
    if "jsonl" in name:
        lines = [json.dumps({**TURNS, "question_id": key}) for key in (1, 2)]
    content = (mark + ends.join([*lines, ""])).encode()
    path = tmp_path / name
    if name.endswith(".tar"):
        with tarfile.open(path, "w") as archive:
            member = tarfile.TarInfo("data/test/math_test.csv")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    else:
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    questions = read_questions(path)
    assert [item.category for item in questions] == (["c"] if "jsonl" in name else ["math"]) * 2
    assert "\r" not in questions[0].turns[0]
    assert "\ufeff" not in questions[0].turns[0]


@pytest.mark.parametrize("name", ["q.jsonl", "q.jsonl.gz", "q.csv", "q.tar"])
def test_a_file_without_a_question_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name.endswith(".tar"):
        tarfile.open(path, "w").close()
    else:
        path.write_bytes(gzip.compress(b"") if name.endswith(".gz") else b"")
    with pytest.raises(QuestionError, match=f"{name} holds no question"):
        read_questions(path)


def test_the_line_of_a_csv_file_is_the_files_own(tmp_path: Path) -> None:
    """Also behind a field of several lines; in the archive, the file is named too."""
    content = b'"two\nlines",1,2,3,4,A\nq,1,2,3,4,F\n'
    (tmp_path / "math_test.csv").write_bytes(content)
    with pytest.raises(QuestionError, match=r"math_test.csv, line 3: .*\"answer\""):
        read_questions(tmp_path / "math_test.csv")
    with tarfile.open(tmp_path / "mmlu.tar", "w") as archive:
        member = tarfile.TarInfo("data/test/law_test.csv")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    with pytest.raises(QuestionError, match=r"mmlu.tar.*law_test.csv, line 3: .*\"answer\""):
        read_questions(tmp_path / "mmlu.tar")


def test_a_folder_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(QuestionSetError, match="is a folder"):
        find_questions(str(tmp_path))
    with pytest.raises(IsADirectoryError):
        read_questions(tmp_path)
    # One that is called like a set does not hide it.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EAGLE_FSD_DATA", str(tmp_path / "data"))
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "gsm8k_test.jsonl").write_text(json.dumps(GSM8K))
    assert len(find_questions("gsm8k")) == 1


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
_FIELDS = sorted({name for row, _ in FORMATS.values() for name in row})
_ROWS = st.dictionaries(st.sampled_from(_FIELDS) | st.text(max_size=3), _VALUES, max_size=7)
#: A question with some of its fields spoilt: comes further than any object does.
_SPOILT = st.tuples(
    st.sampled_from([row for row, _ in FORMATS.values()]),
    st.dictionaries(st.sampled_from(_FIELDS), _VALUES, max_size=2),
).map(lambda pair: {**pair[0], **pair[1]})


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(row=_ROWS | _SPOILT)
def test_any_object_is_a_question_or_an_error_of_one_line(
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


def test_an_object_nested_too_deep_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"turns": ' + "[" * 200_000 + "\n")
    with pytest.raises(QuestionError, match="line 1: not JSON"):
        read_questions(path)


def _of(*categories: str) -> list[Question]:
    return [Question(at, name, ("?",)) for at, name in enumerate(categories)]


def test_so_many_questions_of_several_categories_are_spread_over_them() -> None:
    """As many of each as of the others, in the file's order; of one category, the first."""
    questions = _of(*"aaaaaabbbbbbcccccc")
    assert [item.question_id for item in spread(questions, 6)] == [0, 1, 6, 7, 12, 13]
    assert [item.category for item in spread(questions, 3)] == ["a", "b", "c"]
    # Fewer than there are categories: not all from the head of the alphabet.
    names = [chr(97 + at // 2) for at in range(20)]
    assert [item.category for item in spread(_of(*names), 5)] == list("acegi")
    # A small category gives what it has, and the others the rest.
    assert [item.category for item in spread(_of(*"abbbbcccc"), 7)] == list("abbbccc")
    assert [item.question_id for item in spread(_of(*"aaaa"), 2)] == [0, 1]
    # In any order.
    assert [item.question_id for item in spread(_of(*"abababab"), 4)] == [0, 1, 2, 3]
    assert spread(questions, None) == questions
    assert spread(questions, 99) == questions
    for count in range(1, 18):
        assert len(spread(questions, count)) == count


def test_so_many_questions_of_mmlu_are_spread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tarfile.open(tmp_path / "mmlu.tar", "w") as archive:
        for subject in range(57):
            content = b"q,1,2,3,4,A\n" * (100 + 20 * subject)
            member = tarfile.TarInfo(f"data/test/subject{subject:02}_test.csv")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    monkeypatch.setenv("EAGLE_FSD_DATA", str(tmp_path))
    found = [item.category for item in find_questions("mmlu", 114)]
    assert {found.count(name) for name in found} == {2}
    assert len(set(found)) == 57
    assert len({item.category for item in find_questions("mmlu", 20)}) == 20


def test_so_many_questions_of_mt_bench_are_spread() -> None:
    questions = find_questions(str(published("mt_bench_question.jsonl")), 16)
    found = [item.category for item in questions]
    assert sorted(set(found)) == sorted(found[::2])
    assert len(set(found)) == 8


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("q.tar", b"no archive"),
        pytest.param("q.csv", b'"' + b"a" * 200_000 + b'",1,2,3,4,A\n', id="a field without end"),
        pytest.param(
            "q.jsonl.gz", gzip.compress(b'{"question_id": 1, "turns": ["a"]}\n')[:-9], id="cut off"
        ),
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
