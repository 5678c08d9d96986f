"""Chat files: every record comes back from where it lies, and what is malformed is told."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainings import SMALL

from eagle_fsd.train import chats as module
from eagle_fsd.train.chats import FAULTS_KEPT, ChatFile, read_chat

MEGABYTE = 1 << 20
GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."}]}
HELLO = GOOD["messages"]

#: Whatever a scanner of brackets may stumble over.
TEXTS = st.text(st.sampled_from('ab"\\[]{},:\n\r\t\0/é日\U0001f600\u2028 \x7f'), max_size=12)
SPOKEN = TEXTS.filter(str.strip)
NOISE = st.recursive(TEXTS | st.integers(), lambda inner: st.lists(inner, max_size=2), max_leaves=4)
CHATS = st.lists(st.tuples(TEXTS, SPOKEN), min_size=1, max_size=3)
CHUNKS = st.integers(1, 40)


def messages(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    said = []
    for asked, answered in turns:
        said.append({"role": "user", "content": asked})
        said.append({"role": "assistant", "content": answered})
    return said


def sharegpt(chat: list[dict[str, str]]) -> dict[str, Any]:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return {
        "conversations": [{"from": names[item["role"]], "value": item["content"]} for item in chat]
    }


@st.composite
def files(draw: st.DrawFn, as_array: bool) -> tuple[bytes, list[list[dict[str, str]]], list[int]]:
    """A file's bytes, the chats in it, and the lines they begin on."""
    chats = [messages(turns) for turns in draw(st.lists(CHATS, min_size=1, max_size=5))]
    pieces: list[str] = [draw(st.sampled_from(["[", "[\n ", "\ufeff["]))] if as_array else []
    blank = st.sampled_from(["", " ", "\n", "\r\n\n"])
    lines = []
    for number, chat in enumerate(chats):
        record = sharegpt(chat) if draw(st.booleans()) else {"messages": chat}
        record = {"id": draw(NOISE), **record, "more": {"model": draw(NOISE)}}
        indent = draw(st.sampled_from([None, 2])) if as_array else None
        if number:
            pieces.append(draw(blank) + "," + draw(blank) if as_array else "\n" + draw(blank))
        lines.append("".join(pieces).count("\n") + 1)
        pieces.append(json.dumps(record, ensure_ascii=draw(st.booleans()), indent=indent))
    pieces.append(draw(blank) + "]" if as_array else draw(st.sampled_from(["", "\n", "\r\n"])))
    return "".join(pieces).encode(), chats, lines


@pytest.mark.parametrize("as_array", [True, False], ids=["array", "lines"])
@given(st.data(), CHUNKS)
def test_any_records_come_back_whatever_is_read_at_a_time(
    as_array: bool, tmp_path_factory: pytest.TempPathFactory, draw: st.DataObject, chunk: int
) -> None:
    content, chats, lines = draw.draw(files(as_array))
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", max(chunk, 4))  # a byte order mark is read in one
        file = ChatFile(path)
    assert list(file) == chats
    assert [file.line(index) for index in range(len(file))] == lines
    assert (file.skipped, file.faults) == (0, [])
    assert file[len(file) // 2] == chats[len(file) // 2]
    assert 0 < sum(file.size(index) for index in range(len(file))) <= len(content)


def test_both_layouts_say_the_same() -> None:
    chat = [{"role": "system", "content": "Be kind."}, *messages([("a", "b"), ("c", "d")])]
    for record in ({"messages": chat}, sharegpt(chat)):
        assert read_chat(json.dumps(record).encode()) == chat


def test_openais_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo."}]
    record = {"messages": [HELLO[0], {"role": "assistant", "content": parts}]}
    assert read_chat(json.dumps(record).encode()) == HELLO


@pytest.mark.parametrize(
    "turns",
    [
        [HELLO[1], *HELLO],  # ShareGPT splits long chats anywhere
        [*HELLO, HELLO[0]],
        [HELLO[1], HELLO[1], *HELLO, HELLO[0]],
    ],
    ids=["begins-with-an-answer", "ends-with-a-question", "both"],
)
def test_loose_ends_are_left_out(turns: list[dict[str, str]]) -> None:
    assert read_chat(json.dumps({"messages": turns}).encode()) == HELLO


#: What is wrong with a record, and what is said of it.
MALFORMED: dict[str, tuple[Any, str]] = {
    "bad JSON": ('{"messages": [}', "not JSON"),
    "no object": ("17", "not a JSON object"),
    "neither layout": ({"text": "hello"}, 'neither "conversations" nor "messages"'),
    "no list": ({"messages": "hello"}, '"messages" is not a list'),
    "no turns": ({"messages": []}, "no assistant turn"),
    "no assistant": ({"messages": HELLO[:1]}, "no assistant turn"),
    "assistant only": ({"messages": HELLO[1:]}, "no assistant turn"),
    "user twice": ({"messages": [HELLO[0], *HELLO]}, "turn 2 is the user's, not the assistant's"),
    "assistant twice": (
        {"messages": [*HELLO, HELLO[1]]},
        "turn 3 is the assistant's, not the user's",
    ),
    "late system": (
        {"messages": [*HELLO, {"role": "system", "content": "x"}, *HELLO]},
        "turn 3 is the system's, not the user's",
    ),
    "unknown role": (
        {"messages": [{"role": "tool", "content": "x"}, *HELLO]},
        "turn 1 has the unknown \"role\" 'tool'",
    ),
    "role of no text": ({"messages": [{"role": 3, "content": "x"}]}, 'unknown "role" 3'),
    "turn of no object": ({"messages": ["hi", "Hello."]}, "turn 1 is not an object"),
    "no text": ({"messages": [{"role": "user"}]}, 'turn 1 has no text under "content"'),
    "text is null": ({"messages": [{"role": "user", "content": None}]}, "no text"),
    "layouts mixed": ({"conversations": HELLO}, 'no text under "value"'),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, HELLO[1]]},
        "turn 1 has no text",
    ),
    "empty answer": (
        {"messages": [HELLO[0], {"role": "assistant", "content": " \n"}]},
        "turn 2, the assistant's, is empty",
    ),
    "too deep": ("[" * 200_000, "not JSON"),
    "no UTF-8": (b'{"messages": "\xff\xfe"}', "not JSON"),
}


def as_bytes(record: Any) -> bytes:
    if isinstance(record, bytes):
        return record
    return record.encode() if isinstance(record, str) else json.dumps(record).encode()


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_record_is_skipped_and_told_with_its_line(name: str, tmp_path: Path) -> None:
    record, reason = MALFORMED[name]
    path = tmp_path / "chats.jsonl"
    good = json.dumps(GOOD).encode()
    path.write_bytes(b"\n".join([good, b"", as_bytes(record), good]))
    file = ChatFile(path)
    assert list(file) == [HELLO, HELLO]
    assert file.skipped == 1
    assert file.faults[0].line == 3
    assert reason in str(file.faults[0])
    assert str(file.faults[0]).startswith("line 3: ")


@pytest.mark.parametrize(
    "name", [name for name in MALFORMED if isinstance(MALFORMED[name][0], dict)]
)
def test_an_arrays_malformed_records_are_told_alike(name: str, tmp_path: Path) -> None:
    record, reason = MALFORMED[name]
    path = tmp_path / "chats.json"
    path.write_text(json.dumps([GOOD, record, GOOD], indent=1))
    file = ChatFile(path)
    assert list(file) == [HELLO, HELLO]
    before = json.dumps([GOOD], indent=1).count("\n")
    assert [fault.line for fault in file.faults] == [before + 1]
    assert reason in str(file.faults[0])


@pytest.mark.parametrize("as_array", [True, False], ids=["array", "lines"])
def test_of_a_file_cut_short_only_the_end_is_lost(as_array: bool, tmp_path: Path) -> None:
    records = [json.dumps(GOOD)] * 5
    whole = "[" + ",\n".join(records) + "]" if as_array else "\n".join(records)
    path = tmp_path / "chats.json"
    path.write_text(whole[: -len(records[0]) // 2])
    file = ChatFile(path)
    assert list(file) == [HELLO] * 4
    assert [fault.line for fault in file.faults] == [5]
    assert "not JSON" in str(file.faults[0])


def test_many_faults_are_counted_and_the_first_kept(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + "bad\n" * 1000)
    file = ChatFile(path)
    assert (len(file), file.skipped, len(file.faults)) == (1, 1000, FAULTS_KEPT)
    assert file.faults[-1].line == FAULTS_KEPT + 1


@pytest.mark.parametrize("content", ["", "\n \n", "[]", "[ ]\n", "hello", "{}", "[{}]", '{"a": ['])
def test_none_usable_is_an_error(content: str, tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="holds no usable chat") as caught:
        ChatFile(path)
    assert "\n" not in str(caught.value)
    if "{" in content or "hello" in content:
        assert "line 1" in str(caught.value)


def test_worker_processes_read_for_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies and forks of an open file move one place in it; each needs its own."""
    path = tmp_path / "chats.jsonl"
    chats = [messages([("q", f"answer {number}" + "!" * 20_000)]) for number in range(50)]
    path.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    file = ChatFile(path)
    assert file[7] == chats[7]
    copy = pickle.loads(pickle.dumps(file))
    assert list(copy) == list(file) == chats
    monkeypatch.setattr(module, "_inherited", file, raising=False)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        order = [number for number in range(50) for _ in range(20)]
        assert pool.map(inherited, order, chunksize=1) == [chats[number] for number in order]
    assert file[8] == chats[8]


def inherited(index: int) -> list[dict[str, str]]:
    """Of the file that a forked process found open."""
    return module._inherited[index]


def test_progress_ends_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join([json.dumps(GOOD)] * 9))
    told: list[tuple[int, int]] = []
    ChatFile(path, lambda done, total: told.append((done, total)))
    assert told[-1] == (path.stat().st_size,) * 2
    assert told == sorted(told)


# -- memory ----------------------------------------------------------------------------------------


def large_chats(size: int) -> Iterator[str]:
    """Records of some two kilobytes, ``size`` bytes in all."""
    generator = random.Random(0)
    written = 0
    while written < size:
        words = " ".join(f"{generator.randrange(1000)} [apples]" for _ in range(60))
        record = json.dumps({"messages": messages([("Count " + words, "\\" + words)])})
        written += len(record) + 2
        yield record


def write_large(path: Path, size: int, as_array: bool) -> Path:
    with path.open("w") as file:
        for number, record in enumerate(large_chats(size)):
            file.write((",\n" if number else "[") if as_array else "\n" * bool(number))
            file.write(record)
        file.write("]" * as_array)
    return path


@pytest.mark.parametrize("as_array", [True, False], ids=["array", "lines"])
def test_memory_does_not_grow_with_the_file(as_array: bool, tmp_path: Path) -> None:
    path = write_large(tmp_path / "large.json", 20 * MEGABYTE, as_array)
    tracemalloc.start()
    try:
        file = ChatFile(path)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(file) > 5000
    assert peak < 8 * MEGABYTE
    assert kept < 100 * len(file)


#: A training that says how much memory it took at most, in bytes.
MEASURED = """
import resource, sys
from eagle_fsd.cli import main
try:
    main()
finally:
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("as_array", [True, False], ids=["array", "lines"])
def test_training_on_200_megabytes_takes_the_memory_of_2(
    as_array: bool, target: Path, tmp_path: Path
) -> None:
    """The chats are alike, so what is left is what grows with the file: bytes a chat, not chats."""
    peaks = []
    for size in (2, 200):
        path = write_large(tmp_path / "large.json", size * MEGABYTE, as_array)
        arguments = ["train", "--data", str(path), "--target", str(target)]
        arguments += ["--out", str(tmp_path / f"out-{size}")]
        settings = {**SMALL, "max_steps": 3, "max_length": 256, "batch_size": 4}
        for name, value in settings.items():
            arguments += ["--" + name.replace("_", "-"), str(value)]
        ended = subprocess.run(
            [sys.executable, "-c", MEASURED, *arguments],
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert ended.returncode == 0, ended.stderr
        peaks.append(int(ended.stdout.split("peak ")[1]))
    assert peaks[1] < peaks[0] + 50 * MEGABYTE
