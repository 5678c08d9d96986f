"""Servers in this process and in processes of their own, and what tests send to them."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai

from eagle_fsd import EagleFSD
from eagle_fsd.chat.backend import LocalBackend
from eagle_fsd.chat.config import Limits
from eagle_fsd.chat.serve.api import api_app, api_error
from eagle_fsd.chat.serve.connections import BoundedServer
from eagle_fsd.chat.serve.guard import ANYONE, Access, Guard
from eagle_fsd.utils.chat_templates import load_chat_template

#: Seconds that anything may take on a busy machine; what takes longer hangs.
TIMEOUT = 180
NAME = "eagle-fsd-bundled"
QUESTION = "Mia has 8 apples at home. Then she gives 3 apples to Tom. How many apples are left?"
HELLO = [{"role": "user", "content": "Hello!"}]
EXACT = {"fsd": {"threshold": 0.0}}
#: Options of an answer that ends only at its maximum length: tokens become more likely with each
#: occurrence.
ENDLESS = {"temperature": 2, "seed": 5, "frequency_penalty": -2, "presence_penalty": -2}
#: How many requests may wait at the shared server, and how many are decoded at once.
MAX_WAITING, MAX_BATCH = 24, 4
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def seconds_until(condition: Callable[[], bool], timeout: float = TIMEOUT) -> float:
    """Wait for a condition; return the seconds it took, at least the timeout if it is not met."""
    begin = time.monotonic()
    while not condition() and time.monotonic() - begin < timeout:
        time.sleep(0.01)
    return time.monotonic() - begin


class ServerThread:
    """An application served by a thread of this process, with options of BoundedServer."""

    def __init__(self, app: Any, **options: Any) -> None:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = BoundedServer(app, **options)
        self.thread = threading.Thread(target=self.server.run, args=([listener],), daemon=True)
        self.thread.start()
        assert seconds_until(lambda: self.server.started, 30) < 30
        self.http = httpx.Client(base_url=self.url, trust_env=False, timeout=TIMEOUT)

    def stop(self) -> None:
        self.http.close()
        self.server.should_exit = True
        self.thread.join(TIMEOUT)


class APIThread(ServerThread):
    """The API over a pair in this process; ``limits`` are options of :class:`Limits`."""

    def __init__(
        self,
        model: EagleFSD,
        access: Access = ANYONE,
        shutdown_timeout: float = 0.0,
        **limits: Any,
    ) -> None:
        bounds, template = Limits(**limits), load_chat_template(model.tokenizer)
        self.backend = LocalBackend(model, template, bounds, [NAME])
        app = Guard(api_app(self.backend), access, bounds.max_body, api_error)
        super().__init__(app, queue=self.backend.queue, shutdown_timeout=shutdown_timeout)

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=key,
            max_retries=0,
            timeout=TIMEOUT,
            http_client=httpx.Client(trust_env=False),
        )

    def queue_length(self) -> int:
        return len(self.backend.queue)

    def answer(self) -> str:
        """Return the answer to a fixed request, which is always the same."""
        return fixed_answer(self.http)

    def stop(self) -> None:
        super().stop()
        self.backend.close()


def fixed_answer(http: httpx.Client) -> str:
    """Return the answer to a fixed request, which is always the same."""
    body = {"model": NAME, "messages": HELLO, "temperature": 0, "max_tokens": 64, **EXACT}
    return http.post(CHAT, json=body).json()["choices"][0]["message"]["content"]


class ServerProcess:
    """``eagle-fsd`` with these arguments in a process of its own, from when it is ready.

    ``files`` limits its open files.
    """

    def __init__(
        self,
        *arguments: str,
        probe: str = "/health",
        files: int | None = None,
        **environment: str,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        descriptor, name = tempfile.mkstemp(suffix=".log")
        self.log = Path(name)

        def limit_files() -> None:
            if files is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

        with open(descriptor, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "eagle_fsd.cli", *arguments, "--port", str(self.port)],
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                stdout=log,
                stderr=log,
                preexec_fn=limit_files,
            )
        self.http = httpx.Client(base_url=self.url, trust_env=False, timeout=TIMEOUT)

        def ready() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(httpx.HTTPError):
                return self.http.get(probe).status_code == 200
            return False

        assert seconds_until(ready) < TIMEOUT, self.log.read_text()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit status."""
        self.http.close()
        self.process.send_signal(number)
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()
            self.log.unlink(missing_ok=True)
