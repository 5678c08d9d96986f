"""Read question files in their published formats.

:func:`read_questions` is the entry point. It recognizes the format of a row by the row's fields.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import keyword
import tarfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from eagle_fsd.bundled.problems import edited_problems, problems
from eagle_fsd.evaluation.questions.question import LETTERS, Question
from eagle_fsd.evaluation.scoring import number_value

#: A row's location, for error messages, and its fields.
LocatedRow = tuple[str, dict[str, Any]]

#: Exceptions raised while reading a file that is truncated or of another type.
_DAMAGED = (
    tarfile.TarError,
    gzip.BadGzipFile,
    zlib.error,
    csv.Error,
    EOFError,
    UnicodeDecodeError,
)


class QuestionError(ValueError):
    """A question file is invalid; the message names the file and the line."""


def read_questions(path: str | Path) -> list[Question]:
    """Read all questions of a file.

    Args:
        path: A file of JSON lines (``.gz``: compressed), a CSV file of MMLU (``.csv``) or the MMLU
            archive (``.tar``).

    Returns:
        The questions in the file's order.

    Raises:
        QuestionError: The file is damaged or empty, or a row is invalid or of an unknown format.
        OSError: The file cannot be read.
    """
    path = Path(path)
    readers = {".csv": _csv_rows, ".tar": _archive_rows}
    rows = readers.get(path.suffix, _json_rows)(path)
    questions: dict[int | str, Question] = {}
    try:
        for location, row in rows:
            try:
                question = _parse(row, index=len(questions))
                _validate(question, questions)
            except KeyError as error:
                raise QuestionError(f"{location}: {error.args[0]!r} is missing") from error
            except ValueError as error:
                raise QuestionError(f"{location}: {error}") from error
            questions[question.question_id] = question
    except _DAMAGED as error:
        raise QuestionError(f"{path} is damaged ({error})") from error
    if not questions:
        raise QuestionError(f"{path} contains no questions")
    return list(questions.values())


def bundled_questions(count: int, seed: int = 0) -> list[Question]:
    """Generate problems that the bundled pair was not trained on.

    Args:
        count: The number of problems.
        seed: The generator's seed.

    Returns:
        The problems as questions.
    """
    return [
        Question(index, "bundled", (problem.question,), "number", str(problem.final))
        for index, problem in enumerate(problems("test", count, seed))
    ]


def bundled_edits(count: int, seed: int = 0) -> list[Question]:
    """Generate chats whose answers largely repeat each other: one problem about several people.

    The problems belong to the split that the bundled pair was not trained on. The number is the
    same in all turns.

    Args:
        count: The number of chats.
        seed: The generator's seed.

    Returns:
        The chats as questions.
    """
    return [
        Question(
            index,
            "bundled-edits",
            tuple(problem.question for problem in versions),
            "number",
            str(versions[-1].final),
        )
        for index, versions in enumerate(edited_problems("test", count, seed=seed))
    ]


def _validate(question: Question, previous: Collection[int | str]) -> None:
    """Raise ValueError unless a question's id fits the previous ids and its text can be encoded."""
    key = question.question_id
    if key in previous:
        raise ValueError(f"duplicate question id {key!r}")
    # FastChat sorts by id, so all ids must be of one type.
    if type(key) is not type(next(iter(previous), key)):
        this, others = (
            ("a string", "integers") if isinstance(key, str) else ("an integer", "strings")
        )
        raise ValueError(f'"question_id" is {this}, but the ids before it are {others}')
    texts = [question.category, str(key), *question.turns]
    texts += [question.answer or "", question.reference or ""]
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise ValueError("a string contains a lone surrogate") from error


def _json_rows(path: Path) -> Iterator[LocatedRow]:
    """Yield the objects of a file of JSON lines."""
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            location = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise QuestionError(f"{location}: not JSON") from error
            if not isinstance(row, dict):
                raise QuestionError(f"{location}: not a JSON object")
            yield location, row


def _csv_rows(path: Path) -> Iterator[LocatedRow]:
    """Yield the rows of one CSV file of MMLU."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        yield from _mmlu_rows(file, path)


def _archive_rows(path: Path) -> Iterator[LocatedRow]:
    """Yield the test questions of the published MMLU archive, which has a CSV file per subject."""
    with tarfile.open(path) as archive:
        for name in sorted(archive.getnames()):
            member = archive.extractfile(name) if name.endswith("_test.csv") else None
            if member is not None:
                with io.TextIOWrapper(member, encoding="utf-8-sig", newline="") as file:
                    yield from _mmlu_rows(file, path / name)


def _mmlu_rows(file: Iterable[str], path: Path) -> Iterator[LocatedRow]:
    """Yield rows of question, four choices and letter; the files have no header."""
    subject = path.stem.removesuffix("_test").removesuffix("_val").removesuffix("_dev")
    rows = csv.reader(file)
    for row in rows:
        location = f"{path}, line {rows.line_num}"  # the last line of a row that spans several
        if len(row) != 6:
            raise QuestionError(f"{location}: MMLU rows have 6 columns; got {len(row)}")
        question, *choices, answer = row
        yield (
            location,
            {"question": question, "choices": choices, "answer": answer, "subject": subject},
        )


def _parse(row: dict[str, Any], index: int) -> Question:
    """Convert a row of any format; ``index`` becomes the id if the format has no ids."""
    if "turns" in row:
        return _multi_turn(row)
    if "entry_point" in row:
        return _human_eval(row)
    if isinstance(row.get("question"), dict):
        return _commonsense_qa(row)
    if "choices" in row:
        return _mmlu(row, index)
    if "question" in row:
        return _gsm8k(row, index)
    names = [name if name.isprintable() else ascii(name) for name in row]
    raise ValueError("no known format has these fields: " + ", ".join(names)[:200])


def _string(row: dict[str, Any], name: str, allow_blank: bool = False) -> str:
    """Return a field that must be a string."""
    value = row[name]
    if not isinstance(value, str):
        raise ValueError(f'"{name}" must be a string')
    if not allow_blank and not value.strip():
        raise ValueError(f'"{name}" must not be blank')
    return value


def _optional_string(row: dict[str, Any], name: str) -> str | None:
    """Return a field that may be missing or null."""
    return None if row.get(name) is None else _string(row, name, allow_blank=True)


def _id(row: dict[str, Any], name: str) -> int | str:
    """Return a field that must be an integer or a string."""
    key = row[name]
    if isinstance(key, bool) or not isinstance(key, (int, str)):
        raise ValueError(f'"{name}" must be an integer or a string')
    return key


def _check_choices(choices: Any, kind: type, name: str) -> None:
    """Raise ValueError unless ``choices`` is a list of 2 to 5 values of type ``kind``."""
    if (
        not isinstance(choices, list)
        or not all(isinstance(item, kind) for item in choices)
        or not 2 <= len(choices) <= len(LETTERS)
    ):
        raise ValueError(f'"choices" must be a list of 2 to {len(LETTERS)} {name}')


def _multi_turn(row: dict[str, Any]) -> Question:
    """Convert a row of MT-bench or Spec-Bench."""
    turns = row["turns"]
    if (
        not isinstance(turns, list)
        or not turns
        or not all(isinstance(turn, str) and turn.strip() for turn in turns)
    ):
        raise ValueError('"turns" must be a non-empty list of non-blank strings')
    # MT-bench has a reference per turn; Spec-Bench has a list of references in some rows.
    reference = row.get("reference")
    while isinstance(reference, list):
        reference = reference[0] if reference else None
    if not isinstance(reference, (str, type(None))):
        raise ValueError('"reference" must be a string or a list of strings')
    category = _optional_string(row, "category") or "general"
    return Question(_id(row, "question_id"), category, tuple(turns), reference=reference)


def _gsm8k(row: dict[str, Any], index: int) -> Question:
    """Convert a row of GSM8K."""
    question, solution = _string(row, "question"), _string(row, "answer")
    _, marker, number = solution.rpartition("####")
    number = number.strip().replace(",", "")
    try:
        number_value(number)
    except ValueError:
        number = ""
    if not marker or not number:
        raise ValueError('"answer" must end in "#### N" with a number N')
    turn = (
        f"{question}\nWork it out step by step and end with a line that says #### and then"
        " the number alone."
    )
    return Question(index, "gsm8k", (turn,), "number", number, solution)


def _commonsense_qa(row: dict[str, Any]) -> Question:
    """Convert a row of CommonsenseQA."""
    question, listed = row["question"], row["question"]["choices"]
    _check_choices(listed, dict, "objects")
    choices = [(_string(item, "label"), _string(item, "text", allow_blank=True)) for item in listed]
    labels = [label for label, _ in choices]
    if len(set(labels)) < len(labels) or not set(labels) <= set(LETTERS):
        raise ValueError(f'the labels of "choices" must be distinct letters of {LETTERS}')
    answer = _string(row, "answerKey")
    if answer not in labels:
        raise ValueError(f'"answerKey" must be the label of a choice; got {answer[:20]!r}')
    turn = _multiple_choice_prompt(_string(question, "stem"), choices)
    return Question(_id(row, "id"), "commonsense-qa", (turn,), "letter", answer)


def _mmlu(row: dict[str, Any], index: int) -> Question:
    """Convert a row of MMLU, in the form of the archive or of the Hugging Face Hub."""
    _check_choices(row["choices"], str, "strings")
    choices = list(zip(LETTERS, row["choices"], strict=False))
    letters = [letter for letter, _ in choices]
    answer = row["answer"]
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(letters):
        letter = letters[answer]
    elif isinstance(answer, str) and answer.strip() in letters:
        letter = answer.strip()
    else:
        raise ValueError(
            f'"answer" must be the letter or the index of a choice; got {repr(answer)[:20]}'
        )
    turn = _multiple_choice_prompt(_string(row, "question", allow_blank=True), choices)
    category = _optional_string(row, "subject") or "mmlu"
    return Question(index, category, (turn,), "letter", letter)


def _multiple_choice_prompt(stem: str, choices: list[tuple[str, str]]) -> str:
    """Format a question and its choices, with the request for a final letter."""
    lines = "\n".join(f"{label}. {text}" for label, text in choices)
    return f"{stem}\n{lines}\nThink briefly, then end with a line that says Answer: and the letter."


def _human_eval(row: dict[str, Any]) -> Question:
    """Convert a row of HumanEval."""
    prompt, entry_point = _string(row, "prompt"), _string(row, "entry_point")
    if not entry_point.isidentifier() or keyword.iskeyword(entry_point):
        raise ValueError(f'"entry_point" must be the name of a function; got {entry_point[:20]!r}')
    turn = (
        "Complete this Python function. Answer with the whole function in one code block.\n\n"
        f"```python\n{prompt.rstrip()}\n```"
    )
    return Question(
        _id(row, "task_id"),
        "humaneval",
        (turn,),
        "code",
        _string(row, "test"),
        _optional_string(row, "canonical_solution"),
        {"prompt": prompt, "entry_point": entry_point},
    )
