"""Score answers by their number, letter or text, by IFEval's programs, or by running their code.

Reasoning that ends with ``</think>`` is ignored. The filters of lm-evaluation-harness and users'
functions have rules of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from eagle_fsd.evaluation import ifeval
from eagle_fsd.evaluation.code_execution.execution import RunResult
from eagle_fsd.evaluation.code_execution.programs import Program, build_program, strip_reasoning
from eagle_fsd.evaluation.questions.question import LETTERS, Question


def score(
    question: Question,
    answer: str,
    run: Callable[[Program], RunResult] | None = None,
) -> bool | None:
    """Decide whether an answer to the last turn is correct; None if it has no score.

    ``run`` runs the code in answers, which requires the user's consent; without it, questions about
    code have no score. Raises GraderError if the user's grader fails.
    """
    if question.grade is not None:
        return question.grade(answer, question)
    if question.scored_by == "number":
        return same_number(final_number(answer), question.answer)
    if question.scored_by in HARNESS_FILTERS:
        return harness_match(answer, question.answer or "", question.scored_by)
    if question.scored_by == "letter":
        return final_letter(answer) == question.answer
    if question.scored_by == "exact":
        return strip_reasoning(answer).strip() == (question.answer or "").strip()
    if question.scored_by == "regex":
        return re.search(question.answer or "", strip_reasoning(answer)) is not None
    if question.scored_by == "instructions":
        found = ifeval.check(question, strip_reasoning(answer))
        return bool(found["prompt_level_strict_acc"])
    if question.scored_by == "code" and run is not None:
        return run(build_program(question, answer)).passed
    return None


#: Maps full-width forms to ASCII, dashes used as minus signs to "-", and thin to no-break spaces.
_ASCII_FORMS = {
    **{code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},
    **dict.fromkeys((0x2010, 0x2011, 0x2012, 0x2013, 0x2212), "-"),
    **dict.fromkeys((0x2009, 0x202F), "\u00a0"),
}
# Numerator or denominator: digits in braces, or a digit without them.
_ARGUMENT = r"(?:\{\s*(-?\d+)\s*\}|(\d))"
#: Markdown and LaTeX inside an answer, and the replacement.
_MARKUP = [
    (re.compile(r"\*\*|__|`"), ""),
    (re.compile(r"\\(?:text|math)[a-z]*\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"(?<=\d)(?=\\[cdt]?frac)"), " "),
    (re.compile(rf"\\[cdt]?frac\s*{_ARGUMENT}\s*{_ARGUMENT}"), r"\1\2/\3\4"),
    (re.compile(r"(?<=\d)(?:\{,\}|\\[,!]|\u00a0)(?=\d{3}(?!\d))"), ","),
    (re.compile(r"\\([$%#])"), r"\1"),
]


def _plain_text(answer: str) -> str:
    """Return the answer without reasoning and markup, in ASCII forms."""
    text = strip_reasoning(answer).translate(_ASCII_FORMS)
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    return text


# A number is a fraction, possibly mixed, or digits with or without separators. It neither follows
# "^" nor is part of a longer number, and a hyphen that joins it to a word is not a minus sign.
_DIGITS = (
    r"(?:(?<!/)(?:\d+ )?\d+/\d+(?![\d/]|\.\d)"
    r"|(?:\d{1,3}(?:,\d{2,3}){0,8},\d{3}(?!\d)|\d+)(?:\.\d+)?)"
)
_NUMBER_PATTERN = (
    r"(?P<number>(?:(?<![-\w)\]}%.])-[$€£¥₹]?|[$€£¥₹]-?)?"
    rf"(?:(?<!\^)(?<!\^\{{)(?<!\d)(?<!\d\.){_DIGITS}|(?<![\w.])\.\d+))"
)
_NUMBER = re.compile(_NUMBER_PATTERN)
_FLOAT = re.compile(r"[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d{1,3})?")  # such as 1e-05
#: Where answers state their number: after "####", in a box, and after "the answer is".
_STATED_NUMBERS = [
    re.compile(rf"####[ \t:=(\\]*\n?[ \t(\\]*(?:boxed\s*\{{\s*)?{_NUMBER_PATTERN}"),
    re.compile(rf"\\boxed\s*\{{[^{{}}]*?{_NUMBER_PATTERN}[^\d{{}}]*\}}"),
    re.compile(
        r"(?i:\banswer\b(?:[^.:=\n]{0,60}?\b(?:is|was|be|equals)\b|[\s\"']*[:=])[\s:=]*"
        r"(?:(?:about|approximately|exactly|therefore|thus|only)\s+)?)"
        # The left side of an equation on the same line.
        r"(?:(?:[-+*/\u00d7\u00f7^() $€£¥₹%\d]|[.,](?=\d)|\\times|\\cdot){1,80}= *)?"
        rf"[(\\]*{_NUMBER_PATTERN}"
    ),
]
#: The beginning of another question, with which base models continue after their answer.
_RUN_ON = re.compile(
    r"question\s*:"
    r"|\n[^\w\n]{0,10}(?:question|problem|exercise|q|human|user|instruction)\b[^\n:]{0,20}:",
    re.IGNORECASE,
)
_BLANK_LINE = re.compile(r"\n[ \t\r]*\n")


def final_number(text: str) -> str | None:
    """Return the final number of an answer, without separators and currency; None without one.

    The first of these rules that matches applies, to its last match:

    1. a number after ``####``, the format of GSM8K that the prompts request, with nothing but
       symbols or markup between;
    2. a number in ``\\boxed{}``;
    3. a number after "answer is", "answer:" and similar phrases, or of the equation there the
       right side;
    4. any number.

    Text from the beginning of another question is ignored once one of the first three rules
    matches before it, and after the first rule, everything from the next blank line: base models
    continue with another task. OpenAI's grader of GSM8K applies only the first rule, to the first
    ``####``.
    """
    text = _plain_text(text)
    rules = [list(pattern.finditer(text)) for pattern in _STATED_NUMBERS]
    limit, marked = len(text), rules[0]
    if ends := [match.end() for rule in rules for match in rule]:
        run_on = [_RUN_ON.search(text, min(ends))]
        if marked:
            run_on.append(_BLANK_LINE.search(text, marked[0].end()))
        limit = min((match.start() for match in run_on if match), default=limit)
    kept = [[match for match in rule if match.end() <= limit] for rule in rules]
    found = next((rule for rule in kept if rule), None) or list(_NUMBER.finditer(text))
    return _strip_symbols(found[-1]["number"]).replace(",", "") if found else None


#: Regular expressions of lm-evaluation-harness's filters for GSM8K (``gsm8k.yaml``), by name; the
#: strict filter takes the first match, the flexible one the last.
HARNESS_FILTERS = {
    "strict-match": re.compile(r"#### (-?[0-9.,]+)"),
    "flexible-extract": re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+"),
}
_HARNESS_STOP = re.compile(r"Question:|</s>|<\|im_end\|>")


def harness_match(text: str, answer: str, name: str) -> bool:
    """Score an answer by one of :data:`HARNESS_FILTERS`, as lm-evaluation-harness does.

    The harness compares strings, after it has removed commas, dollar signs and a final period, so
    that "18.00" is not 18. It ends an answer at "Question:", "</s>" or "<|im_end|>".
    """
    found = HARNESS_FILTERS[name].findall(_HARNESS_STOP.split(text, maxsplit=1)[0])
    if not found:
        return False
    number = found[0] if name == "strict-match" else found[-1]
    return _without_separators(number) == _without_separators(answer)


def _without_separators(number: str) -> str:
    return number.replace(",", "").replace("$", "").removesuffix(".")


def _strip_symbols(number: str) -> str:
    """Remove currency signs, a percent sign and trailing periods."""
    text = re.sub(r"[$€£¥₹]", "", number.translate(_ASCII_FORMS)).strip()
    return text.removesuffix("%").rstrip(". ")


def number_value(text: str) -> Fraction:
    """Return the value of a decimal number or a fraction, possibly mixed, or raise ValueError.

    Currency, a percent sign, and commas that separate thousands in a decimal number are ignored.
    """
    plain = _strip_symbols(text)
    if not (_NUMBER.fullmatch(plain) or _FLOAT.fullmatch(plain)):
        raise ValueError(f"{text!r} is not a number")
    plain = plain.replace(",", "")
    sign = -1 if plain.startswith("-") else 1
    whole, _, rest = plain.lstrip("+-").rpartition(" ")
    try:
        return sign * (Fraction(whole or 0) + Fraction(rest))
    except ZeroDivisionError as error:
        raise ValueError(f"{text!r} is not a number") from error


def same_number(first: str | None, second: str | None) -> bool:
    """Return whether both are numbers, see :func:`number_value`, and equal within 1e-9.

    The difference is relative to the larger number, or to 1 if both are smaller.
    """
    if first is None or second is None:
        return False
    try:
        a, b = number_value(first), number_value(second)
    except ValueError:
        return False
    return abs(a - b) <= Fraction(1, 10**9) * max(abs(a), abs(b), Fraction(1))


# A letter must stand alone; it does not begin "C++", "e-mail", "D'Artagnan" or "e.g.".
_ALONE = r"(?![\w+#]|-\w|'\w|\.\w\.)"
_OPENING = r"[\s(\[{$\"'<>*_\\]*"
# After "is", a lowercase "a" that is followed by a word is an article.
_CHOICE = rf"(?P<letter>[{LETTERS}]|[b-e]|a(?=\s*(?:[)\].:,;}}\"'$*\\]|\n|\Z))){_ALONE}"
_BOXED_LETTER = re.compile(rf"\\boxed\s*\{{{_OPENING}{_CHOICE}")
_NAMED_LETTER = re.compile(
    r"(?i:\b(?:answers?|(?:correct|right|best)\s+(?:choice|option|letter))\b)"
    r"[^.:=>\n]{0,80}?(?i:\s(?:is|are|was|be)\b|[:=>])"
    r"(?i:[\s:]*\b(?:most|probably|likely|the|choice|option|letter|answer)\b)*:?"
    rf"{_OPENING}{_CHOICE}"
)
_SINGLE_LETTER = re.compile(rf"^[^\w\n]*(?P<letter>[{LETTERS}]){_ALONE}[^\w\n]*$", re.M | re.I)
# An uppercase "A" that is followed by a word is an article.
_LONE_LETTER = re.compile(
    rf"(?<![\w'+.-])(?<!\bnot )(A(?!\s+(?!(?:and|or|is)\b)[\w\"'])|[{LETTERS[1:]}]"
    rf"|(?<=\()[a-e](?=\))){_ALONE}"
)


def final_letter(text: str) -> str | None:
    """Return the letter that an answer chooses, in uppercase; None if it chooses none.

    The first of these rules that matches applies, to its last match:

    1. a letter in ``\\boxed{}``;
    2. a letter named as the answer: "Answer: B", which the prompts request, or "the answer is (b)";
    3. a letter that is a whole line;
    4. the only letter that stands alone, in uppercase or in parentheses.

    Articles do not match: "the answer is a model" chooses nothing.
    """
    text = _plain_text(text)
    for pattern in (_BOXED_LETTER, _NAMED_LETTER, _SINGLE_LETTER):
        if found := [match["letter"] for match in pattern.finditer(text)]:
            return str(found[-1]).upper()
    alone = {letter.upper() for letter in _LONE_LETTER.findall(text)}
    return alone.pop() if len(alone) == 1 else None
