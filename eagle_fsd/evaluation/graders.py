"""Graders that users select with ``--grader``: built-in ones, and functions of their own.

A grader function takes the model's answer to the last turn and the question's fields, and returns
whether the answer is correct, or None if it has no score::

    def grade(answer: str, question: dict) -> bool | None:
        if question["answer"] is None:
            return None
        return question["answer"].lower() in answer.lower()

The fields are those of the row in the question file, and always ``question_id``, ``category``,
``turns`` (the user's messages) and ``answer`` (None if there is none). Answers may be empty.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle_fsd.evaluation.questions.question import Question, ScoredBy
from eagle_fsd.evaluation.scoring import HARNESS_FILTERS, number_value
from eagle_fsd.utils.options import OptionsError
from eagle_fsd.utils.text import one_line

#: Scores an answer, given the question's fields.
GraderFunction = Callable[[str, dict[str, Any]], bool | None]

#: The built-in graders and what counts as correct.
GRADERS: dict[ScoredBy, str] = {
    "exact": 'the answer is "answer", apart from whitespace around it',
    "regex": '"answer" is a Python regular expression that occurs in the answer',
    "number": 'the final number of the answer equals "answer"',
    "strict-match": 'the first number after "#### " is "answer", as in lm-evaluation-harness',
    "flexible-extract": 'the last number of the answer is "answer", as in lm-evaluation-harness',
}


class GraderError(ValueError):
    """A user's grader failed; the message names the question."""


@dataclass(frozen=True)
class Grader:
    """How the answers to all questions are scored: by a built-in grader or by ``grade``."""

    kind: ScoredBy
    grade: Callable[[str, Question], bool | None] | None = None

    def apply(self, question: Question) -> Question:
        """Return a question as this grader scores it; raise ValueError if it cannot be."""
        if self.kind == "function":
            return replace(question, scored_by=self.kind, grade=self.grade)
        if question.scored_by == "code":
            raise ValueError(f"answers with code cannot be graded by {self.kind}")
        if question.answer is None:
            return replace(question, scored_by="")
        if self.kind == "regex":
            try:
                re.compile(question.answer)
            except (re.error, OverflowError, RecursionError) as error:
                raise ValueError(f'"answer" is not a regular expression ({error})') from error
        if self.kind == "number" or self.kind in HARNESS_FILTERS:
            try:
                number_value(question.answer)
            except ValueError as error:
                raise ValueError(
                    f'"answer" must be a number; got {question.answer[:20]!r}'
                ) from error
        return replace(question, scored_by=self.kind)


def default_grader(answer: str) -> Grader:
    """Return the grader of a user's question if none is selected: ``number`` or ``exact``."""
    try:
        number_value(answer)
    except ValueError:
        return Grader("exact")
    return Grader("number")


def find_grader(name: str) -> Grader:
    """Return one of :data:`GRADERS` by name, or one that calls a function."""
    for kind in GRADERS:
        if name == kind:
            return Grader(kind)
    if ":" not in name:
        known = ", ".join(GRADERS)
        raise OptionsError(f"--grader must be one of {known}, or FILE.py:FUNCTION; got {name!r}")
    function = load_function(name)

    def grade(answer: str, question: Question) -> bool | None:
        fields = {
            **question.row,
            "question_id": question.question_id,
            "category": question.category,
            "turns": list(question.turns),
            "answer": question.answer,
        }
        where = f"the grader {name} failed on question {question.question_id!r}"
        try:
            result: Any = function(answer, fields)
        except Exception as error:
            raise GraderError(f"{where}: {type(error).__name__}: {one_line(error)}") from error
        if result is None:
            return None
        try:
            if result == bool(result):
                return bool(result)
        except (RuntimeError, TypeError, ValueError):  # as with an array of several elements
            pass
        raise GraderError(f"{where}: it must return True, False or None; got {result!r}")

    return Grader("function", grade)


def load_function(name: str) -> GraderFunction:
    """Load a grader function from ``FILE.py:FUNCTION`` or from ``MODULE:FUNCTION``."""
    source, _, attribute = name.rpartition(":")
    try:
        if source.endswith(".py"):
            # Registered by this name: pickle, dataclasses and type hints look up their module.
            spec = importlib.util.spec_from_file_location(f"grader_{Path(source).stem}", source)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(source)
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise OptionsError(f"--grader: cannot import {source!r} ({reason})") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise OptionsError(f"--grader: {source} has no function {attribute!r}")
    return function  # type: ignore[no-any-return]
