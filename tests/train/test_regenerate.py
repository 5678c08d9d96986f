"""Tests for rewriting chats with the target: the result does not depend on interruptions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from trainings import write_rounds

from eagle_fsd.bundled.problems import problems
from eagle_fsd.model.config import TargetOptions
from eagle_fsd.train.chat_file import Chat, ChatFile
from eagle_fsd.train.config import RegenerateConfig
from eagle_fsd.train.loaded_target import LoadedTarget
from eagle_fsd.train.regenerate import rewrite_chats
from eagle_fsd.utils.chat_templates import encode_prompt

COUNT = 7
BATCH_SIZE = 3
MAX_NEW_TOKENS = 6


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> ChatFile:
    """Chats of one, two and three rounds, some with a system turn."""
    questions = [problem.question for problem in problems("test", 3 * COUNT, seed=3)]
    return ChatFile(write_rounds(tmp_path_factory.mktemp("chats") / "chats.jsonl", questions))


class Rewriting:
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
        config = RegenerateConfig(batch_size=BATCH_SIZE, max_new_tokens=MAX_NEW_TOKENS, seed=4)
        return rewrite_chats(self.loaded, file, out, config.updated(**changes), progress)


@pytest.fixture(scope="module")
def rewrite(chats: ChatFile) -> Rewriting:
    return Rewriting(chats)


@pytest.fixture(scope="module")
def uninterrupted(rewrite: Rewriting, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("rewritten") / "chats.jsonl"
    rewrite(out)
    return out


def test_only_assistant_turns_change(uninterrupted: Path, chats: ChatFile) -> None:
    rewritten = ChatFile(uninterrupted)
    assert len(rewritten) == len(chats) == COUNT
    assert rewritten.skipped == 0
    for before, after in zip(chats, rewritten, strict=True):
        assert [item["role"] for item in after] == [item["role"] for item in before]
        for old, new in zip(before, after, strict=True):
            if old["role"] == "assistant":
                assert new["content"] != old["content"]
                assert new["content"] == new["content"].strip() != ""
                assert "<|" not in new["content"]
            else:
                assert new["content"] == old["content"]
    lines = [json.loads(line) for line in uninterrupted.read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(COUNT))


def test_greedy_answer_is_the_targets_answer_to_the_rewritten_chat(
    rewrite: Rewriting, tmp_path: Path
) -> None:
    rewritten = rewrite(tmp_path / "out.jsonl", temperature=0.0)
    for chat in list(rewritten)[:3]:
        for place, message in enumerate(chat):
            if message["role"] != "assistant":
                continue
            ids = encode_prompt(
                chat[:place], rewrite.loaded.tokenizer, rewrite.loaded.chat_template
            )
            output = rewrite.loaded.target.model.generate(
                ids, max_new_tokens=MAX_NEW_TOKENS, do_sample=False
            )
            new = output[0, ids.shape[1] :]
            answer = rewrite.loaded.tokenizer.decode(new, skip_special_tokens=True)
            assert message["content"] == answer.strip()


@pytest.mark.slow
def test_the_batch_does_not_change_the_result(rewrite: Rewriting, tmp_path: Path) -> None:
    """Chats of one to three turns, alone, more than a batch holds, and all at once."""
    for temperature in (0.0, 1.0):
        found = set()
        for size in (1, 2, 8):
            out = tmp_path / f"{size}-{temperature}.jsonl"
            rewrite(out, temperature=temperature, batch_size=size, max_new_tokens=12)
            found.add(out.read_bytes())
        assert len(found) == 1


def test_interrupted_run_resumes_to_the_same_result(
    rewrite: Rewriting, uninterrupted: Path, tmp_path: Path
) -> None:
    """With some complete lines and part of another, and another batch size."""
    lines = uninterrupted.read_text().splitlines(keepends=True)
    out = tmp_path / "chats.jsonl"
    shutil.copy(f"{uninterrupted}.meta.json", f"{out}.meta.json")
    for kept, partial in (([], True), ([0], False), ([4, 1], True), (range(6, -1, -1), False)):
        rest = lines[2][:30] if partial else ""
        out.write_text("".join(lines[index] for index in kept) + rest)
        reported: list[tuple[int, int]] = []
        rewrite(out, progress=lambda *now, to=reported: to.append(now), batch_size=2)
        assert out.read_bytes() == uninterrupted.read_bytes()
        assert reported == [(done, COUNT) for done in range(len(kept) + 1, COUNT + 1)]


def test_output_of_other_options_is_rejected(
    rewrite: Rewriting, uninterrupted: Path, tmp_path: Path
) -> None:
    """Or without a fingerprint. One of an earlier version has no top_p, but a batch size."""
    out, meta = tmp_path / "chats.jsonl", tmp_path / "chats.jsonl.meta.json"
    shutil.copy(uninterrupted, out)
    with pytest.raises(ValueError, match="was written from other chats or options"):
        rewrite(out)
    shutil.copy(f"{uninterrupted}.meta.json", meta)
    for change in ({"seed": 5}, {"temperature": 0.0}, {"top_p": 0.9}):
        with pytest.raises(ValueError, match="was written from other chats or options"):
            rewrite(out, **change)
    fingerprint = json.loads(meta.read_text())
    del fingerprint["top_p"], fingerprint["top_k"]
    meta.write_text(json.dumps({**fingerprint, "batch_size": 5}))
    rewrite(out)
    with pytest.raises(ValueError, match="other chats or options"):
        rewrite(out, top_p=0.9)
    assert out.read_bytes() == uninterrupted.read_bytes()
    other = tmp_path / "other.jsonl"
    rewrite(other, seed=5)
    assert other.read_bytes() != out.read_bytes()


def test_chat_ends_where_the_context_is_full(rewrite: Rewriting, tmp_path: Path) -> None:
    chat = [
        {"role": role, "content": content}
        for question in ("How many?", " apples" * 3000, "And now?")
        for role, content in (("user", question), ("assistant", "x"))
    ]
    (rewritten,) = rewrite(tmp_path / "out.jsonl", [chat], temperature=0.0)
    assert [message["role"] for message in rewritten] == ["user", "assistant"]
    assert rewritten[0]["content"] == "How many?"
