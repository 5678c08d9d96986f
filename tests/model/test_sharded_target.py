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

TESTS = Path(__file__).parents[1]

pytestmark = pytest.mark.xdist_group("sharded_target")  # one process serves all tests


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """What the pairs decode on simulated devices, by pair and placement."""
    out = tmp_path_factory.mktemp("sharded") / "results.pt"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (TESTS, TESTS / "model")))
    command = [sys.executable, worker.__file__, out]
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found: dict[tuple[str, str], dict[str, Any]] = torch.load(out, weights_only=False)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", worker.PAIRS)
@pytest.mark.parametrize("placement", worker.PLACEMENTS)
def test_every_placement_decodes_what_one_device_decodes(
    placement: str, kind: str, spread: dict[tuple[str, str], dict[str, Any]]
) -> None:
    """Token for token in float32, with the same origins in the same number of passes."""
    expected = worker.results(worker.PAIRS[kind]())
    found = spread[kind, placement]
    assert found.keys() == expected.keys() | {"devices"}
    for name, result in expected.items():
        torch.testing.assert_close(found[name], result, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("placement", worker.PLACEMENTS)
def test_drafter_is_beside_the_output_projection(
    placement: str, spread: dict[tuple[str, str], dict[str, Any]]
) -> None:
    """And each layer's cache beside the layer."""
    devices = worker.PLACEMENTS[placement]
    assert spread["aligned", placement]["devices"] == {
        "target": devices[-1],
        "drafter": devices[-1],
        "cache": sorted(set(devices[1:3])),
    }


def test_mixing_devices_is_detected(tmp_path: Path) -> None:
    code = (
        "import torch; from placed_tensors import DEVICES, placed_tensors\n"
        "with placed_tensors():\n"
        "    one, other = (torch.ones(2, device=device) for device in DEVICES)\n"
        "    assert (one + other.to(one.device)).tolist() == [2, 2]\n"
        "    one + other"
    )
    environment = {**os.environ, "PYTHONPATH": str(TESTS / "model")}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert "RuntimeError: aten::add mixes tensors on ['gpu:0', 'gpu:1']" in run.stderr
