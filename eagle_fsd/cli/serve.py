"""``eagle-fsd serve``: FastChat's servers around a pair."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from eagle_fsd.chat.config import AnswerOptions, Limits
from eagle_fsd.cli.console import err, fail, out
from eagle_fsd.cli.demo import (
    BUNDLED_NAME,
    ON_THE_PAGE,
    PageHost,
    PagePort,
    examples_for,
    tell_page,
    web_page,
)
from eagle_fsd.cli.options import (
    Pair,
    with_group,
    with_options,
    with_settings,
)

app = typer.Typer(help="Serve a pair to OpenAI clients through FastChat.", no_args_is_help=True)

#: Keys that clients must come with, separated by commas; unlike an option nobody sees them.
KEYS_VARIABLE = "EAGLE_FSD_API_KEYS"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
#: What to listen to stands for everybody, and where this machine reaches that.
EVERYBODY = {"0.0.0.0": "127.0.0.1", "::": "::1"}

Host = Annotated[str, typer.Option(help="Whom to listen to; 0.0.0.0 is everybody.")]


def _address(given: str | None) -> str | None:
    """An address as routes are put behind it; ``none`` and None are none."""
    if given in (None, "none"):
        return given
    try:
        parts = urlsplit(given)
        sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of a port that is none
        sound = False
    if not sound:
        raise typer.BadParameter(f"an address is like http://machine:21001; got {given}")
    return given.rstrip("/")


Controller = Annotated[str, typer.Option(help="The controller's address.", callback=_address)]
Names = Annotated[
    list[str] | None,
    typer.Option("--name", help="What clients call the model.", show_default="the target's name"),
]


def _port(default: int) -> Any:
    return Annotated[int, typer.Option(min=1, max=65535, help=f"As FastChat: {default}.")]


@app.command()
def controller(host: Host = "127.0.0.1", port: _port(21001) = 21001) -> None:
    """The controller: workers register with it, the API asks it for one."""
    from eagle_fsd.chat.serve.launch import check_free, run_controller

    check_free(host, port)
    run_controller(host, port)


@app.command()
def api(
    host: Host = "127.0.0.1",
    port: _port(8000) = 8000,
    controller: Controller = "http://127.0.0.1:21001",
    max_body: Annotated[int, typer.Option(min=1024, help="Bytes of a request.")] = 1 << 20,
) -> None:
    """The OpenAI-compatible API. The environment's EAGLE_FSD_API_KEYS are the keys it takes."""
    from eagle_fsd.chat.serve.launch import check_free, run_api

    check_free(host, port)
    keys = [key.strip() for key in os.environ.get(KEYS_VARIABLE, "").split(",") if key.strip()]
    run_api(host, port, controller, keys, max_body)


@app.command()
@with_settings()
@with_options(Limits, "limits")
@with_group(Pair)
def worker(
    pair: Pair,
    settings: dict[str, Any],
    limits: dict[str, Any],
    host: Host = "127.0.0.1",
    port: _port(21002) = 21002,
    controller: Annotated[
        str,
        typer.Option(help="The controller's address; 'none' to stand alone.", callback=_address),
    ] = "http://127.0.0.1:21001",
    address: Annotated[
        str | None,
        typer.Option(
            help="Where others reach this worker.",
            show_default="http://HOST:PORT",
            callback=_address,
        ),
    ] = None,
    names: Names = None,
) -> None:
    """A worker: it holds a pair and decodes. Start one on every machine."""
    from eagle_fsd.chat.serve.launch import check_free, run_worker

    elsewhere = controller != "none" and urlsplit(controller).hostname not in LOOPBACK
    if address is None and elsewhere and host in (*LOOPBACK, *EVERYBODY):
        raise typer.BadParameter(
            f"{controller} cannot reach this worker at {host}: say with --address where it can"
            " (and with --host whom to listen to)"
        )
    check_free(host, port)
    model, wording = pair.load(settings)
    run_worker(
        model,
        wording,
        Limits.from_dict(limits),
        host,
        port,
        None if controller == "none" else controller,
        address or _url(host, port),
        names or [_name(pair.target)],
    )


@app.command()
@with_options(AnswerOptions, "options", leave_out=ON_THE_PAGE)
def web(
    options: dict[str, Any],
    host: PageHost = "127.0.0.1",
    port: PagePort = 7860,
    controller: Controller = "http://127.0.0.1:21001",
    name: Annotated[
        str | None,
        typer.Option(help="Which of the controller's models.", show_default="the first"),
    ] = None,
) -> None:
    """The web page, over a worker that the controller knows. (eagle-fsd demo needs no worker.)"""
    page = web_page()
    from eagle_fsd.chat.backend import BackendError
    from eagle_fsd.chat.remote_backend import RemoteBackend
    from eagle_fsd.chat.serve.launch import check_free

    check_free(host, port)
    try:
        backend = RemoteBackend(controller, name)
    except BackendError as error:
        fail(str(error), 1)
    examples = examples_for(backend.about.name)
    app = page.page_app(backend, AnswerOptions.from_dict(options), examples)
    tell_page(host, port)
    page.run_page(app, host, port)


@app.command(name="all")
@with_settings()
@with_options(Limits, "limits")
@with_group(Pair)
def serve_all(
    pair: Pair,
    settings: dict[str, Any],
    limits: dict[str, Any],
    host: Host = "127.0.0.1",
    port: _port(8000) = 8000,
    controller_port: _port(21001) = 21001,
    worker_port: _port(21002) = 21002,
    names: Names = None,
    page: Annotated[bool, typer.Option("--web", help="The web page beside them.")] = False,
    web_port: PagePort = 7860,
) -> None:
    """Controller, one worker and the API on this machine, until Ctrl-C.

    The environment's EAGLE_FSD_API_KEYS are the keys that the API takes.
    """
    if page:
        web_page()
    from eagle_fsd.chat.serve.launch import Cluster, ServerError, check_free

    name = (names or [_name(pair.target)])[0]
    wanted = [(host, port), ("127.0.0.1", controller_port), ("127.0.0.1", worker_port)]
    if page:
        wanted.append((host, web_port))
    if len({number for _, number in wanted}) < len(wanted):  # one would pass for the other
        raise typer.BadParameter("every server needs a port of its own")
    for where, number in wanted:
        check_free(where, number)
    controller_address = f"http://127.0.0.1:{controller_port}"
    worker_address = f"http://127.0.0.1:{worker_port}"
    given = {**asdict(pair), **limits, **settings}
    given["conv_template"] = given.pop("template")
    options = [item for key, value in given.items() for item in _option(key, value)]
    options += [item for each in names or [name] for item in ("--name", each)]
    commands = {
        "controller": (
            ["controller", "--port", str(controller_port)],
            f"{controller_address}/test_connection",
        ),
        "worker": (
            ["worker", "--port", str(worker_port), "--controller", controller_address, *options],
            f"{worker_address}/health",
        ),
        "API": (
            ["api", "--host", host, "--port", str(port), "--controller", controller_address]
            + (["--max-body", str(limits["max_body"])] if "max_body" in limits else []),
            f"{_url(host, port)}/v1/models",
        ),
    }
    if page:
        commands["web page"] = (
            ["web", "--host", host, "--port", str(web_port), "--controller", controller_address],
            f"{_url(host, web_port)}/",
        )
    cluster = Cluster([sys.executable, "-m", "eagle_fsd.cli.child", "serve"], commands)
    try:
        cluster.start(lambda text: err.print(text, style="dim"))
        _tell(_url(host, port), controller_address, worker_address, name)
        cluster.wait()
    except ServerError as error:
        fail(str(error), 1)
    finally:
        cluster.stop()


def _option(name: str, value: Any) -> list[str]:
    names = {"top_k": "tree-top-k"}
    if value is None:
        return []
    return [f"--{names.get(name, name.replace('_', '-'))}", str(value)]


def _name(target: str | None) -> str:
    return Path(os.path.abspath(target)).name if target else BUNDLED_NAME


def _url(host: str, port: int) -> str:
    """Where a server that listens to ``host`` is reached from this machine."""
    host = EVERYBODY.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _tell(api: str, controller: str, worker: str, name: str) -> None:
    key = ' -H "Authorization: Bearer $KEY"' if os.environ.get(KEYS_VARIABLE) else ""
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello!"}]})
    lines = [
        f"API         {api}/v1",
        f"controller  {controller}",
        f"worker      {worker}  (/metrics, /health)",
        f"curl {api}/v1/chat/completions{key} -H 'Content-Type: application/json'"
        f" -d {shlex.quote(body)}",
    ]
    for line in lines:
        out.print(line, markup=False, soft_wrap=True)
