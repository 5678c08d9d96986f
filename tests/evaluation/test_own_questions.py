"""Users' own question files: formats, graders, system prompts and worked examples."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pair_answers import answerer

from eagle_fsd import EagleFSD, OptionsError
from eagle_fsd.evaluation import EvaluationConfig, EvaluationRequest, evaluate
from eagle_fsd.evaluation.completion import CompletionTemplate, evaluation_template
from eagle_fsd.evaluation.graders import GRADERS, GraderError, find_grader
from eagle_fsd.evaluation.methods import EXACT
from eagle_fsd.evaluation.questions.formats import FORMATS, QuestionError, read_questions
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.questions.sets import (
    QuestionSetError,
    bundled_questions,
    requested_questions,
)
from eagle_fsd.evaluation.scoring import score
from eagle_fsd.utils.chat_templates import (
    FastChatTemplate,
    TokenizerTemplate,
    encode_prompt,
    load_chat_template,
)
from eagle_fsd.utils.files import read_jsonl

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Name a river."},
]


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def request(path: Path | str, **options: Any) -> EvaluationRequest:
    return EvaluationRequest.from_dict({"questions": str(path), **options})


# -- formats ---------------------------------------------------------------------------------------


def test_prompts_questions_and_chats_are_read(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "id": "a", "category": "c", "answer": 4}, {"prompt": "q", "id": "b"}]
    first, second = read_questions(write(tmp_path / "q.jsonl", *rows))
    assert (first.question_id, first.category, first.turns) == ("a", "c", ("p",))
    assert (first.scored_by, first.answer) == ("number", "4")
    assert (second.category, second.scored_by, second.answer) == ("general", "", None)
    rows = [{"question": "q", "answer": "Lima"}, {"question": "r", "answer": "1/2"}]
    found = read_questions(write(tmp_path / "q.jsonl", *rows))
    assert [item.question_id for item in found] == [0, 1]
    assert [item.scored_by for item in found] == ["exact", "number"]
    assert found[0].row == rows[0]
    scored: list[tuple[object, str]] = [
        # Lists, and names that consist of digits, are not numbers.
        *((answer, "exact") for answer in ("3, 4", "1,2", "10 500", "3e45678901")),
        *((answer, "number") for answer in ("1,234", "$5", "5 \u20ac", "50%", 1e20, "-2 1/2")),
    ]
    for answer, scored_by in scored:
        (one,) = read_questions(write(tmp_path / "q.jsonl", {"prompt": "p", "answer": answer}))
        assert one.scored_by == scored_by
        assert scored_by == "number" or score(one, str(answer)) is True
    (chat,) = read_questions(write(tmp_path / "q.jsonl", {"messages": CHAT, "answer": "Rhine"}))
    assert chat.turns == ("Name a river.",)
    assert (chat.opening(), chat.first_chat()) == (CHAT[:-1], CHAT)


def test_text_files_and_arrays_are_read(tmp_path: Path) -> None:
    content = b"Name a river.\n\n[1] is a list. \r\n{x} is not JSON"
    (tmp_path / "q.txt").write_bytes(content)
    (tmp_path / "q.txt.gz").write_bytes(gzip.compress(content))
    for name in ("q.txt", "q.txt.gz"):
        turns = [item.turns for item in read_questions(tmp_path / name)]
        assert turns == [("Name a river.",), ("[1] is a list. ",), ("{x} is not JSON",)]
    rows = [{"prompt": 'two\n "lines], [', "answer": 4}, {"prompt": "q"}]
    lines = write(tmp_path / "q", *rows)
    for indent in (None, 2):
        (tmp_path / "q.json").write_text("\n" + json.dumps(rows, indent=indent))
        assert read_questions(tmp_path / "q.json") == read_questions(lines)


def test_invalid_files_and_rows_are_named(tmp_path: Path) -> None:
    cases: list[tuple[str, str, str]] = [
        ("q.json", '[\n {"prompt": "p"},\n {"prompt": ""}]', 'item 2: "prompt" must not be blank'),
        ("q.json", '[\n {"prompt": "p"}\n {"prompt": "p"}]', "line 3: not JSON (Expecting ','"),
        ("q.json", '[{"prompt": "p"}] [1]', "line 1: not JSON (Extra data)"),
        ("q.json", "[]", "contains no questions"),
        ("q.json", "[" * 100_000, "line 1: not JSON"),
        ("q.json", "[" + "1" * 5000 + "]", "line 1: not JSON"),
        ("q.txt", 'River?\n{"prompt": "p"}', "line 2: a JSON object; rename the file to"),
        (
            "q.jsonl",
            '{"question": "q", "answer": "4"}\n{"question": "q", "answer": "#### 4"}',
            "line 2: the row has the format 'GSM8K', but the rows before it have 'question'",
        ),
    ]
    rows: list[tuple[dict[str, Any], str]] = [
        ({"prompt": 5}, '"prompt" must be a string'),
        ({"prompt": "p", "answer": True}, '"answer" must be a number or a string'),
        ({"prompt": "p", "id": 1.5}, '"id" must be an integer or a string'),
        ({"prompt": "p", "category": 5}, '"category" must be a string'),
        ({"question": "q"}, "'answer' is missing"),
        ({"messages": CHAT[:3]}, 'the last of "messages" must be a user\'s'),
        ({"messages": [{"role": "user", "content": " "}]}, "and not blank"),
        ({"messages": {"role": "user"}}, '"messages" must be a list of objects'),
        ({"messages": [{"role": "tool", "content": "x"}]}, 'must have a "role"'),
        ({"messages": [{"role": "user", "content": ["x"]}]}, 'a string "content"'),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "lone surrogate"),
    ]
    cases += [("q.jsonl", json.dumps(row), reason) for row, reason in rows]
    for name, content, reason in cases:
        (tmp_path / name).write_text(content)
        with pytest.raises(QuestionError) as error:
            read_questions(tmp_path / name)
        assert str(error.value).startswith(str(tmp_path / name))
        assert reason in str(error.value)


def test_formats_are_listed_with_examples(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    for item in FORMATS:
        (tmp_path / "q.jsonl").write_text(item.example)
        assert len(read_questions(tmp_path / "q.jsonl")) == 1
    status, text, _ = run("evaluate", "--formats")
    assert status == 0
    assert all(item.name in text and item.example in text for item in FORMATS)
    assert all(name in text for name in GRADERS)
    status, text, _ = run("evaluate", "--formats", "--json")
    assert status == 0
    assert [item["name"] for item in json.loads(text)["formats"]] == [item.name for item in FORMATS]


# -- graders ---------------------------------------------------------------------------------------


def test_built_in_graders() -> None:
    for grader, answer, right, wrong in [
        ("exact", "Lima", ["Lima", " Lima\n", "<think>Rome</think>\nLima"], ["lima", "Lima.", ""]),
        ("exact", "4", ["4"], ["The answer is 4.", "4.0"]),
        ("regex", r"(?i)\blima\b", ["It is LIMA.", "lima"], ["limas", "", "lima</think>Rome"]),
        ("number", "1/2", ["The answer is 0.5.", "#### 1/2"], ["It is 2.", ""]),
        ("strict-match", "1,234", ["#### 1234.\n5"], ["####1234", "#### 8\n#### 1234", ""]),
        ("flexible-extract", "7", ["It is $7.", "8\n7\nQuestion: 9"], ["7\nin 2 steps", "7.00"]),
    ]:
        question = find_grader(grader).apply(Question(0, "c", ("q",), answer=answer))
        assert [score(question, text) for text in right] == [True] * len(right)
        assert [score(question, text) for text in wrong] == [False] * len(wrong)


def test_a_grader_replaces_the_default_one(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", {"prompt": "p", "answer": "4"}, {"prompt": "q"})
    for name in GRADERS:
        found = requested_questions(request(path, grader=name))
        assert [item.scored_by for item in found] == [name, ""]
    (bundled,) = requested_questions(request("bundled", count=1, grader="exact"))
    assert bundled.scored_by == "exact"
    code = {"task_id": "t", "prompt": "def f():", "entry_point": "f", "test": "x"}
    for grader, row, reason in [
        ("regex", {"prompt": "p", "answer": "("}, '"answer" is not a regular expression'),
        ("number", {"prompt": "p", "answer": "four"}, '"answer" must be a number; got'),
        ("strict-match", {"prompt": "p", "answer": "B"}, '"answer" must be a number; got'),
        ("exact", code, "answers with code cannot be graded by exact"),
    ]:
        path = write(tmp_path / "q.jsonl", row)
        with pytest.raises(QuestionError, match=f"line 1: {reason}"):
            requested_questions(request(path, grader=grader))


GRADER = """
def contains(answer, question):
    return question["answer"].lower() in answer.lower()

def unscored(answer, question):
    return None if question["level"] > 1 else 1.0

def fields(answer, question):
    return sorted(question) == ["answer", "category", "level", "prompt", "question_id", "turns"]

def pickled(answer, question):
    import pickle

    return pickle.loads(pickle.dumps(contains)) is contains

def half(answer, question):
    return 0.5

def several(answer, question):
    import torch

    return torch.tensor([1, 0])

def fails(answer, question):
    return question["missing"]

def short(answer):
    return True

number = 5
"""


def test_a_grader_function_gets_the_answer_and_the_row(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GRADER)
    rows = [{"prompt": "p", "answer": "Lima", "level": 1}, {"prompt": "p", "level": 2}]
    path = write(tmp_path / "q.jsonl", *rows)

    def questions(name: str) -> list[Question]:
        return requested_questions(request(path, grader=f"{tmp_path}/mine.py:{name}"))

    first, second = questions("contains")
    assert first.scored_by == "function"
    assert [score(first, text) for text in ("It is LIMA", "Rome", "")] == [True, False, False]
    assert [score(item, "") for item in questions("unscored")] == [True, None]
    assert score(questions("fields")[0], "") is True
    assert score(questions("pickled")[0], "") is True  # as for a pool of processes
    # In published formats, too; an "id", a "category" and an "answer" are those of any row.
    for row in (
        {"turns": ["p", "q"], "question_id": "my-7", "answer": 4},
        {"question": "q", "answer": "#### 4", "id": "my-7"},
        {"question": "q", "choices": ["3", "4"], "answer": "B", "id": "my-7"},
    ):
        row = row | {"category": "mine", "level": 1}
        path = write(tmp_path / "q.jsonl", row)
        (found,) = questions("unscored")
        assert score(found, "") is True
        assert (found.question_id, found.category) == ("my-7", "mine")
        assert found.answer == ("B" if "choices" in row else "4")
    path = write(tmp_path / "q.jsonl", *rows)
    for name, reason in [
        ("half", "must return True, False or None; got 0.5"),
        ("several", r"must return True, False or None; got tensor\(\[1, 0\]\)"),
        ("fails", "KeyError: 'missing'"),
        ("short", "TypeError"),
    ]:
        with pytest.raises(GraderError, match=f"{name} failed on question 0: .*{reason}"):
            score(questions(name)[0], "")
    with pytest.raises(GraderError, match="failed on question 1: AttributeError"):
        score(second, "")

    assert score(find_grader("operator:eq").apply(Question(0, "c", ("q",))), "a") is False
    (tmp_path / "broken.py").write_text("def f(:")
    for grader, reason in [
        (
            "nonsense",
            "--grader must be one of exact, regex, number, strict-match, flexible-extract, or"
            " FILE.py:FUNCTION; got 'nonsense'",
        ),
        ("missing.py:f", "cannot import 'missing.py'"),
        ("no_such_module:f", "cannot import 'no_such_module' .ModuleNotFoundError"),
        (f"{tmp_path}/mine.py:other", "mine.py has no function 'other'"),
        (f"{tmp_path}/mine.py:number", "mine.py has no function 'number'"),
        (f"{tmp_path}/broken.py:f", "cannot import .*broken.py' .SyntaxError"),
    ]:
        with pytest.raises(OptionsError, match=reason):
            find_grader(grader)


# -- system prompt and worked examples -------------------------------------------------------------


def test_system_prompts_and_worked_examples_precede_the_question(tmp_path: Path) -> None:
    """The examples are the first questions with an answer, and are not asked."""
    path = write(tmp_path / "q.jsonl", {"messages": CHAT}, {"messages": CHAT[1:]})
    own, given = requested_questions(request(path, system="Be kind."))
    assert own.first_chat() == CHAT
    assert given.first_chat() == [{"role": "system", "content": "Be kind."}, *CHAT[1:]]
    (bundled,) = requested_questions(request("bundled", count=1, system="Be kind."))
    assert bundled.opening() == [{"role": "system", "content": "Be kind."}]
    rows: list[dict[str, Any]] = [{"messages": CHAT[-1:], "answer": str(n)} for n in range(5)]
    del rows[0]["answer"]
    rows[3]["messages"] = CHAT
    found = requested_questions(request(write(tmp_path / "q.jsonl", *rows), few_shot=2))
    assert [item.question_id for item in found] == [0, 3, 4]
    shots = [
        message
        for answer in "12"
        for message in (CHAT[-1], {"role": "assistant", "content": answer})
    ]
    assert found[0].opening() == shots
    assert found[1].first_chat() == [CHAT[0], *shots, *CHAT[1:]]


def test_a_larger_count_keeps_examples_and_questions(tmp_path: Path) -> None:
    rows = [{"prompt": str(n), "answer": n, "category": "ab"[n % 2]} for n in range(9)]
    path = write(tmp_path / "q.jsonl", *rows)
    few = requested_questions(request(path, few_shot=3, count=2))
    more = requested_questions(request(path, few_shot=3, count=4))
    assert (len(few), len(more)) == (2, 4)
    by_id = {item.question_id: item for item in more}
    assert all(by_id[item.question_id] == item for item in few)
    others = requested_questions(request(path, few_shot=3, count=2, skip=2))
    assert {item.question_id for item in [*few, *others]} == by_id.keys()
    with pytest.raises(QuestionSetError, match="nor a regular expression"):
        requested_questions(request(path, few_shot=3, grader="regex"))
    with pytest.raises(QuestionSetError, match=r"--skip 6 leaves no question: .* has 6 to ask"):
        requested_questions(request(path, few_shot=3, skip=6))
    with pytest.raises(QuestionSetError, match=r"requires 10 questions, 9 of them .* has 9, 9 of"):
        requested_questions(request(path, few_shot=9, skip=1))
    path = write(tmp_path / "q.jsonl", {"question_id": 0, "turns": ["a", "b"]})
    with pytest.raises(QuestionSetError, match="has 1, 0 of them"):
        requested_questions(request(path, few_shot=1))
    (question,) = requested_questions(request("bundled", few_shot=1, count=1))
    (solution,) = bundled_questions(1)
    shot = [message["content"] for message in question.opening()]
    assert shot == [solution.turns[0], solution.answer]


# -- evaluation ------------------------------------------------------------------------------------


def run_own(path: Path, out: Path, **options: Any) -> Any:
    report = evaluate(
        request(path, out=out, **options), EvaluationConfig(max_new_tokens=4), ["exact"]
    )
    assert report is not None
    return report


@pytest.mark.usefixtures("no_figures")
def test_own_questions_are_answered_with_their_context(model: EagleFSD, tmp_path: Path) -> None:
    """Another grader scores the same answers; another system prompt is refused."""
    path, out = tmp_path / "q.jsonl", tmp_path / "out"
    write(path, {"messages": CHAT, "answer": "no such text"}, {"messages": CHAT[-1:]})
    report = run_own(path, out, system="Be kind.")
    (row,) = report["rows"]
    assert (row["answers"], row["accuracy"], row["harness"]) == (2, 0.0, None)
    assert report["about"]["system"] == "Be kind."
    template = load_chat_template(model.tokenizer)
    chats = [CHAT, [{"role": "system", "content": "Be kind."}, CHAT[-1]]]
    for record, chat in zip(read_jsonl(out / "exact.jsonl"), chats, strict=True):
        prompt = encode_prompt(chat, model.tokenizer, template)[0].tolist()
        assert record["choices"][0]["prompt_ids"] == [prompt]
    assert "System prompt: 'Be kind.'." in (out / "report.md").read_text()
    before = (out / "exact.jsonl").read_bytes()
    (tmp_path / "mine.py").write_text("def always(answer, question):\n    return True\n")
    grader = f"{tmp_path}/mine.py:always"
    assert run_own(path, out, system="Be kind.", grader=grader)["rows"][0]["accuracy"] == 1.0
    assert (out / "exact.jsonl").read_bytes() == before
    with pytest.raises(ValueError, match=r"system was 'Be kind\.', is None"):
        run_own(path, out)
    late = [CHAT[1], CHAT[2], CHAT[0], CHAT[3]]  # FastChat's templates begin with the system turn
    write(path, {"messages": CHAT}, {"messages": late})
    with pytest.raises(ValueError, match="question 1: a FastChat template has no place for"):
        run_own(path, tmp_path / "late", chat_template="vicuna_v1.1")
    assert not list((tmp_path / "late").glob("*.jsonl"))


# -- base models -----------------------------------------------------------------------------------


def test_a_base_model_continues_examples_or_the_prompt_itself(model: EagleFSD) -> None:
    tokenizer = copy.copy(model.tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"has no chat template; .* --few-shot for a base"):
        evaluation_template(tokenizer)
    assert isinstance(evaluation_template(model.tokenizer, few_shot=3), TokenizerTemplate)
    assert isinstance(evaluation_template(tokenizer, "vicuna_v1.1", 3), FastChatTemplate)
    dated = copy.copy(model.tokenizer)
    dated.chat_template = "{{ strftime_now('%d %b %Y') }}: {{ messages[0].content }}"
    assert evaluation_template(dated).render(CHAT) == "01 Jan 2026: Be brief."
    labeled = evaluation_template(tokenizer, few_shot=1)
    assert labeled.render(CHAT, add_generation_prompt=True) == (
        "Be brief.\n\nQuestion: Hello!\nAnswer: Hi.\n\nQuestion: Name a river.\nAnswer:"
    )
    assert labeled.stop == ("\nQuestion:",)
    raw = evaluation_template(tokenizer, few_shot=0)
    assert raw.render(CHAT[-1:], add_generation_prompt=True) == "Name a river."
    assert raw.render(CHAT) == "Be brief.\nHello!\nHi.\nName a river."
    assert (raw.stop, raw.adds_special_tokens) == ((), True)


def test_a_base_model_sees_the_examples(model: EagleFSD, tmp_path: Path) -> None:
    question = Question(0, "c", ("What?",), context=(("user", "Who?"), ("assistant", "Tim")))
    asked = answerer(model, tmp_path, CompletionTemplate(1), max_new_tokens=4)
    (record,) = asked.answer([question], EXACT)
    prompt = model.tokenizer("Question: Who?\nAnswer: Tim\n\nQuestion: What?\nAnswer:").input_ids
    assert record["choices"][0]["prompt_ids"] == [prompt]
