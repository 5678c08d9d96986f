"""Peak memory of this process."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
