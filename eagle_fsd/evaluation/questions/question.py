"""A question of a question set, independent of the file format that it comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

#: How an answer is scored; "" marks questions without a score (MT-bench, Spec-Bench).
ScoredBy = Literal[
    "",
    "number",
    "letter",
    "code",
    "exact",
    "regex",
    "function",
    "strict-match",
    "flexible-extract",
]

#: Labels of the choices in multiple-choice questions.
LETTERS = "ABCDE"

#: A message with a "role" (system, user or assistant) and a "content".
Message = dict[str, str]


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        question_id: The id in the question file, or the row's index if it has no id.
        category: The category in the question file, or the name of the format.
        turns: The user's messages that are answered, one per turn.
        scored_by: How an answer is scored, see :data:`ScoredBy`.
        answer: The correct number, letter or string; for ``regex``, a regular expression; for
            code, the source of the tests.
        reference: A worked solution, if there is one.
        extra: Further fields for scoring: ``prompt`` and ``entry_point`` for code, the whole row of
            a user's own file.
        context: Messages before the first turn, as pairs of role and content.
        grade: For ``function``, scores an answer; see
            :func:`~eagle_fsd.evaluation.graders.load_function`.
    """

    question_id: int | str
    category: str
    turns: tuple[str, ...]
    scored_by: ScoredBy = ""
    answer: str | None = None
    reference: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    context: tuple[tuple[str, str], ...] = ()
    grade: Callable[[str, Question], bool | None] | None = None

    def opening(self) -> list[Message]:
        """Return the messages before the first turn."""
        return [{"role": role, "content": content} for role, content in self.context]

    def first_chat(self) -> list[Message]:
        """Return the messages up to the first turn."""
        return [*self.opening(), {"role": "user", "content": self.turns[0]}]
