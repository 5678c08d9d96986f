"""Failures of the endpoint, and cancellation."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from stub_judge import (
    QUESTIONS,
    TIMEOUT,
    StubJudge,
    rate,
    records_of,
    single_file,
)

from eagle_fsd.evaluation.answer_store import Record
from eagle_fsd.evaluation.judge.grading import judge_answers
from eagle_fsd.evaluation.judge.prompts import JudgeError
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.utils.chat_api import Endpoint
from eagle_fsd.utils.files import read_jsonl

pytestmark = pytest.mark.usefixtures("judge_data")


def judge_one(endpoint: Endpoint, out: Path) -> Record:
    """Judge a single answer."""
    (found,) = judge_answers(endpoint, QUESTIONS[3:], {"exact": records_of("exact")}, out)
    return found


def test_an_error_reply_gives_one_line_and_ends_the_run(
    stub: StubJudge, records: dict[str, list[Record]], tmp_path: Path
) -> None:
    cases: list[tuple[tuple[int, Any], str]] = [
        ((401, {"error": {"message": "wrong key my-key"}}), "(401, wrong key ...)"),
        ((404, {"error": {"message": "no model a/b"}}), "(404, no model a/b)"),
        ((404, {"object": "error", "message": "no model"}), "(404, no model)"),
        ((200, "<html>hello</html>"), "(the reply is not a chat completion; check the URL)"),
        ((200, {}), "(the reply is not a chat completion; check the URL)"),
        ((503, "<html>\nbusy\n</html>"), "503"),
    ]
    for count, (reply, message) in enumerate(cases, 1):
        stub.intercept = lambda prompt, reply=reply: reply
        with pytest.raises(JudgeError) as error:
            judge_answers(stub.endpoint(api_key="my-key"), QUESTIONS, records, tmp_path, parallel=1)
        text = str(error.value)
        assert message in text
        assert f"at {stub.url} failed" in text
        assert "saved" in text
        assert text.isprintable()
        assert "my-key" not in text
        assert len(stub.requests) == count


def test_an_unreachable_endpoint_gives_one_line(tmp_path: Path) -> None:
    for url, message in [
        ("http://127.0.0.1:1/v1", "Connection error"),
        ("127.0.0.1/v1", "Connection error"),
        ("http://[::/v1", "Invalid"),
    ]:
        with pytest.raises(JudgeError) as error:
            judge_one(Endpoint(url, "m", retries=0), tmp_path)
        assert message in str(error.value)
        assert f"the judge m at {url} failed (" in str(error.value)
        assert str(error.value).isprintable()


def test_a_reply_times_out(stub: StubJudge, tmp_path: Path) -> None:
    over = threading.Event()

    def wait(prompt: str) -> None:
        over.wait(TIMEOUT)

    stub.intercept = wait
    with pytest.raises(JudgeError, match=r"failed \(no reply within 0.2 s\)"):
        judge_one(stub.endpoint(timeout=0.2), tmp_path)
    over.set()


def test_a_transient_failure_is_retried(
    stub: StubJudge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a key, none is required; otherwise it comes from the environment."""
    stub.intercept = lambda prompt: (503, {}) if len(stub.requests) == 1 else None
    found = judge_one(stub.endpoint(retries=1), tmp_path / "retried")
    assert found["score"] == rate("Q greet A exact greet")
    assert stub.keys == ["Bearer none"] * 2
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    judge_one(stub.endpoint(), tmp_path / "again")
    assert stub.keys[2:] == ["Bearer theirs"]


_PROGRAM = """
import json, sys

from eagle_fsd.evaluation.judge.grading import judge_answers
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.utils.chat_api import Endpoint

url, out, answers = sys.argv[1:]
questions = [Question(at, "w", (f"question {at}",)) for at in range(9)]
judge_answers(Endpoint(url, "a/b"), questions, {"exact": json.loads(answers)}, out)
"""


def test_ctrl_c_exits_at_once_and_keeps_the_judgments(stub: StubJudge, tmp_path: Path) -> None:
    """Four requests are in progress, which are answered only after the program has exited."""
    stuck, over = threading.Barrier(5), threading.Event()

    def wait(prompt: str) -> None:
        if not prompt.startswith(("Q question 0 ", "Q question 1 ")) and not over.is_set():
            stuck.wait(TIMEOUT)
            over.wait(2 * TIMEOUT)

    stub.intercept = wait
    questions = [Question(at, "w", (f"question {at}",)) for at in range(9)]
    answers = [
        {"question_id": at, "answer_id": str(at), "choices": [{"turns": ["x"]}]} for at in range(9)
    ]
    program = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, stub.url, str(tmp_path), json.dumps(answers)],
        stderr=subprocess.PIPE,
        text=True,
    )
    path = single_file(tmp_path)
    try:
        stuck.wait(TIMEOUT)
        while not path.exists() or path.read_bytes().count(b"\n") < 2:
            time.sleep(0.01)
        program.send_signal(signal.SIGINT)
        _, errors = program.communicate(timeout=TIMEOUT)
    finally:
        over.set()
        program.kill()
    assert errors.strip().endswith("KeyboardInterrupt")
    assert [line["question_id"] for line in read_jsonl(path)] in ([0, 1], [1, 0])
    count = len(stub.requests)
    found = judge_answers(stub.endpoint(), questions, {"exact": answers}, tmp_path)
    assert [line["question_id"] for line in found] == list(range(9))
    assert len(stub.requests) == count + 7


def test_a_password_in_the_url_is_redacted() -> None:
    for url in ("http://user:secret@host:1/v1", "http://host:1/v1"):
        assert Endpoint(url, "a").redacted_url == "http://host:1/v1"
