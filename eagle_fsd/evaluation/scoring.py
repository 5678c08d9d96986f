"""Scores: the final number, the letter, code that passes its tests; intervals and paired tests."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from eagle_fsd.evaluation.questions import LETTERS, Question
from eagle_fsd.evaluation.sandbox import run_program

_NUMBER = re.compile(r"[-+]?\$?\d[\d,]*(?:\.\d+)?|[-+]?\.\d+")
_CODE = re.compile(r"```(?:python|py|Python)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_LETTER = re.compile(rf"answer\s*(?:is)?\s*:?\s*\**\(?([{LETTERS}])\b", re.IGNORECASE)
_LONE_LETTER = re.compile(rf"(?:^|[\s(*])([{LETTERS}])(?:[\s).:*]|$)")


def score(question: Question, answer: str, execute_code: bool = False) -> bool | None:
    """Whether ``answer`` is right; None where the question has no score of its own.

    Args:
        execute_code: Run the code that an answer to a ``code`` question holds. Without it such
            questions have no score: running what a model wrote is for the user to allow.
    """
    if question.scored_by == "number":
        return same_number(final_number(answer), question.answer)
    if question.scored_by == "letter":
        return final_letter(answer) == question.answer
    if question.scored_by == "code" and execute_code:
        return run_program(test_program(question, answer)).passed
    return None


def final_number(text: str) -> str | None:
    """The number after the last ``####``, else the last number of the text."""
    if "####" in text:
        after = _NUMBER.search(text.rsplit("####", 1)[1])
        if after:
            return _plain(after.group())
    found = _NUMBER.findall(text)
    return _plain(found[-1]) if found else None


def _plain(number: str) -> str:
    return number.replace(",", "").replace("$", "").rstrip(".")


def same_number(found: str | None, right: str | None) -> bool:
    """Equal as numbers: ``18.00`` is ``18``."""
    if found is None or right is None:
        return False
    try:
        return math.isclose(float(found), float(_plain(right)), rel_tol=1e-9, abs_tol=1e-9)
    except ValueError:
        return False


def final_letter(text: str) -> str | None:
    """The letter after the last "answer", else the last letter that stands alone."""
    named = _LETTER.findall(text)
    if named:
        return named[-1].upper()
    alone = _LONE_LETTER.findall(text)
    return alone[-1] if alone else None


def test_program(question: Question, answer: str) -> str:
    """The code of ``answer`` with the question's tests behind it.

    Code that does not define the function asked for is taken as its body's continuation.
    """
    entry, prompt = question.extra["entry_point"], question.extra["prompt"]
    blocks = _CODE.findall(answer)
    code = next((block for block in blocks if f"def {entry}" in block), None)
    if code is None:
        code = blocks[-1] if blocks else answer
    # What the prompt imports and defines comes along.
    between = "    pass\n\n" if f"def {entry}" in code else ""
    return f"{prompt}{between}{code}\n\n{question.answer}\n\ncheck({entry})\n"


@dataclass(frozen=True)
class Proportion:
    """``right`` of ``count``, with a 95 % interval (Wilson's score interval)."""

    right: int
    count: int

    @property
    def value(self) -> float:
        return self.right / self.count if self.count else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        if not self.count:
            return math.nan, math.nan
        z = normal_quantile(0.975)
        centre = (self.right + z * z / 2) / (self.count + z * z)
        spread = self.right * (self.count - self.right) / self.count + z * z / 4
        half = z * math.sqrt(spread) / (self.count + z * z)
        return max(0.0, centre - half), min(1.0, centre + half)


@dataclass(frozen=True)
class Mean:
    """A mean with a 95 % interval from the normal approximation."""

    value: float
    count: int
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        count = len(values)
        if not count:
            return cls(math.nan, 0, math.nan)
        mean = sum(values) / count
        variance = sum((item - mean) ** 2 for item in values) / max(1, count - 1)
        return cls(mean, count, math.sqrt(variance))

    @property
    def interval(self) -> tuple[float, float]:
        if not self.count:
            return math.nan, math.nan
        half = normal_quantile(0.975) * self.deviation / math.sqrt(self.count)
        return self.value - half, self.value + half


def normal_quantile(confidence: float) -> float:
    """How many standard deviations leave ``1 - confidence`` of a normal law above them."""
    return NormalDist().inv_cdf(confidence)


def loss_bound(lost: int, gained: int, count: int, confidence: float = 0.95) -> float:
    """How large the loss may be: an upper bound of ``P(lost) - P(gained)``, from paired answers.

    One-sided. It inverts Tango's score test for paired proportions (Statistics in Medicine 17,
    1998), which is sound where few pairs differ, or none: with no loss among 100 it is 0.026.

    Args:
        lost, gained: Right before and wrong now, and the other way, of ``count`` pairs.
    """
    if not count:
        return 1.0
    z = normal_quantile(confidence)

    def too_large(loss: float) -> bool:
        """Whether so large a loss would be seen this small more rarely than the test allows."""
        # The likeliest P(gained) if the loss is that: the positive root of a quadratic.
        linear = (2 * count - lost + gained) * loss - lost - gained
        constant = -gained * loss * (1 - loss)
        root = math.sqrt(max(0.0, linear * linear - 8 * count * constant))
        likeliest = (root - linear) / (4 * count)
        variance = count * (2 * likeliest + loss * (1 - loss))
        return lost - gained - count * loss < -z * math.sqrt(max(0.0, variance))

    low, high = max(-1.0, (lost - gained) / count), 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if too_large(middle) else (middle, high)
    return high


@dataclass(frozen=True)
class McNemar:
    """Two methods on the same questions: how often just one of them was right.

    Attributes:
        lost: Right under the first, wrong under the second. gained: The other way.
        p_value: Two-sided and exact: how likely so uneven a split is where neither is better.
    """

    lost: int
    gained: int
    p_value: float

    @classmethod
    def of(cls, first: Sequence[bool], second: Sequence[bool]) -> McNemar:
        pairs = list(zip(first, second, strict=True))
        lost = sum(a and not b for a, b in pairs)
        gained = sum(b and not a for a, b in pairs)
        total, least = lost + gained, min(lost, gained)
        tail = sum(math.comb(total, k) for k in range(least + 1)) / 2**total
        return cls(lost, gained, min(1.0, 2 * tail))
