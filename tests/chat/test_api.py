"""The API with a stand-in for the pair: requests, responses, errors."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Mapping
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from api_servers import CHAT, COMPLETIONS, EMBEDDINGS, HELLO

from eagle_fsd import AcceptanceConfig, Origin
from eagle_fsd.chat.config import Limits
from eagle_fsd.chat.decode_queue import (
    AbortedError,
    ClosedError,
    DecodingError,
    JobUpdate,
    QueueFullError,
)
from eagle_fsd.chat.request_body import RequestError
from eagle_fsd.chat.serve.api import MAX_CONCURRENT_CHOICES, api_app, api_error
from eagle_fsd.chat.serve.body import MAX_MEMBERS
from eagle_fsd.chat.serve.guard import Guard
from eagle_fsd.chat.serve.metrics import ServerMetrics
from eagle_fsd.chat.serve.openai_format import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    ResponseBuilder,
)
from eagle_fsd.chat.text import Piece
from eagle_fsd.model.step import TokenDetail

CHAT_BODY: dict[str, Any] = {"model": "pair", "messages": HELLO}
BODY: dict[str, Any] = {"model": "pair", "prompt": "Hello!"}
MODELS = {CHAT: ChatRequest, COMPLETIONS: CompletionRequest, EMBEDDINGS: EmbeddingRequest}


def updates(*texts: str, finish_reason: str | None = "stop") -> list[JobUpdate]:
    """Build the updates of an answer to 4 prompt tokens: a token per character, two per step."""
    found, count = [], 0
    for index, text in enumerate(texts):
        count += len(text)
        pieces = [
            Piece(char, ord(char), Origin.EXACT, TokenDetail(-1.0, None, [(ord(char), -1.0)]))
            for char in text
        ]
        usage = {"prompt_tokens": 4, "completion_tokens": count, "total_tokens": 4 + count}
        stats = {"fuzzy_tokens": 0, "exact_tokens": count, "target_tokens": 0, "steps": count / 2}
        stats["dropped_messages"] = 2
        reason = finish_reason if index == len(texts) - 1 else None
        found.append(JobUpdate(pieces, usage, reason, stats))
    return found


class StandIn:
    """A backend whose answers are given; "Hello" by default.

    It records the parameters of all requests, and how many were answered at the same time.
    """

    def __init__(self) -> None:
        self.received: list[Mapping[str, Any]] = []
        self.running = self.peak = 0
        self.answers: Any = lambda _: updates("He", "llo")
        self.queue = SimpleNamespace(alive=True, metrics=ServerMetrics())
        self.model = SimpleNamespace(
            target=SimpleNamespace(stable_length=2048), certificate_for=lambda _: None
        )
        self.tokens = SimpleNamespace(text=chr, bytes=lambda token: chr(token).encode())
        self.limits, self.default_acceptance = Limits(), AcceptanceConfig(threshold=0.2)
        self.names = ["pair", "org/a"]
        backend: Any = self
        self.app = Guard(api_app(backend), error_body=api_error)

    def acceptance(self, fsd: Mapping[str, Any], lossless: bool) -> AcceptanceConfig:
        return AcceptanceConfig(threshold=0.0 if lossless else 0.2)

    async def answer(
        self, params: Mapping[str, Any], client: str, method: str, admitted: bool
    ) -> AsyncGenerator[tuple[None, JobUpdate], None]:
        self.received.append({**params, "client": client})
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            await asyncio.sleep(0)
            for item in self.answers(params):
                if isinstance(item, Exception):
                    raise item
                yield None, item
                await asyncio.sleep(0)
        finally:
            self.running -= 1

    def call(
        self, path: str, body: Any = None, method: str = "POST", **headers: str
    ) -> httpx.Response:
        async def work() -> httpx.Response:
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(self.app), base_url="http://localhost"
            ) as client:
                return await client.request(method, path, json=body, headers=headers)

        return asyncio.run(asyncio.wait_for(work(), 60))

    def get(self, path: str) -> httpx.Response:
        return self.call(path, method="GET")


@pytest.fixture
def backend() -> StandIn:
    return StandIn()


def events(response: httpx.Response) -> list[Any]:
    """Return the events of a stream; [DONE] becomes None."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line[6:] for line in response.text.split("\n\n") if line]
    return [None if line == "[DONE]" else json.loads(line) for line in lines]


def test_parameters_and_their_defaults(backend: StandIn) -> None:
    assert backend.call(CHAT, {**CHAT_BODY, "seed": None}).status_code == 200
    assert backend.call(COMPLETIONS, BODY).status_code == 200
    chat, completion = map(dict, backend.received)
    assert chat.pop("messages") == HELLO
    assert completion.pop("prompt") == "Hello!"
    assert completion.pop("max_new_tokens") == 16  # as in OpenAI's API
    assert completion.pop("echo") is False
    assert (chat.pop("truncation"), chat.pop("chat_template_kwargs")) == ("disabled", {})
    assert completion["lossless"] is completion["strict_length"] is False
    assert completion == {name: value for name, value in chat.items() if value is not None}
    assert (chat["temperature"], chat["top_p"], chat["top_k"]) == (0.7, 1.0, -1)
    assert not {"seed", "max_new_tokens"} & chat.keys()  # the server's
    params = {
        **{"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.5},
        **{"presence_penalty": 1.0, "frequency_penalty": -1.0, "seed": 3, "stop": ["a"]},
        **{"stop_token_ids": [5], "ignore_eos": True, "min_tokens": 2, "fsd": {"threshold": 0.1}},
        **{"lossless": True, "logit_bias": {5: 1.0}},
    }
    given = {**params, "model": "pair", "stop": "a", "user": "somebody", "logit_bias": {"5": 1}}
    params |= {"strict_length": True, "client": "127.0.0.1"}
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    for name in ("max_tokens", "max_completion_tokens"):
        assert backend.call(CHAT, {**CHAT_BODY, **given, name: 9, **kwargs}).status_code == 200
        found = {**backend.received.pop()}
        assert found.pop("logprobs", None) is None
        assert found.pop("truncation") == "disabled"
        assert found == {**params, **kwargs, "messages": HELLO, "max_new_tokens": 9}
    body = {**given, "prompt": [1, 2], "echo": True, "logprobs": 2, "max_tokens": 0}
    assert backend.call(COMPLETIONS, body).status_code == 200
    own = {"prompt_token_ids": [1, 2], "echo": True, "logprobs": 2, "max_new_tokens": 0}
    assert backend.received.pop() == {**params, **own}
    # Choices have different seeds, the same as if each prompt was sent alone.
    backend.received.clear()
    body = {**BODY, "prompt": ["a", [1], "b"], "n": 2, "seed": 2**63 - 1}
    assert backend.call(COMPLETIONS, body).status_code == 200
    found = [(item["seed"], item.get("prompt")) for item in backend.received]
    seeds = (2**63 - 1, 0)
    assert sorted(found, key=str) == sorted(itertools.product(seeds, ("a", None, "b")), key=str)


def test_messages_of_all_roles_and_forms(backend: StandIn) -> None:
    """Parameters without effect are accepted."""
    ignored = {"metadata": {"a": "b"}, "store": True, "service_tier": "flex", "user": "me"}
    ignored |= {"safety_identifier": "x", "prompt_cache_key": "y"}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b\x01"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "system", "content": "one"},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": [], "annotations": []},
        {"role": "assistant", "content": "d", "parsed": {"a": 1}},  # by OpenAI's client
        {"role": "developer", "content": "two"},
        {"role": "user", "content": "", "name": "Mia"},
        {"role": "assistant", "content": None, "reasoning_content": "I think."},
    ]
    assert backend.call(COMPLETIONS, {**BODY, **ignored}).status_code == 200
    backend.received.clear()
    assert backend.call(CHAT, {**CHAT_BODY, **ignored, "messages": messages}).status_code == 200
    assert backend.received[0]["messages"] == [
        {"role": "system", "content": "one\n\ntwo"},
        {"role": "user", "content": "a\nb\x01"},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "", "name": "Mia"},
        {"role": "assistant", "content": "", "reasoning_content": "I think."},
    ]


#: Route, changes of a valid request, and a part of the error message.
INVALID: tuple[tuple[str, dict[str, Any], str], ...] = (
    (CHAT, {"foo": 1}, "foo is not supported"),
    (CHAT, {"max_new_tokens": 1}, "max_new_tokens is not supported"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools.0.function is missing"),
    (CHAT, {"logit_bias": {"5": 101}}, "logit_bias must be an object of at most 300 token ids"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format.type must be 'text', "),
    (CHAT, {"temperature": 2.5}, "temperature must be less than or equal to 2; got 2.5"),
    (CHAT, {"temperature": "1"}, "temperature must be a valid number; got '1'"),
    (CHAT, {"n": True}, "n must be a valid integer; got True"),
    (CHAT, {"max_tokens": 0}, "max_tokens must be greater than or equal to 1; got 0"),
    (
        CHAT,
        {"max_tokens": 1, "max_completion_tokens": 1},
        "the request must not set both max_tokens and max_completion_tokens",
    ),
    (CHAT, {"stop": [1]}, "stop must be a string or a list of strings"),
    (CHAT, {"top_logprobs": 2}, "the request must set logprobs with top_logprobs"),
    (CHAT, {"messages": None}, "messages is missing"),
    (CHAT, {"messages": []}, "messages must have at least 1 item"),
    (CHAT, {"messages": "Hello!"}, "messages must be a valid list; got 'Hello!'"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages.0 must have content"),
    (CHAT, {"messages": [{"role": "tool", "content": None}]}, "messages.0 must have content"),
    (CHAT, {"method": "ar", "fsd": {"threshold": 0.1}}, "must not set both fsd and method ar"),
    (COMPLETIONS, {"stream_options": {}}, "must set stream with stream_options"),
    (
        CHAT,
        {"messages": [{"role": "robot", "content": ""}]},
        "messages.0.role must be 'system', 'developer', 'user', 'assistant' or 'tool'; got 'robot'",
    ),
    (CHAT, {"messages": [{**HELLO[0], "age": 5}]}, "messages.0.age is not supported"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": ""}]}]},
        "messages.0.content must be a string or a list of parts of type text",
    ),
    (CHAT, {"messages": [{"role": "system", "content": "a"}]}, "must have a user message"),
    (COMPLETIONS, {"prompt": ""}, "prompt must be a non-empty string, a list of token ids"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt must be"),
    (COMPLETIONS, {"prompt": [1, True]}, "prompt must be"),
    (COMPLETIONS, {"prompt": ["a"] * 65, "n": 2}, "must not have more than 128 prompts"),
    (COMPLETIONS, {"max_tokens": 0}, "must set max_tokens to at least 1 unless echo is true"),
    (COMPLETIONS, {"best_of": 2}, "best_of must be 1; got 2"),
    (EMBEDDINGS, {"input": [1, 2]}, "input must be a string or a list of strings"),
    (EMBEDDINGS, {"input": ["a", ""]}, "non-empty strings"),
)


def test_invalid_requests_are_explained(backend: StandIn) -> None:
    valid = {CHAT: CHAT_BODY, COMPLETIONS: BODY, EMBEDDINGS: {"model": "pair"}}
    many = {f"{number:x}": 1 for number in range(MAX_MEMBERS)}
    members = "must not have more than 100 members"
    for path, changes, message in (
        *INVALID,
        (CHAT, many, members),  # one error, not one for each unknown name
        (CHAT, {"messages": [{**HELLO[0], **many}]}, members),
    ):
        response = backend.call(path, {**valid[path], **changes})
        assert response.status_code == 400, changes
        error = response.json()["error"]
        assert message in error["message"]
        assert "\n" not in error["message"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] is None or error["message"].startswith(error["param"] + " ")
    assert not backend.received


def test_whole_responses(backend: StandIn) -> None:
    """A prompt is counted once for all of its choices."""
    body = backend.call(CHAT, {**CHAT_BODY, "n": 2}).json()
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 0
    message = {"role": "assistant", "content": "Hello", "refusal": None}
    choice = {"message": message, "logprobs": None, "finish_reason": "stop"}
    assert body == {
        "object": "chat.completion",
        "model": "pair",
        "choices": [{**choice, "index": 0}, {**choice, "index": 1}],
        "usage": {
            **{"prompt_tokens": 4, "completion_tokens": 10, "total_tokens": 14},
            **{"fuzzy_tokens": 0, "exact_tokens": 10, "target_tokens": 0, "tau": 2.0},
            "completion_tokens_details": {"fuzzy_tokens": 0},
        },
    }
    body = backend.call(CHAT, {**CHAT_BODY, "truncation": "auto"}).json()
    assert body["usage"]["dropped_messages"] == 2
    body = backend.call(COMPLETIONS, {**BODY, "prompt": ["a", "b", "c"], "n": 2}).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (12, 30)


def test_usage_counts_the_prompts_whose_answers_have_begun(backend: StandIn) -> None:
    """Usage counts a prompt once its first choice arrives, whichever choice that is."""
    options = {"stream": True, "stream_options": {"include_tokens": True}}
    request = CompletionRequest(**{**BODY, "prompt": ["a", "b"], "n": 2, **options})
    tokens: Any = backend.tokens
    builder = ResponseBuilder(request, 4, tokens)
    (update,) = updates("a")
    update.stats["tokens_per_second"] = 1.0
    found = [builder.chunks(index, update)[0]["usage"]["prompt_tokens"] for index in (1, 2, 3, 0)]
    assert found == [4, 8, 8, 8]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_streamed_choices(path: str, backend: StandIn) -> None:
    """Choices arrive in any order; tokens without text come with the next chunk or alone."""
    first, held_back, last = updates("ab", "", "c")
    end = Piece("", ord("$"), Origin.TARGET, TokenDetail(-1.0, None, []))
    backend.answers = lambda _: [
        first,
        held_back,
        JobUpdate([end], last.usage, last.finish_reason, last.stats),
    ]
    body = {**CHAT_BODY, "logprobs": True} if path == CHAT else {**BODY, "logprobs": 0}
    for include_usage in (True, False):
        options = {"stream": True, "n": 2, "stream_options": {"include_usage": include_usage}}
        *chunks, done = events(backend.call(path, {**body, **options}))
        assert done is None
        if include_usage:
            usage = chunks.pop()
            assert usage["choices"] == []
            assert usage["usage"]["completion_tokens"] == 6
        assert len({chunk["id"] for chunk in chunks}) == 1
        last_usage = None if include_usage else chunks[-1]["usage"]
        assert [chunk["usage"] for chunk in chunks] == [None] * (len(chunks) - 1) + [last_usage]
        if not include_usage:
            assert last_usage["completion_tokens_details"] == {"fuzzy_tokens": 0}
        for index in range(2):
            choices = [chunk["choices"][0] for chunk in chunks]
            choices = [choice for choice in choices if choice["index"] == index]
            if path == CHAT:
                assert choices.pop(0)["delta"] == {"role": "assistant", "content": ""}
                assert [choice["delta"] for choice in choices] == [{"content": "ab"}, {}]
                found = [[item["token"] for item in c["logprobs"]["content"]] for c in choices]
                entry = choices[0]["logprobs"]["content"][1]
                alternative = {"token": "b", "logprob": -1.0, "bytes": [98]}
                assert entry == {**alternative, "top_logprobs": [alternative]}
            else:
                assert [choice["text"] for choice in choices] == ["ab", ""]
                found = [choice["logprobs"]["tokens"] for choice in choices]
                offsets = [choice["logprobs"]["text_offset"] for choice in choices]
                assert offsets == [[0, 1], [2]]
            assert found == [["a", "b"], ["$"]]
            assert [choice["finish_reason"] for choice in choices] == [None, "stop"]


def test_logprobs_of_completions(backend: StandIn) -> None:
    """The first token of a prompt has none; of equal texts the likeliest is reported."""
    detail = TokenDetail(-1.0, None, [(97, -1.0), (98, -2.0)])
    pieces = [Piece("x", 97, Origin.PADDING), Piece("yz", 98, Origin.EXACT, detail)]
    (last,) = updates("ab", finish_reason="length")
    backend.answers = lambda _: [JobUpdate(pieces, last.usage, "length", last.stats)]
    backend.tokens.text = lambda _: "t"
    body = {**BODY, "echo": True, "logprobs": 1, "max_tokens": 0}
    assert backend.call(COMPLETIONS, body).json()["choices"][0]["logprobs"] == {
        "tokens": ["t", "t"],
        "token_logprobs": [None, -1.0],
        "top_logprobs": [None, {"t": -1.0}],
        "text_offset": [0, 1],
    }


def test_log_probabilities_are_bounded(backend: StandIn) -> None:
    """Too many log-probabilities are rejected unless streamed; streamed parts equal the whole."""
    body = {**CHAT_BODY, "logprobs": True, "top_logprobs": 20, "n": 16, "max_tokens": 1000}
    response = backend.call(CHAT, body)
    assert response.status_code == 400
    assert "must be at most 262144; got 336000: stream the response" in response.text
    assert not backend.received
    echoed = {**BODY, "prompt": [[1] * 300] * 48, "echo": True, "max_tokens": 0, "logprobs": 20}
    response = backend.call(COMPLETIONS, echoed)
    assert response.status_code == 400
    assert "must be at most 262144; got 302400" in response.text
    echoed["prompt"] = ["a long text " * 5000]  # it cannot have more tokens than the context
    assert "must be at most" not in backend.call(COMPLETIONS, echoed).text
    assert backend.call(CHAT, {**body, "stream": True}).status_code == 200
    backend.answers = lambda _: updates("ab" * 100, "c" * 1000)
    for path, valid in ((CHAT, {**body, "n": 2}), (COMPLETIONS, {**BODY, "logprobs": 2})):
        choice = backend.call(path, valid).json()["choices"][0]
        *chunks, _ = events(backend.call(path, {**valid, "n": 1, "stream": True}))
        parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
        name = "content" if path == CHAT else "text_offset"
        assert len(choice["logprobs"][name]) == 1200
        assert choice["logprobs"][name] == [item for part in parts for item in part[name]]


def test_few_choices_are_decoded_at_a_time(backend: StandIn) -> None:
    """A request for many choices does not fill the queue, and an error cancels the others."""
    backend.answers = lambda params: updates(params["prompt"])
    body = {**BODY, "prompt": [str(number) for number in range(20)]}
    choices = backend.call(COMPLETIONS, body).json()["choices"]
    assert [choice["text"] for choice in choices] == body["prompt"]
    assert backend.peak == MAX_CONCURRENT_CHOICES
    backend.received.clear()

    def answers(params: Mapping[str, Any]) -> Any:
        full = [QueueFullError("full")]
        return full if params["prompt"] == "1" else itertools.repeat(updates("")[0])

    backend.answers = answers
    assert backend.call(COMPLETIONS, body).status_code == 429
    assert len(backend.received) <= MAX_CONCURRENT_CHOICES + 1
    assert not backend.running


def test_errors_have_their_status(backend: StandIn) -> None:
    """Errors set the status before a stream begins; later ones are the stream's last event."""
    for error, status, kind, code in (
        (RequestError("why"), 400, "invalid_request_error", None),
        (
            RequestError("why", RequestError.CONTEXT),
            400,
            "invalid_request_error",
            "context_length_exceeded",
        ),
        (ClosedError("why"), 503, "server_error", None),
        (AbortedError("why"), 503, "server_error", None),
        (QueueFullError("why"), 429, "rate_limit_error", None),
        (DecodingError("why"), 500, "server_error", None),
    ):
        param = "messages" if code else None
        expected = {"error": {"message": "why", "type": kind, "param": param, "code": code}}
        for stream in (False, True):
            backend.answers = lambda _, error=error: [error]
            response = backend.call(CHAT, {**CHAT_BODY, "stream": stream})
            assert response.status_code == status
            assert response.json() == expected
        backend.answers = lambda _, error=error: [*updates("a", finish_reason=None), error]
        *chunks, last = events(backend.call(CHAT, {**CHAT_BODY, "stream": True}))
        assert len(chunks) == 2
        assert last == expected


def test_models(backend: StandIn) -> None:
    found = backend.get("/v1/models").json()
    assert found["object"] == "list"
    assert [item["id"] for item in found["data"]] == ["org/a", "pair"]
    card = backend.get("/v1/models/org/a").json()
    assert {**card, "created": 0} == {**found["data"][0], "created": 0}
    unknown = [backend.get("/v1/models/other")]
    for path, body in (
        (CHAT, CHAT_BODY),
        (EMBEDDINGS, {"input": "1"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        unknown.append(backend.call(path, {**body, "model": "other"}))
    for response in unknown:
        assert response.status_code == 404
        error = response.json()["error"]
        assert error["message"] == "model must be one of pair, org/a; got other"
        assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_all_errors_have_openais_format(backend: StandIn) -> None:
    for method, path, status in (
        ("GET", CHAT, 405),
        ("POST", "/v1/models", 405),
        ("POST", f"{CHAT}/", 404),
        ("GET", "/docs", 404),
        ("POST", "/api/v1/chat/completions", 404),  # of FastChat
        ("GET", "/nothing", 404),
    ):
        response = backend.call(path, method=method)
        assert response.status_code == status
        assert ("allow" in response.headers) == (status == 405)
        assert response.json()["error"]["message"].startswith(f"{method} {path}: ")
    response = backend.call(CHAT, CHAT_BODY, origin="https://evil.example")
    assert response.status_code == 403
    assert "other sites" in response.json()["error"]["message"]
    backend.answers = lambda _: [KeyError("/home/somebody/secret.py")]
    response = backend.call(CHAT, CHAT_BODY)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "the request failed"


def test_openapi_describes_requests(backend: StandIn) -> None:
    schema = backend.get("/openapi.json").json()
    for path, model in MODELS.items():
        content = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        name = content["schema"]["$ref"].rsplit("/")[-1]
        assert name == model.__name__
        assert schema["components"]["schemas"][name]["additionalProperties"] is False
