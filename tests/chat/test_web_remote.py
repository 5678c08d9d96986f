"""The web page's routes at a worker and their client. Gradio is not needed."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from eagle_fsd import AcceptanceConfig, EagleFSD
from eagle_fsd.chat.backend import (
    About,
    Backend,
    BackendError,
    LocalBackend,
    Update,
    request_params,
)
from eagle_fsd.chat.config import AnswerOptions, Limits
from eagle_fsd.chat.remote_backend import STREAM_ROUTE, RemoteBackend, add_page_routes
from eagle_fsd.chat.request_body import RequestError, read_json
from eagle_fsd.utils.chat_templates import Chat, load_chat_template

HELLO = [{"role": "user", "content": "Hello!"}]


class Server:
    """An application served by a thread at a free port."""

    def __init__(self, app: FastAPI) -> None:
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        config = uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],), daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)


def controller_app(addresses: Mapping[str, str]) -> FastAPI:
    """Build a stand-in for FastChat's controller, given worker addresses by model name."""
    app = FastAPI()

    @app.post("/refresh_all_workers")
    async def refresh() -> None: ...

    @app.post("/list_models")
    async def models() -> dict[str, Any]:
        return {"models": list(addresses)}

    @app.post("/get_worker_address")
    async def address(request: Request) -> dict[str, Any]:
        return {"address": addresses.get((await request.json())["model"], "")}

    return app


@pytest.fixture(scope="module")
def local(model: EagleFSD) -> Iterator[LocalBackend]:
    limits = Limits(max_body=5000)
    backend = LocalBackend(model, load_chat_template(model.tokenizer), limits, "pair")
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def worker(local: LocalBackend) -> Iterator[Server]:
    app = FastAPI()

    async def read_body(request: Request) -> dict[str, Any]:
        data = await request.body()
        if len(data) > local.about.limits.max_body:
            raise RequestError("the request is too large")
        return read_json(data)

    @app.exception_handler(RequestError)
    async def rejected(_: Request, error: RequestError) -> JSONResponse:
        return JSONResponse({"text": str(error), "error_code": error.code}, status_code=400)

    add_page_routes(app, local, read_body)
    server = Server(app)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def controller(worker: Server) -> Iterator[Server]:
    """A controller with a worker, and with one that does not have the page's routes."""
    other = Server(FastAPI())
    server = Server(controller_app({"pair": worker.address, "zz-other": other.address}))
    yield server
    server.stop()
    other.stop()


def ask(backend: Backend, chat: Chat = HELLO, method: str = "fsd", **params: Any) -> list[Update]:
    """Return an answer's updates; ``params`` override the request's."""

    async def run() -> list[Update]:
        options, acceptance = AnswerOptions(max_new_tokens=24), AcceptanceConfig(threshold=0.3)
        request = {**request_params(chat, options, acceptance), **params}
        return [update async for update in backend.stream(request, method)]

    return asyncio.run(run())


def test_remote_answers_equal_local_ones(local: LocalBackend, controller: Server) -> None:
    remote = RemoteBackend.connect(controller.address)
    assert remote.about == local.about
    expected = [token for update in ask(local) for token in update.tokens]
    updates = ask(remote)
    tokens = [token for update in updates for token in update.tokens]
    assert [(t.id, t.text, t.origin) for t in tokens] == [
        (t.id, t.text, t.origin) for t in expected
    ]
    assert [t.divergence for t in tokens] == pytest.approx(
        [t.divergence for t in expected], abs=1e-4
    )
    assert updates[-1].finish_reason in ("stop", "length")
    assert updates[-1].stats["tau"] > 1
    assert ask(remote, method="ar")[-1].stats["tau"] == 1.0


def test_another_worker_is_asked_if_one_refuses_the_connection(worker: Server) -> None:
    """The controller names a dead worker until it is told to check all of them."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        addresses = {"pair": f"http://127.0.0.1:{unused.getsockname()[1]}"}
    app = controller_app(addresses)
    live = {"pair": worker.address}
    remote = RemoteBackend("", "pair", About("pair", AcceptanceConfig(), Limits()))
    app.router.routes = [item for item in app.router.routes if item.path != "/refresh_all_workers"]

    @app.post("/refresh_all_workers")
    async def refresh() -> None:
        addresses.update(live)

    server = Server(app)
    remote.controller = server.address
    assert ask(remote)[-1].finish_reason in ("stop", "length")
    live["pair"] = addresses["pair"] = "http://127.0.0.1:9"
    with pytest.raises(BackendError, match="no worker can be reached"):
        ask(remote)
    server.stop()


def test_worker_errors_reach_the_client(controller: Server) -> None:
    remote = RemoteBackend.connect(controller.address, "pair")
    with pytest.raises(BackendError, match="temperature must be"):
        ask(remote, temperature=-7)
    with pytest.raises(BackendError, match="too large"):
        ask(remote, [{"role": "user", "content": "x" * 6000}])


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({}, "params must be an object"),
        ({"params": []}, "params must be an object"),
        ({"params": {}, "method": "beam"}, "method must be one of fsd, ar; got 'beam'"),
    ],
)
def test_malformed_stream_requests_are_rejected(
    worker: Server, body: dict[str, Any], error: str
) -> None:
    reply = httpx.post(worker.address + STREAM_ROUTE, json=body, trust_env=False)
    assert reply.status_code == 400
    assert reply.json()["text"] == error


def test_closing_the_stream_cancels_the_decoding(local: LocalBackend, controller: Server) -> None:
    remote = RemoteBackend.connect(controller.address)

    async def disconnect() -> None:
        stream = remote.stream(request_params(HELLO, AnswerOptions(max_new_tokens=100_000)))
        await anext(stream)
        await stream.aclose()

    asyncio.run(disconnect())
    deadline = time.monotonic() + 60
    while len(local.queue):
        assert time.monotonic() < deadline, "the closed request is still being decoded"
        time.sleep(0.02)


def test_connect_reports_unusable_controllers_and_workers(controller: Server) -> None:
    with pytest.raises(BackendError, match="does not support the web page"):
        RemoteBackend.connect(controller.address, "zz-other")
    with pytest.raises(BackendError, match="no worker for nobody is registered"):
        RemoteBackend.connect(controller.address, "nobody")
    unreachable = r"no worker can be reached through http://127\.0\.0\.1:9: "
    with pytest.raises(BackendError, match=unreachable):
        RemoteBackend.connect("http://127.0.0.1:9")
    empty, other = Server(controller_app({})), Server(FastAPI())
    with pytest.raises(BackendError, match="no worker is registered"):
        RemoteBackend.connect(empty.address)
    with pytest.raises(BackendError, match="is not a FastChat controller"):
        RemoteBackend.connect(other.address)
    empty.stop()
    other.stop()
