"""Trainings as users start and stop them: signals, and what the command refuses."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trainings import (
    KILLED_IN_MID_EPOCH,
    PATIENCE,
    SMALL,
    command,
    losses,
    metrics,
    same_weights,
    start,
    train_here,
    weights,
)

from eagle_fsd.train.config import TrainRecipe
from eagle_fsd.train.run_folder import RunFolder

#: More steps than any test waits for.
ENDLESS = {"max_steps": 1_000_000, "epochs": 10_000, "checkpoint_every": 1_000_000}


def told(process: Any) -> str:
    """Standard error of a process once it has ended."""
    _, errors = process.communicate(timeout=PATIENCE)
    return errors


def test_sigkill_in_mid_epoch_then_resume_gives_the_same_weights(
    target: Path, data: Path, tmp_path: Path
) -> None:
    """Bit for bit those of a run that nothing happened to."""
    out = tmp_path / "out"
    killed = start(command(data, out, target), ["-c", KILLED_IN_MID_EPOCH])
    told(killed)
    assert killed.returncode == -signal.SIGKILL
    assert len(metrics(out)) == 8
    assert not (out / "model.safetensors").exists()
    resumed = start(command(data, out, target, "--resume"))
    errors = told(resumed)
    assert resumed.returncode == 0, errors
    whole = tmp_path / "whole"
    undisturbed = start(command(data, whole, target))  # likewise: threads change the last bits
    told(undisturbed)
    assert same_weights(weights(out), weights(whole))
    assert torch.equal(losses(out), losses(whole))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda item: item.name)
def test_ctrl_c_writes_a_checkpoint_and_ends_with_status_130(
    number: int, target: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = start(command(data, out, target, **ENDLESS))
    deadline = time.monotonic() + PATIENCE
    while not (out / "metrics.jsonl").exists() or not metrics(out):
        assert process.poll() is None, told(process)
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    errors = told(process)
    assert process.returncode == 130
    assert "stopping after this step" in errors
    assert "Traceback" not in errors
    last = metrics(out)[-1]["step"]
    assert [path.name for path in (out / "checkpoints").iterdir()] == [f"step-{last}"]


def test_a_second_ctrl_c_stops_at_once(
    target: Path, data: Path, tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody who insists does not wait for a checkpoint."""
    before = signal.getsignal(signal.SIGINT)
    whole = RunFolder.append_metrics

    def insist(folder: RunFolder, line: dict[str, Any]) -> None:
        whole(folder, line)
        if line["step"] == 5:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(RunFolder, "append_metrics", insist)
    status, _, _ = run(*command(data, tmp_path / "out", target))
    assert status == 130
    checkpoints = (tmp_path / "out" / "checkpoints").iterdir()
    assert [path.name for path in checkpoints] == ["step-3"]
    assert signal.getsignal(signal.SIGINT) is before


# -- the folder ------------------------------------------------------------------------------------


def test_an_existing_training_needs_a_word(target: Path, data: Path, tmp_path: Path, run) -> None:
    out = train_here(data, tmp_path / "out", target)
    before = weights(out)
    status, _, errors = run(*command(data, out, target, seed=3))
    assert status == 1
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert "--resume" in errors
    assert "--overwrite" in errors
    assert same_weights(weights(out), before)
    status, printed, _ = run(*command(data, out, target, "--overwrite", seed=3))
    assert status == 0
    assert str(out) in printed
    assert not same_weights(weights(out), before)


def test_a_changed_recipe_or_other_data_is_not_gone_on_with(
    target: Path, data: Path, tmp_path: Path, run
) -> None:
    out = train_here(data, tmp_path / "out", target)
    before = weights(out)
    status, _, errors = run(*command(data, out, target, "--resume", lr=0.5, epochs=3))
    assert status == 1
    assert errors.count("\n") == 1
    assert "lr was 0.001, is 0.5" in errors
    assert "epochs was 20, is 3" in errors
    shorter = tmp_path / "chats.jsonl"
    shorter.write_text("".join(data.read_text().splitlines(keepends=True)[:5]))
    status, _, errors = run(*command(shorter, out, target, "--resume"))
    assert status == 1
    assert "bytes was" in errors
    assert same_weights(weights(out), before)


def test_what_does_not_touch_the_steps_may_change(target: Path, data: Path, tmp_path: Path) -> None:
    """How often something is told or kept is the user's to change at any time."""
    out = tmp_path / "out"
    whole = train_here(data, tmp_path / "whole", target)
    train_here(data, out, target)
    for step in (9, 12):
        for file in (out / "checkpoints" / f"step-{step}").iterdir():
            if step == 12:
                file.unlink()
    (out / "checkpoints" / "step-12").rmdir()
    train_here(data, out, target, resume=True, checkpoint_every=1, log_every=2, workers=1)
    assert same_weights(weights(out), weights(whole))


@pytest.mark.parametrize("word", ["resume", "overwrite"])
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_is_no_training_is_never_touched(kind: str, word: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    precious = out / "thesis.txt" if kind == "folder" else out
    precious.parent.mkdir(exist_ok=True)
    precious.write_text("ten years of work")
    with pytest.raises(ValueError, match="not a training's folder"):
        RunFolder(out, TrainRecipe(), {}, **{word: True})
    assert precious.read_text() == "ten years of work"


def test_an_empty_folder_is_as_good_as_none(tmp_path: Path) -> None:
    RunFolder(tmp_path, TrainRecipe(), {"data": "x"})
    assert json.loads((tmp_path / "recipe.json").read_text())["data"] == {"data": "x"}


# -- what the command refuses ----------------------------------------------------------------------


def missing_out(arguments: list[str]) -> list[str]:
    at = arguments.index("--out")
    return [*arguments[:at], *arguments[at + 2 :]]


def missing_data(arguments: list[str]) -> list[str]:
    at = arguments.index("--data")
    return [*arguments[:at], *arguments[at + 2 :]]


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        (missing_out, 2, ("--out",)),
        (missing_data, 2, ("--data", "--features")),
        (lambda all_: [*all_, "--features", str(Path(__file__).parent)], 2, ("either",)),
        (lambda all_: [*all_, "--unroll", "0"], 2, ("unroll",)),
        (lambda all_: [*all_, "--divergence-loss", "cosine"], 2, ("cosine", "js")),
        (lambda all_: [*all_, "--conv-template", "vicuna9"], 1, ("vicuna9", "vicuna_v1.1")),
        (lambda all_: [*all_, "--target", "/no/such/target"], 1, ("/no/such/target",)),
        (lambda all_: [*all_, "--data", "no-such.jsonl"], 2, ("no-such.jsonl",)),
        (lambda all_: [*all_, "--data", __file__], 1, ("no usable chat", "line 1")),
        (lambda all_: [*missing_data(all_), "--features", "tests"], 1, ("index.json",)),
    ],
    ids=lambda item: None if not isinstance(item, tuple) else "-".join(item),
)
def test_refusals_are_one_line_and_leave_nothing(
    change: Callable[[list[str]], list[str]],
    status: int,
    words: tuple[str, ...],
    target: Path,
    data: Path,
    tmp_path: Path,
    run,
) -> None:
    out = tmp_path / "out"
    ended, _, errors = run(*change(command(data, out, target)))
    assert ended == status
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    for word in words:
        assert word in errors
    assert not out.exists() or not any(out.iterdir())


def test_a_turn_longer_than_the_context_is_cut_and_told(
    target: Path, data: Path, tmp_path: Path, run, caplog: pytest.LogCaptureFixture
) -> None:
    assert run(*command(data, tmp_path / "out", target, max_length=20))[0] == 0
    assert "longer than the limit were cut 24 times" in caplog.text  # twelve batches of two
    caplog.clear()
    assert run(*command(data, tmp_path / "long", target, max_length=256))[0] == 0
    assert "longer than the limit" not in caplog.text


def test_plain_lines_tell_what_the_bar_would(target: Path, data: Path, tmp_path: Path, run) -> None:
    changes = {"validation": 1, "batch_size": SMALL["batch_size"]}
    status, _, errors = run(*command(data, tmp_path / "out", target, **changes))
    assert status == 0
    assert "step 12 of 12" in errors
    for word in ("loss", "top-1", "top-3", "lr", "tokens/s", "minutes left", "tau", "JS by depth"):
        assert word in errors
