"""Requests to Gradio's routes that the page does not send."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from api_servers import ServerThread
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_web_page import ScriptedBackend

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
def running_page(access: Access = ANYONE) -> Iterator[httpx.Client]:
    """Serve the page in this process; yields a client."""
    pytest.importorskip("gradio", reason="the web page needs Gradio: the extra [web]")
    from eagle_fsd.chat.web.app import page_app

    app = page_app(ScriptedBackend("Hi", "!"))
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


def test_unknown_events_reveal_no_traceback(page: httpx.Client) -> None:
    for index in (99_999, -1):
        body = {**VALID, "fn_index": index}
        reply = page.post("/gradio_api/queue/join", json=body)
        check(reply)
        assert reply.status_code == 400


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
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
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
    """Gradio would print a traceback of each."""
    events = page.get("/config").json()["dependencies"]
    send = next(event["id"] for event in events if len(event["inputs"]) == 7)
    for number in range(50):
        body = {"fn_index": send, "session_hash": f"bad{number}"}
        body["data"] = [None, "Hello", 99.0, "js", 0, 0, 9]  # beyond the slider's maximum
        assert page.post("/gradio_api/queue/join", json=body).status_code == 200
    url = "/gradio_api/queue/data?session_hash=bad49"
    with page.stream("GET", url) as reply:
        for line in reply.iter_lines():
            if "process_completed" in line:
                break
    printed = capfd.readouterr()
    assert len(printed.out + printed.err) < 50_000
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
