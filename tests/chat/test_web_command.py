"""``eagle-fsd demo`` and ``eagle-fsd serve web``."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import httpx
import pytest

from eagle_fsd.cli.demo import BUNDLED_NAME, EXAMPLES, examples_for

PATIENCE = 180
needs_gradio = pytest.mark.skipif(
    importlib.util.find_spec("gradio") is None,
    reason="the web page needs gradio: the extra [web]",
)


@pytest.mark.parametrize("command", [["demo"], ["serve", "web"], ["serve", "all", "--web"]])
def test_without_gradio_one_line_says_what_to_install(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    # Other tests may have imported it: forget that, for this one.
    monkeypatch.delitem(sys.modules, "eagle_fsd.chat.web.app", raising=False)
    monkeypatch.delattr("eagle_fsd.chat.web.app", raising=False)
    status, out, err = run(*command)
    assert status == 1
    assert out == ""
    assert err.count("\n") == 1
    assert "pip install 'eagle_fsd[web]'" in err


def test_everything_else_works_without_gradio() -> None:
    code = (
        "import sys; sys.modules['gradio'] = None\n"
        "import eagle_fsd, eagle_fsd.cli\n"
        "from eagle_fsd.chat import backend as web_backend\n"
        "from eagle_fsd.chat.web import guard as web_guard\n"
        "from eagle_fsd.chat.web import page as web_page\n"
        "from eagle_fsd.chat import remote_backend as web_remote\n"
        "from eagle_fsd.chat.web import rendering as web_text\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("command", [["demo"], ["serve", "web"]])
def test_options_are_bounded(run: Callable[..., tuple[int, str, str]], command: list[str]) -> None:
    for option in (["--temperature", "7"], ["--port", "0"], ["--top-p", "0"]):
        status, _, err = run(*command, *option)
        assert status == 2
        assert option[0] in err


@needs_gradio
def test_a_controller_that_is_not_there(run: Callable[..., tuple[int, str, str]]) -> None:
    status, _, err = run("serve", "web", "--controller", "http://127.0.0.1:9", "--port", 17861)
    assert status == 1
    assert err == "error: " + err.removeprefix("error: ")
    assert "no worker answers through http://127.0.0.1:9" in err


@needs_gradio
def test_demo_serves_this_machine_alone_and_ends() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "eagle_fsd.cli", "demo", "--port", str(port), "--threshold", "0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout.readline() == f"web page    http://127.0.0.1:{port}\n"
        address, until = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE
        while True:
            try:
                page = httpx.get(address, trust_env=False, timeout=PATIENCE).text
                break
            except httpx.TransportError:
                assert time.monotonic() < until
                time.sleep(0.1)
        assert EXAMPLES[0] in page
        with socket.socket() as elsewhere:  # another of this machine's own addresses
            elsewhere.settimeout(5)
            assert elsewhere.connect_ex(("127.0.0.2", port)) != 0
        # With a page open, as gradio keeps a connection for one.
        with httpx.stream("GET", f"{address}/gradio_api/heartbeat/x", trust_env=False) as open_page:
            next(open_page.iter_lines())
            begun = time.monotonic()
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=PATIENCE)
        assert time.monotonic() - begun < 60
        assert process.returncode == 130
        assert err.splitlines()[-1] == "error: stopped"
        assert "Traceback" not in err
    finally:
        process.kill()
        process.wait()


def test_only_the_bundled_pair_comes_with_questions() -> None:
    assert examples_for(BUNDLED_NAME) == EXAMPLES
    assert examples_for("other") == ()
