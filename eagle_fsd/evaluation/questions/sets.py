"""Question sets by name: in a local folder if they are there, else from their public homes.

What a judge needs beside the questions is found the same way.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle_fsd.evaluation.questions.formats import bundled_questions, read_questions
from eagle_fsd.evaluation.questions.question import Question

#: Where sets are looked for and kept; EAGLE_FSD_DATA names another folder.
DATA_VARIABLE = "EAGLE_FSD_DATA"
BUNDLED_COUNT = 100


@dataclass(frozen=True)
class QuestionSet:
    """Where a set, or a file that belongs to one, is.

    Attributes:
        file: Its name in the local folder.
        url: Its public home. sha256: Of the file there.
    """

    file: str
    url: str
    sha256: str


_GITHUB = "https://raw.githubusercontent.com"
SETS = {
    "mt-bench": QuestionSet(
        "mt_bench_question.jsonl",
        f"{_GITHUB}/lm-sys/FastChat/main/fastchat/llm_judge/data/mt_bench/question.jsonl",
        "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
    ),
    "spec-bench": QuestionSet(
        "spec_bench_question.jsonl",
        f"{_GITHUB}/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
        "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04",
    ),
    "gsm8k": QuestionSet(
        "gsm8k_test.jsonl",
        f"{_GITHUB}/openai/grade-school-math/master/grade_school_math/data/test.jsonl",
        "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
    ),
    "gsm8k-train": QuestionSet(
        "gsm8k_train.jsonl",
        f"{_GITHUB}/openai/grade-school-math/master/grade_school_math/data/train.jsonl",
        "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
    ),
    "humaneval": QuestionSet(
        "HumanEval.jsonl.gz",
        f"{_GITHUB}/openai/human-eval/master/data/HumanEval.jsonl.gz",
        "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
    ),
    "commonsense-qa": QuestionSet(
        "commonsense_qa_dev.jsonl",
        "https://s3.amazonaws.com/commensenseqa/dev_rand_split.jsonl",
        "3210497fdaae614ac085d9eb873dd7f4d49b6f965a93adadc803e1229fd8a02a",
    ),
    "mmlu": QuestionSet(
        "mmlu.tar",
        "https://people.eecs.berkeley.edu/~hendrycks/data.tar",
        "bec563ba4bac1d6aaf04141cd7d1605d7a5ca833e38f994051e818489592989b",
    ),
}

#: FastChat's wording of what a judge is asked, and GPT-4's answers to what has a right answer.
JUDGE_PROMPTS = QuestionSet(
    "judge_prompts.jsonl",
    f"{_GITHUB}/lm-sys/FastChat/main/fastchat/llm_judge/data/judge_prompts.jsonl",
    "fd283293406d024f44c174b094ef48031d0687a4682fd3a56b29b138f80281b6",
)
REFERENCE_ANSWERS = QuestionSet(
    "mt_bench_reference_gpt4.jsonl",
    f"{_GITHUB}/lm-sys/FastChat/main/fastchat/llm_judge/data/mt_bench/reference_answer/gpt-4.jsonl",
    "f957a5bc977badb66885ec970e6cd08527845780313f0995764260e5777b9b3f",
)


class QuestionSetError(ValueError):
    """There is no such set or file, or it cannot be fetched; the message says what to do."""


def data_folder() -> Path:
    """Where sets are kept."""
    named = os.environ.get(DATA_VARIABLE)
    return Path(named) if named else Path.home() / ".cache" / "eagle_fsd" / "data"


def find_questions(
    name: str,
    count: int | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[Question]:
    """The questions of a set or a file, ``count`` of them, see :func:`spread`.

    Raises:
        QuestionSetError: See there.
        QuestionError: A line is malformed.
    """
    if name == "bundled":
        return bundled_questions(count or BUNDLED_COUNT, seed)
    if Path(name).is_file():
        return spread(read_questions(name), count)
    if name not in SETS:
        if Path(name).is_dir():
            raise QuestionSetError(f"{name!r} is a folder, not a file of questions")
        known = ", ".join(["bundled", *SETS])
        raise QuestionSetError(f"{name!r} is neither a file nor a known set; those are {known}")
    return spread(read_questions(fetch(SETS[name], progress)), count)


def spread(questions: Sequence[Question], count: int | None) -> list[Question]:
    """``count`` of ``questions``, as many of each category as of the others, in their order.

    Of each category the first ones, without chance: of a set of one category, the first ``count``.
    A category that has too few leaves the rest to the others; where there are more categories
    than questions wanted, every so many-th category gives one.

    Args:
        count: All of them if None.
    """
    if count is None or count >= len(questions):
        return list(questions)
    sizes = Counter(question.category for question in questions)
    wanted = dict.fromkeys(sizes, 0)
    left = count
    while left:
        unfilled = [name for name in sizes if wanted[name] < sizes[name]]
        step = max(1.0, len(unfilled) / left)
        for place in range(min(left, len(unfilled))):
            wanted[unfilled[int(place * step)]] += 1
            left -= 1
    found = []
    for question in questions:
        if wanted[question.category]:
            wanted[question.category] -= 1
            found.append(question)
    return found


def fetch(source: QuestionSet, progress: Callable[[int, int], None] | None = None) -> Path:
    """The local file of ``source``, downloaded if it is not there.

    Args:
        progress: Called with the bytes fetched and all of them (0: not known).

    Raises:
        QuestionSetError: It cannot be fetched.
    """
    path = data_folder() / source.file
    if not path.is_file():
        _download(source, path, progress)
    return path


def _download(source: QuestionSet, path: Path, progress: Callable[[int, int], None] | None) -> None:
    """Fetch a set to ``path``, whole or not at all."""
    advice = f"download it elsewhere and put it at {path}, or set {DATA_VARIABLE}"
    part = path.with_name(path.name + ".part")
    digest = hashlib.sha256()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(source.url, timeout=30) as reply, part.open("wb") as file:
            total, done = int(reply.headers.get("Content-Length") or 0), 0
            while chunk := reply.read(1 << 16):
                file.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(done, total)
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        part.unlink(missing_ok=True)
        raise QuestionSetError(f"{source.url} cannot be fetched ({error}): {advice}") from error
    if digest.hexdigest() != source.sha256:
        part.unlink()
        raise QuestionSetError(f"{source.url} is not the file it was (checksum): {advice}")
    part.replace(path)
