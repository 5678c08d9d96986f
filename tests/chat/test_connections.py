"""Connections of silent and slow clients, and the log, at a server in this process."""

from __future__ import annotations

import contextlib
import io
import logging
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest
from api_servers import ServerThread
from starlette.responses import JSONResponse

from eagle_fsd.chat.serve import connections
from eagle_fsd.chat.serve.asgi import Message, Receive, Send
from eagle_fsd.chat.serve.connections import limit_logging
from eagle_fsd.chat.serve.guard import Guard

HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = HEAD + b"Content-Length: 9\r\n\r\n"
#: Seconds that a client gets in these tests.
HEAD_TIMEOUT = 0.5


async def answer(scope: Message, receive: Receive, send: Send) -> None:
    await JSONResponse({"path": scope["path"]})(scope, receive, send)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Port of a server with at most 8 connections."""
    monkeypatch.setattr(connections, "HEAD_TIMEOUT", HEAD_TIMEOUT)
    monkeypatch.setattr(connections, "connection_limit", lambda: 8)
    server = ServerThread(Guard(answer))
    yield server.port
    server.stop()


def seconds_until_closed(connection: socket.socket, trickle: bytes) -> float:
    """Send some bytes now and then until the server closes the connection; return the seconds."""
    begin = time.monotonic()
    connection.settimeout(0.05)
    with contextlib.suppress(OSError):
        while time.monotonic() - begin < 20:
            connection.sendall(trickle)
            with contextlib.suppress(TimeoutError):
                if not connection.recv(1000):
                    break
    return time.monotonic() - begin


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "trickle"),
    [
        (b"", b""),
        (HEAD, b""),
        (HEAD, b"X: 1\r\n"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nGET /", b"x"),  # a second request
        (BODY.replace(b"9", b"999999").replace(b"json", b"x"), b"x"),  # the rest of a refused one
    ],
    ids=["silent", "half a head", "trickled head", "second head", "refused body"],
)
def test_connections_without_a_request_are_closed(port: int, data: bytes, trickle: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(data)
        assert HEAD_TIMEOUT / 2 < seconds_until_closed(connection, trickle) < 10 * HEAD_TIMEOUT


@pytest.mark.slow
@pytest.mark.parametrize("data", [b"", HEAD, BODY], ids=["silent", "head", "body"])
def test_longest_waiting_connection_makes_room(
    port: int, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT", 60)
    sockets = []
    for _ in range(20):
        sockets.append(socket.create_connection(("127.0.0.1", port)))
        sockets[-1].sendall(data)
        time.sleep(0.01)
    reply = httpx.get(f"http://127.0.0.1:{port}/x", trust_env=False)
    assert reply.json() == {"path": "/x"}
    closed = []
    for item in sockets:
        item.settimeout(0.1)
        try:
            closed.append(item.recv(1) == b"")
        except TimeoutError:
            closed.append(False)
        except ConnectionError:
            closed.append(True)
        item.close()
    assert closed == sorted(closed, reverse=True)  # the oldest ones
    assert 11 <= sum(closed) <= 13


def test_file_limit_is_raised() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    script = (
        "import resource\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (128, {hard}))\n"
        "from eagle_fsd.chat.serve.connections import connection_limit\n"
        "print(connection_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    limit, files = map(int, done.stdout.split())
    assert files == (connections.MAX_FILES if hard < 0 else min(hard, connections.MAX_FILES))
    assert limit == min(connections.MAX_CONNECTIONS, files // 3)


def test_repeated_log_records_are_dropped() -> None:
    stream, root = io.StringIO(), logging.getLogger()
    handler = logging.StreamHandler(stream)
    root.addHandler(handler)
    try:
        limit_logging()
        limit_logging()  # has no effect
        for number in range(100):
            logging.getLogger("test").warning("number %d", number)
        logging.getLogger("test").warning("another")
        lines = stream.getvalue().splitlines()
        assert lines == [*(f"number {number}" for number in range(10)), "another"]
    finally:
        root.removeHandler(handler)
        for item in root.handlers:
            for limit in [x for x in item.filters if isinstance(x, connections._RateLimit)]:
                item.removeFilter(limit)


def test_dropped_log_records_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = connections._RateLimit()

    def record() -> logging.LogRecord:
        return logging.LogRecord("test", logging.ERROR, "x.py", 1, "%d", (5,), None)

    assert [limit.filter(record()) for _ in range(12)] == [True] * 10 + [False] * 2
    monkeypatch.setattr(connections, "LOG_PERIOD", 0.0)
    last = record()
    assert limit.filter(last)
    assert last.getMessage() == "5 (2 more such messages were dropped)"
