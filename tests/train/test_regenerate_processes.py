"""``eagle-fsd train regenerate`` in two processes: the file is that of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trainings import run_process

from eagle_fsd.bundled.problems import problems
from eagle_fsd.model.config import TargetOptions
from eagle_fsd.train.chat_file import ChatFile
from eagle_fsd.train.config import RegenerateConfig
from eagle_fsd.train.loaded_target import LoadedTarget
from eagle_fsd.train.regenerate import rewrite_chats
from eagle_fsd.utils.files import read_jsonl

COUNT = 11
OPTIONS: dict[str, Any] = {"batch_size": 2, "max_new_tokens": 6, "seed": 4}
MODULE = ("-m", "eagle_fsd.cli")
TWO_PROCESSES = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
#: The command line, in which the second process is killed at its third chat.
KILLED_AT_THE_THIRD = """
import os, signal
from eagle_fsd.cli import main
from eagle_fsd.train import regenerate
original, calls = regenerate.append_line, []
def append_line(*arguments):
    calls.append(arguments)
    if os.environ["RANK"] == "1" and len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    original(*arguments)
regenerate.append_line = append_line
main()
"""


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    with path.open("w") as file:
        for problem in problems("test", COUNT, seed=3):
            turns = [("user", problem.question), ("assistant", "Wrong.")]
            messages = [{"role": role, "content": content} for role, content in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


@pytest.fixture(scope="module")
def expected(chats: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What one process writes."""
    out = tmp_path_factory.mktemp("one") / "chats.jsonl"
    rewrite_here(chats, out)
    return out.read_bytes()


def rewrite_here(chats: Path, out: Path) -> None:
    loaded = LoadedTarget.load(TargetOptions(), device_map="cpu")
    rewrite_chats(loaded, ChatFile(chats), out, RegenerateConfig(**OPTIONS))


def launch(program: tuple[str, ...], chats: Path, out: Path, status: int | None = 0) -> None:
    """Run the command in two processes."""
    words = ["train", "regenerate", "--data", chats, "--out", out]
    for name, value in OPTIONS.items():
        words += [f"--{name.replace('_', '-')}", value]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        run_process([*map(str, words)], [*TWO_PROCESSES, *program], status)


def files(out: Path) -> list[str]:
    return sorted(path.name for path in out.parent.iterdir())


@pytest.mark.slow
def test_killed_processes_resume_to_the_file_of_one(
    chats: Path, expected: bytes, tmp_path: Path
) -> None:
    """What was written before is kept, and part of a line is not."""
    out, script = tmp_path / "out" / "chats.jsonl", tmp_path / "killed.py"
    out.parent.mkdir()
    script.write_text(KILLED_AT_THE_THIRD)
    launch((str(script),), chats, out, status=None)
    assert not out.exists()
    part = out.with_name("chats.jsonl.part1")
    kept = [line["index"] for line in read_jsonl(part)]
    assert len(kept) == 2
    assert all(index % 2 == 1 for index in kept)
    marked = [{**line, "kept": True} for line in read_jsonl(part)]
    part.write_text("".join(json.dumps(line) + "\n" for line in marked) + '{"index": 9, ')
    launch(MODULE, chats, out)
    found = read_jsonl(out)
    assert [at for at, line in enumerate(found) if line.pop("kept", False)] == sorted(kept)
    assert found == [json.loads(line) for line in expected.splitlines()]
    assert files(out) == ["chats.jsonl", "chats.jsonl.meta.json"]


def test_parts_of_other_options_are_rejected(chats: Path, tmp_path: Path) -> None:
    out = tmp_path / "chats.jsonl"
    out.with_name("chats.jsonl.part1").write_text('{"index": 0, "messages": []}\n')
    with pytest.raises(ValueError, match="was written from other chats or options"):
        rewrite_here(chats, out)
