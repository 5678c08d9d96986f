"""What stands around FastChat's API server, without a server: events, choices, the controller."""

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

from eagle_fsd.chat.serve.api import upstream as api_worker
from eagle_fsd.chat.serve.api.app import AroundFastChat, api_app
from eagle_fsd.chat.serve.api.replies import Reply, usage_of
from eagle_fsd.chat.serve.api.requests import Extras

NOWHERE = "http://127.0.0.1:1"


def output(text: str, prompt: int = 4, new: int = 3, **more: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    return {"text": text, "error_code": 0, "usage": usage, "finish_reason": "stop", **more}


def told(extras: Extras, events: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """What becomes of events of FastChat's server: each ``(outputs so far, choice)``."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def work() -> None:
        reply = Reply(send, extras)
        headers = [(b"content-type", b"text/event-stream")]
        await reply({"type": "http.response.start", "status": 200, "headers": headers})
        for outputs, choice in events:
            while len(extras.outputs) < outputs:
                extras.outputs.append({})
            chunk = {"id": "1", "object": "text_completion", "choices": [choice]}
            body = b"data: " + json.dumps(chunk).encode() + b"\n\n"
            await reply({"type": "http.response.body", "body": body, "more_body": True})
        done = {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False}
        await reply(done)

    asyncio.run(work())
    data = b"".join(item.get("body", b"") for item in sent).decode().split("\n\n")
    return [json.loads(line[6:])["choices"][0] for line in data if line.startswith("data: {")]


def column(*tokens: str) -> dict[str, list[Any]]:
    return {
        "tokens": list(tokens),
        "token_logprobs": [-1.0 for _ in tokens],
        "top_logprobs": [None for _ in tokens],
        "text_offset": [0 for _ in tokens],
    }


def test_choices_of_several_prompts_are_counted_on_in_a_stream() -> None:
    """FastChat counts anew for every prompt, and tells last what ended without a text."""
    found = told(
        Extras(chat=False, stream=True),
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
    assert [(item["index"], item["text"]) for item in found] == [
        *((0, "a"), (1, "b"), (2, "c"), (3, "d")),
        *((0, ""), (2, ""), (3, "")),
    ]


@pytest.mark.parametrize("chat", [True, False])
def test_each_choice_has_its_own_log_probabilities(chat: bool) -> None:
    """Those of tokens without a text, as the end token's is, come with the choice's end."""
    extras = Extras(chat=chat, logprobs=True, stream=True)
    extras.pending = {0: column("a"), 1: column("b", "</s>")}

    def choice(index: int, text: str | None, end: str | None) -> dict[str, Any]:
        said = {"delta": {"content": text}} if chat else {"text": text or ""}
        return {"index": index, **said, "finish_reason": end}

    events = [(1, choice(0, "a", None)), (2, choice(1, "b", None)), (2, choice(0, None, "stop"))]
    real = Reply._complete_choice

    def with_an_end(self: Reply, item: dict[str, Any], said: bool) -> None:
        if not said:
            extras.pending[0] = column("</s>")
        real(self, item, said)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reply, "_complete_choice", with_an_end)
        found = told(extras, events)

    def tokens(item: dict[str, Any]) -> list[str]:
        columns = item["logprobs"]
        return [entry["token"] for entry in columns["content"]] if chat else columns["tokens"]

    assert [(item["index"], tokens(item)) for item in found] == [
        (0, ["a"]),
        (1, ["b", "</s>"]),
        (0, ["</s>"]),
    ]


def test_a_prompt_is_counted_once() -> None:
    extras = Extras(choices=2)
    extras.outputs = [output("a"), output("b"), output("c", prompt=9), output("d", prompt=9)]
    usage = usage_of(extras)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (13, 12)
    assert usage["total_tokens"] == 25


@pytest.mark.parametrize("refused", [None, 2])
def test_choices_go_one_after_the_other(
    refused: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a request would fill the worker's line by itself; after a refusal none is decoded."""
    running, most, asked = 0, 0, 0

    async def stream(params: dict[str, Any], worker: str) -> AsyncIterator[dict[str, Any]]:
        nonlocal running, most, asked
        asked, running = asked + 1, running + 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        yield {"text": "full", "error_code": 42903} if asked == refused else output("x")

    monkeypatch.setattr(api_worker, "generate_stream", stream)

    async def work() -> list[dict[str, Any]]:
        api_worker.EXTRAS.set(Extras())
        tasks = [asyncio.create_task(api_worker.generate({}, NOWHERE)) for _ in range(5)]
        return await asyncio.gather(*tasks)

    codes = [found["error_code"] for found in asyncio.run(work())]
    assert most == 1
    assert asked == (refused or 5)
    assert codes == ([0] * 5 if refused is None else [0, *[42903] * 4])


@pytest.mark.parametrize(
    ("models", "code", "words"),
    [
        (["b", "a"], 40301, "only a, b allowed here; got c"),
        ([], 50005, "no worker has registered"),
        ('{"error_code": 50001}', 50005, "the controller does not answer"),
        (OSError("refused"), 50005, "the controller does not answer"),
        (["c"], None, ""),
    ],
)
def test_what_is_said_of_models(models: Any, code: int | None, words: str) -> None:
    async def fetch(*_: Any) -> Any:
        if isinstance(models, Exception):
            raise models
        return models

    server = SimpleNamespace(
        app_settings=SimpleNamespace(controller_address=NOWHERE),
        fetch_remote=fetch,
        create_error_response=lambda *error: error,
    )
    check = api_worker.check_model_of(server)
    error = asyncio.run(check(SimpleNamespace(model="c")))
    assert error == (None if code is None else (code, words))


def get(app: AroundFastChat, path: str, **headers: str) -> httpx.Response:
    async def work() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(work())


def test_fastchat_leaves_no_log_in_the_folder(tmp_path: Path) -> None:
    """Nor does it where something of it was imported before."""
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


def test_the_list_of_models_fails_as_openais_does() -> None:
    """With the controller gone, and with a wrong key."""
    reply = get(api_app(NOWHERE), "/v1/models")
    assert reply.status_code == 503
    assert reply.json()["error"]["type"] == "server_error"
    reply = get(api_app(NOWHERE, ["key"]), "/v1/models", authorization="Bearer other")
    assert reply.status_code == 401
    assert reply.json()["error"]["code"] == "invalid_api_key"
    api_app(NOWHERE)


def test_a_worker_whose_machine_dies_is_noticed() -> None:
    """An answer may take as long as it likes, but the connection is looked after."""

    async def options() -> dict[str, int]:
        async def hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(hello, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            async with (
                api_worker._client() as client,
                client.stream("GET", f"http://{host}:{port}") as reply,
            ):
                stream = reply.extensions["network_stream"]
                connection = stream.get_extra_info("socket")
                found = {"keep": connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)}
                for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"):
                    if hasattr(socket, name):
                        number = getattr(socket, name)
                        found[name] = connection.getsockopt(socket.IPPROTO_TCP, number)
                return found

    found = asyncio.run(options())
    assert found.pop("keep")
    assert all(0 < value <= 15 for value in found.values())
