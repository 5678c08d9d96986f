"""The terminal chat as people run it: a process on a terminal of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pexpect = pytest.importorskip("pexpect")

COMMAND = ["-m", "eagle_fsd.cli", "chat", "--max-new-tokens", "64"]
ENVIRONMENT = {**os.environ, "COLUMNS": "100", "TERM": "xterm", "OMP_NUM_THREADS": "1"}
#: Seconds that a busy machine may take to load the pair or to answer.
PATIENCE = 600


@pytest.fixture
def start() -> Iterator[Callable[..., pexpect.spawn]]:
    children = []

    def call(*options: str) -> pexpect.spawn:
        child = pexpect.spawn(
            sys.executable,
            [*COMMAND, *options],
            env=ENVIRONMENT,
            timeout=PATIENCE,
            encoding="utf-8",
            dimensions=(40, 100),
        )
        children.append(child)
        return child

    yield call
    for child in children:
        child.close(force=True)


def test_a_simple_session(start: Callable[..., pexpect.spawn]) -> None:
    """Answers, a command of ours, Ctrl-C in the middle of an answer, Ctrl-C at the prompt."""
    # No end token comes early, so there is a long answer to interrupt: small talk goes on and on.
    child = start("--show-origins", "--max-new-tokens", "1500", "--temperature", "2", "--seed", "7")
    child.expect("User: ")
    child.sendline("Hello!")
    child.expect("Assistant: ")
    child.expect(re.compile(r"\d+\.\d tokens/s, tau \d\.\d\d, \d+% fuzzy of \d+ tokens"))
    child.expect("User: ")
    child.sendline("!!threshold 0.3")
    child.expect("threshold is 0.3")
    child.expect("User: ")
    child.sendline("What can you do?")
    child.expect("Assistant: ")
    child.expect(re.compile(r"\w+"))
    child.sendintr()
    # Stopped, or it had just come to its end: in either case the chat goes on.
    child.expect(["stopped generation", "tokens/s"])
    child.expect("User: ")
    child.sendline("!!exit")
    child.expect("exit...")
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 0


#: What prompt_toolkit writes once it reads keys; what is sent before that may be thrown away.
READING = "\x1b[?2004h"


def test_a_rich_session(start: Callable[..., pexpect.spawn]) -> None:
    child = start("--style", "rich")

    def say(keys: str, *answers: str) -> None:
        child.expect("User")
        child.expect_exact(READING)
        child.send(keys)
        for answer in answers:
            child.expect(answer)

    say("Hello!\r", "Assistant", "tokens/s")
    say("!!divergence tv\r", "divergence is tv")
    # The question is told again, after the role's name.
    say("!!regen\r", "regenerating last message", "User", "tokens/s")
    say("\x04", "exit...")
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 0


def test_a_program_that_ends_without_goodbye() -> None:
    """FastChat's own style for programs would spin on the end of its input."""
    done = subprocess.run(
        [sys.executable, *COMMAND, "--style", "programmatic"],
        input="Hello! __END_OF_A_MESSAGE_47582648__\n",
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert done.stdout.startswith("[!OP:User]: Hello!\n[!OP:Assistant]: ")
    assert done.stdout.endswith("exit...\n")
    assert "tokens/s" in done.stderr
    assert "tokens/s" not in done.stdout


def test_a_long_line_arrives_whole(start: Callable[..., pexpect.spawn], tmp_path: Path) -> None:
    """A terminal by itself cuts it at 4095 characters."""
    child, line = start(), "long " * 1500 + "end"
    child.expect("User: ")
    child.sendline(line)
    child.expect(["tokens/s", "no room"])
    child.expect("User: ")
    child.sendline(f"!!save {tmp_path}/chat")
    child.expect("saving...")
    child.sendline("!!exit")
    child.expect(pexpect.EOF)
    saved = json.loads((tmp_path / "chat.json").read_text())
    assert saved["messages"][0][1] == line


def test_letters_that_a_terminal_lacks_are_no_error(tmp_path: Path) -> None:
    """Neither where they are read nor where they are shown."""
    saved = {"template_name": "eagle-fsd", "system_message": "", "messages": [["User", "café"]]}
    (tmp_path / "chat.json").write_text(json.dumps(saved))
    done = subprocess.run(
        [sys.executable, *COMMAND],
        input=f"café\n!!load {tmp_path}/chat.json\nHello!\n".encode("latin-1"),
        env={**ENVIRONMENT, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert b"User: caf?\n" in done.stdout
    assert done.stdout.count(b"Assistant: ") == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--style", "fancy"), "--style must be one of simple, rich, programmatic"),
        (("--conv-template", "nonsense"), "FastChat has no template"),
        (("--temperature", "-1"), "temperature"),
        (("--target", "nowhere"), "name both a target and a head"),
    ],
)
def test_bad_options_are_one_line(options: tuple[str, ...], words: str, run) -> None:
    status, _, errors = run("chat", *options)
    assert status in (1, 2)
    assert len(errors.splitlines()) == 1
    assert words in errors
