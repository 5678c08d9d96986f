"""The memory of a container is that of its control group."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from eagle_fsd.utils import host_memory as module
from eagle_fsd.utils.host_memory import host_memory


def test_a_container_limits_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the memory that the group uses, file caches can be freed."""
    monkeypatch.setattr(module, "CONTROL_GROUP", tmp_path)
    machine = psutil.virtual_memory().total
    assert host_memory().total == machine
    files = {"memory.current": "900000", "memory.stat": "anon 600000\ninactive_file 300000\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for limit, expected in (
        ("1000000", (1_000_000, 400_000)),
        ("500000", (500_000, 0)),
    ):
        (tmp_path / "memory.max").write_text(limit + "\n")
        assert host_memory() == expected
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory().total == machine
