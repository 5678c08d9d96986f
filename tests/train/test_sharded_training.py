"""Tests for the shipped configurations that shard the training, in two processes on the CPU."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from trainings import (
    EAGLE3,
    KILLED_IN_MID_EPOCH,
    Train,
    command,
    read_losses,
    read_metrics,
    read_weights,
    run_process,
    same_training,
)

import eagle_fsd.train

CONFIGS = Path(eagle_fsd.train.__file__).parent / "configs"
#: accelerate shards on GPUs only; it is made to take gloo for the backend of GPUs.
GLOO = """
from accelerate.state import PartialState
from accelerate.utils import DistributedType
PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
"""
WHOLE = "from eagle_fsd.cli import main\nmain()\n"
#: Ten chats of different lengths in batches of four, two batches a step: the last batch of an epoch
#: is not full, and its step continues in the next epoch.
OPTIONS = {"accumulate": 2, "max_length": 256, "epochs": 8}

NO_DEEPSPEED = find_spec("deepspeed") is None or shutil.which("g++") is None
NEEDS_DEEPSPEED = pytest.mark.skipif(
    NO_DEEPSPEED, reason="needs a C++ compiler and DeepSpeed; make slow installs the latter"
)
#: Configurations, and options in addition to :data:`OPTIONS`.
CASES = [
    pytest.param(
        (config, options),
        id=config,
        marks=[pytest.mark.xdist_group(config), *marks],
    )
    for config, options, marks in (
        ("fsdp", EAGLE3, []),
        ("deepspeed_zero2", {}, [NEEDS_DEEPSPEED]),
    )
]


def launch(
    config: str, script: str, folder: Path, arguments: list[str], status: int | None = 0
) -> None:
    """Train as ``accelerate launch --config_file`` does."""
    file = folder / "main.py"
    file.write_text(GLOO + script)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = ["-m", "accelerate.commands.launch", "--config_file", CONFIGS / f"{config}.yaml"]
    launcher = [*map(str, [*launcher, "--main_process_port", port, file])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
        # DeepSpeed compiles with the ninja that is installed beside it.
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        run_process(arguments, launcher, status)


@pytest.fixture(scope="module")
def sharded(
    request: pytest.FixtureRequest,
    target: Path,
    data: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, dict[str, Any], Path]:
    """A configuration, the options of a training with it, and what that training wrote."""
    config, options = request.param
    folder = tmp_path_factory.mktemp(config)
    options, out = {**OPTIONS, **options}, folder / "out"
    launch(config, WHOLE, folder, command(data, out, target, **options))
    return config, options, out


@pytest.mark.slow
@pytest.mark.parametrize("sharded", CASES, indirect=True)
def test_sharded_training_matches_the_plain_one(
    train: Train, sharded: tuple[str, dict[str, Any], Path]
) -> None:
    """Its steps are means over all positions of unequal batches, within bfloat16's precision."""
    _, options, out = sharded
    plain = train("plain", batch_size=4, **options)
    assert len(read_losses(out)) == 12
    assert read_losses(out).tolist() == pytest.approx(read_losses(plain).tolist(), rel=2**-8)
    for name, tolerance in (("gradient_norm", 1e-2), ("tokens", 0.0), ("lr", 1e-6)):
        values = [line[name] for line in read_metrics(out)]
        expected = [line[name] for line in read_metrics(plain)]
        assert values == pytest.approx(expected, rel=tolerance)
    weights, expected_weights = read_weights(out), read_weights(plain)
    for name, tensor in expected_weights.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0.01, atol=0.003)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", CASES, indirect=True)
def test_sharded_training_resumes_to_the_same_weights(
    sharded: tuple[str, dict[str, Any], Path], target: Path, data: Path, tmp_path: Path
) -> None:
    config, options, whole = sharded
    out = tmp_path / "out"
    arguments = command(data, out, target, **options)
    launch(config, KILLED_IN_MID_EPOCH, tmp_path, arguments, status=None)
    assert read_metrics(out)[-1]["step"] == 8
    launch(config, WHOLE, tmp_path, [*arguments, "--resume"])
    assert same_training(out, whole)
