"""The memory of a container or a job is that of its control group."""

from __future__ import annotations

import platform
from pathlib import Path

import psutil
import pytest

from eagle_fsd.utils import host_memory as module
from eagle_fsd.utils.host_memory import host_memory, trim_heap


def test_control_groups_limit_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group of the process and those around it count; file caches can be freed."""
    own = tmp_path / "own"
    monkeypatch.setattr(module, "CONTROL_GROUP", tmp_path)
    monkeypatch.setattr(module, "OWN_GROUPS", own)
    machine = psutil.virtual_memory().total
    for groups in ("", "5:cpu,memory:/job/step\n0::/unit/step\n"):
        own.write_text(groups)
        for controller, limit, use, parts, key in module.FILES:
            group = groups and ("job/step" if controller else "unit")
            folder = tmp_path / controller / group
            folder.mkdir(parents=True, exist_ok=True)
            assert host_memory().total == machine
            (folder / use).write_text("900000\n")
            (folder / parts).write_text(f"anon 600000\n{key} 300000\n")
            for size, expected in ((1_000_000, (1_000_000, 400_000)), (500_000, (500_000, 0))):
                (folder / limit).write_text(f"{size}\n")
                assert host_memory() == expected
            (folder / limit).write_text("max\n")
            assert host_memory().total == machine


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_freed_memory_between_blocks_in_use_is_returned() -> None:
    blocks = [bytearray(60_000) for _ in range(2000)]
    kept = blocks[::50]
    del blocks
    process = psutil.Process()
    before = process.memory_info().rss
    trim_heap()
    assert before - process.memory_info().rss > 50_000_000
    assert len(kept) == 40
