"""Tests for rewriting chats with the target: the result does not depend on interruptions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trainings import train_here, write_rounds

from eagle_fsd.bundled.problems import problems
from eagle_fsd.model.batch import Batch
from eagle_fsd.model.config import SamplingConfig, TargetOptions
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.model.request import Answer, Request
from eagle_fsd.train.chat_file import Chat, ChatFile
from eagle_fsd.train.config import RegenerateConfig
from eagle_fsd.train.loaded_target import LoadedTarget
from eagle_fsd.train.regenerate import rewrite_chats
from eagle_fsd.utils.chat_templates import TokenizerTemplate, encode_prompt

COUNT = 7
BATCH_SIZE = 3
MAX_NEW_TOKENS = 6


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> ChatFile:
    """Chats of one, two and three rounds, some with a system turn."""
    questions = [problem.question for problem in problems("test", 3 * COUNT, seed=3)]
    return ChatFile(write_rounds(tmp_path_factory.mktemp("chats") / "chats.jsonl", questions))


class Rewriting:
    """Rewrites chats with the bundled target, whose answers differ from chat to chat.

    Attributes:
        chats: The chats, unless a call passes others.
        loaded: The target.
    """

    def __init__(self, chats: ChatFile) -> None:
        self.chats = chats
        self.loaded = LoadedTarget.load(TargetOptions(), device_map="cpu")

    def __call__(
        self, out: Path, chats: ChatFile | None = None, progress: Any = None, **changes: Any
    ) -> ChatFile:
        config = RegenerateConfig(batch_size=BATCH_SIZE, max_new_tokens=MAX_NEW_TOKENS, seed=4)
        chats = chats or self.chats
        return rewrite_chats(self.loaded, chats, out, config.updated(**changes), progress)


@pytest.fixture(scope="module")
def rewrite(chats: ChatFile) -> Rewriting:
    return Rewriting(chats)


@pytest.fixture(scope="module")
def uninterrupted(rewrite: Rewriting, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("rewritten") / "chats.jsonl"
    rewrite(out)
    return out


def write_messages(path: Path, chats: Iterable[Chat]) -> ChatFile:
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return ChatFile(path)


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
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_batch_does_not_change_the_result(
    rewrite: Rewriting, temperature: float, tmp_path: Path
) -> None:
    """Chats of one to three turns, alone, more than a batch holds, and all at once."""
    found = []
    for size in (1, 2, 8):
        out = tmp_path / f"{size}.jsonl"
        options = {"temperature": temperature, "batch_size": size, "max_new_tokens": 40}
        rewrite(out, **options)
        found.append(out.read_bytes())
    assert found[0] == found[1] == found[2]


def test_the_next_turn_joins_the_running_batch(
    rewrite: Rewriting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two chats with three turns each, one is running when a turn of the other joins."""
    running, add = [], Batch.add

    def recorded(batch: Batch, request: Request) -> Answer:
        running.append(len(batch))
        return add(batch, request)

    monkeypatch.setattr(Batch, "add", recorded)
    chosen = [chat for chat in rewrite.chats if len(chat) >= 6]
    chats = write_messages(tmp_path / "chats.jsonl", chosen)
    rewrite(tmp_path / "out.jsonl", chats, max_new_tokens=400, temperature=0.0)
    assert len(running) == 6
    assert running[:5] == [0, 1, 1, 1, 1]  # the last turn may be alone


@pytest.mark.parametrize(
    ("kept", "partial"), [([], True), ([0], False), ([4, 1], True), ([*range(6, -1, -1)], False)]
)
def test_interrupted_run_resumes_to_the_same_result(
    rewrite: Rewriting, kept: list[int], partial: bool, uninterrupted: Path, tmp_path: Path
) -> None:
    """With some complete lines and part of another, and another batch size."""
    lines = uninterrupted.read_text().splitlines(keepends=True)
    out = tmp_path / "chats.jsonl"
    rest = lines[2][:30] if partial else ""
    out.write_text("".join(lines[index] for index in kept) + rest)
    shutil.copy(f"{uninterrupted}.meta.json", f"{out}.meta.json")
    reported: list[tuple[int, int]] = []
    rewrite(out, progress=lambda *now: reported.append(now), batch_size=2)
    assert out.read_bytes() == uninterrupted.read_bytes()
    assert reported == [(done, COUNT) for done in range(len(kept) + 1, COUNT + 1)]


def test_output_of_an_earlier_version_is_resumed(
    rewrite: Rewriting, uninterrupted: Path, tmp_path: Path
) -> None:
    """Its fingerprint has no top_p and top_k, but a batch size."""
    out = tmp_path / "chats.jsonl"
    shutil.copy(uninterrupted, out)
    fingerprint = json.loads(Path(f"{uninterrupted}.meta.json").read_text())
    del fingerprint["top_p"], fingerprint["top_k"]
    Path(f"{out}.meta.json").write_text(json.dumps({**fingerprint, "batch_size": 5}))
    rewrite(out)
    with pytest.raises(ValueError, match="other chats or options"):
        rewrite(out, top_p=0.9)


def test_seed_changes_the_answers(rewrite: Rewriting, uninterrupted: Path, tmp_path: Path) -> None:
    rewrite(tmp_path / "out.jsonl", seed=5)
    assert (tmp_path / "out.jsonl").read_text() != uninterrupted.read_text()


@pytest.mark.parametrize("change", [{"seed": 5}, {"temperature": 0.0}, None])
def test_output_of_other_options_is_rejected(
    rewrite: Rewriting, change: dict[str, Any] | None, uninterrupted: Path, tmp_path: Path
) -> None:
    """With a change of options, or without a fingerprint (None): the file is not touched."""
    out = tmp_path / "chats.jsonl"
    shutil.copy(uninterrupted, out)
    if change is not None:
        shutil.copy(f"{uninterrupted}.meta.json", f"{out}.meta.json")
    with pytest.raises(ValueError, match="was written from other chats or options"):
        rewrite(out, **(change or {}))
    assert out.read_bytes() == uninterrupted.read_bytes()


def test_chat_ends_where_the_context_is_full(rewrite: Rewriting, tmp_path: Path) -> None:
    chat = [
        {"role": role, "content": content}
        for question in ("How many?", " apples" * 3000, "And now?")
        for role, content in (("user", question), ("assistant", "x"))
    ]
    chats = write_messages(tmp_path / "long.jsonl", [chat])
    (rewritten,) = rewrite(tmp_path / "out.jsonl", chats, temperature=0.0)
    assert [message["role"] for message in rewritten] == ["user", "assistant"]
    assert rewritten[0]["content"] == "How many?"


def test_turns_of_different_chats_have_different_seeds(
    rewrite: Rewriting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a late turn and a later chat."""
    seeds: list[int] = []

    original = EagleFSD.request

    def request(model: EagleFSD, *arguments: Any, sampling: SamplingConfig, **options: Any) -> Any:
        seeds.append(sampling.seed or 0)
        return original(model, *arguments, sampling=sampling, **options)

    monkeypatch.setattr(EagleFSD, "request", request)
    chat = [{"role": role, "content": "Hi"} for role in ("user", "assistant")] * 4
    rewrite(
        tmp_path / "out.jsonl", write_messages(tmp_path / "chats.jsonl", [chat] * 9), batch_size=2
    )
    assert len(seeds) == len(set(seeds)) == 4 * 9


def test_chat_ends_where_the_template_rejects_it(
    rewrite: Rewriting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """The other chats are rewritten, and the earlier exchanges are kept."""

    class Template(TokenizerTemplate):
        def render(self, chat: Any, add_generation_prompt: bool = False) -> str:
            if len(chat) > 2 and "two" in chat[2]["content"]:
                raise ValueError("the chat template rejects the chat: two")
            return super().render(chat, add_generation_prompt)

    texts = [("Hello!", "x", word, "x") for word in ("one", "two")]
    roles = ("user", "assistant") * 2
    turns = [zip(roles, contents, strict=True) for contents in texts]
    chats = [[{"role": role, "content": text} for role, text in chat] for chat in turns]
    strict = Template(rewrite.loaded.tokenizer)
    monkeypatch.setattr(rewrite, "loaded", replace(rewrite.loaded, chat_template=strict))
    file = write_messages(tmp_path / "chats.jsonl", chats)
    rewritten = rewrite(tmp_path / "out.jsonl", file, temperature=0.0)
    assert [len(chat) for chat in rewritten] == [4, 2]
    assert "1 of 2 chats end early; the first one: the chat template rejects" in caplog.text


def test_rewritten_chats_can_be_trained_on(
    uninterrupted: Path, target: Path, tmp_path: Path
) -> None:
    out = train_here(uninterrupted, tmp_path / "out", target, max_steps=1)
    assert (out / "model.safetensors").exists()
