"""Tests for rewriting chats with a server: concurrency, retries, interruptions, rejections."""

from __future__ import annotations

import json
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stub_endpoint import Messages, Reply, StubEndpoint, completion, failure
from trainings import write_rounds

from eagle_fsd.train.chat_file import Chat, ChatFile, is_answer
from eagle_fsd.train.config import RegenerateConfig, RegenerateRequest, RegenerateServer
from eagle_fsd.train.regenerate import regenerate, rewrite_chats
from eagle_fsd.train.writing import ServerWriter
from eagle_fsd.utils.options import OptionsError

MODEL, KEY = "org/target", "secret-key"
COUNT = 9
TURNS = 2 * COUNT  # answers: the chats have one, two and three in equal parts
#: Seconds until a wait for an event fails.
TIMEOUT = 100
TOO_LONG = "This model's maximum context length is 64 tokens."


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats of one, two and three rounds, some with a system turn."""
    questions = [f"Question {number} {place}?" for number in range(COUNT) for place in range(3)]
    return write_rounds(tmp_path_factory.mktemp("chats") / "chats.jsonl", questions)


def answer(messages: Messages) -> str:
    """Return an answer that depends on every message of the prompt."""
    return f"answer {zlib.crc32(json.dumps(messages).encode()) % 10_000}"


class StubServer(StubEndpoint):
    """A server of one model; ``intercept`` may wait, or return a status and an error message."""

    def __init__(self) -> None:
        self.intercept: Callable[[Messages], tuple[int, str] | None] = lambda messages: None
        super().__init__()

    def reply(self, body: dict[str, Any]) -> Reply:
        if body["model"] != MODEL:
            return failure(404, f"the model {body['model']} does not exist")
        if (failed := self.intercept(body["messages"])) is not None:
            return failure(*failed)
        return completion(f" {answer(body['messages'])}\n")


class ServerRewriting:
    """Rewrites chats with a stub; ``expected`` is what it makes of them, one after another."""

    def __init__(self, data: Path, out: Path, stub: StubServer) -> None:
        self.data, self.out, self.stub = data, out, stub
        self.expected: list[dict[str, Any]] = []
        for index, chat in enumerate(ChatFile(data)):
            new: Chat = []
            for turn in chat:
                if is_answer(turn):
                    turn = {"role": "assistant", "content": answer(new)}
                new.append(turn)
            self.expected.append({"index": index, "messages": new})

    def __call__(
        self, progress: Any = None, on_tokens: Any = lambda count: None, **options: Any
    ) -> ChatFile:
        """Rewrite the chats; options are fields of the server or of the configuration."""
        names = [name for name in options if name in RegenerateServer.model_fields]
        server = {"base_url": self.stub.url, "model": MODEL, "retries": 3, "timeout": TIMEOUT}
        server |= {name: options.pop(name) for name in names}
        config = RegenerateConfig(max_new_tokens=7, **options)
        writer = ServerWriter(RegenerateServer(**server), on_tokens)
        return rewrite_chats(writer, ChatFile(self.data), self.out, config, progress)

    def arguments(self, *more: str) -> list[str]:
        """Arguments of the command that rewrites the chats."""
        words = ["train", "regenerate", "--data", self.data, "--out", self.out]
        return [*map(str, words), "--base-url", self.stub.url, "--model", MODEL, *more]

    def lines(self) -> list[dict[str, Any]]:
        """Return the complete lines of the output, which may not exist yet."""
        content = self.out.read_bytes() if self.out.exists() else b""
        return [json.loads(line) for line in content.split(b"\n")[:-1]]

    def reject(self, status: int, message: str, when: Callable[[Messages], bool]) -> None:
        """Have the server fail for some prompts."""
        self.stub.intercept = lambda messages: (status, message) if when(messages) else None


@pytest.fixture
def rewrite(data: Path, tmp_path: Path) -> Iterator[ServerRewriting]:
    stub = StubServer()
    yield ServerRewriting(data, tmp_path / "out.jsonl", stub)
    stub.close()


def is_first_turn(messages: Messages, number: int) -> bool:
    return messages[-1]["content"] == f"Question {number} 0?"


def test_turns_follow_the_rewritten_ones_before_them(rewrite: ServerRewriting) -> None:
    """The complete output is resumed only with the same options, and nothing is left to do."""
    reported: list[tuple[int, int]] = []
    counted: list[int] = []
    given = {"top_k": 5, "seed": 3}
    rewritten = rewrite(lambda *now: reported.append(now), counted.append, concurrency=1, **given)
    assert counted == [2] * TURNS  # the stub counts words
    assert rewrite.stub.peak == 1
    assert rewrite.lines() == rewrite.expected
    assert len(rewritten) == COUNT
    assert reported == [(done, COUNT) for done in range(COUNT + 1)]
    first = rewrite.stub.requests[0]
    assert first["model"] == MODEL
    assert (first["temperature"], first["top_p"], first["top_k"]) == (0.7, 1.0, 5)
    assert first["max_tokens"] == 7
    seeds = [body["seed"] for body in rewrite.stub.requests]
    assert len(set(seeds)) == len(seeds) == TURNS
    for change in ({"model": "org/other"}, {"temperature": 0.5}):
        with pytest.raises(ValueError, match="was written from other chats or options"):
            rewrite(**{**given, **change})
    assert rewrite(concurrency=3, retries=0, batch_size=2, **given).path == rewrite.out
    assert rewrite.lines() == rewrite.expected
    assert len(rewrite.stub.requests) == TURNS


def test_failing_server_ends_the_run_which_resumes(rewrite: ServerRewriting) -> None:
    """A run that fails after a retry keeps its chats, and resuming it gives one run's result."""
    rewrite.reject(500, "broken", lambda messages: is_first_turn(messages, 5))
    with pytest.raises(ValueError, match=r"org/target at .* failed \(500, broken\); .* saved") as e:
        rewrite(concurrency=2, retries=1)
    assert str(e.value).isprintable()
    kept = {line["index"] for line in rewrite.lines()}
    assert {0, 1, 2, 3} <= kept | {4}
    assert 5 not in kept
    assert sum(is_first_turn(body["messages"], 5) for body in rewrite.stub.requests) == 2
    before = len(rewrite.stub.requests)
    rewrite.stub.intercept = lambda messages: None
    rewrite(concurrency=2, retries=1)
    assert rewrite.lines() == rewrite.expected
    again = {body["messages"][-1]["content"].split()[1] for body in rewrite.stub.requests[before:]}
    assert again == {str(number) for number in range(COUNT) if number not in kept}


def test_rejected_requests_end_their_chats(
    rewrite: ServerRewriting, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that rejects all of the first chats ends the run, and nothing is written."""
    for status in (400, 422):
        rewrite.reject(status, "unknown: seed", lambda messages: True)
        with pytest.raises(
            ValueError, match=rf"none of the first {COUNT} chats: line \d+: {status}, unknown: seed"
        ):
            rewrite()
        assert not rewrite.out.exists()
    rewrite.reject(400, TOO_LONG, lambda messages: is_first_turn(messages, 0))
    assert len(rewrite(concurrency=1)) == COUNT - 1  # reading the file skips the first chat
    assert rewrite.lines()[1:] == rewrite.expected[1:]
    before = len(rewrite.stub.requests)
    rewrite()
    assert len(rewrite.stub.requests) == before
    rewrite.out.unlink()
    rewrite.reject(400, TOO_LONG, lambda messages: len(messages) >= 3)
    rewritten = rewrite()
    for chat, complete in zip(rewritten, rewrite.expected, strict=True):
        assert chat == complete["messages"][: len(chat)]
    assert [len(chat) for chat in rewritten] == [2, 3, 2] * 3
    assert f"6 of {COUNT} chats end early; the first one: line " in caplog.text
    assert f"400, {TOO_LONG}" in caplog.text


def test_tool_calls_and_results_are_context(rewrite: ServerRewriting, tmp_path: Path) -> None:
    """They are sent as OpenAI's API takes them, and are not rewritten."""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    turns = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
        {"role": "assistant", "content": "Wrong."},
    ]
    rewrite.data = tmp_path / "chats.jsonl"
    rewrite.data.write_text(json.dumps({"messages": turns}) + "\n")
    (chat,) = rewrite()
    (body,) = rewrite.stub.requests
    sent = body["messages"]
    assert [turn["role"] for turn in sent] == ["system", "user", "assistant", "tool"]
    assert sent[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2}'}
    assert sent[3]["tool_call_id"] == "1"
    assert chat[2]["tool_calls"] == [call]
    assert chat[4] == {"role": "assistant", "content": answer(sent)}


def test_key_comes_from_the_environment_and_is_not_stored(
    rewrite: ServerRewriting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for setting in (None, ""):
        if setting is not None:
            monkeypatch.setenv("OTHER_KEY", setting)
        with pytest.raises(OptionsError, match="variable OTHER_KEY is not set or empty"):
            rewrite(api_key_env="OTHER_KEY")
    monkeypatch.setenv("OTHER_KEY", KEY)
    rewrite(api_key_env="OTHER_KEY")
    assert set(rewrite.stub.keys) == {f"Bearer {KEY}"}
    rewrite.out.unlink()
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    rewrite(base_url=rewrite.stub.url.replace("//", "//user:password@"))
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    assert KEY not in written
    assert "password" not in written


def test_options_that_exclude_each_other(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a loaded target, and several processes, which several requests at once replace."""
    for options in ({"base_url": "http://x/v1"}, {"model": "x"}):
        with pytest.raises(ValueError, match="--base-url and --model require each other"):
            RegenerateServer(**options)
    with pytest.raises(ValueError, match="--api-key-env requires --base-url"):
        RegenerateServer(api_key_env="X", retries=2)
    server, out = RegenerateServer(base_url="http://x/v1", model=MODEL), tmp_path / "out.jsonl"
    for option, name in (
        ("target", "target"),
        ("dtype", "dtype"),
        ("chat_template", "conv-template"),
        ("device_map", "device-map"),
    ):
        given = RegenerateRequest(data=data, out=out, **{option: "x"})
        with pytest.raises(OptionsError, match=f"target and excludes --{name}"):
            regenerate(given, server=server)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionsError, match="--base-url requires a single process"):
        regenerate(RegenerateRequest(data=data, out=out), server=server)


# -- the command -----------------------------------------------------------------------------------


def interrupt() -> None:
    """Send SIGINT to the main thread."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


def test_ctrl_c_completes_the_chats_in_progress(
    rewrite: ServerRewriting, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The signal arrives during three chats, whose other turns are still requested."""
    stuck = threading.Barrier(3, action=interrupt)

    def wait(messages: Messages) -> None:
        if len(rewrite.stub.requests) <= 3:
            stuck.wait(TIMEOUT)
            while "press Ctrl-C again" not in caplog.text:
                time.sleep(0.01)

    rewrite.stub.intercept = wait
    handler = signal.getsignal(signal.SIGINT)
    words = rewrite.arguments("--concurrency", "3", "--max-new-tokens", "7")
    status, _, errors = run(*words)
    assert status == 130
    assert errors.splitlines()[-1] == "error: stopped"
    assert caplog.messages == [
        "stopping after the chats in progress; press Ctrl-C again to stop at once"
    ]
    assert signal.getsignal(signal.SIGINT) is handler
    saved = rewrite.lines()
    assert sorted(line["index"] for line in saved) == [0, 1, 2]
    assert all(line == rewrite.expected[line["index"]] for line in saved)
    assert len(rewrite.stub.requests) == 6  # one, two and three rounds
    assert run(*words)[0] == 0
    assert rewrite.lines() == rewrite.expected
    assert len(rewrite.stub.requests) == 2 * COUNT


def test_second_ctrl_c_stops_at_once(
    rewrite: ServerRewriting, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The second Ctrl-C ends the command without waiting for the replies."""
    over = threading.Event()

    def wait(messages: Messages) -> None:
        if not is_first_turn(messages, 0) and not over.is_set():
            interrupt()
            while "press Ctrl-C again" not in caplog.text:
                time.sleep(0.01)
            interrupt()
            over.wait(TIMEOUT)

    rewrite.stub.intercept = wait
    words = rewrite.arguments("--concurrency", "1")
    try:
        assert run(*words)[0] == 130
    finally:
        over.set()
    assert [line["index"] for line in rewrite.lines()] == [0]
