"""Connections of silent and slow clients, and the log, at a server in this process."""

from __future__ import annotations

import contextlib
import io
import logging
import resource
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from api_servers import ServerThread
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from eagle_fsd.chat.serve import connections
from eagle_fsd.chat.serve.connections import limit_logging, run_server
from eagle_fsd.chat.serve.guard import Guard

HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = HEAD + b"Content-Length: 9\r\n\r\n"
#: Seconds that a client gets in these tests.
HEAD_TIMEOUT = 0.5


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
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


def test_port_that_another_process_took_is_an_error(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as while the model was loaded."""
    monkeypatch.setattr(connections, "limit_logging", lambda: None)
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}; is the port in use"):
        run_server(Guard(answer), "127.0.0.1", port)


def test_connections_without_a_request_are_closed(port: int) -> None:
    def seconds(sent: tuple[bytes, bytes]) -> float:
        data, trickle = sent
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(data)
            return seconds_until_closed(connection, trickle)

    sent = (
        (b"", b""),
        (HEAD, b""),
        (HEAD, b"X: 1\r\n"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nGET /", b"x"),  # a second request
        (BODY.replace(b"9", b"999999").replace(b"json", b"x"), b"x"),  # the rest of a refused one
    )
    with ThreadPoolExecutor(len(sent)) as pool:
        found = list(pool.map(seconds, sent))
    assert all(HEAD_TIMEOUT / 2 < item < 10 * HEAD_TIMEOUT for item in found), found


def test_oldest_connections_are_closed_at_the_limit(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT", 60)
    for data in (b"", HEAD, BODY):
        sockets = []
        for _ in range(20):
            sockets.append(socket.create_connection(("127.0.0.1", port)))
            sockets[-1].sendall(data)
            time.sleep(0.01)
        reply = httpx.get(f"http://127.0.0.1:{port}/x", trust_env=False)
        assert reply.json() == {"path": "/x"}
        closed = []
        for item in sockets:
            item.settimeout(0.02)
            try:
                closed.append(item.recv(1) == b"")
            except TimeoutError:
                closed.append(False)
            except ConnectionError:
                closed.append(True)
            item.close()
        assert closed == sorted(closed, reverse=True)  # the oldest ones
        assert 11 <= sum(closed) <= 13
        time.sleep(0.1)


def test_file_limit_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    try:
        limit = connections.connection_limit()
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert files == (connections.MAX_FILES if hard < 0 else min(hard, connections.MAX_FILES))
    assert limit == min(connections.MAX_CONNECTIONS, files // 3)


def test_repeated_log_records_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, root = io.StringIO(), logging.getLogger()
    handler, written = logging.StreamHandler(stream), logging.getLogger("test")
    monkeypatch.setattr(root, "handlers", [handler])
    limit_logging()
    limit_logging()  # has no effect

    def write(count: int) -> None:
        for number in range(count):
            written.warning("number %d", number)

    write(100)
    written.warning("another")
    lines = stream.getvalue().splitlines()
    assert lines == [*(f"number {number}" for number in range(10)), "another"]
    monkeypatch.setattr(connections, "LOG_PERIOD", 0.0)
    write(1)
    last = stream.getvalue().splitlines()[-1]
    assert last == "number 0 (90 more such messages were dropped)"
