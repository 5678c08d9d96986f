"""A stub of a judge, with questions and answers for it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stub_endpoint import Reply, StubEndpoint, completion

from eagle_fsd.evaluation.answer_store import Record
from eagle_fsd.evaluation.config import EvaluationRequest
from eagle_fsd.evaluation.judge.judging import judgment_file
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.utils.chat_api import Endpoint
from eagle_fsd.utils.files import read_jsonl

#: Seconds until a wait for an event fails.
TIMEOUT = 100

PROMPTS = {
    "single-v1": ("Judge.", "Q {question} A {answer}"),
    "single-math-v1": ("Judge.", "Q {question} R {ref_answer_1} A {answer}"),
    "single-v1-multi-turn": ("Both.", "Q {question_1} A {answer_1} Q {question_2} A {answer_2}"),
    "single-math-v1-multi-turn": (
        "Both.",
        "R {ref_answer_1} R {ref_answer_2} Q {question_1} A {answer_1} Q {question_2} A {answer_2}",
    ),
    "pair-v2": ("Compare.", "Q {question} A {answer_a} B {answer_b}"),
    "pair-math-v1": ("Compare.", "Q {question} R {ref_answer_1} A {answer_a} B {answer_b}"),
    "pair-v2-multi-turn": (
        "Compare.",
        "Q {question_1} A {answer_a_1} B {answer_b_1} Q {question_2} A {answer_a_2} B {answer_b_2}",
    ),
    "pair-math-v1-multi-turn": (
        "Compare.",
        "R {ref_answer_1} R {ref_answer_2} Q {question_1} A {answer_a_1} B {answer_b_1}"
        " Q {question_2} A {answer_a_2} B {answer_b_2}",
    ),
}
QUESTIONS = [
    Question(81, "writing", ("write", "again")),
    Question(101, "math", ("add", "subtract")),
    Question(102, "math", ("multiply", "divide")),
    Question(9, "writing", ("greet",)),
]


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_without_times(path: Path) -> list[dict[str, Any]]:
    return [{key: line[key] for key in line if key != "tstamp"} for line in read_jsonl(path)]


def single_file(folder: Path) -> Path:
    return judgment_file(folder, "a/b", "single")


def records_of(model: str) -> list[Record]:
    return [
        {
            "question_id": question.question_id,
            "answer_id": f"{model}-{question.question_id}",
            "choices": [{"turns": [f"{model} {turn}" for turn in question.turns]}],
        }
        for question in QUESTIONS
    ]


#: Number of turns of all three methods.
COUNT = 3 * 7


def rate(prompt: str) -> int:
    """Return an arbitrary, deterministic rating."""
    return 1 + zlib.crc32(prompt.encode()) % 10


def pairwise_request(stub: StubJudge, count: int, out: Path) -> EvaluationRequest:
    """Return a request whose answers a judge compares with exact decoding's."""
    return EvaluationRequest(
        count=count, out=out, judge_base_url=stub.url, judge_model="a/b", judge_mode="pair"
    )


class StubJudge(StubEndpoint):
    """An endpoint that rates; ``intercept`` may wait, or return another reply to a user message."""

    def __init__(self) -> None:
        self.answered: list[str] = []
        self.intercept: Callable[[str], Reply | None] = lambda prompt: None
        super().__init__()

    def reply(self, body: dict[str, Any]) -> Reply:
        prompt = body["messages"][-1]["content"]
        if (override := self.intercept(prompt)) is not None:
            return override
        self.answered.append(prompt)
        return completion(f"Good. Rating: [[{rate(prompt)}]]")

    def reply_with(self, text: Callable[[str], str | None]) -> None:
        """Let the judge answer every user message with a text."""
        self.intercept = lambda prompt: completion(text(prompt))

    def prefer(self, word: str) -> None:
        """Let the judge prefer the answer that contains a word, wherever it stands."""
        self.reply_with(
            lambda prompt: "[[A]]" if prompt.index(word) < prompt.index(" B ") else "[[B]]"
        )

    def endpoint(self, **options: Any) -> Endpoint:
        return Endpoint(**{"base_url": self.url, "model": "a/b", "retries": 0, **options})
