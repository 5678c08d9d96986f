"""A judge that refuses, is not there, or is not listened to."""

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
from judging import (
    QUESTIONS,
    WAIT,
    StubJudge,
    asking,
    rate,
    read_lines,
    records_of,
)

import eagle_fsd
from eagle_fsd.evaluation.answer_store import Record
from eagle_fsd.evaluation.judge.client import JudgeEndpoint
from eagle_fsd.evaluation.judge.judging import judge_answers, judgment_file
from eagle_fsd.evaluation.judge.prompts import JudgeError
from eagle_fsd.evaluation.questions.question import Question

pytestmark = pytest.mark.usefixtures("judge_data")


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        ((401, {"error": {"message": "wrong key my-key"}}), "(401, wrong key ...)"),
        ((404, {"error": {"message": "no model a/b"}}), "(404, no model a/b)"),
        ((404, {"object": "error", "message": "no model"}), "(404, no model)"),
        ((200, "<html>hello</html>"), "(what it sent is no chat completion; is the URL right?)"),
        ((200, {}), "(what it sent is no chat completion; is the URL right?)"),
        ((503, "<html>\nbusy\n</html>"), "503"),
    ],
)
def test_a_refusal_is_one_line_and_the_last_request(
    refusal: tuple[int, Any],
    words: str,
    stub: StubJudge,
    records: dict[str, list[Record]],
    tmp_path: Path,
) -> None:
    stub.before = lambda prompt: refusal
    with pytest.raises(JudgeError) as error:
        judge_answers(stub.endpoint(api_key="my-key"), QUESTIONS, records, tmp_path, parallel=1)
    message = str(error.value)
    assert words in message
    assert f"at {stub.url} failed" in message
    assert "kept" in message
    assert message.isprintable()
    assert "my-key" not in message
    assert len(stub.asked) == 1


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:1/v1", "Connection error"),
        ("127.0.0.1/v1", "Connection error"),
        ("http://[::/v1", "Invalid"),
    ],
)
def test_no_endpoint_is_one_line(
    url: str, words: str, records: dict[str, list[Record]], tmp_path: Path
) -> None:
    with pytest.raises(JudgeError) as error:
        judge_answers(JudgeEndpoint(url, "m", retries=0), QUESTIONS, records, tmp_path)
    assert words in str(error.value)
    assert f"the judge m at {url} failed (" in str(error.value)
    assert str(error.value).isprintable()


def test_a_judge_that_does_not_reply(stub: StubJudge, tmp_path: Path) -> None:
    over = threading.Event()

    def wait(prompt: str) -> None:
        over.wait(WAIT)

    stub.before = wait
    with pytest.raises(JudgeError, match=r"failed \(no reply within 0.2 s\)"):
        judge_answers(
            stub.endpoint(timeout=0.2), QUESTIONS[3:], {"exact": records_of("exact")}, tmp_path
        )
    over.set()


def test_a_passing_failure_is_asked_again(stub: StubJudge, tmp_path: Path) -> None:
    stub.before = lambda prompt: (503, {}) if len(stub.asked) == 1 else None
    (found,) = judge_answers(
        stub.endpoint(retries=1), QUESTIONS[3:], {"exact": records_of("exact")}, tmp_path
    )
    assert found.score == rate("Q greet A exact greet")
    assert len(stub.asked) == 2


def test_without_the_client_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(JudgeError, match="through the package openai: install it"):
        judge_answers(
            JudgeEndpoint("http://x", "m"), QUESTIONS[3:], {"exact": records_of("exact")}, tmp_path
        )


def test_at_least_one_request_at_a_time(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="parallel must be 1 or more; got 0"):
        judge_answers(JudgeEndpoint("http://x", "m"), QUESTIONS, {}, tmp_path, parallel=0)


def test_who_stops_listening_stops_the_asking(
    stub: StubJudge, records: dict[str, list[Record]], tmp_path: Path
) -> None:
    """Ctrl-C in a program that lives on."""
    second = threading.Event()

    def wait(prompt: str) -> None:
        if len(stub.asked) > 1:
            second.wait(WAIT)

    stub.before = wait

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judge_answers(stub.endpoint(), QUESTIONS, records, tmp_path, 1, interrupt)
    second.set()
    for thread in asking():
        thread.join(WAIT)
    assert len(stub.asked) <= 2
    assert len(read_lines(judgment_file(tmp_path, "a/b"))) == 1


_PROGRAM = """
import json, sys, types

# The package without what its __init__ imports: torch takes long on a busy machine.
package = types.ModuleType("eagle_fsd")
package.__path__ = [sys.argv[1]]
sys.modules["eagle_fsd"] = package
from eagle_fsd.evaluation.judge.judging import judge_answers
from eagle_fsd.evaluation.judge.client import JudgeEndpoint
from eagle_fsd.evaluation.questions.question import Question

url, out, answers = sys.argv[2:]
questions = [Question(at, "w", (f"question {at}",)) for at in range(9)]
judge_answers(JudgeEndpoint(url, "a/b"), questions, {"exact": json.loads(answers)}, out)
"""


def test_ctrl_c_ends_at_once_and_loses_nothing_written(stub: StubJudge, tmp_path: Path) -> None:
    """With four requests under way, which are not answered before the program has ended."""
    package = str(Path(eagle_fsd.__file__).parent)
    stuck, over = threading.Barrier(5), threading.Event()

    def wait(prompt: str) -> None:
        if not prompt.startswith(("Q question 0 ", "Q question 1 ")) and not over.is_set():
            stuck.wait(WAIT)
            over.wait(2 * WAIT)

    stub.before = wait
    questions = [Question(at, "w", (f"question {at}",)) for at in range(9)]
    answers = [
        {"question_id": at, "answer_id": str(at), "choices": [{"turns": ["x"]}]} for at in range(9)
    ]
    program = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, package, stub.url, str(tmp_path), json.dumps(answers)],
        stderr=subprocess.PIPE,
        text=True,
    )
    path = judgment_file(tmp_path, "a/b")
    try:
        stuck.wait(WAIT)
        while len(_whole_lines(path)) < 2:
            time.sleep(0.01)
        program.send_signal(signal.SIGINT)
        _, errors = program.communicate(timeout=WAIT)
    finally:
        over.set()
        program.kill()
    assert errors.strip().endswith("KeyboardInterrupt")
    assert [line["question_id"] for line in read_lines(path)] in ([0, 1], [1, 0])
    count = len(stub.asked)
    found = judge_answers(stub.endpoint(), questions, {"exact": answers}, tmp_path)
    assert [item.question_id for item in found] == list(range(9))
    assert len(stub.asked) == count + 7


def _whole_lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def test_a_password_in_the_address_is_shown_to_nobody() -> None:
    shown = JudgeEndpoint("http://user:secret@host:1/v1", "a").shown_url
    assert shown == "http://host:1/v1"
    assert JudgeEndpoint("http://host:1/v1", "a").shown_url == "http://host:1/v1"
