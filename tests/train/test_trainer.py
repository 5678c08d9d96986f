"""Tests for the training loop: its files, interruptions, failures, and equivalent batches."""

from __future__ import annotations

import errno
import json
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trainings import (
    EAGLE3,
    Train,
    killed,
    read_losses,
    read_metrics,
    read_weights,
    replace_call,
    same_training,
    same_weights,
    train_here,
    write_chats,
    write_half,
    write_target,
)

from eagle_fsd import EagleFSD, EagleHead, OptionsError
from eagle_fsd.model.checkpoint import save_head
from eagle_fsd.model.config import TargetOptions
from eagle_fsd.model.loading import load_target
from eagle_fsd.model.target import Target
from eagle_fsd.train.config import RegenerateConfig, RegenerateRequest
from eagle_fsd.train.dataset import split_validation
from eagle_fsd.train.loaded_target import LoadedTarget
from eagle_fsd.train.regenerate import regenerate
from eagle_fsd.train.trainer import Trainer
from eagle_fsd.train.training_folder import TrainingError, TrainingFolder
from eagle_fsd.utils.chat_templates import encode_prompt

pytestmark = pytest.mark.xdist_group("trainer")

#: Options of the uninterrupted training, which has validations.
VALIDATED = {"validation": 1, "validate_every": 5}
#: A RoPE whose frequencies depend on the length beyond the original one.
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, **FACTORS}
#: Options of a training on batches of tokens.
TOKENS = {"tokens_per_batch": 200, "max_length": 128}


@pytest.fixture(scope="module")
def uninterrupted(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete training with a validation in between."""
    return train_here(data, tmp_path_factory.mktemp("whole") / "out", target, **VALIDATED)


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


# -- files and starting points ---------------------------------------------------------------------


def test_training_writes_its_files(uninterrupted: Path, target: Path, data: Path) -> None:
    for name in ("recipe.json", "config.json", "model.safetensors", "README.md", "training.json"):
        assert (uninterrupted / name).stat().st_size > 0
    assert checkpoints(uninterrupted) == ["step-12", "step-9"]  # the newest two
    with Image.open(uninterrupted / "curves.png") as picture:
        picture.load()
        assert picture.format == "PNG"
        assert min(picture.size) > 300
    lines, losses = read_metrics(uninterrupted), read_losses(uninterrupted)
    events = EventAccumulator(str(uninterrupted / "tensorboard"))
    events.Reload()
    scalars = [event.value for event in events.Scalars("train/loss")]
    assert scalars == pytest.approx(losses.tolist(), rel=1e-6)
    assert {"train/top1", "train/lr", "validation/tau"} <= set(events.Tags()["scalars"])
    assert [line["step"] for line in lines] == list(range(1, 13))
    for line in lines:
        assert 0 <= line["top1"] <= line["top3"] <= 1
        assert line["tokens_per_second"] > 0
        parts = line["feature"] + 0.1 * line["token"] + line["divergence"]
        assert line["loss"] == pytest.approx(parts, rel=1e-5)
    assert lines[-1]["seconds_left"] == 0
    validations = read_metrics(uninterrupted, "validation")
    assert [line["step"] for line in validations] == [5, 10, 12]
    for line in validations:
        assert line["tau"] >= 1
        assert line["js_by_depth"]
        assert all(0 <= value <= 0.7 for value in line["js_by_depth"])  # at most ln 2
    chats = LoadedTarget.load(TargetOptions(target=target)).open_chats(data, 64)
    kept, _ = split_validation(len(chats), 1, 0)
    tokens = sum(len(chats[index].ids) for index in kept)  # nine chats, in five batches of two
    assert lines[4]["tokens"] == tokens  # without padding and the filler


def test_loss_falls(train: Train) -> None:
    for name, options in (("eagle", {}), ("eagle3", EAGLE3)):
        losses = read_losses(train(name, max_steps=20, checkpoint_every=20, lr=0.01, **options))
        assert losses[-3:].mean() < 0.85 * losses[:3].mean(), losses


def test_training_starts_from_a_head(
    train: Train, target: Path, data: Path, tmp_path: Path
) -> None:
    """A learning rate of zero keeps all weights, the bias and an embedding included.

    A training that started from a head is not resumed without it, but has its features stored for
    any head.
    """
    wrapped = Target(load_target(target))
    head = EagleHead(wrapped.config, True).attach(wrapped)
    embedding = torch.randn_like(wrapped.embed.weight)
    head.embed_tokens = torch.nn.Embedding.from_pretrained(embedding)
    save_head(head, tmp_path / "first")
    no_updates = {"lr": 0.0, "weight_decay": 0.0, "max_steps": 2}
    second = train("second", head=tmp_path / "first", **no_updates)
    assert same_weights(read_weights(second), read_weights(tmp_path / "first"))
    assert {"fc.bias", "embed_tokens.weight"} <= read_weights(second).keys()
    assert read_losses(second).isfinite().all()
    with pytest.raises(OptionsError, match="draft_vocab_size must be that of --head, 1024; got 9"):
        train("third", head=second, draft_vocab_size=9)
    with pytest.raises(OptionsError, match="bias must be that of --head, True; got False"):
        train("third", head=second, bias=False)
    with pytest.raises(ValueError, match=r"cannot be resumed: head was .*first', is None"):
        train_here(data, second, target, resume=True, **no_updates)
    stored = {"store_features": True, "dtype": "float32", "max_steps": 2}
    with killed(TrainingFolder, "append_metrics", 1):
        train("third", head=second, **stored)
    train("third", resume=True, **stored)  # there was no checkpoint yet


def test_chats_are_truncated_where_attention_changes(
    tmp_path: Path,
) -> None:
    """Prompts that leave no room for an answer are not decoded, and answers end there."""
    rope = {**LONGROPE, "original_max_position_embeddings": 128}
    target = write_target(tmp_path / "target", max_position_embeddings=512, rope_parameters=rope)
    loaded = LoadedTarget.load(TargetOptions(target=target))
    chat, length = [{"role": "user", "content": "one"}], 0
    while length < 124:
        chat[0]["content"] += " one"
        length = encode_prompt(chat, loaded.tokenizer, loaded.chat_template).shape[1]
    chat += [{"role": "assistant", "content": "Two, three, four, five, six, seven."}]
    file, out = tmp_path / "chats.jsonl", tmp_path / "rewritten.jsonl"
    file.write_text(f"{json.dumps({'messages': chat})}\n" * 10)
    head = train_here(file, tmp_path / "out", target, max_length=512, max_steps=1, validation=1)
    assert json.loads((head / "recipe.json").read_text())["data"]["max_length"] == 128
    (validation,) = read_metrics(head, "validation")
    assert validation["tau"] is None
    request = RegenerateRequest(data=file, out=out, target=target)
    regenerate(request, RegenerateConfig(max_new_tokens=6))
    assert len(out.read_text().splitlines()) == 10


# -- interruptions ---------------------------------------------------------------------------------


def write_half_a_line(folder: TrainingFolder, line: dict[str, Any]) -> None:
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line)[:20])


IN_MID_EPOCH = (TrainingFolder, "append_metrics", 9)
#: Arguments of :func:`killed`.
MOMENTS: dict[str, Any] = {
    "before_the_first_checkpoint": (TrainingFolder, "append_metrics", 2),
    "in_mid_epoch": IN_MID_EPOCH,
    "in_a_line_of_metrics": (*IN_MID_EPOCH, write_half_a_line),
    "in_a_checkpoint": (Accelerator, "save_state", 2, write_half),
    "before_a_checkpoint_is_renamed": (Accelerator, "save_state", 2),
    "before_old_checkpoints_are_deleted": (shutil, "rmtree", 4, lambda *_, **__: None),
    "after_the_last_step": (Trainer, "run", 1),
}


@pytest.mark.slow
def test_killed_then_resumed_training_gives_the_same_weights(
    train: Train, uninterrupted: Path, tmp_path: Path
) -> None:
    """Resumed training has the weights of uninterrupted training, bit for bit, and its metrics."""
    for name, moment in MOMENTS.items():
        with killed(*moment):
            train(name, **VALIDATED)
        out = train(name, resume=True, **VALIDATED)
        assert same_training(out, uninterrupted), name
        for kind in ("train", "validation"):
            steps = [line["step"] for line in read_metrics(out, kind)]
            assert steps == [line["step"] for line in read_metrics(uninterrupted, kind)]
        assert checkpoints(out) == ["step-12", "step-9"]


def test_other_trainings_resume_to_the_same_weights(train: Train, tmp_path: Path) -> None:
    """Those on a budget of tokens, and those of a head with a draft vocabulary."""
    for name, options in {
        "tokens": {**TOKENS, "accumulate": 2, "epochs": 8, "draft_vocab_size": 200},
        "eagle3": EAGLE3,
    }.items():
        settings: dict[str, Any] = {**options, "max_steps": 6}
        whole = train(f"{name}-whole", **settings)
        with killed(TrainingFolder, "append_metrics", 5):
            train(name, **settings)
        assert same_training(train(name, resume=True, **settings), whole), name
        with pytest.raises(ValueError, match=r"tokens_per_batch was (None|200), is 250"):
            train(name, resume=True, **{**settings, "tokens_per_batch": 250})
    with pytest.raises(OptionsError, match=r"at least max_length \(128\); got 100"):
        train(tokens_per_batch=100, max_length=128)
    assert not (tmp_path / "out").exists()


def test_checkpoint_saves_a_usable_head(
    train: Train,
    uninterrupted: Path,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Interrupted training leaves a usable head; only complete training deletes stored features."""
    monkeypatch.setattr("eagle_fsd.train.run.draw_curves", lambda _, path: path.touch())
    stored = {**VALIDATED, "store_features": True, "dtype": "float32"}
    with killed(*IN_MID_EPOCH):
        train(**stored)
    out = tmp_path / "out"
    checkpoint = load_file(out / "checkpoints" / "step-6" / "model.safetensors")
    saved = read_weights(out)
    assert same_weights(
        saved, {name.removeprefix("head."): checkpoint[name] for name in checkpoint}
    )
    pair = EagleFSD.from_pretrained(target, out)
    assert pair.generate(torch.tensor([[1, 5, 9]]), max_new_tokens=5).stats.tokens == 5
    record = json.loads((out / "training.json").read_text())
    assert (record["steps"], record["settings"]["epochs"]) == (6, 20)
    assert (out / "README.md").exists()
    assert (out / "curves.png").exists()  # the card links it
    train(resume=True, **stored)
    assert not (out / "features").exists()
    assert read_losses(out).tolist() == pytest.approx(read_losses(uninterrupted).tolist(), rel=0.1)
    assert read_metrics(out, "validation")[-1]["tau"] >= 1


# -- failures --------------------------------------------------------------------------------------


def test_failed_step_keeps_the_last_checkpoint(
    train: Train, target: Path, data: Path, tmp_path: Path
) -> None:
    """The message is one line, and the weights of the checkpoint are finite."""

    def diverge(trainer: Trainer, *_: Any) -> dict[str, Any]:
        return {"loss": sum(p.sum() for p in trainer.losses.parameters()) * float("nan")}

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate a lot")

    def fail_on_cpu(*_: Any) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    original = Accelerator.clip_grad_norm_

    def overflow(*arguments: Any) -> Any:  # in a step whose loss is finite
        return original(*arguments) * float("inf")

    not_finite = "the loss or its gradient is not finite"
    advice = "out of memory; lower batch_size or tokens_per_batch (and raise accumulate"
    failures = {
        "loss": (Trainer, "_compute_losses", 8, diverge, not_finite, 6),
        "gradient": (Accelerator, "clip_grad_norm_", 6, overflow, not_finite, 3),
        "memory": (Trainer, "_compute_losses", 5, fail, advice, 3),
        "cpu": (Trainer, "_compute_losses", 5, fail_on_cpu, advice, 3),
    }
    for name, (owner, method, step, replacement, reason, kept) in failures.items():
        with pytest.MonkeyPatch.context() as patch:
            replace_call(patch, owner, method, step, replacement)
            with pytest.raises(TrainingError) as caught:
                train(name)
        message = str(caught.value)
        assert message.startswith(f"step {step}: {reason}")
        assert message.endswith(f"; the checkpoint of step {kept} is kept")
        assert "\n" not in message
        assert checkpoints(tmp_path / name) == [f"step-{at}" for at in (3, 6) if at <= kept]
        folder = tmp_path / name / "checkpoints" / f"step-{kept}"
        saved = load_file(folder / "model.safetensors").values()
        assert all(tensor.isfinite().all() for tensor in saved)
        assert "There is no validation result." in (tmp_path / name / "README.md").read_text()
    broken = shutil.copytree(target, tmp_path / "target")
    state = load_file(broken / "model.safetensors")
    state["model.norm.weight"][3] = float("nan")
    save_file(state, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TrainingError, match=r"^step 1: .*not finite; there is no checkpoint yet$"):
        train_here(data, tmp_path / "out", broken)


def test_full_disk_keeps_the_last_checkpoint(train: Train, tmp_path: Path) -> None:
    """No partial checkpoint is left, and the training can be resumed."""
    errors = {
        "os": OSError(errno.ENOSPC, "No space left on device"),
        "torch": RuntimeError("[enforce fail at inline_container.cc:672] unexpected pos 64 vs 0"),
        "safetensors": SafetensorError("I/O error: File too large (os error 27)"),
    }
    for name, error in errors.items():

        def fail(accelerator: Accelerator, path: str, error: Exception = error) -> None:
            write_half(accelerator, path)
            raise error

        with pytest.MonkeyPatch.context() as patch:
            replace_call(patch, Accelerator, "save_state", 3, fail)
            with pytest.raises(TrainingError) as caught:
                train(name)
        assert "step 9 could not be written" in str(caught.value)
        assert "the checkpoint of step 6 is kept" in str(caught.value)
        assert checkpoints(tmp_path / name) == ["step-3", "step-6"]
    assert checkpoints(train(name, resume=True)) == ["step-12", "step-9"]


def test_trainings_that_would_fail_are_refused(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that do not see each other would all be the main one of the same folder."""
    with monkeypatch.context() as patch:
        patch.setattr(Accelerator, "mixed_precision", "fp16")
        with pytest.raises(OptionsError, match="mixed precision must be bf16 or no; got fp16"):
            train()
    monkeypatch.setattr("eagle_fsd.train.run.os", SimpleNamespace(environ={"WORLD_SIZE": "2"}))
    with pytest.raises(OptionsError, match="WORLD_SIZE is set"):
        train()


# -- equivalent trainings --------------------------------------------------------------------------


def test_accumulated_batches_equal_one_large_batch(train: Train, tmp_path: Path) -> None:
    """All chats in every step, of different lengths: means are over positions, not over batches."""
    data = write_chats(tmp_path / "chats.jsonl", 3)
    settings = {"data": data, "max_length": 256, "max_steps": 6}
    whole = train("whole", batch_size=4, **settings)
    parts = train("parts", accumulate=2, **settings)
    assert read_losses(parts).tolist() == pytest.approx(read_losses(whole).tolist(), rel=1e-4)
    for name, tensor in read_weights(whole).items():
        torch.testing.assert_close(read_weights(parts)[name], tensor, rtol=1e-3, atol=1e-5)


def test_only_the_seed_changes_the_weights(
    train: Train, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers, ``resume`` without a training, and a signal in the last step do not."""
    step = Trainer._train_step

    def interrupted(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return step(*arguments)

    replace_call(monkeypatch, Trainer, "_train_step", 12, interrupted)
    out = train(workers=1, resume=True, **VALIDATED)
    assert same_weights(read_weights(out), read_weights(uninterrupted))
    other = train("other", seed=1, max_steps=1)
    assert not torch.equal(read_losses(other), read_losses(uninterrupted)[:1])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs a C++ compiler")
def test_compiled_layers_train_and_validate(train: Train) -> None:
    """Validation decodes with the same layers, uncompiled."""
    options = {**EAGLE3, "validation": 2, "validate_every": 3, "max_steps": 6}
    plain = train("plain", **options)
    out = train(compile=True, **options)
    assert read_losses(out) == pytest.approx(read_losses(plain), rel=1e-3)
    assert read_metrics(out, "validation")[0]["tau"] >= 1.0
