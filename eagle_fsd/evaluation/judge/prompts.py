"""What a judge is asked, in FastChat's words, and the rating in what it says.

The prompts and the reference answers are FastChat's own files, found as question sets are (see
:mod:`eagle_fsd.evaluation.questions.sets`). References go by ``question_id``, so they are MT-bench's: a set
of one's own that has questions of mathematics, reasoning or code under MT-bench's numbers would be
given them too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.questions.sets import JUDGE_PROMPTS, REFERENCE_ANSWERS, fetch

#: Categories in which the judge sees a right answer beside the one it judges.
WITH_REFERENCE = frozenset({"math", "reasoning", "coding", "arena-hard-200"})
#: Turns that FastChat has prompts for.
TURNS = 2
#: The score of a judgment without a rating; FastChat's tables leave it out.
NO_RATING = -1

_RATINGS = (re.compile(r"\[\[(\d+\.?\d*)\]\]"), re.compile(r"\[(\d+\.?\d*)\]"))


class JudgeError(ValueError):
    """Answers cannot be judged, or not now; the message is one line and says why."""


@dataclass(frozen=True)
class Prompt:
    """What a judge is asked: FastChat's ``name`` of the wording, and the two messages."""

    name: str
    system: str
    user: str


class JudgePrompts:
    """FastChat's wordings, and the reference answers that some of them hold.

    Args:
        wordings: By name; the keys used are ``system_prompt`` and ``prompt_template``.
        references: The turns of a right answer by question.
    """

    def __init__(
        self, wordings: dict[str, dict[str, Any]], references: dict[int | str, list[str]]
    ) -> None:
        self.wordings, self.references = wordings, references

    @classmethod
    def find(cls, questions: Sequence[Question]) -> JudgePrompts:
        """Those of the data folder, downloaded if need be; references only if they are needed.

        Raises:
            QuestionSetError: A file is neither there nor to be had.
            JudgeError: A file is malformed.
        """
        wordings = _by_key(fetch(JUDGE_PROMPTS), "name")
        if not any(question.category in WITH_REFERENCE for question in questions):
            return cls(wordings, {})
        path = fetch(REFERENCE_ANSWERS)
        try:
            references = {
                key: row["choices"][0]["turns"] for key, row in _by_key(path, "question_id").items()
            }
        except (KeyError, IndexError, TypeError) as error:
            raise JudgeError(f"{path} holds a line that is no answer of FastChat's") from error
        return cls(wordings, references)

    def fill(self, question: Question, answers: Sequence[str], turn: int) -> Prompt:
        """The prompt for the answer to ``turn``, 1 or 2; ``answers`` holds all up to it.

        Where the category asks for a reference and there is none, the judge goes without.

        Raises:
            JudgeError: The file of prompts has none of the name, or it is malformed.
        """
        reference = self.references.get(question.question_id, [])
        with_reference = question.category in WITH_REFERENCE and len(reference) >= turn
        name = "single-math-v1" if with_reference else "single-v1"
        # The second turn's wordings number their fields, the first turn's do not.
        fields = {"question": question.turns[0], "answer": answers[0]}
        for at in range(turn):
            fields[f"question_{at + 1}"] = question.turns[at]
            fields[f"answer_{at + 1}"] = answers[at]
            if with_reference:
                fields[f"ref_answer_{at + 1}"] = reference[at]
        name += "-multi-turn" if turn > 1 else ""
        try:
            wording = self.wordings[name]
            user = wording["prompt_template"].format(**fields)
            return Prompt(name, wording["system_prompt"], user)
        except (KeyError, IndexError, ValueError) as error:
            raise JudgeError(
                f"{JUDGE_PROMPTS.file} has no prompt {name}, or a malformed one ({error!r})"
            ) from error


def rating(judgment: str) -> int | float:
    """The first number in double brackets, else in single ones; -1: none, or not 1 to 10."""
    for pattern in _RATINGS:
        found = pattern.search(judgment)
        if found:
            text = found.group(1)
            if not 1 <= float(text) <= 10:
                return NO_RATING
            return float(text) if "." in text else int(text)
    return NO_RATING


def _by_key(path: Path, key: str) -> dict[Any, dict[str, Any]]:
    """The objects of a file of JSON lines by their ``key``."""
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
                found[row[key]] = row
            except (ValueError, KeyError, TypeError) as error:
                raise JudgeError(f"{path}, line {number}: no JSON object with {key!r}") from error
    return found
