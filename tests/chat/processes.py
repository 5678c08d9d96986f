"""Servers in processes of their own, and what tests send to them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import psutil

#: Seconds that anything may take on a busy machine; what takes longer hangs.
TIMEOUT = 180
NAME = "eagle-fsd-bundled"
QUESTION = "Mia has 8 apples at home. Then she gives 3 apples to Tom. How many apples are left?"
HELLO = [{"role": "user", "content": "Hello!"}]
EXACT = {"fsd": {"threshold": 0.0}}
#: Options of an answer that ends only at its maximum length: tokens become more likely with each
#: occurrence.
ENDLESS = {"temperature": 2, "seed": 5, "frequency_penalty": -2, "presence_penalty": -2}
#: How many requests may wait at the shared servers, and how many are decoded at once.
MAX_WAITING, MAX_BATCH = 24, 4
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


def free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    for item in sockets:
        item.bind(("127.0.0.1", 0))
    ports = [item.getsockname()[1] for item in sockets]
    for item in sockets:
        item.close()
    return ports


def seconds_until(condition: Callable[[], bool], timeout: float = TIMEOUT) -> float:
    """Wait for a condition; return the seconds it took, at most the timeout."""
    begin = time.monotonic()
    while not condition() and time.monotonic() - begin < timeout:
        time.sleep(0.01)
    return time.monotonic() - begin


class Servers:
    """``eagle-fsd serve all`` and clients for it.

    Attributes:
        lines: What it printed until it was ready.
        log: What it printed since.
        api: Port of the API; likewise ``controller`` and ``worker``.
    """

    def __init__(self, *options: str, keys: str = "") -> None:
        self.api, self.controller, self.worker = free_ports(3)
        command = [sys.executable, "-m", "eagle_fsd.cli", "serve", "all"]
        command += ["--port", str(self.api), "--controller-port", str(self.controller)]
        command += ["--worker-port", str(self.worker), *options]
        environment = {**os.environ, "EAGLE_FSD_API_KEYS": keys, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.lines: list[str] = []
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith("curl "):
                break
        assert "".join(self.lines[-1:]).startswith("curl "), "".join(self.lines)
        self.log: list[str] = []
        # Keep reading, or the servers would block once the pipe is full.
        threading.Thread(target=self.log.extend, args=(self.process.stdout,), daemon=True).start()
        self.http = httpx.Client(trust_env=False, timeout=TIMEOUT)

    def url(self, route: str) -> str:
        """Return the URL of a route, of the API if it begins with /v1, else of the worker."""
        return f"http://127.0.0.1:{self.api if route.startswith('/v1') else self.worker}{route}"

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(
            base_url=self.url("/v1"),
            api_key=key,
            max_retries=0,
            timeout=TIMEOUT,
            http_client=httpx.Client(trust_env=False),
        )

    def queue_length(self) -> int:
        length: int = self.http.post(self.url("/worker_get_status")).json()["queue_length"]
        return length

    def answer(self) -> str:
        """Return the answer to a fixed request, which is always the same."""
        body = {"model": NAME, "messages": HELLO, "temperature": 0, "max_tokens": 64, **EXACT}
        response = self.http.post(self.url(CHAT), json=body)
        text: str = response.json()["choices"][0]["message"]["content"]
        return text

    def child(self, name: str) -> psutil.Process:
        """Return the process of the controller, the worker or the api."""
        children = psutil.Process(self.process.pid).children()
        return next(child for child in children if name in child.cmdline())

    def stop(self, number: int = signal.SIGTERM) -> float:
        """Send a signal; return the seconds until no server was left."""
        children = psutil.Process(self.process.pid).children()
        begin = time.monotonic()
        self.process.send_signal(number)
        psutil.wait_procs(children, timeout=TIMEOUT)
        seconds = time.monotonic() - begin
        self.process.wait(TIMEOUT)
        self.http.close()
        return seconds


@contextmanager
def running_server(
    probe: str, *arguments: str, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``eagle-fsd serve`` with these arguments, from when its probe URL answers."""
    process = subprocess.Popen(
        [sys.executable, "-m", "eagle_fsd.cli", "serve", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )

    def ready() -> bool:
        assert process.poll() is None
        try:
            return httpx.get(probe, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        assert seconds_until(ready) < TIMEOUT
        yield process
    finally:
        process.kill()
        process.wait()


def assert_exits_with(parent: subprocess.Popen[Any]) -> None:
    """Kill a process, and check that its children exit."""
    children = psutil.Process(parent.pid).children()
    assert children
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs(children, timeout=60)
    for process in alive:
        process.kill()
    assert not alive
