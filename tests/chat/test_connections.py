"""Connections of silent and slow clients, and the log, at a server in this process."""

from __future__ import annotations

import asyncio
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
from api_servers import ServerThread, seconds_until
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from eagle_fsd.chat.serve import connections
from eagle_fsd.chat.serve.asgi import PART_BYTES, parted_response
from eagle_fsd.chat.serve.connections import BoundedServer, limit_logging, run_server
from eagle_fsd.chat.serve.guard import Access, Guard

HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = HEAD + b"Content-Length: 9\r\n\r\n"
GET = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n%s\r\n"
#: Many small responses, and a large one.
UNREAD = (GET % (b"", b"") * 3000, GET % (b"large", b""))
LARGE = bytes(8 << 20)
#: Seconds that a client gets in these tests.
CLIENT_TIMEOUT = 0.5


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["path"] == "/busy":
        await asyncio.sleep(60)
    large = scope["path"] == "/large"
    body = JSONResponse({"path": scope["path"]})
    response = parted_response(LARGE, "application/octet-stream") if large else body
    await response(scope, receive, send)


def connect(port: int) -> socket.socket:
    """Connect with a small buffer for what is received."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    connection.settimeout(0.2)
    return connection


def send(connection: socket.socket, data: bytes) -> None:
    """Send until the server reads no more."""
    with contextlib.suppress(OSError):
        connection.sendall(data)


def open_ports(server: ServerThread) -> set[int]:
    """Return the clients' ports of the connections that are open."""
    return {item.client[1] for item in [*server.server.server_state.connections]}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerThread]:
    """A server with at most 8 connections."""
    monkeypatch.setattr(connections, "CLIENT_TIMEOUT", CLIENT_TIMEOUT)
    monkeypatch.setattr(connections, "raise_file_limit", lambda: 8)
    server = ServerThread(Guard(answer))
    yield server
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
    server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server fails to start if its port was taken while the model was loaded."""
    monkeypatch.setattr(connections, "limit_logging", lambda: None)
    message = f"cannot listen on 127.0.0.1:{server.port}; is the port in use"
    with pytest.raises(OSError, match=message):
        run_server(BoundedServer(Guard(answer), "127.0.0.1", server.port))


def test_connections_without_a_request_are_closed(server: ServerThread) -> None:
    def seconds(sent: tuple[bytes, bytes]) -> float:
        data, trickle = sent
        with connect(server.port) as connection:
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
    assert all(CLIENT_TIMEOUT / 2 < item < 10 * CLIENT_TIMEOUT for item in found), found


def test_connections_that_are_not_read_are_closed(server: ServerThread) -> None:
    """Those that are read slowly are not; little of a large response waits in the server."""
    open_connections = server.server.server_state.connections
    for data in UNREAD:
        with connect(server.port) as connection:
            send(connection, data)
            assert seconds_until(lambda: not open_connections, 20) < 10 * CLIENT_TIMEOUT
    with connect(server.port) as connection:
        send(connection, UNREAD[1])
        received, begin = 0, time.monotonic()
        while time.monotonic() - begin < 2 * CLIENT_TIMEOUT:
            received += len(connection.recv(1 << 15))
            waiting = [item.transport.get_write_buffer_size() for item in [*open_connections]]
            assert max(waiting) <= 2 * PART_BYTES
            time.sleep(0.005)
        while received < len(LARGE):
            received += len(connection.recv(1 << 20))


def test_oldest_connections_are_closed_at_the_limit(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "CLIENT_TIMEOUT", 60)
    for data in (b"", HEAD, BODY, *UNREAD):
        sockets = []
        for _ in range(20):
            sockets.append(connect(server.port))
            send(sockets[-1], data)
            time.sleep(0.01)
        assert httpx.get(f"{server.url}/x", trust_env=False).json() == {"path": "/x"}
        still_open = open_ports(server)
        closed = [item.getsockname()[1] not in still_open for item in sockets]
        for item in sockets:
            item.close()
        assert closed == sorted(closed, reverse=True) or data == UNREAD[0]  # the oldest ones
        assert 11 <= sum(closed) <= 13
        time.sleep(0.1)


def test_busy_connections_are_shared_among_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """One client's requests take all connections; another's first one closes its newest."""
    monkeypatch.setattr(connections, "SHUTDOWN_TIMEOUT", 0)
    monkeypatch.setattr(connections, "raise_file_limit", lambda: 8)
    server = ServerThread(Guard(answer, Access(keys=("a", "b"))))
    sockets = []
    for _ in range(8):
        sockets.append(connect(server.port))
        send(sockets[-1], GET % (b"busy", b"Authorization: Bearer a\r\n"))
        time.sleep(0.02)
    headers = {"authorization": "Bearer b"}
    reply = httpx.get(f"{server.url}/x", headers=headers, trust_env=False)
    assert reply.json() == {"path": "/x"}
    still_open = open_ports(server)
    closed = [item.getsockname()[1] not in still_open for item in sockets]
    assert closed == [False] * 7 + [True]
    for item in sockets:
        item.close()
    server.stop()


def test_file_limit_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    try:
        limit = connections.raise_file_limit()
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
