"""Requests to Gradio's routes that the page does not send."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from api_servers import TIMEOUT, ServerThread, seconds_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_web_page import ScriptedBackend

from eagle_fsd.chat.backend import Backend
from eagle_fsd.chat.serve.guard import ANYONE, Access, Guard
from eagle_fsd.chat.web.guard import MAX_STREAMS

JSON = {"content-type": "application/json"}
POST_ROUTES = ("queue/join", "queue/join/", "cancel", "reset", "reset/")
VALID = {
    "data": [None] * 7,
    "fn_index": 0,
    "session_hash": "abc123",
    "event_id": "e",
    "event_data": None,
    "trigger_id": 1,
}
SCALARS = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9)),
    st.sampled_from(["\ud800", "\0", "/etc/passwd", "../x", 10**40, -1, 1e308, "x" * 5000]),
)
JUNK = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(), inner)
)
PATHS = st.lists(
    st.sampled_from(["assets", "static", "svelte", "..", "%2e%2e", "", "\\", "x" * 300, "etc"]),
    max_size=6,
)


@contextmanager
def running_page(access: Access = ANYONE, backend: Backend | None = None) -> Iterator[httpx.Client]:
    """Serve the page in this process; yields a client."""
    pytest.importorskip("gradio", reason="the web page needs Gradio: the extra [web]")
    from eagle_fsd.chat.web.app import page_app

    app = page_app(backend or ScriptedBackend("Hi", "!"))
    server = ServerThread(Guard(app, access), on_stop=app.close)
    yield server.http
    server.stop()


@pytest.fixture(scope="module")
def page() -> Iterator[httpx.Client]:
    with running_page() as client:
        yield client


def check(reply: httpx.Response) -> None:
    assert reply.status_code < 500, reply.text
    assert "Traceback" not in reply.text
    assert "site-packages" not in reply.text


@pytest.mark.slow
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    route=st.sampled_from(POST_ROUTES),
    changes=st.dictionaries(st.sampled_from([*VALID, "request", "batched"]), JUNK, max_size=3),
    raw=st.binary(max_size=20),
)
def test_junk_in_bodies(
    page: httpx.Client, route: str, changes: dict[str, Any], raw: bytes
) -> None:
    for content in (json.dumps({**VALID, **changes}).encode(), raw):
        check(page.post(f"/gradio_api/{route}", content=content, headers=JSON))


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(parts=PATHS, method=st.sampled_from(["GET", "HEAD", "POST", "PUT", "OPTIONS"]))
def test_junk_in_paths(page: httpx.Client, parts: list[str], method: str) -> None:
    check(page.request(method, f"{page.base_url}/" + "/".join(parts)))


def test_page_asks_for_a_key() -> None:
    """As a password, which browsers send with every request to the page."""
    with running_page(Access(keys=("one", "two"), page=True)) as client:
        for path in ("/", "/config", "/assets/x.js"):
            reply = client.get(path)
            assert reply.status_code == 401
            assert reply.headers["www-authenticate"].startswith("Basic ")
        assert client.post("/gradio_api/queue/join", json=VALID).status_code == 401
        reply = client.get("/", auth=("anybody", "two"))
        assert reply.status_code == 200
        assert "eagle_fsd" in reply.text


def test_failing_events_do_not_fill_the_log(
    page: httpx.Client, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Gradio rejects some of them, and would print a traceback of each; the page rejects others."""
    events = page.get("/config").json()["dependencies"]
    send = next(event["id"] for event in events if len(event["inputs"]) == 7)

    def call(session: str, *values: Any) -> str:
        body = {"fn_index": send, "session_hash": session, "data": [None, *values]}
        assert page.post("/gradio_api/queue/join", json=body).status_code == 200
        lines = ""
        with page.stream("GET", f"/gradio_api/queue/data?session_hash={session}") as reply:
            for line in reply.iter_lines():
                lines += line
                if "process_completed" in line:
                    break
        return lines

    for values, error in (
        (("Hello", 0.1, "js", 0, 0, 10**9), "greater than maximum value 4096"),
        (("Hello", 0.1, "nothing", 0, 0, 9), '"success":false'),
        (("Hello", False, "js", 0, 0, 9), "threshold must be a number"),
        (("Hello", 0.1, "js", 0, 0, 2.5), "max_new_tokens must be an integer"),
        (("x" * 30_000, 0.1, "js", 0, 0, 9), "at most 20,000 characters"),
    ):
        assert error in call("bad", *values)
    for number in range(20):
        assert "greater than maximum" in call(f"bad{number}", "Hello", 99.0, "js", 0, 0, 9)
    printed = capfd.readouterr()
    assert len(printed.out + printed.err) < 20_000
    assert "an event of the page failed" in caplog.text


def test_open_pages_are_bounded(page: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other requests of the client are still answered, and so is a page once others are closed."""
    with ExitStack() as stack:
        for number in range(MAX_STREAMS):
            heartbeat = f"/gradio_api/heartbeat/x{number}"
            reply = stack.enter_context(page.stream("GET", heartbeat))
            assert reply.status_code == 200
        assert page.get("/gradio_api/heartbeat/more").status_code == 429
        assert page.get("/").status_code == 200
    deadline = time.monotonic() + 60
    status = 429
    while status == 429 and time.monotonic() < deadline:
        with page.stream("GET", "/gradio_api/heartbeat/more") as reply:
            status = reply.status_code
    assert status == 200
    monkeypatch.setattr("eagle_fsd.chat.web.guard.STREAM_TIMEOUT", 0.1)
    page.get("/gradio_api/heartbeat/last").raise_for_status()  # it ends by itself


@pytest.mark.slow
def test_stop_works_while_many_requests_wait() -> None:
    """Gradio limits its concurrent events; waiting requests must not block Stop."""
    backend, count = ScriptedBackend("So", endless=0.25), 50
    with running_page(backend=backend) as client:
        events = client.get("/config").json()["dependencies"]
        inputs = {len(event["inputs"]): event["id"] for event in events if not event["outputs"]}
        send = next(event["id"] for event in events if len(event["inputs"]) == 7)
        for event, values in ((send, [None, "Hello", 0.1, "js", 0, 0, 9]), (inputs[1], [None])):
            for session in range(count):
                body = {"data": values, "fn_index": event, "session_hash": f"many{session}"}
                assert client.post("/gradio_api/queue/join", json=body).status_code == 200
            assert seconds_until(lambda: len(backend.requests) == count) < TIMEOUT
        assert seconds_until(lambda: backend.closed == count) < TIMEOUT
