"""Two processes do together what one does with twice the batch."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest
import torch
from trainings import (
    KILLED_IN_MID_EPOCH,
    PATIENCE,
    command,
    losses,
    metrics,
    same_weights,
    start,
    train_here,
    weights,
)

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_processes_give_the_curve_of_one_with_twice_the_batch(
    accumulate: int, target: Path, data: Path, tmp_path: Path
) -> None:
    """Ten chats in batches of four: the last of an epoch is filled up, in one process only."""
    both = {"max_length": 256, "accumulate": accumulate}
    one = train_here(data, tmp_path / "one", target, batch_size=4, **both)
    process = start(command(data, tmp_path / "two", target, **both), two_processes())
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert errors.count("step 12 of 12") == 1  # only one of them talks
    two = losses(tmp_path / "two")
    assert len(two) == 12
    assert two.tolist() == pytest.approx(losses(one).tolist(), rel=1e-4)
    for name in ("tokens", "lr", "top1"):
        ours = [line[name] for line in metrics(tmp_path / "two")]
        assert ours == pytest.approx([line[name] for line in metrics(one)], rel=1e-4)
    for name, tensor in weights(one).items():
        torch.testing.assert_close(weights(tmp_path / "two")[name], tensor, rtol=1e-3, atol=1e-5)
    for checkpoint in (tmp_path / "two" / "checkpoints").iterdir():
        assert len(list(checkpoint.glob("random_states_*"))) == 2  # each wrote its own


def test_two_processes_killed_then_resumed_end_with_the_same_weights(
    target: Path, data: Path, tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    process = start(command(data, whole, target), two_processes())
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    script = tmp_path / "killed.py"
    script.write_text(KILLED_IN_MID_EPOCH)
    killed = start(command(data, out, target), [*two_processes()[:-2], str(script)])
    killed.communicate(timeout=PATIENCE)
    assert killed.returncode not in (0, -signal.SIGKILL)  # the launcher lives and tells
    assert metrics(out)[-1]["step"] == 8
    resumed = start(command(data, out, target, "--resume"), two_processes())
    _, errors = resumed.communicate(timeout=PATIENCE)
    assert resumed.returncode == 0, errors
    assert same_weights(weights(out), weights(whole))
    assert torch.equal(losses(out), losses(whole))


def two_processes() -> list[str]:
    """``torchrun`` on a port that is free.

    ``accelerate launch --cpu --num_processes 2`` starts one process unless there is an mpirun.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(port)]
    return [*launch, "-m", "eagle_fsd.cli"]
