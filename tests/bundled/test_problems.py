"""The generator of the bundled pair's world: its sums are right and its splits apart."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from eagle_fsd.bundled.problems import (
    LARGEST,
    STEPS,
    chats,
    final_number,
    generate_problem,
    problems,
    small_talk,
    split_of,
)

EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
SAMPLE = problems("train", 1500, seed=3)


def test_every_equation_holds_and_leads_to_the_answer() -> None:
    for problem in SAMPLE:
        equations = EQUATION.findall(problem.answer)
        assert len(equations) == problem.steps
        for left, sign, right, result in equations:
            exact = {
                "+": int(left) + int(right),
                "-": int(left) - int(right),
                "*": int(left) * int(right),
                "/": int(left) / int(right),
            }[sign]
            assert exact == int(result), problem
            assert 0 < exact <= LARGEST
        assert int(equations[-1][3]) == problem.final == final_number(problem.answer)
        assert problem.answer.endswith(f"\n#### {problem.final}")


def test_numbers_of_the_sum_come_from_the_question_or_an_earlier_line() -> None:
    words = {"twice": 2, "three times": 3, "four times": 4}
    for problem in SAMPLE:
        known = {int(number) for number in re.findall(r"\d+", problem.question)}
        known |= {value for word, value in words.items() if word in problem.question}
        for left, _, right, result in EQUATION.findall(problem.answer):
            assert {int(left), int(right)} <= known, problem
            known.add(int(result))


def test_no_grammar_shows_through() -> None:
    for problem in SAMPLE:
        for text in (problem.question, problem.answer):
            assert not re.search(r"[\[\]{}|]|  | [.,?]|\bNone\b", text), text
        assert problem.question[0].isupper()
        assert problem.question.endswith("?")


def test_all_step_counts_and_much_variety() -> None:
    assert {problem.steps for problem in SAMPLE} == set(range(STEPS[0], STEPS[1] + 1))
    assert len({problem.question for problem in SAMPLE}) == len(SAMPLE)
    openings = {tuple(problem.answer.split()[:5]) for problem in SAMPLE}
    assert len(openings) > len(SAMPLE) // 2
    signs = {sign for problem in SAMPLE for _, sign, _, _ in EQUATION.findall(problem.answer)}
    assert signs == set("+-*/")


def test_splits_never_overlap() -> None:
    test = {problem.question for problem in problems("test", 1500, seed=3)}
    assert not test & {problem.question for problem in SAMPLE}
    assert all(split_of(question) == "test" for question in test)
    told = itertools.chain.from_iterable(itertools.islice(chats("train", 5), 500))
    questions = [message["content"] for message in told if "how many" in message["content"].lower()]
    questions = [question for question in questions if question[0].isupper() and len(question) > 60]
    assert questions
    assert all(split_of(question) == "train" for question in questions)


def test_the_same_seed_gives_the_same_problems() -> None:
    assert problems("test", 20, seed=1) == problems("test", 20, seed=1)
    assert problems("test", 20, seed=1) != problems("test", 20, seed=2)
    assert problems("test", 40, seed=1)[:20] == problems("test", 20, seed=1)


def test_chats_alternate_and_some_have_several_turns() -> None:
    turns = set()
    for chat in itertools.islice(chats("train", 0), 400):
        assert [message["role"] for message in chat] == ["user", "assistant"] * (len(chat) // 2)
        turns.add(len(chat))
    assert turns == {2, 4, 6}


def test_small_talk_is_plain_text() -> None:
    rng = random.Random(0)
    for _ in range(200):
        for text in small_talk(rng):
            assert text
            assert not re.search(r"[\[\]{}|]", text)


@pytest.mark.parametrize(
    ("text", "number"),
    [("... = 5.\n#### 5", 5), ("#### 1\n#### -12", -12), ("#### 1,234", 1234), ("so 5", None)],
)
def test_final_number(text: str, number: int | None) -> None:
    assert final_number(text) == number


def test_a_problem_is_drawn_from_the_generator_alone() -> None:
    random.seed(0)
    first = generate_problem(random.Random(9))
    random.seed(1)
    assert generate_problem(random.Random(9)) == first
