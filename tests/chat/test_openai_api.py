"""The server with the current OpenAI client."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import openai
import pytest
import torch
from api_servers import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    ENDLESS,
    EXACT,
    HELLO,
    NAME,
    QUESTION,
    APIThread,
)
from prompts import reference, tokenize

import eagle_fsd
from eagle_fsd import AcceptanceConfig, EagleFSD
from eagle_fsd.bundled import BUNDLED_HEAD
from eagle_fsd.chat.serve.metrics import Outcome
from eagle_fsd.model.checkpoint import RANKS_FILE, write_ranks
from eagle_fsd.model.config import read_settings


def ask(client: openai.OpenAI, messages: Any = HELLO, **options: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 128, "extra_body": EXACT, **options}
    return client.chat.completions.create(model=NAME, messages=messages, **options)


def expected(model: EagleFSD, messages: Any = HELLO, **options: Any) -> str:
    return reference(model, messages, max_new_tokens=128, **options)


def test_greedy_text_equals_hugging_face(model: EagleFSD, client: openai.OpenAI) -> None:
    """Greedy answers equal Hugging Face's, and fuzzy answers equal those of ``generate``."""
    messages = [{"role": "user", "content": QUESTION}]
    response = ask(client, messages)
    ids = tokenize(model, messages)
    hugging_face = model.model.generate(ids, max_new_tokens=128, do_sample=False)
    text = model.tokenizer.decode(hugging_face[0, ids.shape[1] :], skip_special_tokens=True)
    assert response.choices[0].message.content == expected(model, messages) == text
    assert response.choices[0].finish_reason == "stop"
    usage = response.usage
    assert usage.prompt_tokens == ids.shape[1]
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.fuzzy_tokens == 0
    assert usage.tau > 2
    fsd = {"threshold": 0.4, "min_ratio": 0.0}
    response = ask(client, messages, extra_body={"fsd": fsd})
    assert response.choices[0].message.content == expected(model, messages, **fsd)
    assert response.usage.fuzzy_tokens > 0


def test_completions_and_stop_strings(model: EagleFSD, client: openai.OpenAI) -> None:
    prompt = "Mia has 8 apples"
    ids = model.tokenizer(prompt, return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=24, threshold=0.0).sequences[0, ids.shape[1] :]
    text = model.tokenizer.decode(out, skip_special_tokens=True)
    options: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 24}
    options["extra_body"] = EXACT
    chunks = client.completions.create(prompt=prompt, stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    both = client.completions.create(prompt=[prompt, prompt], echo=True, **options)
    assert [choice.text for choice in both.choices] == [prompt + text] * 2
    word = text.split()[3]
    stopped = client.completions.create(prompt=prompt, stop=[word, "never"], **options)
    assert stopped.choices[0].text == text[: text.index(word)]
    assert stopped.choices[0].finish_reason == "stop"
    # A stop string that is a special token ends an answer, in whose text it does not occur.
    end = model.tokenizer.decode(model.eos_token_ids[0])
    answer, again = (
        ask(client, extra_body={**EXACT, **options}).choices[0]
        for options in ({}, {"ignore_eos": True, "stop": end})
    )
    assert answer == again
    assert answer.finish_reason == "stop"


def test_logprobs_are_the_targets(model: EagleFSD, client: openai.OpenAI) -> None:
    content = ask(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    ids = tokenize(model)
    out = model.generate(ids, max_new_tokens=128, threshold=0.0).sequences
    with torch.no_grad():
        logits = model.model(out.to(model.model.device)).logits.cpu()
    log_probs = logits[0, ids.shape[1] - 1 : -1].log_softmax(-1)
    own = log_probs.gather(1, out[0, ids.shape[1] :, None])[:, 0].tolist()
    assert [item.logprob for item in content] == pytest.approx(own, abs=1e-4)
    assert all(len(item.top_logprobs) == 2 for item in content)
    assert b"".join(bytes(item.bytes) for item in content).decode() == expected(model)
    streamed = [
        item.logprob
        for chunk in ask(client, logprobs=True, stream=True)
        if chunk.choices and chunk.choices[0].logprobs
        for item in chunk.choices[0].logprobs.content
    ]
    assert streamed == pytest.approx(own, abs=1e-4)


def test_streams_report_tokens_and_speed(model: EagleFSD, client: openai.OpenAI) -> None:
    """Streams match ``generate``, and decoding without the drafter is always lossless."""
    ids = tokenize(model)
    for method, threshold in (("fsd", 0.3), ("fsd", 0.0), ("ar", 0.3)):
        fsd = {"threshold": threshold, "min_ratio": 0.0}
        body: dict[str, Any] = {"method": method, "stream_options": {"include_tokens": True}}
        if method == "fsd":
            body["fsd"] = fsd
        chunks = list(ask(client, stream=True, logprobs=True, max_tokens=40, extra_body=body))
        tokens = [token for chunk in chunks for token in getattr(chunk.choices[0], "tokens", ())]
        out = model.generate(ids, max_new_tokens=40, method=method, **fsd)
        assert [token["id"] for token in tokens] == out.sequences[0, ids.shape[1] :].tolist()
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert "".join(token["text"] for token in tokens) == text
        origins = [token["origin"] for token in tokens]
        found = {name: origins.count(name) for name in ("exact", "fuzzy", "target")}
        assert found == out.stats.as_dict()["origins"]
        assert ("fuzzy" in origins) == (threshold > 0 and method == "fsd")
        fuzzy = [token["divergence"] for token in tokens if token["origin"] == "fuzzy"]
        assert all(0 <= value < threshold for value in fuzzy)
        assert (tokens[0]["divergence"] is None) == (method == "ar")
        usages = [chunk.usage for chunk in chunks[1:]]
        counts = [usage.completion_tokens for usage in usages]
        assert counts == sorted(counts)
        assert (counts[-1], usages[-1].steps) == (len(tokens), out.stats.steps)
        assert usages[-1].tau == pytest.approx(out.stats.tau)
        assert usages[-1].tokens_per_second > 0


def test_prompt_log_probs(model: EagleFSD, client: openai.OpenAI) -> None:
    """Prompts are scored as lm-evaluation-harness asks, also in batches or with no new token."""
    texts = ["Mia has 8 apples", "Tom"]
    ids: Any = [model.tokenizer(text).input_ids for text in texts]
    options: dict[str, Any] = {"model": NAME, "temperature": 0, "echo": True, "seed": 1234}
    for prompts, new in ((ids, 1), (texts, 1), (texts, 0)):
        response = client.completions.create(prompt=prompts, max_tokens=new, logprobs=1, **options)
        for choice, text, tokens in zip(response.choices, texts, ids, strict=True):
            with torch.no_grad():
                whole = torch.tensor([tokens], device=model.model.device)
                log_probs = model.model(whole).logits[0].log_softmax(-1).cpu()
            own = log_probs[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
            columns: Any = choice.logprobs
            assert len(columns.token_logprobs) == len(tokens) + new
            assert columns.token_logprobs[0] is columns.top_logprobs[0] is None
            assert columns.token_logprobs[1 : len(tokens)] == pytest.approx(own, abs=1e-4)
            largest = [max(top.values()) for top in columns.top_logprobs[1 : len(tokens)]]
            assert largest == pytest.approx(log_probs[:-1].max(1).values.tolist(), abs=1e-4)
            assert choice.text.startswith(text)
            assert new == 0 or columns.text_offset[-1] == len(text)
            assert choice.finish_reason == "length"
    assert response.usage.completion_tokens == 0
    chunks = list(
        client.completions.create(prompt=texts[0], max_tokens=0, logprobs=1, stream=True, **options)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == texts[0]
    found = [chunk.choices[0].logprobs for chunk in chunks]
    streamed = [value for part in found if part for value in part.token_logprobs or []]
    assert streamed == response.choices[0].logprobs.token_logprobs


def test_sampling_options_take_effect(model: EagleFSD, client: openai.OpenAI) -> None:
    def tokens(count: int = 80, **extra: Any) -> list[str]:
        response = ask(client, max_tokens=count, logprobs=True, extra_body={**EXACT, **extra})
        return [item.token for item in response.choices[0].logprobs.content]

    def encode(text: str) -> list[int]:
        return model.tokenizer(text, add_special_tokens=False).input_ids

    greedy = tokens()
    ids = [str(id_) for word in greedy[:3] for id_ in encode(word)]
    lossy = {"threshold": 0.4, "min_ratio": 0.0}
    banned = tokens(16, logit_bias=dict.fromkeys(ids, -100), fsd=lossy)
    assert not set(greedy[:3]) & set(banned)
    (forced,) = encode(" apples")
    assert set(tokens(4, logit_bias={str(forced): 100})) == {" apples"}
    # Only the most likely token has as much probability as the most likely token.
    sampled = {"temperature": 1.5, "seed": 1}
    drawn = tokens(**sampled)
    assert drawn == tokens(**sampled) != greedy == tokens(min_p=1.0, **sampled)


def test_certificate_is_declared_where_it_holds(
    model: EagleFSD, client: openai.OpenAI, tmp_path: Path
) -> None:
    """Only requests that decode with exactly the certified settings declare the certificate."""
    certificate = model.certificate_for(model.acceptance)
    assert client.models.retrieve(NAME).certificate == certificate.model_dump()
    certified = f"{model.acceptance.label}; {certificate}"
    chats = client.chat.completions.with_raw_response
    completions = client.completions.with_raw_response
    for changes, label in (
        ({}, certified),
        ({"fsd": {"threshold": model.acceptance.threshold}}, certified),
        ({"stream": True}, certified),
        ({"temperature": 0.7}, model.acceptance.label),
        ({"presence_penalty": 1}, model.acceptance.label),
        ({"fsd": {"threshold": 0.04}}, "threshold 0.04"),
        ({"lossless": True}, "lossless"),
    ):
        options: Any = {"model": NAME, "max_tokens": 1, "extra_body": {"temperature": 0, **changes}}
        for reply in (
            chats.create(messages=HELLO, **options),  # type: ignore[arg-type]
            completions.create(prompt="Hello!", **options),
        ):
            assert reply.headers["x-eagle-fsd-acceptance"] == label
    tree = model.tree
    changed = EagleFSD(model.model, model.drafter)
    changed.configure(read_settings(BUNDLED_HEAD / "fsd.json"))
    assert changed.certificate_for(changed.acceptance) == certificate
    # The file clears a budget, but does not state that no token is exact.
    for earlier, holds in (({"max_fuzzy_nats": 2.0}, True), ({"exact_first": 4}, False)):
        other = EagleFSD(model.model, model.drafter, acceptance=AcceptanceConfig(**earlier))
        other.configure(read_settings(BUNDLED_HEAD / "fsd.json"))
        assert (other.certificate_for(other.acceptance) == certificate) is holds
    changed.tree = tree.updated(total_tokens=tree.total_tokens - 1)
    assert changed.certificate_for(changed.acceptance) is None
    write_ranks(tmp_path / RANKS_FILE, torch.arange(20))
    fewer = EagleFSD.from_pretrained(draft_vocabulary=tmp_path / RANKS_FILE)
    assert fewer.acceptance == model.acceptance
    for _ in range(2):
        assert fewer.certificate_for(fewer.acceptance) is None
        fewer.configure(read_settings(BUNDLED_HEAD / "fsd.json"))


def test_every_request_is_counted_once(server: APIThread, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = get_args(Outcome)

    def counts() -> dict[str, float]:
        lines = server.http.get("/metrics").text.splitlines()
        names = {f'eagle_fsd_requests_total{{outcome="{name}"}}': name for name in outcomes}
        found = (line.rsplit(" ", 1) for line in lines if line.startswith(tuple(names)))
        return {names[name]: float(value) for name, value in found}

    chat, embedded = {"model": NAME, "messages": HELLO}, {"model": NAME, "input": "Hello!"}
    queue = server.backend.queue
    for path, content, status, outcome in (
        (CHAT, "{bad", 400, "refused"),
        (CHAT, json.dumps({**chat, "model": "other"}), 404, "refused"),
        (CHAT, json.dumps({**chat, "temperature": -1}), 400, "refused"),
        (CHAT, json.dumps({**chat, "max_tokens": 10**6}), 400, "refused"),
        (CHAT, json.dumps({**chat, "fsd": {"threshold": 9}}), 400, "refused"),
        (EMBEDDINGS, json.dumps(embedded), 200, "ended"),
        (EMBEDDINGS, json.dumps({**embedded, "input": "x" * 10**5}), 400, "refused"),
        ("/detokenize", json.dumps({"tokens": [-1]}), 400, "refused"),
        (EMBEDDINGS, json.dumps(embedded), 429, "queue_full"),
    ):
        before = counts()
        if status == 429:
            monkeypatch.setattr(queue, "max_waiting", -queue.max_batch)
        headers = {"Content-Type": "application/json"}
        reply = server.http.post(path, content=content, headers=headers)
        assert reply.status_code == status, reply.text
        expected = dict.fromkeys(outcomes, 0.0) | {outcome: 1.0}
        assert {name: count - before[name] for name, count in counts().items()} == expected


def test_errors_name_the_parameter(server: APIThread) -> None:
    """Errors name the client's parameter, even those found while a prompt is tokenized.

    Only what exceeds the context has a code.
    """
    limit = server.backend.limits.max_new_tokens
    chat, completion = {"messages": HELLO}, {"prompt": "Hello!"}
    long = [{"role": "user", "content": "Hello! " * 9000}]
    for path, body, param in (
        (CHAT, {**chat, "max_tokens": limit + 1}, "max_tokens"),
        (CHAT, {**chat, "max_completion_tokens": 5000}, "max_completion_tokens"),
        (CHAT, {**chat, "max_completion_tokens": 2047}, "max_completion_tokens"),
        (CHAT, {**chat, "max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        (CHAT, {**chat, "stop": ["a"] * 17}, "stop"),
        (CHAT, {**chat, "stop_token_ids": [10**6]}, "stop_token_ids"),
        (CHAT, {**chat, "logit_bias": {"1000000": 1}}, "logit_bias"),
        (CHAT, {**chat, "fsd": {"threshold": 9}}, "fsd"),
        (CHAT, {**chat, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        (
            CHAT,
            {**chat, "response_format": {"type": "json_object"}, "ignore_eos": True},
            "response_format",
        ),
        (CHAT, {"messages": long}, "messages"),
        (COMPLETIONS, {**completion, "max_tokens": 5000}, "max_tokens"),
        (COMPLETIONS, {"prompt": [10**6]}, "prompt"),
        (COMPLETIONS, {"prompt": [7] * 5000}, "prompt"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
    ):
        for extra in ({}, {"stream": True}) if path != "/detokenize" else ({},):
            reply = server.http.post(path, json={"model": NAME, **body, **extra})
            assert reply.status_code == 400
            error = reply.json()["error"]
            assert error["param"] == param, error
            assert "max_new_tokens" not in error["message"]
            exceeds = "context" in error["message"]
            assert error["code"] == ("context_length_exceeded" if exceeds else None)


def test_tokens_and_version(model: EagleFSD, server: APIThread) -> None:
    def post(path: str, **body: Any) -> Any:
        return server.http.post(path, json=body).json()

    text = "Mia has 8 apples<|end|>"
    found = post("/tokenize", prompt=text)
    assert found["tokens"] == model.tokenizer(text).input_ids
    (card,) = server.http.get("/v1/models").json()["data"]
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == card["max_model_len"] == 2048
    assert post("/detokenize", tokens=found["tokens"])["prompt"] == text
    assert post("/tokenize", messages=HELLO)["tokens"] == tokenize(model)[0].tolist()
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "word, " * 20_000}),
        ("/tokenize", {"messages": [{"role": "user", "content": "word, " * 20_000}]}),
        ("/tokenize", {"prompt": "a", "messages": HELLO}),
        ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": [-1]}),
    ):
        assert server.http.post(path, json=body).status_code == 400
    assert server.http.get("/version").json() == {"version": eagle_fsd.__version__}


def test_answers_stream_while_texts_are_embedded(
    model: EagleFSD, server: APIThread, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is a decoding step between any two texts."""
    events: list[str] = []
    step_seconds = server.backend.queue.metrics.step_seconds

    def record_text(_module: Any, _args: Any, options: dict[str, Any]) -> None:
        if options.get("use_cache") is False:
            events.append("text")

    monkeypatch.setattr(step_seconds, "observe", lambda _: events.append("step"))
    endless = {**EXACT, "ignore_eos": True}
    with (
        model.model.base_model.register_forward_pre_hook(record_text, with_kwargs=True),
        ask(client, stream=True, max_tokens=1900, extra_body=endless, **ENDLESS) as stream,
    ):
        next(iter(stream))
        client.embeddings.create(model=NAME, input=["Hello!", "8 - 3 = 5"] * 8)
        assert server.queue_length() == 1
    assert events.count("text") == 16
    assert ("text", "text") not in pairwise(events)


def test_embeddings_are_unit_vectors(client: openai.OpenAI) -> None:
    embedded = client.embeddings.create(model=NAME, input=["Hello!", "8 - 3 = 5"] * 8)
    vectors = torch.tensor([item.embedding for item in embedded.data])
    assert torch.allclose(vectors.norm(dim=1), torch.ones(16), atol=1e-4)
    assert embedded.usage.prompt_tokens > 16
    with pytest.raises(openai.BadRequestError, match="input must have texts of 1 to 2048") as error:
        client.embeddings.create(model=NAME, input=["Hello!", "a b " * 2000])
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "input")
    lists = client.embeddings.create(model=NAME, input="Hello!", encoding_format="float")
    assert lists.data[0].embedding == pytest.approx(vectors[0].tolist(), abs=1e-6)
