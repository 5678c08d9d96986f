"""A stub of an OpenAI-compatible server that rewrites chats."""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "org/target"
KEY = "secret-key"
Messages = Sequence[dict[str, str]]


def answer(messages: Messages) -> str:
    """Return an answer that depends on every message of the prompt."""
    return f"answer {zlib.crc32(json.dumps(messages).encode()) % 10_000}"


class StubServer:
    """The server.

    Attributes:
        url: The base URL.
        requests: The bodies of all requests in order of arrival.
        keys: Their Authorization headers.
        active: Number of requests that are being answered.
        peak: Maximum of ``active``.
        intercept: Called with the messages of a request; it may wait, or return the status and the
            error message of a failure.
    """

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.active = self.peak = 0
        self.intercept: Callable[[Messages], tuple[int, str] | None] = lambda messages: None
        self._lock = threading.Lock()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, reply = stub.reply(self.path, self.headers["Authorization"], body)
                data = json.dumps(reply).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
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

    def reply(self, path: str, key: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self._lock:
            self.requests.append(body)
            self.keys.append(key)
            self.active += 1
            self.peak = max(self.peak, self.active)
        try:
            failure = self.intercept(body["messages"])
        finally:
            with self._lock:
                self.active -= 1
        if path != "/v1/chat/completions":
            failure = 404, f"no such path {path}"
        elif body["model"] != MODEL:
            failure = 404, f"the model {body['model']} does not exist"
        if failure is not None:
            return failure[0], {"error": {"message": failure[1], "code": failure[0]}}
        message = {"role": "assistant", "content": f" {answer(body['messages'])}\n"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return 200, {"id": "1", "object": "chat.completion", "created": 0, "choices": [choice]}

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
