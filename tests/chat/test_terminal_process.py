"""``eagle-fsd chat`` as a process with a terminal of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from api_servers import TIMEOUT

pexpect = pytest.importorskip("pexpect")

COMMAND = ["-m", "eagle_fsd.cli", "chat", "--max-new-tokens", "64"]
ENVIRONMENT = {**os.environ, "COLUMNS": "100", "TERM": "xterm", "OMP_NUM_THREADS": "1"}
#: What prompt_toolkit writes when it starts to read keys; earlier ones may be lost.
READING = "\x1b[?2004h"

Start = Callable[..., "pexpect.spawn[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    children = []

    def start(*options: str) -> pexpect.spawn[str]:
        child = pexpect.spawn(
            sys.executable,
            [*COMMAND, *options],
            env=ENVIRONMENT,
            timeout=TIMEOUT,
            encoding="utf-8",
            dimensions=(40, 100),
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.close(force=True)


def test_simple_style(start: Start, tmp_path: Path) -> None:
    """Pasted lines, commands, Ctrl-C in an answer, a line longer than the terminal's buffer."""
    child = start("--show-origins", "--temperature", "2", "--seed", "7")
    child.expect("eagle-fsd-bundled, threshold .*Commands: !!help .*!!exit.*Colors: ")
    child.expect("User: ")
    pasted = "First line\nsecond line\n\nthird line"
    child.send(f"\x1b[200~{pasted}\x1b[201~")
    child.send("\r")
    child.expect("Assistant: ")
    child.expect(re.compile(r"\d+\.\d tokens/s, tau \d+\.\d\d, \d+% fuzzy of \d+ tokens"))
    child.expect("User: ")

    def set_option(name: str, value: str) -> None:
        child.sendline(f"!!{name} {value}")
        child.expect(f"{name} is {value}")
        child.expect("User: ")

    set_option("threshold", "0.3")
    set_option("max-new-tokens", "1500")  # long enough to be interrupted at this temperature
    child.sendline("What can you do?")
    child.expect("Assistant: ")
    child.expect(re.compile(r"\w+"))
    child.sendintr()
    child.expect(["stopped", "tokens/s"])  # or the answer had just ended
    child.expect("User: ")
    set_option("max-new-tokens", "8")
    line = "long " * 1500 + "end"  # a terminal passes on 4095 characters
    child.sendline(line)
    child.expect(["tokens/s", "no room"])
    child.expect("User: ")
    child.sendline(f"!!save {tmp_path}/chat")
    child.expect("saving...")
    child.sendline("!!exit")
    child.expect("exit...")
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 0
    texts = [text for _, text in json.loads((tmp_path / "chat.json").read_text())["messages"]]
    assert (texts[0], texts[-2]) == (pasted, line)


@pytest.mark.slow
def test_rich_style(start: Start) -> None:
    child = start("--style", "rich")

    def send(keys: str, *outputs: str) -> None:
        child.expect("User")
        child.expect_exact(READING)
        child.send(keys)
        for output in outputs:
            child.expect(output)

    send("Hello!\r", "Assistant", "tokens/s")
    send("!!divergence tv\r", "divergence is tv")
    # The question is printed again, after the role.
    send("!!regen\r", "regenerating last message", "User", "tokens/s")
    send("\x04", "exit...")
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 0


@pytest.mark.slow
def test_characters_missing_in_the_encoding_are_replaced(tmp_path: Path) -> None:
    saved = {"template_name": "eagle-fsd", "system_message": "", "messages": [["User", "café"]]}
    (tmp_path / "chat.json").write_text(json.dumps(saved))
    done = subprocess.run(
        [sys.executable, *COMMAND],
        input=f"café\n!!load {tmp_path}/chat.json\nHello!\n".encode("latin-1"),
        env={**ENVIRONMENT, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    assert b"User: caf?\n" in done.stdout
    assert done.stdout.count(b"Assistant: ") == 2
    assert b"tokens/s" in done.stderr
    assert b"tokens/s" not in done.stdout
