"""The web page's way to a worker and back; gradio itself is not needed."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from eagle_fsd import EagleFSD
from eagle_fsd.chat.backend import BackendError, LocalBackend, Update, request
from eagle_fsd.chat.config import Limits
from eagle_fsd.chat.remote_backend import RemoteBackend, add_page_routes
from eagle_fsd.chat.requests import RequestError, read_json
from eagle_fsd.utils.chat_templates import chat_format

HELLO = [{"role": "user", "content": "Hello!"}]


class Server:
    """An application at a port of its own, in a thread of its own."""

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


def controller(addresses: Mapping[str, str]) -> FastAPI:
    """What FastChat's controller answers of its workers."""
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
def local() -> Iterator[LocalBackend]:
    model = EagleFSD.from_pretrained()
    found = LocalBackend(model, chat_format(model.tokenizer), Limits(max_body=5000), "pair")
    yield found
    found.close()


@pytest.fixture(scope="module")
def servers(local: LocalBackend) -> Iterator[Server]:
    """A controller that knows the pair's worker, and one that knows nothing of the page."""
    app = FastAPI()

    async def body(request: Request) -> dict[str, Any]:
        data = await request.body()
        if len(data) > local.about.limits.max_body:
            raise RequestError("the request is larger than it may be")
        return read_json(data)

    @app.exception_handler(RequestError)
    async def refused(_: Request, error: RequestError) -> JSONResponse:
        return JSONResponse({"text": str(error), "error_code": error.code}, status_code=400)

    add_page_routes(app, local, body)
    worker, other = Server(app), Server(FastAPI())
    found = Server(controller({"pair": worker.address, "zz-other": other.address}))
    yield found
    for server in (found, worker, other):
        server.stop()


def ask(backend: Any, chat: Any = HELLO, plain: bool = False, **options: Any) -> list[Update]:
    async def collect() -> list[Update]:
        params = request(chat, {"max_new_tokens": 24, **options}, {"threshold": 0.3})
        return [update async for update in backend.stream(params, plain)]

    return asyncio.run(collect())


def test_the_same_answer_as_in_the_workers_own_process(
    local: LocalBackend, servers: Server
) -> None:
    remote = RemoteBackend(servers.address)
    assert remote.about == local.about
    here = [token for update in ask(local) for token in update.tokens]
    there = ask(remote)
    found = [token for update in there for token in update.tokens]
    assert [(t.id, t.text, t.origin) for t in found] == [(t.id, t.text, t.origin) for t in here]
    assert [t.divergence for t in found] == pytest.approx([t.divergence for t in here], abs=1e-4)
    assert there[-1].finish_reason in ("stop", "length")
    assert there[-1].figures["tau"] > 1
    assert ask(remote, plain=True)[-1].figures["tau"] == 1.0


def test_refusals_travel(servers: Server) -> None:
    remote = RemoteBackend(servers.address, "pair")
    with pytest.raises(BackendError, match="temperature must be between"):
        ask(remote, temperature=7)
    with pytest.raises(BackendError, match="larger than it may be"):
        ask(remote, [{"role": "user", "content": "x" * 6000}])


def test_leaving_ends_the_workers_decoding(local: LocalBackend, servers: Server) -> None:
    remote = RemoteBackend(servers.address)

    async def leave() -> None:
        params = request(HELLO, {"max_new_tokens": 100_000, "stop_token_ids": []})
        stream = remote.stream(params)
        await anext(stream)
        await stream.aclose()

    asyncio.run(leave())
    until = time.monotonic() + 60
    while len(local.queue):
        assert time.monotonic() < until, "it goes on decoding for nobody"
        time.sleep(0.02)


def test_controllers_and_workers_that_are_of_no_use(servers: Server) -> None:
    with pytest.raises(BackendError, match="nothing for the web page"):
        RemoteBackend(servers.address, "zz-other")
    with pytest.raises(BackendError, match="knows no worker of nobody"):
        RemoteBackend(servers.address, "nobody")
    with pytest.raises(BackendError, match=r"no worker answers through http://127\.0\.0\.1:9"):
        RemoteBackend("http://127.0.0.1:9")
    empty, another = Server(controller({})), Server(FastAPI())
    with pytest.raises(BackendError, match="knows no worker"):
        RemoteBackend(empty.address)
    with pytest.raises(BackendError, match="is no controller"):
        RemoteBackend(another.address)
    empty.stop()
    another.stop()
