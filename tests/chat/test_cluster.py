"""Groups of server processes, with Python's own web server."""

from __future__ import annotations

import sys
import threading

import httpx
import pytest
from processes import TIMEOUT, free_ports, seconds_until

from eagle_fsd.chat.serve import cluster as cluster_module
from eagle_fsd.chat.serve.cluster import Cluster, ServerError


def test_worker_is_restarted_with_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other servers are not: without them the cluster ends."""
    monkeypatch.setattr(cluster_module, "MIN_DELAY", 0.2)
    ports = dict(zip(("worker", "API"), free_ports(2), strict=True))
    urls = {name: f"http://127.0.0.1:{port}/" for name, port in ports.items()}
    commands = {
        name: ([str(port), "--bind", "127.0.0.1"], urls[name]) for name, port in ports.items()
    }
    cluster = Cluster([sys.executable, "-m", "http.server"], commands, ("worker",))
    messages: list[str] = []
    errors: list[ServerError] = []

    def wait() -> None:
        try:
            cluster.wait(messages.append)
        except ServerError as error:
            errors.append(error)

    def answers() -> bool:
        try:
            return httpx.get(urls["worker"], trust_env=False).is_success
        except httpx.HTTPError:
            return False

    thread = threading.Thread(target=wait)
    try:
        cluster.start()
        thread.start()
        worker, api = cluster._children
        for number in (1, 2):
            process = worker.process
            process.kill()
            process.wait()
            assert seconds_until(answers) < TIMEOUT
            assert worker.process is not process
            assert len(messages) == number
        api.process.kill()
        thread.join(TIMEOUT)
        assert not thread.is_alive()
    finally:
        cluster.stop()
    exited = "the worker exited with status -9; starting it again in"
    assert messages == [f"{exited} 0.2 s", f"{exited} 0.4 s"]
    assert [str(error) for error in errors] == ["the API exited with status -9"]
    assert all(child.process.poll() is not None for child in (worker, api))
