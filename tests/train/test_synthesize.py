"""Chats that a target writes: deterministic, resumable, and sifted."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stub_endpoint import USAGE, Reply, StubEndpoint, failure

from eagle_fsd.bundled import BUNDLED_TARGET
from eagle_fsd.model.config import TargetOptions
from eagle_fsd.model.loading import load_tokenizer
from eagle_fsd.train.config import RegenerateServer, SynthesizeConfig, SynthesizeRequest
from eagle_fsd.train.loaded_target import LoadedTarget
from eagle_fsd.train.synthesize import NearDuplicates, Sieve, is_repetitive, synthesize, user_header
from eagle_fsd.utils.chat_templates import FastChatTemplate, TokenizerTemplate

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}{{ '<|start_header_id|>' + m.role +"
    " '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
GEMMA = (
    "{{ '<bos>' }}{% for m in messages %}{{ '<start_of_turn>' + m.role + '\n' + m.content +"
    " '<end_of_turn>\n' }}{% endfor %}{{ '<start_of_turn>model\n' }}"
)
#: Options under which the bundled target writes short chats: beginnings of small talk.
PREFIXES = ("who are", "what do you", "how are", "Thank", "Good")
SMALL = {"prefix": PREFIXES, "user_temperature": 0.5, "max_user_tokens": 24, "max_new_tokens": 48}


def write(out: Path, count: int = 4, **options: Any) -> list[dict[str, Any]]:
    """Write chats with the bundled target; return the lines."""
    request = SynthesizeRequest(out=out, count=count, dtype=options.pop("dtype", None))
    config = SynthesizeConfig(**{**SMALL, **options})
    assert len(synthesize(request, config)) == count
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_headers_of_templates() -> None:
    """Headers are derived by rendering a message, and a template without one is rejected."""
    tokenizer = copy.deepcopy(load_tokenizer(BUNDLED_TARGET))
    system = [{"role": "system", "content": "Be brief."}]
    for template, chat, header, footer in (
        (CHATML, [], "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
        (
            LLAMA3,
            system,
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\n",
            "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (GEMMA, [], "<bos><start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n"),
    ):
        tokenizer.chat_template = template
        assert user_header(chat, TokenizerTemplate(tokenizer)) == (header, footer)
    header, footer = user_header([], FastChatTemplate("vicuna_v1.1"))
    assert header.endswith("polite answers to the user's questions. USER: ")
    assert footer == " ASSISTANT:"
    for template in ("{{ messages[0].content }}", "fixed", CHATML + "{{ messages[-1].content }}"):
        tokenizer.chat_template = template
        with pytest.raises(ValueError, match="no header before a user's message"):
            user_header([], TokenizerTemplate(tokenizer))


def test_repetitions_and_near_duplicates() -> None:
    draw = random.Random(0)
    thai = ["".join(draw.choices("กขคงจชดตถทนบปพมยรลวสหอ", k=5)) for _ in range(300)]
    for text, expected in {
        "no " * 20: False,  # too short to judge
        "I am sorry, I do not know. " * 30: True,
        "你好。今天天气很好。" * 40: True,
        " ".join(map(str, range(500, 700))): False,
        " ".join(draw.choices(thai, k=1200)): False,  # its bytes compress to a fifth
        user_header.__doc__ or "": False,
    }.items():
        assert is_repetitive(text) is expected, text
    seen = NearDuplicates()
    texts = ("How do I bake a loaf of rye bread at home?", "你好吗", "Hi", "")
    assert [seen.resembles_earlier(text) for text in texts] == [False] * 4
    assert seen.resembles_earlier("how do i bake a loaf of rye bread at home ???")
    assert seen.resembles_earlier("How do I bake a loaf of rye bread at home, please?")
    assert not seen.resembles_earlier("How do I bake a birthday cake for a child?")
    assert all(seen.resembles_earlier(text) for text in texts)


def test_sieve_decides_in_the_order_of_chats() -> None:
    """Chats that are written early wait, and no more are begun than may be needed."""
    lines: dict[int, dict[str, Any]] = {}
    sieve = Sieve(3, lines)
    indices = sieve.indices(ahead=False)
    assert [next(indices) for _ in range(4)] == [0, 1, 2, None]
    reported: list[tuple[int, int]] = []

    def add(index: int, text: str, **more: str) -> None:
        roles = ("user", "assistant")
        messages = [{"role": role, "content": text} for role in roles] if text else []
        lines[index] = {"index": index, "messages": messages, **more}
        sieve.advance(lambda *now: reported.append(now))

    add(2, "What is the capital of France?")
    assert (reported, next(indices)) == ([(0, 3)], None)
    add(0, "what is the capital of France")
    add(1, "", dropped="truncated")
    assert reported[-2:] == [(1, 3), (1, 3)]
    assert [next(indices) for _ in range(3)] == [3, 4, None]
    add(3, "Name three rivers.")
    add(4, "Why is the sea salty?", dropped="repetitive")
    assert sieve.complete
    assert list(indices) == []
    assert [line["index"] for line in sieve.kept] == [0, 3, 4]
    assert sieve.summary() == ("3 of 5 chats; dropped: 1 truncated, 1 near-duplicate, 1 repetitive")


def test_result_depends_on_neither_batch_nor_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 the result is reproducible, a larger count extends it, and prefixes take turns."""
    loaded = LoadedTarget.load(TargetOptions(dtype="float32"))
    monkeypatch.setattr(LoadedTarget, "load", lambda *_: loaded)
    systems = ("Be brief.", "Be kind.")
    options: dict[str, Any] = {"dtype": "float32", "turns": 2, "seed": 3, "system": systems}
    out = tmp_path / "chats.jsonl"
    lines = write(out, batch_size=3, **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == [out.name, f"{out.name}.meta.json"]
    for line in lines:
        index, (system, *messages) = line["index"], line["messages"]
        assert system == {"role": "system", "content": systems[index % 2]}
        roles = [message["role"] for message in messages]
        assert roles in (["user", "assistant"], ["user", "assistant"] * 2)
        assert all(message["content"].strip() for message in messages)
        prefix = PREFIXES[index // 2 % len(PREFIXES)]
        assert messages[0]["content"].startswith(prefix)
        assert messages[0]["content"] != prefix
        assert "<|" not in json.dumps(line)
    other = tmp_path / "other.jsonl"
    shutil.copy(f"{out}.meta.json", f"{other}.meta.json")
    part = other.with_name(f"{other.name}.part0")
    part.write_text(json.dumps(lines[1]) + "\n" + json.dumps(lines[0])[:30])
    assert write(other, batch_size=8, **options) == lines
    assert write(other, batch_size=8, count=5, **options)[:4] == lines
    with pytest.raises(ValueError, match=r"count must be at least 5, .*; got 4"):
        write(other, **options)
    # A chat may be missing before those that suffice.
    part.write_text("".join(json.dumps(line) + "\n" for line in (lines[0], *lines[2:])))
    other.unlink()
    assert write(other, 2, **options) == lines[:2]
    # A chat that a complete run left out is not written again.
    other.write_text("".join(json.dumps(lines[at]) + "\n" for at in (0, 2)))
    assert write(other, count=3, **options) == [lines[0], *lines[2:]]
    with pytest.raises(ValueError, match="was written from other chats or options"):
        write(out, **{**options, "seed": 4})


def test_unusable_chats_end_the_run(tmp_path: Path, run: Callable[..., tuple]) -> None:
    """The error counts the dropped chats by reason."""
    words = ("train", "synthesize", "--out", tmp_path / "chats.jsonl", "--max-user-tokens", 1)
    status, _, errors = run(*words, "--count", 50)
    assert status == 1
    assert "error: hardly any chat is usable: 0 of 100 chats; dropped: 100 truncated" in errors


class StubServer(StubEndpoint):
    """A server with a completions endpoint, which writes a message of its own per prompt."""

    def reply(self, body: dict[str, Any]) -> Reply:
        prompt, number = body["prompt"], body["seed"] // 1024
        if number == 2:
            return failure(400, "the prompt is too long")
        asks = prompt.endswith("<|user|>")
        text = f" Question {number}: what is {number} + {'1' * (number + 1)}?" if asks else " Sum."
        reason = "length" if number == 1 and not asks else "stop"
        choice = {"index": 0, "text": text, "finish_reason": reason, "logprobs": None}
        head = {"id": "1", "object": "text_completion", "created": 0, "model": body["model"]}
        return 200, {**head, "choices": [choice], "usage": USAGE}


def test_a_server_writes_chats(tmp_path: Path) -> None:
    """Raw prompts end with the header, and chats the server rejects or truncates are dropped."""
    stub = StubServer()
    try:
        server = RegenerateServer(base_url=stub.url, model="org/target", concurrency=2)
        request = SynthesizeRequest(out=tmp_path / "chats.jsonl", count=3)
        written = synthesize(request, SynthesizeConfig(top_k=5), server)
        named = SynthesizeRequest(
            out=tmp_path / "named.jsonl", count=1, chat_template="qwen-7b-chat"
        )
        list(synthesize(named, SynthesizeConfig(), server))
    finally:
        stub.server.shutdown()
    gone = RegenerateServer(base_url=stub.url, model="org/target", timeout=1.0, retries=0)
    assert list(synthesize(request, SynthesizeConfig(top_k=5), gone)) == list(written)
    lines = request.out.read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines] == [0, 3, 4]
    assert list(written)[1] == [
        {"role": "user", "content": "Question 3: what is 3 + 1111?"},
        {"role": "assistant", "content": "Sum."},
    ]
    first = next(body for body in stub.requests if body["prompt"].endswith("<|user|>"))
    assert (first["temperature"], first["top_k"], first["stop"]) == (1.0, 5, ["<|end|>"])
    (end,) = first["stop_token_ids"]  # servers do not look for special tokens in text
    assert load_tokenizer(BUNDLED_TARGET).decode([end]) == "<|end|>"
    # Those of a named template end answers, too.
    answers = [body for body in stub.requests if body["prompt"].endswith("<|im_start|>assistant\n")]
    assert answers
    assert all(body["stop_token_ids"] == [151643, 151644, 151645] for body in answers)
