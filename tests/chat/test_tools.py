"""Tools: requests, prompts, and the calls in answers."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from api_servers import CHAT, HELLO, NAME, APIThread
from pairs import small_tree, tiny_target, untrained_head
from test_api import CHAT_BODY, StandIn, events, updates

from eagle_fsd import EagleFSD

WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "Tell the weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/city"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"city": {"enum": ["Rome", "Oslo"]}},
    },
}
TIME: dict[str, Any] = {
    "name": "time",
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS: Any = [{"type": "function", "function": function} for function in (WEATHER, TIME)]
#: A chat template that shows tools, calls and results.
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    "{{ message.tool_call_id }}<|end|>{% endfor %}"
)
ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'
#: Answers, their text, and the names and arguments of their calls.
ANSWERS: tuple[tuple[str, str, list[tuple[str, Any]]], ...] = (
    ("Hello! 1 < 2 and [TOOL", "Hello! 1 < 2 and [TOOL", []),
    (f"<tool_call>\n{ROME}\n</tool_call>", "", [("weather", {"city": "Rome"})]),
    (
        f'Wait.\n<tool_call>{ROME}</tool_call>\n<tool_call>{{"name": "time"}}</tool_call>\n',
        "Wait.\n",
        [("weather", {"city": "Rome"}), ("time", {})],
    ),
    (
        f"<tool_call>{ROME}</tool_call>\nI called the tool.",
        "I called the tool.",
        [("weather", {"city": "Rome"})],
    ),
    (' {"name": "time", "parameters": {}}', "", [("time", {})]),
    (
        f'{ROME}; {{"name": "time", "parameters": {{}}}}',
        "",
        [("weather", {"city": "Rome"}), ("time", {})],
    ),
    (f"[TOOL_CALLS][{ROME}]", "", [("weather", {"city": "Rome"})]),
    (f"<|python_tag|>{ROME}", "", [("weather", {"city": "Rome"})]),
    ('{"name": "Mia", "apples": 5}', '{"name": "Mia", "apples": 5}', []),
    ("<tool_call>{nothing}</tool_call> so", "<tool_call>{nothing}</tool_call> so", []),
    ('{"name": "time", "parameters": [NaN]}', '{"name": "time", "parameters": [NaN]}', []),
    (
        '{"name": ["time"], "parameters": {"a": NaN}}',
        '{"name": ["time"], "parameters": {"a": NaN}}',
        [],
    ),
    ("[" * 5000 + "[TOOL_CALLS]" + "[" * 15_000, "[" * 5000 + "[TOOL_CALLS]" + "[" * 15_000, []),
    (f"<tool_call>{ROME[:20]}", f"<tool_call>{ROME[:20]}", []),
    ("<tool_call></tool_call>[TOOL_CALLS][]", "<tool_call></tool_call>[TOOL_CALLS][]", []),
)


@pytest.fixture(scope="module")
def tool_server(model: EagleFSD) -> Iterator[APIThread]:
    """A server of a random pair whose chat template shows tools."""
    target = tiny_target(
        vocab_size=model.target.vocab_size, max_position_embeddings=1024, eos_token_id=2
    )
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.chat_template = TEMPLATE
    server = APIThread(EagleFSD(target, untrained_head(target), small_tree(), tokenizer=tokenizer))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def client(tool_server: APIThread) -> openai.OpenAI:
    return tool_server.client()


def ask(client: openai.OpenAI, **options: Any) -> Any:
    options = {"messages": HELLO, "tools": TOOLS, "seed": 1, "max_tokens": 64, **options}
    return client.chat.completions.create(model=NAME, **options)


def test_calls_are_parsed_whole_and_streamed() -> None:
    """Calls of any format are found character by character, and text that is no call stays text."""
    backend = StandIn()
    for answer, text, calls in ANSWERS:
        step = max(1, len(answer) // 100)
        parts = [answer[at : at + step] for at in range(0, len(answer), step)]
        backend.answers = lambda _, parts=parts: updates(*parts)
        reply = backend.call(CHAT, {**CHAT_BODY, "tools": TOOLS}).json()["choices"][0]
        assert reply["message"]["content"] == (text or None)
        found = reply["message"].get("tool_calls", [])
        assert [
            (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found
        ] == calls
        assert len({call["id"] for call in found}) == len(calls)
        assert reply["finish_reason"] == ("tool_calls" if calls else "stop")
        stream = events(backend.call(CHAT, {**CHAT_BODY, "tools": TOOLS, "stream": True}))
        choices = [chunk["choices"][0] for chunk in stream if chunk]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == text
        deltas = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
        assert [delta["index"] for delta in deltas] == [*range(len(calls))]
        assert [delta["function"] for delta in deltas] == [call["function"] for call in found]
        assert choices[-1]["finish_reason"] == reply["finish_reason"]
    backend.answers = lambda _: updates(f"<tool_call>{ROME}</tool_call>")
    reply = backend.call(CHAT, {**CHAT_BODY, "tools": TOOLS, "tool_choice": "none"}).json()
    assert reply["choices"][0]["message"]["content"] == f"<tool_call>{ROME}</tool_call>"
    backend.answers = lambda _: updates(f"<tool_call>{ROME[:20]}", finish_reason="length")
    reply = backend.call(CHAT, {**CHAT_BODY, "tools": TOOLS}).json()["choices"][0]
    assert (reply["finish_reason"], "tool_calls" in reply["message"]) == ("length", False)


def test_required_and_named_tools_are_called(client: openai.OpenAI) -> None:
    """Required and named tools are called with arguments that satisfy the tool's schema."""
    for temperature, choice, names in (
        (1.3, "required", {"weather", "time"}),
        (0, {"type": "function", "function": {"name": "weather"}}, {"weather"}),
    ):
        options = {"tool_choice": choice, "temperature": temperature, "max_tokens": 256}
        reply = ask(client, n=3, **options)
        for answer in reply.choices:
            (call,) = answer.message.tool_calls
            assert answer.finish_reason == "tool_calls"
            assert answer.message.content is None
            assert call.function.name in names
            arguments = json.loads(call.function.arguments)
            cities = ({"city": "Rome"}, {"city": "Oslo"})
            assert arguments in (cities if call.function.name == "weather" else ({},))
    auto = {"type": "function", "function": {"name": "auto", "parameters": TIME["parameters"]}}
    named = {"type": "function", "function": {"name": "auto"}}
    reply = ask(client, tools=[*TOOLS, auto], tool_choice=named, max_tokens=256)
    assert reply.choices[0].message.tool_calls[0].function.name == "auto"
    chunks = ask(client, tool_choice="required", stream=True, max_tokens=256)
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [delta.function.name in ("weather", "time") for delta in deltas] == [True]


def test_prompts_show_tools_calls_and_results(tool_server: APIThread) -> None:
    client, http = tool_server.client(), tool_server.http
    function: dict[str, Any] = {"name": "weather", "arguments": '{"city": "Rome"}'}
    # OpenAI's client adds two fields to the messages that it returns.
    function["parsed_arguments"] = {"city": "Rome"}
    call = {"id": "call_1", "type": "function", "function": function, "index": 0}
    messages = [
        *HELLO,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "Sunny.", "tool_call_id": "call_1"},
    ]
    prompt = (
        "user: Hello!<|end|>assistant: "
        '{"name": "weather", "arguments": {"city": "Rome"}}<|end|>tool: Sunny.call_1<|end|>'
    )
    tokens = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == prompt
    counts = [
        ask(client, messages=messages, max_tokens=1, **options).usage.prompt_tokens
        for options in ({}, {"tool_choice": "none"})
    ]
    assert counts[0] > counts[1] == len(tokens)


def test_invalid_tools(client: openai.OpenAI, server: APIThread) -> None:
    broken = {"type": "function", "function": {"name": "a", "parameters": {"type": "objekt"}}}
    named, named_time = (
        {"type": "function", "function": {"name": name}} for name in ("other", "time")
    )
    call, long = (
        {"id": "1", "type": "function", "function": {"name": "a", "arguments": arguments}}
        for arguments in ("[]", json.dumps({"text": "word, " * 10_000}))
    )
    for options, message in (
        ({"tools": [{"type": "search"}]}, "tools.0.type must be"),
        ({"tools": [], "tool_choice": "required"}, "must have tools"),
        ({"tool_choice": "often"}, "tool_choice must be none, auto, required, or a function"),
        ({"tool_choice": {"type": "function", "name": "time"}}, "tool_choice must be none, auto,"),
        ({"tool_choice": named}, "must have the tool that tool_choice names"),
        ({"tools": [broken], "tool_choice": "required"}, "tools: Invalid type: objekt"),
        ({"response_format": {"type": "json_object"}}, "must not set both tools and"),
        ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [call]}]}, "JSON object"),
        (
            {"messages": [*HELLO, {"role": "assistant", "tool_calls": [long]}]},
            "characters leave no",
        ),
        ({"tool_choice": "required", "extra_body": {"ignore_eos": True}}, "tool_choice excludes"),
        ({"tool_choice": named_time, "extra_body": {"min_tokens": 60}}, "tool_choice excludes"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            ask(client, **options)
    with pytest.raises(openai.BadRequestError, match="chat template ignores") as raised:
        ask(server.client())
    assert raised.value.param == "tools"
    assert ask(server.client(), tool_choice="none").choices[0].message.content
