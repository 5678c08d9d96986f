"""A target spread over two devices decodes what it decodes on one, with its drafter on the last."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sharded_worker as worker
import torch
from pairs import aligned_pair

TESTS = Path(__file__).parents[1]


def decode_in_a_process(out: Path) -> dict[str, dict[str, Any]]:
    """Return what the pair decodes on simulated devices, by placement."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (TESTS, TESTS / "model")))
    command = [sys.executable, worker.__file__, out]
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found: dict[str, dict[str, Any]] = torch.load(out, weights_only=False)
    return found


@pytest.mark.slow
def test_every_placement_decodes_what_one_device_decodes(tmp_path: Path) -> None:
    """Token for token, in the same number of passes; the drafter is beside the projection."""
    spread, expected = decode_in_a_process(tmp_path / "results.pt"), worker.results(aligned_pair())
    for placement, devices in worker.PLACEMENTS.items():
        found = spread[placement]
        assert found.pop("devices") == {
            "target": devices[-1],
            "drafter": devices[-1],
            "cache": sorted(set(devices[1:3])),
        }
        assert found.keys() == expected.keys()
        for name, result in expected.items():
            torch.testing.assert_close(found[name], result, rtol=0, atol=0)
