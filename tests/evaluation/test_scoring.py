"""Scoring by number and letter."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published import published

from eagle_fsd.evaluation.code_execution.programs import build_program
from eagle_fsd.evaluation.questions.formats import read_questions
from eagle_fsd.evaluation.questions.question import LETTERS, Question
from eagle_fsd.evaluation.scoring import (
    final_letter,
    final_number,
    number_value,
    same_number,
    score,
)

#: Fields of a HumanEval question.
CODE = {"prompt": "def twice(values):\n", "entry_point": "twice"}


#: The final numbers of answers.
NUMBERS = {
    # The requested format. Headings do not match, and it takes precedence over later text.
    "so 3 + 4 = 7\n#### 7": "7",
    "#### 5 is wrong, again\n#### $1,234.50": "1234.50",
    "#### Step 3\nadd 40 and 2\n#### 42": "42",
    "#### Step 3\nso the answer is 42": "42",
    "#### 42\nI took 3 steps.": "42",
    "#### \\$42": "42",
    "#### \\boxed{42}": "42",
    "#### 42 eggs in 7 days": "42",
    "#### 42 (x = 3)": "42",
    "12 apples ####": "12",
    # Another question after the answer.
    "so 10\n#### 10\n\nQuestion: Tom has 3 pens and buys 4.\nAnswer: He has 7.\n#### 7": "10",
    "#### 10\nQ: Tom has 3 pens.\nA: The answer is 3.": "10",
    "The answer is 10.\n\nProblem 2: Tom has 3 pens.\nThe answer is 3.": "10",
    "The answer is 3.\n\nIn all, that is:\n\n#### 10": "10",
    "#### 10\n\nFind the area of a 3 by 4 rectangle.\nThe area is 12\n#### 12": "10",
    "#### 10\r\n \t\r\nTom has 3 pens.\n#### 3": "10",
    # Other forms.
    "It is \\boxed{42}, as 6 * 7 says in step 3": "42",
    "\\boxed{\\text{\\$1,050}}": "1050",
    "\\boxed{x = -3}": "-3",
    "The answer is 18 dollars for 2 days.": "18",
    "**Final answer:** **18** (after 3 steps)": "18",
    "To answer in percent: 3 of 4 is 75": "75",
    "So the answer is 20 - 5 = $15.": "15",
    "The answer is $3 \\times 1,000 = 3,000$, for 2 days": "3000",
    "The answer is 3. 2 + 2 = 4, so one less": "3",
    "<think>The answer is 9</think>It is 8": "8",
    # Signs.
    "It falls to -3 degrees": "-3",
    "between 20-30": "30",
    "between 20\u201330": "30",
    "it is (\u22125)": "-5",
    "COVID-19": "19",
    "a loss of -$5": "-5",
    "a loss of $-5": "-5",
    "In all =\n- 5 apples": "5",
    # Spellings of numbers.
    "\uff03\uff03\uff03\uff03 \uff11\uff0c\uff10\uff10\uff10": "1000",
    "1{,}234 in all": "1234",
    "12\u202f345": "12345",
    "it costs \u20ac1,234,567.": "1234567",
    "50\\%": "50",
    ".5": ".5",
    "#### 2 1/2": "2 1/2",
    "2\\frac12": "2 1/2",
    "-2\\frac{1}{2}": "-2 1/2",
    "\\boxed{-\\dfrac{3}4}, not 7": "-3/4",
    "\\boxed{\\frac{-3}{4}}, not 7": "-3/4",
    "#### $-\\frac{3}{4}$": "-3/4",
    "so $1-\\frac{1}{4}$": "1/4",
    "50 cm^{2}": "50",
    "####": None,
    "no number at all": None,
    "": None,
}


def test_final_number() -> None:
    for text, number in NUMBERS.items():
        assert final_number(text) == number, text


def test_same_number() -> None:
    same = [("18.00", "18"), ("1234", "1,234"), ("1/2", "0.5"), ("2 1/2", "2.5"), ("50%", "50")]
    same += [("-2 1/2", "-2.5"), ("\u22125", "-5"), ("0.3333333333", "1/3")]
    for first, second in same:
        assert same_number(first, second)
    others = [("18.5", "18"), (None, "18"), ("1/0", "1"), ("0.333", "1/3"), ("nan", "nan")]
    others += [("9" * 400, "8" * 400), ("9" * 5000, "9"), ("", ""), ("3, 4", "7")]
    for other, second in others:
        assert not same_number(other, second)


#: The letters that answers choose.
LETTERS_OF = {
    # Named as the answer; articles are no letters.
    "Answer: B": "B",
    "The answer is (c).": "C",
    "**Answer:** **D**": "D",
    "A is wrong, B too.\nAnswer: E": "E",
    "The answer is A because banks lend": "A",
    "The answer is b because": "B",
    "Answer:\n\nC": "C",
    "Answer: [B]": "B",
    "ANSWER: $B$": "B",
    "Answer: \\text{B}": "B",
    "The final answer is $\\boxed{C}$.": "C",
    "\\boxed{\\textbf{(C)}} and not D": "C",
    "Answer: \uff22": "B",
    "The correct answer is option B": "B",
    "The best choice would be (D), not E.": "D",
    "The answer to this question is C: sea": "C",
    '{"answer": "B"}': "B",
    "<answer>B</answer>": "B",
    "The answer is A. No: the answer is B.": "B",
    "<think>The answer is A</think>C": "C",
    "the answer is a bank (D)": "D",
    "Is the answer a bank? Answer: B": "B",
    "The answer is B, C is wrong": "B",
    "The answer is B and A is not": "B",
    # A whole answer, a line, or the beginning of an answer.
    "B": "B",
    "a": "A",
    "Banks lend.\n\n(B)": "B",
    # The only letter.
    "It's a bank, so C": "C",
    "I'd go with option D. A seems wrong.": "D",
    # Several letters, or no letter of a choice.
    **dict.fromkeys(
        [
            *("A and B", "A, B or C", "A) and B)", "A), B) or C)", "I think it's B or C"),
            *("Either A or D fits", "A and B are right, C is wrong"),
            *("The answer is C++", "The answer is e-mail", "The answer is D'Artagnan", "C++"),
            *("The answer is not A", "Apples and Bananas", "That answer a model", ""),
            *("The answer is a model of the earth", "A model is what is meant"),
        ]
    ),
}


def test_final_letter() -> None:
    for text, letter in LETTERS_OF.items():
        assert final_letter(text) == letter, text


def test_scoring_time_is_not_quadratic() -> None:
    """Repetitions of the beginnings of patterns, at least 8,000 characters of each."""
    question = Question("x", "humaneval", ("",), "code", "", row=CODE)
    parts = ["1,22", "answer is ", "the answer ", "\\boxed{", "```\n", "((", "#", "~~~\n"]
    parts += ["def twice(values):\n", "x = (\n", "    return [\n", "#### 1+1 ", "it's A, "]
    parts += ["A and B ", "#### 1\nfind ", "A) and B), ", "\n", "( ", "\\boxed{1 1"]
    for part in parts:
        start = time.process_time()
        final_number(part * 4000)
        final_letter(part * 4000)
        build_program(question, part * 4000)
        assert time.process_time() - start < 3, part
    assert score(Question(81, "writing", ("Write.",)), "Anything") is None  # without a reference


_PIECES = [
    *("####", "\\boxed{", "}", "answer", " is ", ":", "A", "a", "(", ")", "-", "$", ",", ".", "/"),
    *("12", "345", "\uff11", "\u00b2", "\u0663", "\ud800", "\0", "\n", " ", "    ", "```", "~~~"),
    *("def twice(values):\n", "return [1]\n", "import x", "from __future__ import division\n"),
    *("</think>", "if __name__ == '':\n", "twice = 1\n", "\r", '"""', "class A:", "twice"),
]


@given(
    st.lists(st.sampled_from(_PIECES) | st.text(st.characters(codec=None), max_size=3), max_size=14)
)
def test_any_text_can_be_scored(pieces: list[str]) -> None:
    text = "".join(pieces)
    number = final_number(text)
    if number is not None and not same_number(number, number):
        with pytest.raises(ValueError, match="not a number"):
            number_value(number)  # the denominator is 0
        assert "/" in number
    assert final_letter(text) in (None, *LETTERS)
    question = Question("x", "humaneval", ("",), "code", "", row=CODE)
    assert build_program(question, text).entry_point == "twice"


def test_gsm8k_reference_answers_are_correct() -> None:
    """References are correct as they are and in other forms, but not with a digit appended."""
    questions = read_questions(published("gsm8k_test.jsonl"))
    assert all(score(item, item.reference) for item in questions)
    for item in questions[:100]:
        worked = item.reference.rsplit("####", 1)[0]
        for form in (
            "The answer is {}.",
            "\\boxed{{{}}}",
            "so **${}**",
            "#### {}.00\nI used 3 of 7.",
        ):
            assert score(item, worked + form.format(item.answer)), (form, item.answer)
        assert not score(item, item.reference + "1")
