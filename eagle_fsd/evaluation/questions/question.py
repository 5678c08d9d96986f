"""One question of a set, whatever file format it came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: How an answer is scored: not at all, by its final number, by its letter, by running its code.
SCORED_BY = ("", "number", "letter", "code")

#: Labels of the choices in multiple-choice questions.
LETTERS = "ABCDE"


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        question_id: As in its file, or its place in it.
        category: As in its file, or the set's name.
        turns: What the user says, turn by turn.
        scored_by: One of :data:`SCORED_BY`; "": no score of its own (MT-bench has a judge).
        answer: What is right: the number, the letter; the test program for code.
        reference: A worked answer, where there is one.
        extra: What else the score needs (HumanEval's prompt and entry point).
    """

    question_id: int | str
    category: str
    turns: tuple[str, ...]
    scored_by: str = ""
    answer: str | None = None
    reference: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
