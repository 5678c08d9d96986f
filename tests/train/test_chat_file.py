"""Tests for reading chat files: every valid record is found, every malformed one is reported."""

from __future__ import annotations

import json
import os
import pickle
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from eagle_fsd.train.chat_file import MAX_DESCRIBED, ChatFile, is_answer, parse_chat

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."}]}
HELLO = GOOD["messages"]

CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 2, "b": 2}},
}
ANSWER = {"role": "assistant", "content": "4."}

#: Text with everything that could confuse a scanner of brackets.
TEXTS = st.text(st.sampled_from('ab"\\[]{},:\n\r\t\0/é日\U0001f600\u2028 \x7f'), max_size=12)
ANSWERS = TEXTS.filter(str.strip)
NOISE = st.recursive(TEXTS | st.integers(), lambda inner: st.lists(inner, max_size=2), max_leaves=4)
CHATS = st.lists(st.tuples(TEXTS, ANSWERS), min_size=1, max_size=3)


def parse(record: Any) -> list[dict[str, Any]]:
    """Parse a record without malformed turns."""
    chat, problem = parse_chat(json.dumps(record).encode())
    assert problem is None
    return chat


def read(folder: Path, content: str | bytes) -> ChatFile:
    """Write a file and open it."""
    path = folder / "chats.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return ChatFile(path)


def messages(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    chat = []
    for question, answer in turns:
        chat.append({"role": "user", "content": question})
        chat.append({"role": "assistant", "content": answer})
    return chat


def sharegpt(chat: list[dict[str, str]]) -> dict[str, Any]:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return {
        "conversations": [{"from": names[item["role"]], "value": item["content"]} for item in chat]
    }


@st.composite
def files(draw: st.DrawFn, as_array: bool) -> tuple[bytes, list[list[dict[str, str]]], list[int]]:
    """Draw a file's bytes, its chats, and the lines they start on."""
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


@given(st.data(), st.booleans())
def test_any_file_is_read(
    tmp_path_factory: pytest.TempPathFactory, draw: st.DataObject, as_array: bool
) -> None:
    content, chats, lines = draw.draw(files(as_array))
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(content)
    file = ChatFile(path)
    assert list(file) == chats
    assert list(file.lines) == lines
    assert (file.skipped, file.shorten_reasons, file.skipped_records) == (0, {}, [])
    assert file[len(file) // 2] == chats[len(file) // 2]
    assert 0 < sum(file.sizes) <= len(content)


def test_layouts_and_loose_ends() -> None:
    """What precedes the first question and follows the last answer is dropped."""
    chat = [{"role": "system", "content": "Be kind."}, *messages([("a", "b"), ("c", "d")])]
    assert parse(sharegpt(chat)) == parse({"messages": chat}) == chat
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo."}]
    call = {"role": "assistant", "content": "Wait.", "tool_calls": [CALL]}
    for turns in (
        [HELLO[0], {"role": "assistant", "content": parts}],
        [HELLO[1], *HELLO],
        [*HELLO, HELLO[0]],
        [HELLO[1], HELLO[1], *HELLO, HELLO[0]],
        [*HELLO, HELLO[0], call],
        [*HELLO, {"role": "system", "content": "x"}],
    ):
        assert parse({"messages": turns}) == HELLO


def test_skipped_and_shortened_records_are_counted_by_reason(tmp_path: Path) -> None:
    records: list[Any] = [GOOD] * 2990
    records += [{"messages": HELLO[:1]}] * 4 + ["bad"] * 3
    records += [{"messages": [*HELLO, "hi"]}] * 2 + [{"messages": [*HELLO, HELLO[1]]}]
    lines = ("{" if record == "bad" else json.dumps(record) for record in records)
    file = read(tmp_path, "\n".join(lines))
    assert (len(file), file.skipped) == (2993, 7)
    assert file.counts() == {
        "records": 3000,
        "skipped": {"no answer to a user turn": 4, "not JSON": 3},
        "shortened": {"turn is not an object": 2, "roles out of order": 1},
    }
    assert file.summary() == (
        "shortened 3 of 3,000 records: 2 turn is not an object, 1 roles out of order;"
        " skipped 7 of 3,000 records: 4 no answer to a user turn, 3 not JSON; first skipped:"
        " line 2991: no answer to a user turn, line 2992: no answer to a user turn,"
        " line 2993: no answer to a user turn"
    )
    assert read(tmp_path, json.dumps(GOOD)).summary() is None


def test_tool_and_developer_turns_are_context() -> None:
    """Only the assistant's text is an answer."""
    turns = [
        {"role": "developer", "content": "Be kind."},
        HELLO[0],
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call00001", "content": "4"},
        {"role": "function", "name": "add", "content": "4"},
        ANSWER,
        {"role": "system", "content": "Be brief."},
        *HELLO,
    ]
    chat = parse({"messages": turns})
    roles = " ".join(message["role"] for message in chat)
    assert roles == "system user assistant tool tool assistant system user assistant"
    assert [message for message in chat if is_answer(message)] == [ANSWER, HELLO[1]]
    assert chat[2] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert chat[3] == turns[3]
    assert chat[4] == {"role": "tool", "name": "add", "content": "4"}


def test_all_layouts_of_a_tool_call_are_the_same() -> None:
    function = CALL["function"]
    encoded = {"name": "add", "arguments": json.dumps(function["arguments"])}
    calls = {
        "tool_calls": {"role": "assistant", "tool_calls": [{**CALL, "function": encoded}]},
        "function_call": {"role": "assistant", "content": None, "function_call": encoded},
    }
    expected = {"type": "function", "function": function}
    for name, turn in calls.items():
        chat = parse({"messages": [HELLO[0], turn, ANSWER]})
        assert chat[1]["tool_calls"] == [CALL if name == "tool_calls" else expected]
    for value in (function, encoded, [function]):
        turns = [
            {"from": "human", "value": "hi"},
            {"from": "function_call", "value": json.dumps(value)},
            {"from": "observation", "value": "4"},
            {"from": "gpt", "value": "4."},
        ]
        chat = parse({"conversations": turns})
        assert chat == [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "", "tool_calls": [expected]},
            {"role": "tool", "content": "4"},
            ANSWER,
        ]


# -- malformed records ---------------------------------------------------------------------------

#: Malformed turns, the reason that is counted, and what else is reported.
MALFORMED_TURNS: list[tuple[Any, str, str]] = [
    ("hi", "turn is not an object", "turn 2 is not an object"),
    ({"role": "narrator", "content": "x"}, "unknown role", "the unknown \"role\" 'narrator'"),
    ({"role": 3, "content": "x"}, "unknown role", 'unknown "role" 3'),
    ({"role": "user"}, "turn without text", 'turn 2 has no string "content"'),
    ({"role": "user", "content": [{"type": "image_url"}]}, "turn without text", "turn 2"),
    ({"role": "user", "content": "\ud83d"}, "lone surrogate", "turn 2 contains a lone surrogate"),
    ({"role": "tool", "content": "4", "name": "\ud83d"}, "lone surrogate", "turn 2"),
    ({"role": "assistant", "content": " "}, "empty assistant turn", "2 is an empty assistant turn"),
    ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "malformed tool call", "turn 2"),
    ({"role": "function_call", "content": "[]"}, "malformed tool call", "turn 2"),
    ({"role": "assistant", "tool_calls": "add"}, "malformed tool call", "turn 2 has a malformed"),
    (HELLO[0], "roles out of order", "turn 2 has the role user, not assistant"),
]
#: Malformed records and what is reported.
MALFORMED: list[tuple[Any, str]] = [
    ('{"messages": [}', "not JSON"),
    ("17", "not a JSON object"),
    ({"text": "hello"}, 'neither "conversations" nor "messages"'),
    ({"messages": "hello"}, '"messages" is not a list'),
    ({"messages": []}, "no answer to a user turn"),
    ({"messages": HELLO[1:]}, "no answer to a user turn"),
    ({"conversations": HELLO}, 'no string "value"'),
    ("[" * 200_000, "not JSON"),
    (b'{"messages": "\xff\xfe"}', "not JSON"),
    *(({"messages": [HELLO[0], turn, *HELLO]}, words) for turn, _, words in MALFORMED_TURNS),
]


def test_exchanges_before_a_malformed_turn_are_kept() -> None:
    cases = [([*HELLO, HELLO[0]], turn, reason) for turn, reason, _ in MALFORMED_TURNS]
    cases += [(HELLO, turn, reason) for turn, reason, _ in MALFORMED_TURNS[:7]]
    cases.append((HELLO, HELLO[1], "roles out of order"))
    for depth in range(800, 1000, 2):  # can be read, but in part not written
        nested = f'{{"x": {"[" * depth}{"]" * depth}}}'
        call = {"function": {"name": "add", "arguments": nested}}
        turns = [*HELLO, HELLO[0], {"role": "assistant", "tool_calls": [call]}]
        _, problem = parse_chat(json.dumps({"messages": turns}).encode())
        assert problem is None or problem.reason == "malformed tool call"
    for before, turn, reason in cases:
        chat, problem = parse_chat(json.dumps({"messages": [*before, turn, *HELLO]}).encode())
        assert (chat, problem and problem.reason) == (HELLO, reason)


def test_malformed_records_are_skipped_and_reported(tmp_path: Path) -> None:
    """Malformed records are skipped between valid lines and between valid elements of an array."""
    good = json.dumps(GOOD)
    for record, reason in MALFORMED:
        text = json.dumps(record) if isinstance(record, dict) else record
        line = text if isinstance(text, bytes) else text.encode()
        contents = [b"\n".join([good.encode(), b"", line, good.encode()])]
        if isinstance(record, dict):
            contents.append(f"[{good},\n\n{text},\n{good}]".encode())
        for content in contents:
            file = read(tmp_path, content)
            assert list(file) == [HELLO, HELLO], reason
            (skipped,) = file.skipped_records
            assert skipped.startswith("line 3: "), reason
            assert reason in skipped
    file = read(tmp_path, f'[{good}, 17, "text", null, [], [{good}], {good}]')
    assert (len(file), file.skipped) == (2, 5)
    for content in (f"[{good},\n{good},\n{good}]", f"{good}\n{good}\n{good}"):  # truncated
        file = read(tmp_path, content[: -len(good) // 2])
        assert list(file) == [HELLO] * 2
        assert file.skipped_records[0].startswith("line 3: not JSON")
    file = read(tmp_path, good + "\n" + "bad\n" * 1000)
    assert (len(file), file.skipped, len(file.skipped_records)) == (1, 1000, MAX_DESCRIBED)
    assert file.skipped_records[-1].startswith(f"line {MAX_DESCRIBED + 1}: ")
    for content in ("", "\n \n", "[]", "[ ]\n", "hello", "{}", "[{}]", '{"a": ['):
        with pytest.raises(ValueError, match="holds no valid chat") as caught:
            read(tmp_path, content)
        assert "\n" not in str(caught.value)
        assert ("line 1" in str(caught.value)) == ("{" in content or "hello" in content)


def test_copies_and_forked_processes_do_not_share_a_file_position(tmp_path: Path) -> None:
    chats = [messages([("q", f"answer {number}" + "!" * 20_000)]) for number in range(50)]
    file = read(tmp_path, "\n".join(json.dumps({"messages": chat}) for chat in chats))
    assert file[7] == chats[7]
    assert list(pickle.loads(pickle.dumps(file))) == list(file) == chats
    order = [number for number in range(50) for _ in range(20)]
    loader = DataLoader(file, batch_size=None, sampler=order, num_workers=2)  # forks
    assert list(loader) == [chats[number] for number in order]
    assert file[8] == chats[8]


def test_threads_may_read_their_first_chats_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = read(tmp_path, json.dumps(GOOD))
    both, open_file, pread = Barrier(2), Path.open, os.pread

    def open_together(*arguments: Any) -> Any:
        both.wait(10)
        return open_file(*arguments)

    def read_later(*arguments: Any) -> bytes:
        time.sleep(0.05)
        return pread(*arguments)

    monkeypatch.setattr(Path, "open", open_together)
    monkeypatch.setattr(os, "pread", read_later)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(file.__getitem__, [0, 0])) == [HELLO, HELLO]


# -- memory ----------------------------------------------------------------------------------------


def test_memory_is_bounded_by_bytes_per_chat(tmp_path: Path) -> None:
    """Reading over 3.5 MB takes less than 1.5 MB, and under 100 bytes per chat are kept."""
    chat = messages([("Count [apples].", "\\" + "417 [apples] " * 120)])
    records = [json.dumps({"messages": chat})] * 2500
    for content in ("[" + ",\n".join(records) + "]", "\n".join(records)):
        path = tmp_path / "chats.jsonl"
        path.write_text(content)
        tracemalloc.start()
        try:
            file = ChatFile(path)
            kept, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(file) == 2500
        assert len(content) > 3_500_000
        assert peak < 1_500_000
        assert kept < 100 * len(file)
