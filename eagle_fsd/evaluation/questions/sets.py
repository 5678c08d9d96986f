"""Find question sets by name, and download them from their publishers if necessary.

The additional files that a judge needs are found in the same way.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eagle_fsd.evaluation.config import EvaluationRequest
from eagle_fsd.evaluation.graders import Grader, find_grader
from eagle_fsd.evaluation.questions.formats import (
    bundled_edits,
    bundled_questions,
    read_questions,
)
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.utils.files import atomic_path

#: Environment variable that names the folder of downloaded files.
DATA_VARIABLE = "EAGLE_FSD_DATA"
#: Default number of questions in a generated set.
DEFAULT_BUNDLED_COUNT = 100

#: Called during a download with the bytes received and the total size (0 if unknown).
DownloadProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class PublishedFile:
    """A published file, and its name in the data folder."""

    file: str
    url: str
    sha256: str


_GITHUB = "https://raw.githubusercontent.com"
SETS = {
    "mt-bench": PublishedFile(
        "mt_bench_question.jsonl",
        f"{_GITHUB}/lm-sys/FastChat/main/fastchat/llm_judge/data/mt_bench/question.jsonl",
        "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
    ),
    "spec-bench": PublishedFile(
        "spec_bench_question.jsonl",
        f"{_GITHUB}/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
        "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04",
    ),
    "gsm8k": PublishedFile(
        "gsm8k_test.jsonl",
        f"{_GITHUB}/openai/grade-school-math/master/grade_school_math/data/test.jsonl",
        "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
    ),
    "gsm8k-train": PublishedFile(
        "gsm8k_train.jsonl",
        f"{_GITHUB}/openai/grade-school-math/master/grade_school_math/data/train.jsonl",
        "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
    ),
    "humaneval": PublishedFile(
        "HumanEval.jsonl.gz",
        f"{_GITHUB}/openai/human-eval/master/data/HumanEval.jsonl.gz",
        "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
    ),
    "ifeval": PublishedFile(
        "ifeval_prompts.jsonl",
        f"{_GITHUB}/google-research/google-research/master/instruction_following_eval/data/"
        "input_data.jsonl",
        "67ffeee0fcb87c317c5b08a2de85557b4a7e96ada6178aa645b4954fe4b53d49",
    ),
    "commonsense-qa": PublishedFile(
        "commonsense_qa_dev.jsonl",
        "https://s3.amazonaws.com/commensenseqa/dev_rand_split.jsonl",
        "3210497fdaae614ac085d9eb873dd7f4d49b6f965a93adadc803e1229fd8a02a",
    ),
    "mmlu": PublishedFile(
        "mmlu.tar",
        "https://people.eecs.berkeley.edu/~hendrycks/data.tar",
        "bec563ba4bac1d6aaf04141cd7d1605d7a5ca833e38f994051e818489592989b",
    ),
}

#: FastChat's prompts for judges, and GPT-4's reference answers to questions with a correct answer.
JUDGE_PROMPTS = PublishedFile(
    "judge_prompts.jsonl",
    f"{_GITHUB}/lm-sys/FastChat/main/fastchat/llm_judge/data/judge_prompts.jsonl",
    "fd283293406d024f44c174b094ef48031d0687a4682fd3a56b29b138f80281b6",
)
REFERENCE_ANSWERS = PublishedFile(
    "mt_bench_reference_gpt4.jsonl",
    f"{_GITHUB}/lm-sys/FastChat/main/fastchat/llm_judge/data/mt_bench/reference_answer/gpt-4.jsonl",
    "f957a5bc977badb66885ec970e6cd08527845780313f0995764260e5777b9b3f",
)

#: Sets that the bundled generator makes, from the number of questions and a seed.
GENERATED_SETS: dict[str, Callable[[int, int], list[Question]]] = {
    "bundled": bundled_questions,
    "bundled-edits": bundled_edits,
}


class QuestionSetError(ValueError):
    """A question set is unknown, too small, or cannot be downloaded; the message says why."""


def data_folder() -> Path:
    """Return the folder of downloaded files: ``$EAGLE_FSD_DATA`` or ``~/.cache/eagle_fsd/data``."""
    named = os.environ.get(DATA_VARIABLE)
    return Path(named) if named else Path.home() / ".cache" / "eagle_fsd" / "data"


def find_questions(
    name: str,
    count: int | None = None,
    seed: int = 0,
    progress: DownloadProgress | None = None,
    grader: Grader | None = None,
) -> list[Question]:
    """Return ``count`` questions of a set or file, see :func:`balanced_subset`.

    Default: all of them; :data:`DEFAULT_BUNDLED_COUNT` of a generated set, which alone uses the
    seed.
    """
    if name in GENERATED_SETS:
        found = GENERATED_SETS[name](count or DEFAULT_BUNDLED_COUNT, seed)
        return [grader.apply(question) for question in found] if grader is not None else found
    if Path(name).is_file():
        return balanced_subset(read_questions(name, grader), count)
    if name not in SETS:
        if Path(name).is_dir():
            raise QuestionSetError(f"{name!r} is a folder, not a question file")
        known = ", ".join([*GENERATED_SETS, *SETS])
        raise QuestionSetError(
            f"{name!r} is neither a file nor a question set; the sets are {known}"
        )
    return balanced_subset(read_questions(fetch(SETS[name], progress), grader), count)


def requested_questions(
    request: EvaluationRequest, seed: int = 0, progress: DownloadProgress | None = None
) -> list[Question]:
    """Return the questions of a request, with its grader, system prompt and worked examples.

    The worked examples, which are not asked, are the set's first questions with one turn, no
    earlier messages but a system prompt, and an answer to show. ``skip`` leaves out the questions
    that ``count=skip`` would select.
    """
    grader = find_grader(request.grader) if request.grader else None
    name, shots = request.questions, request.few_shot or 0
    count = None
    if name in GENERATED_SETS:
        count = request.skip + (request.count or DEFAULT_BUNDLED_COUNT) + shots
    questions = find_questions(name, count, seed=seed, progress=progress, grader=grader)
    suitable = [
        item
        for item in questions
        if len(item.turns) == 1
        and _solution(item)
        and all(role == "system" for role, _ in item.context)
    ]
    examples = suitable[:shots]
    shown = {item.question_id for item in examples}
    rest = [item for item in questions if item.question_id not in shown]
    if len(examples) < shots or not rest:
        raise QuestionSetError(
            f"--few-shot {shots} requires {shots + 1} questions, {shots} of them with one turn, no"
            " earlier turns, and an answer that is neither code nor a regular expression;"
            f" {name!r} has {len(questions)}, {len(suitable)} of them of this kind"
        )
    if request.skip:
        skipped = {item.question_id for item in balanced_subset(rest, request.skip)}
        rest = [item for item in rest if item.question_id not in skipped]
        if not rest:
            asked = f"{name!r} has {len(questions) - shots} to ask"
            raise QuestionSetError(f"--skip {request.skip} leaves no question: {asked}")
    system = (("system", request.system),) if request.system else ()
    pairs = tuple(
        message
        for item in examples
        for message in (("user", item.turns[0]), ("assistant", _solution(item)))
    )
    return [
        _with_context(question, system, pairs) for question in balanced_subset(rest, request.count)
    ]


def _solution(question: Question) -> str:
    """Return a worked solution, else the answer; empty if neither can be an example."""
    if question.scored_by == "code":
        return ""
    answer = None if question.scored_by == "regex" else question.answer
    return question.reference or answer or ""


def _with_context(
    question: Question, system: tuple[tuple[str, str], ...], examples: tuple[tuple[str, str], ...]
) -> Question:
    """Insert examples, and a system prompt unless the question has its own."""
    own = question.context
    if own and own[0][0] == "system":
        system, own = own[:1], own[1:]
    return replace(question, context=(*system, *examples, *own))


def interleaved(questions: Sequence[Question]) -> list[Question]:
    """Order questions so that any number of the first ones is spread over the categories.

    The categories take turns, each with its next question, in an order whose beginnings are spread
    over the file.
    """
    categories = dict.fromkeys(question.category for question in questions)
    bits = len(categories).bit_length()
    # The van der Corput sequence: the binary digits of a category's index in reverse.
    order = {name: f"{at:0{bits}b}"[::-1] for at, name in enumerate(categories)}
    earlier: Counter[str] = Counter()  # questions of each category so far
    keys = []
    for question in questions:
        keys.append((earlier[question.category], order[question.category]))
        earlier[question.category] += 1
    return [questions[at] for at in sorted(range(len(questions)), key=keys.__getitem__)]


def balanced_subset(questions: Sequence[Question], count: int | None) -> list[Question]:
    """Select questions evenly across categories, without randomness, and keep their order.

    They are the first ones when :func:`interleaved`, so a larger ``count`` selects the same
    questions and more.
    """
    selected = {question.question_id for question in interleaved(questions)[:count]}
    return [question for question in questions if question.question_id in selected]


def fetch(source: PublishedFile, progress: DownloadProgress | None = None) -> Path:
    """Return the path of a published file in :func:`data_folder`, downloading a missing one."""
    path = data_folder() / source.file
    if path.is_file():
        return path
    advice = f"download it elsewhere and put it at {path}, or set {DATA_VARIABLE}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            digest = _download(source.url, temporary, progress)
            if digest != source.sha256:
                raise QuestionSetError(f"the checksum of {source.url} does not match: {advice}")
    except (http.client.HTTPException, OSError) as error:
        raise QuestionSetError(f"cannot download {source.url} ({error}): {advice}") from error
    return path


def _download(url: str, path: Path, progress: DownloadProgress | None) -> str:
    """Download ``url`` to ``path`` and return its SHA-256 digest."""
    digest = hashlib.sha256()
    with urllib.request.urlopen(url, timeout=30) as response, path.open("wb") as file:
        total, done = int(response.headers.get("Content-Length") or 0), 0
        while chunk := response.read(1 << 16):
            file.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress(done, total)
    return digest.hexdigest()
