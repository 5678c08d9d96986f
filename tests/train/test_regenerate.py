"""Tests for rewriting chats with a loaded target: neither kills nor processes change the result."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trainings import TWO_PROCESSES, run_process, write_rounds

from eagle_fsd.bundled.problems import problems
from eagle_fsd.model.config import TargetOptions
from eagle_fsd.train.chat_file import Chat, ChatFile
from eagle_fsd.train.config import RegenerateConfig
from eagle_fsd.train.loaded_target import LoadedTarget
from eagle_fsd.train.regenerate import rewrite_chats
from eagle_fsd.train.writing import LocalWriter
from eagle_fsd.utils.chat_templates import encode_prompt
from eagle_fsd.utils.files import read_jsonl

COUNT = 7
OPTIONS: dict[str, Any] = {"batch_size": 3, "max_new_tokens": 6, "seed": 4}
OTHERS = "was written from other chats or options"
MODULE = ("-m", "eagle_fsd.cli")
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


class LocalRewriting:
    """Rewrites chats with the bundled target, whose answers differ from chat to chat."""

    def __init__(self, chats: ChatFile) -> None:
        self.chats = chats
        self.loaded = LoadedTarget.load(TargetOptions(), device_map="cpu")

    def __call__(
        self, out: Path, chats: Iterable[Chat] = (), progress: Any = None, **changes: Any
    ) -> ChatFile:
        """Rewrite the chats, or others, which are written beside the output first."""
        file = self.chats
        if chats:
            path = out.with_name("given.jsonl")
            path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
            file = ChatFile(path)
        config = RegenerateConfig(**OPTIONS).updated(**changes)
        return rewrite_chats(LocalWriter(self.loaded), file, out, config, progress)


@pytest.fixture(scope="module")
def rewrite(tmp_path_factory: pytest.TempPathFactory) -> LocalRewriting:
    """Chats of one, two and three rounds, some with a system turn."""
    questions = [problem.question for problem in problems("test", 3 * COUNT, seed=3)]
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    return LocalRewriting(ChatFile(write_rounds(path, questions)))


@pytest.fixture(scope="module")
def uninterrupted(rewrite: LocalRewriting, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("rewritten") / "chats.jsonl"
    rewrite(out)
    return out


def test_only_assistant_turns_change(rewrite: LocalRewriting, uninterrupted: Path) -> None:
    rewritten = ChatFile(uninterrupted)
    assert (len(rewritten), rewritten.skipped) == (COUNT, 0)
    for before, after in zip(rewrite.chats, rewritten, strict=True):
        assert [item["role"] for item in after] == [item["role"] for item in before]
        for old, new in zip(before, after, strict=True):
            assert (new["content"] == old["content"]) == (old["role"] != "assistant")
            assert new["content"] == new["content"].strip() != ""
            assert "<|" not in new["content"]
    assert [line["index"] for line in read_jsonl(uninterrupted)] == list(range(COUNT))


def test_greedy_answer_is_the_targets_answer_to_the_rewritten_chat(
    rewrite: LocalRewriting, tmp_path: Path
) -> None:
    loaded = rewrite.loaded
    for chat in list(rewrite(tmp_path / "out.jsonl", temperature=0.0))[:3]:
        for place, message in enumerate(chat):
            if message["role"] == "assistant":
                ids = encode_prompt(chat[:place], loaded.tokenizer, loaded.chat_template)
                output = loaded.target.model.generate(ids, max_new_tokens=6, do_sample=False)
                new = output[0, ids.shape[1] :]
                answer = loaded.tokenizer.decode(new, skip_special_tokens=True)
                assert message["content"] == answer.strip()


def test_interrupted_run_resumes_to_the_same_result(
    rewrite: LocalRewriting, uninterrupted: Path, tmp_path: Path
) -> None:
    """A run resumes from complete and partial lines, also with another batch size."""
    lines = uninterrupted.read_text().splitlines(keepends=True)
    out = tmp_path / "chats.jsonl"
    shutil.copy(f"{uninterrupted}.meta.json", f"{out}.meta.json")
    for kept, partial in (([], True), ([4, 1], True), (range(6, -1, -1), False)):
        rest = lines[2][:30] if partial else ""
        out.write_text("".join(lines[index] for index in kept) + rest)
        reported: list[tuple[int, int]] = []
        rewrite(out, progress=lambda *now, to=reported: to.append(now), batch_size=2)
        assert out.read_bytes() == uninterrupted.read_bytes()
        assert reported == [(done, COUNT) for done in range(len(kept), COUNT + 1)]


def test_output_of_other_options_is_rejected(
    rewrite: LocalRewriting, uninterrupted: Path, tmp_path: Path
) -> None:
    """Output without a fingerprint is rejected, but an earlier version's fingerprint is valid."""
    out, meta = tmp_path / "chats.jsonl", tmp_path / "chats.jsonl.meta.json"
    shutil.copy(uninterrupted, tmp_path / "chats.jsonl.part1")
    with pytest.raises(ValueError, match=OTHERS):
        rewrite(out)
    (tmp_path / "chats.jsonl.part1").rename(out)
    fingerprint = json.loads(Path(f"{uninterrupted}.meta.json").read_text())
    del fingerprint["top_p"], fingerprint["top_k"]
    meta.write_text(json.dumps({**fingerprint, "dtype": "float16"}))
    with pytest.raises(ValueError, match=OTHERS):
        rewrite(out)
    del fingerprint["dtype"]
    meta.write_text(json.dumps({**fingerprint, "batch_size": 5}))
    for change in ({"seed": 5}, {"temperature": 0.0}, {"top_p": 0.9}):
        with pytest.raises(ValueError, match=OTHERS):
            rewrite(out, **change)
    rewrite(out)
    assert out.read_bytes() == uninterrupted.read_bytes()
    rewrite(tmp_path / "other.jsonl", seed=5)
    assert (tmp_path / "other.jsonl").read_bytes() != out.read_bytes()


def test_chat_ends_where_the_context_is_full(
    rewrite: LocalRewriting, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chat = [
        {"role": role, "content": content}
        for question in ("How many?", " apples" * 3000, "And now?")
        for role, content in (("user", question), ("assistant", "x"))
    ]
    (rewritten,) = rewrite(tmp_path / "out.jsonl", [chat], temperature=0.0)
    assert [message["role"] for message in rewritten] == ["user", "assistant"]
    assert rewritten[0]["content"] == "How many?"
    assert "1 of 1 chats end early; the first one: line 1: the context is full" in caplog.text


def test_answers_end_at_the_template_s_stop_string(
    rewrite: LocalRewriting, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (chat,) = rewrite(tmp_path / "whole.jsonl", [rewrite.chats[0]], temperature=0.0)
    text = chat[-1]["content"]
    stop = text[len(text) // 2 :][:3]
    monkeypatch.setattr(rewrite.loaded.chat_template, "stop", [stop], raising=False)
    (chat,) = rewrite(tmp_path / "cut.jsonl", [rewrite.chats[0]], temperature=0.0)
    assert chat[-1]["content"] == text.partition(stop)[0].strip()


def test_chats_without_an_answer_are_kept_by_every_process(
    rewrite: LocalRewriting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second process has fewer chats than the first one, and its target answers none."""
    state = SimpleNamespace(process_index=1, num_processes=2, wait_for_everyone=lambda: None)
    monkeypatch.setattr("eagle_fsd.train.regenerate.PartialState", lambda: state)
    chats = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": "x"}]
        for text in ("How many?", " apples" * 3000, "And now?")
    ]
    with pytest.raises(FileNotFoundError):  # the first process would write the output
        rewrite(tmp_path / "out.jsonl", chats)
    assert [line["index"] for line in read_jsonl(tmp_path / "out.jsonl.part1")] == [1]


@pytest.mark.slow
def test_killed_processes_resume_to_the_file_of_one(
    rewrite: LocalRewriting, uninterrupted: Path, tmp_path: Path
) -> None:
    """What was written before is kept, and part of a line is not."""
    out, script = tmp_path / "out" / "chats.jsonl", tmp_path / "killed.py"
    out.parent.mkdir()
    script.write_text(KILLED_AT_THE_THIRD)

    def launch(program: tuple[str, ...], status: int | None = 0) -> None:
        words = ["train", "regenerate", "--data", rewrite.chats.path, "--out", out]
        for name, value in OPTIONS.items():
            words += [f"--{name.replace('_', '-')}", value]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ACCELERATE_USE_CPU", "true")
            run_process([*map(str, words)], [*TWO_PROCESSES, *program], status)

    launch((str(script),), status=None)
    assert not out.exists()
    part = out.with_name("chats.jsonl.part1")
    kept = [line["index"] for line in read_jsonl(part)]
    assert len(kept) == 2
    assert all(index % 2 == 1 for index in kept)
    marked = [{**line, "kept": True} for line in read_jsonl(part)]
    part.write_text("".join(json.dumps(line) + "\n" for line in marked) + '{"index": 9, ')
    launch(MODULE)
    found = read_jsonl(out)
    assert [at for at, line in enumerate(found) if line.pop("kept", False)] == sorted(kept)
    assert found == read_jsonl(uninterrupted)
    names = sorted(path.name for path in out.parent.iterdir())
    assert names == ["chats.jsonl", "chats.jsonl.meta.json"]
