"""The middleware around FastChat's API server, without a server."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from processes import CHAT, free_ports

from eagle_fsd.chat import request_body
from eagle_fsd.chat.serve.api import upstream
from eagle_fsd.chat.serve.api.app import OpenAICompatMiddleware, api_app
from eagle_fsd.chat.serve.api.replies import ResponseWriter, combined_usage, translate_error
from eagle_fsd.chat.serve.api.requests import RequestContext

NOWHERE = "http://127.0.0.1:1"


def worker_output(text: str, prompt: int = 4, new: int = 3) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    return {"text": text, "error_code": 0, "usage": usage, "finish_reason": "stop"}


def write_stream(context: RequestContext, events: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Write a stream of FastChat's server; return the choices that the client receives.

    Args:
        context: The request's context.
        events: For each chunk, the number of worker outputs so far, its choice, and optionally
            log-probabilities of the choices that arrived with it.
    """
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def work() -> None:
        writer = ResponseWriter(send, context)
        headers = [(b"content-type", b"text/event-stream")]
        await writer({"type": "http.response.start", "status": 200, "headers": headers})
        for outputs, choice, *pending in events:
            context.outputs += [{} for _ in range(outputs - len(context.outputs))]
            context.pending_logprobs |= pending[0] if pending else {}
            chunk = {"id": "1", "object": "text_completion", "choices": [choice]}
            body = b"data: " + json.dumps(chunk).encode() + b"\n\n"
            await writer({"type": "http.response.body", "body": body, "more_body": True})
        done = {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False}
        await writer(done)

    asyncio.run(work())
    data = b"".join(item.get("body", b"") for item in sent).decode().split("\n\n")
    return [json.loads(line[6:])["choices"][0] for line in data if line.startswith("data: {")]


def logprobs_of(*tokens: str) -> dict[str, list[Any]]:
    return {
        "tokens": list(tokens),
        "token_logprobs": [-1.0 for _ in tokens],
        "top_logprobs": [None for _ in tokens],
        "text_offset": [0 for _ in tokens],
    }


def test_streamed_choices_are_numbered_across_prompts() -> None:
    """FastChat restarts for each prompt, and sends finish reasons without text at the end."""
    choices = write_stream(
        RequestContext(chat=False, stream=True),
        [
            (1, {"index": 0, "text": "a", "finish_reason": None}),
            (2, {"index": 1, "text": "b", "finish_reason": "length"}),
            (3, {"index": 0, "text": "c", "finish_reason": None}),
            (4, {"index": 1, "text": "d", "finish_reason": None}),
            (4, {"index": 0, "text": "", "finish_reason": "stop"}),
            (4, {"index": 0, "text": "", "finish_reason": "stop"}),
            (4, {"index": 1, "text": "", "finish_reason": "stop"}),
        ],
    )
    assert [(item["index"], item["text"]) for item in choices] == [
        *((0, "a"), (1, "b"), (2, "c"), (3, "d")),
        *((0, ""), (2, ""), (3, "")),
    ]


@pytest.mark.parametrize("chat", [True, False])
def test_streamed_choices_have_their_own_logprobs(chat: bool) -> None:
    """Those of tokens without text, such as the end token, come with the finish reason."""

    def choice(index: int, text: str | None, finish_reason: str | None) -> dict[str, Any]:
        content = {"delta": {"content": text}} if chat else {"text": text or ""}
        return {"index": index, **content, "finish_reason": finish_reason}

    choices = write_stream(
        RequestContext(chat=chat, logprobs=True, stream=True),
        [
            (1, choice(0, "a", None), {0: logprobs_of("a")}),
            (2, choice(1, "b", None), {1: logprobs_of("b", "</s>")}),
            (2, choice(0, None, "stop"), {0: logprobs_of("</s>")}),
        ],
    )

    def tokens(choice: dict[str, Any]) -> list[str]:
        logprobs = choice["logprobs"]
        return [entry["token"] for entry in logprobs["content"]] if chat else logprobs["tokens"]

    assert [(choice["index"], tokens(choice)) for choice in choices] == [
        (0, ["a"]),
        (1, ["b", "</s>"]),
        (0, ["</s>"]),
    ]


def test_prompts_are_counted_once_for_all_choices() -> None:
    context = RequestContext(choices=2)
    context.outputs = [
        *(worker_output("a"), worker_output("b")),
        *(worker_output("c", prompt=9), worker_output("d", prompt=9)),
    ]
    usage = combined_usage(context)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (13, 12)
    assert usage["total_tokens"] == 25


@pytest.mark.parametrize("rejected", [None, 2])
def test_choices_are_generated_one_after_the_other(
    rejected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request does not fill the worker's queue; after an error no further choice is decoded."""
    running, peak, calls = 0, 0, 0

    async def stream(params: dict[str, Any], worker: str) -> AsyncIterator[dict[str, Any]]:
        nonlocal running, peak, calls
        calls, running = calls + 1, running + 1
        peak = max(peak, running)
        await asyncio.sleep(0.001)
        running -= 1
        rejection = {"text": "full", "error_code": 42903}
        yield rejection if calls == rejected else worker_output("x")

    monkeypatch.setattr(upstream, "generate_stream", stream)

    async def work() -> list[dict[str, Any]]:
        upstream.REQUEST_CONTEXT.set(RequestContext())
        tasks = [asyncio.create_task(upstream.generate({}, NOWHERE)) for _ in range(5)]
        return await asyncio.gather(*tasks)

    codes = [output["error_code"] for output in asyncio.run(work())]
    assert peak == 1
    assert calls == (rejected or 5)
    assert codes == ([0] * 5 if rejected is None else [0, *[42903] * 4])


@pytest.mark.parametrize(
    ("models", "code", "message"),
    [
        (["b", "a"], 40301, "model must be one of a, b; got c"),
        ([], 50005, "no worker has registered"),
        ('{"error_code": 50001}', 50005, "the controller does not answer"),
        (OSError("refused"), 50005, "the controller does not answer"),
        (["c"], None, ""),
    ],
)
def test_models_are_checked_with_the_controller(
    models: Any, code: int | None, message: str
) -> None:
    async def fetch(*_: Any) -> Any:
        if isinstance(models, Exception):
            raise models
        return models

    server: Any = SimpleNamespace(
        app_settings=SimpleNamespace(controller_address=NOWHERE),
        fetch_remote=fetch,
        create_error_response=lambda *error: error,
    )
    error = asyncio.run(upstream.make_check_model(server)(SimpleNamespace(model="c")))
    assert error == (None if code is None else (code, message))


def test_unreachable_workers_give_status_503() -> None:
    (port,) = free_ports(1)
    worker = f"http://127.0.0.1:{port}"

    async def work() -> list[dict[str, Any]]:
        streamed = [item async for item in upstream.generate_stream({"prompt": "a"}, worker)]
        whole = await upstream.generate({"prompt": "a"}, worker)
        return [*streamed, whole, await upstream.ask(worker, "count_token", {})]

    outputs = asyncio.run(work())
    assert len(outputs) == 3
    assert {translate_error(output, 400).status for output in outputs} == {503}


def get(app: OpenAICompatMiddleware, path: str, **headers: str) -> httpx.Response:
    async def work() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(work())


def test_errors_of_get_requests_have_openais_format() -> None:
    response = get(api_app(NOWHERE), "/v1/models")
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "server_error"
    response = get(api_app(NOWHERE, ["key"]), "/v1/models", authorization="Bearer other")
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    api_app(NOWHERE)


def test_incomplete_bodies_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "BODY_TIMEOUT", 0.05)
    sent: list[Any] = []

    async def never() -> Any:
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        sent.append(message)

    async def work() -> None:
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers}
        await OpenAICompatMiddleware(never, 99)(scope, never, send)  # type: ignore[arg-type]

    asyncio.run(work())
    assert sent[0]["status"] == 408


def test_import_of_fastchat_creates_no_log_files(tmp_path: Path) -> None:
    """Even if another part of FastChat was imported before."""
    script = (
        "import sys, fastchat.utils\n"
        "from eagle_fsd.chat.serve.api.app import import_fastchat\n"
        "streams = sys.stdout, sys.stderr\n"
        "import_fastchat('openai_api_server')\n"
        "assert streams == (sys.stdout, sys.stderr)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "LOGDIR"}
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, check=True)
    assert list(tmp_path.iterdir()) == []


def test_servers_start_without_torch() -> None:
    script = (
        "import sys\n"
        "import eagle_fsd.chat.serve.cluster\n"
        "from eagle_fsd.chat.serve.servers import api_app, import_fastchat\n"
        "import_fastchat('controller')\n"
        "api_app('http://127.0.0.1:1')\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_connections_to_workers_are_probed() -> None:
    """An answer may take any time, but a machine that dies must be noticed."""

    async def options() -> dict[str, int]:
        async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            async with (
                upstream._client() as client,
                client.stream("GET", f"http://{host}:{port}") as response,
            ):
                stream = response.extensions["network_stream"]
                connection = stream.get_extra_info("socket")
                found = {"enabled": connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)}
                for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"):
                    if hasattr(socket, name):
                        number = getattr(socket, name)
                        found[name] = connection.getsockopt(socket.IPPROTO_TCP, number)
                return found

    found = asyncio.run(options())
    assert found.pop("enabled")
    assert all(0 < value <= 15 for value in found.values())
