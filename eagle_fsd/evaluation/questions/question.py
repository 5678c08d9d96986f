"""A question of a question set, independent of the file format that it comes from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

#: How an answer is scored; "" marks questions without a score (MT-bench, Spec-Bench).
ScoredBy = Literal["", "number", "letter", "code"]

#: Labels of the choices in multiple-choice questions.
LETTERS = "ABCDE"


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        question_id: The id in the question file, or the row's index if the format has no ids.
        category: The category in the question file, or the name of the format.
        turns: The user's messages, one per turn.
        scored_by: How an answer is scored, see :data:`ScoredBy`.
        answer: The correct number or letter; for code, the source of the tests.
        reference: A worked solution, if there is one.
        extra: Further fields for scoring: ``prompt`` and ``entry_point`` for code.
    """

    question_id: int | str
    category: str
    turns: tuple[str, ...]
    scored_by: ScoredBy = ""
    answer: str | None = None
    reference: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
