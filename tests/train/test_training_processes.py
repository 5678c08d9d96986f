"""Tests for trainings in processes of their own: signals, a full disk, two processes together."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from trainings import (
    EAGLE3,
    KILLED_IN_MID_EPOCH,
    TWO_PROCESSES,
    Train,
    command,
    read_losses,
    read_metrics,
    read_weights,
    run_process,
    same_training,
    start,
    write_chats,
)

from eagle_fsd.train.feature_store import FeatureStore
from eagle_fsd.train.training_folder import TrainingFolder


def test_only_the_first_signal_waits_for_a_checkpoint(
    target: Path, data: Path, tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Received after step 5, it stops after step 6; a second signal stops at once."""
    handled = signal.SIGINT, signal.SIGTERM
    handlers = list(map(signal.getsignal, handled))
    original = TrainingFolder.append_metrics
    signals: list[signal.Signals] = []

    def interrupt(folder: TrainingFolder, line: dict[str, Any]) -> None:
        original(folder, line)
        if line["step"] == 5:
            for number in signals:
                signal.raise_signal(number)

    monkeypatch.setattr(TrainingFolder, "append_metrics", interrupt)
    for found, steps in (
        ([signal.SIGINT], {3, 6}),
        ([signal.SIGTERM], {3, 6}),
        ([signal.SIGINT] * 2, {3}),
    ):
        signals[:] = found
        assert run(*command(data, tmp_path / "out", target, "--overwrite"))[0] == 130
        folders = {path.name for path in (tmp_path / "out" / "checkpoints").iterdir()}
        assert folders == {f"step-{step}" for step in steps}
        assert list(map(signal.getsignal, handled)) == handlers


@pytest.mark.slow
def test_a_signal_to_the_process_group_waits_for_a_checkpoint(
    target: Path, data: Path, tmp_path: Path
) -> None:
    """The processes that load data do not die of it."""
    out = tmp_path / "out"
    arguments = command(data, out, target, workers=1, max_steps=1000)
    program = start(arguments, start_new_session=True)
    metrics = out / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 5:
        assert program.poll() is None
        time.sleep(0.05)
    os.killpg(program.pid, signal.SIGTERM)
    _, errors = program.communicate(timeout=60)
    assert program.returncode == 130, errors
    assert any((out / "checkpoints").iterdir())


# -- two processes ---------------------------------------------------------------------------------


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of two processes on the CPU."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    return [*TWO_PROCESSES, "-m", "eagle_fsd.cli"]


def check_same(two: Path, one: Path) -> None:
    """Check that two processes trained as one does with twice the batch."""
    assert read_losses(two).tolist() == pytest.approx(read_losses(one).tolist(), rel=1e-4)
    for name in ("tokens", "lr", "top1"):
        values = [line[name] for line in read_metrics(two)]
        assert values == pytest.approx([line[name] for line in read_metrics(one)], rel=1e-4)
    for name, tensor in read_weights(one).items():
        torch.testing.assert_close(read_weights(two)[name], tensor, rtol=1e-3, atol=1e-5)
    for checkpoint in (two / "checkpoints").iterdir():
        assert len(list(checkpoint.glob("random_states_*"))) == 2  # one for each process


@pytest.mark.slow
def test_two_processes_equal_one_with_twice_the_batch_and_resume(
    train: Train, target: Path, data: Path, tmp_path: Path, two_processes: list[str]
) -> None:
    """Killed processes resume to the same weights, bit for bit.

    With ten chats in batches of four, the last of an epoch is filled up in one process only. The
    processes of an EAGLE-3 training count the tokens of the answers together. Those with batches of
    tokens have different numbers of chats and of answers.
    """
    options = {"max_length": 256, "accumulate": 2, **EAGLE3}
    two, out, script = (tmp_path / name for name in ("two", "out", "killed.py"))
    _, errors = run_process(command(data, two, target, **options), two_processes)
    assert errors.count("training: 12 of 12") == 1  # only one process prints
    check_same(two, train("one", **options, batch_size=4))
    script.write_text(KILLED_IN_MID_EPOCH)
    arguments = command(data, out, target, **options)
    run_process(arguments, [*two_processes[:-2], str(script)], status=None)
    assert read_metrics(out)[-1]["step"] == 8
    run_process([*arguments, "--resume"], two_processes)
    assert same_training(out, two)
    options = {"tokens_per_batch": 200, "max_length": 128, "max_steps": 2}
    run_process(command(data, tmp_path / "tokens", target, **options), two_processes)
    check_same(tmp_path / "tokens", train("one-tokens", **options, accumulate=2))


# -- features --------------------------------------------------------------------------------------

#: The command line, in which the second process is killed while it writes its second shard.
KILLED_IN_SHARD = """
import os, signal
from eagle_fsd.train import feature_store
original, calls = feature_store.save_file, []
def save(*arguments):
    calls.append(arguments)
    if os.environ["RANK"] == "1" and len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    original(*arguments)
feature_store.save_file = save
from eagle_fsd.cli import main
main()
"""


@pytest.mark.slow
def test_two_processes_store_the_features_of_one(
    succeed: Any, target: Path, tmp_path: Path, two_processes: list[str]
) -> None:
    """Two processes store one process's features, even if one is killed and both are restarted."""
    chats = write_chats(tmp_path / "chats.jsonl", 130)
    arguments = ["train", "features", "--data", str(chats), "--target", str(target), "--out"]
    one, two, script = tmp_path / "one", tmp_path / "two", tmp_path / "killed.py"
    succeed(*arguments, one)
    script.write_text(KILLED_IN_SHARD)
    run_process([*arguments, str(two)], [*two_processes[:-2], str(script)], status=None)
    assert 0 < len(FeatureStore(two)) < 130
    printed, errors = run_process([*arguments, str(two)], two_processes)
    assert printed.count("130 chats are in") == errors.count("are free in") == 1
    single, found = FeatureStore(one), FeatureStore(two)
    assert found.complete
    assert len(found) == len(single) == 130
    for index in range(130):
        ours, theirs = found[index], single[index]
        assert (ours.ids, ours.assistant_mask) == (theirs.ids, theirs.assistant_mask)
        # Products may be rounded in another order in another process.
        torch.testing.assert_close(ours.features, theirs.features, rtol=2**-7, atol=1e-4)
