"""``eagle-fsd serve`` without servers: what it makes of its options."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import requests

from eagle_fsd import EagleFSD
from eagle_fsd.chat.config import Limits
from eagle_fsd.chat.serve import cluster as cluster_module
from eagle_fsd.chat.serve import servers
from eagle_fsd.chat.serve.cluster import ServerError
from eagle_fsd.cli import serve
from eagle_fsd.utils.chat_templates import load_chat_template

Run = Callable[..., tuple[int, str, str]]


class FakeCluster:
    """Records the commands of the servers instead of starting them."""

    commands: Mapping[str, tuple[list[str], str]]
    error: Exception | None = None

    def __init__(
        self, program: Sequence[str], commands: Mapping[str, tuple[list[str], str]]
    ) -> None:
        type(self).commands = commands

    def start(self, report: Callable[[str], None]) -> None:
        if self.error is not None:
            raise self.error

    def wait(self) -> None: ...

    def stop(self) -> None: ...


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> type[FakeCluster]:
    monkeypatch.setattr(cluster_module, "Cluster", FakeCluster)
    monkeypatch.setattr(servers, "check_port", lambda *_: None)
    monkeypatch.setattr(FakeCluster, "error", None)
    return FakeCluster


def test_limits_and_names_reach_the_servers(cluster: type[FakeCluster], run: Run) -> None:
    status, printed, _ = run("serve", "all", "--max-body", 5_000_000, "--name", 'my "model"')
    assert status == 0
    for name in ("worker", "API"):
        arguments, _ = cluster.commands[name]
        assert arguments[arguments.index("--max-body") + 1] == "5000000"
    assert r'"model": "my \"model\""' in printed


def test_tree_and_sampling_top_k_are_distinct(cluster: type[FakeCluster], run: Run) -> None:
    run("serve", "all", "--tree-top-k", 3, "--threshold", 0.2)
    arguments, _ = cluster.commands["worker"]
    assert arguments[arguments.index("--tree-top-k") + 1] == "3"
    assert arguments[arguments.index("--threshold") + 1] == "0.2"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("::1", "http://[::1]:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("myhost", "http://myhost:8000"),
    ],
)
def test_url_of_a_host(host: str, url: str, cluster: type[FakeCluster], run: Run) -> None:
    _, printed, _ = run("serve", "all", "--host", host)
    assert cluster.commands["API"][1] == f"{url}/v1/models"
    assert f"API         {url}/v1\n" in printed
    assert f"curl {url}/v1/chat/completions" in printed


def test_server_that_does_not_start_is_reported_in_one_line(
    cluster: type[FakeCluster], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "error", ServerError("the worker did not start"))
    assert run("serve", "all") == (1, "", "error: the worker did not start\n")


@pytest.mark.parametrize("options", [("--controller-port", 8000), ("--web", "--web-port", 8000)])
def test_servers_cannot_share_a_port(
    options: tuple[Any, ...], cluster: type[FakeCluster], run: Run
) -> None:
    """Otherwise the controller's answer would be mistaken for the API's."""
    status, _, errors = run("serve", "all", *options)
    assert status == 2
    assert "every server needs a port of its own" in errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("api", "--controller", "machine:21001"), "--controller must be a URL such as http://"),
        (("worker", "--controller", "nonsense"), "--controller must be a URL"),
        (("web", "--controller", "http://machine:99999"), "--controller must be a URL"),
        (("web", "--controller", "http://[::1"), "--controller must be a URL"),
        (("worker", "--address", "ftp://machine"), "--address must be a URL"),
        (("worker", "--controller", "http://machine1:21001"), "cannot reach this worker at 127"),
        (
            ("worker", "--controller", "http://machine1:21001", "--host", "0.0.0.0"),
            "set --address",
        ),
    ],
)
def test_unusable_urls_are_rejected(options: tuple[str, ...], message: str, run: Run) -> None:
    status, _, errors = run("serve", *options)
    assert status == 2
    assert len(errors.splitlines()) == 1
    assert message in errors


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
def test_worker_urls_have_no_trailing_slash(
    options: tuple[str, ...],
    controller: str | None,
    address: str,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(servers, "check_port", lambda *_: None)
    monkeypatch.setattr(servers, "run_worker", lambda *arguments: calls.append(arguments))
    status, _, errors = run("serve", "worker", *options)
    assert status == 0, errors
    assert calls[0][5:7] == (controller, address)


def test_model_name_is_the_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "my-pair"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert [serve.model_name(name) for name in (".", "a/b/", "x/y")] == ["my-pair", "b", "y"]


def test_servers_bypass_the_proxy(monkeypatch: pytest.MonkeyPatch, model: EagleFSD) -> None:
    """FastChat uses ``requests``, which would send requests to 127.0.0.1 to the proxy, too."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "elsewhere")  # restored at the end
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    address = "http://127.0.0.1:21001"
    proxies: list[dict[str, str]] = []

    def fake_server(*_: Any, **__: Any) -> None:
        proxies.append(requests.utils.get_environ_proxies(address))

    monkeypatch.setattr(servers, "run_server", fake_server)
    template = load_chat_template(model.tokenizer)
    servers.run_worker(model, template, Limits(), "127.0.0.1", 1, None, address, ["pair"])
    assert proxies == [{}]
    assert os.environ["no_proxy"] == "*"
