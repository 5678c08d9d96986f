"""Question sets: MT-bench, GSM8K, CommonsenseQA, MMLU, HumanEval, and the bundled problems.

A name is looked up in a local folder and otherwise downloaded from its public home; a path is read
as it is. Whatever the format, a question becomes a :class:`Question`: the turns to be said, and how
the answer is scored.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import keyword
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from eagle_fsd.evaluation.questions.question import LETTERS, Question
from eagle_fsd.evaluation.scoring import number_value

#: What reading a file raises that was cut off or is none of its kind.
DAMAGED = (
    tarfile.TarError,
    gzip.BadGzipFile,
    zlib.error,
    csv.Error,
    EOFError,
    UnicodeDecodeError,
)


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
        for place, row in rows:
            try:
                question = _checked(_question(row, len(questions)), seen)
            except (KeyError, ValueError) as error:
                missing = isinstance(error, KeyError)
                reason = f"{error.args[0]!r} is missing" if missing else str(error)
                raise QuestionError(f"{place}: {reason}") from error
            questions.append(question)
    except DAMAGED as error:
        raise QuestionError(f"{path} is damaged ({error})") from error
    if not questions:
        raise QuestionError(f"{path} holds no question")
    return questions


def _checked(question: Question, seen: set[int | str]) -> Question:
    """``question``, fit to be answered and written down; its id is added to ``seen``."""
    key = question.question_id
    if key in seen:
        raise ValueError(f"another question has the id {key!r}")
    kind = type(key)
    if any(not isinstance(other, kind) for other in itertools.islice(seen, 1)):
        # FastChat's tools sort by it.
        this, others = ("a text", "numbers") if kind is str else ("a number", "texts")
        raise ValueError(f'"question_id" is {this}, those before it are {others}')
    seen.add(key)
    written = [question.category, str(key), *question.turns]
    written += [question.answer or "", question.reference or ""]
    try:
        "".join(written).encode()
    except UnicodeEncodeError as error:
        raise ValueError("a text holds half of a character (a lone surrogate)") from error
    return question


def bundled_questions(count: int, seed: int = 0) -> list[Question]:
    """Unseen problems of the bundled generator."""
    from eagle_fsd.bundled.problems import problems

    return [
        Question(index, "bundled", (item.question,), "number", str(item.final))
        for index, item in enumerate(problems("test", count, seed))
    ]


#: Where a row stands, for messages, and its fields.
Placed = tuple[str, dict[str, Any]]


def _json_rows(path: Path) -> Iterator[Placed]:
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8-sig") as file:
        for line, text in enumerate(file, 1):
            if not text.strip():
                continue
            place = f"{path}, line {line}"
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise QuestionError(f"{place}: not JSON") from error
            if not isinstance(row, dict):
                raise QuestionError(f"{place}: not a JSON object")
            yield place, row


def _csv_file(path: Path) -> Iterator[Placed]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        yield from _mmlu_rows(file, path)


def _mmlu_archive(path: Path) -> Iterator[Placed]:
    """The published archive: a file of test questions for each subject."""
    with tarfile.open(path) as archive:
        for member in sorted(archive.getnames()):
            opened = archive.extractfile(member) if member.endswith("_test.csv") else None
            if opened is not None:
                with io.TextIOWrapper(opened, encoding="utf-8-sig", newline="") as file:
                    yield from _mmlu_rows(file, path / member)


def _mmlu_rows(file: Iterable[str], path: Path) -> Iterator[Placed]:
    """MMLU's own files: question, four choices, letter; no header."""
    subject = path.stem.removesuffix("_test").removesuffix("_val").removesuffix("_dev")
    rows = csv.reader(file)
    for row in rows:
        place = f"{path}, line {rows.line_num}"  # the last one of the row
        if len(row) != 6:
            raise QuestionError(f"{place}: {len(row)} columns, not 6 as in MMLU")
        yield (
            place,
            {"question": row[0], "choices": row[1:5], "answer": row[5], "subject": subject},
        )


def _question(row: dict[str, Any], place: int) -> Question:
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
    names = [name if name.isprintable() else ascii(name) for name in row]
    raise ValueError("no known format has these fields: " + ", ".join(names)[:200])


def _text(row: dict[str, Any], name: str, blank: bool = False) -> str:
    """A field that is a text, and not a blank one unless it may be."""
    value = row[name]
    if not isinstance(value, str):
        raise ValueError(f'"{name}" is not a text')
    if not blank and not value.strip():
        raise ValueError(f'"{name}" is empty')
    return value


def _optional_text(row: dict[str, Any], name: str) -> str | None:
    return None if row.get(name) is None else _text(row, name, blank=True)


def _id(row: dict[str, Any], name: str) -> int | str:
    key = row[name]
    if isinstance(key, bool) or not isinstance(key, (int, str)):
        raise ValueError(f'"{name}" is neither a number nor a text')
    return key


def _multi_turn(row: dict[str, Any]) -> Question:
    turns = row["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        raise ValueError('"turns" is not a list of texts')
    if not all(turn.strip() for turn in turns):
        raise ValueError('"turns" holds an empty text')
    reference = row.get("reference")
    while isinstance(reference, list):  # one for each turn; Spec-Bench has several for some
        reference = reference[0] if reference else None
    if not isinstance(reference, (str, type(None))):
        raise ValueError('"reference" is neither a text nor a list of texts')
    category = _optional_text(row, "category") or "general"
    return Question(_id(row, "question_id"), category, tuple(turns), reference=reference)


def _gsm8k(row: dict[str, Any], place: int) -> Question:
    question, worked = _text(row, "question"), _text(row, "answer")
    number = worked.rpartition("####")[2].strip().replace(",", "")
    try:
        number_value(number)
    except ValueError:
        number = ""
    if "####" not in worked or not number:
        raise ValueError('"answer" does not end in "#### N"')
    turn = (
        f"{question}\nWork it out step by step and end with a line that says #### and then"
        " the number alone."
    )
    return Question(place, "gsm8k", (turn,), "number", number, worked)


def _commonsense_qa(row: dict[str, Any]) -> Question:
    question, listed = row["question"], row["question"]["choices"]
    _choices(listed, dict, "objects")
    choices = [(_text(item, "label"), _text(item, "text", blank=True)) for item in listed]
    labels = [label for label, _ in choices]
    if len(set(labels)) < len(labels) or not set(labels) <= set(LETTERS):
        raise ValueError(f"the choices' labels are not different letters of {LETTERS}")
    answer = _text(row, "answerKey")
    if answer not in labels:
        raise ValueError(f'"answerKey" is {answer[:20]!r}, none of the choices')
    turn = _letters_prompt(_text(question, "stem"), choices)
    return Question(_id(row, "id"), "commonsense-qa", (turn,), "letter", answer)


def _choices(listed: Any, kind: type, name: str) -> None:
    """Raise an error unless ``listed`` is a list of choices."""
    if not isinstance(listed, list) or not all(isinstance(item, kind) for item in listed):
        raise ValueError(f'"choices" is not a list of {name}')
    if not 2 <= len(listed) <= len(LETTERS):
        raise ValueError(f'"choices" is not a list of 2 to {len(LETTERS)} {name}')


def _mmlu(row: dict[str, Any], place: int) -> Question:
    _choices(row["choices"], str, "texts")
    choices = list(zip(LETTERS, row["choices"], strict=False))
    answer = row["answer"]
    if isinstance(answer, bool) or not isinstance(answer, (int, str)):
        raise ValueError('"answer" is neither a letter nor the place of a choice')
    letters = [letter for letter, _ in choices]
    letter = answer.strip() if isinstance(answer, str) else "".join(letters[answer : answer + 1])
    if letter not in letters or (isinstance(answer, int) and answer < 0):
        raise ValueError(f'"answer" is {str(answer)[:20]!r}, none of the choices')
    turn = _letters_prompt(_text(row, "question", blank=True), choices)
    category = _optional_text(row, "subject") or "mmlu"
    return Question(place, category, (turn,), "letter", letter)


def _letters_prompt(stem: str, choices: list[tuple[str, str]]) -> str:
    lines = "\n".join(f"{label}. {text}" for label, text in choices)
    return f"{stem}\n{lines}\nThink briefly, then end with a line that says Answer: and the letter."


def _human_eval(row: dict[str, Any]) -> Question:
    prompt, entry = _text(row, "prompt"), _text(row, "entry_point")
    if not entry.isidentifier() or keyword.iskeyword(entry):
        raise ValueError(f'"entry_point" is {entry[:20]!r}, no name of a function')
    turn = (
        "Complete this Python function. Answer with the whole function in one code block.\n\n"
        f"```python\n{prompt.rstrip()}\n```"
    )
    return Question(
        _id(row, "task_id"),
        "humaneval",
        (turn,),
        "code",
        _text(row, "test"),
        _optional_text(row, "canonical_solution"),
        {"prompt": prompt, "entry_point": entry},
    )
