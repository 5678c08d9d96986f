"""Decoding steps on a simulated accelerator."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_steps_neither_synchronize_nor_mix_devices() -> None:
    """Run a file of tests, in a new process because it registers a device."""
    tests = Path(__file__).with_name("simulated_steps.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    environment = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", run.stdout)[1]) >= 35
