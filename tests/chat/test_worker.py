"""The worker's routes, in FastChat's protocol."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
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
from eagle_fsd.chat.config import Limits
from eagle_fsd.chat.decode_queue import Job
from eagle_fsd.chat.serve.guard import Access, Guard
from eagle_fsd.chat.serve.worker import FSDWorker, with_key, worker_app
from eagle_fsd.chat.session import AnswerRequest
from eagle_fsd.model.self_check import check_target
from eagle_fsd.model.target import Target
from eagle_fsd.utils.chat_templates import load_chat_template

NOWHERE = "http://127.0.0.1:1"
GREEDY = {"prompt": ENCODED_HELLO, **OPTIONS}
ORIGINS = ("exact", "fuzzy", "target")


def make_worker(model: EagleFSD, controller: str | None = None) -> FSDWorker:
    limits = Limits(max_batch=2, queue=2, max_body=20_000)
    template = load_chat_template(model.tokenizer)
    return FSDWorker(model, template, limits, controller, NOWHERE, ["pair"])


def guarded(worker: FSDWorker, *keys: str) -> Guard:
    return Guard(worker_app(worker), Access(keys=keys))


@pytest.fixture
def worker(model: EagleFSD) -> Iterator[FSDWorker]:
    worker = make_worker(model)
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
    output: dict[str, Any] = client.post("/worker_generate", json={**GREEDY, **params}).json()
    return output


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


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("max_new_tokens", [0, 5])
def test_echoed_prompt_has_the_targets_logprobs(
    max_new_tokens: int, as_ids: bool, model: EagleFSD, client: TestClient
) -> None:
    """The prompt's columns come first; the values are those of one pass over the whole text."""
    ids = model.tokenizer(ECHOED).input_ids
    params = {"prompt": None, "prompt_token_ids": ids} if as_ids else {"prompt": ECHOED}
    params |= {"echo": True, "max_new_tokens": max_new_tokens, "logprobs": 2}
    outputs, whole = stream(client, **params), generate(client, **params)
    assert outputs[-1]["text"] == whole["text"]
    echoed = model.tokenizer.decode(ids, skip_special_tokens=True) if as_ids else ECHOED
    assert outputs[0]["text"] == echoed
    assert len(outputs[0]["logprobs"]["tokens"]) == len(ids)
    columns = whole["logprobs"]
    for name, column in columns.items():
        streamed = [value for output in outputs for value in output["logprobs"][name]]
        if name in ("tokens", "text_offset"):
            assert column == streamed
        assert len(column) == len(streamed) == len(ids) + max_new_tokens
    usage = {"prompt_tokens": len(ids), "completion_tokens": max_new_tokens}
    assert whole["usage"] == {**usage, "total_tokens": len(ids) + max_new_tokens}
    assert whole["finish_reason"] == "length"
    assert sum(whole["fsd"][f"{origin}_tokens"] for origin in ORIGINS) == max_new_tokens
    assert len(outputs) == 1 or outputs[0]["finish_reason"] is None
    sequence = torch.tensor([ids])
    if max_new_tokens:
        sequence = model.generate(
            sequence, max_new_tokens=5, threshold=0.0, eos_token_id=[]
        ).sequences
    with torch.no_grad():
        log_probs = model.model(sequence).logits[0, :-1].log_softmax(-1)
    own = log_probs.gather(1, sequence[0, 1:, None])[:, 0]
    assert columns["token_logprobs"][0] is columns["top_logprobs"][0] is None
    assert columns["token_logprobs"][1:] == pytest.approx(own.tolist(), abs=1e-4)
    for found, expected in zip(columns["top_logprobs"][1:], log_probs, strict=True):
        assert max(found.values()) == pytest.approx(float(expected.max()), abs=1e-4)
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


def test_scoring_of_a_client_that_left_is_cancelled(
    worker: FSDWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    scoring, ended = threading.Event(), threading.Event()

    def score(_model: EagleFSD, _ids: Any, _count: int, cancelled: Any) -> list[Any]:
        scoring.set()
        while not cancelled():
            time.sleep(0.001)
        ended.set()
        return []

    monkeypatch.setattr(backend_module, "score_prompt", score)
    params = {"prompt": "Mia has", "echo": True, "logprobs": 1, "max_new_tokens": 5}

    async def work() -> None:
        answers = asyncio.create_task(anext(worker.answers(params, "")))
        await asyncio.to_thread(scoring.wait, 60)
        answers.cancel()
        assert await asyncio.to_thread(ended.wait, 60)

    asyncio.run(asyncio.wait_for(work(), 120))


def test_prompts_as_token_ids(model: EagleFSD, client: TestClient) -> None:
    ids = tokenize(model)[0].tolist()
    assert generate(client, prompt=None, prompt_token_ids=ids)["text"] == reference(model)
    count = client.post("/count_token", json={"prompt_token_ids": ids}).json()
    assert count == {"count": len(ids), "error_code": 0}


def test_parameters_of_fastchats_servers_are_accepted(model: EagleFSD, client: TestClient) -> None:
    """What its API server and its web server send; anything else is rejected by name."""
    api = {"model": "pair", "top_p": 1.0, "top_k": -1, "presence_penalty": 0.0, "logprobs": None}
    api |= {"frequency_penalty": 0.0, "echo": False, "stop_token_ids": None, "stop": []}
    web = {"model": "pair", "repetition_penalty": 1.0, "top_p": 1.0, "echo": False, "stop": None}
    for params in (api, {**api, "best_of": 1, "use_beam_search": False}, web):
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


def test_invalid_embedding_inputs_are_rejected(client: TestClient) -> None:
    inputs: tuple[Any, ...] = (None, [], [""], [1], 5, ["a"] * 65)
    for texts in inputs:
        response = client.post("/worker_get_embeddings", json={"input": texts})
        assert response.status_code == 400
        assert "input must" in response.json()["text"]


def test_errors_are_outputs(
    worker: FSDWorker, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rejected,) = stream(client, temperature=-1)
    assert rejected["error_code"] == 40302
    assert "temperature" in rejected["text"]
    check_target(worker.backend.model.target)
    monkeypatch.setattr(Target, "forward_tree", lambda *_: 1 / 0)
    failed = generate(client)
    assert failed["error_code"] == 50001
    assert failed["text"] == "decoding failed: division by zero"
    monkeypatch.undo()
    assert stream(client)[-1]["finish_reason"] == "stop"
    assert client.post("/worker_get_status").json()["queue_length"] == 0


def test_clients_are_told_apart_by_their_keys(
    worker: FSDWorker, model: EagleFSD, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FastChat's servers send the key as the password of the address that was registered."""
    submit, found = worker.queue.submit, []

    def record(request: AnswerRequest) -> Job:
        found.append(request.client)
        return submit(request)

    monkeypatch.setattr(worker.queue, "submit", record)
    for app in (guarded(worker), guarded(worker, "one/two", "three")):
        for url in ("http://localhost", with_key("http://localhost", "one/two")):
            with TestClient(app, url) as client:
                reply = client.post("/worker_generate", json={**GREEDY, "max_new_tokens": 1})
                found.append(str(reply.status_code))
    assert found == ["testclient", "200", "testclient", "200", "401", "one/two", "200"]


def test_slow_tokenization_does_not_block_other_requests(
    worker: FSDWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, read = threading.Event(), backend_module.read_request

    def blocked(*args: Any) -> Any:
        assert release.wait(60)
        return read(*args)

    monkeypatch.setattr(backend_module, "read_request", blocked)

    async def work() -> dict[str, Any]:
        transport = httpx.ASGITransport(guarded(worker))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answer = asyncio.create_task(client.post("/worker_generate", json=GREEDY, timeout=60))
            while not worker.call_ct:
                await asyncio.sleep(0.001)
            assert (await client.get("/health")).status_code == 200
            assert not answer.done()
            release.set()
            output: dict[str, Any] = (await answer).json()
            return output

    assert asyncio.run(asyncio.wait_for(work(), 60))["finish_reason"] == "stop"


def test_unexpected_errors_are_not_revealed(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(backend_module, "read_request", fail)
    (output,) = stream(client)
    assert output == {"text": "the request could not be processed", "error_code": 50001}
    response = client.post("/count_token", json=GREEDY)
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
    worker.metrics.request_finished("cancelled", {})  # before its turn
    assert 'requests_total{outcome="cancelled"} 1.0' in client.get("/metrics").text
    worker.backend.close()
    assert client.get("/health").status_code == 503
    assert client.post("/model_details", json={}).json()["context_length"] == worker.context_len
