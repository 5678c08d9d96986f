"""``eagle-fsd serve``: serve a pair through FastChat."""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, ValidationInfo

from eagle_fsd.chat.config import AnswerOptions, Limits
from eagle_fsd.chat.serve.guard import CLUSTER_KEY_VARIABLE, Access, api_keys, cluster_key
from eagle_fsd.cli.console import err, fail, out
from eagle_fsd.cli.demo import (
    BUNDLED_NAME,
    LimitOptions,
    PageAnswerOptions,
    PageServer,
    examples_for,
    import_page,
    print_page_address,
)
from eagle_fsd.cli.options import (
    AcceptanceOptions,
    Pair,
    PairArguments,
    Port,
    Server,
    TreeOptions,
    load_chat,
)
from eagle_fsd.cli.parsing import Command, arguments_for, options
from eagle_fsd.cli.processes import check_single_process
from eagle_fsd.model.config import AcceptanceConfig, TreeConfig
from eagle_fsd.utils.options import Options, OptionsError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
#: Wildcard addresses, and the address at which this machine reaches a server that listens on them.
EVERY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1"}

app = Command("serve", help="Serve a pair to OpenAI clients through FastChat.")


def _check_url(url: str, info: ValidationInfo) -> str:
    """Validate a URL, and strip trailing slashes because routes are appended to it."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # the port is not a number in range
        valid = False
    if not valid:
        raise ValueError(
            f"--{info.field_name} must be a URL such as http://machine:21001; got {url}"
        )
    return url.rstrip("/")


def _check_url_or_none(url: str, info: ValidationInfo) -> str:
    return url if url == "none" else _check_url(url, info)


URL = Annotated[str, AfterValidator(_check_url)]
Names = Annotated[
    tuple[str, ...],
    Field(description="Names of the model for clients, one or several; default: the target's."),
]


class GuardedServer(Server):
    """Where a server listens, and under which names clients reach it."""

    trusted_hosts: tuple[str, ...] = Field(
        (),
        description="Further names of this server in the Host header of requests, such as the"
        " name of a reverse proxy.",
    )


class ControllerServer(GuardedServer):
    """Where the controller listens."""

    port: Port = 21001


class ControllerURL(Options):
    """Which controller to use."""

    controller: URL = Field("http://127.0.0.1:21001", description="URL of the controller.")


class APIServer(ControllerURL, GuardedServer):
    """Where the API listens."""

    port: Port = 8000


class WorkerServer(GuardedServer):
    """Where a worker listens, and how it registers with the controller."""

    port: Port = 21002
    controller: Annotated[str, AfterValidator(_check_url_or_none)] = Field(
        "http://127.0.0.1:21001", description="URL of the controller; 'none' for no controller."
    )
    address: URL | None = Field(
        None, description="URL at which others reach this worker; default: http://HOST:PORT."
    )
    names: Names = ()


class RemotePage(ControllerURL, GuardedServer, PageServer):
    """Where the web page is served, and the model it uses."""

    name: str | None = Field(None, description="The controller's model to use; default: the first.")


class ClusterServer(Server):
    """Where the servers of one machine listen."""

    host: str = Field(
        "127.0.0.1",
        description="Interface that the API and the page listen on; 0.0.0.0 for all.",
    )
    port: Port = Field(8000, description="Port of the API.")
    controller_port: Port = Field(21001, description="Port of the controller.")
    worker_port: Port = Field(21002, description="Port of the worker.")
    names: Names = ()
    web: bool = Field(False, description="Also serve the web page.")
    web_port: Port = Field(7860, description="Port of the web page.")
    trusted_hosts: tuple[str, ...] = Field(
        (),
        description="Further names of the API and the page in the Host header of requests, such as"
        " the name of a reverse proxy.",
    )


def controller(
    *, server: Annotated[ControllerServer, options("Server")] = ControllerServer()
) -> None:
    """Run the controller, with which workers register and which the API asks for a worker.

    The environment variable EAGLE_FSD_CLUSTER_KEY holds the secret that the servers of a cluster
    share; it is required with a --host beyond this machine.
    """
    from eagle_fsd.chat.serve.servers import check_port, run_controller

    access = _cluster_access(server)
    check_port(server.host, server.port)
    run_controller(server.host, server.port, access)


def api(
    *,
    server: Annotated[APIServer, options("Server")] = APIServer(),
    limits: Annotated[
        Limits, options("Limits", exclude=("max_batch", "queue", "max_new_tokens", "max_threshold"))
    ] = Limits(),
) -> None:
    """Run the OpenAI-compatible API.

    The environment variable EAGLE_FSD_API_KEYS holds the keys that clients may use, separated by
    commas; EAGLE_FSD_CLUSTER_KEY holds the cluster's secret, if it has one.
    """
    from eagle_fsd.chat.serve.servers import check_port, run_api

    check_port(server.host, server.port)
    _check_cluster_key()
    access = Access(_names(server), api_keys())
    run_api(server.host, server.port, server.controller, access, limits.max_body)


def worker(
    *,
    server: Annotated[WorkerServer, options("Server")] = WorkerServer(),
    pair: PairArguments = Pair(),
    tree: TreeOptions = TreeConfig(),
    acceptance: AcceptanceOptions = AcceptanceConfig(),
    limits: LimitOptions = Limits(),
) -> None:
    """Run a worker, which holds a pair and decodes. Several machines can run one each.

    The environment variable EAGLE_FSD_CLUSTER_KEY holds the secret that the servers of a cluster
    share; it is required with a --host beyond this machine.
    """
    from eagle_fsd.chat.serve.servers import check_port, run_worker

    check_single_process("serve worker")
    remote = server.controller != "none" and urlsplit(server.controller).hostname not in LOOPBACK
    if server.address is None and remote and server.host in (*LOOPBACK, *EVERY_INTERFACE):
        raise OptionsError(
            f"{server.controller} cannot reach this worker at {server.host}: set --address to the"
            " URL where it can, and --host to the interface to listen on"
        )
    access = _cluster_access(server)
    check_port(server.host, server.port)
    logging.getLogger("eagle_fsd.model.compilation").setLevel(logging.INFO)
    model, chat_template = load_chat(pair, tree, acceptance)
    run_worker(
        model,
        chat_template,
        limits,
        server.host,
        server.port,
        None if server.controller == "none" else server.controller,
        server.address or local_url(server),
        server.names or [model_name(pair.target)],
        access,
    )


def web(
    *,
    page: Annotated[RemotePage, options("Server")] = RemotePage(),
    answers: PageAnswerOptions = AnswerOptions(),
) -> None:
    """Serve the web page for a model of the controller. (eagle-fsd demo needs no controller.)

    If the environment variable EAGLE_FSD_API_KEYS holds keys, the page asks its visitors for one as
    a password; EAGLE_FSD_CLUSTER_KEY holds the cluster's secret, if it has one.
    """
    module = import_page()
    from eagle_fsd.chat.backend import BackendError
    from eagle_fsd.chat.remote_backend import RemoteBackend
    from eagle_fsd.chat.serve.servers import check_port

    _check_cluster_key()
    check_port(page.host, page.port)
    try:
        backend = RemoteBackend.connect(page.controller, page.name)
    except BackendError as error:
        fail(error, 1)
    access = Access(_names(page), api_keys(), "Basic")
    examples = examples_for(backend.about.name)
    application = module.page_app(backend, answers, examples, access)
    print_page_address(page)
    module.run_page(application, page.host, page.port)


def all_(
    *,
    servers: Annotated[ClusterServer, options("Server")] = ClusterServer(),
    pair: PairArguments = Pair(),
    tree: TreeOptions = TreeConfig(),
    acceptance: AcceptanceOptions = AcceptanceConfig(),
    limits: LimitOptions = Limits(),
) -> None:
    """Run a controller, a worker and the API on this machine, until Ctrl-C.

    A worker that exits is started again. The environment variable EAGLE_FSD_API_KEYS holds the keys
    that clients may use, separated by commas; the page asks its visitors for one as a password.
    Controller and worker only listen on this machine.
    """
    check_single_process("serve all")
    controller = ControllerServer(port=servers.controller_port)
    url = local_url(controller)
    names = servers.names or (model_name(pair.target),)
    worker = WorkerServer(port=servers.worker_port, controller=url, names=names)
    public = {"host": servers.host, "controller": url, "trusted_hosts": servers.trusted_hosts}
    api = APIServer(port=servers.port, **public)
    page = RemotePage(port=servers.web_port, **public)
    children: list[tuple[str, str, Server, tuple[Options, ...], str]] = [
        ("controller", "controller", controller, (), "/test_connection"),
        ("worker", "worker", worker, (pair, tree, acceptance, limits), "/health"),
        ("API", "api", api, (limits,), "/v1/models"),
    ]
    if servers.web:
        children.append(("web page", "web", page, (), "/"))
    if len({server.port for _, _, server, _, _ in children}) < len(children):
        raise OptionsError("every server needs a port of its own")
    if servers.web:
        import_page()
    from eagle_fsd.chat.serve.cluster import Cluster, ServerError
    from eagle_fsd.chat.serve.servers import check_port

    commands = {}
    for name, command, server, models, probe in children:
        check_port(server.host, server.port)
        arguments = [command, *arguments_for(app[command], server, *models)]
        commands[name] = (arguments, local_url(server) + probe)
    _check_cluster_key()
    cluster = Cluster([sys.executable, "-m", "eagle_fsd.cli.child", "serve"], commands, ("worker",))
    try:
        cluster.start(lambda text: err.print(text, style="dim"))
        _print_addresses(local_url(api), url, local_url(worker), names[0])
        cluster.wait(lambda text: err.print(text, style="dim"))
    except ServerError as error:
        fail(error, 1)
    finally:
        cluster.stop()


def model_name(target: str | None) -> str:
    """Return a model's name for clients: the last part of its path or Hub name.

    Args:
        target: A folder or a Hub name; None is the bundled target.
    """
    return Path(os.path.abspath(target)).name if target else BUNDLED_NAME


def local_url(server: Server) -> str:
    """Return the URL at which this machine reaches a server.

    Args:
        server: Where the server listens.
    """
    host = EVERY_INTERFACE.get(server.host, server.host)
    return f"http://[{host}]:{server.port}" if ":" in host else f"http://{host}:{server.port}"


def _check_cluster_key() -> str | None:
    """Return the cluster's key, or None if it has none."""
    try:
        return cluster_key()
    except ValueError as error:
        raise OptionsError(str(error)) from error


def _cluster_access(server: GuardedServer) -> Access:
    """Return who may use a controller or a worker: beyond this machine, those with the key."""
    if _check_cluster_key() is None and server.host not in LOOPBACK:
        raise OptionsError(
            f"--host {server.host} lets other machines reach this server: set the environment"
            f" variable {CLUSTER_KEY_VARIABLE} to the same secret for all servers of the cluster"
        )
    return Access.for_cluster(_names(server))


def _names(server: GuardedServer) -> tuple[str, ...]:
    """Return the names under which clients may reach a server."""
    address = server.address if isinstance(server, WorkerServer) else None
    name = urlsplit(address).hostname if address else None
    return (*server.trusted_hosts, server.host, *([name] if name else []))


def _print_addresses(api: str, controller: str, worker: str, name: str) -> None:
    """Print the addresses of the servers, and a curl command to try."""
    key = ' -H "Authorization: Bearer $KEY"' if api_keys() else ""
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello!"}]})
    lines = [
        f"API         {api}/v1",
        f"controller  {controller}",
        f"worker      {worker}  (/metrics, /health)",
        f"curl {api}/v1/chat/completions{key} -H 'Content-Type: application/json'"
        f" -d {shlex.quote(body)}",
    ]
    for line in lines:
        out.print(line, soft_wrap=True)


app.add(all_, controller, api, worker, web)
