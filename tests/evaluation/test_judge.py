"""Judging answers, failures of the endpoint, and cancellation; a local server is the judge."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stub_judge import (
    COUNT,
    QUESTIONS,
    TIMEOUT,
    StubJudge,
    rate,
    read_without_times,
    records_of,
    single_file,
    write_lines,
)

from eagle_fsd.evaluation import EvaluationRequest
from eagle_fsd.evaluation.answer_store import Record
from eagle_fsd.evaluation.judge.judging import judge, judgment_file
from eagle_fsd.evaluation.judge.prompts import CONTEXT_END, CONTEXT_START, JudgeError
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.questions.sets import requested_questions
from eagle_fsd.utils.chat_api import Endpoint
from eagle_fsd.utils.files import read_jsonl

pytestmark = pytest.mark.usefixtures("judge_data")


def test_requests_and_judgment_file(
    stub: StubJudge, records: dict[str, list[Record]], tmp_path: Path
) -> None:
    start, seen = time.time(), []
    endpoint = stub.endpoint(api_key="secret")
    found = judge(endpoint, QUESTIONS, records, tmp_path, 1, lambda *numbers: seen.append(numbers))
    assert seen == [(done, COUNT) for done in range(1, COUNT + 1)]
    body = stub.requests[1]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("a/b", 0, 2048)
    assert body["messages"] == [
        {"role": "system", "content": "Both."},
        {"role": "user", "content": "Q write A plain write Q again A plain again"},
    ]
    assert set(stub.keys) == {"Bearer secret"}
    assert "secret" not in repr(endpoint)
    for scheme in ("http://", ""):
        url = Endpoint(f"{scheme}user:secret@host:1/v1", "a").redacted_url
        assert url == f"{scheme}host:1/v1"
    path = tmp_path / "model_judgment" / "a_b_single.jsonl"
    lines = read_jsonl(path)
    assert lines == found
    order = [(81, 1), (81, 2), (101, 1), (101, 2), (102, 1), (102, 2), (9, 1)]
    assert [(line["model"], line["question_id"], line["turn"]) for line in lines] == [
        (model, *place) for model in ("plain", "exact", "fsd") for place in order
    ]
    line = lines[9]
    assert start <= line.pop("tstamp") <= time.time()
    prompt = "Q add R right {1} A exact add"
    assert line == {
        "question_id": 101,
        "model": "exact",
        "judge": ["a/b", "single-math-v1"],
        "user_prompt": prompt,
        "judgment": f"Good. Rating: [[{rate(prompt)}]]",
        "score": rate(prompt),
        "turn": 1,
        "answer_id": "exact-101",
    }
    # A finished file needs no endpoint.
    before = path.read_bytes()
    gone = Endpoint("http://127.0.0.1:1/v1", "a/b", retries=0)
    assert judge(gone, QUESTIONS, records, tmp_path) == found
    assert path.read_bytes() == before
    assert [item.name for item in path.parent.iterdir()] == [path.name]


def test_identical_answers_are_judged_once(stub: StubJudge, tmp_path: Path) -> None:
    """They share the reply, also if one of them was judged earlier."""
    shared = {"choices": [{"turns": ["hello"]}], "question_id": 9}
    records = {
        method: [{**shared, "answer_id": f"{method}-9"}] for method in ("plain", "exact", "fsd")
    }
    other = {**shared, "answer_id": "other-9", "choices": [{"turns": ["goodbye"]}]}
    first = judge(
        stub.endpoint(), QUESTIONS[3:], {"plain": records["plain"], "other": [other]}, tmp_path
    )
    assert len(stub.requests) == 2
    found = judge(stub.endpoint(), QUESTIONS[3:], records, tmp_path)
    assert len(stub.requests) == 2
    assert [line["answer_id"] for line in found] == ["plain-9", "exact-9", "fsd-9"]
    assert {(line["judgment"], line["tstamp"]) for line in found} == {
        (first[0]["judgment"], first[0]["tstamp"])
    }
    fresh = judge(stub.endpoint(), QUESTIONS[3:], records, tmp_path / "fresh")
    assert len(stub.requests) == 3
    assert len({line["tstamp"] for line in fresh}) == 1


def test_judging_resumes(stub: StubJudge, records: dict[str, list[Record]], tmp_path: Path) -> None:
    """After a failure, or with a partial line, no answer is judged twice."""
    parallel, path = 4, single_file(tmp_path)
    stub.intercept = lambda prompt: (
        (500, {"error": {"message": "out of\nmemory"}}) if len(stub.requests) > 9 else None
    )
    with pytest.raises(JudgeError) as error:
        judge(stub.endpoint(), QUESTIONS, records, tmp_path, parallel)
    assert str(error.value) == (
        f"the judge a/b at {stub.url} failed (500, out of memory); answers and judgments so far are"
        " saved: run the same command again to resume"
    )
    assert len(stub.answered) >= 9 - parallel
    assert len(read_jsonl(path)) == len(stub.answered)
    assert len(stub.requests) < 9 + 2 * parallel
    stub.intercept = lambda prompt: None
    found = judge(stub.endpoint(), QUESTIONS, records, tmp_path, parallel)
    assert len(stub.answered) == len(set(stub.answered)) == COUNT
    assert [line["answer_id"] for line in found] == [
        record["answer_id"]
        for answers in records.values()
        for record in answers
        for _ in record["choices"][0]["turns"]
    ]
    content, expected = path.read_bytes(), read_without_times(path)
    for cut in (1, 40, 200):
        path.write_bytes(content[:-cut])
        judge(stub.endpoint(), QUESTIONS, records, tmp_path)
        assert stub.answered.pop() == "Q greet A fsd greet"
        assert len(stub.answered) == COUNT
        assert read_without_times(path) == expected
        assert path.read_bytes().split(b"\n")[:-2] == content.split(b"\n")[:-2]


def test_the_judge_reads_system_prompts_and_earlier_messages(
    stub: StubJudge, tmp_path: Path
) -> None:
    """Answers are judged again when these change."""
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ahoy!"}]
    file, out = tmp_path / "chats.jsonl", tmp_path / "out"
    write_lines(file, [{"messages": [*chat, {"role": "user", "content": "Bye"}]}])
    records = {
        name: [{"question_id": 0, "answer_id": name, "choices": [{"turns": [name]}]}]
        for name in ("exact", "fsd")
    }
    systems = ("Talk like a {pirate}.", "Be brief.")  # braces are not fields
    for reference, system in itertools.product((None, "exact"), systems):
        questions = requested_questions(EvaluationRequest(questions=str(file), system=system))
        asked = len(stub.answered)
        for _ in range(2):
            judge(stub.endpoint(), questions, records, out, reference=reference)
            assert len(stub.answered) == asked + 2
        context = f"### System:\n{system}\n\n### User:\nHi\n\n### Assistant:\nAhoy!\n\n"
        for prompt in stub.answered[asked:]:
            assert prompt.startswith(f"{CONTEXT_START}\n{context}{CONTEXT_END}Q Bye A ")


def test_changed_answers_and_prompts_are_judged_again(
    stub: StubJudge, records: dict[str, list[Record]], tmp_path: Path
) -> None:
    """A new answer is judged even if its text is equal, and other methods' judgments are kept."""
    other = {"other": records_of("other")}
    judge(stub.endpoint(), QUESTIONS, other, tmp_path)
    kept = read_jsonl(single_file(tmp_path))
    judge(stub.endpoint(), QUESTIONS, records, tmp_path)
    asked = len(stub.answered)
    records["exact"][0]["answer_id"] = "another"
    changed = [*QUESTIONS[:3], Question(9, "writing", ("hello",))]
    found = judge(stub.endpoint(), changed, records, tmp_path, parallel=1)
    assert stub.answered[asked:] == [
        "Q hello A plain greet",
        "Q write A exact write",
        "Q write A exact write Q again A exact again",
        "Q hello A exact greet",
        "Q hello A fsd greet",
    ]
    lines = read_jsonl(single_file(tmp_path))
    assert lines == [*found, *kept]
    assert [line["answer_id"] for line in lines[7:10]] == ["another", "another", "exact-101"]


def test_fastchat_reads_the_files(
    stub: StubJudge,
    records: dict[str, list[Record]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ratings, of which those without a number do not count, and comparisons."""
    from fastchat.llm_judge.show_result import display_result_pairwise, display_result_single

    scores = {
        "Q write A exact write": "[[8]]",
        "Q add R right {1} A exact add": "[[6.5]]",
        "Q multiply A exact multiply": "none",
        "Q greet A exact greet": "[[3]]",
        "Q write A fsd write": "[[9]]",
    }
    stub.reply_with(lambda prompt: scores.get(prompt, "Rating: [[5]]"))
    judge(stub.endpoint(), QUESTIONS, records, tmp_path)
    options = {"bench_name": "mt_bench", "judge_model": "a/b", "model_list": None}
    file = str(single_file(tmp_path))
    display_result_single(argparse.Namespace(input_file=file, **options))
    printed = capsys.readouterr().out
    tables = {}
    for title, text in re.findall(r"#{10} ([\w ]+) #{10}\n(.*?)(?=\n#|\Z)", printed, re.DOTALL):
        rows = re.findall(r"^(plain|exact|fsd)\s.*?([\d.]+)$", text, re.MULTILINE)
        tables[title] = {name: float(score) for name, score in rows}
    assert tables == {
        # (8 + 6.5 + 3) / 3 and (9 + 5 + 5 + 5) / 4; the average has three more fives.
        "First turn": {"fsd": 6.0, "exact": 5.833333, "plain": 5.0},
        "Second turn": {"plain": 5.0, "exact": 5.0, "fsd": 5.0},
        "Average": {"fsd": 5.571429, "exact": 5.416667, "plain": 5.0},
    }
    records["plain"] = [{**item, "answer_id": "plain"} for item in records["exact"]]
    stub.prefer("fsd")
    judge(stub.endpoint(), QUESTIONS, records, tmp_path, reference="exact")
    file = str(judgment_file(tmp_path, "a/b", "pair"))
    display_result_pairwise(argparse.Namespace(input_file=file, baseline_model="exact", **options))
    lines = [line.split()[:4] for line in capsys.readouterr().out.splitlines()]
    assert ["fsd", "7", "0", "0"] in lines
    assert ["plain", "0", "0", "7"] in lines


def test_evaluate_command_resumes_after_a_judge_failure(
    stub: StubJudge, tmp_path: Path, run: Any
) -> None:
    """Answers are saved if the judge fails; the same command judges each of them once."""
    file, out = tmp_path / "questions.jsonl", tmp_path / "out"
    lines = [{"question_id": 81, "category": "writing", "turns": ["Hello!", "Thank you!"]}]
    lines.append({"question_id": 101, "category": "math", "turns": ["Hello!", "What can you do?"]})
    write_lines(file, lines)
    command = ["evaluate", file, "--out", out, "-m", "exact", "-m", "plain"]
    command += ["--judge-base-url", stub.url, "--judge-model", "a/b", "--max-new-tokens", 4]
    command += ["--system", "Be brief."]
    stub.intercept = lambda prompt: (404, {"error": {"message": "model not found"}})
    status, printed, errors = run(*command)
    assert status == 1
    assert "tokens/s" in printed  # results that need no judge
    failure = errors.splitlines()[-1]
    assert "the judge a/b" in failure
    assert "model not found" in failure
    answers = (out / "exact.jsonl").read_text()
    assert len(answers.splitlines()) == 2
    assert json.loads((out / "report.json").read_text())["rows"][0]["tau"] > 1
    stub.intercept = lambda prompt: None
    for _ in range(2):
        status, printed, _ = run(*command, "--json")
        assert status == 0
        assert json.loads(printed)["judge"] == {"model": "a/b", "base_url": stub.url}
        judged = [line["model"] for line in read_jsonl(single_file(out))]
        assert judged == ["exact"] * 4 + ["plain"] * 4
        assert len(stub.answered) == len(set(stub.answered)) == 4  # both methods answer alike
    assert all("Be brief." in prompt for prompt in stub.answered)
    assert (out / "exact.jsonl").read_text() == answers


def judge_one(endpoint: Endpoint, out: Path) -> Record:
    """Judge a single answer."""
    (found,) = judge(endpoint, QUESTIONS[3:], {"exact": records_of("exact")}, out)
    return found


def test_a_failure_gives_one_line(stub: StubJudge, tmp_path: Path) -> None:
    """It ends the run at once."""
    over = threading.Event()
    replies: list[tuple[Callable[[str], Any], str]] = [
        (lambda _: (401, {"error": {"message": "wrong key my-key"}}), "(401, wrong key ...)"),
        (lambda _: (404, {"object": "error", "message": "no model"}), "(404, no model)"),
        (lambda _: (200, "<html>hello</html>"), "(the reply is not in OpenAI's format; check the"),
        (lambda _: (503, "<html>\nbusy\n</html>"), "503"),
        (lambda _: over.wait(TIMEOUT), "(no reply within 0.5 s)"),
    ]
    cases = [(stub.url, message, reply) for reply, message in replies]
    for url, message in (
        ("http://127.0.0.1:1/v1", "Connection error"),
        ("127.0.0.1/v1", "Connection error"),
        ("http://[::/v1", "Invalid"),
    ):
        cases.append((url, message, replies[0][0]))
    for url, message, stub.intercept in cases:
        endpoint = Endpoint(url, "m", api_key="my-key", retries=0, timeout=0.5)
        with pytest.raises(JudgeError) as error:
            judge_one(endpoint, tmp_path)
        text = str(error.value)
        assert message in text
        assert f"the judge m at {url} failed (" in text
        assert text.isprintable()
        assert "my-key" not in text
    over.set()
    assert len(stub.requests) == len(replies)


def test_a_transient_failure_is_retried(
    stub: StubJudge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed request is retried, and the key, if any, comes from the environment."""
    stub.intercept = lambda prompt: (503, {}) if len(stub.requests) == 1 else None
    found = judge_one(stub.endpoint(retries=1), tmp_path / "retried")
    assert found["score"] == rate("Q greet A exact greet")
    assert stub.keys == ["Bearer none"] * 2
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    judge_one(stub.endpoint(), tmp_path / "again")
    assert stub.keys[2:] == ["Bearer theirs"]


_PROGRAM = """
import json, sys

from eagle_fsd.evaluation.judge.judging import judge
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.utils.chat_api import Endpoint

url, out, answers = sys.argv[1:]
questions = [Question(at, "w", (f"question {at}",)) for at in range(9)]
judge(Endpoint(url, "a/b"), questions, {"exact": json.loads(answers)}, out)
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
    found = judge(stub.endpoint(), questions, {"exact": answers}, tmp_path)
    assert [line["question_id"] for line in found] == list(range(9))
    assert len(stub.requests) == count + 7
