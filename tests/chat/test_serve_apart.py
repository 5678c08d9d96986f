"""Controller, API and worker started one by one, as on several machines."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack

import httpx
from test_load import server
from test_serve import HELLO, NAME, PATIENCE, free_ports


def test_servers_apart_find_each_other_and_end_at_one_ctrl_c() -> None:
    main, front, back = free_ports(3)
    controller, api = f"http://127.0.0.1:{main}", f"http://127.0.0.1:{front}"
    commands = {
        "controller": (["--port", str(main)], f"{controller}/test_connection"),
        "api": (["--port", str(front), "--controller", controller], f"{api}/v1/models"),
        "worker": (
            ["--port", str(back), "--controller", controller, "--name", NAME],
            f"http://127.0.0.1:{back}/health",
        ),
    }
    with ExitStack() as stack:
        processes = [
            stack.enter_context(server(probe, name, *options))
            for name, (options, probe) in commands.items()
        ]
        body = {"model": NAME, "messages": HELLO, "max_tokens": 4}
        until, status = time.monotonic() + PATIENCE, 0
        while status != 200:  # a worker registers once it can be reached
            assert time.monotonic() < until
            reply = httpx.post(
                f"{api}/v1/chat/completions", json=body, trust_env=False, timeout=PATIENCE
            )
            status = reply.status_code
            assert status in (200, 503)
        assert reply.json()["choices"][0]["message"]["content"]
        for process in processes:
            process.send_signal(signal.SIGINT)
        assert [process.wait(PATIENCE) for process in processes] == [130, 130, 130]
