"""The peak of a process' memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eagle_fsd.evaluation import memory
from eagle_fsd.evaluation.memory import PeakMemory

#: In a process of its own: another's threads and garbage would be counted, too.
PEAKS = """
import torch
from eagle_fsd.evaluation.memory import PeakMemory
watch, peaks = PeakMemory(torch.device("cpu")), []
for size in (1, 16 * 2**20, 1):
    watch.start()
    torch.ones(size)
    peaks.append(watch.read())
print(*peaks)
"""


def test_peak_memory_is_of_the_time_since_the_start() -> None:
    told = subprocess.run(
        [sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True, timeout=300
    )
    if "None" in told.stdout:
        pytest.skip("this system does not tell a process its peak memory")
    before, held, after = map(int, told.stdout.split())
    assert held - before > 40 * 2**20
    assert held - after > 40 * 2**20


def test_a_peak_that_cannot_be_reset_is_not_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Some sandboxes take the write and go on as before: a wrong figure is worse than none."""
    status = tmp_path / "status"
    monkeypatch.setattr(memory, "_STATUS", status)
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "clear_refs")
    watch = PeakMemory(torch.device("cpu"))
    for told, read in (
        ("VmHWM:\t 2000000 kB\nVmRSS:\t 1000000 kB\n", None),
        ("VmHWM:\t 1000100 kB\nVmRSS:\t 1000000 kB\n", 1_000_100 * 1024),
        ("VmRSS:\t 1000000 kB\n", None),
    ):
        status.write_text(told)
        watch.start()
        assert watch.read() == read
    status.unlink()
    watch.start()
    assert watch.read() is None
