"""``eagle-fsd serve`` without servers: what it makes of its options."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle_fsd.chat.remote_backend import RemoteBackend
from eagle_fsd.chat.serve import cluster as cluster_module
from eagle_fsd.chat.serve import servers
from eagle_fsd.chat.serve.cluster import ServerError
from eagle_fsd.chat.serve.guard import CLUSTER_KEY_VARIABLE, Access
from eagle_fsd.cli import serve

KEY = "0123456789abcdef"
Run = Callable[..., tuple[int, str, str]]


class FakeCluster:
    """Records the commands of the servers instead of starting them."""

    commands: Mapping[str, tuple[list[str], str]]
    error: Exception | None = None

    def __init__(
        self,
        program: Sequence[str],
        commands: Mapping[str, tuple[list[str], str]],
        restarted: Sequence[str],
    ) -> None:
        type(self).commands = commands
        assert tuple(restarted) == ("worker",)

    def start(self, report: Callable[[str], None]) -> None:
        if self.error is not None:
            raise self.error

    def wait(self, report: Callable[[str], None]) -> None: ...

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
    monkeypatch.setenv(CLUSTER_KEY_VARIABLE, KEY)
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


@pytest.mark.parametrize("command", ["controller", "worker"])
def test_servers_beyond_this_machine_need_the_clusters_key(
    command: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    for name in ("run_controller", "run_worker"):
        monkeypatch.setattr(servers, name, lambda *arguments: calls.append(arguments[-1]))
    monkeypatch.setattr(servers, "check_port", lambda *_: None)
    options = ("serve", command, "--host", "192.0.2.7", "--trusted-hosts", "a.example")
    monkeypatch.delenv(CLUSTER_KEY_VARIABLE, raising=False)
    status, _, errors = run(*options)
    assert status == 2
    assert "set the environment variable EAGLE_FSD_CLUSTER_KEY" in errors
    monkeypatch.setenv(CLUSTER_KEY_VARIABLE, "short")
    status, _, errors = run(*options)
    assert status == 2
    assert "at least 16 ASCII characters" in errors
    assert not calls
    monkeypatch.setenv(CLUSTER_KEY_VARIABLE, KEY)
    status, _, errors = run(*options)
    assert status == 0, errors
    assert calls[0].keys == (KEY,)
    assert {"a.example", "192.0.2.7"} <= set(calls[0].hosts)


def test_key_is_not_needed_on_this_machine(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.delenv(CLUSTER_KEY_VARIABLE, raising=False)
    monkeypatch.setattr(servers, "check_port", lambda *_: None)
    monkeypatch.setattr(servers, "run_controller", lambda *arguments: calls.append(arguments[-1]))
    assert run("serve", "controller")[0] == 0
    assert calls[0].keys == ()


def test_names_of_a_proxy_reach_api_and_page(cluster: type[FakeCluster], run: Run) -> None:
    pytest.importorskip("gradio")
    status, _, errors = run("serve", "all", "--web", "--trusted-hosts", "chat.example")
    assert status == 0, errors
    for name, expected in (("API", True), ("web page", True), ("worker", False)):
        arguments, _ = cluster.commands[name]
        assert ("chat.example" in arguments) == expected


def test_api_and_page_require_the_api_keys(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setenv("EAGLE_FSD_API_KEYS", "one,two")
    monkeypatch.setattr(servers, "check_port", lambda *_: None)
    monkeypatch.setattr(servers, "run_api", lambda *arguments: calls.append(arguments))
    assert run("serve", "api")[0] == 0
    assert calls[0][3] == Access(("127.0.0.1",), ("one", "two"))

    about = SimpleNamespace(name="pair")
    monkeypatch.setattr(RemoteBackend, "connect", lambda *_: SimpleNamespace(about=about))
    page = SimpleNamespace(
        page_app=lambda *arguments: calls.append(arguments), run_page=lambda *_: None
    )
    monkeypatch.setattr(serve, "import_page", lambda: page)
    assert run("serve", "web")[0] == 0
    assert calls[1][3] == Access(("127.0.0.1",), ("one", "two"), "Basic")


@pytest.mark.parametrize(("environment", "expected"), [({}, "5 15"), ({"INTERVAL": "7"}, "7 15")])
def test_heartbeats_are_short_by_default(environment: dict[str, str], expected: str) -> None:
    """FastChat's own intervals are 45 and 90 seconds."""
    script = (
        "import eagle_fsd.chat.serve.servers\n"
        "from fastchat.constants import CONTROLLER_HEART_BEAT_EXPIRATION as expiration\n"
        "from fastchat.constants import WORKER_HEART_BEAT_INTERVAL as interval\n"
        "print(interval, expiration)\n"
    )
    variables = {name: text for name, text in os.environ.items() if "HEART_BEAT" not in name}
    variables |= {f"FASTCHAT_WORKER_HEART_BEAT_{name}": text for name, text in environment.items()}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected.split()
