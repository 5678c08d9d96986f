"""Attacks on a server in a process of its own, which may open few files."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest
from api_servers import CHAT, HELLO, NAME, TIMEOUT, ServerProcess

pytestmark = pytest.mark.xdist_group("attacks")

KEY = "0123456789abcdef"
MAX_FILES = 256
#: How many connections an attacker opens.
ATTACK = 300
#: Bytes of memory and of log that an attack may cost.
MEMORY, LOG = 32 << 20, 100_000
BODY = {"model": NAME, "messages": HELLO, "max_tokens": 1}


class Server(ServerProcess):
    """A server whose harm is measured."""

    def __init__(self) -> None:
        super().__init__("serve", files=MAX_FILES, EAGLE_FSD_API_KEYS=f"other,{KEY}")
        self.key = {"authorization": f"Bearer {KEY}"}
        assert self.http.post(CHAT, json=BODY, headers=self.key).status_code == 200
        self.memory = psutil.Process(self.process.pid).memory_info().rss

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def check_unharmed(self) -> None:
        """Check memory and log, and that a request is answered within a second."""
        seconds: list[float] = []
        while len(seconds) < 3 and min(seconds, default=1.0) >= 1:  # the machine may be busy
            begin = time.monotonic()
            # A connection of its own: the server may close an idle one while a request is sent.
            assert httpx.get(f"{self.url}/health", trust_env=False, timeout=TIMEOUT).is_success
            seconds.append(time.monotonic() - begin)
        assert min(seconds) < 1, seconds
        assert self.log.stat().st_size < LOG
        assert psutil.Process(self.process.pid).memory_info().rss - self.memory < MEMORY


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


def test_web_pages_cannot_send_requests(server: Server) -> None:
    """What ``fetch(url, {method: "POST", mode: "no-cors", body: ...})`` sends from another site."""
    url = server.url + CHAT
    body = httpx.Request("POST", url, json=BODY).content
    attacks = (
        ({"content-type": "text/plain;charset=UTF-8", "origin": "https://evil.example"}, 403),
        ({"content-type": "text/plain;charset=UTF-8"}, 415),
        ({"content-type": "application/x-www-form-urlencoded", "origin": "null"}, 403),
        ({"content-type": "application/json", "origin": "https://evil.example"}, 403),
        ({"content-type": "application/json", "host": "evil.example"}, 421),
        ({"authorization": "Bearer 0123456789abcdeg", "content-type": "application/json"}, 401),
        ({}, 415),
    )
    for headers, status in attacks:
        reply = server.http.post(url, content=body, headers={**server.key, **headers})
        assert reply.status_code == status, headers
    # A form without fields has no body.
    headers = {**server.key, "origin": "https://evil.example"}
    assert server.http.post(CHAT, headers=headers).status_code == 403
    twice = [*server.key.items(), ("authorization", "Bearer other")]
    assert server.http.post(CHAT, json=BODY, headers=twice).status_code == 400
    for path in ("/v1/models", "/metrics", "/openapi.json"):
        assert server.http.get(path).status_code == 401
        assert server.http.get(path, headers=server.key).status_code == 200


def test_unfinished_requests(server: Server) -> None:
    """More connections than files, each with an incomplete request."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    body = head + b"Authorization: Bearer other\r\nContent-Type: application/json\r\n"
    for data in (b"", head, body + b"Content-Length: 100\r\n\r\n{"):
        with contextlib.ExitStack() as stack:
            for number in range(ATTACK):
                item = stack.enter_context(server.connect())
                with contextlib.suppress(OSError):  # it may already be closed
                    item.sendall(data)
                if number % 100 == 99:
                    server.check_unharmed()
        server.check_unharmed()


def test_invalid_requests_do_not_fill_the_log(server: Server) -> None:
    for _ in range(ATTACK):
        with server.connect() as item, contextlib.suppress(OSError):
            item.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
            item.recv(100)
    server.check_unharmed()


def test_keys_are_checked_before_the_body_is_read(server: Server) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += "Content-Length: 100\r\nAuthorization: Bearer {}\r\n\r\n"
    with server.connect() as item:
        item.sendall(head.format("wrong").encode())
        reply = b""
        while b"invalid_api_key" not in reply:
            data = item.recv(10_000)
            assert data
            reply += data
        assert reply.startswith(b"HTTP/1.1 401 ")
    with server.connect() as item:
        item.sendall(head.format(KEY).encode())
        item.settimeout(0.5)
        with pytest.raises(TimeoutError):
            item.recv(10_000)
