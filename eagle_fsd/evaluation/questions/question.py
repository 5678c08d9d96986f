"""A question of a question set, independent of the file format that it comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

#: How an answer is scored; "" marks questions without a score, such as those of MT-bench.
ScoredBy = Literal[
    "",
    "number",
    "letter",
    "code",
    "exact",
    "regex",
    "function",
    "instructions",
    "strict-match",
    "flexible-extract",
]

#: Labels of the choices in multiple-choice questions.
LETTERS = "ABCDE"

#: A message with a "role" (system, user or assistant) and a "content".
Message = dict[str, str]


@dataclass(frozen=True)
class Question:
    """One question."""

    question_id: int | str  # the row's index if it has no id
    category: str  # the name of the set, or "general", if the row has none
    turns: tuple[str, ...]  # the user's messages that are answered
    scored_by: ScoredBy = ""
    answer: str | None = None  # number, letter, string, regular expression or source of the tests
    reference: str | None = None  # a worked solution
    row: dict[str, Any] = field(default_factory=dict)  # fields of the question file, for scoring
    own: bool = False  # has a user's answer, and does not ask for the format of a published set
    context: tuple[tuple[str, str], ...] = ()  # role and content of messages before the first turn
    grade: Callable[[str, Question], bool | None] | None = None  # of a user's grader

    def opening(self) -> list[Message]:
        """Return the messages before the first turn."""
        return [{"role": role, "content": content} for role, content in self.context]

    def first_chat(self) -> list[Message]:
        """Return the messages up to the first turn."""
        return [*self.opening(), {"role": "user", "content": self.turns[0]}]
