"""Attacks on servers in processes of their own, which may open few files."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from fastapi import FastAPI
from fastapi.responses import Response
from processes import CHAT, HELLO, NAME, TIMEOUT, free_ports, seconds_until
from test_web_remote import Server as ThreadServer

from eagle_fsd.chat.serve.guard import Access, Guard

KEY = "0123456789abcdef"
MAX_FILES = 256
#: How many connections an attacker opens.
ATTACK = 600
#: Bytes of memory and of log that an attack may cost.
MEMORY, LOG = 32 << 20, 100_000


class Server:
    """``eagle-fsd serve`` with these arguments, limited to MAX_FILES open files."""

    def __init__(self, probe: str, *arguments: str, **environment: str) -> None:
        self.url = probe.rsplit("/", 1)[0]
        (self.host, self.port) = "127.0.0.1", int(self.url.rsplit(":", 1)[1])
        self.log = Path(tempfile.mkstemp(suffix=".log")[1])
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "eagle_fsd.cli", "serve", *arguments],
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                stdout=log,
                stderr=log,
                preexec_fn=lambda: resource.setrlimit(
                    resource.RLIMIT_NOFILE, (MAX_FILES, MAX_FILES)
                ),
            )

        def ready() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(probe, trust_env=False).status_code < 500
            return False

        assert seconds_until(ready) < TIMEOUT
        self.http = httpx.Client(trust_env=False, timeout=TIMEOUT)
        self.memory = psutil.Process(self.process.pid).memory_info().rss

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=10)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.http.close()
        self.log.unlink()

    def check_unharmed(self) -> None:
        """Check memory and log, and that a request is answered within a second."""
        seconds = []
        while len(seconds) < 3 and min(seconds, default=1.0) >= 1:  # the machine may be busy
            begin = time.monotonic()
            headers = {"connection": "close"}
            assert self.http.get(f"{self.url}/test_connection", headers=headers).is_success
            seconds.append(time.monotonic() - begin)
        assert min(seconds) < 1, seconds
        assert self.log.stat().st_size < LOG
        assert psutil.Process(self.process.pid).memory_info().rss - self.memory < MEMORY


@contextmanager
def controller_server(**environment: str) -> Iterator[Server]:
    (port,) = free_ports(1)
    probe = f"http://127.0.0.1:{port}/test_connection"
    server = Server(probe, "controller", "--port", str(port), **environment)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def controller() -> Iterator[Server]:
    with controller_server() as server:
        yield server


def post(url: str, body: Any = None, **headers: str) -> httpx.Response:
    return httpx.post(url, json=body, headers=headers, trust_env=False, timeout=TIMEOUT)


def registration(address: str) -> dict[str, Any]:
    status = {"model_names": [NAME], "speed": 1, "queue_length": 0}
    return {"worker_name": address, "check_heart_beat": False, "worker_status": status}


def models(controller: Server, **headers: str) -> list[str]:
    found: list[str] = post(f"{controller.url}/list_models", **headers).json()["models"]
    return found


def test_web_pages_cannot_register_workers(controller: Server) -> None:
    """What ``fetch(url, {method: "POST", mode: "no-cors", body: ...})`` sends from another site."""
    url = f"{controller.url}/register_worker"
    body = httpx.Request("POST", url, json=registration("http://rogue.example")).content
    attacks = (
        ({"content-type": "text/plain;charset=UTF-8", "origin": "https://evil.example"}, 403),
        ({"content-type": "text/plain;charset=UTF-8"}, 415),
        ({"content-type": "application/x-www-form-urlencoded", "origin": "null"}, 403),
        ({"content-type": "application/json", "origin": "https://evil.example"}, 403),
        ({"content-type": "application/json", "host": "evil.example"}, 421),
        ({}, 415),
    )
    for headers, status in attacks:
        reply = httpx.post(url, content=body, headers=headers, trust_env=False)
        assert reply.status_code == status, headers
    # A form without fields has no body.
    origin = {"origin": "https://evil.example"}
    reply = post(f"{controller.url}/refresh_all_workers", **origin)
    assert reply.status_code == 403
    assert models(controller) == []


def test_cluster_with_a_key() -> None:
    """Nobody registers a worker or asks for one without it."""
    key = {"authorization": f"Bearer {KEY}"}
    with controller_server(EAGLE_FSD_CLUSTER_KEY=KEY) as server:
        body = registration("http://127.0.0.1:1")
        url = f"{server.url}/register_worker"
        assert post(url, body).status_code == 401
        assert post(url, body, authorization="Bearer 0123456789abcdeg").status_code == 401
        assert models(server, **key) == []
        assert post(url, body, **key).status_code == 200
        assert models(server, **key) == [NAME]
        assert post(f"{server.url}/list_models").status_code == 401


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"POST /register_worker HTTP/1.1\r\nHost: localhost\r\n",
        b"POST /register_worker HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 100\r\n\r\n{",
    ],
    ids=["silent", "head", "body"],
)
def test_unfinished_requests(controller: Server, data: bytes) -> None:
    """More connections than files, each with an incomplete request."""
    sockets = []
    try:
        for number in range(ATTACK):
            sockets.append(controller.connect())
            with contextlib.suppress(OSError):  # it may already be closed
                sockets[-1].sendall(data)
            if number % 100 == 99:
                controller.check_unharmed()
        controller.check_unharmed()
    finally:
        for item in sockets:
            item.close()
    controller.check_unharmed()


def test_invalid_requests_do_not_fill_the_log(controller: Server) -> None:
    for _ in range(ATTACK):
        with controller.connect() as item, contextlib.suppress(OSError):
            item.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
            item.recv(100)
    controller.check_unharmed()


def test_requests_move_to_a_worker_that_answers() -> None:
    """The controller first names a worker that refuses connections; all calls carry the key."""
    app, key = FastAPI(), {"authorization": f"Bearer {KEY}"}

    @app.post("/{route}")
    async def worker(route: str) -> Any:
        if route == "worker_generate_stream":
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            output = {"text": "Hi", "error_code": 0, "usage": usage, "finish_reason": "stop"}
            return Response(json.dumps(output).encode() + b"\0")
        return {"model_names": [NAME], "speed": 1, "queue_length": 5}

    api_port, dead = free_ports(2)
    api = f"http://127.0.0.1:{api_port}"
    # The servers must not use the environment's proxy to reach each other.
    environment = {"EAGLE_FSD_CLUSTER_KEY": KEY, "http_proxy": "http://127.0.0.1:9"}
    with ExitStack() as stack:
        controller = stack.enter_context(controller_server(**environment))
        live = ThreadServer(Guard(app, Access(keys=(KEY,))))
        stack.callback(live.stop)
        for address, queue in ((live.address, 5), (f"http://127.0.0.1:{dead}", 0)):
            body = registration(address)
            body["worker_status"]["queue_length"] = queue
            assert post(f"{controller.url}/register_worker", body, **key).status_code == 200
        arguments = ("--port", str(api_port), "--controller", controller.url)
        server = Server(f"{api}/health", "api", *arguments, **environment)
        stack.callback(server.close)
        for stream in (False, True):
            body = {"model": NAME, "messages": HELLO, "stream": stream}
            begin = time.monotonic()
            reply = post(api + CHAT, body)
            assert reply.status_code == 200, reply.text
            assert '"Hi"' in reply.text
            assert time.monotonic() - begin < 5
        assert httpx.get(f"{api}/v1/models", trust_env=False).json()["data"][0]["id"] == NAME
        live.stop()
        assert post(api + CHAT, body).status_code == 503
        assert models(controller, **key) == []


def test_api_keys_are_checked_before_the_body_is_read() -> None:
    (port,) = free_ports(1)
    api = f"http://127.0.0.1:{port}"
    server = Server(f"{api}/health", "api", "--port", str(port), EAGLE_FSD_API_KEYS="one,two")
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += "Content-Length: 100\r\nAuthorization: Bearer {}\r\n\r\n"
    try:
        with server.connect() as item:
            item.sendall(head.format("wrong").encode())
            reply = b""
            while b"invalid_api_key" not in reply:
                data = item.recv(10_000)
                assert data
                reply += data
            assert reply.startswith(b"HTTP/1.1 401 ")
        with server.connect() as item:
            item.sendall(head.format("two").encode())
            item.settimeout(0.5)
            with pytest.raises(TimeoutError):
                item.recv(10_000)
    finally:
        server.close()
