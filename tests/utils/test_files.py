"""Atomic writes and JSON Lines files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle_fsd.utils.files import (
    append_line,
    atomic_path,
    atomic_write,
    read_jsonl,
    truncate_partial_line,
)


def test_files_are_created_and_replaced(tmp_path: Path) -> None:
    """Permissions follow the umask, even if a library creates the file with others."""
    file = tmp_path / "file.txt"
    for mask, name, content in ((0o022, file, "é\r\n"), (0o077, str(file), b"\x00\xff")):
        before = os.umask(mask)
        try:
            atomic_write(name, content)
            with atomic_path(tmp_path / "tensors") as temporary:
                save_file({"x": torch.zeros(1)}, temporary)
        finally:
            os.umask(before)
        expected = content.encode() if isinstance(content, str) else content
        assert file.read_bytes() == expected
        assert {path.name for path in tmp_path.iterdir()} == {"file.txt", "tensors"}
        assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o666 & ~mask}


def test_atomic_path_keeps_the_old_file_on_failure(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")

    def write_and_fail() -> None:
        with atomic_path(path) as temporary:
            assert temporary.parent == path.parent
            temporary.write_text("half")
            assert path.read_text() == "old"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_lines_are_appended_and_read(tmp_path: Path) -> None:
    """Unicode's line separators are kept; a damaged line is named."""
    path = tmp_path / "lines.jsonl"
    values = [{"text": "a\u2028b\u0085c"}, ["é"], 3]
    for value in values:
        append_line(path, json.dumps(value, ensure_ascii=False))
    append_line(path, "")
    assert read_jsonl(path) == values
    append_line(path, "{")
    with pytest.raises(ValueError, match=r"lines\.jsonl, line 5: not JSON"):
        read_jsonl(path)


def test_a_partial_last_line_is_skipped_and_truncated(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    append_line(path, '"é"')
    complete = path.read_bytes()
    path.write_bytes(complete + '"é'.encode()[:-1])
    assert read_jsonl(path) == ["é"]
    truncate_partial_line(path)
    assert path.read_bytes() == complete
    truncate_partial_line(path)
    assert path.read_bytes() == complete
    truncate_partial_line(tmp_path / "missing")
