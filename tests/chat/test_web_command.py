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

Run = Callable[..., tuple[int, str, str]]
TIMEOUT = 180
needs_gradio = pytest.mark.skipif(
    importlib.util.find_spec("gradio") is None,
    reason="the web page needs Gradio: the extra [web]",
)


@pytest.mark.parametrize("command", [["demo"], ["serve", "web"], ["serve", "all", "--web"]])
def test_missing_gradio_fails_with_install_instructions(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    # Other tests may have imported the page.
    monkeypatch.delitem(sys.modules, "eagle_fsd.chat.web.app", raising=False)
    monkeypatch.delattr("eagle_fsd.chat.web.app", raising=False)
    status, out, err = run(*command)
    assert status == 1
    assert out == ""
    assert err.count("\n") == 1
    assert "pip install 'eagle_fsd[web]'" in err


@pytest.mark.slow
def test_only_the_app_module_imports_gradio() -> None:
    code = (
        "import sys; sys.modules['gradio'] = None\n"
        "import eagle_fsd.cli\n"
        "from eagle_fsd.chat import backend, remote_backend\n"
        "from eagle_fsd.chat.web import guard, page, rendering\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("command", [["demo"], ["serve", "web"]])
@pytest.mark.parametrize(("option", "value"), [("temperature", -1), ("port", 0), ("top-p", 0)])
def test_out_of_range_options_are_usage_errors(
    run: Run, command: list[str], option: str, value: int
) -> None:
    status, _, err = run(*command, f"--{option}", value)
    assert status == 2
    assert option in err


@needs_gradio
def test_unreachable_controller_fails(run: Run) -> None:
    status, _, err = run("serve", "web", "--controller", "http://127.0.0.1:9", "--port", 17861)
    assert status == 1
    assert err.startswith("error: no worker can be reached through http://127.0.0.1:9: ")


@pytest.mark.slow
@needs_gradio
def test_demo_listens_on_localhost_and_stops_on_sigint() -> None:
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
        address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + TIMEOUT
        while True:
            try:
                page = httpx.get(address, trust_env=False, timeout=TIMEOUT).text
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        assert EXAMPLES[0] in page
        with socket.socket() as client:  # another address of this machine
            client.settimeout(5)
            assert client.connect_ex(("127.0.0.2", port)) != 0
        # Gradio keeps a connection to each open page.
        heartbeat = f"{address}/gradio_api/heartbeat/x"
        with httpx.stream("GET", heartbeat, trust_env=False) as open_page:
            next(open_page.iter_lines())
            start = time.monotonic()
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=TIMEOUT)
        assert time.monotonic() - start < 60
        assert process.returncode == 130
        assert err.splitlines()[-1].startswith("error: ")
        assert "Traceback" not in err
    finally:
        process.kill()
        process.wait()


def test_examples_belong_to_the_bundled_pair() -> None:
    assert examples_for(BUNDLED_NAME) == EXAMPLES
    assert examples_for("other") == ()
