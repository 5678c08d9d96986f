"""The training loop: what it leaves, what it survives, and that batches add up to the same."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trainings import losses, metrics, same_weights, train_here, weights, write_chats

from eagle_fsd.model.loading import load_tokenizer
from eagle_fsd.train.chats import ChatFile
from eagle_fsd.train.encoding import encode_chat
from eagle_fsd.train.run_folder import RunFolder, TrainingError
from eagle_fsd.train.trainer import Trainer
from eagle_fsd.utils.chat_templates import TokenizerFormat


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the package may catch it and tidy up."""


@pytest.fixture(scope="module")
def undisturbed(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to, with a validation in between."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    return train_here(data, out, target, validation=1, validate_every=5)


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(TrainingError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


# -- what is left ----------------------------------------------------------------------------------


def test_a_run_leaves_what_its_folder_promises(undisturbed: Path) -> None:
    for name in ("recipe.json", "config.json", "model.safetensors", "README.md", "training.json"):
        assert (undisturbed / name).stat().st_size > 0
    assert checkpoints(undisturbed) == ["step-12", "step-9"]  # the newest two
    with Image.open(undisturbed / "curves.png") as picture:
        picture.load()
        assert picture.format == "PNG"
        assert min(picture.size) > 300
    events = EventAccumulator(str(undisturbed / "tensorboard"))
    events.Reload()
    scalars = [event.value for event in events.Scalars("train/loss")]
    assert scalars == pytest.approx(losses(undisturbed).tolist(), rel=1e-6)
    assert {"train/top1", "train/lr", "validation/tau"} <= set(events.Tags()["scalars"])


def test_metrics_tell_every_step_and_validation(undisturbed: Path, data: Path) -> None:
    lines = metrics(undisturbed)
    assert [line["step"] for line in lines] == list(range(1, 13))
    for line in lines:
        assert 0 <= line["top1"] <= line["top3"] <= 1
        assert line["tokens_per_second"] > 0
        parts = line["feature"] + 0.1 * line["token"] + line["divergence"]
        assert line["loss"] == pytest.approx(parts, rel=1e-5)
    assert lines[-1]["seconds_left"] == 0
    validations = metrics(undisturbed, "validation")
    assert [line["step"] for line in validations] == [5, 10, 12]
    for line in validations:
        assert line["tau"] >= 1
        assert line["js_by_depth"]
        assert all(0 <= value <= 0.7 for value in line["js_by_depth"])  # at most ln 2


def test_tokens_are_those_of_the_chats(target: Path, data: Path, tmp_path: Path) -> None:
    """Of two epochs: padding and what fills up the last batch are not counted."""
    out = train_here(data, tmp_path / "out", target, max_steps=6, batch_size=4, max_length=50)
    tokenizer = load_tokenizer(target)
    wording = TokenizerFormat(tokenizer)
    lengths = [len(encode_chat(chat, tokenizer, wording, 50).ids) for chat in ChatFile(data)]
    filling = 2 * 2 * 2  # two rows of two tokens fill up the last batch of an epoch
    assert 0 <= metrics(out)[-1]["tokens"] - 2 * sum(lengths) <= filling


def test_the_loss_falls(target: Path, data: Path, tmp_path: Path) -> None:
    curve = losses(train_here(data, tmp_path / "out", target, max_steps=60, epochs=100))
    assert curve[-5:].mean() < 0.9 * curve[:5].mean()


# -- a kill at any moment --------------------------------------------------------------------------


def before_the_first_checkpoint(patch: pytest.MonkeyPatch) -> None:
    _die_after(patch, RunFolder, "append_metrics", 2)


def in_mid_epoch(patch: pytest.MonkeyPatch) -> None:
    _die_after(patch, RunFolder, "append_metrics", 9)


def with_a_line_of_metrics_cut_short(patch: pytest.MonkeyPatch) -> None:
    def half(folder: RunFolder, line: dict[str, Any]) -> None:
        with (folder.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line)[:20])
        raise Killed

    _replace_call(patch, RunFolder, "append_metrics", 9, half)


def with_half_a_checkpoint_written(patch: pytest.MonkeyPatch) -> None:
    def half(_: Accelerator, path: str) -> None:
        (Path(path) / "model.safetensors").write_bytes(b"half")
        raise Killed

    _replace_call(patch, Accelerator, "save_state", 2, half)


def with_a_whole_checkpoint_not_named_yet(patch: pytest.MonkeyPatch) -> None:
    _die_after(patch, Accelerator, "save_state", 2)


def before_old_checkpoints_went(patch: pytest.MonkeyPatch) -> None:
    _replace_call(patch, shutil, "rmtree", 4, lambda *_, **__: _die())


def after_the_last_step(patch: pytest.MonkeyPatch) -> None:
    _die_after(patch, Trainer, "run", 1)


MOMENTS = [
    before_the_first_checkpoint,
    in_mid_epoch,
    with_a_line_of_metrics_cut_short,
    with_half_a_checkpoint_written,
    with_a_whole_checkpoint_not_named_yet,
    before_old_checkpoints_went,
    after_the_last_step,
]


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
def test_a_run_killed_then_resumed_ends_with_the_same_weights(
    moment: Callable[[pytest.MonkeyPatch], None],
    undisturbed: Path,
    target: Path,
    data: Path,
    tmp_path: Path,
) -> None:
    """Bit for bit, and with the same metrics. (A real SIGKILL: test_trainer_processes.py.)"""
    out = tmp_path / "out"
    settings = {"validation": 1, "validate_every": 5}
    with pytest.MonkeyPatch.context() as patch:
        moment(patch)
        with pytest.raises(Killed):
            train_here(data, out, target, **settings)
    train_here(data, out, target, resume=True, **settings)
    assert same_weights(weights(out), weights(undisturbed))
    assert torch.equal(losses(out), losses(undisturbed))
    for kind in ("train", "validation"):
        steps = [line["step"] for line in metrics(out, kind)]
        assert steps == [line["step"] for line in metrics(undisturbed, kind)]
    assert checkpoints(out) == ["step-12", "step-9"]


def test_resume_begins_where_there_is_nothing(
    undisturbed: Path, target: Path, data: Path, tmp_path: Path
) -> None:
    out = train_here(data, tmp_path / "out", target, validation=1, validate_every=5, resume=True)
    assert same_weights(weights(out), weights(undisturbed))


def test_another_seed_gives_other_weights(
    undisturbed: Path, target: Path, data: Path, tmp_path: Path
) -> None:
    """So equality above means something."""
    settings = {"validation": 1, "validate_every": 5}
    out = train_here(data, tmp_path / "out", target, seed=1, **settings)
    assert not same_weights(weights(out), weights(undisturbed))


# -- what goes wrong -------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_keeps_the_last_checkpoint(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Trainer._noisy

    def poisoned(trainer: Trainer, *arguments: Any) -> torch.Tensor:
        features = whole(trainer, *arguments)
        return features * (float("nan") if trainer.step == 7 else 1.0)

    monkeypatch.setattr(Trainer, "_noisy", poisoned)
    message = error_of(lambda: train_here(data, tmp_path / "out", target))
    assert message == "step 8: the loss is not finite; the checkpoint of step 6 is kept"
    assert checkpoints(tmp_path / "out") == ["step-3", "step-6"]
    kept = load_file(tmp_path / "out" / "checkpoints" / "step-6" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in kept.values())


def test_a_gradient_that_is_not_finite_never_reaches_the_weights(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the loss of that step is: the next one's would not be, and a checkpoint be lost."""
    whole = Accelerator.clip_grad_norm_

    def overflown(*arguments: Any) -> torch.Tensor:
        return whole(*arguments) * float("inf")

    _replace_call(monkeypatch, Accelerator, "clip_grad_norm_", 6, overflown)
    message = error_of(lambda: train_here(data, tmp_path / "out", target))
    assert message == "step 6: the loss is not finite; the checkpoint of step 3 is kept"
    assert checkpoints(tmp_path / "out") == ["step-3"]


def test_a_broken_target_is_told_in_the_first_step(
    target: Path, data: Path, tmp_path: Path
) -> None:
    broken = shutil.copytree(target, tmp_path / "target")
    state = load_file(broken / "model.safetensors")
    state["model.norm.weight"][3] = float("nan")
    save_file(state, broken / "model.safetensors", metadata={"format": "pt"})
    message = error_of(lambda: train_here(data, tmp_path / "out", broken))
    assert message == "step 1: the loss is not finite; none was kept"


def test_memory_that_runs_out_is_one_line_with_advice(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate a lot")

    _replace_call(monkeypatch, Trainer, "_losses", 5, full)
    message = error_of(lambda: train_here(data, tmp_path / "out", target))
    for word in ("step 5", "batch_size", "accumulate", "step 3 is kept"):
        assert word in message


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("[enforce fail at inline_container.cc:672] unexpected pos 64 vs 0"),  # torch's
    ],
    ids=["os", "torch"],
)
def test_a_full_disk_keeps_the_last_checkpoint(
    error: Exception,
    undisturbed: Path,
    target: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is one line, leaves no half checkpoint, and the run goes on once there is space."""
    out = tmp_path / "out"
    settings = {"validation": 1, "validate_every": 5}

    def full(_: Accelerator, path: str) -> None:
        (Path(path) / "model.safetensors").write_bytes(b"half")
        raise error

    with monkeypatch.context() as patch:
        _replace_call(patch, Accelerator, "save_state", 3, full)
        message = error_of(lambda: train_here(data, out, target, **settings))
    assert "step 9 could not be written" in message
    assert "step-6 is kept" in message
    assert checkpoints(out) == ["step-3", "step-6"]
    train_here(data, out, target, resume=True, **settings)
    assert same_weights(weights(out), weights(undisturbed))


# -- batches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [4, 3], ids=["full", "not-full"])
def test_accumulated_batches_equal_one_large_batch(
    count: int, target: Path, tmp_path: Path
) -> None:
    """All chats in every step, of unlike lengths: means are over positions, not over batches."""
    data = write_chats(tmp_path / "chats.jsonl", count)
    whole = train_here(data, tmp_path / "whole", target, batch_size=4, max_length=256)
    parts = train_here(data, tmp_path / "parts", target, accumulate=2, max_length=256)
    assert losses(parts).tolist() == pytest.approx(losses(whole).tolist(), rel=1e-4)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(parts)[name], tensor, rtol=1e-3, atol=1e-5)


def test_worker_processes_change_nothing(
    undisturbed: Path, target: Path, data: Path, tmp_path: Path
) -> None:
    settings = {"validation": 1, "validate_every": 5}
    out = train_here(data, tmp_path / "out", target, workers=2, **settings)
    assert same_weights(weights(out), weights(undisturbed))


def _die(*_: Any) -> None:
    raise Killed


def _die_after(patch: pytest.MonkeyPatch, owner: Any, name: str, number: int) -> None:
    whole = getattr(owner, name)

    def last(*arguments: Any, **options: Any) -> None:
        whole(*arguments, **options)
        raise Killed

    _replace_call(patch, owner, name, number, last)


def _replace_call(
    patch: pytest.MonkeyPatch, owner: Any, name: str, number: int, instead: Callable[..., Any]
) -> None:
    """Have the ``number``-th call of ``owner.name`` (from 1) do something else."""
    whole, calls = getattr(owner, name), 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return (instead if calls == number else whole)(*arguments, **options)

    patch.setattr(owner, name, counted)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs a C++ compiler")
def test_compiled_layers_train_and_validate(target: Path, data: Path, tmp_path: Path) -> None:
    """The validation's decoding runs the same layers, uncompiled: its shapes broke the compiler."""
    plain = train_here(data, tmp_path / "plain", target, validation=2, validate_every=3)
    out = train_here(data, tmp_path / "out", target, validation=2, validate_every=3, compile=True)
    assert losses(out) == pytest.approx(losses(plain), rel=1e-3)
    (first, *_) = [line for line in metrics(out) if line["kind"] == "validation"]
    assert first["tau"] >= 1.0
