"""``eagle-fsd serve``, ``serve worker`` and ``demo``: options, and processes."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import threading
import webbrowser
from collections.abc import Callable
from typing import Any

import pytest
from api_servers import (
    CHAT,
    NAME,
    TIMEOUT,
    APIThread,
    ServerProcess,
    ServerThread,
    fixed_answer,
    free_port,
    seconds_until,
)
from pairs import forget_compiled

from eagle_fsd import EagleFSD
from eagle_fsd.chat.serve import connections, worker
from eagle_fsd.chat.serve.guard import Access
from eagle_fsd.model import compilation
from eagle_fsd.utils.chat_templates import load_chat_template

KEY = "0123456789abcdef"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, model: EagleFSD) -> list[Any]:
    """The arguments of the servers that would run; they print their addresses."""
    calls: list[Any] = []
    template = load_chat_template(model.tokenizer)

    def run_server(server: connections.BoundedServer) -> None:
        calls.append(server.config.app)
        server.on_started()

    monkeypatch.delenv("EAGLE_FSD_API_KEYS", raising=False)
    monkeypatch.setattr("eagle_fsd.cli.serve.load_chat", lambda *_: (copy.copy(model), template))
    monkeypatch.setattr(connections, "check_port", lambda *_: None)
    monkeypatch.setattr(connections, "run_server", run_server)
    monkeypatch.setattr(worker.FSDWorker, "keep_registered", lambda _: None)
    return calls


def test_addresses_and_names(started: list[Any], run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_FSD_API_KEYS", "one,two")
    for host, url in (("::", "http://[::1]:8000"), ("myhost", "http://myhost:8000")):
        options = ("--host", host, "--trusted-hosts", "chat.example", "--name", 'my "model"')
        status, printed, errors = run("serve", *options)
        assert status == 0, errors
        assert f"API         {url}/v1" in printed
        assert "certificate accuracy on bundled: at most 0.70 points lost with 95%" in printed
        assert f"curl {url}/v1/chat/completions" in printed
        assert "Authorization: Bearer $KEY" in printed
        assert r'"model": "my \"model\""' in printed
        assert started.pop().access == Access(("chat.example", host), ("one", "two"))


def test_the_page_is_opened(started: list[Any], run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page opens only if there is a display: a text browser would take over the terminal."""
    monkeypatch.setattr(sys, "platform", "linux")
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    for display, words in (("", ("demo",)), (":0", ("demo", "--no-browser")), (":0", ("demo",))):
        monkeypatch.setenv("DISPLAY", display)
        assert not opened
        assert run(*words)[0] == 0
    assert opened == ["http://127.0.0.1:7860"]
    assert len(started) == 3


def test_other_machines_need_a_key(started: list[Any], run: Run) -> None:
    for words in (("serve",), ("serve", "worker"), ("demo",)):
        for host in ("192.0.2.7", "0.0.0.0", "::"):
            status, _, errors = run(*words, "--host", host)
            assert status == 2
            assert "set the environment variable EAGLE_FSD_API_KEYS" in errors
    assert not started


def test_values_that_never_match_are_errors(started: list[Any], run: Run) -> None:
    for words, option, value in (
        (("serve",), "--allowed-origins", "*"),
        (("serve",), "--allowed-origins", "chat.example"),
        (("serve",), "--allowed-origins", "https://chat.example/page"),
        (("serve",), "--trusted-hosts", "https://chat.example"),
        (("serve",), "--trusted-hosts", "chat.example:8443"),
        (("serve",), "--trusted-hosts", "cafe:8443"),
        (("serve",), "--trusted-hosts", "fe80::1%eth0"),
        (("serve", "worker"), "--address", "http://user:password@machine:1"),
        (("serve", "worker"), "--address", "http://my machine:1"),
        (("demo",), "--temperature", "3"),
    ):
        status, _, errors = run(*words, option, value)
        assert status == 2
        assert option.removeprefix("--") in errors
        assert value in errors
    assert not started
    hosts = ("--trusted-hosts", "chat.example", "--trusted-hosts", "[::2]")
    assert run("serve", "--allowed-origins", "https://Chat.example:443/", *hosts)[0] == 0
    access = started.pop().access
    assert access.origins == ("https://chat.example",)
    assert access.hosts == ("chat.example", "::2", "127.0.0.1")


def test_urls_and_keys_of_a_worker(
    started: list[Any], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """URLs have no trailing slash."""
    monkeypatch.setenv("EAGLE_FSD_API_KEYS", KEY)
    local, loopback = "http://127.0.0.1:21001", "http://127.0.0.1:21002"
    workers: list[worker.FSDWorker] = []
    app = worker.worker_app
    monkeypatch.setattr(worker, "worker_app", lambda item: workers.append(item) or app(item))
    for options, controller, address in (
        (("--host", "0.0.0.0"), local, loopback),
        (("--controller", "none"), None, loopback),
        (("--controller", "http://a:1/", "--host", "b"), "http://a:1", "http://b:21002"),
        (("--controller", "http://a:1", "--address", "http://c:2/"), "http://a:1", "http://c:2"),
    ):
        status, _, errors = run("serve", "worker", *options)
        assert status == 0, errors
        found = workers.pop()
        assert (found.controller, found.address) == (controller, worker.with_key(address, KEY))
        assert started.pop().access.keys == (KEY,)
    assert worker.with_key("http://c:2", "a/b") == "http://eagle-fsd:a%2Fb@c:2"


def test_taken_port_is_reported_in_one_line(server: APIThread, run: Run) -> None:
    status, _, errors = run("serve", "--port", server.port)
    assert status == 1
    assert len(errors.splitlines()) == 1
    assert f"cannot listen on 127.0.0.1:{server.port}" in errors


def test_serving_does_not_wait_for_compilation(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Answers are decoded meanwhile, and the log says when it begins and ends."""
    compiling, proceed = threading.Event(), threading.Event()

    def compile_graph(function: Callable[..., Any], *_: Any) -> Callable[..., Any]:
        compiling.set()
        assert proceed.wait(TIMEOUT)
        return function

    def use(bounded: connections.BoundedServer) -> None:
        server = ServerThread(bounded.config.app, queue=bounded.queue)
        before = fixed_answer(server.http)
        assert compiling.wait(TIMEOUT)
        assert fixed_answer(server.http) == before
        assert [record.message for record in caplog.records] == [
            "compiling in the background; meanwhile, answers are decoded without it"
        ]
        proceed.set()
        assert seconds_until(lambda: len(caplog.records) > 1) < TIMEOUT
        assert caplog.records[1].message.startswith("compiling took ")
        assert fixed_answer(server.http) == before
        server.stop()

    monkeypatch.setattr(compilation, "BACKGROUND_SECONDS", 0.0)
    monkeypatch.setattr(compilation, "BACKGROUND_TOKENS", 1)
    monkeypatch.setattr(compilation, "compile_graph", compile_graph)
    monkeypatch.setattr(connections, "run_server", use)
    status, _, errors = run("serve", "--port", free_port())
    forget_compiled()
    assert status == 0, errors


@pytest.mark.slow
def test_the_server_as_a_process() -> None:
    """It prints a command that works, honors keys and limits, and exits on Ctrl-C."""
    options = ("--web", "--max-threshold", "0.1", "--threshold", "0")
    server = ServerProcess("serve", *options, EAGLE_FSD_API_KEYS="one,two", KEY="two")
    model, page, api, command = server.log.read_text().splitlines()
    assert model == f"model       {NAME}, lossless"
    assert page == f"web page    {server.url}"
    assert api.startswith(f"API         {server.url}/v1 ")
    environment = {**os.environ, "KEY": "two"}
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, check=True, env=environment
    )
    assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant"
    body = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
    headers = {"authorization": "Bearer two"}
    reply = server.http.post(CHAT, json={**body, "fsd": {"threshold": 0.11}}, headers=headers)
    assert "at most 0.1 on this server; got 0.11" in reply.text
    assert "page.js" in server.http.get("/").text
    log = server.log
    text = log.read_text()
    assert server.stop(signal.SIGINT) == 130
    assert "Traceback" not in text
