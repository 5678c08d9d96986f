"""Servers as processes: API keys, Ctrl-C, processes that are killed, several workers."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import httpx
import openai
import pytest
from processes import (
    CHAT,
    HELLO,
    NAME,
    TIMEOUT,
    Servers,
    assert_exits_with,
    free_ports,
    running_server,
    seconds_until,
)
from test_load import async_client, fetch, random_request

from eagle_fsd.chat.backend import BackendError
from eagle_fsd.chat.remote_backend import RemoteBackend

#: Seconds; FastChat's own intervals are 45 and 90.
HEARTBEAT_INTERVAL, HEARTBEAT_EXPIRATION = 1, 4
HEARTBEATS = {
    "FASTCHAT_WORKER_HEART_BEAT_INTERVAL": str(HEARTBEAT_INTERVAL),
    "FASTCHAT_CONTROLLER_HEART_BEAT_EXPIRATION": str(HEARTBEAT_EXPIRATION),
}


@pytest.mark.slow
def test_api_keys_limits_and_ctrl_c() -> None:
    servers = Servers("--max-threshold", "0.1", "--threshold", "0", keys="one,two")
    assert "Authorization: Bearer $KEY" in servers.lines[-1]
    messages: Any = HELLO
    with pytest.raises(openai.AuthenticationError):
        servers.client("wrong").models.list()
    with pytest.raises(openai.AuthenticationError):
        servers.client("wrong").chat.completions.create(model=NAME, messages=messages)
    ask = servers.client("two").chat.completions.create
    assert ask(model=NAME, messages=messages, max_tokens=8).choices[0].message.content
    with pytest.raises(openai.BadRequestError, match=r"at most 0.1 on this server; got 0.11"):
        ask(model=NAME, messages=messages, extra_body={"fsd": {"threshold": 0.11}})
    # Servers that are left after four seconds are killed.
    assert servers.stop(signal.SIGINT) < 10
    for port in (servers.api, servers.controller, servers.worker):
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_servers_exit_if_their_parent_is_killed() -> None:
    (port,) = free_ports(1)
    script = (
        "import sys\n"
        "from eagle_fsd.chat.serve.cluster import Cluster\n"
        f"probe = 'http://127.0.0.1:{port}/test_connection'\n"
        "program = [sys.executable, '-m', 'eagle_fsd.cli.child', 'serve']\n"
        f"command = ['controller', '--port', '{port}']\n"
        "cluster = Cluster(program, {'controller': (command, probe)})\n"
        "cluster.start()\n"
        "print('ready', flush=True)\n"
        "cluster.wait()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"ready\n"
    assert_exits_with(parent)


@pytest.mark.slow
def test_keys_of_clients_and_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster with a key is served through the API and the page, which have keys of their own."""
    pytest.importorskip("gradio", reason="the web page needs Gradio: the extra [web]")
    key = "0123456789abcdef"
    monkeypatch.setenv("EAGLE_FSD_CLUSTER_KEY", key)
    # The servers must not use the environment's proxy to reach each other.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    (web,) = free_ports(1)
    servers = Servers("--web", "--web-port", str(web), keys="one,two")
    try:
        body = {"model": NAME, "messages": HELLO, "max_tokens": 8}
        headers = {"authorization": "Bearer one"}
        assert servers.http.post(servers.url(CHAT), json=body).status_code == 401
        reply = servers.http.post(servers.url(CHAT), json=body, headers=headers)
        assert reply.json()["choices"][0]["message"]["content"]
        for name, status in ((key, 200), ("one", 401)):
            headers = {"authorization": f"Bearer {name}"}
            metrics = servers.http.get(servers.url("/metrics"), headers=headers)
            assert metrics.status_code == status
        assert servers.http.get(servers.url("/health")).status_code == 200
        page = f"http://127.0.0.1:{web}/"
        assert servers.http.get(page).status_code == 401
        assert servers.http.get(page, auth=("visitor", "two")).status_code == 200
        remote = RemoteBackend.connect(f"http://127.0.0.1:{servers.controller}")
        assert remote.about.name == NAME
        monkeypatch.delenv("EAGLE_FSD_CLUSTER_KEY")
        with pytest.raises(BackendError, match="set EAGLE_FSD_CLUSTER_KEY"):
            RemoteBackend.connect(f"http://127.0.0.1:{servers.controller}")
    finally:
        servers.stop()


@pytest.mark.slow
def test_serve_all_restarts_its_worker() -> None:
    servers = Servers()
    try:
        answer, worker = servers.answer(), servers.child("worker")
        worker.kill()
        worker.wait(TIMEOUT)
        body = {"model": NAME, "messages": HELLO, "max_tokens": 1}
        reply = servers.http.post(servers.url(CHAT), json=body)
        assert reply.status_code == 503

        def answers() -> bool:
            return servers.http.post(servers.url(CHAT), json=body).status_code == 200

        assert seconds_until(answers) < TIMEOUT
        assert servers.answer() == answer
        assert servers.child("worker").pid != worker.pid
        assert "the worker exited with status -9; starting it again in 1 s" in "".join(servers.log)
    finally:
        servers.stop()


@pytest.mark.slow
def test_serve_all_exits_completely_if_it_is_killed() -> None:
    assert_exits_with(Servers().process)


@pytest.mark.slow
def test_separate_servers_find_each_other_and_exit_on_ctrl_c() -> None:
    controller_port, api_port, worker_port = free_ports(3)
    controller, api = f"http://127.0.0.1:{controller_port}", f"http://127.0.0.1:{api_port}"
    worker = f"http://127.0.0.1:{worker_port}"
    arguments = ("--controller", controller)
    with ExitStack() as stack:
        processes = [
            stack.enter_context(running_server(probe, *command))
            for probe, command in (
                (
                    f"{controller}/test_connection",
                    ("controller", "--port", str(controller_port)),
                ),
                (f"{api}/v1/models", ("api", "--port", str(api_port), *arguments)),
                (f"{worker}/health", ("worker", "--port", str(worker_port), *arguments)),
            )
        ]
        body = {"model": NAME, "messages": HELLO, "max_tokens": 4}
        deadline, status = time.monotonic() + TIMEOUT, 0
        while status != 200:  # a worker is ready before its registration is complete
            assert time.monotonic() < deadline
            response = httpx.post(api + CHAT, json=body, trust_env=False, timeout=TIMEOUT)
            status = response.status_code
            assert status in (200, 503)
        assert response.json()["choices"][0]["message"]["content"]
        for process in processes:
            process.send_signal(signal.SIGINT)
        assert [process.wait(TIMEOUT) for process in processes] == [130, 130, 130]


@pytest.mark.slow
def test_killed_worker_is_replaced(record_property: Any) -> None:
    """Requests fail until the controller has missed the worker's heartbeats, and not after."""
    api, controller, first, second = free_ports(4)
    arguments = ["--controller", f"http://127.0.0.1:{controller}"]
    # A heartbeat is valid until it expires, and until the controller checks again.
    window = 2 * HEARTBEAT_EXPIRATION + HEARTBEAT_INTERVAL
    outcomes: list[tuple[float, int]] = []

    def worker(port: int) -> AbstractContextManager[subprocess.Popen[bytes]]:
        probe = f"http://127.0.0.1:{port}/health"
        return running_server(probe, "worker", "--port", str(port), *arguments, **HEARTBEATS)

    def count_answers(port: int) -> float:
        url = f"http://127.0.0.1:{port}/metrics"
        page = httpx.get(url, trust_env=False, timeout=TIMEOUT).text
        name = 'eagle_fsd_requests_total{outcome="ended"} '
        return next((float(line[len(name) :]) for line in page.splitlines() if name in line), 0.0)

    async def visit(client: httpx.AsyncClient, number: int, end: asyncio.Event) -> None:
        dice = random.Random(number)
        while not end.is_set():
            status, _ = await fetch(client, *random_request(dice))
            outcomes.append((time.monotonic(), status))
            if status != 200:
                await asyncio.sleep(0.1)

    async def wait_for_answers(port: int, count: float) -> None:
        begin = time.monotonic()
        while await asyncio.to_thread(count_answers, port) <= count:
            assert time.monotonic() < begin + 60
            await asyncio.sleep(0.1)

    async def work(victim: subprocess.Popen[bytes], stack: ExitStack) -> float:
        end = asyncio.Event()
        async with async_client(api) as client:
            clients = [asyncio.create_task(visit(client, number, end)) for number in range(8)]
            await wait_for_answers(first, 5)
            await wait_for_answers(second, 5)
            victim.kill()
            killed, before = time.monotonic(), count_answers(second)
            await asyncio.sleep(window)
            assert count_answers(second) > before + 5
            await asyncio.to_thread(stack.enter_context, worker(first))
            await wait_for_answers(first, 5)
            end.set()
            await asyncio.gather(*clients)
        return killed

    probe = f"http://127.0.0.1:{controller}/test_connection"
    with ExitStack() as stack:
        command = ("controller", "--port", str(controller))
        stack.enter_context(running_server(probe, *command, **HEARTBEATS))
        stack.enter_context(worker(second))
        victim = stack.enter_context(worker(first))
        models = f"http://127.0.0.1:{api}/v1/models"
        stack.enter_context(running_server(models, "api", "--port", str(api), *arguments))
        killed = asyncio.run(work(victim, stack))

    failures = [when - killed for when, status in outcomes if status != 200]
    record_property("answered", len(outcomes) - len(failures))
    record_property("failed_after", failures)
    assert failures  # otherwise nobody noticed that the worker was killed
    assert -0.1 < min(failures) < max(failures) < window
    # Rejected before an answer starts, or interrupted during a stream.
    assert {status for _, status in outcomes} <= {200, 503, 0}
