"""Requests in Gradio's protocol, by programs instead of the page."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from .browsing import MARKS, TIMEOUT, ControlledBackend

pytestmark = MARKS


def event_ids(client: httpx.Client) -> tuple[int, int]:
    """Return Gradio's ids of the Send and Stop events."""
    events = client.get("/config").json()["dependencies"]
    send = next(event["id"] for event in events if len(event["inputs"]) == 7)
    stop = next(
        event["id"] for event in events if len(event["inputs"]) == 1 and not event["outputs"]
    )
    return send, stop


@pytest.fixture
def client(server: tuple[ControlledBackend, str]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server[1], trust_env=False, timeout=TIMEOUT) as client:
        yield client


def test_invalid_values_are_rejected(client: httpx.Client, backend: ControlledBackend) -> None:
    send, _ = event_ids(client)

    def call(*values: Any) -> str:
        data = {"data": [None, *values], "fn_index": send, "session_hash": "program"}
        assert client.post("/gradio_api/queue/join", json=data).status_code == 200
        lines = ""
        url = "/gradio_api/queue/data?session_hash=program"
        with client.stream("GET", url) as reply:
            for line in reply.iter_lines():
                lines += line
                if "process_completed" in line:
                    break
        return lines

    # Gradio rejects the first three, the page the others.
    for values, error in (
        (("Hello", 0.9, "js", 0, 0, 9), "greater than maximum value 0.5"),
        (("Hello", 0.1, "js", 0, 0, 10**9), "greater than maximum value 4096"),
        (("Hello", 0.1, "nothing", 0, 0, 9), '"success":false'),
        (("Hello", False, "js", 0, 0, 9), "threshold must be a number"),
        (("Hello", 0.1, "js", 0, 0, 2.5), "max_new_tokens must be an integer"),
        (("x" * 30_000, 0.1, "js", 0, 0, 9), "at most 20,000 characters"),
    ):
        assert error in call(*values)
    assert backend.requests == []
    nested = [None, "Hello", [1], "js", 0, 0, 9]  # rejected by the guard, before Gradio
    data = {"data": nested, "fn_index": send, "session_hash": "program"}
    assert client.post("/gradio_api/queue/join", json=data).status_code == 400
    large = {"data": ["x" * 300_000], "fn_index": send, "session_hash": "program"}
    assert client.post("/gradio_api/queue/join", json=large).status_code == 413
    for path in ("/gradio_api/file=/etc/hostname", "/gradio_api/upload", "/monitoring"):
        assert client.get(path).status_code == 404
    assert client.post("/gradio_api/upload", files={"files": b"x"}).status_code == 415  # no JSON


def test_stop_works_while_many_requests_wait(
    client: httpx.Client, backend: ControlledBackend
) -> None:
    """Gradio limits its concurrent events; waiting requests must not block Stop."""
    count = 50
    backend.reply("So", endless=True)
    send, stop = event_ids(client)

    def join(event: int, session: int, *values: Any) -> None:
        data = {"data": [None, *values], "fn_index": event, "session_hash": f"many{session}"}
        assert client.post("/gradio_api/queue/join", json=data).status_code == 200

    def wait_for_active(expected: int) -> None:
        deadline = time.monotonic() + TIMEOUT
        while backend.active != expected:
            assert time.monotonic() < deadline, f"{backend.active} active, not {expected}"
            time.sleep(0.05)

    try:
        for session in range(count):
            join(send, session, "Hello", 0.1, "js", 0, 0, 9)
        wait_for_active(count)
        for session in range(count):
            join(stop, session)
        wait_for_active(0)
    finally:
        backend.endless = False
