"""Readers of answers: whether the final number, the letter, the code is right.

Where an answer gives several, the last counts: models correct themselves. What a model thinks
before ``</think>`` is no answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from eagle_fsd.evaluation.code_execution.programs import said, test_program
from eagle_fsd.evaluation.code_execution.sandbox import RunResult, run_program
from eagle_fsd.evaluation.questions.question import LETTERS, Question


def score(
    question: Question,
    answer: str,
    execute_code: bool = False,
    run: Callable[[str], RunResult] = run_program,
) -> bool | None:
    """Whether ``answer`` is right; None where the question has no score of its own.

    Args:
        execute_code: Run the code that an answer to a ``code`` question holds. Without it such
            questions have no score: running what a model wrote is for the user to allow.
        run: Runs a program; :class:`~eagle_fsd.evaluation.code_execution.sandbox.Runs` remembers what came of it.
    """
    if question.scored_by == "number":
        return same_number(final_number(answer), question.answer)
    if question.scored_by == "letter":
        return final_letter(answer) == question.answer
    if question.scored_by == "code" and execute_code:
        return run(test_program(question, answer)).passed
    return None


#: Full-width forms as ASCII, every dash that may be a minus sign as one, no-break spaces as one.
_PLAIN_SIGNS = {
    **{code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)},
    **dict.fromkeys((0x2010, 0x2011, 0x2012, 0x2013, 0x2212, 0xFE63), "-"),
    **dict.fromkeys((0x2009, 0x202F), "\u00a0"),
    0xFFE5: "\u00a5",
    0x2019: "'",
}
#: Mark-up that may stand in the midst of an answer, and what it comes to.
_MARKUP = [
    (re.compile(r"\*\*|__|`"), ""),
    (re.compile(r"\\(?:text|math)[a-z]*\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\[dt]?frac\s*\{(\d+)\}\s*\{(\d+)\}"), r" \1/\2"),
    (re.compile(r"(?<=\d)(?:\{,\}|\\[,!]|\u00a0)(?=\d{3}(?!\d))"), ","),
    (re.compile(r"\\([$%#])"), r"\1"),
]


def _without_markup(answer: str) -> str:
    text = said(answer).translate(_PLAIN_SIGNS)
    for pattern, plain in _MARKUP:
        text = pattern.sub(plain, text)
    return text


# Numbers: a fraction, mixed or not, else digits with or without separators. Neither an exponent
# nor a part of a longer number; a hyphen that joins it to something is no minus.
_DIGITS = (
    r"(?:(?<!/)(?:\d+ )?\d+/\d+(?![\d/]|\.\d)"
    r"|(?:\d{1,3}(?:,\d{2,3}){0,8},\d{3}(?!\d)|\d+)(?:\.\d+)?)"
)
_NUMBER_TEXT = (
    r"(?:(?<![-\w)\]}%.])-[$€£¥₹]?|[$€£¥₹]-?)?"
    rf"(?:(?<!\^)(?<!\^\{{)(?<!\d)(?<!\d\.){_DIGITS}|(?<![\w.])\.\d+)"
)
_NUMBER = re.compile(_NUMBER_TEXT)
_MARKED_NUMBER = re.compile(
    rf"####[ \t:=(\\]*\n?[ \t(\\]*(?:boxed\s*\{{\s*)?(?P<number>{_NUMBER_TEXT})"
)
#: What makes "#### 1. First" a heading, and "the answer is 3 + 4" the beginning of a sum.
_HEADING = re.compile(r"[.):][ \t]+\S")
_SUM = re.compile("\\s*[-+*/\u00d7\u00f7^]\\s*[\\d$(.\\\\]|[^\\n]*=")
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")
_NAMED_NUMBER = re.compile(
    r"(?i:\banswer\b(?:[^.:=\n]{0,60}?\b(?:is|was|equals|would be|will be|comes to)\b"
    r"|[\s\"']*(?:\([^()\n]{0,40}\)\s*)?[:=])"
    r"[\s:=]*(?:(?:about|approximately|exactly|therefore|thus|now|only|just)\s+)?)"
    rf"[(\\]*(?P<number>{_NUMBER_TEXT})"
)


def final_number(text: str) -> str | None:
    """The number an answer ends in, without separators and currency; None if it holds none.

    The first of these that there is, and the last of its kind:

    1. after ``####``, the format the questions ask for (GSM8K's own), with nothing but currency or
       mark-up between; ``#### Step 3`` and ``#### 1. First`` are headings;
    2. in ``\\boxed{}``;
    3. after "answer is", "answer:" and the like, if no sum goes on behind it;
    4. anywhere.

    OpenAI's grader of GSM8K and the strict filter of lm-evaluation-harness know only the first of
    these, and take the first ``####`` rather than the last; the harness's flexible filter is the
    last of these alone. "20-30" ends in 30, "1,2,3" in 3, "1,234" is one number, "2 1/2" a number
    too, and ``cm^2`` none.
    """
    text = _without_markup(text)
    marked = [
        match["number"]
        for match in _MARKED_NUMBER.finditer(text)
        if not _HEADING.match(text, match.end())
    ]
    boxed = [found[-1] for inside in _BOXED.findall(text) if (found := _NUMBER.findall(inside))]
    named = [
        match["number"]
        for match in _NAMED_NUMBER.finditer(text)
        if not _SUM.match(text, match.end())
    ]
    for found in (marked, boxed, named, _NUMBER.findall(text)):
        if found:
            return _plain(found[-1])
    return None


def _plain(number: str) -> str:
    """Without currency, separators, percent sign and a full stop behind it."""
    text = re.sub(r"[$€£¥₹,]", "", number.translate(_PLAIN_SIGNS)).strip()
    return text.removesuffix("%").rstrip(". ")


def number_value(text: str) -> Fraction:
    """The value of a number as answers write it.

    Raises:
        ValueError: It is none.
    """
    plain = _plain(text)
    sign = -1 if plain.startswith("-") else 1
    whole, _, rest = plain.lstrip("+-").rpartition(" ")
    try:
        return sign * (Fraction(whole or 0) + Fraction(rest))
    except ZeroDivisionError as error:
        raise ValueError(f"{text!r} is no number") from error


def same_number(found: str | None, right: str | None) -> bool:
    """Equal as numbers, up to one part in 10^9: ``18.00`` is ``18``, ``1/2`` is ``0.5``."""
    if found is None or right is None:
        return False
    try:
        first, second = number_value(found), number_value(right)
    except ValueError:
        return False
    return abs(first - second) <= Fraction(1, 10**9) * max(abs(first), abs(second), 1)


# Letters: alone, and not the beginning of "C++", "e-mail", "D'Artagnan", "e.g.".
_ALONE = r"(?![\w+#]|-\w|'\w|\.\w\.)"
_OPENING = r"[\s(\[{$\"'<>*_\\]*"
#: After "is": a small "a" that a word follows is an article.
_CHOICE = rf"(?P<letter>[{LETTERS}]|[b-e]|a(?=\s*(?:[)\].:,;}}\"'$*\\]|\n|\Z))){_ALONE}"
_ANSWER = r"(?i:\b(?:answers?|(?:correct|right|best)\s+(?:choice|option|letter))\b)"
_NAMED_LETTERS = [
    # "The answer to this is most likely option (B)"
    re.compile(
        rf"{_ANSWER}[^.:=>\n]{{0,80}}?"
        r"(?i:\s(?:is|are|was|(?:would|should|must|will|has to|seems to)\s+be)\b|[:=>]|\s-\s)"
        r"(?i:[\s:]*\b(?:most|probably|likely|definitely|clearly|therefore|thus|simply|surely"
        r"|actually|indeed|the|choice|option|letter|answer)\b)*:?"
        rf"{_OPENING}{_CHOICE}"
    ),
    # "Answer (B)", "Answer B"
    re.compile(
        rf"{_ANSWER}\s*(?=[(\[][{LETTERS}{LETTERS.lower()}][)\]]|[B-E]|A\s*(?:[.,;:]|\n|\Z|is\b))"
        rf"[(\[]?(?P<letter>[{LETTERS}{LETTERS.lower()}]){_ALONE}"
        r"(?![)\]]?\s+(?:is|are)\s+(?:not|wrong|incorrect|false)\b)"
    ),
    # "B is the correct answer"
    re.compile(
        rf"(?<![\w'])(?P<letter>[{LETTERS}])[)\]]?\s+(?i:(?:is|seems|must\s+be|would\s+be)\s+"
        r"(?:\w+ly\s+)?(?:the\s+)?(?:most\s+|only\s+)?(?:correct|right|best|answer)\b)"
    ),
]
_BOXED_LETTER = re.compile(rf"\\boxed\s*\{{{_OPENING}{_CHOICE}")
_ONLY_A_LETTER = re.compile(
    rf"[\s(\[{{$\"'*\\]*([{LETTERS}{LETTERS.lower()}])[\s)\]}}$\"'.:,;*\\]*"
)
_LINE_LETTER = re.compile(rf"^[ \t]*[(\[]?([{LETTERS}])[)\].:](?=\s|\Z)", re.MULTILINE)
_VERB = re.compile(r"\s*(?:is|are|was|has|does|can)(?:\b|n't)")
#: A capital "A" that a word follows is an article, unless the word goes on about a choice.
_LONE_LETTER = re.compile(
    rf"(?<![\w'+.-])(?<!\bnot )([{LETTERS}]){_ALONE}"
    r"(?<!A(?=\s+(?!(?:is|are|because|since|as|and|or|but|fits|seems|would|has|for|which|over)\b)"
    r"[\w\"']))"
)


def final_letter(text: str) -> str | None:
    """The letter an answer chooses, a capital; None if it chooses none.

    The first of these that there is, and the last of its kind:

    1. in ``\\boxed{}``;
    2. named as the answer: "Answer: B", the format the questions ask for, "the answer is (b)",
       "B is the correct choice";
    3. alone, as the whole answer or a line of it;
    4. at the head of the answer, as in "B) bank", where no other line begins like that;
    5. a capital anywhere that stands alone.

    An article is no choice: "the answer is a model" has none. OpenAI's simple-evals reads "Answer:
    B" alone; lm-evaluation-harness's filters read "answer is (B)", and else any letter in
    brackets.
    """
    text = _without_markup(text)
    if boxed := [match["letter"] for match in _BOXED_LETTER.finditer(text)]:
        return boxed[-1].upper()
    named = [match for pattern in _NAMED_LETTERS for match in pattern.finditer(text)]
    if named:
        return max(named, key=lambda match: match.start("letter"))["letter"].upper()
    for part in (text, *reversed(text.split("\n"))):
        if only := _ONLY_A_LETTER.fullmatch(part):
            return only[1].upper()
    heads = list(_LINE_LETTER.finditer(text))
    if len({head[1] for head in heads}) == 1:
        first = heads[0]
        if not text[: first.start()].strip() and not _VERB.match(text, first.end()):
            return first[1]
    alone = _LONE_LETTER.findall(text)
    return alone[-1] if alone else None
