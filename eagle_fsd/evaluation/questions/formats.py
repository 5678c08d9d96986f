"""Read question files: the published formats, and users' own.

:func:`read_questions` is the entry point. It recognizes the format of a row by the row's fields,
see :data:`FORMATS`. All rows of a file have the same format.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import keyword
import tarfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import IO, Any

from eagle_fsd.bundled.problems import Problem, edited_problems, problems
from eagle_fsd.evaluation.graders import Grader, default_grader
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


@dataclass(frozen=True)
class Format:
    """A format of the rows of question files."""

    name: str
    example: str
    scored: str
    matches: Callable[[dict[str, Any]], bool]
    parse: Callable[[dict[str, Any], int], Question]  # of a row and its index, the default id


class QuestionError(ValueError):
    """A question file is invalid; the message names the file and, if known, the line or item."""


def read_questions(path: str | Path, grader: Grader | None = None) -> list[Question]:
    """Read all questions of a file, scored by ``grader`` or as their format says.

    A file holds JSON lines or a JSON array of objects, or prompts, one per line (``.txt``), or is a
    CSV file of MMLU (``.csv``) or the MMLU archive (``.tar``). A file whose name also ends in
    ``.gz`` is decompressed.
    """
    path = Path(path)
    readers = {".csv": _csv_rows, ".tar": _archive_rows, ".txt": _text_rows}
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    rows = readers.get(suffixes[-1] if suffixes else "", _json_rows)(path)
    questions: dict[int | str, Question] = {}
    first: Format | None = None
    try:
        for location, row in rows:
            try:
                found = _find_format(row)
                question = replace(found.parse(row, len(questions)), row=row)
                first = first or found
                if found is not first:
                    raise ValueError(
                        f"the row has the format {found.name!r}, but the rows before it have"
                        f" {first.name!r}"
                    )
                question = grader.apply(question) if grader is not None else question
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
    """Generate problems that the bundled pair was not trained on."""
    return _generated("bundled", ([problem] for problem in problems("test", count, seed)))


def bundled_edits(count: int, seed: int = 0) -> list[Question]:
    """Generate chats whose answers largely repeat each other: one problem about several people."""
    return _generated("bundled-edits", edited_problems("test", count, seed=seed))


def _generated(category: str, chats: Iterable[Sequence[Problem]]) -> list[Question]:
    """Return questions that are chats, with a problem per turn; the last one is scored."""
    found = []
    for index, chat in enumerate(chats):
        turns, answer = tuple(problem.question for problem in chat), str(chat[-1].final)
        found.append(Question(index, category, turns, scored_by="number", answer=answer))
    return found


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
        raise ValueError(f"question id {key!r} is {this}, but the ids before it are {others}")
    context = chain.from_iterable(question.context)
    texts = [str(key), question.answer or "", question.reference or "", *question.turns, *context]
    try:
        "".join([question.category, *texts]).encode()
    except UnicodeEncodeError as error:
        raise ValueError("a string contains a lone surrogate") from error


def _read_text(path: Path, newline: str | None = None) -> str:
    """Return the text of a file, which is decompressed if its name ends in ``.gz``."""
    opener: Callable[..., IO[str]] = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8-sig", newline=newline) as file:
        return file.read()


def _text_rows(path: Path) -> Iterator[LocatedRow]:
    """Yield the lines of a text file as prompts."""
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        location = f"{path}, line {number}"
        is_object = False
        with suppress(ValueError, RecursionError):
            is_object = isinstance(json.loads(line), dict)
        if is_object:
            raise QuestionError(f"{location}: a JSON object; rename the file to .jsonl")
        if line.strip():
            yield location, {"prompt": line}


def _json_rows(path: Path) -> Iterator[LocatedRow]:
    """Yield the objects of a file of JSON lines, or of a JSON array."""
    text = _read_text(path)
    values = _array_values if text.lstrip().startswith("[") else _line_values
    for location, row in values(text, path):
        if not isinstance(row, dict):
            raise QuestionError(f"{location}: not a JSON object")
        yield location, row


def _line_values(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the location and the value of every line that is not blank."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            location = f"{path}, line {number}"
            try:
                yield location, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise QuestionError(
                    f"{location}: not JSON; if every line is a prompt, rename the file to .txt"
                ) from error


def _array_values(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the location and the value of every item of a JSON array."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise QuestionError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from error
    except (ValueError, RecursionError) as error:  # also an integer with too many digits
        raise QuestionError(f"{path}, line 1: not JSON") from error
    for number, value in enumerate(values, 1):
        yield f"{path}, item {number}", value


def _csv_rows(path: Path) -> Iterator[LocatedRow]:
    """Yield the rows of one CSV file of MMLU."""
    yield from _mmlu_rows(io.StringIO(_read_text(path, newline=""), newline=""), path)


def _archive_rows(path: Path) -> Iterator[LocatedRow]:
    """Yield the test questions of the published MMLU archive, which has a CSV file per subject."""
    with tarfile.open(path) as archive:
        for name in sorted(archive.getnames()):
            member = archive.extractfile(name) if name.endswith("_test.csv") else None
            if member is not None:
                with io.TextIOWrapper(member, encoding="utf-8-sig", newline="") as file:
                    yield from _mmlu_rows(file, path / name)


def _mmlu_rows(file: Iterable[str], path: Path) -> Iterator[LocatedRow]:
    """Yield the question, the four choices and the letter of each row; there is no header."""
    subject = path.name.partition(".csv")[0]
    subject = subject.removesuffix("_test").removesuffix("_val").removesuffix("_dev")
    rows = csv.reader(file)
    for row in filter(None, rows):  # without blank lines
        location = f"{path}, line {rows.line_num}"  # the last line of a row that spans several
        if len(row) != 6:
            raise QuestionError(f"{location}: MMLU rows have 6 columns; got {len(row)}")
        question, *choices, answer = row
        fields = {"question": question, "choices": choices, "answer": answer, "subject": subject}
        yield location, fields


def _find_format(row: dict[str, Any]) -> Format:
    """Return the format of a row."""
    for known in FORMATS:
        if known.matches(row):
            return known
    names = [name if name.isprintable() else ascii(name) for name in row]
    raise ValueError(
        f"no known format has these fields: {', '.join(names)[:200] or '(none)'} (see eagle-fsd"
        " evaluate --formats)"
    )


def _require(condition: object, message: str) -> None:
    """Raise ValueError unless a condition holds."""
    if not condition:
        raise ValueError(message)


def _string(row: dict[str, Any], name: str, allow_blank: bool = False) -> str:
    """Return a field that must be a string."""
    value = row[name]
    _require(isinstance(value, str), f'"{name}" must be a string')
    _require(allow_blank or value.strip(), f'"{name}" must not be blank')
    return str(value)


def _optional_string(row: dict[str, Any], name: str) -> str | None:
    """Return a field that may be missing or null."""
    return None if row.get(name) is None else _string(row, name, allow_blank=True)


def _id(row: dict[str, Any], name: str) -> int | str:
    """Return a field that must be an integer or a string."""
    key: int | str = row[name]
    is_id = isinstance(key, (int, str)) and not isinstance(key, bool)
    _require(is_id, f'"{name}" must be an integer or a string')
    return key


def _id_or(row: dict[str, Any], index: int) -> int | str:
    """Return a row's ``"id"``, or its index if it has none."""
    return index if row.get("id") is None else _id(row, "id")


def _is_list(value: Any, kind: type) -> bool:
    """Return whether a value is a list of instances of a type."""
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _check_choices(choices: Any, kind: type, name: str) -> None:
    """Raise ValueError unless ``choices`` is a list of 2 to 5 values of type ``kind``."""
    fits = _is_list(choices, kind) and 2 <= len(choices) <= len(LETTERS)
    _require(fits, f'"choices" must be a list of 2 to {len(LETTERS)} {name}')


def _multi_turn(row: dict[str, Any], _: int) -> Question:
    """Convert a row of MT-bench or Spec-Bench."""
    turns = row["turns"]
    fits = _is_list(turns, str) and turns and all(map(str.strip, turns))
    _require(fits, '"turns" must be a non-empty list of non-blank strings')
    # MT-bench has a reference for each turn, Spec-Bench also lists of alternatives: take the first.
    reference = row.get("reference")
    while isinstance(reference, list):
        reference = reference[0] if reference else None
    fits = isinstance(reference, (str, type(None)))
    _require(fits, '"reference" must be a string or a list of strings')
    category = _optional_string(row, "category") or "general"
    key = _id(row, "question_id")
    return _with_answer(Question(key, category, tuple(turns), reference=reference), row)


def _own_question(row: dict[str, Any], index: int, turn: str, **fields: Any) -> Question:
    """Convert a row of a user's own file; ``fields`` are further fields of the question."""
    category = _optional_string(row, "category") or "general"
    return _with_answer(Question(_id_or(row, index), category, (turn,), **fields), row)


def _with_answer(question: Question, row: dict[str, Any]) -> Question:
    """Add a user's correct answer, if there is one, and its grader."""
    answer = row.get("answer")
    if answer is None:
        return question
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(answer, str) or not answer.strip():
        raise ValueError(NO_ANSWER)
    return default_grader(answer).apply(replace(question, answer=answer, own=True))


def _prompt(row: dict[str, Any], index: int) -> Question:
    """Convert a prompt."""
    return _own_question(row, index, _string(row, "prompt"))


def _messages(row: dict[str, Any], index: int) -> Question:
    """Convert a chat whose last message is answered."""
    messages = row["messages"]
    _require(_is_list(messages, dict), '"messages" must be a list of objects')
    for message in messages:
        _require(
            message.get("role") in ROLES and isinstance(message.get("content"), str),
            'each of "messages" must have a "role" (system, user or assistant) and a string'
            ' "content"',
        )
    _require(
        messages and messages[-1]["role"] == "user" and messages[-1]["content"].strip(),
        'the last of "messages" must be a user\'s and not blank; the correct answer, if there is'
        ' one, goes into "answer"',
    )
    context = tuple((message["role"], message["content"]) for message in messages[:-1])
    return _own_question(row, index, messages[-1]["content"], context=context)


def _question(row: dict[str, Any], index: int) -> Question:
    """Convert a question with its correct answer."""
    _require(row["answer"] is not None, NO_ANSWER)
    return _own_question(row, index, _string(row, "question"))


def _gsm8k(row: dict[str, Any], index: int) -> Question:
    """Convert a row of GSM8K."""
    question, solution = _string(row, "question"), _string(row, "answer")
    number = solution.rpartition("####")[2].strip().replace(",", "")
    try:
        number_value(number)
    except ValueError as error:
        raise ValueError('"answer" must end in "#### N" with a number N') from error
    request = (
        "Work it out step by step and end with a line that says #### and then the number alone."
    )
    return Question(
        _id_or(row, index),
        _optional_string(row, "category") or "gsm8k",
        (f"{question}\n{request}",),
        scored_by="number",
        answer=number,
        reference=solution,
    )


def _commonsense_qa(row: dict[str, Any], _: int) -> Question:
    """Convert a row of CommonsenseQA."""
    question, listed = row["question"], row["question"]["choices"]
    _check_choices(listed, dict, "objects")
    choices = [(_string(item, "label"), _string(item, "text", allow_blank=True)) for item in listed]
    labels = [label for label, _ in choices]
    fits = len(set(labels)) == len(labels) and set(labels) <= set(LETTERS)
    _require(fits, f'the labels of "choices" must be distinct letters of {LETTERS}')
    answer = _string(row, "answerKey")
    _require(answer in labels, f'"answerKey" must be the label of a choice; got {answer[:20]!r}')
    turn = _multiple_choice_prompt(_string(question, "stem"), choices)
    return Question(_id(row, "id"), "commonsense-qa", (turn,), scored_by="letter", answer=answer)


def _mmlu(row: dict[str, Any], index: int) -> Question:
    """Convert a row of MMLU, in the form of the archive or of the Hugging Face Hub."""
    _check_choices(row["choices"], str, "strings")
    choices = list(zip(LETTERS, row["choices"], strict=False))
    letters = [letter for letter, _ in choices]
    answer = row["answer"]
    if type(answer) is int and 0 <= answer < len(letters):
        answer = letters[answer]
    letter = answer.strip() if isinstance(answer, str) else ""
    _require(
        letter in letters,
        f'"answer" must be the letter or the index of a choice; got {repr(answer)[:20]}',
    )
    turn = _multiple_choice_prompt(_string(row, "question", allow_blank=True), choices)
    category = _optional_string(row, "subject") or _optional_string(row, "category") or "mmlu"
    return Question(_id_or(row, index), category, (turn,), scored_by="letter", answer=letter)


def _multiple_choice_prompt(stem: str, choices: list[tuple[str, str]]) -> str:
    """Format a question and its choices, with the request for a final letter."""
    lines = "\n".join(f"{label}. {text}" for label, text in choices)
    return f"{stem}\n{lines}\nThink briefly, then end with a line that says Answer: and the letter."


def _human_eval(row: dict[str, Any], _: int) -> Question:
    """Convert a row of HumanEval."""
    prompt, entry_point = _string(row, "prompt"), _string(row, "entry_point")
    fits = entry_point.isidentifier() and not keyword.iskeyword(entry_point)
    _require(fits, f'"entry_point" must be the name of a function; got {entry_point[:20]!r}')
    turn = (
        "Complete this Python function. Answer with the whole function in one code block.\n\n"
        f"```python\n{prompt.rstrip()}\n```"
    )
    return Question(
        _id(row, "task_id"),
        "humaneval",
        (turn,),
        scored_by="code",
        answer=_string(row, "test"),
        reference=_optional_string(row, "canonical_solution"),
    )


def _ifeval(row: dict[str, Any], _: int) -> Question:
    """Convert a row of IFEval, whose category is that of its first instruction."""
    names, options = row["instruction_id_list"], row["kwargs"]
    fits = _is_list(names, str) and names
    _require(fits, '"instruction_id_list" must be a non-empty list of strings')
    _require(_is_list(options, dict), '"kwargs" must be a list of objects')
    _require(len(names) == len(options), '"kwargs" must have an item for each instruction')
    category = names[0].partition(":")[0]
    return Question(_id(row, "key"), category, (_string(row, "prompt"),), "instructions")


NO_ANSWER = '"answer" must be a number or a string that is not blank'
#: Roles of messages in users' files.
ROLES = ("system", "user", "assistant")

_GRADED = "number or exact match, if there is an answer"
#: The formats of rows; the first one that matches a row applies.
FORMATS = (
    Format(
        "turns (MT-bench, Spec-Bench)",
        '{"question_id": 1, "turns": ["Name a river.", "And a lake?"], "category": "writing"}',
        scored=_GRADED,
        matches=lambda row: "turns" in row,
        parse=_multi_turn,
    ),
    Format(
        "code (HumanEval)",
        '{"task_id": "t/1", "prompt": "def f(x):", "entry_point": "f", "test": "..."}',
        scored="runs the code, with --execute-code",
        matches=lambda row: "entry_point" in row,
        parse=_human_eval,
    ),
    Format(
        "IFEval",
        '{"key": 1, "prompt": "Name a river without a comma.", "instruction_id_list":'
        ' ["punctuation:no_comma"], "kwargs": [{}]}',
        scored="programs that check each instruction",
        matches=lambda row: "instruction_id_list" in row,
        parse=_ifeval,
    ),
    Format(
        "prompt",
        '{"prompt": "Name a river.", "answer": "Rhine"}',
        scored=_GRADED,
        matches=lambda row: "prompt" in row,
        parse=_prompt,
    ),
    Format(
        "messages",
        '{"messages": [{"role": "user", "content": "Name a river."}]}',
        scored=_GRADED,
        matches=lambda row: "messages" in row,
        parse=_messages,
    ),
    Format(
        "CommonsenseQA",
        '{"id": "c1", "question": {"stem": "Where is a fish?", "choices": [{"label": "A", "text":'
        ' "sea"}, {"label": "B", "text": "sky"}]}, "answerKey": "A"}',
        scored="letter",
        matches=lambda row: isinstance(row.get("question"), dict),
        parse=_commonsense_qa,
    ),
    Format(
        "choices (MMLU)",
        '{"question": "2 + 2?", "choices": ["3", "4"], "answer": "B", "subject": "math"}',
        scored="letter",
        matches=lambda row: "choices" in row,
        parse=_mmlu,
    ),
    Format(
        "GSM8K",
        '{"question": "How many?", "answer": "2 + 2 = 4\\n#### 4"}',
        scored="number",
        matches=lambda row: "question" in row and "####" in str(row.get("answer")),
        parse=_gsm8k,
    ),
    Format(
        "question",
        '{"question": "What is the capital of Peru?", "answer": "Lima"}',
        scored="number or exact match",
        matches=lambda row: "question" in row,
        parse=_question,
    ),
)
