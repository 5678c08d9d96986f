"""Judging answers by a language model; its place is taken by a server on this machine."""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import eagle_fsd
from eagle_fsd.evaluation.judge import Judgment, judge_answers, judgment_file
from eagle_fsd.evaluation.judge_client import THREAD_NAME, JudgeEndpoint
from eagle_fsd.evaluation.judge_prompts import JudgeError, JudgePrompts, rating
from eagle_fsd.evaluation.judge_scores import judge_summary
from eagle_fsd.evaluation.questions import Question, read_questions
from eagle_fsd.evaluation.sets import SETS, QuestionSetError
from eagle_fsd.evaluation.store import AnswerStore, Record

#: Seconds after which what should have happened long since counts as not happening.
WAIT = 100
DATA = Path(__file__).parents[3] / "shared" / "data"

PROMPTS = {
    "single-v1": ("Judge.", "Q {question} A {answer}"),
    "single-math-v1": ("Judge.", "Q {question} R {ref_answer_1} A {answer}"),
    "single-v1-multi-turn": ("Both.", "Q {question_1} A {answer_1} Q {question_2} A {answer_2}"),
    "single-math-v1-multi-turn": (
        "Both.",
        "R {ref_answer_1} R {ref_answer_2} Q {question_1} A {answer_1} Q {question_2} A {answer_2}",
    ),
}
QUESTIONS = [
    Question(81, "writing", ("write", "again")),
    Question(101, "math", ("add", "subtract")),
    Question(102, "math", ("multiply", "divide")),
    Question(9, "writing", ("greet",)),
]


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with prompts, and references for question 101 alone."""
    folder = tmp_path / "data"
    folder.mkdir()
    prompts = [
        {"name": name, "system_prompt": system, "prompt_template": template}
        for name, (system, template) in PROMPTS.items()
    ]
    references = [{"question_id": 101, "choices": [{"turns": ["right {1}", "right 2"]}]}]
    _write_lines(folder / "judge_prompts.jsonl", prompts)
    _write_lines(folder / "mt_bench_reference_gpt4.jsonl", references)
    monkeypatch.setenv("EAGLE_FSD_DATA", str(folder))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return folder


def _write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def _timeless(path: Path) -> list[dict[str, Any]]:
    return [{key: line[key] for key in line if key != "tstamp"} for line in _lines(path)]


def _records(model: str) -> list[Record]:
    return [
        {
            "question_id": question.question_id,
            "answer_id": f"{model}-{question.question_id}",
            "choices": [{"turns": [f"{model} {turn}" for turn in question.turns]}],
        }
        for question in QUESTIONS
    ]


@pytest.fixture
def records() -> dict[str, list[Record]]:
    return {model: _records(model) for model in ("plain", "exact", "fsd")}


#: Of all those turns.
COUNT = 3 * 7


def rate(prompt: str) -> int:
    """The judge's opinion: anything, but always the same."""
    return 1 + zlib.crc32(prompt.encode()) % 10


class StubJudge:
    """An OpenAI-compatible endpoint.

    Attributes:
        asked: The requests, in the order they came: their bodies. keys: Their authorization.
        answered: The users' messages that were answered.
        before: Called with a user's message before it is answered; it may wait, or return
            (status, error body) to refuse.
    """

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.answered: list[str] = []
        self.before: Callable[[str], tuple[int, Any] | None] = lambda prompt: None
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                prompt = body["messages"][-1]["content"]
                stub.asked.append(body)
                stub.keys.append(self.headers["Authorization"])
                status, reply = 404, {"error": {"message": f"no such page as {self.path}"}}
                if self.path == "/v1/chat/completions":
                    refusal = stub.before(prompt)
                    status, reply = refusal or (200, stub.completion(prompt))
                    if refusal is None:
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
                    pass  # The caller is gone.

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def completion(self, prompt: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": f"Good. Rating: [[{rate(prompt)}]]"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return {"id": "1", "object": "chat.completion", "created": 0, "choices": [choice]}

    def endpoint(self, **options: Any) -> JudgeEndpoint:
        return JudgeEndpoint(**{"base_url": self.url, "model": "a/b", "retries": 0, **options})


@pytest.fixture
def stub() -> Iterator[StubJudge]:
    judge = StubJudge()
    yield judge
    judge.server.shutdown()
    judge.server.server_close()


def _asking() -> list[threading.Thread]:
    """The threads that wait for a reply."""
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


def test_prompts_go_by_category_and_turn() -> None:
    """Without a reference for the question, as 102 is, the judge goes without."""
    prompts = JudgePrompts.find(QUESTIONS)
    said = ["one {x}", "two"]
    filled = [prompts.fill(question, said, 1) for question in QUESTIONS]
    filled += [prompts.fill(question, said, 2) for question in QUESTIONS[:3]]
    assert [(prompt.name, prompt.system, prompt.user) for prompt in filled] == [
        ("single-v1", "Judge.", "Q write A one {x}"),
        ("single-math-v1", "Judge.", "Q add R right {1} A one {x}"),
        ("single-v1", "Judge.", "Q multiply A one {x}"),
        ("single-v1", "Judge.", "Q greet A one {x}"),
        ("single-v1-multi-turn", "Both.", "Q write A one {x} Q again A two"),
        (
            "single-math-v1-multi-turn",
            "Both.",
            "R right {1} R right 2 Q add A one {x} Q subtract A two",
        ),
        ("single-v1-multi-turn", "Both.", "Q multiply A one {x} Q divide A two"),
    ]


@pytest.mark.parametrize("category", ["math", "reasoning", "coding", "arena-hard-200", "stem"])
def test_what_is_judged_beside_a_reference(category: str) -> None:
    question = Question(101, category, ("add",))
    expected = "single-v1" if category == "stem" else "single-math-v1"
    assert JudgePrompts.find([question]).fill(question, ["2"], 1).name == expected


def test_references_are_looked_for_only_where_they_are_needed(data: Path) -> None:
    (data / "mt_bench_reference_gpt4.jsonl").unlink()
    assert JudgePrompts.find([QUESTIONS[0]]).references == {}


@pytest.mark.parametrize(
    ("file", "line", "words"),
    [
        ("judge_prompts.jsonl", "{", "judge_prompts.jsonl, line 1: no JSON object with 'name'"),
        ("judge_prompts.jsonl", '{"name": "x"}', "judge_prompts.jsonl has no prompt single-v1,"),
        ("mt_bench_reference_gpt4.jsonl", '{"question_id": 1}', "no answer of FastChat's"),
    ],
)
def test_malformed_files_are_named(file: str, line: str, words: str, data: Path) -> None:
    (data / file).write_text(line + "\n")
    with pytest.raises(JudgeError, match=words):
        JudgePrompts.find(QUESTIONS).fill(QUESTIONS[0], ["x"], 1)


def test_prompts_are_no_question_sets() -> None:
    assert not {"judge_prompts.jsonl", "mt_bench_reference_gpt4.jsonl"} & {
        source.file for source in SETS.values()
    }


def test_prompts_that_cannot_be_had(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from eagle_fsd.evaluation import judge_prompts, sets

    (data / "judge_prompts.jsonl").unlink()
    nowhere = sets.QuestionSet("judge_prompts.jsonl", (data / "nowhere").as_uri(), "0" * 64)
    monkeypatch.setattr(judge_prompts, "JUDGE_PROMPTS", nowhere)
    with pytest.raises(QuestionSetError, match=r"put it at .*judge_prompts\.jsonl"):
        JudgePrompts.find(QUESTIONS)


def test_fastchats_own_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of MT-bench: which wording, and what was put where."""
    names = ("judge_prompts.jsonl", "mt_bench_reference_gpt4.jsonl", "mt_bench_question.jsonl")
    for name in names:
        if not (DATA / name).exists():
            pytest.skip(f"{name} is not beside the project")
    monkeypatch.setenv("EAGLE_FSD_DATA", str(DATA))
    questions = read_questions(DATA / "mt_bench_question.jsonl")
    prompts = JudgePrompts.find(questions)
    said = ["<answer 1>", "<answer 2>"]
    filled = {
        (q.question_id, turn): prompts.fill(q, said, turn) for q in questions for turn in (1, 2)
    }
    found = [prompt.name for prompt in filled.values()]
    assert {name: found.count(name) for name in PROMPTS} == {
        "single-v1": 50,
        "single-math-v1": 30,
        "single-v1-multi-turn": 50,
        "single-math-v1-multi-turn": 30,
    }
    by_id = {question.question_id: question for question in questions}
    first, second = filled[81, 1], filled[111, 2]
    assert first.system == "You are a helpful assistant."
    assert first.user.startswith("[Instruction]\nPlease act as an impartial judge")
    assert first.user.endswith(
        f"[Question]\n{by_id[81].turns[0]}\n\n[The Start of Assistant's Answer]\n<answer 1>\n"
        "[The End of Assistant's Answer]"
    )
    assert second.system.startswith("Please act as an impartial judge")
    order = [
        "<|The Start of Reference Answer|>",
        by_id[111].turns[0],
        "### Reference answer:\n" + prompts.references[111][0],
        by_id[111].turns[1],
        "### Reference answer:\n" + prompts.references[111][1],
        "<|The Start of Assistant A's Conversation with User|>",
        "### Assistant A:\n<answer 1>",
        "### Assistant A:\n<answer 2>",
    ]
    places = [second.user.index(part) for part in order]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("judgment", "score"),
    [
        ("Rating: [[7]]", 7),
        ("Rating: [[7.5]]", 7.5),
        ("[8]", 8),
        ("see [1]; Rating: [[9]]", 9),
        ("[[10]]", 10),
        ("[[3]], no, [[4]]", 3),
        ("[[11]]", -1),
        ("[[0]]", -1),
        ("[[0.5]]", -1),
        ("[[-3]]", -1),
        ("[[8/10]]", -1),
        (f"[[{'9' * 5000}]]", -1),
        ("It is an eight.", -1),
        ("", -1),
    ],
)
def test_ratings(judgment: str, score: float) -> None:
    assert rating(judgment) == score
    assert isinstance(rating(judgment), type(score))


def test_what_is_asked_and_what_is_written(
    stub: StubJudge, records: dict[str, list[Record]], tmp_path: Path
) -> None:
    begun, seen = time.time(), []
    endpoint = stub.endpoint(api_key="secret")
    found = judge_answers(
        endpoint, QUESTIONS, records, tmp_path, 1, lambda *numbers: seen.append(numbers)
    )
    assert seen == [(done, COUNT) for done in range(1, COUNT + 1)]
    body = stub.asked[1]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("a/b", 0, 2048)
    assert body["messages"] == [
        {"role": "system", "content": "Both."},
        {"role": "user", "content": "Q write A plain write Q again A plain again"},
    ]
    assert set(stub.keys) == {"Bearer secret"}
    path = tmp_path / "model_judgment" / "a_b_single.jsonl"
    assert path == judgment_file(tmp_path, "a/b")
    lines = _lines(path)
    assert lines == [judgment.as_line() for judgment in found]
    order = [(81, 1), (81, 2), (101, 1), (101, 2), (102, 1), (102, 2), (9, 1)]
    assert [(line["model"], line["question_id"], line["turn"]) for line in lines] == [
        (model, *place) for model in ("plain", "exact", "fsd") for place in order
    ]
    line = lines[9]
    assert begun <= line.pop("tstamp") <= time.time()
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
    assert "secret" not in repr(endpoint)


@pytest.mark.parametrize(("variable", "key"), [(None, "none"), ("theirs", "theirs")])
def test_the_key_is_the_environments_or_none_at_all(
    variable: str | None, key: str, stub: StubJudge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv("OPENAI_API_KEY", variable)
    judge_answers(stub.endpoint(), QUESTIONS[3:], {"exact": _records("exact")}, tmp_path)
    assert stub.keys == [f"Bearer {key}"]


def test_empty_missing_and_third_turns(stub: StubJudge, tmp_path: Path) -> None:
    """An empty answer is judged; a question without an answer, or a third turn, is not."""
    questions = [Question(1, "w", ("a", "b", "c")), Question("2", "w", ("d",))]
    answer = {"question_id": 1, "answer_id": "x", "choices": [{"turns": ["", "yes", "no"]}]}
    found = judge_answers(stub.endpoint(), questions, {"exact": [answer]}, tmp_path)
    assert [(item.question_id, item.turn) for item in found] == [(1, 1), (1, 2)]
    assert [item.user_prompt for item in found] == ["Q a A ", "Q a A  Q b A yes"]


def test_a_reply_without_words_has_no_rating(
    stub: StubJudge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = stub.completion("")
    silent["choices"][0]["message"]["content"] = None
    stub.before = lambda prompt: (200, silent)
    (found,) = judge_answers(stub.endpoint(), QUESTIONS[3:], {"exact": _records("exact")}, tmp_path)
    assert (found.judgment, found.score) == ("", -1)


def test_requests_overlap_and_nothing_depends_on_it(
    stub: StubJudge, records: dict[str, list[Record]], tmp_path: Path
) -> None:
    """None of the first four is answered before all four are there."""
    judge_answers(stub.endpoint(), QUESTIONS, records, tmp_path / "one", parallel=1)
    assert stub.answered == [body["messages"][1]["content"] for body in stub.asked]
    barrier, count = threading.Barrier(4), len(stub.asked)

    def wait(prompt: str) -> None:
        if len(stub.asked) <= count + 4 and not barrier.broken:
            barrier.wait(WAIT)

    stub.before = wait
    judge_answers(stub.endpoint(), QUESTIONS, records, tmp_path / "four", parallel=4)
    assert not barrier.broken
    assert len(stub.asked) == 2 * COUNT
    one, four = (_timeless(judgment_file(tmp_path / name, "a/b")) for name in ("one", "four"))
    assert one == four


@pytest.mark.parametrize("parallel", [1, 4])
def test_a_run_goes_on_after_the_endpoint_failed(
    parallel: int, stub: StubJudge, records: dict[str, list[Record]], tmp_path: Path
) -> None:
    """Nothing is judged twice, and the file ends as an undisturbed run's."""
    out = tmp_path / "out"
    stub.before = lambda prompt: (
        (500, {"error": {"message": "out of\nmemory"}}) if len(stub.asked) > 9 else None
    )
    with pytest.raises(JudgeError) as error:
        judge_answers(stub.endpoint(), QUESTIONS, records, out, parallel)
    assert str(error.value) == (
        f"the judge a/b at {stub.url} failed (500, out of memory); the answers and the judgments so"
        " far are kept, and the same command goes on from there"
    )
    assert len(stub.answered) >= 9 - parallel
    assert len(_lines(judgment_file(out, "a/b"))) == len(stub.answered)
    assert len(stub.asked) < 9 + 2 * parallel
    stub.before = lambda prompt: None
    seen: list[tuple[int, int]] = []
    kept = len(stub.answered)
    judge_answers(
        stub.endpoint(), QUESTIONS, records, out, parallel, lambda *numbers: seen.append(numbers)
    )
    assert seen[0] == (kept + 1, COUNT)
    assert len(stub.answered) == len(set(stub.answered)) == COUNT
    judge_answers(stub.endpoint(), QUESTIONS, records, tmp_path / "undisturbed")
    assert _timeless(judgment_file(out, "a/b")) == _timeless(
        judgment_file(tmp_path / "undisturbed", "a/b")
    )


def test_a_finished_file_is_not_asked_for_again(
    stub: StubJudge, records: dict[str, list[Record]], tmp_path: Path
) -> None:
    """Not even the endpoint need be there."""
    first = judge_answers(stub.endpoint(), QUESTIONS, records, tmp_path)
    before = judgment_file(tmp_path, "a/b").read_bytes()
    gone = JudgeEndpoint("http://127.0.0.1:1/v1", "a/b", retries=0)
    assert judge_answers(gone, QUESTIONS, records, tmp_path) == first
    assert judgment_file(tmp_path, "a/b").read_bytes() == before
    assert [path.name for path in (tmp_path / "model_judgment").iterdir()] == ["a_b_single.jsonl"]


def test_what_was_under_way_when_one_failed_is_kept(stub: StubJudge, tmp_path: Path) -> None:
    refused = threading.Event()

    def answer(prompt: str) -> tuple[int, Any] | None:
        if prompt == "Q first A x":
            refused.set()
            return 400, {"error": {"message": "no"}}
        refused.wait(WAIT)
        while len(_asking()) > 1:  # Until the refusal has been heard.
            time.sleep(0.01)
        return None

    stub.before = answer
    questions = [Question(at, "w", (text,)) for at, text in enumerate(["first", "second", "third"])]
    answers = [
        {"question_id": at, "answer_id": str(at), "choices": [{"turns": ["x"]}]} for at in range(3)
    ]
    with pytest.raises(JudgeError, match="400, no"):
        judge_answers(stub.endpoint(), questions, {"exact": answers}, tmp_path, parallel=2)
    assert [line["question_id"] for line in _lines(judgment_file(tmp_path, "a/b"))] == [1]
    assert len(stub.asked) == 2


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_a_half_written_line_is_judged_again(
    cut: int, stub: StubJudge, records: dict[str, list[Record]], tmp_path: Path
) -> None:
    judge_answers(stub.endpoint(), QUESTIONS, records, tmp_path)
    path = judgment_file(tmp_path, "a/b")
    whole, expected = path.read_bytes(), _timeless(path)
    path.write_bytes(whole[:-cut])
    judge_answers(stub.endpoint(), QUESTIONS, records, tmp_path)
    assert stub.answered[COUNT:] == ["Q greet A fsd greet"]
    assert _timeless(path) == expected
    assert path.read_bytes().split(b"\n")[:-2] == whole.split(b"\n")[:-2]  # to the time stamp


def test_a_half_written_line_is_cut_off_before_the_next(
    stub: StubJudge, records: dict[str, list[Record]], tmp_path: Path
) -> None:
    """Not only where the run that goes on reaches the end."""
    judge_answers(stub.endpoint(), QUESTIONS, records, tmp_path)
    path = judgment_file(tmp_path, "a/b")
    whole = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join(whole[:5]) + b"\n" + whole[5][:30])
    stub.before = lambda prompt: (400, {}) if len(stub.asked) > COUNT + 1 else None
    with pytest.raises(JudgeError):
        judge_answers(stub.endpoint(), QUESTIONS, records, tmp_path, parallel=1)
    lines = path.read_bytes().split(b"\n")
    assert lines[:5] == whole[:5]
    assert [json.loads(line)["question_id"] for line in lines[5:-1]] == [102]


def test_a_new_answer_is_judged_anew(
    stub: StubJudge, records: dict[str, list[Record]], tmp_path: Path
) -> None:
    """Though it says the same; so is one that would be judged in other words."""
    judge_answers(stub.endpoint(), QUESTIONS, records, tmp_path)
    records["exact"][0]["answer_id"] = "another"
    changed = [*QUESTIONS[:3], Question(9, "writing", ("hello",))]
    found = judge_answers(stub.endpoint(), changed, records, tmp_path, parallel=1)
    assert stub.answered[COUNT:] == [
        "Q hello A plain greet",
        "Q write A exact write",
        "Q write A exact write Q again A exact again",
        "Q hello A exact greet",
        "Q hello A fsd greet",
    ]
    lines = _lines(judgment_file(tmp_path, "a/b"))
    assert lines == [item.as_line() for item in found]
    assert [line["answer_id"] for line in lines[7:10]] == ["another", "another", "exact-101"]


def test_methods_not_judged_now_stay_in_the_file(
    stub: StubJudge, records: dict[str, list[Record]], tmp_path: Path
) -> None:
    judge_answers(stub.endpoint(), QUESTIONS, {"fsd": records.pop("fsd")}, tmp_path)
    before = _lines(judgment_file(tmp_path, "a/b"))
    found = judge_answers(stub.endpoint(), QUESTIONS, records, tmp_path)
    assert {item.model for item in found} == {"plain", "exact"}
    assert _lines(judgment_file(tmp_path, "a/b"))[14:] == before
    assert len(stub.asked) == COUNT


def test_odd_characters_survive(stub: StubJudge, tmp_path: Path) -> None:
    """Line separators that are not line ends, in answers read back and in judgments."""
    odd = "a\u2028b\x85c\r\nd\U0001f600"
    record = {"question_id": 9, "answer_id": "x", "choices": [{"turns": [odd]}]}
    AnswerStore(tmp_path, "exact", {}).append(record)
    answers = {"exact": AnswerStore(tmp_path, "exact", {}).merge([9])}
    assert answers["exact"] == [record]
    for _ in range(2):
        (found,) = judge_answers(stub.endpoint(), QUESTIONS[3:], answers, tmp_path)
    assert found.user_prompt == f"Q greet A {odd}"
    assert len(stub.asked) == 1


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
            stub.endpoint(timeout=0.2), QUESTIONS[3:], {"exact": _records("exact")}, tmp_path
        )
    over.set()


def test_a_passing_failure_is_asked_again(stub: StubJudge, tmp_path: Path) -> None:
    stub.before = lambda prompt: (503, {}) if len(stub.asked) == 1 else None
    (found,) = judge_answers(
        stub.endpoint(retries=1), QUESTIONS[3:], {"exact": _records("exact")}, tmp_path
    )
    assert found.score == rate("Q greet A exact greet")
    assert len(stub.asked) == 2


def test_without_the_client_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(JudgeError, match="through the package openai: install it"):
        judge_answers(
            JudgeEndpoint("http://x", "m"), QUESTIONS[3:], {"exact": _records("exact")}, tmp_path
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
    for thread in _asking():
        thread.join(WAIT)
    assert len(stub.asked) <= 2
    assert len(_lines(judgment_file(tmp_path, "a/b"))) == 1


_PROGRAM = """
import json, sys, types

# The package without what its __init__ imports: torch takes long on a busy machine.
package = types.ModuleType("eagle_fsd")
package.__path__ = [sys.argv[1]]
sys.modules["eagle_fsd"] = package
from eagle_fsd.evaluation.judge import judge_answers
from eagle_fsd.evaluation.judge_client import JudgeEndpoint
from eagle_fsd.evaluation.questions import Question

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
    assert [line["question_id"] for line in _lines(path)] in ([0, 1], [1, 0])
    count = len(stub.asked)
    found = judge_answers(stub.endpoint(), questions, {"exact": answers}, tmp_path)
    assert [item.question_id for item in found] == list(range(9))
    assert len(stub.asked) == count + 7


def _whole_lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def test_fastchat_reads_the_file(
    stub: StubJudge,
    records: dict[str, list[Record]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its means are those of the scores by hand; a judgment without a rating does not count."""
    from fastchat.llm_judge.show_result import display_result_single

    scores = {
        "Q write A exact write": "[[8]]",
        "Q add R right {1} A exact add": "[[6.5]]",
        "Q multiply A exact multiply": "none",
        "Q greet A exact greet": "[[3]]",
        "Q write A fsd write": "[[9]]",
    }

    def judge(prompt: str) -> tuple[int, Any] | None:
        reply = stub.completion(prompt)
        reply["choices"][0]["message"]["content"] = scores.get(prompt, "Rating: [[5]]")
        return 200, reply

    stub.before = judge
    judge_answers(stub.endpoint(), QUESTIONS, records, tmp_path)
    path = judgment_file(tmp_path, "a/b")
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
        # (8 + 6.5 + 3) / 3, (9 + 5 + 5 + 5) / 4, then with three fives of the second turn
        "First turn": {"fsd": 6.0, "exact": 5.833333, "plain": 5.0},
        "Second turn": {"plain": 5.0, "exact": 5.0, "fsd": 5.0},
        "Average": {"fsd": 5.571429, "exact": 5.416667, "plain": 5.0},
    }


def _judgment(model: str, question: int, turn: int, score: float, category: str = "w") -> Judgment:
    return Judgment(question, category, model, "a", turn, "m", "single-v1", "?", "!", score, 0.0)


def test_scores_by_hand() -> None:
    judgments = [
        _judgment("exact", 1, 1, 8),
        _judgment("exact", 1, 2, 6),
        _judgment("exact", 2, 1, -1, "math"),
        _judgment("fsd", 1, 1, 7),
        _judgment("fsd", 1, 2, 6),
        _judgment("fsd", 2, 1, 2.5, "math"),
        _judgment("mute", 1, 1, -1),
    ]
    found = judge_summary(judgments)
    assert found == json.loads(json.dumps(found, allow_nan=False))
    assert list(found) == ["exact", "fsd", "mute"]
    exact, fuzzy, mute = found.values()
    # The two deviate by 1 from their mean, 7: 1.96 * sqrt(2) / sqrt(2).
    assert exact["score"] == 7
    assert exact["score_interval"] == pytest.approx([5.040036, 8.959964])
    assert (exact["rated"], exact["unrated"]) == (2, 1)
    assert exact["by_turn"]["1"] == {
        "score": 8,
        "score_interval": [8, 8],
        "rated": 1,
        "unrated": 1,
    }
    assert exact["by_category"]["math"] == {
        "score": None,
        "score_interval": None,
        "rated": 0,
        "unrated": 1,
    }
    assert "against_exact" not in exact
    assert fuzzy["score"] == pytest.approx(15.5 / 3)
    assert {turn: part["score"] for turn, part in fuzzy["by_turn"].items()} == {"1": 4.75, "2": 6}
    assert {name: part["score"] for name, part in fuzzy["by_category"].items()} == {
        "w": 6.5,
        "math": 2.5,
    }
    # -1 and 0; question 2 has no rating under exact. 1.96 * sqrt(0.5) / sqrt(2) = 0.98.
    assert fuzzy["against_exact"]["score_change"] == -0.5
    assert fuzzy["against_exact"]["score_change_interval"] == pytest.approx([-1.479982, 0.479982])
    assert fuzzy["against_exact"]["turns"] == 2
    assert mute["against_exact"] == {
        "score_change": None,
        "score_change_interval": None,
        "turns": 0,
    }
    assert "against_exact" not in judge_summary(judgments[3:])["fsd"]


def test_the_command_has_its_answers_judged(stub: StubJudge, tmp_path: Path, run: Any) -> None:
    """Answers are kept where the judge fails; the same command judges them, and none twice."""
    file, out = tmp_path / "questions.jsonl", tmp_path / "out"
    lines = [{"question_id": 81, "category": "writing", "turns": ["Hello!", "Thank you!"]}]
    lines.append({"question_id": 101, "category": "math", "turns": ["Hello!", "What can you do?"]})
    _write_lines(file, lines)
    command = ["evaluate", file, "--out", out, "-m", "exact", "-m", "fsd", "--max-new-tokens", 16]
    command += ["--judge-base-url", stub.url, "--judge-model", "a/b"]
    stub.before = lambda prompt: (404, {"error": {"message": "no model of that name"}})
    status, _, errors = run(*command)
    assert status == 1
    failure = errors.splitlines()[-1]
    assert "the judge a/b" in failure
    assert "no model of that name" in failure
    answers = (out / "exact.jsonl").read_text()
    assert len(answers.splitlines()) == 2
    assert json.loads((out / "report.json").read_text())["rows"][0]["tau"] > 1
    stub.before = lambda prompt: None
    status, printed, _ = run(*command, "--json")
    assert status == 0
    report = json.loads(printed)
    exact, fuzzy = report["rows"]
    assert report["judge"] == {"model": "a/b", "base_url": stub.url}
    assert exact["judge"]["rated"] == 4
    assert (
        exact["judge"]["score"]
        == sum(
            line["score"] for line in _lines(judgment_file(out, "a/b")) if line["model"] == "exact"
        )
        / 4
    )
    assert fuzzy["judge"]["against_exact"]["turns"] == 4
    assert len(stub.answered) == 8
    assert (out / "exact.jsonl").read_text() == answers
    status, printed, _ = run(*command)
    assert status == 0
    assert "judge against exact" in printed
    assert len(stub.answered) == 8
