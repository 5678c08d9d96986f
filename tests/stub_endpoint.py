"""A stub of an OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Messages = Sequence[dict[str, str]]
#: The status of a reply, and its body: JSON values, or a string for a web page.
Reply = tuple[int, Any]
#: Tokens that replies report.
USAGE = {"prompt_tokens": 1, "completion_tokens": 5, "total_tokens": 6}


def completion(text: str | None) -> Reply:
    """Return the reply with a text."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    tokens = len((text or "").split())
    usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}
    found = {"id": "1", "object": "chat.completion", "created": 0, "choices": [choice]}
    return 200, {**found, "usage": usage}


def failure(status: int, message: str) -> Reply:
    """Return the reply that reports an error."""
    return status, {"error": {"message": message, "code": status}}


class StubEndpoint:
    """An endpoint that answers locally.

    Attributes:
        url: The base URL.
        requests: The bodies of all requests in order of arrival.
        keys: Their Authorization headers.
        active: Number of requests that are being answered.
        peak: Maximum of ``active``.
    """

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.active = self.peak = 0
        lock, stub = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                model = {"id": "stub", "object": "model", "created": 0, "owned_by": "tests"}
                self.send({"object": "list", "data": [model]}, 200)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    stub.requests.append(body)
                    stub.keys.append(self.headers["Authorization"])
                    stub.active += 1
                    stub.peak = max(stub.peak, stub.active)
                try:
                    status, reply = stub.reply(body)
                finally:
                    with lock:
                        stub.active -= 1
                if self.path not in ("/v1/chat/completions", "/v1/completions"):
                    status, reply = failure(404, f"no such path {self.path}")
                self.send(reply, status)

            def send(self, reply: Any, status: int) -> None:
                data = (reply if isinstance(reply, str) else json.dumps(reply)).encode()
                kind = "text/html" if isinstance(reply, str) else "application/json"
                try:
                    self.send_response(status)
                    self.send_header("Content-Type", kind)
                    self.send_header("Content-Length", str(len(data)))
                    self.send_header("retry-after-ms", "1")
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    pass  # the client has disconnected

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def reply(self, body: dict[str, Any]) -> Reply:
        """Return the reply to a request; it may wait."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop the endpoint."""
        self.server.shutdown()
        self.server.server_close()
