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
    (tmp_path / "memory").mkdir()
    for limit, use, parts, key in module.FILES:
        assert host_memory().total == machine
        (tmp_path / use).write_text("900000\n")
        (tmp_path / parts).write_text(f"anon 600000\n{key} 300000\n")
        for size, expected in ((1_000_000, (1_000_000, 400_000)), (500_000, (500_000, 0))):
            (tmp_path / limit).write_text(f"{size}\n")
            assert host_memory() == expected
        (tmp_path / limit).write_text("max\n")
        assert host_memory().total == machine
