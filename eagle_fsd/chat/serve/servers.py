"""Run one server in this process: controller, worker or API."""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import httpx

from eagle_fsd.chat.config import Limits
from eagle_fsd.chat.serve.api.app import api_app
from eagle_fsd.chat.serve.api.errors import ApiError
from eagle_fsd.chat.serve.connections import BoundedServer, limit_logging, server_config
from eagle_fsd.chat.serve.guard import ANYONE, Access, Guard, cluster_headers

if TYPE_CHECKING:  # controller and API start faster without torch and transformers
    from eagle_fsd.model.pipeline import EagleFSD
    from eagle_fsd.utils.chat_templates import ChatTemplate

log = logging.getLogger(__name__)

#: Seconds that the controller waits for a worker's status.
STATUS_TIMEOUT = 5.0


def import_fastchat(name: str) -> Any:
    """Import a FastChat server module without letting it redirect stdout or create log files.

    Args:
        name: The module's name in ``fastchat.serve``.
    """
    # FastChat reads LOGDIR once, when it is first imported. If unset, FastChat would write logs to
    # the working directory.
    utils: Any = importlib.import_module("fastchat.utils")
    utils.LOGDIR = os.environ.get("LOGDIR", "")
    streams = sys.stdout, sys.stderr
    try:
        module = importlib.import_module(f"fastchat.serve.{name}")
    finally:
        sys.stdout, sys.stderr = streams
    if getattr(module, "logger", None) is not None:
        module.logger.setLevel(logging.WARNING)
    return module


def run_controller(host: str, port: int, access: Access = ANYONE) -> None:
    """Serve FastChat's controller until SIGINT or SIGTERM.

    Args:
        host: Address to listen on.
        port: Port to listen on.
        access: Who may use the controller.

    Raises:
        OSError: The address is invalid or the port is in use.
    """
    _bypass_proxy()
    module = import_fastchat("controller")

    class Controller(module.Controller):  # type: ignore[name-defined, misc]
        """FastChat's controller, which sends the cluster's key to the workers."""

        def get_worker_status(self, worker_name: str) -> dict[str, Any] | None:
            return _worker_status(worker_name)

    def create() -> None:
        module.controller = Controller("shortest_queue")

    # The controller starts a heartbeat thread that never ends. Threads started by a daemon thread
    # are daemons too, so this one does not keep the process alive.
    creator = threading.Thread(target=create, daemon=True)
    creator.start()
    creator.join()
    run_server(Guard(module.app, access), host, port)


def run_api(
    host: str, port: int, controller: str, access: Access = ANYONE, max_body: int = 1 << 20
) -> None:
    """Serve the OpenAI-compatible API until SIGINT or SIGTERM.

    Args:
        host: Address to listen on.
        port: Port to listen on.
        controller: URL of the controller.
        access: Who may use the API.
        max_body: Maximum size of a request in bytes.

    Raises:
        OSError: The address is invalid or the port is in use.
    """
    run_server(Guard(api_app(controller), access, max_body, error_body=_api_error), host, port)


def run_worker(
    model: EagleFSD,
    chat_template: ChatTemplate,
    limits: Limits,
    host: str,
    port: int,
    controller: str | None,
    address: str,
    names: Sequence[str],
    access: Access = ANYONE,
) -> None:
    """Serve a pair as a FastChat worker until SIGINT or SIGTERM.

    Args:
        model: The pair.
        chat_template: How chats are formatted.
        limits: Limits of requests.
        host: Address to listen on.
        port: Port to listen on.
        controller: URL of the controller to register with; None: do not register.
        address: URL at which the controller and the API server reach this worker.
        names: Names of the model for clients.
        access: Who may use the worker.

    Raises:
        OSError: The address is invalid or the port is in use.
    """
    base = import_fastchat("base_model_worker")
    from eagle_fsd.chat.serve.worker import FSDWorker, worker_app, worker_error

    # If unset, FastChat redirects the standard streams to a log file.
    base.logger = logging.getLogger("model_worker")
    worker = FSDWorker(
        model, chat_template, limits, controller, address, list(names), secrets.token_hex(4)
    )
    # Register only once the port is open: the controller may send a request at once.
    register = worker.init_heart_beat if controller else None
    try:
        app = Guard(worker_app(worker), access, limits.max_body, error_body=worker_error)
        run_server(app, host, port, on_started=register)
    finally:
        worker.close()


def run_server(
    app: Any, host: str, port: int, on_started: Callable[[], None] | None = None
) -> None:
    """Serve an ASGI application until SIGINT or SIGTERM.

    Args:
        app: The application.
        host: Address to listen on.
        port: Port to listen on.
        on_started: Called in a separate thread once the server accepts connections.

    Raises:
        OSError: The address is invalid or the port is in use.
    """
    limit_logging()
    server = BoundedServer(server_config(app, host, port))
    if on_started is not None:
        threading.Thread(target=_call_once_started, args=(server, on_started), daemon=True).start()
    server.run()
    if not server.started:
        raise OSError(f"cannot listen on {host}:{port}; is the port in use?")


def check_port(host: str, port: int) -> None:
    """Check that a server can listen on a port.

    Args:
        host: Address to listen on.
        port: Port to listen on.

    Raises:
        OSError: The address is invalid or the port is in use.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


def _call_once_started(server: BoundedServer, callback: Callable[[], None]) -> None:
    while not server.started:
        if server.should_exit:
            return
        time.sleep(0.02)
    callback()


def _worker_status(worker: str) -> dict[str, Any] | None:
    """Return a worker's status, or None if it does not answer."""
    try:
        reply = httpx.post(
            f"{worker}/worker_get_status",
            headers=cluster_headers(),
            timeout=STATUS_TIMEOUT,
            trust_env=False,
        )
        status = reply.raise_for_status().json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        log.warning("the worker %s does not answer: %s", worker, error)
        return None
    return status if isinstance(status, dict) else None


def _api_error(message: str, status: int) -> dict[str, Any]:
    return ApiError(message, status, "invalid_api_key" if status == 401 else None).body()


def _bypass_proxy() -> None:
    """Let FastChat's servers reach each other without the environment's proxy.

    They use ``requests``, which would send even requests to 127.0.0.1 through it.
    """
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "*"
