"""The generator of word problems: correct arithmetic and disjoint splits."""

from __future__ import annotations

import itertools
import random
import re
from functools import lru_cache

from eagle_fsd.bundled.problems import (
    MAX_RESULT,
    MAX_STEPS,
    MIN_STEPS,
    PEOPLE,
    Problem,
    chats,
    edited_problems,
    problems,
    small_talk,
    split_of,
)

EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


@lru_cache
def sample() -> list[Problem]:
    return problems("train", 500, seed=3)


def test_equations_are_correct_and_lead_to_the_answer() -> None:
    for problem in sample():
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
            assert 0 < exact <= MAX_RESULT
        assert int(equations[-1][3]) == problem.final
        assert problem.answer.endswith(f"\n#### {problem.final}")


def test_numbers_come_from_the_question_or_an_earlier_equation() -> None:
    words = {"twice": 2, "three times": 3, "four times": 4}
    for problem in sample():
        known = {int(number) for number in re.findall(r"\d+", problem.question)}
        known |= {value for word, value in words.items() if word in problem.question}
        for left, _, right, result in EQUATION.findall(problem.answer):
            assert {int(left), int(right)} <= known, problem
            known.add(int(result))


def test_texts_contain_no_template_syntax() -> None:
    rng = random.Random(0)
    texts = [text for problem in sample() for text in (problem.question, problem.answer)]
    texts += [text for _ in range(200) for text in small_talk(rng)]
    assert not [text for text in texts if re.search(r"[\[\]{}|]|  | [.,?]|\bNone\b", text)]
    assert all(item.question[0].isupper() and item.question[-1] == "?" for item in sample())


def test_problems_vary_with_the_seed_alone() -> None:
    assert {problem.steps for problem in sample()} == set(range(MIN_STEPS, MAX_STEPS + 1))
    assert len({problem.question for problem in sample()}) == len(sample())
    openings = {tuple(problem.answer.split()[:5]) for problem in sample()}
    assert len(openings) > len(sample()) // 2
    signs = {sign for problem in sample() for _, sign, _, _ in EQUATION.findall(problem.answer)}
    assert signs == set("+-*/")
    random.seed(0)
    first = problems("test", 20, seed=1)
    assert first != problems("test", 20, seed=2)
    random.seed(1)
    assert problems("test", 40, seed=1)[:20] == first


def test_splits_are_disjoint() -> None:
    """Chats have one to three turns; their questions belong to the split, too."""
    test = {problem.question for problem in problems("test", 100, seed=3)}
    assert not test & {problem.question for problem in sample()}
    assert all(split_of(question) == "test" for question in test)
    turns, questions = set(), []
    for chat in itertools.islice(chats("train", 5), 500):
        assert [message["role"] for message in chat] == ["user", "assistant"] * (len(chat) // 2)
        turns.add(len(chat))
        questions += [item["content"] for item in chat if re.search("[Hh]ow many", item["content"])]
    assert turns == {2, 4, 6}
    questions = [question for question in questions if question[0].isupper() and len(question) > 60]
    assert questions
    assert all(split_of(question) == "train" for question in questions)


def test_edited_problems_differ_in_names_and_pronouns_only() -> None:
    """All versions belong to the split, and a larger count extends the list."""
    names = {person["name"] for person in PEOPLE}

    def masked(text: str) -> str:
        text = re.sub(r"\b(she|he|her|his)\b", "PRONOUN", text, flags=re.IGNORECASE)
        return re.sub(rf"\b({'|'.join(names)})\b", "NAME", text)

    edits = edited_problems("test", 30, versions=3, seed=2)
    assert edits[:10] == edited_problems("test", 10, versions=3, seed=2)
    assert len({versions[0].question for versions in edits}) == 30
    for versions in edits:
        assert len({problem.question for problem in versions}) == 3
        assert {split_of(problem.question) for problem in versions} == {"test"}
        assert len({(problem.final, problem.steps) for problem in versions}) == 1
        assert len({masked(problem.question) for problem in versions}) == 1
        assert len({masked(problem.answer) for problem in versions}) == 1
