"""Rewriting the assistant's turns: the same chats come out whatever the moment of a kill."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from trainings import train_here

from eagle_fsd.bundled.problems import problems
from eagle_fsd.train.chats import Chat, ChatFile
from eagle_fsd.train.regenerate import regenerate
from eagle_fsd.train.run import Source
from eagle_fsd.utils.chat_templates import chat_format

COUNT = 7
BATCH = 3
NEW = 12


@pytest.fixture(scope="module")
def source() -> Source:
    """The bundled target: what it says makes sense, and differs from chat to chat."""
    return Source.load(device="cpu")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> ChatFile:
    """One, two and three rounds, some with a system turn."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    questions = [problem.question for problem in problems("test", 3 * COUNT, seed=3)]
    with path.open("w") as file:
        for number in range(COUNT):
            turns: Chat = [{"role": "system", "content": "Count."}] if number % 3 == 1 else []
            for place in range(1 + number % 3):
                turns.append({"role": "user", "content": questions[3 * number + place]})
                turns.append({"role": "assistant", "content": f"Wrong {number} {place}."})
            file.write(json.dumps({"messages": turns}) + "\n")
    return ChatFile(path)


def rewrite(source: Source, chats: ChatFile, out: Path, **options: Any) -> ChatFile:
    return regenerate(
        source, chats, out, **{"batch_size": BATCH, "max_new_tokens": NEW, "seed": 4, **options}
    )


@pytest.fixture(scope="module")
def undisturbed(source: Source, chats: ChatFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("rewritten") / "chats.jsonl"
    rewrite(source, chats, out)
    return out


def test_only_the_assistants_words_change(undisturbed: Path, chats: ChatFile) -> None:
    rewritten = ChatFile(undisturbed)
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
    lines = [json.loads(line) for line in undisturbed.read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(COUNT))


def test_a_greedy_answer_is_the_targets_own(
    source: Source, chats: ChatFile, tmp_path: Path
) -> None:
    """To the turns as rewritten so far, not to what stood in the file."""
    rewritten = rewrite(source, chats, tmp_path / "out.jsonl", temperature=0.0)
    wording = chat_format(source.tokenizer)
    model, tokenizer = source.target.model, source.tokenizer
    for chat in list(rewritten)[:3]:
        for place, message in enumerate(chat):
            if message["role"] != "assistant":
                continue
            text = wording.render(chat[:place], open_turn=True)
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
            said = model.generate(**ids, max_new_tokens=NEW, do_sample=False)
            said = said[0, ids["input_ids"].shape[1] :]
            answer = tokenizer.decode(said, skip_special_tokens=True)
            assert message["content"] == answer.strip()


@pytest.mark.parametrize("kept", range(COUNT + 1))
@pytest.mark.parametrize("half", [False, True], ids=["whole-lines", "a-line-cut-short"])
def test_the_same_comes_out_whatever_the_moment_of_the_kill(
    kept: int, half: bool, undisturbed: Path, source: Source, chats: ChatFile, tmp_path: Path
) -> None:
    """Though the batch in which it was killed is drawn again."""
    lines = undisturbed.read_text().splitlines(keepends=True)
    out = tmp_path / "chats.jsonl"
    out.write_text("".join(lines[:kept]) + ("".join(lines[kept : kept + 1])[:30] if half else ""))
    shutil.copy(f"{undisturbed}.meta.json", f"{out}.meta.json")
    told: list[tuple[int, int]] = []
    rewrite(source, chats, out, progress=lambda *now: told.append(now))
    assert out.read_bytes() == undisturbed.read_bytes()
    assert len(told) <= -(-COUNT // BATCH) - kept // BATCH  # whole batches are not drawn again
    assert kept == COUNT or told[-1] == (COUNT, COUNT)


def test_another_seed_says_something_else(
    undisturbed: Path, source: Source, chats: ChatFile, tmp_path: Path
) -> None:
    rewrite(source, chats, tmp_path / "out.jsonl", seed=5)
    assert (tmp_path / "out.jsonl").read_text() != undisturbed.read_text()


@pytest.mark.parametrize("change", [{"seed": 5}, {"temperature": 0.0}, {"batch_size": 2}, None])
def test_output_that_was_made_otherwise_is_refused(
    change: dict[str, Any] | None,
    undisturbed: Path,
    source: Source,
    chats: ChatFile,
    tmp_path: Path,
) -> None:
    """Other options, or a file that somebody else made (None): nothing in it is touched."""
    out = tmp_path / "chats.jsonl"
    shutil.copy(undisturbed, out)
    if change is not None:
        shutil.copy(f"{undisturbed}.meta.json", f"{out}.meta.json")
    with pytest.raises(ValueError, match="was made from something else"):
        rewrite(source, chats, out, **(change or {}))
    assert out.read_bytes() == undisturbed.read_bytes()


def test_a_chat_ends_where_the_context_is_full(
    source: Source, chats: ChatFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps what was said before, and is a usable chat."""
    path = tmp_path / "long.jsonl"
    long = " apples" * 3000
    turns = [("How many?", "x"), (long, "x"), ("And now?", "x")]
    messages = [
        {"role": role, "content": content}
        for turn in turns
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]
    path.write_text(json.dumps({"messages": messages}) + "\n")
    (chat,) = rewrite(source, ChatFile(path), tmp_path / "out.jsonl", temperature=0.0)
    assert [message["role"] for message in chat] == ["user", "assistant"]
    assert chat[0]["content"] == "How many?"


def test_a_head_can_be_trained_on_it(undisturbed: Path, target: Path, tmp_path: Path) -> None:
    out = train_here(undisturbed, tmp_path / "out", target, max_steps=2)
    assert (out / "model.safetensors").exists()
