"""Prompts for a judge, and ratings in its replies."""

from __future__ import annotations

from pathlib import Path

import pytest
from published import published
from stub_judge import PROMPTS, QUESTIONS

from eagle_fsd.evaluation.judge.prompts import JudgeError, JudgePrompts, parse_rating
from eagle_fsd.evaluation.questions.formats import read_questions
from eagle_fsd.evaluation.questions.question import Question

pytestmark = pytest.mark.usefixtures("judge_data")


def test_prompts_depend_on_category_and_turn() -> None:
    """Question 102 has no reference answer, so its prompt has none."""
    prompts = JudgePrompts.load(QUESTIONS)
    answers = ["one {x}", "two"]
    filled = [prompts.fill(question, 1, answers) for question in QUESTIONS]
    filled += [prompts.fill(question, 2, answers) for question in QUESTIONS[:3]]
    assert [(prompt.name, prompt.system, prompt.user) for prompt in filled] == [
        ("single-v1", "Judge.", "Q write A one {x}"),
        ("single-math-v1", "Judge.", "Q add R right {1} A one {x}"),
        ("single-v1", "Judge.", "Q multiply A one {x}"),
        ("single-v1", "Judge.", "Q greet A one {x}"),
        ("single-v1-multi-turn", "Both.", "Q write A one {x} Q again A two"),
        (
            "single-math-v1-multi-turn",
            "Both.",
            "R right {1} R right 2 Q add A one {x} Q subtract A two",
        ),
        ("single-v1-multi-turn", "Both.", "Q multiply A one {x} Q divide A two"),
    ]
    other = ["three", "four"]
    pairs = [
        prompts.fill(question, turn, answers, other)
        for question in QUESTIONS[:2]
        for turn in (1, 2)
    ]
    assert [(prompt.name, prompt.user) for prompt in pairs] == [
        ("pair-v2", "Q write A one {x} B three"),
        ("pair-v2-multi-turn", "Q write A one {x} B three Q again A two B four"),
        ("pair-math-v1", "Q add R right {1} A one {x} B three"),
        (
            "pair-math-v1-multi-turn",
            "R right {1} R right 2 Q add A one {x} B three Q subtract A two B four",
        ),
    ]


def test_references_are_used_by_category_and_read_only_if_needed(judge_data: Path) -> None:
    for category in ("math", "reasoning", "coding", "arena-hard-200", "stem"):
        question = Question(101, category, ("add",))
        expected = "single-v1" if category == "stem" else "single-math-v1"
        assert JudgePrompts.load([question]).fill(question, 1, ["2"]).name == expected
    (judge_data / "mt_bench_reference_gpt4.jsonl").unlink()
    assert JudgePrompts.load([QUESTIONS[0]]).references == {}


def test_invalid_files_are_named(judge_data: Path) -> None:
    prompts, references = "judge_prompts.jsonl", "mt_bench_reference_gpt4.jsonl"
    for file, line, message in [
        (references, '{"question_id": 1}', "not a FastChat answer"),
        (prompts, "{", f"{prompts}, line 1: not a JSON object with 'name'"),
        (prompts, '{"name": "x"}', f"prompt single-v1 of {prompts}"),
    ]:
        (judge_data / file).write_text(line + "\n")
        questions = QUESTIONS if file == references else QUESTIONS[:1]
        with pytest.raises(JudgeError, match=message):
            JudgePrompts.load(questions).fill(questions[0], 1, ["x"])


def test_published_prompts_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The templates and the positions of their fields, for all of MT-bench."""
    names = ("judge_prompts.jsonl", "mt_bench_reference_gpt4.jsonl", "mt_bench_question.jsonl")
    *_, file = map(published, names)
    monkeypatch.setenv("EAGLE_FSD_DATA", str(file.parent))
    questions = read_questions(file)
    prompts = JudgePrompts.load(questions)
    answers = ["<answer 1>", "<answer 2>"]
    filled = {
        (q.question_id, turn): prompts.fill(q, turn, answers) for q in questions for turn in (1, 2)
    }
    found = [prompt.name for prompt in filled.values()]
    assert [found.count(name) for name in PROMPTS] == [50, 30, 50, 30, 0, 0, 0, 0]
    turns = {question.question_id: question.turns for question in questions}
    first, second = filled[81, 1], filled[111, 2]
    assert first.user.startswith("[Instruction]\nPlease act as an impartial judge")
    assert first.user.endswith(
        f"[Question]\n{turns[81][0]}\n\n[The Start of Assistant's Answer]\n<answer 1>\n"
        "[The End of Assistant's Answer]"
    )
    order = [turns[111][0], prompts.references[111][0], turns[111][1], prompts.references[111][1]]
    positions = [second.user.index(part) for part in [*order, *answers]]
    assert positions == sorted(positions)


def test_parse_rating() -> None:
    ratings: dict[str, float] = {"Rating: [[7]]": 7, "Rating: [[7.5]]": 7.5, "[8]": 8}
    ratings |= {"see [1]; Rating: [[9]]": 9, "[[3]], no, [[4]]": 3}
    unrated = ["[[11]]", "[[0]]", "[[0.5]]", "[[-3]]", "[[8/10]]", "Eight.", ""]
    unrated.append(f"[[{'9' * 5000}]]")
    for judgment, score in (ratings | dict.fromkeys(unrated, -1)).items():
        assert parse_rating(judgment) == score
        assert isinstance(parse_rating(judgment), type(score))
