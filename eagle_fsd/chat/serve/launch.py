"""Starting FastChat's servers around a pair: controller, worker, API, or all of them at once."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx
import uvicorn

from eagle_fsd.chat.config import Limits
from eagle_fsd.chat.serve.api.app import api_app, import_fastchat
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.utils.chat_templates import ChatFormat

log = logging.getLogger(__name__)

#: Seconds that open answers get to end when a server is told to stop.
GRACE = 2
#: Seconds until servers that were told to stop are killed.
PATIENCE = 4.0
#: Seconds that a server may take to come up: a large target loads for minutes.
START_TIMEOUT = 1800.0


def run_controller(host: str, port: int) -> None:
    """Serve FastChat's controller until told to stop."""
    _without_proxy()
    module = import_fastchat("controller")

    def make() -> None:
        module.controller = module.Controller("shortest_queue")

    # Its heart-beat thread has no way to end, and would keep the program from ending too: but a
    # daemon's threads are daemons.
    maker = threading.Thread(target=make, daemon=True)
    maker.start()
    maker.join()
    _serve(module.app, host, port)


def run_api(
    host: str, port: int, controller: str, api_keys: Sequence[str] = (), max_body: int = 1 << 20
) -> None:
    """Serve FastChat's OpenAI-compatible API until told to stop."""
    _serve(api_app(controller, list(api_keys) or None, max_body), host, port)


def run_worker(
    model: EagleFSD,
    wording: ChatFormat,
    limits: Limits,
    host: str,
    port: int,
    controller: str | None,
    address: str,
    names: Sequence[str],
) -> None:
    """Serve a pair as a FastChat worker until told to stop.

    Args:
        controller: Whom to register with; None: nobody.
        address: Where others reach this worker.
    """
    _without_proxy()
    base = import_fastchat("base_model_worker")
    from eagle_fsd.chat.serve.worker import FSDWorker, worker_app

    base.build_logger = lambda name, _file: logging.getLogger(name)  # no log file, no redirection
    worker = FSDWorker(
        model, wording, limits, controller, address, list(names), secrets.token_hex(4)
    )
    # Registered once it can be reached: the controller may send the first request at once.
    _serve(worker_app(worker), host, port, worker.init_heart_beat if controller else None)
    worker.close()


def _without_proxy() -> None:
    """Controller and workers find each other without the environment's proxy.

    FastChat asks through ``requests``, which would ask the proxy for 127.0.0.1 too.
    """
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "*"


def _serve(app: object, host: str, port: int, started: Callable[[], None] | None = None) -> None:
    config = uvicorn.Config(
        app, host, port, log_level="warning", timeout_graceful_shutdown=GRACE, lifespan="off"
    )
    server = uvicorn.Server(config)
    if started is not None:

        def wait() -> None:
            while not server.started and not server.should_exit:
                time.sleep(0.02)
            if server.started:
                started()

        threading.Thread(target=wait, daemon=True).start()
    server.run()
    if not server.started:
        raise OSError(f"cannot serve at {host}:{port}: is the port taken?")


@dataclass
class _Child:
    """A server in a process of its own.

    Attributes:
        probe: An address that answers once it is up.
    """

    name: str
    process: subprocess.Popen[bytes]
    probe: str


class ServerError(RuntimeError):
    """One of the servers did not come up, or ended; the message says which."""


class Cluster:
    """Controller, worker and API as processes of their own: all of them, or none.

    Args:
        program: The command that starts a server, before its arguments. It must exit when its
            standard input is closed (see :func:`eagle_fsd.utils.signals.exit_with_parent`).
        commands: Arguments and a URL that answers once the server is up, by the server's name, in
            the order in which they are started.
    """

    def __init__(self, program: Sequence[str], commands: dict[str, tuple[list[str], str]]) -> None:
        self.program, self.commands = list(program), commands
        self.children: list[_Child] = []
        self.stopping = threading.Event()

    def start(self, tell: Callable[[str], None] = lambda _: None) -> None:
        """Start each and wait until it answers.

        Raises:
            ServerError: One does not; those that were started are stopped.
        """
        for name, (arguments, probe) in self.commands.items():
            tell(f"starting the {name}")
            process = subprocess.Popen(
                [*self.program, *arguments],
                start_new_session=True,  # Ctrl-C is ours to pass on
                stdin=subprocess.PIPE,  # never written to: its end tells the child of ours
            )
            self.children.append(_Child(name, process, probe))
            try:
                self._wait_for(self.children[-1])
            except BaseException:
                self.stop()
                raise

    def _wait_for(self, child: _Child) -> None:
        until = time.monotonic() + START_TIMEOUT
        while time.monotonic() < until and not self.stopping.is_set():
            if child.process.poll() is not None:
                raise ServerError(f"the {child.name} did not start")
            try:
                if httpx.get(child.probe, timeout=2.0, trust_env=False).status_code < 500:
                    return
            except httpx.HTTPError:
                pass
            self.stopping.wait(0.1)
        if not self.stopping.is_set():
            raise ServerError(f"the {child.name} did not answer within {START_TIMEOUT:g} s")

    def wait(self) -> None:
        """Until told to stop (SIGINT, SIGTERM), or until one of them ends.

        Raises:
            ServerError: One ended by itself.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self.stopping.set())
        while not self.stopping.wait(0.2):
            for child in self.children:
                if child.process.poll() is not None:
                    raise ServerError(
                        f"the {child.name} ended with status {child.process.returncode}"
                    )

    def stop(self) -> None:
        """Stop them all, those started last first; after some seconds by force."""
        for child in reversed(self.children):
            if child.process.poll() is None:
                child.process.terminate()
        until = time.monotonic() + PATIENCE
        for child in self.children:
            try:
                child.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            child.process.stdin.close()


def check_free(host: str, port: int) -> None:
    """Refuse a port that somebody else has.

    Raises:
        OSError: It is taken, or there is no such host.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise OSError(f"cannot serve at {host}:{port} ({error.strerror or error})") from error
