"""A stub of a judge, with questions and answers for it."""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from eagle_fsd.evaluation.answer_store import Record
from eagle_fsd.evaluation.config import EvaluationRequest
from eagle_fsd.evaluation.judge.client import judgment_file
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.utils.chat_api import THREAD_NAME, Endpoint
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


def completion(text: str | None) -> dict[str, Any]:
    """Return the body of a reply with a text."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": "1", "object": "chat.completion", "created": 0, "choices": [choice]}


def pairwise_request(stub: StubJudge, count: int, out: Path) -> EvaluationRequest:
    """Return a request whose answers a judge compares with exact decoding's."""
    return EvaluationRequest(
        count=count, out=out, judge_base_url=stub.url, judge_model="a/b", judge_mode="pair"
    )


class StubJudge:
    """An OpenAI-compatible endpoint.

    Attributes:
        requests: The bodies of all requests in order of arrival.
        keys: Their Authorization headers.
        answered: The user messages that were answered.
        intercept: Called with the user message before the reply; it may wait, or return the status
            and body of another reply.
    """

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.answered: list[str] = []
        self.intercept: Callable[[str], tuple[int, Any] | None] = lambda prompt: None
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                prompt = body["messages"][-1]["content"]
                stub.requests.append(body)
                stub.keys.append(self.headers["Authorization"])
                status, reply = 404, {"error": {"message": f"no such path {self.path}"}}
                if self.path == "/v1/chat/completions":
                    override = stub.intercept(prompt)
                    status, reply = override or (
                        200,
                        completion(f"Good. Rating: [[{rate(prompt)}]]"),
                    )
                    if override is None:
                        stub.answered.append(prompt)
                data = (reply if isinstance(reply, str) else json.dumps(reply)).encode()
                kind = "text/html" if isinstance(reply, str) else "application/json"
                try:
                    self.send_response(status)
                    self.send_header("Content-Type", kind)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    pass  # the client has disconnected

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def reply_with(self, text: Callable[[str], str | None]) -> None:
        """Let the judge answer every user message with a text."""
        self.intercept = lambda prompt: (200, completion(text(prompt)))

    def endpoint(self, **options: Any) -> Endpoint:
        return Endpoint(**{"base_url": self.url, "model": "a/b", "retries": 0, **options})


def request_threads() -> list[threading.Thread]:
    """Return the threads that wait for a reply."""
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]
