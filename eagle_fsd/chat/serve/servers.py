"""Run one FastChat server in this process: controller, worker or API."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import uvicorn

from eagle_fsd.chat.config import Limits
from eagle_fsd.chat.serve.api.app import api_app, import_fastchat

if TYPE_CHECKING:  # controller and API start faster without torch and transformers
    from eagle_fsd.model.pipeline import EagleFSD
    from eagle_fsd.utils.chat_templates import ChatTemplate

#: Seconds that open responses get to finish when a server stops.
SHUTDOWN_TIMEOUT = 2


def run_controller(host: str, port: int) -> None:
    """Serve FastChat's controller until SIGINT or SIGTERM.

    Args:
        host: Address to listen on.
        port: Port to listen on.

    Raises:
        OSError: The address is invalid or the port is in use.
    """
    _bypass_proxy()
    module = import_fastchat("controller")

    def create() -> None:
        module.controller = module.Controller("shortest_queue")

    # The controller starts a heartbeat thread that never ends. Threads started by a daemon thread
    # are daemons too, so this one does not keep the process alive.
    creator = threading.Thread(target=create, daemon=True)
    creator.start()
    creator.join()
    run_server(module.app, host, port)


def run_api(
    host: str, port: int, controller: str, api_keys: Sequence[str] = (), max_body: int = 1 << 20
) -> None:
    """Serve FastChat's OpenAI-compatible API until SIGINT or SIGTERM.

    Args:
        host: Address to listen on.
        port: Port to listen on.
        controller: URL of the controller.
        api_keys: Keys that clients may use; default: no key is required.
        max_body: Maximum size of a request in bytes.

    Raises:
        OSError: The address is invalid or the port is in use.
    """
    run_server(api_app(controller, list(api_keys) or None, max_body), host, port)


def run_worker(
    model: EagleFSD,
    chat_template: ChatTemplate,
    limits: Limits,
    host: str,
    port: int,
    controller: str | None,
    address: str,
    names: Sequence[str],
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

    Raises:
        OSError: The address is invalid or the port is in use.
    """
    _bypass_proxy()
    base = import_fastchat("base_model_worker")
    from eagle_fsd.chat.serve.worker import FSDWorker, worker_app

    # FastChat's own function redirects the standard streams to a log file.
    base.build_logger = lambda name, _file: logging.getLogger(name)
    worker = FSDWorker(
        model, chat_template, limits, controller, address, list(names), secrets.token_hex(4)
    )
    # Register only once the port is open: the controller may send a request at once.
    register = worker.init_heart_beat if controller else None
    try:
        run_server(worker_app(worker), host, port, on_started=register)
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
    config = uvicorn.Config(
        app,
        host,
        port,
        log_level="warning",
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT,
        lifespan="off",
    )
    server = uvicorn.Server(config)
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


def _call_once_started(server: uvicorn.Server, callback: Callable[[], None]) -> None:
    while not server.started:
        if server.should_exit:
            return
        time.sleep(0.02)
    callback()


def _bypass_proxy() -> None:
    """Let FastChat's servers reach each other without the environment's proxy.

    They use ``requests``, which would send even requests to 127.0.0.1 through it.
    """
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "*"
