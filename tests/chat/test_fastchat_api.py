"""A worker behind FastChat's own controller and API server, which are unmodified."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from api_servers import HELLO, NAME, TIMEOUT, ServerProcess, free_port, seconds_until
from prompts import reference

from eagle_fsd import EagleFSD

pytestmark = [pytest.mark.xdist_group("fastchat"), pytest.mark.slow]


KEY = "one/two three"


@contextmanager
def fastchat(module: str, folder: Path, probe: str, *arguments: str) -> Iterator[str]:
    """Run one of FastChat's servers, which writes a log to its folder; yields its URL."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", f"fastchat.serve.{module}", "--port", str(port), *arguments],
        cwd=folder,
        env={**os.environ, "no_proxy": "127.0.0.1", "LOGDIR": ""},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        assert process.poll() is None
        with suppress(httpx.HTTPError):
            return httpx.get(url + probe, trust_env=False).status_code == 200
        return False

    try:
        assert seconds_until(ready) < TIMEOUT
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module", params=["", KEY], ids=["open", "key"])
def client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    """A client of FastChat's API server, in front of FastChat's controller and our worker."""
    folder = tmp_path_factory.mktemp("fastchat")
    with ExitStack() as stack:
        controller = stack.enter_context(fastchat("controller", folder, "/test_connection"))
        keys = {"EAGLE_FSD_API_KEYS": request.param}
        worker = ServerProcess("serve", "worker", "--controller", controller, **keys)
        stack.callback(worker.stop)
        options = ("--controller-address", controller)
        url = stack.enter_context(fastchat("openai_api_server", folder, "/v1/models", *options))
        http_client = httpx.Client(trust_env=False)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", http_client=http_client)
        assert seconds_until(lambda: bool(client.models.list().data)) < TIMEOUT
        status = httpx.post(f"{worker.url}/model_details", trust_env=False).status_code
        assert status == (401 if request.param else 200)
        yield client


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
