"""The API with stand-ins for controller and workers."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from processes import CHAT, COMPLETIONS, EMBEDDINGS, free_ports
from test_web_remote import Server

from eagle_fsd.chat.request_body import MAX_ERROR_LENGTH
from eagle_fsd.chat.serve.api import workers as workers_module
from eagle_fsd.chat.serve.api.app import api_app
from eagle_fsd.chat.serve.api.errors import ApiError
from eagle_fsd.chat.serve.api.schemas import (
    MAX_MEMBERS,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
)
from eagle_fsd.chat.serve.api.workers import MAX_ATTEMPTS, MAX_CONCURRENT_CHOICES, Workers
from eagle_fsd.chat.serve.asgi import until_disconnected
from eagle_fsd.chat.wire_format import decode_chat

NOWHERE = "http://127.0.0.1:1"
HELLO = [{"role": "user", "content": "Hello!"}]
CHAT_BODY: dict[str, Any] = {"model": "pair", "messages": HELLO}
BODY: dict[str, Any] = {"model": "pair", "prompt": "Hello!"}
MODELS = {CHAT: ChatRequest, COMPLETIONS: CompletionRequest, EMBEDDINGS: EmbeddingRequest}
#: The outputs of a stand-in worker for a request.
Outputs = Callable[[dict[str, Any]], Awaitable[list[dict[str, Any]]]]


def output(text: str, finish_reason: str | None = None, **changes: Any) -> dict[str, Any]:
    """Build a worker's output: 4 prompt tokens and a token per character, two per step."""
    usage = {"prompt_tokens": 4, "completion_tokens": len(text), "total_tokens": 4 + len(text)}
    fsd = {"fuzzy_tokens": 0, "exact_tokens": len(text), "target_tokens": 0}
    values = {"text": text, "error_code": 0, "usage": usage, "finish_reason": finish_reason}
    return {**values, "logprobs": None, "fsd": {**fsd, "steps": len(text) / 2}, **changes}


def logprobs(*tokens: str) -> dict[str, list[Any]]:
    return {
        "tokens": list(tokens),
        "token_logprobs": [-1.0 for _ in tokens],
        "top_logprobs": [{token: -1.0} for token in tokens],
        "text_offset": [0 for _ in tokens],
    }


class StandIn:
    """A controller and a worker.

    Attributes:
        received: Parameters of all requests to the worker.
        addresses: What the controller answers when it is asked for a worker, in turn; the last
            answer is repeated.
        asked: How often the controller was asked.
        refreshed: How often the controller was told to look for its workers.
        running: Number of requests that the worker is answering; ``peak`` is the largest.
    """

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self.asked = self.refreshed = self.running = self.peak = 0
        self.outputs: Outputs = self.hello
        self.models = ["pair"]
        self.response: Response | None = None
        self.server = Server(self.app())
        self.addresses = [self.server.address]

    async def hello(self, params: dict[str, Any]) -> list[dict[str, Any]]:
        return [output("He"), output("Hello", "stop")]

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/list_models")
        async def list_models() -> Any:
            return {"models": self.models}

        @app.post("/get_worker_address")
        async def get_worker_address(request: Request) -> Any:
            self.asked += 1
            if (await request.json())["model"] not in self.models:
                return {"address": ""}
            return {"address": self.addresses[min(self.asked, len(self.addresses)) - 1]}

        @app.post("/refresh_all_workers")
        async def refresh_all_workers() -> None:
            self.refreshed += 1

        @app.post("/worker_generate_stream")
        async def generate(request: Request) -> Response:
            params = await request.json()
            self.received.append(params)
            if self.response is not None:
                return self.response

            async def stream() -> Any:
                self.running += 1
                self.peak = max(self.peak, self.running)
                try:
                    for item in await self.outputs(params):
                        yield json.dumps(item).encode() + b"\0"
                        await asyncio.sleep(0.01)
                finally:
                    self.running -= 1

            return StreamingResponse(stream())

        @app.post("/worker_get_embeddings")
        async def embed(request: Request) -> Any:
            params = await request.json()
            self.received.append(params)
            vectors = [[float(text), 1.0] for text in params["input"]]
            return {"embedding": vectors, "token_num": 2 * len(vectors)}

        return app

    def call(
        self, path: str, body: dict[str, Any] | None = None, method: str = "POST"
    ) -> httpx.Response:
        """Send a request to an API with this controller."""
        return call(self.server.address, path, body, method)


def call(
    controller: str,
    path: str,
    body: dict[str, Any] | None = None,
    method: str = "POST",
    key: str = "none",
) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}

    async def work() -> httpx.Response:
        transport = httpx.ASGITransport(api_app(controller), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, json=body, headers=headers)

    return asyncio.run(work())


def get(controller: str, path: str) -> httpx.Response:
    return call(controller, path, method="GET")


@pytest.fixture
def cluster() -> Iterator[StandIn]:
    stand_in = StandIn()
    yield stand_in
    stand_in.server.stop()


def events(response: httpx.Response) -> list[Any]:
    """Return the events of a stream; [DONE] becomes None."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line[6:] for line in response.text.split("\n\n") if line]
    return [None if line == "[DONE]" else json.loads(line) for line in lines]


def test_defaults_of_requests() -> None:
    (chat,) = ChatRequest.model_validate({**CHAT_BODY, "seed": None}).worker_requests()
    assert decode_chat(chat.pop("prompt")) == HELLO
    (completion,) = CompletionRequest.model_validate(BODY).worker_requests()
    assert completion.pop("prompt") == "Hello!"
    assert completion.pop("max_new_tokens") == 16  # as in OpenAI's API
    assert completion.pop("echo") is False
    assert completion == {name: value for name, value in chat.items() if value is not None}
    assert (chat["temperature"], chat["top_p"], chat["top_k"]) == (0.7, 1.0, -1)
    assert not {"seed", "max_new_tokens"} & chat.keys()  # the worker's


def test_parameters_reach_the_worker(cluster: StandIn) -> None:
    params = {
        **{"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.5},
        **{"presence_penalty": 1.0, "frequency_penalty": -1.0, "seed": 3, "stop": ["a"]},
        **{"stop_token_ids": [5], "ignore_eos": True, "min_tokens": 2, "fsd": {"threshold": 0.1}},
        "model": "pair",
    }
    given = {**params, "stop": "a", "stop_token_ids": [5], "user": "somebody"}
    assert cluster.call(CHAT, {**CHAT_BODY, **given, "max_tokens": 9}).status_code == 200
    assert cluster.call(CHAT, {**CHAT_BODY, **given, "max_completion_tokens": 9}).is_success
    chat, same = cluster.received
    assert chat == same
    assert decode_chat(chat.pop("prompt")) == HELLO
    assert chat.pop("logprobs", None) is None
    client = chat.pop("client")
    assert chat == {**params, "max_new_tokens": 9}
    body = {**given, "prompt": [1, 2], "echo": True, "logprobs": 2, "max_tokens": 0}
    assert cluster.call(COMPLETIONS, body).status_code == 200
    own = {"prompt_token_ids": [1, 2], "echo": True, "logprobs": 2, "max_new_tokens": 0}
    assert cluster.received[2] == {**params, **own, "client": client}


def test_clients_are_told_apart_by_their_keys(cluster: StandIn) -> None:
    """The workers get neither keys nor addresses."""
    for key in ("sk-one", "sk-one", "sk-two"):
        body = {**CHAT_BODY, "n": 2}
        assert call(cluster.server.address, CHAT, body, key=key).status_code == 200
    clients = [params["client"] for params in cluster.received]
    assert clients == [clients[0]] * 4 + [clients[4]] * 2
    assert clients[0] != clients[4]
    assert not any(word in client for client in clients for word in ("sk-", "127.0"))


def test_choices_have_different_seeds() -> None:
    """The same as if each prompt was sent alone."""
    body = {**BODY, "prompt": ["a", [1], "b"], "n": 2, "seed": 2**63 - 1}
    requests = CompletionRequest.model_validate(body).worker_requests()
    assert [request["seed"] for request in requests] == [2**63 - 1, 0] * 3
    assert [request.get("prompt") for request in requests] == ["a", "a", None, None, "b", "b"]
    assert requests[2]["prompt_token_ids"] == [1]


def test_messages_of_all_roles_and_forms() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b\x01"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "system", "content": "one"},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": [], "annotations": []},
        {"role": "developer", "content": "two"},
        {"role": "user", "content": ""},
    ]
    (request,) = ChatRequest.model_validate({**CHAT_BODY, "messages": messages}).worker_requests()
    assert decode_chat(request["prompt"]) == [
        {"role": "system", "content": "one\n\ntwo"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": ""},
    ]


@pytest.mark.parametrize(
    ("path", "changes", "message"),
    [
        (CHAT, {"foo": 1}, "foo is not supported"),
        (CHAT, {"prompt_token_ids": [1]}, "prompt_token_ids is not supported"),
        (CHAT, {"max_new_tokens": 1}, "max_new_tokens is not supported"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools is not supported"),
        (CHAT, {"logit_bias": {"5": 1}}, "logit_bias is not supported"),
        (CHAT, {"store": True}, "store must be False; got True"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format.type must be 'text'"),
        (CHAT, {"stream_options": {"x": 1}}, "stream_options.x is not supported"),
        (CHAT, {"temperature": 2.5}, "temperature must be less than or equal to 2; got 2.5"),
        (CHAT, {"temperature": "1"}, "temperature must be a valid number; got '1'"),
        (CHAT, {"top_k": 1.5}, "top_k must be a valid integer; got 1.5"),
        (CHAT, {"n": True}, "n must be a valid integer; got True"),
        (CHAT, {"n": 129}, "n must be less than or equal to 128; got 129"),
        (CHAT, {"max_tokens": 0}, "max_tokens must be greater than or equal to 1; got 0"),
        (
            CHAT,
            {"max_tokens": 1, "max_completion_tokens": 1},
            "the request must not set both max_tokens and max_completion_tokens",
        ),
        (CHAT, {"stop": [1]}, "stop must be a string or a list of strings"),
        (CHAT, {"logprobs": 1}, "logprobs must be a valid boolean; got 1"),
        (CHAT, {"top_logprobs": 2}, "the request must set logprobs with top_logprobs"),
        (CHAT, {"messages": None}, "messages is missing"),
        (CHAT, {"messages": []}, "messages must have at least 1 item"),
        (CHAT, {"messages": "Hello!"}, "messages must be a valid list; got 'Hello!'"),
        (CHAT, {"messages": [5]}, "messages.0 must be a valid dictionary"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content is missing"),
        (
            CHAT,
            {"messages": [{"role": "tool", "content": ""}]},
            "messages.0.role must be 'system', 'developer', 'user' or 'assistant'; got 'tool'",
        ),
        (CHAT, {"messages": [{**HELLO[0], "name": "Mia"}]}, "messages.0.name is not supported"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": ""}]}]},
            "messages.0.content must be a string or a list of parts of type text",
        ),
        (CHAT, {"messages": [{"role": "system", "content": "a"}]}, "must have a user message"),
        (COMPLETIONS, {"prompt": ""}, "prompt must be a non-empty string, a list of token ids"),
        (COMPLETIONS, {"prompt": []}, "prompt must be"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt must be"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt must be"),
        (COMPLETIONS, {"prompt": [1, True]}, "prompt must be"),
        (COMPLETIONS, {"prompt": ["a"] * 65, "n": 2}, "must not have more than 128 prompts"),
        (COMPLETIONS, {"max_tokens": 0}, "must set max_tokens to at least 1 unless echo is true"),
        (COMPLETIONS, {"best_of": 2}, "best_of must be 1; got 2"),
        (COMPLETIONS, {"suffix": "a"}, "suffix must be ''; got 'a'"),
        (COMPLETIONS, {"messages": HELLO}, "messages is not supported"),
        (EMBEDDINGS, {"input": [1, 2]}, "input must be a string or a list of strings"),
        (EMBEDDINGS, {"input": []}, "the request must have 1 to 2048 non-empty strings as input"),
        (EMBEDDINGS, {"input": ["a", ""]}, "non-empty strings"),
        (EMBEDDINGS, {"input": "a", "dimensions": 5}, "dimensions is not supported"),
    ],
)
def test_invalid_requests_are_explained(path: str, changes: Any, message: str) -> None:
    valid = {CHAT: CHAT_BODY, COMPLETIONS: BODY, EMBEDDINGS: {"model": "pair"}}[path]
    response = call(NOWHERE, path, {**valid, **changes})
    assert response.status_code == 400
    error = response.json()["error"]
    assert message in error["message"]
    assert error["message"].count("\n") == 0
    assert error["type"] == "invalid_request_error"
    assert error["param"] is None or error["message"].startswith(error["param"] + " ")


def test_objects_with_many_members_are_rejected_at_once() -> None:
    many = {f"{number:x}": 1 for number in range(MAX_MEMBERS)}
    for body in ({**CHAT_BODY, **many}, {**CHAT_BODY, "messages": [{**HELLO[0], **many}]}):
        assert "must not have more than 100 members" in call(NOWHERE, CHAT, body).text


def test_error_messages_are_shortened() -> None:
    assert len(ApiError("x" * 10**6).detail) == MAX_ERROR_LENGTH


def test_chat_response(cluster: StandIn) -> None:
    response = cluster.call(CHAT, {**CHAT_BODY, "n": 2})
    body = response.json()
    assert body.pop("id").startswith("chatcmpl-")
    assert abs(body.pop("created") - time.time()) < 60
    message = {"role": "assistant", "content": "Hello", "refusal": None}
    choice = {"message": message, "logprobs": None, "finish_reason": "stop"}
    assert body == {
        "object": "chat.completion",
        "model": "pair",
        "choices": [{**choice, "index": 0}, {**choice, "index": 1}],
        "usage": {
            **{"prompt_tokens": 4, "completion_tokens": 10, "total_tokens": 14},
            **{"fuzzy_tokens": 0, "exact_tokens": 10, "target_tokens": 0, "tau": 2.0},
        },
    }


def test_prompts_are_counted_once_for_all_choices(cluster: StandIn) -> None:
    body = cluster.call(COMPLETIONS, {**BODY, "prompt": ["a", "b", "c"], "n": 2}).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (12, 30)


def test_workers_of_fastchat_have_no_statistics(cluster: StandIn) -> None:
    async def outputs(_: Any) -> list[dict[str, Any]]:
        last = output("a", "length")
        del last["fsd"], last["logprobs"]
        return [last]

    cluster.outputs = outputs
    usage = cluster.call(CHAT, CHAT_BODY).json()["usage"]
    assert (usage["completion_tokens"], usage["exact_tokens"], usage["tau"]) == (1, 0, None)


@pytest.mark.parametrize("include_usage", [True, False])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_streamed_choices(path: str, include_usage: bool, cluster: StandIn) -> None:
    """Choices arrive in any order; tokens without text come with the next chunk or alone."""

    async def outputs(params: dict[str, Any]) -> list[dict[str, Any]]:
        first = output("a", logprobs=logprobs("a", "<b>"))
        held_back = output("a", logprobs=logprobs())
        return [first, held_back, output("a", "stop", logprobs=logprobs("</s>"))]

    cluster.outputs = outputs
    body = {**CHAT_BODY, "logprobs": True} if path == CHAT else {**BODY, "logprobs": 0}
    options = {"stream": True, "n": 2, "stream_options": {"include_usage": include_usage}}
    *chunks, done = events(cluster.call(path, {**body, **options}))
    assert done is None
    if include_usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 2
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["usage"] is None for chunk in chunks)
    for index in range(2):
        choices = [chunk["choices"][0] for chunk in chunks]
        choices = [choice for choice in choices if choice["index"] == index]
        if path == CHAT:
            assert choices.pop(0)["delta"] == {"role": "assistant", "content": ""}
            assert [choice["delta"] for choice in choices] == [{"content": "a"}, {}]
            found = [[item["token"] for item in c["logprobs"]["content"]] for c in choices]
            entry = choices[0]["logprobs"]["content"][1]
            alternative = {"token": "<b>", "logprob": -1.0, "bytes": [60, 98, 62]}
            assert entry == {**alternative, "top_logprobs": [alternative]}
        else:
            assert [choice["text"] for choice in choices] == ["a", ""]
            found = [choice["logprobs"]["tokens"] for choice in choices]
        assert found == [["a", "<b>"], ["</s>"]]
        assert [choice["finish_reason"] for choice in choices] == [None, "stop"]


def test_logprobs_of_prompts_begin_with_null(cluster: StandIn) -> None:
    async def outputs(_: Any) -> list[dict[str, Any]]:
        columns = {**logprobs("a", "b"), "token_logprobs": [None, -1.0]}
        columns["top_logprobs"][0] = None
        return [output("ab", "length", logprobs=columns)]

    cluster.outputs = outputs
    body = {**BODY, "echo": True, "logprobs": 1, "max_tokens": 0}
    choice = cluster.call(COMPLETIONS, body).json()["choices"][0]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0]
    assert choice["logprobs"]["top_logprobs"] == [None, {"b": -1.0}]
    assert choice["logprobs"]["text_offset"] == [0, 0]


def test_few_choices_are_decoded_at_a_time(cluster: StandIn) -> None:
    """A request for many choices does not fill the workers' queues."""

    async def outputs(params: dict[str, Any]) -> list[dict[str, Any]]:
        await asyncio.sleep(0.02 * (20 - int(params["prompt"])) / 20)
        return [output(params["prompt"], "stop")]

    cluster.outputs = outputs
    prompts = [str(number) for number in range(20)]
    choices = cluster.call(COMPLETIONS, {**BODY, "prompt": prompts}).json()["choices"]
    assert [choice["text"] for choice in choices] == prompts
    assert cluster.peak == MAX_CONCURRENT_CHOICES


def test_an_error_cancels_the_other_choices(cluster: StandIn) -> None:
    async def outputs(params: dict[str, Any]) -> list[dict[str, Any]]:
        if params["prompt"] == "1":
            return [output("full", error_code=42903)]
        await asyncio.sleep(0.5)
        return [output("")] * 1000

    cluster.outputs = outputs
    prompts = [str(number) for number in range(20)]
    begin = time.monotonic()
    response = cluster.call(COMPLETIONS, {**BODY, "prompt": prompts})
    assert response.status_code == 429
    assert time.monotonic() - begin < 5
    assert len(cluster.received) <= MAX_CONCURRENT_CHOICES + 1
    while cluster.running:
        assert time.monotonic() - begin < 5
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("code", "status", "kind", "name"),
    [
        (40001, 400, "invalid_request_error", None),
        (40302, 400, "invalid_request_error", None),
        (40303, 400, "invalid_request_error", "context_length_exceeded"),
        (42903, 429, "rate_limit_error", None),
        (50001, 500, "server_error", None),
    ],
)
def test_errors_of_workers_have_their_status(
    code: int, status: int, kind: str, name: str | None, stream: bool, cluster: StandIn
) -> None:
    async def outputs(_: Any) -> list[dict[str, Any]]:
        return [{"text": "why", "error_code": code}]

    cluster.outputs = outputs
    response = cluster.call(CHAT, {**CHAT_BODY, "stream": stream})
    assert response.status_code == status
    error = {"message": "why", "type": kind, "param": None, "code": name}
    assert response.json() == {"error": error}


def test_errors_during_a_stream_are_its_last_event(cluster: StandIn) -> None:
    for last in ({"text": "why", "error_code": 50001}, None):

        async def outputs(_: Any, last: Any = last) -> list[dict[str, Any]]:
            return [output("a"), *([last] if last else [])]

        cluster.outputs = outputs
        *chunks, error = events(cluster.call(CHAT, {**CHAT_BODY, "stream": True}))
        assert len(chunks) == 2
        expected = "why" if last else "the worker ended the answer early"
        assert error["error"]["message"] == expected
        status = cluster.call(CHAT, CHAT_BODY).status_code
        assert status == (500 if last else 503)


@pytest.mark.parametrize(
    ("worker_status", "body", "status", "message"),
    [
        (400, {"text": "why", "error_code": 40001}, 400, "why"),
        (413, {"text": "too large", "error_code": 40001}, 413, "too large"),
        (401, {"text": "a key is required", "error_code": 40101}, 502, "a key is required"),
        (404, {"detail": "Not Found"}, 502, "the worker returned HTTP status 404"),
        (500, [], 502, "the worker returned HTTP status 500"),
    ],
)
def test_http_errors_of_workers(
    worker_status: int, body: Any, status: int, message: str, cluster: StandIn
) -> None:
    """A client cannot mistake the cluster's key for its own."""
    cluster.response = JSONResponse(body, worker_status)
    response = cluster.call(CHAT, CHAT_BODY)
    assert response.status_code == status
    assert response.json()["error"]["message"] == message


@pytest.mark.parametrize("path", [CHAT, EMBEDDINGS])
def test_refused_connections_move_to_another_worker(path: str, cluster: StandIn) -> None:
    (dead,) = free_ports(1)
    cluster.addresses = [f"http://127.0.0.1:{dead}", "no URL", cluster.server.address]
    body = CHAT_BODY if path == CHAT else {"model": "pair", "input": "1"}
    assert cluster.call(path, body).status_code == 200
    assert (cluster.asked, cluster.refreshed, len(cluster.received)) == (3, 2, 1)


def test_some_workers_are_tried(cluster: StandIn) -> None:
    (dead,) = free_ports(1)
    cluster.addresses = [f"http://127.0.0.1:{dead}"]
    response = cluster.call(CHAT, {**CHAT_BODY, "stream": True})
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "no worker can be reached"
    assert cluster.asked == cluster.refreshed == MAX_ATTEMPTS


@contextmanager
def silent_worker(reply: bytes) -> Iterator[str]:
    """Run a server that closes each connection after these bytes; yield its URL."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        await writer.drain()
        writer.close()

    app = Server(FastAPI())  # provides an event loop in a thread
    loop = app.server.servers[0].get_loop()
    started = asyncio.run_coroutine_threadsafe(asyncio.start_server(respond, "127.0.0.1", 0), loop)
    server = started.result(10)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(server.close)
        app.stop()


@pytest.mark.parametrize("begun", [True, False])
def test_requests_that_reached_a_worker_are_not_sent_again(begun: bool, cluster: StandIn) -> None:
    """The worker may have begun to decode."""
    first = json.dumps(output("a")).encode() + b"\0"
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"
    with silent_worker(head + first if begun else b"") as address:
        cluster.addresses = [address, cluster.server.address]
        response = cluster.call(CHAT, {**CHAT_BODY, "stream": True})
        if begun:
            *chunks, error = events(response)
            assert chunks
            assert error["error"]["message"] == "the worker stopped during the response"
        else:
            assert response.status_code == 503
            assert response.json()["error"]["message"] == "the worker does not answer"
    assert (cluster.asked, cluster.received) == (1, [])


def test_unknown_models_and_missing_workers(cluster: StandIn) -> None:
    for path, body in ((CHAT, CHAT_BODY), (EMBEDDINGS, {"input": "1"})):
        response = cluster.call(path, {**body, "model": "other"})
        assert response.status_code == 404
        error = response.json()["error"]
        assert error["message"] == "model must be one of pair; got other"
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    cluster.models = []
    response = cluster.call(CHAT, CHAT_BODY)
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "no worker is registered"


def test_models(cluster: StandIn) -> None:
    cluster.models = ["b", "org/a"]
    found = get(cluster.server.address, "/v1/models").json()
    assert found["object"] == "list"
    assert [item["id"] for item in found["data"]] == ["b", "org/a"]
    card = get(cluster.server.address, "/v1/models/org/a").json()  # from another application
    assert {**card, "created": 0} == {**found["data"][1], "created": 0}
    response = get(cluster.server.address, "/v1/models/c")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_controller_that_does_not_answer() -> None:
    app = FastAPI()

    @app.post("/list_models")
    async def list_models() -> Any:
        return {"error": "this is no controller"}

    other = Server(app)
    try:
        for controller in (NOWHERE, other.address):
            for response in (get(controller, "/v1/models"), call(controller, CHAT, CHAT_BODY)):
                assert response.status_code == 503
                error = response.json()["error"]
                assert error["message"] == "the controller does not answer"
                assert error["type"] == "server_error"
    finally:
        other.stop()


def test_embeddings_are_sent_in_batches(cluster: StandIn) -> None:
    texts = [str(number) for number in range(40)]
    body = cluster.call(EMBEDDINGS, {"model": "pair", "input": texts}).json()
    assert [item["embedding"] for item in body["data"]] == [[float(text), 1.0] for text in texts]
    assert [item["index"] for item in body["data"]] == list(range(40))
    assert body["usage"] == {"prompt_tokens": 80, "total_tokens": 80}
    assert [len(request["input"]) for request in cluster.received] == [16, 16, 8]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", CHAT, 405),
        ("POST", "/v1/models", 405),
        ("POST", f"{CHAT}/", 404),
        ("GET", "/docs", 404),
        ("GET", "/nothing", 404),
    ],
)
def test_errors_of_the_router_have_openais_format(method: str, path: str, status: int) -> None:
    response = call(NOWHERE, path, method=method)
    assert response.status_code == status
    assert response.json()["error"]["message"].startswith(f"{method} {path}: ")


def test_unexpected_errors_are_not_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any) -> Any:
        raise RuntimeError("/home/somebody/secret.py")

    monkeypatch.setattr(Workers, "models", fail)
    response = get(NOWHERE, "/v1/models")
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "the request failed"


def test_work_is_cancelled_when_the_client_disconnects() -> None:
    ended: list[str] = []

    async def work(seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
            return "done"
        finally:
            ended.append("closed")

    async def disconnect() -> dict[str, Any]:
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    assert asyncio.run(until_disconnected(disconnect, work(60))) is None
    assert asyncio.run(until_disconnected(disconnect, work(0))) == "done"
    assert ended == ["closed", "closed"]


def test_openapi_describes_requests() -> None:
    schema = get(NOWHERE, "/openapi.json").json()
    for path, model in MODELS.items():
        content = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        name = content["schema"]["$ref"].rsplit("/")[-1]
        assert name == model.__name__
        assert schema["components"]["schemas"][name]["additionalProperties"] is False


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


def test_import_of_fastchat_creates_no_log_files(tmp_path: Path) -> None:
    """Even if another part of FastChat was imported before."""
    script = (
        "import sys, fastchat.utils\n"
        "from eagle_fsd.chat.serve.servers import import_fastchat\n"
        "streams = sys.stdout, sys.stderr\n"
        "import_fastchat('controller')\n"
        "assert streams == (sys.stdout, sys.stderr)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "LOGDIR"}
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, check=True)
    assert list(tmp_path.iterdir()) == []


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
                workers_module._client() as client,
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
