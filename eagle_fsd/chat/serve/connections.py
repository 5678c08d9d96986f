"""Serve HTTP connections that silent or slow clients cannot exhaust.

:class:`BoundedServer` sets up uvicorn so that a connection whose client neither sends a request nor
reads the response is closed after a while, or as soon as its place is needed, and so that what
clients do cannot fill the log.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from eagle_fsd.chat.serve.guard import own_names

if TYPE_CHECKING:
    from eagle_fsd.chat.decode_queue import DecodeQueue

log = logging.getLogger(__name__)

#: Seconds that open responses get to finish when a server stops.
SHUTDOWN_TIMEOUT = 2
#: Seconds that a client may take to send the head of a request, or to read a part of a response.
CLIENT_TIMEOUT = 10.0
#: Bytes of a response that the system may hold for a client that does not read.
SEND_BUFFER = 1 << 17
#: Maximum number of connections; at a low limit of open files it is a third of those, which leaves
#: room for other files.
MAX_CONNECTIONS = 2048
#: Number of open files to ask the system for; macOS may refuse more, also below the hard limit.
MAX_FILES = 10_240 if sys.platform == "darwin" else 65_536
#: How many connections are accepted before those over the maximum are closed.
ACCEPT_BATCH = 16
#: How many connections the system is asked to hold for a server that is busy.
LISTEN_BACKLOG = 2048
#: How many records each log statement may write in a period of that many seconds.
LOG_RECORDS, LOG_PERIOD = 10, 60.0


def run_server(server: BoundedServer) -> None:
    """Run a server until SIGINT or SIGTERM, which is raised again once the server has stopped.

    Raises OSError if the address is invalid, the port is in use, or decoding fails repeatedly.
    """
    limit_logging()
    try:
        server.run()
    except SystemExit as error:  # uvicorn exits if it cannot listen
        address = f"{server.config.host}:{server.config.port}"
        raise OSError(f"cannot listen on {address}; is the port in use?") from error
    if server.queue is not None and server.queue.failed:
        raise OSError("decoding failed several times in a row; see the messages above")


def check_port(host: str, port: int) -> None:
    """Raise OSError unless a server can listen on a port."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


class BoundedServer(uvicorn.Server):
    """A server that bounds the number of its connections and supervises decoding.

    ``on_started`` is called once the port is open. When the server stops, requests get
    ``shutdown_timeout`` seconds to end, then they end with an error; after that, open responses get
    :data:`SHUTDOWN_TIMEOUT` seconds. If decoding fails repeatedly, the server stops by itself; if
    decoding stalls, requests end with an error.
    """

    def __init__(
        self,
        app: Any,
        host: str = "127.0.0.1",
        port: int = 0,
        queue: DecodeQueue | None = None,
        shutdown_timeout: float = 0.0,
        on_started: Callable[[], None] = lambda: None,
    ) -> None:
        own_names()  # cached: it may ask a name server, which must not delay the first request
        config = uvicorn.Config(
            app,
            host,
            port,
            http=BoundedProtocol,
            ws="none",
            loop="asyncio",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            backlog=ACCEPT_BATCH,
            timeout_graceful_shutdown=SHUTDOWN_TIMEOUT,
            lifespan="auto",
        )
        super().__init__(config)
        self.queue, self.shutdown_timeout = queue, shutdown_timeout
        self.on_started = on_started
        self._stalled = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen; see ``uvicorn.Server``."""
        maximum = raise_file_limit()
        self.server_state.max_connections = maximum  # type: ignore[attr-defined]
        if self.queue is not None:  # requests that wait must not take all connections
            self.queue.max_waiting = min(self.queue.max_waiting, maximum // 2)
        await super().startup(sockets)
        # asyncio accepts as many connections at a time as its backlog; the system's can be larger.
        for server in getattr(self, "servers", ()):
            for item in server.sockets:
                with item.dup() as listener:
                    listener.listen(LISTEN_BACKLOG)
        if self.started:
            self.on_started()

    async def on_tick(self, counter: int) -> bool:
        """Supervise decoding, several times a second; see ``uvicorn.Server``."""
        if self.queue is not None:
            before, self._stalled = self._stalled, self.queue.stalled
            if self._stalled:
                seconds = self.queue.stall_timeout
                message = f"decoding has stalled: a step or call takes more than {seconds:g} s"
                if not before:
                    log.error(message)
                self.queue.abort(message)
            self.should_exit = self.should_exit or self.queue.failed
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop; see ``uvicorn.Server``."""
        if self.queue is not None:
            self.queue.drain()
            end = time.monotonic() + self.shutdown_timeout
            while self.server_state.tasks and time.monotonic() < end and not self.force_exit:
                await asyncio.sleep(0.05)
            self.queue.abort("the server is shutting down")
        # Cancelling the answers in progress is expected and not worth a log entry.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        await super().shutdown(sockets)


class BoundedProtocol(H11Protocol):
    """A connection that is closed if its client neither sends a request nor reads the response.

    Over the maximum number of connections, the one is closed that has waited longest for its
    client; if all others are busy, the newest of the client that has the most, or else the new one
    if no client has several.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        self._timer: asyncio.TimerHandle | None = None
        self._wait_for_client()
        connections = cast("set[BoundedProtocol]", self.connections)
        if len(connections) > getattr(self.server_state, "max_connections", MAX_CONNECTIONS):
            others = connections - {self}
            waiting = [item for item in others if item.awaits_client()]
            if waiting:
                closed = min(waiting, key=lambda item: item.waiting_since)
            else:
                counts = Counter(item.owner for item in others)
                owner, count = counts.most_common(1)[0]
                busy = [item for item in others if item.owner == owner]
                closed = max(busy, key=lambda item: item.waiting_since) if count > 1 else self
            connections.discard(closed)
            closed.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._wait_for_client()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_client()

    def send_400_response(self, msg: str) -> None:
        # The application may already handle, or even answer, the valid beginning of the request.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.abort()
        if self.cycle is not None:
            self.cycle.disconnected = True

    @property
    def owner(self) -> str:
        """The client of the current request, as the guard identifies it; empty before it does."""
        return str(self.scope["state"].get("client", "")) if self.scope else ""

    def awaits_client(self) -> bool:
        """Return whether the client has not sent a complete request, or not read the response."""
        return self._unread > 0 or self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    @property
    def _unread(self) -> int:
        """Number of bytes that the client has not read, beside those that the system holds."""
        return self.transport.get_write_buffer_size()

    def _wait_for_client(self) -> None:
        self.waiting_since = self.loop.time()
        self._cancel_timer()
        self._timer = self.loop.call_later(CLIENT_TIMEOUT, self._close_if_idle, self._unread)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _close_if_idle(self, unread: int) -> None:
        # A request whose body is missing is the application's to time out, until it has answered.
        answered = self.cycle is None or self.cycle.response_complete
        if not answered and not self.flow.write_paused:
            return
        if 0 < self._unread < unread:  # the client reads slowly
            self._wait_for_client()
        elif self.awaits_client():
            self.transport.abort()


def raise_file_limit() -> int:
    """Raise the soft limit on open files; return how many connections it allows."""
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if files != resource.RLIM_INFINITY and files < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        files = wanted
    if files == resource.RLIM_INFINITY:
        files = MAX_FILES
    return min(MAX_CONNECTIONS, files // 3)


def limit_logging() -> None:
    """Make the root logger's handlers write at most :data:`LOG_RECORDS` per statement and period.

    Logging is set up as ``logging.basicConfig`` does if that has not happened yet.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    for handler in logging.getLogger().handlers:
        if not any(isinstance(item, _RateLimit) for item in handler.filters):
            handler.addFilter(_RateLimit())


class _RateLimit(logging.Filter):
    """Drop records of a statement that has already written many, and say how many were dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write a record."""
        statement, now = (record.pathname, record.lineno), time.monotonic()
        begin, count = self._counts.get(statement, (now, 0))
        if now - begin > LOG_PERIOD:
            if count > LOG_RECORDS:
                dropped = count - LOG_RECORDS
                record.msg = f"{record.getMessage()} ({dropped} more such messages were dropped)"
                record.args = ()
            begin, count = now, 0
        self._counts[statement] = (begin, count + 1)
        return count < LOG_RECORDS
