"""Fill FastChat's prompts for judges, and read ratings from the replies.

The prompts and the reference answers are FastChat's own files, found like question sets. Reference
answers belong to MT-bench and are looked up by ``question_id``: a custom set whose math, reasoning
or coding questions reuse MT-bench's ids is judged with them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eagle_fsd.evaluation.questions.question import Message, Question
from eagle_fsd.evaluation.questions.sets import JUDGE_PROMPTS, REFERENCE_ANSWERS, fetch

#: Categories whose answers are judged together with a reference answer.
REFERENCE_CATEGORIES = frozenset({"math", "reasoning", "coding", "arena-hard-200"})
#: Number of turns that FastChat has prompts for.
MAX_TURNS = 2
#: The score of a judgment without a rating, which FastChat's tables omit.
NO_RATING = -1

Winner = Literal["A", "B", "tie", "error"]
_WINNERS: dict[str, Winner] = {"[[A]]": "A", "[[B]]": "B", "[[C]]": "tie"}
_RATINGS = (re.compile(r"\[\[(\d+\.?\d*)\]\]"), re.compile(r"\[(\d+\.?\d*)\]"))

#: What precedes and follows the messages before the first turn.
CONTEXT_START = (
    "[The Start of Context]\nThese messages precede the user's first question. The assistant has"
    " seen them and should follow them. They are not part of what you evaluate.\n"
)
CONTEXT_END = "[The End of Context]\n\n"


class JudgeError(ValueError):
    """Answers cannot be judged; the message is one line that says why."""


@dataclass(frozen=True)
class JudgePrompt:
    """A request to a judge."""

    name: str  # of FastChat's prompt template
    system: str
    user: str

    def messages(self) -> list[Message]:
        """Return the messages of the request."""
        return [
            {"role": "system", "content": self.system},
            {"role": "user", "content": self.user},
        ]


@dataclass(frozen=True)
class JudgePrompts:
    """FastChat's prompt templates by name, and the turns of reference answers by question id."""

    templates: Mapping[str, Mapping[str, Any]]
    references: Mapping[int | str, Sequence[str]]

    @classmethod
    def load(cls, questions: Sequence[Question]) -> JudgePrompts:
        """Read the files, downloading missing ones, and reference answers only if required."""
        templates = _rows_by_key(fetch(JUDGE_PROMPTS), "name")
        if not any(question.category in REFERENCE_CATEGORIES for question in questions):
            return cls(templates, {})
        path = fetch(REFERENCE_ANSWERS)
        rows = _rows_by_key(path, "question_id")
        try:
            references = {key: row["choices"][0]["turns"] for key, row in rows.items()}
        except (KeyError, IndexError, TypeError) as error:
            raise JudgeError(f"{path} contains a line that is not a FastChat answer") from error
        return cls(templates, references)

    def fill(self, question: Question, turn: int, *answers: Sequence[str]) -> JudgePrompt:
        """Fill the prompt that rates one answer, or compares those of assistants A and B.

        Each answer has all turns up to ``turn``, which is 1 or 2. FastChat's prompts have no field
        for messages before the first turn: they are put before the prompt.
        """
        single = len(answers) == 1
        turns: dict[str, Sequence[str]] = {"question": question.turns}
        turns |= zip(["answer"] if single else ["answer_a", "answer_b"], answers, strict=True)
        name = "single-v1" if single else "pair-v2"
        reference = self.references.get(question.question_id, [])
        if question.category in REFERENCE_CATEGORIES and len(reference) >= turn:
            turns["ref_answer"] = reference
            name = "single-math-v1" if single else "pair-math-v1"
        if turn > 1:
            name += "-multi-turn"
        # Templates for the first turn number only the reference, those for the second all fields.
        fields = {field: texts[0] for field, texts in turns.items()}
        for index in range(turn):
            fields |= {f"{field}_{index + 1}": texts[index] for field, texts in turns.items()}
        try:
            template = self.templates[name]
            user = template["prompt_template"].format(**fields)
            return JudgePrompt(name, template["system_prompt"], _context_text(question) + user)
        except (KeyError, IndexError, ValueError) as error:
            raise JudgeError(
                f"the prompt {name} of {JUDGE_PROMPTS.file} is missing or invalid ({error!r})"
            ) from error


def _context_text(question: Question) -> str:
    """Format the messages before the first turn; "" if there are none."""
    if not question.context:
        return ""
    messages = [f"### {role.capitalize()}:\n{content}\n" for role, content in question.context]
    return "\n".join([CONTEXT_START, *messages, CONTEXT_END])


def parse_rating(judgment: str) -> int | float:
    """Return the rating in a judge's reply; :data:`NO_RATING` without one from 1 to 10."""
    for pattern in _RATINGS:
        if match := pattern.search(judgment):
            text = match.group(1)
            if not 1 <= float(text) <= 10:
                return NO_RATING
            return float(text) if "." in text else int(text)
    return NO_RATING


def parse_winner(judgment: str) -> Winner:
    """Return the better of two answers in a judge's reply, as FastChat reads it."""
    for mark, winner in _WINNERS.items():
        if mark in judgment:
            return winner
    return "error"


def _rows_by_key(path: Path, key: str) -> dict[Any, dict[str, Any]]:
    """Read the objects of a file of JSON lines by the value of ``key``."""
    rows = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
                rows[row[key]] = row
            except (ValueError, KeyError, TypeError) as error:
                raise JudgeError(
                    f"{path}, line {number}: not a JSON object with {key!r}"
                ) from error
    return rows
