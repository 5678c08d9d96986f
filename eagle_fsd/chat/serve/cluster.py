"""Run several servers as child processes that start and stop together."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import httpx

from eagle_fsd.utils.signals import StopSignals

#: Seconds between SIGTERM and SIGKILL when the servers are stopped.
TERMINATION_TIMEOUT = 4.0
#: Maximum number of seconds for a server to start; loading a large target takes minutes.
START_TIMEOUT = 1800.0
#: Seconds before a server that exited is started again: at first, and at most. The delay doubles
#: with each exit, until the server has run for the longest delay.
MIN_DELAY, MAX_DELAY = 1.0, 60.0


class ServerError(RuntimeError):
    """A server did not start, or exited; the message names it."""


@dataclass
class _Child:
    """A server process.

    Attributes:
        name: The server's name in messages.
        process: The process.
        probe: A URL that answers once the server is ready.
        started: When the process was started, by the monotonic clock.
        delay: Seconds to wait before the server is started again.
        restart_at: When to start the server again; None while it runs.
    """

    name: str
    process: subprocess.Popen[bytes]
    probe: str
    started: float = field(default_factory=time.monotonic)
    delay: float = field(default_factory=lambda: MIN_DELAY)
    restart_at: float | None = None


class Cluster:
    """A group of server processes, such as a controller, a worker and the API.

    Args:
        program: The command that starts a server, without its arguments. It must exit when its
            standard input is closed (see :func:`eagle_fsd.utils.signals.exit_with_parent`).
        commands: Arguments of each server and a URL that answers once it is ready, by the server's
            name and in starting order.
        restarted: Names of the servers that are started again if they exit while the cluster
            runs.
    """

    def __init__(
        self,
        program: Sequence[str],
        commands: Mapping[str, tuple[list[str], str]],
        restarted: Sequence[str] = (),
    ) -> None:
        self.program, self.commands, self.restarted = list(program), commands, restarted
        self._children: list[_Child] = []

    def start(self, report: Callable[[str], None] = lambda _: None) -> None:
        """Start the servers in order, each once the previous one is ready.

        Args:
            report: Called with a message for each server.

        Raises:
            ServerError: A server did not start; the running servers are stopped.
        """
        for name, (arguments, probe) in self.commands.items():
            report(f"starting the {name}")
            child = _Child(name, self._run(arguments), probe)
            self._children.append(child)
            try:
                self._wait_until_ready(child)
            except BaseException:
                self.stop()
                raise

    def wait(self, report: Callable[[str], None] = lambda _: None) -> None:
        """Block until SIGINT or SIGTERM, or until a server exits that is not restarted.

        Args:
            report: Called with a message when a server is restarted.

        Raises:
            ServerError: A server exited that is not restarted.
        """
        with StopSignals() as signals:
            while not signals.requested.wait(0.2):
                for child in self._children:
                    self._supervise(child, report)

    def _supervise(self, child: _Child, report: Callable[[str], None]) -> None:
        """Start a server again some time after it exited."""
        status, now = child.process.poll(), time.monotonic()
        if status is None:
            return
        message = f"the {child.name} exited with status {status}"
        if child.name not in self.restarted:
            raise ServerError(message)
        if child.restart_at is None:
            if now - child.started > MAX_DELAY:
                child.delay = MIN_DELAY
            report(f"{message}; starting it again in {child.delay:g} s")
            child.restart_at = now + child.delay
            child.delay = min(2 * child.delay, MAX_DELAY)
        elif now >= child.restart_at:
            if child.process.stdin is not None:
                child.process.stdin.close()
            arguments, _ = self.commands[child.name]
            child.process, child.started, child.restart_at = self._run(arguments), now, None

    def _run(self, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*self.program, *arguments],
            start_new_session=True,  # Ctrl-C only reaches this process, which stops the others
            stdin=subprocess.PIPE,  # never written to; closed when this process exits
        )

    def stop(self) -> None:
        """Terminate the servers, and kill those that do not exit in time."""
        for child in reversed(self._children):
            if child.process.poll() is None:
                child.process.terminate()
        deadline = time.monotonic() + TERMINATION_TIMEOUT
        for child in self._children:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            if child.process.stdin is not None:
                child.process.stdin.close()

    def _wait_until_ready(self, child: _Child) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline:
            if child.process.poll() is not None:
                raise ServerError(f"the {child.name} did not start")
            try:
                if httpx.get(child.probe, timeout=2.0, trust_env=False).status_code < 500:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        raise ServerError(f"the {child.name} did not answer within {START_TIMEOUT:g} s")
