"""Peak memory of this process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eagle_fsd.evaluation import memory
from eagle_fsd.evaluation.memory import PeakMemory

#: Runs in a process of its own, because other threads and garbage would be counted as well.
MEASURE = """
import torch
from eagle_fsd.evaluation.memory import PeakMemory
peak, values = PeakMemory(torch.device("cpu")), []
for size in (1, 16 * 2**20, 1):
    peak.start()
    torch.ones(size)
    values.append(peak.read())
print(*values)
"""


def test_the_peak_covers_the_time_since_start() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True, timeout=300
    )
    if "None" in done.stdout:
        pytest.skip("this system does not report a process's peak memory")
    before, during, after = map(int, done.stdout.split())
    assert during - max(before, after) > 40 * 2**20


def test_a_peak_that_was_not_reset_is_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Some sandboxes accept the write and ignore it: a wrong figure is worse than none."""
    status = tmp_path / "status"
    monkeypatch.setattr(memory, "_STATUS", status)
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "clear_refs")
    peak = PeakMemory(torch.device("cpu"))
    for text, expected in (
        ("VmHWM:\t 2000000 kB\nVmRSS:\t 1000000 kB\n", None),
        ("VmHWM:\t 1000100 kB\nVmRSS:\t 1000000 kB\n", 1_000_100 * 1024),
        ("VmRSS:\t 1000000 kB\n", None),
        ("", None),
    ):
        status.write_text(text)
        peak.start()
        assert peak.read() == expected
