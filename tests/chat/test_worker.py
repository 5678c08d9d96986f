"""The worker's routes, in FastChat's protocol."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from fastapi.testclient import TestClient
from fastchat.conversation import Conversation, SeparatorStyle
from prompts import ENCODED_HELLO, OPTIONS, reference, tokenize

from eagle_fsd import EagleFSD
from eagle_fsd.chat import backend as backend_module
from eagle_fsd.chat.backend import LocalBackend
from eagle_fsd.chat.config import Limits
from eagle_fsd.chat.serve.guard import Guard
from eagle_fsd.chat.serve.worker import FSDWorker, worker_app
from eagle_fsd.model.engine import Engine
from eagle_fsd.utils.chat_templates import load_chat_template

NOWHERE = "http://127.0.0.1:1"
GREEDY = {"prompt": ENCODED_HELLO, **OPTIONS}
ORIGINS = ("exact", "fuzzy", "target")


def guarded(worker: FSDWorker) -> Guard:
    return Guard(worker_app(worker))


@pytest.fixture
def worker(model: EagleFSD) -> Iterator[FSDWorker]:
    limits, template = Limits(max_batch=2, queue=2), load_chat_template(model.tokenizer)
    worker = FSDWorker(LocalBackend(model, template, limits, ["pair"]), None, NOWHERE)
    yield worker
    worker.backend.close()


@pytest.fixture
def client(worker: FSDWorker) -> Iterator[TestClient]:
    with TestClient(guarded(worker), "http://localhost") as client:
        yield client


def stream(client: TestClient, **params: Any) -> list[dict[str, Any]]:
    """Return the outputs of a streamed request."""
    response = client.post("/worker_generate_stream", json={**GREEDY, **params})
    assert response.status_code == 200
    parts = response.content.split(b"\0")
    assert parts.pop() == b""
    return [json.loads(part) for part in parts]


def generate(client: TestClient, **params: Any) -> dict[str, Any]:
    """Return the output of a request that is not streamed."""
    return client.post("/worker_generate", json={**GREEDY, **params}).json()


def test_streamed_and_whole_answers_are_those_of_generate(
    model: EagleFSD, client: TestClient
) -> None:
    outputs, whole = stream(client), generate(client)
    assert outputs[-1]["text"] == whole["text"] == reference(model)
    assert outputs[-1]["finish_reason"] == whole["finish_reason"] == "stop"
    assert all(b["text"].startswith(a["text"]) for a, b in itertools.pairwise(outputs))
    assert outputs[-1]["usage"] == whole["usage"]
    assert whole["fsd"]["fuzzy_tokens"] == 0
    assert whole["fsd"]["tau"] > 2
    tokens = [sum(output["fsd"][f"{name}_tokens"] for name in ORIGINS) for output in outputs]
    assert tokens == [output["usage"]["completion_tokens"] for output in outputs]
    fuzzy = generate(client, fsd={"threshold": 0.4})
    assert fuzzy["text"] == reference(model, threshold=0.4)
    assert fuzzy["fsd"]["fuzzy_tokens"] > 0
    ids = tokenize(model)[0].tolist()
    assert generate(client, prompt=None, prompt_token_ids=ids)["text"] == reference(model)
    count = client.post("/count_token", json={"prompt_token_ids": ids}).json()
    assert count == {"count": len(ids), "error_code": 0}


def test_conversation_template_survives_fastchats_server(
    model: EagleFSD, client: TestClient
) -> None:
    """FastChat rebuilds a conversation from the template's JSON and sends its prompt."""
    conv = client.post("/worker_get_conv_template", json={}).json()["conv"]
    style = SeparatorStyle(conv["sep_style"])
    conversation = Conversation(**{**conv, "sep_style": style, "messages": []})
    conversation.append_message(conversation.roles[0], "Hello!")
    conversation.append_message(conversation.roles[1], None)
    prompt = conversation.get_prompt()
    assert prompt.endswith(ENCODED_HELLO)
    assert stream(client, prompt=prompt)[-1]["text"] == reference(model)
    count = client.post("/count_token", json={"prompt": prompt}).json()["count"]
    assert count == tokenize(model).shape[1]


ECHOED = "Mia<|end|> has \U0001f600 8 apples"


def test_echoed_prompt_has_logprobs(model: EagleFSD, client: TestClient) -> None:
    """The prompt's columns come first, streamed or not; test_openai_api.py has the values."""
    ids = model.tokenizer(ECHOED).input_ids
    as_ids = {"prompt": None, "prompt_token_ids": ids}
    decoded = model.tokenizer.decode(ids, skip_special_tokens=True)
    for given, echoed, new in (
        (as_ids, decoded, 5),
        ({"prompt": ECHOED}, ECHOED, 5),
        ({"prompt": ECHOED}, ECHOED, 0),
    ):
        params = {**given, "echo": True, "max_new_tokens": new, "logprobs": 2}
        outputs, whole = stream(client, **params), generate(client, **params)
        assert outputs[-1]["text"] == whole["text"]
        assert outputs[0]["text"] == echoed
        assert len(outputs[0]["logprobs"]["tokens"]) == len(ids)
        columns = whole["logprobs"]
        for name, values in columns.items():
            streamed = [value for output in outputs for value in output["logprobs"][name]]
            assert len(values) == len(streamed) == len(ids) + new
            assert values == streamed or name.endswith("logprobs")
        usage = {"prompt_tokens": len(ids), "completion_tokens": new}
        assert whole["usage"] == {**usage, "total_tokens": len(ids) + new}
        assert whole["finish_reason"] == "length"
        assert sum(whole["fsd"][f"{origin}_tokens"] for origin in ORIGINS) == new
        assert len(outputs) == 1 or outputs[0]["finish_reason"] is None
        assert columns["token_logprobs"][0] is columns["top_logprobs"][0] is None
        offsets = columns["text_offset"]
        assert offsets[0] == 0
        assert offsets == sorted(offsets)
        for token, offset in zip(columns["tokens"], offsets, strict=True):
            if token.isascii() and not token.startswith("<|"):
                assert whole["text"].startswith(token, offset)


def test_echo_without_logprobs_scores_nothing(
    worker: FSDWorker, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_module, "score_prompt", lambda *_: 1 / 0)
    output = generate(client, prompt="Mia has", echo=True, max_new_tokens=3)
    assert output["text"].startswith("Mia has")
    assert output["logprobs"] is None
    (output,) = stream(client, prompt="Mia has", echo=True, max_new_tokens=0)
    assert output["text"] == "Mia has"
    failed = generate(client, prompt="Mia has", echo=True, max_new_tokens=0, logprobs=0)
    assert failed["error_code"] == 50001
    assert 'requests_total{outcome="ended"} 2.0' in client.get("/metrics").text


def test_parameters_of_fastchats_servers_are_accepted(model: EagleFSD, client: TestClient) -> None:
    """What its API server and its web server send; anything else is rejected by name."""
    api = {"model": "pair", "top_p": 1.0, "top_k": -1, "presence_penalty": 0.0, "logprobs": None}
    api |= {"frequency_penalty": 0.0, "echo": False, "stop_token_ids": None, "stop": []}
    web = {"model": "pair", "repetition_penalty": 1.0, "top_p": 1.0, "echo": False, "stop": None}
    for params in ({**api, "best_of": 1, "use_beam_search": False}, web):
        assert generate(client, **params)["text"] == reference(model)
    for params in ({"best_of": 2}, {"use_beam_search": True}, {"images": ["x"]}, {"n": 1}):
        output = generate(client, **params)
        assert output["error_code"] == 40302
        assert next(iter(params)) in output["text"]


def test_embeddings_are_normalized_and_comparable(client: TestClient) -> None:
    texts = ["Hello!", "Hello there!", "8 - 3 = 5 apples"]
    response = client.post("/worker_get_embeddings", json={"input": texts}).json()
    vectors = torch.tensor(response["embedding"])
    assert torch.allclose(vectors.norm(dim=1), torch.ones(3), atol=1e-5)
    similarity = vectors @ vectors.T
    assert similarity[0, 1] > similarity[0, 2]
    assert response["token_num"] > 3
    single = client.post("/worker_get_embeddings", json={"input": "Hello!"}).json()["embedding"]
    assert single[0] == pytest.approx(vectors[0].tolist(), abs=1e-6)
    invalid: tuple[Any, ...] = (None, [], [""], [1], 5, ["a"] * 2049)
    for texts in invalid:
        rejected = client.post("/worker_get_embeddings", json={"input": texts})
        assert rejected.status_code == 400
        assert "input must" in rejected.json()["text"]


def test_errors_are_outputs(
    worker: FSDWorker, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rejected,) = stream(client, temperature=-1)
    assert rejected["error_code"] == 40302
    assert "temperature" in rejected["text"]
    monkeypatch.setattr(Engine, "step", lambda *_: 1 / 0)
    failed = generate(client)
    assert failed["error_code"] == 50001
    assert failed["text"] == "decoding failed: division by zero"
    monkeypatch.undo()
    assert stream(client)[-1]["finish_reason"] == "stop"
    assert client.post("/worker_get_status").json()["queue_length"] == 0
    worker.queue.drain()  # from now on, a controller must not choose this worker
    assert client.post("/worker_get_status").status_code == 503


def test_slow_tokenization_does_not_block_other_requests(
    worker: FSDWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other requests are answered meanwhile, and an unexpected error is not revealed."""
    started, release = threading.Event(), threading.Event()

    def blocked(*args: Any) -> Any:
        started.set()
        assert release.wait(60)
        raise KeyError("secret")

    monkeypatch.setattr(backend_module, "read_request", blocked)

    async def work() -> tuple[dict[str, Any], httpx.Response]:
        transport = httpx.ASGITransport(guarded(worker), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answer = asyncio.create_task(client.post("/worker_generate", json=GREEDY, timeout=60))
            while not started.is_set():
                await asyncio.sleep(0.001)
            assert (await client.get("/health")).status_code == 200
            assert not answer.done()
            release.set()
            output: dict[str, Any] = (await answer).json()
            return output, await client.post("/count_token", json=GREEDY)

    output, response = asyncio.run(asyncio.wait_for(work(), 60))
    assert (output["text"], output["error_code"]) == ("the request could not be processed", 50001)
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.json()["error_code"] == 50001


def test_metrics_and_health(worker: FSDWorker, client: TestClient) -> None:
    answer = stream(client, fsd={"threshold": 0.4})[-1]
    stream(client, temperature=-1)
    page = client.get("/metrics").text
    values = dict(
        line.rsplit(" ", 1) for line in page.splitlines() if line and not line.startswith("#")
    )
    assert float(values['eagle_fsd_requests_total{outcome="ended"}']) == 1
    assert float(values['eagle_fsd_requests_total{outcome="refused"}']) == 1
    tokens = sum(
        float(values[f'eagle_fsd_tokens_total{{origin="{origin}"}}']) for origin in ORIGINS
    )
    assert tokens == answer["usage"]["completion_tokens"]
    assert tokens / float(values["eagle_fsd_steps_total"]) == pytest.approx(answer["fsd"]["tau"])
    assert float(values["eagle_fsd_step_seconds_count"]) == answer["fsd"]["steps"]
    assert float(values["eagle_fsd_queue"]) == float(values["eagle_fsd_rows"]) == 0
    assert float(values["eagle_fsd_max_rows"]) == worker.queue.max_batch
    for name in ("first_token", "token"):
        assert float(values[f"eagle_fsd_{name}_seconds_count"]) == 1
        assert float(values[f"eagle_fsd_{name}_seconds_sum"]) > 0
    assert client.get("/health").json() == {"status": "ok", "queue": 0}
    worker.queue.metrics.request_finished("cancelled", {})  # before its turn
    assert 'requests_total{outcome="cancelled"} 1.0' in client.get("/metrics").text
    worker.backend.close()
    assert client.get("/health").status_code == 503
    assert client.post("/model_details", json={}).json()["context_length"] == worker.context_len
