"""What clients see when the server stops, and when decoding fails or stalls."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from api_servers import (
    CHAT,
    EMBEDDINGS,
    ENDLESS,
    HELLO,
    NAME,
    TIMEOUT,
    APIThread,
    ServerProcess,
    fixed_answer,
    seconds_until,
)

from eagle_fsd import EagleFSD
from eagle_fsd.model.self_check import check_target
from eagle_fsd.model.target import Target

BODY = {"model": NAME, "messages": HELLO, "max_tokens": 1900, "ignore_eos": True, **ENDLESS}


def ask(url: str, **changes: Any) -> httpx.Response:
    return httpx.post(url + CHAT, json={**BODY, **changes}, trust_env=False, timeout=TIMEOUT)


class Streamed(threading.Thread):
    """A client that reads a stream to its end; ``started`` once it has the first tokens."""

    def __init__(self, url: str, **changes: Any) -> None:
        super().__init__(daemon=True)
        self.url, self.body = url, {**BODY, "stream": True, **changes}
        self.events: list[Any] = []
        self.started = threading.Event()
        self.start()
        assert self.started.wait(TIMEOUT)

    def run(self) -> None:
        with httpx.stream(
            "POST", self.url + CHAT, json=self.body, trust_env=False, timeout=TIMEOUT
        ) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    self.events.append(json.loads(line[6:]))
                    if len(self.events) > 1:
                        self.started.set()


@pytest.fixture
def server(model: EagleFSD) -> Iterator[APIThread]:
    check_target(model.target)
    server = APIThread(model, max_batch=2, queue=2, stall_timeout=60.0)
    yield server
    server.stop()


def begin_two(url: str) -> tuple[Streamed, threading.Thread, list[httpx.Response]]:
    """Ask for a streamed answer and a whole one, whose thread fills the list."""
    stream, replies = Streamed(url), []
    plain = threading.Thread(target=lambda: replies.append(ask(url)))
    plain.start()
    health = url + "/health"
    assert seconds_until(lambda: httpx.get(health, trust_env=False).json()["queue"] == 2) < TIMEOUT
    return stream, plain, replies


def check_ended(stream: Streamed, replies: list[httpx.Response], message: str) -> None:
    """Both have ended with an error."""
    assert message in stream.events[-1]["error"]["message"]
    assert replies[0].status_code == 503
    assert message in replies[0].json()["error"]["message"]


def test_answers_end_with_an_error_when_the_server_stops(server: APIThread) -> None:
    stream, plain, replies = begin_two(server.url)
    server.server.should_exit = True
    for thread in (stream, plain, server.thread):
        thread.join(TIMEOUT)
    check_ended(stream, replies, "the server is shutting down")
    metrics = server.backend.queue.metrics
    failed = b'requests_total{outcome="failed"} 2.0'
    assert seconds_until(lambda: failed in metrics.page(0, 0, 0)) < TIMEOUT


@pytest.mark.slow
def test_a_process_is_suspended_and_terminated() -> None:
    """Its requests end, with an error if a step has stalled, and the next ones are answered."""
    server = ServerProcess("serve", "--stall-timeout", "4", "--shutdown-timeout", "1")
    try:
        stream, plain, replies = begin_two(server.url)
        server.process.send_signal(signal.SIGSTOP)
        with pytest.raises(httpx.ReadTimeout):
            server.http.get("/health", timeout=6)
        server.process.send_signal(signal.SIGCONT)
        for thread in (stream, plain):
            thread.join(TIMEOUT)
        if "error" in stream.events[-1]:
            check_ended(stream, replies, "decoding has stalled: a step or call takes more than 4 s")
        else:  # it was suspended between two steps
            assert stream.events[-1]["choices"][0]["finish_reason"] == "length"
            assert replies[0].status_code == 200
        empty = {"status": "ok", "queue": 0}  # as soon as the step that stalled has ended
        assert seconds_until(lambda: server.http.get("/health").json() == empty) < TIMEOUT
        assert server.http.get("/ready").status_code == 200
        assert fixed_answer(server.http)
        stream, plain, replies = begin_two(server.url)
        begin = time.monotonic()
    finally:
        status = server.stop(signal.SIGTERM)
    assert time.monotonic() - begin < 10  # the default timeout
    for thread in (stream, plain):
        thread.join(TIMEOUT)
    check_ended(stream, replies, "the server is shutting down")
    assert status == -signal.SIGTERM


def test_answers_get_time_to_end(model: EagleFSD, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile others are refused; choices are admitted beyond the room of the queue."""
    release, forward = threading.Event(), Target.forward_tree

    def gated(*args: Any) -> Any:
        assert server.backend.queue.ready or release.wait(TIMEOUT)
        return forward(*args)

    check_target(model.target)
    server = APIThread(model, shutdown_timeout=TIMEOUT, max_batch=1, queue=1)
    monkeypatch.setattr(Target, "forward_tree", gated)
    stream = Streamed(server.url, max_tokens=40, n=4)
    server.server.should_exit = True
    assert seconds_until(lambda: not server.backend.queue.ready) < TIMEOUT
    statuses = [server.http.get(path).status_code for path in ("/ready", "/health")]
    refused = ask(server.url)
    release.set()
    stream.join(TIMEOUT)
    server.thread.join(TIMEOUT)
    assert statuses == [503, 200]
    assert refused.status_code == 503
    choices = [event["choices"][0] for event in stream.events]
    ended = [choice["index"] for choice in choices if choice["finish_reason"] == "length"]
    assert sorted(ended) == [*range(4)]
    server.stop()


def test_stalled_step_is_reported(server: APIThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests fail while a step stalls, and answers resume if the step ends after all."""
    release, forward, replies = threading.Event(), Target.forward_tree, []

    def blocked(*args: Any) -> Any:
        assert release.wait(TIMEOUT)
        return forward(*args)

    def embed() -> None:
        body = {"model": NAME, "input": "Hello!"}
        replies.append(httpx.post(server.url + EMBEDDINGS, json=body, trust_env=False))

    monkeypatch.setattr(Target, "forward_tree", blocked)
    waiting = threading.Thread(target=lambda: replies.append(ask(server.url)))
    waiting.start()
    assert seconds_until(lambda: server.queue_length() == 1) < TIMEOUT
    embedding = threading.Thread(target=embed)
    embedding.start()
    assert seconds_until(lambda: server.queue_length() == 2) < TIMEOUT
    server.backend.queue.stall_timeout = 0.2
    for thread in (waiting, embedding):
        thread.join(TIMEOUT)
    for reply in replies:
        assert reply.status_code == 503
        assert "a step or call takes more than 0.2 s" in reply.json()["error"]["message"]
    assert server.http.get("/health").status_code == 503
    assert ask(server.url).status_code == 503
    server.backend.queue.stall_timeout = 60.0
    release.set()
    assert server.answer()
    assert server.http.get("/ready").status_code == 200


def test_the_server_exits_if_every_step_fails(
    server: APIThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Target, "forward_tree", broken)
    for _ in range(3):
        assert ask(server.url).status_code == 500
    begin = time.monotonic()
    server.thread.join(TIMEOUT)
    assert time.monotonic() - begin < 30
    assert server.backend.queue.failed
