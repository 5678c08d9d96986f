"""``eagle-fsd serve``: what it makes of its options, with nothing served."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import requests

from eagle_fsd import EagleFSD
from eagle_fsd.chat.config import Limits
from eagle_fsd.chat.serve import launch
from eagle_fsd.chat.serve.launch import ServerError
from eagle_fsd.cli import serve
from eagle_fsd.utils.chat_templates import chat_format

Run = Callable[..., tuple[int, str, str]]


class NoCluster:
    """In the place of the servers: keeps their commands, and fails as it is told to."""

    commands: dict[str, tuple[list[str], str]]
    failure: Exception | None = None

    def __init__(self, commands: dict[str, tuple[list[str], str]]) -> None:
        type(self).commands = commands

    def start(self, tell: Callable[[str], None]) -> None:
        if self.failure is not None:
            raise self.failure

    def wait(self) -> None:
        """Told to stop at once."""

    def stop(self) -> None:
        """Nothing was started."""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> type[NoCluster]:
    monkeypatch.setattr(launch, "Cluster", NoCluster)
    monkeypatch.setattr(launch, "check_free", lambda *_: None)
    monkeypatch.setattr(NoCluster, "failure", None)
    return NoCluster


def test_bounds_and_names_reach_every_server(cluster: type[NoCluster], run: Run) -> None:
    status, printed, _ = run("serve", "all", "--max-body", 5_000_000, "--name", 'my "model"')
    assert status == 0
    for name in ("worker", "API"):
        arguments, _ = cluster.commands[name]
        assert arguments[arguments.index("--max-body") + 1] == "5000000"
    assert r'"model": "my \"model\""' in printed


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("::1", "http://[::1]:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("myhost", "http://myhost:8000"),
    ],
)
def test_where_a_host_is_reached(
    host: str, address: str, cluster: type[NoCluster], run: Run
) -> None:
    _, printed, _ = run("serve", "all", "--host", host)
    assert cluster.commands["API"][1] == f"{address}/v1/models"
    assert f"API         {address}/v1\n" in printed
    assert f"curl {address}/v1/chat/completions" in printed


def test_a_server_that_does_not_start_is_one_line(
    cluster: type[NoCluster], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "failure", ServerError("the worker did not start"))
    assert run("serve", "all") == (1, "", "error: the worker did not start\n")


@pytest.mark.parametrize("options", [("--controller-port", 8000), ("--web", "--web-port", 8000)])
def test_every_server_has_a_port_of_its_own(
    options: tuple[Any, ...], cluster: type[NoCluster], run: Run
) -> None:
    """Or the API would be taken to be up: the controller answers for it."""
    status, _, errors = run("serve", "all", *options)
    assert status == 2
    assert "every server needs a port of its own" in errors


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("api", "--controller", "machine:21001"), "an address is like http://machine:21001"),
        (("worker", "--controller", "nonsense"), "an address is like"),
        (("web", "--controller", "http://machine:99999"), "an address is like"),
        (("web", "--controller", "http://[::1"), "an address is like"),
        (("worker", "--address", "ftp://machine"), "an address is like"),
        (("worker", "--controller", "http://machine1:21001"), "cannot reach this worker at 127"),
        (
            ("worker", "--controller", "http://machine1:21001", "--host", "0.0.0.0"),
            "say with --address",
        ),
    ],
)
def test_addresses_that_lead_nowhere(options: tuple[str, ...], words: str, run: Run) -> None:
    status, _, errors = run("serve", *options)
    assert status == 2
    assert len(errors.splitlines()) == 1
    assert words in errors


@pytest.mark.parametrize(
    ("options", "controller", "address"),
    [
        ((), "http://127.0.0.1:21001", "http://127.0.0.1:21002"),
        (("--host", "0.0.0.0"), "http://127.0.0.1:21001", "http://127.0.0.1:21002"),
        (("--controller", "none", "--host", "0.0.0.0"), None, "http://127.0.0.1:21002"),
        (("--controller", "http://a:1/", "--host", "b"), "http://a:1", "http://b:21002"),
        (("--controller", "http://a:1", "--address", "http://c:2/"), "http://a:1", "http://c:2"),
    ],
)
def test_what_a_worker_says_of_itself(
    options: tuple[str, ...],
    controller: str | None,
    address: str,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slash at the end would be one too many before every route."""
    told: list[Any] = []
    monkeypatch.setattr(launch, "check_free", lambda *_: None)
    monkeypatch.setattr(launch, "run_worker", lambda *arguments: told.extend(arguments))
    status, _, errors = run("serve", "worker", *options)
    assert status == 0, errors
    assert told[5:7] == [controller, address]


def test_a_model_is_called_as_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    folder = tmp_path / "my-pair"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert [serve._name(name) for name in (".", "a/b/", "x/y")] == ["my-pair", "b", "y"]


def test_workers_and_controllers_do_without_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """FastChat asks through ``requests``, which would send what is for 127.0.0.1 there too."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "elsewhere")  # put back when this ends
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    model, address = EagleFSD.from_pretrained(), "http://127.0.0.1:21001"
    proxies: list[dict[str, str]] = []

    def serve(*_: Any) -> None:
        proxies.append(requests.utils.get_environ_proxies(address))

    monkeypatch.setattr(launch, "_serve", serve)
    wording = chat_format(model.tokenizer)
    launch.run_worker(model, wording, Limits(), "127.0.0.1", 1, None, address, ["pair"])
    assert proxies == [{}]
    assert os.environ["no_proxy"] == "*"
