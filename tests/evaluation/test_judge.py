"""Judging answers; a local server takes the place of the judge."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import threading
import time
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
from eagle_fsd.evaluation.judge.grading import judge_answers
from eagle_fsd.evaluation.judge.pairwise import judge_pairs
from eagle_fsd.evaluation.judge.prompts import JudgeError
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
    found = judge_answers(
        endpoint, QUESTIONS, records, tmp_path, 1, lambda *numbers: seen.append(numbers)
    )
    assert seen == [(done, COUNT) for done in range(1, COUNT + 1)]
    body = stub.requests[1]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("a/b", 0, 2048)
    assert body["messages"] == [
        {"role": "system", "content": "Both."},
        {"role": "user", "content": "Q write A plain write Q again A plain again"},
    ]
    assert set(stub.keys) == {"Bearer secret"}
    assert "secret" not in repr(endpoint)
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
    assert judge_answers(gone, QUESTIONS, records, tmp_path) == found
    assert path.read_bytes() == before
    assert [item.name for item in path.parent.iterdir()] == [path.name]


def test_identical_answers_are_judged_once(stub: StubJudge, tmp_path: Path) -> None:
    """They share the reply, also if one of them was judged earlier."""
    shared = {"choices": [{"turns": ["hello"]}], "question_id": 9}
    records = {
        method: [{**shared, "answer_id": f"{method}-9"}] for method in ("plain", "exact", "fsd")
    }
    other = {**shared, "answer_id": "other-9", "choices": [{"turns": ["goodbye"]}]}
    first = judge_answers(
        stub.endpoint(), QUESTIONS[3:], {"plain": records["plain"], "other": [other]}, tmp_path
    )
    assert len(stub.requests) == 2
    found = judge_answers(stub.endpoint(), QUESTIONS[3:], records, tmp_path)
    assert len(stub.requests) == 2
    assert [line["answer_id"] for line in found] == ["plain-9", "exact-9", "fsd-9"]
    assert {(line["judgment"], line["tstamp"]) for line in found} == {
        (first[0]["judgment"], first[0]["tstamp"])
    }
    fresh = judge_answers(stub.endpoint(), QUESTIONS[3:], records, tmp_path / "fresh")
    assert len(stub.requests) == 3
    assert len({line["tstamp"] for line in fresh}) == 1


def test_empty_answers_are_judged_but_not_missing_ones_or_third_turns(
    stub: StubJudge, tmp_path: Path
) -> None:
    """A reply without content has no rating."""
    questions = [Question(1, "w", ("a", "b", "c")), Question("2", "w", ("d",))]
    answer = {"question_id": 1, "answer_id": "x", "choices": [{"turns": ["", "yes", "no"]}]}
    stub.reply_with(lambda _: None)
    found = judge_answers(stub.endpoint(), questions, {"exact": [answer]}, tmp_path)
    assert [(line["question_id"], line["turn"]) for line in found] == [(1, 1), (1, 2)]
    assert [line["user_prompt"] for line in found] == ["Q a A ", "Q a A  Q b A yes"]
    assert {(line["judgment"], line["score"]) for line in found} == {("", -1)}


def test_concurrent_requests_give_the_same_judgments(
    stub: StubJudge, records: dict[str, list[Record]], tmp_path: Path
) -> None:
    """None of the first four requests is answered before all four have arrived."""
    judge_answers(stub.endpoint(), QUESTIONS, records, tmp_path / "one", parallel=1)
    assert stub.answered == [body["messages"][1]["content"] for body in stub.requests]
    barrier, count = threading.Barrier(4), len(stub.requests)

    def wait(prompt: str) -> None:
        if len(stub.requests) <= count + 4 and not barrier.broken:
            barrier.wait(TIMEOUT)

    stub.intercept = wait
    judge_answers(stub.endpoint(), QUESTIONS, records, tmp_path / "four", parallel=4)
    assert not barrier.broken
    assert len(stub.requests) == 2 * COUNT
    one, four = (read_without_times(single_file(tmp_path / name)) for name in ("one", "four"))
    assert one == four


def test_judging_resumes_after_a_failure(
    stub: StubJudge, records: dict[str, list[Record]], tmp_path: Path
) -> None:
    """No answer is judged twice, and the file equals that of an uninterrupted run."""
    out, parallel = tmp_path / "out", 4
    stub.intercept = lambda prompt: (
        (500, {"error": {"message": "out of\nmemory"}}) if len(stub.requests) > 9 else None
    )
    with pytest.raises(JudgeError) as error:
        judge_answers(stub.endpoint(), QUESTIONS, records, out, parallel)
    assert str(error.value) == (
        f"the judge a/b at {stub.url} failed (500, out of memory); answers and judgments so far are"
        " saved: run the same command again to resume"
    )
    assert len(stub.answered) >= 9 - parallel
    assert len(read_jsonl(single_file(out))) == len(stub.answered)
    assert len(stub.requests) < 9 + 2 * parallel
    stub.intercept = lambda prompt: None
    judge_answers(stub.endpoint(), QUESTIONS, records, out, parallel)
    assert len(stub.answered) == len(set(stub.answered)) == COUNT
    judge_answers(stub.endpoint(), QUESTIONS, records, tmp_path / "uninterrupted")
    assert read_without_times(single_file(out)) == read_without_times(
        single_file(tmp_path / "uninterrupted")
    )


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
    systems = ("Talk like a pirate.", "Be brief.")
    for judge, system in itertools.product((judge_answers, judge_pairs), systems):
        questions = requested_questions(EvaluationRequest(questions=str(file), system=system))
        asked = len(stub.answered)
        for _ in range(2):
            judge(stub.endpoint(), questions, records, out)
            assert len(stub.answered) == asked + 2
        for prompt in stub.answered[asked:]:
            places = [prompt.index(text) for text in (system, "Hi", "Ahoy!", "Q Bye A ")]
            assert places == sorted(places)


def test_a_partial_line_is_judged_again(
    stub: StubJudge, records: dict[str, list[Record]], tmp_path: Path
) -> None:
    judge_answers(stub.endpoint(), QUESTIONS, records, tmp_path)
    path = single_file(tmp_path)
    content, expected = path.read_bytes(), read_without_times(path)
    whole = content.split(b"\n")
    for cut in (1, 40, 200):
        path.write_bytes(content[:-cut])
        judge_answers(stub.endpoint(), QUESTIONS, records, tmp_path)
        assert stub.answered.pop() == "Q greet A fsd greet"
        assert len(stub.answered) == COUNT
        assert read_without_times(path) == expected
        assert path.read_bytes().split(b"\n")[:-2] == whole[:-2]


def test_changed_answers_and_prompts_are_judged_again(
    stub: StubJudge, records: dict[str, list[Record]], tmp_path: Path
) -> None:
    """Also a new answer with the same text; judgments of other methods are kept."""
    other = {"other": records_of("other")}
    judge_answers(stub.endpoint(), QUESTIONS, other, tmp_path)
    kept = read_jsonl(single_file(tmp_path))
    judge_answers(stub.endpoint(), QUESTIONS, records, tmp_path)
    asked = len(stub.answered)
    records["exact"][0]["answer_id"] = "another"
    changed = [*QUESTIONS[:3], Question(9, "writing", ("hello",))]
    found = judge_answers(stub.endpoint(), changed, records, tmp_path, parallel=1)
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


def test_fastchat_reads_the_judgment_file(
    stub: StubJudge,
    records: dict[str, list[Record]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Judgments without a rating do not count."""
    from fastchat.llm_judge.show_result import display_result_single

    scores = {
        "Q write A exact write": "[[8]]",
        "Q add R right {1} A exact add": "[[6.5]]",
        "Q multiply A exact multiply": "none",
        "Q greet A exact greet": "[[3]]",
        "Q write A fsd write": "[[9]]",
    }

    stub.reply_with(lambda prompt: scores.get(prompt, "Rating: [[5]]"))
    judge_answers(stub.endpoint(), QUESTIONS, records, tmp_path)
    path = single_file(tmp_path)
    display_result_single(
        argparse.Namespace(
            input_file=str(path), bench_name="mt_bench", judge_model="a/b", model_list=None
        )
    )
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


def test_evaluate_command_resumes_after_a_judge_failure(
    stub: StubJudge, tmp_path: Path, run: Any
) -> None:
    """Answers are saved if the judge fails; the same command judges each of them once."""
    file, out = tmp_path / "questions.jsonl", tmp_path / "out"
    lines = [{"question_id": 81, "category": "writing", "turns": ["Hello!", "Thank you!"]}]
    lines.append({"question_id": 101, "category": "math", "turns": ["Hello!", "What can you do?"]})
    write_lines(file, lines)
    command = ["evaluate", file, "--out", out, "-m", "exact", "-m", "plain"]
    command += ["--judge-base-url", stub.url, "--judge-model", "a/b", "--max-new-tokens", 16]
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
