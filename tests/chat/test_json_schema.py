"""Answers that are constrained to JSON: ``response_format``."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from accelerators import host_reads
from api_servers import HELLO, NAME, QUESTION, APIThread
from pairs import ACCEPT_ALL, small_tree, tiny_target, untrained_head
from prompts import request

from eagle_fsd import EagleFSD
from eagle_fsd.chat.session import ChatAnswer

Check = Callable[[Any], bool]


@pytest.fixture(scope="module")
def client(model: EagleFSD) -> Iterator[openai.OpenAI]:
    """A client of a random pair, which writes anything, with the bundled tokenizer."""
    size = model.target.vocab_size
    target = tiny_target(vocab_size=size, max_position_embeddings=512, eos_token_id=2)
    pair = EagleFSD(target, untrained_head(target), small_tree(), tokenizer=model.tokenizer)
    server = APIThread(pair, max_threshold=ACCEPT_ALL)
    yield server.client()
    server.stop()


def draw_schema(rng: random.Random, depth: int = 2) -> tuple[dict[str, Any], Check]:
    """Draw a JSON schema, and a function that tells whether a value satisfies it."""
    kinds = ["integer", "string", "enum", "boolean", "pattern"]
    kind = rng.choice([*kinds, "object", "object", "array", "any"] if depth else kinds)
    if kind == "integer":
        low = rng.randint(-50, 50)
        high = low + rng.randint(0, 99)
        schema: dict[str, Any] = {"type": "integer", "minimum": low, "maximum": high}
        return schema, lambda value: type(value) is int and low <= value <= high
    if kind == "string":
        size = rng.randint(0, 8)
        schema = {"type": "string", "maxLength": size}
        return schema, lambda value: isinstance(value, str) and len(value) <= size
    if kind == "enum":
        values = rng.sample([None, "yes", "no", 7, "ü"], rng.randint(1, 3))
        return {"enum": values}, lambda value: value in values
    if kind == "boolean":
        return {"type": "boolean"}, lambda value: isinstance(value, bool)
    if kind == "pattern":
        schema = {"type": "string", "pattern": "^[a-c]{2,4}$"}
        return schema, lambda value: 2 <= len(value) <= 4 and set(value) <= set("abc")
    if kind == "any":
        options = [draw_schema(rng, depth - 1) for _ in range(2)]
        schema = {"anyOf": [schema for schema, _ in options]}
        return schema, lambda value: any(_holds(check, value) for _, check in options)
    if kind == "array":
        item, check = draw_schema(rng, depth - 1)
        size = rng.randint(0, 3)
        schema = {"type": "array", "items": item, "maxItems": size}
        return schema, lambda value: len(value) <= size and all(map(check, value))
    members = {f"key{number}": draw_schema(rng, depth - 1) for number in range(rng.randint(1, 3))}
    required = rng.sample([*members], rng.randint(0, len(members)))
    schema = {"type": "object", "properties": {name: item for name, (item, _) in members.items()}}
    schema |= {"required": required, "additionalProperties": False}
    return (
        schema,
        lambda value: (
            set(required) <= value.keys() <= members.keys()
            and all(members[name][1](item) for name, item in value.items())
        ),
    )


def _holds(check: Check, value: Any) -> bool:
    try:
        return check(value)
    except (AttributeError, TypeError):  # another type than the check expects
        return False


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def ask(client: openai.OpenAI, **options: Any) -> Any:
    options = {"messages": HELLO, "temperature": 0, "max_tokens": 64, **options}
    return client.chat.completions.create(model=NAME, **options)


def text_of(reply: Any) -> tuple[str, str]:
    """Return text and finish reason of a reply, whole or streamed."""
    if not isinstance(reply, openai.Stream):
        return reply.choices[0].message.content, reply.choices[0].finish_reason
    text = ""
    for chunk in reply:
        text += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason
    return text, reason


def test_every_completed_answer_satisfies_its_schema(client: openai.OpenAI) -> None:
    """Random schemas, four at a time: exact and fuzzy, greedy and sampled, whole and streamed."""
    cases = [draw_schema(random.Random(seed)) for seed in range(24)]

    def answer(seed: int) -> str:
        schema, check = cases[seed]
        reply = ask(
            client,
            temperature=1.3 * (seed // 2 % 2),
            seed=seed,
            stream=seed % 3 == 0,
            response_format=schema_format(schema),
            extra_body={"fsd": {"threshold": ACCEPT_ALL * (seed % 2)}},
        )
        text, reason = text_of(reply)
        assert reason in ("stop", "length")
        if reason == "stop":
            assert _holds(check, json.loads(text)), (schema, text)
        return reason

    with ThreadPoolExecutor(4) as pool:
        reasons = list(pool.map(answer, range(len(cases))))
    assert reasons.count("stop") > 18


def test_objects_choices_and_truncation(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": QUESTION}]
    schema = {
        "type": "object",
        "properties": {"apples": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["apples"],
        "additionalProperties": False,
    }
    options = {"messages": question, "response_format": schema_format(schema), "temperature": 1}
    reply = ask(client, n=3, seed=1, **options)
    for choice in reply.choices:
        assert json.loads(choice.message.content).keys() == {"apples"}
        assert choice.finish_reason == "stop"
    assert reply.usage.completion_tokens > 12
    text, reason = text_of(ask(client, **options, max_tokens=2))
    assert (text[:1], reason) == ("{", "length")
    text, reason = text_of(ask(client, response_format={"type": "json_object"}, max_tokens=48))
    assert text.startswith("{")
    assert reason == "length" or isinstance(json.loads(text), dict)
    assert text_of(ask(client, response_format={"type": "text"})) == text_of(ask(client))


def test_invalid_formats_name_the_parameter(client: openai.OpenAI) -> None:
    for number, (format_, message) in enumerate(
        (
            ({"type": "json_schema"}, "must have json_schema"),
            ({"type": "json_object", "json_schema": {"name": "a"}}, "must have json_schema"),
            (schema_format({"type": "objekt"}), "response_format: Invalid type: objekt"),
            (schema_format({"$ref": "#/nowhere"}), "/nowhere"),
            (schema_format({"not": {"type": "string"}}), "Unimplemented keys"),
            (schema_format({"type": "string", "pattern": "(?=a)b("}), "regex"),
            (schema_format({"enum": ["item" * 9] * 9999}), "at most 65536 characters"),
            (schema_format({"$ref": "file:///etc/passwd"}), "not present in a registry"),
            (schema_format({"type": "integer", "minimum": 2, "maximum": 1}), "Unsatisfiable"),
        )
    ):
        with pytest.raises(openai.BadRequestError, match=message) as raised:
            ask(client, response_format=format_, stream=number % 2 == 0)
        assert str(raised.value.param).startswith("response_format")
        assert "<state>" not in str(raised.value)
    with pytest.raises(openai.BadRequestError, match="response_format excludes ignore_eos"):
        ask(client, response_format={"type": "json_object"}, extra_body={"ignore_eos": True})


def test_costly_schemas_do_not_delay_other_requests(client: openai.OpenAI) -> None:
    """A request without a schema does not wait for one whose schema takes seconds."""
    costly = schema_format({"type": "integer", "multipleOf": 9999931})
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(ask, client, response_format=costly)
        time.sleep(0.5)
        assert ask(client, max_tokens=1).choices
        assert not future.done()
        with pytest.raises(openai.BadRequestError, match="too much time") as raised:
            future.result()
    assert str(raised.value.param).startswith("response_format")


def test_rows_beside_a_grammar_are_read_once(model: EagleFSD) -> None:
    """A step reads its tokens once; only a row with a grammar adds reads, for every level."""

    def reads(rows: int, **constrained: Any) -> int:
        batch = model.batch(8)
        for options in [*[{"ignore_eos": True}] * rows, *([constrained] if constrained else [])]:
            ChatAnswer(model, request(model, **options)).join(batch)
        batch.step()
        with host_reads() as found:
            batch.step()
        return len(found)

    assert reads(1) == reads(5) == 1
    schema = {"json_schema": {"type": "object"}}
    assert reads(5, **schema) == reads(0, **schema) > 1
