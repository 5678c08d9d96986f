"""gradio's protocol, spoken by programs."""

from __future__ import annotations

import time
from typing import Any

import httpx

from eagle_fsd.chat.backend import Token

from .browsing import MARKS, PATIENCE, Watched

pytestmark = MARKS


def test_requests_past_the_page_are_checked(served: tuple[Watched, str], backend: Watched) -> None:
    """gradio's protocol, spoken by a program."""
    address = served[1]
    with httpx.Client(base_url=address, trust_env=False, timeout=PATIENCE) as client:
        config = client.get("/config").json()
        send = config["dependencies"]
        place = next(item["id"] for item in send if len(item["inputs"]) == 7)

        def call(*values: Any) -> str:
            data = {"data": [None, *values], "fn_index": place, "session_hash": "program"}
            assert client.post("/gradio_api/queue/join", json=data).status_code == 200
            found = ""
            url = "/gradio_api/queue/data?session_hash=program"
            with client.stream("GET", url) as reply:
                for line in reply.iter_lines():
                    found += line
                    if "process_completed" in line:
                        break
            return found

        # gradio refuses the first of these itself, the page the rest.
        for values, words in (
            (("Hello", 0.9, "js", 0, 0, 9), "greater than maximum value 0.5"),
            (("Hello", 0.1, "js", 0, 0, 10**9), "greater than maximum value 4096"),
            (("Hello", [1], "js", 0, 0, 9), '"success":false'),
            (("Hello", 0.1, "nothing", 0, 0, 9), '"success":false'),
            (("Hello", False, "js", 0, 0, 9), "threshold must be a number"),
            (("Hello", 0.1, "js", 0, 0, 2.5), "max_new_tokens must be a whole number"),
            (("x" * 30_000, 0.1, "js", 0, 0, 9), "characters at most"),
        ):
            assert words in call(*values)
        assert backend.asked == []
        large = {"data": ["x" * 300_000], "fn_index": place, "session_hash": "program"}
        assert client.post("/gradio_api/queue/join", json=large).status_code == 413
        for path in ("/gradio_api/file=/etc/hostname", "/gradio_api/upload", "/monitoring"):
            assert client.get(path).status_code == 404
        assert client.post("/gradio_api/upload", files={"files": b"x"}).status_code == 404


def test_many_wait_and_may_stop(served: tuple[Watched, str], backend: Watched) -> None:
    """gradio runs so many events at once: those who wait are not to keep out who stops."""
    many = 50
    backend.said, backend.endless = [Token(1, "So", "exact")], True
    with httpx.Client(base_url=served[1], trust_env=False, timeout=PATIENCE) as client:
        events = client.get("/config").json()["dependencies"]
        send = next(item["id"] for item in events if len(item["inputs"]) == 7)
        stop = next(
            item["id"] for item in events if len(item["inputs"]) == 1 and not item["outputs"]
        )

        def join(event: int, visitor: int, *values: Any) -> None:
            data = {"data": [None, *values], "fn_index": event, "session_hash": f"many{visitor}"}
            assert client.post("/gradio_api/queue/join", json=data).status_code == 200

        def until(waiting: int) -> None:
            end = time.monotonic() + PATIENCE
            while backend.open != waiting:
                assert time.monotonic() < end, f"{backend.open} wait, not {waiting}"
                time.sleep(0.05)

        try:
            for visitor in range(many):
                join(send, visitor, "Hello", 0.1, "js", 0, 0, 9)
            until(many)
            for visitor in range(many):
                join(stop, visitor)
            until(0)
        finally:
            backend.endless = False
