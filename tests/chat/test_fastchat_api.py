"""FastChat's own API server in front of a worker, as an unmodified module."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from processes import HELLO, NAME, TIMEOUT, Servers, free_ports, seconds_until
from prompts import reference

from eagle_fsd import EagleFSD

pytestmark = [pytest.mark.xdist_group("servers"), pytest.mark.slow]


@pytest.fixture(scope="module")
def client(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A client of FastChat's API server, which writes a log to its working directory."""
    (port,) = free_ports(1)
    controller = f"http://127.0.0.1:{servers.controller}"
    command = [sys.executable, "-m", "fastchat.serve.openai_api_server", "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--controller-address", controller],
        cwd=tmp_path_factory.mktemp("fastchat"),
        env={**os.environ, "no_proxy": "127.0.0.1", "LOGDIR": ""},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}/v1"

    def ready() -> bool:
        assert process.poll() is None
        try:
            return httpx.get(f"{url}/models", trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        assert seconds_until(ready) < TIMEOUT
        http_client = httpx.Client(trust_env=False)
        yield openai.OpenAI(base_url=url, api_key="none", http_client=http_client)
    finally:
        process.kill()
        process.wait()


def test_chats(model: EagleFSD, client: openai.OpenAI) -> None:
    messages: Any = HELLO
    response = client.chat.completions.create(
        model=NAME, messages=messages, temperature=0, max_tokens=64, n=2, stop="never"
    )
    texts = [choice.message.content for choice in response.choices]
    assert texts == [reference(model, messages, threshold=model.acceptance.threshold)] * 2


def test_completions(model: EagleFSD, client: openai.OpenAI) -> None:
    prompt = "Mia has 8 apples"
    response = client.completions.create(
        model=NAME, prompt=prompt, temperature=0, max_tokens=5, echo=True, logprobs=1, best_of=1
    )
    choice = response.choices[0]
    assert choice.text.startswith(prompt)
    assert response.usage is not None
    assert response.usage.completion_tokens == 5


def test_embeddings(client: openai.OpenAI) -> None:
    response = client.embeddings.create(
        model=NAME, input=["Hello!", "8 - 3 = 5"], encoding_format="float"
    )
    assert [len(item.embedding) for item in response.data] == [128, 128]
