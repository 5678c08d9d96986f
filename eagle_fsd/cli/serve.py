"""``eagle-fsd serve``: serve a pair over OpenAI's API, or as a worker of FastChat's servers."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import sys
import threading
import webbrowser
from collections.abc import Callable
from ipaddress import IPv6Address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, ValidationInfo

from eagle_fsd.chat.config import AnswerOptions, Limits
from eagle_fsd.chat.serve.guard import API_KEYS_VARIABLE, Access, Guard, api_keys
from eagle_fsd.cli.console import out
from eagle_fsd.cli.options import (
    AcceptanceOptions,
    Pair,
    PairArguments,
    TreeOptions,
    load_chat,
)
from eagle_fsd.cli.parsing import Command, options
from eagle_fsd.cli.processes import check_single_process
from eagle_fsd.model.config import AcceptanceConfig, TreeConfig
from eagle_fsd.utils.options import Options, OptionsError

if TYPE_CHECKING:
    from eagle_fsd.chat.backend import LocalBackend

BUNDLED_NAME = "eagle-fsd-bundled"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
#: Wildcard addresses, and the address at which this machine reaches a server that listens on them.
EVERY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
#: Example questions of the web page for the bundled pair.
EXAMPLES = (
    "Anna gathers 12 buckets of 4 shells each. Then Anna uses 5 shells. How many shells are left"
    " in the end?",
    "At the market, Tom buys 7 boxes with 3 apples in every box. Then Tom gives 4 apples to Mia."
    " How many apples are left in the end?",
)

Port = Annotated[int, Field(ge=1, le=65535, description="Port to listen on.")]
LimitOptions = Annotated[Limits, options("Limits")]


def _check_url(url: str, info: ValidationInfo) -> str:
    """Validate a URL, and strip trailing slashes because routes are appended to it."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        # A worker's address gets a key as password, and routes are appended.
        valid = valid and "@" not in parts.netloc and not re.search(r"[?#\s]", url)
    except ValueError:  # such as a port out of range
        valid = False
    if not valid:
        raise ValueError(
            f"--{info.field_name} must be a URL such as http://machine:21001, without"
            f" credentials, query or fragment; got {url}"
        )
    return url.rstrip("/")


def _check_origin(url: str) -> str:
    """Validate the URL of a site, and normalize its case and port as browsers do."""
    origin = url.rstrip("/").lower()
    if not re.fullmatch(r"https?://[^/?#@*\s]+", origin):
        raise ValueError(f"--allowed-origins must be URLs such as https://chat.example; got {url}")
    return origin.removesuffix(":80" if origin.startswith("http:") else ":443")


def _check_host(name: str) -> str:
    """Validate a name or an address; return it without a final dot or brackets."""
    if re.fullmatch(r"[\w.-]+", name):
        return name.rstrip(".")
    try:
        address = IPv6Address(re.sub(r"^\[(.*)\]$", r"\1", name))
    except ValueError:
        address = None
    if address is None or address.scope_id is not None:  # which browsers do not send
        raise ValueError(f"--trusted-hosts must be names without scheme and port; got {name}")
    return str(address)


def _check_url_or_none(url: str, info: ValidationInfo) -> str:
    return url if url == "none" else _check_url(url, info)


class Server(Options):
    """Where a server listens, and under which names clients reach it."""

    host: str = Field("127.0.0.1", description="Interface to listen on; 0.0.0.0 for all.")
    port: Port = 8000
    names: Annotated[
        tuple[str, ...],
        Field(description="Names of the model for clients, one or several; default: the target's."),
    ] = ()
    trusted_hosts: tuple[Annotated[str, AfterValidator(_check_host)], ...] = Field(
        (),
        description="Further names of this server in the Host header of requests, such as the"
        " name of a reverse proxy.",
    )
    allowed_origins: tuple[Annotated[str, AfterValidator(_check_origin)], ...] = Field(
        (),
        description="Other sites whose web pages may send requests, such as https://chat.example.",
    )
    shutdown_timeout: float = Field(
        10.0,
        ge=0.0,
        description="Seconds that requests have to finish when the server stops.",
    )


class APIServer(Server):
    """Where the API listens."""

    web: bool = Field(False, description="Also serve the web page, at /.")


class WorkerServer(Server):
    """Where a worker listens, and how it registers with the controller."""

    port: Port = 21002
    controller: Annotated[str, AfterValidator(_check_url_or_none)] = Field(
        "http://127.0.0.1:21001",
        description="URL of FastChat's controller; 'none' for no controller.",
    )
    address: Annotated[str, AfterValidator(_check_url)] | None = Field(
        None,
        description="URL at which FastChat's servers reach this worker; default: http://HOST:PORT,"
        " with 127.0.0.1 for 0.0.0.0 (::1 for ::).",
    )


def serve(
    *,
    server: Annotated[APIServer, options("Server")] = APIServer(),
    pair: PairArguments = Pair(),
    tree: TreeOptions = TreeConfig(),
    acceptance: AcceptanceOptions = AcceptanceConfig(),
    limits: LimitOptions = Limits(),
) -> None:
    """Serve a pair over OpenAI's API until Ctrl-C.

    The environment variable EAGLE_FSD_API_KEYS holds the keys that clients may use, separated by
    commas; the web page asks its visitors for one. Keys are required with a --host beyond this
    machine.
    """
    check_single_process("serve")
    answers = AnswerOptions() if server.web else None
    run_api(server, pair, tree, acceptance, limits=limits, answers=answers)


def run_api(
    server: Server,
    pair: Pair,
    tree: TreeConfig,
    acceptance: AcceptanceConfig,
    limits: Limits,
    answers: AnswerOptions | None,
    open_page: bool = False,
) -> None:
    """Serve the API, and the web page if there are initial values of its controls."""
    access = _access(server, page=answers is not None)
    from eagle_fsd.chat.serve.api import api_app, api_error
    from eagle_fsd.chat.web.page import add_page, page_settings

    backend = _load(server, pair, tree, acceptance, limits=limits)
    app = api_app(backend)
    if answers is not None:
        examples = EXAMPLES if pair.target is None else ()
        add_page(app, page_settings(backend, answers, examples))

    def show() -> None:
        url = local_url(server)
        _print_addresses(url, backend, access.page)
        if open_page and has_screen():
            webbrowser.open(url)

    _run(server, Guard(app, access, limits.max_body, api_error), backend, show)


def worker(
    *,
    server: Annotated[WorkerServer, options("Server")] = WorkerServer(),
    pair: PairArguments = Pair(),
    tree: TreeOptions = TreeConfig(),
    acceptance: AcceptanceOptions = AcceptanceConfig(),
    limits: LimitOptions = Limits(),
) -> None:
    """Run a worker for FastChat's controller. Several machines can run one each.

    The environment variable EAGLE_FSD_API_KEYS holds the keys that clients may use, separated by
    commas; the first one is part of the address that the worker registers. Keys are required with
    a --host beyond this machine.
    """
    check_single_process("serve worker")
    remote = server.controller != "none" and urlsplit(server.controller).hostname not in LOOPBACK
    if server.address is None and remote and server.host in (*LOOPBACK, *EVERY_INTERFACE):
        raise OptionsError(
            f"{server.controller} cannot reach this worker at {server.host}: set --address to the"
            " URL where it can, and --host to the interface to listen on"
        )
    name = urlsplit(server.address).hostname if server.address else None
    access = _access(server, *([name] if name else []))
    from eagle_fsd.chat.serve.worker import FSDWorker, with_key, worker_app, worker_error

    backend = _load(server, pair, tree, acceptance, limits=limits)
    address = server.address or local_url(server)
    served = FSDWorker(
        backend,
        controller=None if server.controller == "none" else server.controller,
        address=with_key(address, access.keys[0]) if access.keys else address,
    )

    def register() -> None:
        # Only once the port is open: the controller may send a request at once.
        if served.controller is not None:
            threading.Thread(target=served.keep_registered, daemon=True).start()

    app = Guard(worker_app(served), access, limits.max_body, worker_error)
    _run(server, app, backend, register)


def _load(
    server: Server, pair: Pair, tree: TreeConfig, acceptance: AcceptanceConfig, limits: Limits
) -> LocalBackend:
    """Check that a server can listen on its port, and load its pair."""
    from eagle_fsd.chat.backend import LocalBackend
    from eagle_fsd.chat.serve.connections import check_port

    check_port(server.host, server.port)
    logging.getLogger("eagle_fsd.model.compilation").setLevel(logging.INFO)
    model, chat_template = load_chat(pair, tree, acceptance)
    names = server.names or (model_name(pair.target),)
    return LocalBackend(model, chat_template, limits, names)


def _run(server: Server, app: Guard, backend: LocalBackend, on_started: Callable[[], None]) -> None:
    """Run a server until SIGINT or SIGTERM."""
    from eagle_fsd.chat.serve.connections import BoundedServer, run_server

    try:
        run_server(
            BoundedServer(
                app,
                server.host,
                server.port,
                queue=backend.queue,
                shutdown_timeout=server.shutdown_timeout,
                on_started=on_started,
            )
        )
    finally:
        backend.close()


def has_screen() -> bool:
    """Return whether a browser would open a window; some run in the terminal."""
    displays = ("DISPLAY", "WAYLAND_DISPLAY")
    return sys.platform in ("darwin", "win32") or any(map(os.environ.get, displays))


def model_name(target: str | None) -> str:
    """Return a model's name for clients: the last part of its path or Hub name."""
    return Path(os.path.abspath(target)).name if target else BUNDLED_NAME


def local_url(server: Server) -> str:
    """Return the URL at which this machine reaches a server."""
    host = EVERY_INTERFACE.get(server.host, server.host)
    return f"http://[{host}]:{server.port}" if ":" in host else f"http://{host}:{server.port}"


def _access(server: Server, *names: str, page: bool = False) -> Access:
    """Return who may use a server; beyond this machine only clients with a key."""
    keys = api_keys()
    if not keys and server.host not in LOOPBACK:
        raise OptionsError(
            f"--host {server.host} may let other machines reach this server: set the environment"
            f" variable {API_KEYS_VARIABLE} to the keys that clients may use, separated by commas"
        )
    hosts = (*server.trusted_hosts, server.host, *names)
    return Access(hosts, keys, page, server.allowed_origins)


def _print_addresses(url: str, backend: LocalBackend, page: bool) -> None:
    """Print the model, the addresses of the server, and a curl command to try."""
    key = ' -H "Authorization: Bearer $KEY"' if api_keys() else ""
    name = backend.names[0]
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello!"}]})
    acceptance = backend.default_acceptance
    label = "lossless" if acceptance.lossless else acceptance.label
    certificate = None if acceptance.lossless else backend.model.certificate_for(acceptance)
    lines = [
        f"model       {name}, {label}",
        *([f"certificate {certificate}"] if certificate else []),
        *([f"web page    {url}"] if page else []),
        f"API         {url}/v1  (also {url}/metrics, /health and /ready)",
        f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json'"
        f" -d {shlex.quote(body)}",
    ]
    for line in lines:
        out.print(line)


app = Command("serve", help="Serve a pair to OpenAI clients, or as a worker of FastChat's servers.")
app.default(serve)
app.add(worker)
