"""Files of tests that run in processes of their own: one registers a device, one needs torchao."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

#: Where ``make slow`` installs torchao: transformers imports it wherever it finds it.
TORCHAO = Path(sys.prefix) / "torchao"
needs_torchao = pytest.mark.skipif(not TORCHAO.exists(), reason="torchao is not installed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "least", "variables"),
    [
        ("simulated_steps", 33, {}),
        pytest.param("quantized_targets", 7, {"PYTHONPATH": str(TORCHAO)}, marks=needs_torchao),
    ],
)
def test_file_passes(name: str, least: int, variables: dict[str, str]) -> None:
    tests = Path(__file__).with_name(f"{name}.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    inherited = {key: value for key, value in os.environ.items() if "XDIST" not in key}
    environment = {**inherited, **variables}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    found = re.search(r"(\d+) passed", run.stdout)
    assert found is not None
    assert int(found[1]) >= least
