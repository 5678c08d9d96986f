"""Question sets: MT-bench, GSM8K, CommonsenseQA, MMLU, HumanEval, and the bundled problems.

A name is looked up in a local folder and otherwise downloaded from its public home; a path is read
as it is. Whatever the format, a question becomes a :class:`Question`: the turns to be said, and how
the answer is scored.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: How an answer is scored: not at all, by its final number, by its letter, by running its code.
SCORED_BY = ("", "number", "letter", "code")
LETTERS = "ABCDE"

#: What reading a file raises that was cut off or is none of its kind.
DAMAGED = (
    tarfile.TarError,
    gzip.BadGzipFile,
    zlib.error,
    csv.Error,
    EOFError,
    UnicodeDecodeError,
)


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        question_id: As in its file, or its place in it.
        category: As in its file, or the set's name.
        turns: What the user says, turn by turn.
        scored_by: One of :data:`SCORED_BY`; "": no score of its own (MT-bench has a judge).
        answer: What is right: the number, the letter; the test program for code.
        reference: A worked answer, where there is one: its likelihood can be asked.
        extra: What else the score needs (HumanEval's prompt and entry point).
    """

    question_id: int | str
    category: str
    turns: tuple[str, ...]
    scored_by: str = ""
    answer: str | None = None
    reference: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class QuestionError(ValueError):
    """A line is no question of its format; the message names the file and the line."""


def read_questions(path: str | Path) -> list[Question]:
    """Every question of a file, its format told by its fields.

    Raises:
        QuestionError: A line is malformed, or no format has such fields.
        OSError: The file cannot be read.
    """
    path = Path(path)
    readers = {".csv": _csv_file, ".tar": _mmlu_archive}
    rows = readers.get(path.suffix, _json_rows)(path)
    questions: list[Question] = []
    seen: set[int | str] = set()
    try:
        for line, row in rows:
            try:
                question = _checked(_question(row, len(questions), path), seen)
            except (KeyError, TypeError, ValueError, IndexError) as error:
                missing = isinstance(error, KeyError)
                reason = f"{error.args[0]!r} is missing" if missing else str(error)
                raise QuestionError(f"{path}, line {line}: {reason}") from error
            questions.append(question)
    except DAMAGED as error:
        raise QuestionError(f"{path} is damaged ({error})") from error
    if not questions:
        raise QuestionError(f"{path} holds no question")
    return questions


def _checked(question: Question, seen: set[int | str]) -> Question:
    """``question``, fit to be answered and written down; its id is added to ``seen``."""
    key = question.question_id
    if isinstance(key, bool) or not isinstance(key, (int, str)):
        raise ValueError('"question_id" is neither a number nor a text')
    if key in seen:
        raise ValueError(f"another question has the id {key!r}")
    seen.add(key)
    try:
        "".join([question.category, str(key), *question.turns]).encode()
    except UnicodeEncodeError as error:
        raise ValueError("a text holds half of a character (a lone surrogate)") from error
    return question


def bundled_questions(count: int, seed: int = 0) -> list[Question]:
    """Unseen problems of the bundled generator."""
    from eagle_fsd.model.bundled.problems import problems

    return [
        Question(index, "bundled", (item.question,), "number", str(item.final))
        for index, item in enumerate(problems("test", count, seed))
    ]


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        for line, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except ValueError as error:
                raise QuestionError(f"{path}, line {line}: not JSON") from error
            if not isinstance(row, dict):
                raise QuestionError(f"{path}, line {line}: not a JSON object")
            yield line, row


def _csv_file(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8", newline="") as file:
        yield from _mmlu_rows(file, path)


def _mmlu_archive(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The published archive: a file of test questions for each subject."""
    with tarfile.open(path) as archive:
        for member in sorted(archive.getnames()):
            opened = archive.extractfile(member) if member.endswith("_test.csv") else None
            if opened is not None:
                with io.TextIOWrapper(opened, encoding="utf-8", newline="") as file:
                    yield from _mmlu_rows(file, path / member)


def _mmlu_rows(file: Iterable[str], path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """MMLU's own files: question, four choices, letter; no header."""
    for line, row in enumerate(csv.reader(file), 1):
        if len(row) != 6:
            raise QuestionError(f"{path}, line {line}: {len(row)} columns, not 6 as in MMLU")
        subject = path.stem.removesuffix("_test").removesuffix("_val").removesuffix("_dev")
        named = {"question": row[0], "choices": row[1:5], "answer": row[5], "subject": subject}
        yield line, named


def _question(row: dict[str, Any], place: int, path: Path) -> Question:
    if "turns" in row:  # MT-bench, Spec-Bench
        return _multi_turn(row)
    if "entry_point" in row:
        return _human_eval(row)
    if isinstance(row.get("question"), dict):
        return _commonsense_qa(row)
    if "choices" in row:
        return _mmlu(row, place)
    if "question" in row:
        return _gsm8k(row, place)
    raise ValueError("no known format has these fields: " + ", ".join(map(str, row)))


def _multi_turn(row: dict[str, Any]) -> Question:
    turns = row["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        raise ValueError('"turns" is not a list of texts')
    reference = row.get("reference")
    if isinstance(reference, list):
        reference = reference[0] if reference else None
    category = str(row.get("category", "general"))
    return Question(row["question_id"], category, tuple(turns), reference=reference)


def _gsm8k(row: dict[str, Any], place: int) -> Question:
    worked = row["answer"]
    if "####" not in worked:
        raise ValueError('"answer" does not end in "#### N"')
    number = worked.rsplit("####", 1)[1].strip().replace(",", "")
    turn = (
        f"{row['question']}\nWork it out step by step and end with a line that says #### and then"
        " the number alone."
    )
    return Question(place, "gsm8k", (turn,), "number", number, worked)


def _commonsense_qa(row: dict[str, Any]) -> Question:
    question = row["question"]
    choices = [(choice["label"], choice["text"]) for choice in question["choices"]]
    turn = _letters_prompt(question["stem"], choices)
    return Question(row["id"], "commonsense-qa", (turn,), "letter", row["answerKey"])


def _mmlu(row: dict[str, Any], place: int) -> Question:
    choices = list(zip(LETTERS, row["choices"], strict=False))
    answer = row["answer"]
    letter = LETTERS[answer] if isinstance(answer, int) else str(answer).strip()
    if letter not in LETTERS[: len(choices)]:
        raise ValueError(f"the answer {answer!r} is none of the choices")
    turn = _letters_prompt(row["question"], choices)
    return Question(place, str(row.get("subject", "mmlu")), (turn,), "letter", letter)


def _letters_prompt(stem: str, choices: list[tuple[str, str]]) -> str:
    lines = "\n".join(f"{label}. {text}" for label, text in choices)
    return f"{stem}\n{lines}\nThink briefly, then end with a line that says Answer: and the letter."


def _human_eval(row: dict[str, Any]) -> Question:
    turn = (
        "Complete this Python function. Answer with the whole function in one code block.\n\n"
        f"```python\n{row['prompt'].rstrip()}\n```"
    )
    extra = {"prompt": row["prompt"], "entry_point": row["entry_point"]}
    return Question(
        row["task_id"],
        "humaneval",
        (turn,),
        "code",
        row["test"],
        row.get("canonical_solution"),
        extra,
    )
