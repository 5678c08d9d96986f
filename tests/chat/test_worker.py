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
from fastchat.serve.base_model_worker import BaseModelWorker

from eagle_fsd import EagleFSD
from eagle_fsd.chat.config import Limits
from eagle_fsd.chat.serve import worker as worker_module
from eagle_fsd.chat.serve.worker import FSDWorker, worker_app
from eagle_fsd.chat.wire_format import ASSISTANT, END, USER
from eagle_fsd.utils.chat_templates import chat_format, encode_prompt

HELLO = f"{USER}Hello!{END}{ASSISTANT}"
GREEDY = {"prompt": HELLO, "temperature": 0, "max_new_tokens": 64, "fsd": {"threshold": 0}}


@pytest.fixture(scope="module")
def model() -> EagleFSD:
    return EagleFSD.from_pretrained()


@pytest.fixture
def worker(model: EagleFSD, monkeypatch: pytest.MonkeyPatch) -> Iterator[FSDWorker]:
    # FastChat's logger takes standard output over; here it is pytest's.
    monkeypatch.setattr("fastchat.serve.base_model_worker.build_logger", lambda *_: None)
    limits = Limits(queue=2, max_body=20_000)
    wording = chat_format(model.tokenizer)
    found = FSDWorker(model, wording, limits, None, "http://127.0.0.1:1", ["pair"], "test")
    yield found
    found.close()


@pytest.fixture
def client(worker: FSDWorker) -> Iterator[TestClient]:
    with TestClient(worker_app(worker), raise_server_exceptions=False) as found:
        yield found


def outputs(client: TestClient, **params: Any) -> list[dict[str, Any]]:
    reply = client.post("/worker_generate_stream", json={**GREEDY, **params})
    assert reply.status_code == 200
    parts = reply.content.split(b"\0")
    assert parts.pop() == b""
    return [json.loads(part) for part in parts]


def expected(model: EagleFSD, **options: Any) -> str:
    chat = [{"role": "user", "content": "Hello!"}]
    ids = encode_prompt(chat, model.tokenizer, chat_format(model.tokenizer))
    new = model.generate(ids, max_new_tokens=64, **options).sequences[0, ids.shape[1] :]
    return model.tokenizer.decode(new, skip_special_tokens=True)


def test_an_answer_streamed_and_whole(model: EagleFSD, client: TestClient) -> None:
    stream = outputs(client)
    whole = client.post("/worker_generate", json=GREEDY).json()
    assert stream[-1]["text"] == whole["text"] == expected(model, threshold=0.0)
    assert stream[-1]["finish_reason"] == whole["finish_reason"] == "stop"
    assert all(b["text"].startswith(a["text"]) for a, b in itertools.pairwise(stream))
    assert stream[-1]["usage"] == whole["usage"]
    assert whole["fsd"]["fuzzy_tokens"] == 0
    assert whole["fsd"]["tau"] > 2
    fuzzy = client.post("/worker_generate", json={**GREEDY, "fsd": {"threshold": 0.4}}).json()
    assert fuzzy["text"] == expected(model, threshold=0.4)
    assert fuzzy["fsd"]["fuzzy_tokens"] > 0


def test_what_fastchats_server_makes_of_the_template_comes_back(
    model: EagleFSD, client: TestClient
) -> None:
    """It rebuilds a conversation from the JSON of ours, and sends its prompt."""
    conv = client.post("/worker_get_conv_template", json={}).json()["conv"]
    rebuilt = Conversation(
        **{**conv, "sep_style": SeparatorStyle(conv["sep_style"]), "messages": []}
    )
    rebuilt.append_message(rebuilt.roles[0], "Hello!")
    rebuilt.append_message(rebuilt.roles[1], None)
    assert rebuilt.get_prompt().endswith(HELLO)
    found = outputs(client, prompt=rebuilt.get_prompt())[-1]["text"]
    assert found == expected(model, threshold=0.0)
    count = client.post("/count_token", json={"prompt": rebuilt.get_prompt()}).json()["count"]
    chat = [{"role": "user", "content": "Hello!"}]
    assert count == encode_prompt(chat, model.tokenizer, chat_format(model.tokenizer)).shape[1]


def test_log_probabilities_are_the_targets(model: EagleFSD, client: TestClient) -> None:
    stream = [output["logprobs"] for output in outputs(client, logprobs=2)]
    whole = client.post("/worker_generate", json={**GREEDY, "logprobs": 2}).json()
    found = whole["logprobs"]
    told = [value for part in stream for value in part["token_logprobs"]]
    assert found["token_logprobs"] == pytest.approx(told, abs=1e-4)
    chat = [{"role": "user", "content": "Hello!"}]
    prompt = encode_prompt(chat, model.tokenizer, chat_format(model.tokenizer))
    out = model.generate(prompt, max_new_tokens=64, threshold=0.0)
    with torch.no_grad():
        log_probs = model.model(out.sequences).logits[0, prompt.shape[1] - 1 : -1].log_softmax(-1)
    own = log_probs.gather(1, out.sequences[0, prompt.shape[1] :, None])[:, 0]
    assert found["token_logprobs"] == pytest.approx(own.tolist(), abs=1e-4)
    assert all(len(top) == 2 for top in found["top_logprobs"])
    place = [whole["text"].index(word) for word in whole["text"].split()[:2]]
    assert set(place) <= {*found["text_offset"], *(at + 1 for at in found["text_offset"])}


def test_embeddings_are_of_length_one_and_like_their_likes(client: TestClient) -> None:
    texts = ["Hello!", "Hello there!", "8 - 3 = 5 apples"]
    reply = client.post("/worker_get_embeddings", json={"input": texts}).json()
    vectors = torch.tensor(reply["embedding"])
    assert torch.allclose(vectors.norm(dim=1), torch.ones(3), atol=1e-5)
    likeness = vectors @ vectors.T
    assert likeness[0, 1] > likeness[0, 2]
    assert reply["token_num"] > 3
    alone = client.post("/worker_get_embeddings", json={"input": "Hello!"}).json()["embedding"]
    assert alone[0] == pytest.approx(vectors[0].tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"\xff\xfe", "not JSON"),
        (b'{"prompt": "' + b"a" * 20_000 + b'"}', "larger than 20000 bytes"),
    ],
)
@pytest.mark.parametrize(
    "route", ["worker_generate", "worker_generate_stream", "count_token", "worker_get_embeddings"]
)
def test_bodies_that_are_none(content: bytes, words: str, route: str, client: TestClient) -> None:
    reply = client.post(f"/{route}", content=content)
    assert reply.status_code == 400
    assert words in reply.json()["text"]
    assert "Traceback" not in reply.text


@pytest.mark.parametrize("texts", [None, [], [""], [1], 5, ["a"] * 65])
def test_texts_that_cannot_be_embedded(texts: Any, client: TestClient) -> None:
    reply = client.post("/worker_get_embeddings", json={"input": texts})
    assert reply.status_code == 400
    assert "input must" in reply.json()["text"]


def test_refusals_and_failures_are_outputs(
    worker: FSDWorker, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    (refused,) = outputs(client, temperature=9)
    assert refused["error_code"] == 40302
    assert "temperature" in refused["text"]
    monkeypatch.setattr(worker.model.target, "forward_tree", lambda *_: 1 / 0)
    whole = client.post("/worker_generate", json=GREEDY).json()
    assert whole["error_code"] == 50001
    assert whole["text"] == "decoding failed: division by zero"
    monkeypatch.undo()
    assert outputs(client)[-1]["finish_reason"] == "stop"
    assert client.post("/worker_get_status").json()["queue_length"] == 0


def test_a_full_queue_is_told_and_empties(
    worker: FSDWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven at once where one is answered and two may wait: four are refused, none hangs."""
    held, forward, refused = threading.Event(), worker.model.target.forward_tree, []

    def wait(*arguments: Any, **options: Any) -> Any:
        assert held.wait(60)
        return forward(*arguments, **options)

    monkeypatch.setattr(worker.model.target, "forward_tree", wait)

    async def post(client: httpx.AsyncClient) -> dict[str, Any]:
        reply = (await client.post("/worker_generate", json=GREEDY, timeout=60)).json()
        if reply["error_code"]:
            refused.append(reply)
            if len(refused) == 4:
                held.set()
        return reply

    async def work() -> list[dict[str, Any]]:
        transport = httpx.ASGITransport(worker_app(worker))
        async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
            return await asyncio.gather(*(post(client) for _ in range(7)))

    replies = asyncio.run(asyncio.wait_for(work(), 120))
    assert {reply["error_code"] for reply in refused} == {42903}
    assert "2 requests are waiting" in refused[0]["text"]
    assert len(refused) == 4
    assert len({reply["text"] for reply in replies if not reply["error_code"]}) == 1
    assert worker.get_queue_length() == 0


def test_a_prompt_that_takes_long_to_read_stops_nobody_else(
    worker: FSDWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, read = threading.Event(), worker_module.read_request

    def slowly(*arguments: Any) -> Any:
        assert held.wait(60)
        return read(*arguments)

    monkeypatch.setattr(worker_module, "read_request", slowly)

    async def work() -> dict[str, Any]:
        transport = httpx.ASGITransport(worker_app(worker))
        async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
            answer = asyncio.create_task(client.post("/worker_generate", json=GREEDY, timeout=60))
            while not worker.call_ct:
                await asyncio.sleep(0.001)
            assert (await client.get("/health")).status_code == 200
            assert not answer.done()
            held.set()
            return (await answer).json()

    assert asyncio.run(asyncio.wait_for(work(), 60))["finish_reason"] == "stop"


def test_a_tokenizer_that_fails_is_told(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(worker_module, "read_request", fail)
    (output,) = outputs(client)
    assert output == {"text": "the request could not be read", "error_code": 50001}
    reply = client.post("/count_token", json=GREEDY)
    assert reply.status_code == 500
    assert "secret" not in reply.text
    assert reply.json()["error_code"] == 50001


def test_embeddings_end_with_their_client(worker: FSDWorker) -> None:
    assert worker.embed(["a", "b"], gone=lambda: True)["embedding"] == []


def test_a_worker_is_healthy_once_it_tried_to_register(
    model: EagleFSD, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastchat.serve.base_model_worker.build_logger", lambda *_: None)
    monkeypatch.setattr(BaseModelWorker, "init_heart_beat", lambda self: None)
    wording, nowhere = chat_format(model.tokenizer), "http://127.0.0.1:1"
    found = FSDWorker(model, wording, Limits(), nowhere, nowhere, ["pair"], "test")
    with TestClient(worker_app(found)) as client:
        assert client.get("/health").status_code == 503
        assert client.get("/health").json()["status"] == "registering"
        found.init_heart_beat()
        assert client.get("/health").json() == {"status": "ok", "queue": 0}
    found.close()


def test_metrics_and_health(worker: FSDWorker, client: TestClient) -> None:
    usage = outputs(client, fsd={"threshold": 0.4})[-1]
    outputs(client, temperature=9)
    page = client.get("/metrics").text
    values = dict(
        line.rsplit(" ", 1) for line in page.splitlines() if line and not line.startswith("#")
    )
    assert float(values['eagle_fsd_requests_total{outcome="ended"}']) == 1
    assert float(values['eagle_fsd_requests_total{outcome="refused"}']) == 1
    tokens = sum(
        float(values[f'eagle_fsd_tokens_total{{origin="{origin}"}}'])
        for origin in ("exact", "fuzzy", "target")
    )
    assert tokens == usage["usage"]["completion_tokens"]
    assert tokens / float(values["eagle_fsd_steps_total"]) == pytest.approx(usage["fsd"]["tau"])
    assert float(values["eagle_fsd_step_seconds_count"]) == usage["fsd"]["steps"]
    assert float(values["eagle_fsd_queue"]) == 0
    assert client.get("/health").json() == {"status": "ok", "queue": 0}
    worker.metrics.watch("cancelled", {})  # it left while it waited
    assert 'requests_total{outcome="cancelled"} 1.0' in client.get("/metrics").text
    worker.close()
    assert client.get("/health").status_code == 503
    assert client.post("/model_details", json={}).json()["context_length"] == worker.context_len
