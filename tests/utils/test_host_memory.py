"""The memory of a container or a job is that of its control group."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from eagle_fsd.utils import host_memory as module
from eagle_fsd.utils.host_memory import host_memory


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
