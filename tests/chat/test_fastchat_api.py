"""A worker behind FastChat's own controller and API server, which are unmodified."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
ENVIRONMENT = {**os.environ, "no_proxy": "127.0.0.1", "LOGDIR": ""}
#: Calls the functions behind FastChat's web page, with a mock of Gradio, which renders it.
WEB_PAGE = """
import json, sys
from unittest.mock import MagicMock
sys.modules["gradio"] = MagicMock()
out = sys.stdout
from fastchat.serve import gradio_web_server as web
url, message = sys.argv[1:]
web.set_global_vars(url, False)
(model,), _ = web.get_model_list(url, None, False)
visitor = MagicMock(headers={})
visitor.client.host = "127.0.0.1"
state = web.add_text(None, model, message, None, visitor)[0]
prompt = state.conv.get_prompt()
shown = [state.conv.messages[-1][1] for _ in web.bot_response(state, 0, 1, 24, visitor)]
json.dump([model, prompt, shown], out)
"""


@contextmanager
def fastchat(module: str, folder: Path, probe: str, *arguments: str) -> Iterator[str]:
    """Run one of FastChat's servers, which writes a log to its folder; yields its URL."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", f"fastchat.serve.{module}", "--port", str(port), *arguments],
        cwd=folder,
        env=ENVIRONMENT,
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


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start FastChat's controller and one of our workers, and return the controller's URL."""
    with fastchat("controller", tmp_path_factory.mktemp("controller"), "/test_connection") as url:
        worker = ServerProcess("serve", "worker", "--controller", url, EAGLE_FSD_API_KEYS=KEY)

        def known() -> bool:
            models = httpx.post(f"{url}/list_models", trust_env=False).json()["models"]
            return models == [NAME]

        try:
            assert seconds_until(known) < TIMEOUT
            status = httpx.post(f"{worker.url}/model_details", trust_env=False).status_code
            assert status == 401
            yield url
        finally:
            worker.stop()


@pytest.fixture(scope="module")
def client(controller: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """Start FastChat's API server, and return an OpenAI client for it."""
    folder, options = tmp_path_factory.mktemp("api"), ("--controller-address", controller)
    with fastchat("openai_api_server", folder, "/v1/models", *options) as url:
        http_client = httpx.Client(trust_env=False)
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", http_client=http_client)


def test_chats_completions_and_embeddings(model: EagleFSD, client: openai.OpenAI) -> None:
    messages: Any = HELLO
    chat = client.chat.completions.create(
        model=NAME, messages=messages, temperature=0, max_tokens=64, n=2, stop="never"
    )
    texts = [choice.message.content for choice in chat.choices]
    assert texts == [reference(model, messages, threshold=model.acceptance.threshold)] * 2
    prompt = "Mia has 8 apples"
    completion = client.completions.create(
        model=NAME, prompt=prompt, temperature=0, max_tokens=5, echo=True, logprobs=1, best_of=1
    )
    assert completion.choices[0].text.startswith(prompt)
    assert completion.usage.completion_tokens == 5
    embedded = client.embeddings.create(
        model=NAME, input=["Hello!", "8 - 3 = 5"], encoding_format="float"
    )
    assert [len(item.embedding) for item in embedded.data] == [128, 128]


def test_the_web_page(model: EagleFSD, controller: str, tmp_path: Path) -> None:
    """It streams the answer to a prompt in the format that FastChat has for unknown models."""
    command = [sys.executable, "-c", WEB_PAGE, controller, "Mia has 8 apples."]
    done = subprocess.run(
        command, cwd=tmp_path, env=ENVIRONMENT, check=True, capture_output=True, text=True
    )
    name, prompt, shown = json.loads(done.stdout)
    ids = model.tokenizer(prompt, return_tensors="pt").input_ids
    answer = model.generate(ids, max_new_tokens=24).sequences[0, ids.shape[1] :]
    assert (name, shown[0]) == (NAME, "▌")
    assert shown[-1] == model.tokenizer.decode(answer, skip_special_tokens=True).strip()
    assert len(shown) > 5
