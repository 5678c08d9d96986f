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
    HARNESS_FILTERS,
    final_letter,
    final_number,
    harness_match,
    number_value,
    same_number,
    score,
)

#: The extra fields of a HumanEval question.
CODE = {"prompt": "def twice(values):\n", "entry_point": "twice"}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7\n#### 7", "7"),
        ("#### 5 is wrong, again\n#### $1,234.50", "1234.50"),
        ("The answer is 18.", "18"),
        ("It falls to -3 degrees", "-3"),
        ("####", None),
        ("12 apples ####", "12"),
        ("no number at all", None),
        ("", None),
        ("... = 5.\n#### 5", "5"),
        ("#### 1\n#### -12", "-12"),
        ("#### 1,234", "1234"),
        ("so 5", "5"),
        # Headings do not match, and the requested format takes precedence over later text.
        ("#### Step 3\nadd 40 and 2\n#### 42", "42"),
        ("#### Step 3\nso the answer is 42", "42"),
        ("#### 1. Add\n2 + 2 = 4\n#### 2. Double\nThat is 8 in all", "8"),
        ("#### 42\nI took 3 steps.", "42"),
        ("####42", "42"),
        ("#### **42**", "42"),
        ("#### \\$42", "42"),
        ("#### \\boxed{42}", "42"),
        ("#### 42 eggs in 7 days", "42"),
        ("#### 18 - 3 = 15", "15"),
        ("#### 5 * 3 = $15.00 in all", "15.00"),
        ("#### 18 eggs - 3 eggs = 15 eggs", "15"),
        ("#### 2 + 3 = 4 + 1 = 5", "5"),
        ("#### 42 - that is all", "42"),
        ("#### 42 (x = 3)", "42"),
        # Another question after the answer.
        ("so 10\n#### 10\n\nQuestion: Tom has 3 pens and buys 4.\nAnswer: He has 7.\n#### 7", "10"),
        ("#### 10 Question: Tom has 3 pens.\n#### 3", "10"),
        ("#### 10\nQ: Tom has 3 pens.\nA: The answer is 3.", "10"),
        ("#### 10\nTom has 3 pens and buys 4. How many pens does he have?\n#### 7", "10"),
        ("The answer is 10.\n\nProblem 2: Tom has 3 pens.\nThe answer is 3.", "10"),
        ("#### 10\n\nFind the area of a 3 by 4 rectangle.\nThe area is 12\n#### 12", "10"),
        ("#### 10\nCalculate the total cost.\n#### 12", "10"),
        ("#### 10\n \t\nTom has 3 pens.\n#### 3", "10"),
        ("#### 10\r\n\r\nTom has 3 pens.\n#### 3", "10"),
        ("The answer is 3.\n\nIn all, that is:\n\n#### 10", "10"),
        ("#### 5 - 2\nthat is\n#### 3", "3"),
        ("Question: how many?\n3 + 4 = 7\n#### 7", "7"),
        ("How many are left? 9 - 4 = 5\nThe answer is 5", "5"),
        # Other forms.
        ("It is \\boxed{42}, as 6 * 7 says in step 3", "42"),
        ("\\boxed{\\text{\\$1,050}}", "1050"),
        ("\\boxed{x = -3}", "-3"),
        ("The answer is 18 dollars for 2 days.", "18"),
        ("**Final answer:** **18** (after 3 steps)", "18"),
        ("The answer is 3 + 4 = 7", "7"),
        ("The answer is 15 gallons * 8 pints/gallon = 120", "120"),
        ("Answer (in dollars): 18 of 20", "18"),
        ("To answer in percent: 3 of 4 is 75", "75"),
        ("The answer is not 5 but 6", "6"),
        ("<think>The answer is 9</think>It is 8", "8"),
        # Signs.
        ("between 20-30", "30"),
        ("between 20\u201330", "30"),
        ("it is \u22125", "-5"),
        ("it is (\u22125)", "-5"),
        ("x = -5", "-5"),
        ("COVID-19", "19"),
        ("a loss of -$5", "-5"),
        ("a loss of $-5", "-5"),
        ("9 - 5", "5"),
        ("In all =\n- 5 apples", "5"),
        ("\\boxed{- 5}", "-5"),
        ("x = - 5", "-5"),
        ("#### - 5", "-5"),
        ("\\boxed{-(5)}", "-5"),
        # Spellings of numbers.
        ("it is \uff14\uff12", "42"),
        ("\uff03\uff03\uff03\uff03 \uff11\uff0c\uff10\uff10\uff10", "1000"),
        ("1,2,3", "3"),
        ("1{,}234 in all", "1234"),
        ("12\u202f345", "12345"),
        ("it costs \u20ac1,234,567.", "1234567"),
        ("50%", "50"),
        ("50\\%", "50"),
        (".5", ".5"),
        ("42.0", "42.0"),
        ("1/2", "1/2"),
        ("#### 2 1/2", "2 1/2"),
        ("\\frac{1}{2}", "1/2"),
        ("2\\frac12", "2 1/2"),
        ("-2\\frac{1}{2}", "-2 1/2"),
        *(
            (f"\\boxed{{{text}}}, not 7", "-3/4")
            for text in (
                "-\\frac{3}{4}",
                "-\\dfrac{3}{4}",
                "-\\tfrac{3}4",
                "-\\frac34",
                "- \\frac{3}{4}",
                "\u2212\\frac{3}{4}",
                "\\frac{-3}{4}",
                "\\frac{3}{-4}",
                "x = -\\frac{3}{4}",
                "(-\\frac{3}{4})",
                "\\left(-\\frac{3}{4}\\right)",
                "-\\left(\\frac{3}{4}\\right)",
            )
        ),
        ("\\boxed{-\\frac{-3}{4}}", "3/4"),
        ("#### $-\\frac{3}{4}$", "-3/4"),
        ("The answer is \\(-\\frac{3}{4}\\).", "-3/4"),
        ("It is -$\\frac{3}{4}$.", "-3/4"),
        ("so $1 - \\frac{1}{4}$", "1/4"),
        ("so $1-\\frac{1}{4}$", "1/4"),
        ("50 cm^2", "50"),
        ("50 cm^{2}", "50"),
    ],
)
def test_final_number(text: str, number: str | None) -> None:
    assert final_number(text) == number


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("18.00", "18", True),
        ("1234", "1,234", True),
        ("18.5", "18", False),
        (None, "18", False),
        ("1/2", "0.5", True),
        ("2 1/2", "2.5", True),
        ("-2 1/2", "-2.5", True),
        ("1/0", "1", False),
        ("50%", "50", True),
        ("\u22125", "-5", True),
        ("0.3333333333", "1/3", True),
        ("0.333", "1/3", False),
        ("nan", "nan", False),
        ("9" * 400, "8" * 400, False),
        ("9" * 5000, "9", False),
        ("", "", False),
    ],
)
def test_same_number(first: str | None, second: str, same: bool) -> None:
    assert same_number(first, second) is same


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: B", "B"),
        ("The answer is (c).", "C"),
        ("**Answer:** **D**", "D"),
        ("A is wrong, B too.\nAnswer: E", "E"),
        ("B", "B"),
        ("(B) because", "B"),
        ("Apples and Bananas", None),
        ("", None),
        # Articles.
        ("That answer a model", None),
        ("The answer is a model of the earth", None),
        ("A model is what is meant", None),
        ("the answer is a bank (D)", "D"),
        ("Is the answer a bank? Answer: B", "B"),
        # Named as the answer.
        ("The answer is A", "A"),
        ("The answer is A because banks lend", "A"),
        ("the answer is a", "A"),
        ("The answer is a.", "A"),
        ("The answer is b because", "B"),
        ("Answer: E.", "E"),
        ("Answer:\n\nC", "C"),
        ("Answer: [B]", "B"),
        ("ANSWER: $B$", "B"),
        ("Answer: \\(B\\)", "B"),
        ("Answer: \\text{B}", "B"),
        ("The final answer is $\\boxed{C}$.", "C"),
        ("\\boxed{\\textbf{(C)}} and not D", "C"),
        ("Answer: **D**", "D"),
        ("**D**", "D"),
        ("Answer: \uff22", "B"),
        ("The correct answer is option B", "B"),
        ("The best choice would be (D), not E.", "D"),
        ("The answer to this question is C: sea", "C"),
        ("Answer (B)", "B"),
        ("Answer B", "B"),
        ('{"answer": "B"}', "B"),
        ("<answer>B</answer>", "B"),
        ("So B is the correct answer, and A and D are not.", "B"),
        ("The answer is A. No: the answer is B.", "B"),
        ("<think>The answer is A</think>C", "C"),
        ("I think it's B because A is wrong", "B"),
        ("I think it is (c), since D does not fit.", "C"),
        ("I'd go with option D. A seems wrong.", "D"),
        ("It's a bank, so C", "C"),
        ("B, because A is wrong and C isn't near", "B"),
        # Several letters at once.
        ("A and B", None),
        ("A, B or C", None),
        ("Answer: A and B", None),
        ("A) and B)", None),
        ("A), B) or C)", None),
        ("Options A and B are wrong, so C", "C"),
        ("Options A, B, and (D) aren't right, so C", "C"),
        ("A) and B) are both wrong, so C", "C"),
        ("A and B are right, C is wrong", None),
        ("The answer is (A) or (C).", None),
        ("I think it's B or C", None),
        ("Either A or D fits", None),
        ("The answer is B, C is wrong", "B"),
        ("The answer is B and A is not", "B"),
        # A whole answer, a line, or the beginning of an answer.
        ("b)", "B"),
        ("(b)", "B"),
        ("a", "A"),
        (" [B] ", "B"),
        ("$B$", "B"),
        ("Banks lend.\n\n(B)", "B"),
        ("B) bank\nThe rest (A, C and D) does not fit.", "B"),
        ("B. A bank lends.", "B"),
        ("A) sea: no.\nB) sky: no.\nC) sand: yes.\nI choose C", "C"),
        # Not a letter of a choice.
        ("The answer is C++", None),
        ("The answer is e-mail", None),
        ("The answer is D'Artagnan", None),
        ("The answer is not A", None),
    ],
)
def test_final_letter(text: str, letter: str | None) -> None:
    assert final_letter(text) == letter


@pytest.mark.parametrize(
    "part",
    [
        "1,22",
        "answer is ",
        "the answer ",
        "\\boxed{",
        "```\n",
        "((",
        "#",
        "~~~\n",
        "def twice(values):\n",
        "x = (\n",
        "    return [\n",
        "\nhow many ",
        "#### 1+1 ",
        "it's A, ",
        "A and B ",
        "#### 1\nfind ",
        "A) and B), ",
    ],
)
def test_scoring_time_is_not_quadratic(part: str) -> None:
    """Repetitions of the beginnings of patterns, at least 8,000 characters of each."""
    question = Question("x", "humaneval", ("",), "code", "", extra=CODE)
    start = time.process_time()
    final_number(part * 4000)
    final_letter(part * 4000)
    build_program(question, part * 4000)
    assert time.process_time() - start < 3


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
    question = Question("x", "humaneval", ("",), "code", "", extra=CODE)
    assert build_program(question, text).entry_point == "twice"


@pytest.mark.parametrize(
    "name", ["gsm8k_test.jsonl", pytest.param("gsm8k_train.jsonl", marks=pytest.mark.slow)]
)
def test_gsm8k_reference_answers_are_correct(name: str) -> None:
    """Unchanged and in other forms, but not with a digit appended."""
    questions = read_questions(published(name))
    assert len(questions) == {"gsm8k_test.jsonl": 1319, "gsm8k_train.jsonl": 7473}[name]
    assert all(score(item, item.reference) for item in questions)
    for item in questions[:300]:
        worked = item.reference.rsplit("####", 1)[0]
        for form in (
            "The answer is {}.",
            "\\boxed{{{}}}",
            "so **${}**",
            "#### {}.00\nI used 3 of 7.",
        ):
            assert score(item, worked + form.format(item.answer)), (form, item.answer)
        assert not score(item, item.reference + "1")


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("so 3 + 4 = 7\n#### 7", True, True),
        ("#### 7\nI used 2 steps.", True, False),
        ("#### 8\n#### 7", False, True),
        ("The answer is $7.", False, True),
        ("#### 7.00", False, False),
        ("####7", False, True),
        ("#### 7\n\nQuestion: Tom has 3 pens.", True, True),
        ("seven", False, False),
    ],
)
def test_filters_of_lm_evaluation_harness(text: str, strict: bool, flexible: bool) -> None:
    assert harness_match(text, "7", "strict-match") is strict
    assert harness_match(text, "7", "flexible-extract") is flexible


def test_filters_of_lm_evaluation_harness_ignore_separators() -> None:
    for name in HARNESS_FILTERS:
        assert harness_match("#### 1,234.", "1,234", name)


@pytest.mark.parametrize("label", LETTERS)
def test_letters_are_found_in_every_form(label: str) -> None:
    """The other letters are wrong."""
    question = Question("x", "commonsense-qa", ("?",), "letter", label)
    for form in (
        "Answer: {}",
        "The answer is {}",
        "({})",
        "{}.",
        "I think it is ({}).\nAnswer: {}",
    ):
        for letter in LETTERS:
            assert score(question, form.format(letter, letter)) is (letter == label), form


def test_questions_without_a_reference_have_no_score() -> None:
    assert score(Question(81, "writing", ("Write.",)), "Anything") is None
