"""The recipe of SmolLM2's heads: its chats contain no question of a benchmark."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from recipes.overlap import Overlaps, read_questions
from recipes.smollm2 import BENCHMARKS, Recipe, Scale, pack_chats, read_chats

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"
CHATS = ROOT / "recipes" / "smollm2_chats"
#: Largest size in bytes of a part of the committed chats.
MAX_BYTES = 20_000_000


def chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": "Yes."}]


def test_overlaps_are_found() -> None:
    long = "Mia has three boxes with four pencils in each of them, and gives two pencils to Tom."
    overlaps = Overlaps([long, "Why is the sky blue?"])
    for question, found in (
        ("Hello! " + long.upper().replace(",", ""), long),
        ("why is the SKY blue", "Why is the sky blue?"),
        ("Why is the sky blue at noon?", None),
        ("Mia has three boxes with four pencils in each.", None),
    ):
        assert overlaps.find(chat(question)) == found
    assert overlaps.find([*chat("Hi!"), *chat(long)]) == long
    assert overlaps.find([{"role": "assistant", "content": long}]) is None


def test_packed_chats_are_read_back_unless_they_are_damaged(tmp_path: Path) -> None:
    chats = [chat("Hällo\u2028?"), chat("Really? " * 50), chat("1"), chat("2")]
    folder = tmp_path / "smollm2_chats"
    pack_chats(chats[2:], folder, 1)
    pack_chats(chats[:2], folder, 0)
    assert read_chats(folder) == chats
    recipe = Recipe(tmp_path, tmp_path, tmp_path, Scale(parts=2))
    recipe.run("chats")  # has nothing to do
    assert len(recipe.training_file().read_text().splitlines()) == 3  # one is for tuning
    shutil.copy(folder / "00.jsonl.xz", folder / "01.jsonl.xz")
    with pytest.raises(ValueError, match="damaged"):
        read_chats(folder)


def test_committed_chats_contain_no_question_of_a_benchmark() -> None:
    if not CHATS.exists():
        pytest.skip("no chats are committed")
    if not SHARED.is_dir():
        pytest.skip("the questions of the benchmarks are not there")
    assert max(file.stat().st_size for file in CHATS.iterdir()) < MAX_BYTES
    overlaps = Overlaps(item for name in BENCHMARKS for item in read_questions(SHARED / name))
    assert [chat for chat in read_chats(CHATS) if overlaps.find(chat) is not None] == []
