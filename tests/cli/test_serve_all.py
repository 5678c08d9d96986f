"""``eagle-fsd serve all``: the arguments of the servers that it starts."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from eagle_fsd.chat.config import Limits
from eagle_fsd.chat.serve import cluster, servers
from eagle_fsd.cli.app import app
from eagle_fsd.cli.options import Pair
from eagle_fsd.cli.serve import APIServer, ControllerServer, RemotePage, WorkerServer
from eagle_fsd.model.config import AcceptanceConfig, TreeConfig

Run = Callable[..., tuple[int, str, str]]


class StubCluster:
    """Stores the commands of the servers and starts none."""

    program: list[str]
    commands: dict[str, tuple[list[str], str]]
    restarted: tuple[str, ...]

    def __init__(
        self,
        program: list[str],
        commands: dict[str, tuple[list[str], str]],
        restarted: tuple[str, ...],
    ) -> None:
        type(self).program, type(self).commands = program, commands
        type(self).restarted = restarted

    def start(self, report: Callable[[str], None]) -> None:
        report("starting")

    def wait(self, report: Callable[[str], None]) -> None:
        """Return at once."""

    def stop(self) -> None:
        """There is nothing to stop."""


@pytest.fixture
def started(run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, dict[str, Any]]]:
    """Call ``serve all``, and return the options that each server receives, by server."""
    monkeypatch.setattr(cluster, "Cluster", StubCluster)
    monkeypatch.setattr(servers, "check_port", lambda *_: None)

    def call(*arguments: object) -> dict[str, dict[str, Any]]:
        status, _, err = run("serve", "all", *arguments)
        assert status == 0, err
        assert StubCluster.program[1:] == ["-m", "eagle_fsd.cli.child", "serve"]
        options = {}
        for name, (words, _) in StubCluster.commands.items():
            bound = app.parse_args(["serve", *words])[1]
            options[name] = dict(bound.arguments)
        return options

    return call


def test_defaults(started: Callable[..., dict[str, dict[str, Any]]]) -> None:
    options = started()
    url = "http://127.0.0.1:21001"
    assert options == {
        "controller": {"server": ControllerServer(port=21001)},
        "worker": {
            "server": WorkerServer(port=21002, controller=url, names=("eagle-fsd-bundled",))
        },
        "API": {"server": APIServer(host="127.0.0.1", port=8000, controller=url)},
    }
    probes = [probe for _, probe in StubCluster.commands.values()]
    assert probes == [
        f"{url}/test_connection",
        "http://127.0.0.1:21002/health",
        "http://127.0.0.1:8000/v1/models",
    ]
    assert StubCluster.restarted == ("worker",)


def test_options_reach_the_servers_that_take_them(
    started: Callable[..., dict[str, dict[str, Any]]], tmp_path: Path
) -> None:
    """Only those that were given: a worker fills in the others from the head's ``fsd.json``."""
    pair = ("--target", "a target", "--head", "a/head", "--dtype", "float32", "--device", "cpu")
    files = ("--conv-template", "vicuna_v1.1", "--settings", tmp_path / "fsd.json")
    tree = ("--total-tokens", 7, "--tree-top-k", 3)
    acceptance = ("--threshold", 0.25, "--divergence", "kl", "--selection", "target")
    limits = ("--queue", 5, "--max-new-tokens", 99, "--max-threshold", 1, "--max-body", 5_000_000)
    ports = ("--host", "0.0.0.0", "--port", 1, "--controller-port", 2, "--worker-port", 3)
    page = ("--web", "--web-port", 4, "--name", "a", 'my "b"')
    if find_spec("gradio") is None:
        pytest.skip("the web page needs Gradio")
    options = started(*pair, *files, *tree, *acceptance, *limits, *ports, *page)
    url = "http://127.0.0.1:2"
    worker = options["worker"]
    assert worker["server"] == WorkerServer(port=3, controller=url, names=("a", 'my "b"'))
    assert worker["pair"] == Pair(
        target="a target",
        drafter="a/head",
        dtype="float32",
        device="cpu",
        chat_template="vicuna_v1.1",
        settings=tmp_path / "fsd.json",
    )
    assert worker["tree"].model_dump(exclude_unset=True) == {"total_tokens": 7, "top_k": 3}
    assert worker["tree"] == TreeConfig(total_tokens=7, top_k=3)
    given = AcceptanceConfig(threshold=0.25, divergence="kl", selection="target")
    assert worker["acceptance"] == given
    assert worker["acceptance"].model_fields_set == given.model_fields_set
    assert worker["limits"] == Limits(
        queue=5, max_new_tokens=99, max_threshold=1.0, max_body=5_000_000
    )
    assert options["API"]["server"] == APIServer(host="0.0.0.0", port=1, controller=url)
    assert options["API"]["limits"] == Limits(max_body=5_000_000)
    assert options["controller"]["server"] == ControllerServer(port=2)
    assert options["web page"]["page"] == RemotePage(host="0.0.0.0", port=4, controller=url)
