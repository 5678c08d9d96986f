"""``eagle-fsd serve all`` before today's OpenAI client."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import cache
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch

from eagle_fsd import EagleFSD
from eagle_fsd.utils.chat_templates import chat_format, encode_prompt

#: Seconds that a busy machine may take for anything.
PATIENCE = 180
NAME = "eagle-fsd-bundled"
QUESTION = "Mia has 8 apples at home. Then she gives 3 apples to Tom. How many apples are left?"
HELLO = [{"role": "user", "content": "Hello!"}]
EXACT = {"fsd": {"threshold": 0.0}}
#: How many requests may wait at the servers that the tests share.
QUEUE = 24


def free_ports(count: int) -> list[int]:
    """Ports that nobody had a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    for item in sockets:
        item.bind(("127.0.0.1", 0))
    ports = [item.getsockname()[1] for item in sockets]
    for item in sockets:
        item.close()
    return ports


class Servers:
    """``serve all`` in a process of its own.

    Attributes:
        lines: What it printed until it was up. log: What it printed since.
    """

    def __init__(self, *options: str, keys: str = "") -> None:
        self.api, self.controller, self.worker = free_ports(3)
        command = [sys.executable, "-m", "eagle_fsd.cli", "serve", "all"]
        command += ["--port", str(self.api), "--controller-port", str(self.controller)]
        command += ["--worker-port", str(self.worker), *options]
        environment = {**os.environ, "EAGLE_FSD_API_KEYS": keys, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith("curl "):
                break
        assert "".join(self.lines[-1:]).startswith("curl "), "".join(self.lines)
        self.log: list[str] = []
        # Read on, or it would stand still once the pipe is full.
        threading.Thread(target=self.log.extend, args=(self.process.stdout,), daemon=True).start()

    def process_of(self, name: str) -> psutil.Process:
        """The worker's, the API's or the controller's."""
        children = psutil.Process(self.process.pid).children()
        return next(child for child in children if name in child.cmdline())

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.api}/v1",
            api_key=key,
            max_retries=0,
            timeout=PATIENCE,
            http_client=httpx.Client(trust_env=False),
        )

    def queue_length(self) -> int:
        url = f"http://127.0.0.1:{self.worker}/worker_get_status"
        return httpx.post(url, trust_env=False, timeout=PATIENCE).json()["queue_length"]

    def stop(self, number: int = signal.SIGTERM) -> float:
        """Tell it to stop; after how many seconds nothing of it served any more."""
        children = psutil.Process(self.process.pid).children()
        begun = time.monotonic()
        self.process.send_signal(number)
        psutil.wait_procs(children, timeout=PATIENCE)
        seconds = time.monotonic() - begun
        self.process.wait(PATIENCE)
        return seconds


@cache
def shared_servers() -> Servers:
    """One for all tests, of other modules too, that leave it as they find it."""
    found = Servers("--queue", str(QUEUE))
    atexit.register(found.stop)
    return found


@pytest.fixture(scope="module")
def servers() -> Servers:
    return shared_servers()


@pytest.fixture(scope="module")
def client(servers: Servers) -> openai.OpenAI:
    return servers.client()


@pytest.fixture(scope="module")
def model() -> EagleFSD:
    return EagleFSD.from_pretrained()


def prompt(model: EagleFSD, messages: list[dict[str, str]]) -> torch.Tensor:
    return encode_prompt(messages, model.tokenizer, chat_format(model.tokenizer))


def expected(
    model: EagleFSD, messages: list[dict[str, str]], new: int = 128, **options: Any
) -> str:
    ids = prompt(model, messages)
    options = {"threshold": 0.0, **options}
    out = model.generate(ids, max_new_tokens=new, **options).sequences[0, ids.shape[1] :]
    return model.tokenizer.decode(out, skip_special_tokens=True)


def ask(client: openai.OpenAI, messages: list[dict[str, str]], **options: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 128, "extra_body": EXACT, **options}
    return client.chat.completions.create(model=NAME, messages=messages, **options)


def test_what_it_says_when_it_is_up(servers: Servers, client: openai.OpenAI) -> None:
    printed = "".join(servers.lines)
    assert f"http://127.0.0.1:{servers.api}/v1" in printed
    assert [item.id for item in client.models.list()] == [NAME]
    command = servers.lines[-1]
    said = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert '"role": "assistant"' in said.stdout


def test_greedy_text_is_the_librarys_and_hugging_faces(
    model: EagleFSD, client: openai.OpenAI
) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    reply = ask(client, messages)
    ids = prompt(model, messages)
    theirs = model.model.generate(ids, max_new_tokens=128, do_sample=False)[0, ids.shape[1] :]
    text = model.tokenizer.decode(theirs, skip_special_tokens=True)
    assert reply.choices[0].message.content == expected(model, messages) == text
    assert reply.choices[0].finish_reason == "stop"
    usage = reply.usage
    assert usage.prompt_tokens == ids.shape[1]
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.fuzzy_tokens == 0
    assert usage.tau > 2


def test_fsds_options_travel_with_the_request(model: EagleFSD, client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    reply = ask(client, messages, extra_body={"fsd": {"threshold": 0.4, "min_ratio": 0.0}})
    assert reply.choices[0].message.content == expected(
        model, messages, threshold=0.4, min_ratio=0.0
    )
    assert reply.usage.fuzzy_tokens > 0


def test_a_streamed_chat(model: EagleFSD, client: openai.OpenAI) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(ask(client, HELLO, **options))
    said = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(text or "" for text in said) == expected(model, HELLO)
    assert len(said) > 3
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 10
    assert chunks[-1].usage.tau > 2
    plain = list(ask(client, HELLO, stream=True))
    assert all(chunk.usage is None for chunk in plain)


def test_several_turns_parts_and_a_systems_word(model: EagleFSD, client: openai.OpenAI) -> None:
    first = expected(model, HELLO)
    messages = [*HELLO, {"role": "assistant", "content": first}]
    parts = [{"type": "text", "text": QUESTION[:30]}, {"type": "text", "text": QUESTION[30:]}]
    reply = ask(client, [*messages, {"role": "user", "content": parts}])
    joined = f"{QUESTION[:30]}\n{QUESTION[30:]}"
    assert reply.choices[0].message.content == expected(
        model, [*messages, {"role": "user", "content": joined}]
    )
    for role in ("system", "developer"):
        with_system = ask(client, [{"role": role, "content": "Be good."}, *HELLO])
        said = [{"role": "system", "content": "Be good."}, *HELLO]
        assert with_system.choices[0].message.content == expected(model, said)


def test_completions_stop_strings_and_two_choices(model: EagleFSD, client: openai.OpenAI) -> None:
    text = "Mia has 8 apples"
    ids = model.tokenizer(text, return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=24, threshold=0.0).sequences[0, ids.shape[1] :]
    whole = model.tokenizer.decode(out, skip_special_tokens=True)
    options = {"model": NAME, "temperature": 0, "max_tokens": 24, "extra_body": EXACT}
    reply = client.completions.create(prompt=text, **options)
    assert reply.choices[0].text == whole
    streamed = client.completions.create(prompt=text, stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole
    echoed = client.completions.create(prompt=text, echo=True, **options)
    assert echoed.choices[0].text == text + whole
    both = client.completions.create(prompt=[text, text], **options)
    assert [choice.text for choice in both.choices] == [whole, whole]
    word = whole.split()[3]
    stopped = client.completions.create(prompt=text, stop=[word, "never"], **options)
    assert stopped.choices[0].text == whole[: whole.index(word)]
    assert stopped.choices[0].finish_reason == "stop"
    two = ask(client, HELLO, n=2, temperature=1.5, seed=3)
    texts = [choice.message.content for choice in two.choices]
    assert len(set(texts)) == 2
    again = ask(client, HELLO, n=2, temperature=1.5, seed=3)
    assert [choice.message.content for choice in again.choices] == texts
    assert two.usage.completion_tokens > 10


def test_log_probabilities(model: EagleFSD, client: openai.OpenAI) -> None:
    reply = ask(client, HELLO, logprobs=True, top_logprobs=2)
    found = reply.choices[0].logprobs.content
    ids = prompt(model, HELLO)
    out = model.generate(ids, max_new_tokens=128, threshold=0.0).sequences
    with torch.no_grad():
        log_probs = model.model(out).logits[0, ids.shape[1] - 1 : -1].log_softmax(-1)
    own = log_probs.gather(1, out[0, ids.shape[1] :, None])[:, 0].tolist()
    assert [item.logprob for item in found] == pytest.approx(own, abs=1e-4)
    assert all(len(item.top_logprobs) == 2 for item in found)
    streamed = ask(client, HELLO, logprobs=True, stream=True)
    told = [
        item.logprob
        for chunk in streamed
        if chunk.choices and chunk.choices[0].logprobs
        for item in chunk.choices[0].logprobs.content
    ]
    # The end token has no text, so no chunk of its own.
    assert told == pytest.approx(own[: len(told)], abs=1e-4)
    assert len(told) >= len(own) - 1
    options = {"model": NAME, "prompt": "Mia has", "temperature": 0, "max_tokens": 5}
    completion = client.completions.create(logprobs=3, **options)
    plain = completion.choices[0].logprobs
    assert len(plain.token_logprobs) == len(plain.tokens) == completion.usage.completion_tokens
    assert all(len(top) == 3 for top in plain.top_logprobs)


def test_embeddings(client: openai.OpenAI) -> None:
    """As the client asks for them, in base64, and as lists."""
    reply = client.embeddings.create(model=NAME, input=["Hello!", "8 - 3 = 5"])
    vectors = torch.tensor([item.embedding for item in reply.data])
    assert torch.allclose(vectors.norm(dim=1), torch.ones(2), atol=1e-4)
    lists = client.embeddings.create(model=NAME, input="Hello!", encoding_format="float")
    assert lists.data[0].embedding == pytest.approx(vectors[0].tolist(), abs=1e-6)
    assert reply.usage.prompt_tokens > 2


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"model": "other"}, openai.NotFoundError, "other"),
        ({"temperature": 9}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"n": 99}, openai.BadRequestError, "n must be"),
        ({"extra_body": {"fsd": {"threshold": 9}}}, openai.BadRequestError, r"at most 0.5 here"),
        ({"extra_body": {"fsd": {"depth": 9}}}, openai.BadRequestError, "fsd has no setting depth"),
        ({"tools": [{"type": "function"}]}, openai.BadRequestError, "tools is not supported"),
        ({"messages": []}, openai.BadRequestError, "at least one message"),
        (
            {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]},
            openai.BadRequestError,
            "role 'tool'",
        ),
        (
            {"messages": [{"role": "user", "content": "Hello! " * 9000}]},
            openai.BadRequestError,
            "tokens",
        ),
        ({"stop": [str(number) for number in range(99)]}, openai.BadRequestError, "stop may hold"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_their_status(
    options: dict[str, Any], kind: type[Exception], words: str, stream: bool, client: openai.OpenAI
) -> None:
    """Of a stream too: it has not begun when it is refused."""
    asked = {"model": NAME, "messages": HELLO, "extra_body": EXACT, "stream": stream, **options}
    with pytest.raises(kind, match=words) as error:
        client.chat.completions.create(**asked)
    assert "Traceback" not in str(error.value)


def test_a_client_that_leaves_frees_the_worker(servers: Servers, client: openai.OpenAI) -> None:
    """In the middle of a stream, and of an answer that is not streamed."""
    # What has been said grows likelier each time, so that nothing but its length ends the answer.
    endless = {"temperature": 2, "max_tokens": 1900, "seed": 5}
    endless |= {"frequency_penalty": -2, "presence_penalty": -2}
    with ask(client, HELLO, stream=True, **endless) as stream:
        next(iter(stream))
        assert servers.queue_length() == 1
        next(iter(stream))
    impatient = client.with_options(timeout=0.3)
    with pytest.raises(openai.APITimeoutError):
        ask(impatient, HELLO, n=16, **endless)
    until = time.monotonic() + PATIENCE
    while servers.queue_length() and time.monotonic() < until:
        time.sleep(0.02)
    assert servers.queue_length() == 0
    assert ask(client, HELLO).choices[0].finish_reason == "stop"


def test_a_key_is_asked_for_and_ctrl_c_stops_all(client: openai.OpenAI) -> None:
    servers = Servers("--max-threshold", "0.1", "--threshold", "0", keys="one,two")
    assert "Authorization: Bearer $KEY" in servers.lines[-1]
    with pytest.raises(openai.AuthenticationError):
        servers.client("wrong").models.list()
    with pytest.raises(openai.AuthenticationError):
        ask(servers.client("wrong"), HELLO)
    assert ask(servers.client("two"), HELLO).choices[0].message.content
    with pytest.raises(openai.BadRequestError, match=r"at most 0.1 here"):
        ask(servers.client("one"), HELLO, extra_body={"fsd": {"threshold": 0.11, "min_ratio": 0.1}})
    # A hard end is made of those that are not gone after four seconds; a third of one is usual.
    assert servers.stop(signal.SIGINT) < 10
    for port in (servers.api, servers.controller, servers.worker):
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_taken_port_is_one_line(servers: Servers, run: Any) -> None:
    status, _, errors = run("serve", "all", "--port", servers.api)
    assert status == 1
    assert len(errors.splitlines()) == 1
    assert f"cannot serve at 127.0.0.1:{servers.api}" in errors
