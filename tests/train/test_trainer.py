"""Tests for the training loop: its files, interruptions, failures, and equivalent batches."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
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
)

from eagle_fsd import EagleHead, OptionsError
from eagle_fsd.model.checkpoint import save_head
from eagle_fsd.model.loading import load_target, load_tokenizer
from eagle_fsd.model.target import Target
from eagle_fsd.train.assistant_mask import encode_chat
from eagle_fsd.train.chat_file import ChatFile
from eagle_fsd.train.config import FeaturesRequest
from eagle_fsd.train.dataset import Batch
from eagle_fsd.train.feature_store import store_features
from eagle_fsd.train.trainer import Trainer
from eagle_fsd.train.training_folder import TrainingError, TrainingFolder
from eagle_fsd.utils.chat_templates import TokenizerTemplate

#: Options of the uninterrupted training, which has validations.
VALIDATED = {"validation": 1, "validate_every": 5}
#: Options of a training on batches of tokens.
TOKENS = {"tokens_per_batch": 200, "max_length": 128}
HEADS = pytest.mark.parametrize("options", [{}, EAGLE3], ids=["eagle", "eagle3"])


@pytest.fixture(scope="module")
def uninterrupted(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete training with a validation in between."""
    return train_here(data, tmp_path_factory.mktemp("whole") / "out", target, **VALIDATED)


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def error_of(call: Callable[[], Any]) -> str:
    """Return the one-line message of the TrainingError that a call raises."""
    with pytest.raises(TrainingError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


# -- files -----------------------------------------------------------------------------------------


def test_training_writes_its_files(uninterrupted: Path) -> None:
    for name in ("recipe.json", "config.json", "model.safetensors", "README.md", "training.json"):
        assert (uninterrupted / name).stat().st_size > 0
    assert checkpoints(uninterrupted) == ["step-12", "step-9"]  # the newest two
    with Image.open(uninterrupted / "curves.png") as picture:
        picture.load()
        assert picture.format == "PNG"
        assert min(picture.size) > 300
    events = EventAccumulator(str(uninterrupted / "tensorboard"))
    events.Reload()
    scalars = [event.value for event in events.Scalars("train/loss")]
    assert scalars == pytest.approx(read_losses(uninterrupted).tolist(), rel=1e-6)
    assert {"train/top1", "train/lr", "validation/tau"} <= set(events.Tags()["scalars"])


def test_metrics_of_steps_and_validations(uninterrupted: Path) -> None:
    lines = read_metrics(uninterrupted)
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


def test_tokens_are_counted_without_padding(train: Train, target: Path, data: Path) -> None:
    out = train(max_steps=6, batch_size=4, max_length=50)
    tokenizer = load_tokenizer(target)
    chat_template = TokenizerTemplate(tokenizer)
    lengths = [len(encode_chat(chat, tokenizer, chat_template, 50).ids) for chat in ChatFile(data)]
    filler = 2 * 2 * 2  # in two epochs, two rows of two tokens
    assert 0 <= read_metrics(out)[-1]["tokens"] - 2 * sum(lengths) <= filler


@HEADS
def test_loss_falls(options: dict[str, Any], train: Train) -> None:
    losses = read_losses(train(max_steps=60, epochs=100, checkpoint_every=60, **options))
    assert losses[-5:].mean() < 0.9 * losses[:5].mean()


# -- starting from a head --------------------------------------------------------------------------


def test_training_starts_from_a_head(train: Train, target: Path, data: Path) -> None:
    """With a learning rate of zero it keeps all weights, the bias included."""
    first = train("first", bias=True, max_steps=2)
    second = train("second", head=first, lr=0.0, weight_decay=0.0, max_steps=2)
    assert same_weights(read_weights(second), read_weights(first))
    assert "fc.bias" in read_weights(second)
    assert read_losses(second).isfinite().all()
    with pytest.raises(ValueError, match=r"cannot be resumed: head was .*first', is None"):
        train_here(data, second, target, lr=0.0, weight_decay=0.0, max_steps=2, resume=True)


def test_head_with_its_own_embedding_keeps_it(train: Train, target: Path, tmp_path: Path) -> None:
    wrapped = Target(load_target(target))
    head = EagleHead(wrapped.config, False).attach(wrapped)
    embedding = torch.randn_like(wrapped.embed.weight)
    head.embed_tokens = torch.nn.Embedding.from_pretrained(embedding)
    save_head(head, tmp_path / "head")
    out = train(head=tmp_path / "head", max_steps=2)
    assert torch.equal(read_weights(out)["embed_tokens.weight"], embedding)


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
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_then_resumed_training_gives_the_same_weights(
    train: Train, moment: str, uninterrupted: Path, tmp_path: Path
) -> None:
    """Bit for bit, and with the same metrics."""
    out = tmp_path / "out"
    with killed(*MOMENTS[moment]):
        train(**VALIDATED)
    train(resume=True, **VALIDATED)
    assert same_training(out, uninterrupted)
    for kind in ("train", "validation"):
        steps = [line["step"] for line in read_metrics(out, kind)]
        assert steps == [line["step"] for line in read_metrics(uninterrupted, kind)]
    assert checkpoints(out) == ["step-12", "step-9"]


@pytest.mark.parametrize(
    "settings", [{**TOKENS, "accumulate": 2, "epochs": 8}, EAGLE3], ids=["tokens", "eagle3"]
)
def test_other_trainings_resume_to_the_same_weights(settings: dict[str, Any], train: Train) -> None:
    """Those on a budget of tokens, and those of a head with a draft vocabulary."""
    whole = train("whole", **settings)
    with killed(*IN_MID_EPOCH):
        train(**settings)
    out = train(resume=True, **settings)
    assert same_training(out, whole)
    with pytest.raises(ValueError, match=r"tokens_per_batch was (None|200), is 250"):
        train(resume=True, **{**settings, "tokens_per_batch": 250})


def test_seed_changes_the_weights(train: Train, uninterrupted: Path) -> None:
    out = train(seed=1, **VALIDATED)
    assert not same_weights(read_weights(out), read_weights(uninterrupted))


# -- failures --------------------------------------------------------------------------------------


def test_loss_that_is_not_finite_keeps_the_last_checkpoint(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverge(trainer: Trainer, *_: Any) -> dict[str, Any]:
        return {"loss": sum(p.sum() for p in trainer.losses.parameters()) * float("nan")}

    replace_call(monkeypatch, Trainer, "_compute_losses", 8, diverge)
    message = error_of(train)
    assert message == "step 8: the loss is not finite; the checkpoint of step 6 is kept"
    assert checkpoints(tmp_path / "out") == ["step-3", "step-6"]
    saved = load_file(tmp_path / "out" / "checkpoints" / "step-6" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in saved.values())


def test_gradient_that_is_not_finite_does_not_reach_the_weights(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is reported in its own step, although that step's loss is finite."""
    original = Accelerator.clip_grad_norm_

    def overflow(*arguments: Any) -> Any:
        return original(*arguments) * float("inf")

    replace_call(monkeypatch, Accelerator, "clip_grad_norm_", 6, overflow)
    message = error_of(train)
    assert message == "step 6: the loss is not finite; the checkpoint of step 3 is kept"
    assert checkpoints(tmp_path / "out") == ["step-3"]


def test_broken_target_is_reported_in_the_first_step(
    target: Path, data: Path, tmp_path: Path
) -> None:
    broken = shutil.copytree(target, tmp_path / "target")
    state = load_file(broken / "model.safetensors")
    state["model.norm.weight"][3] = float("nan")
    save_file(state, broken / "model.safetensors", metadata={"format": "pt"})
    message = error_of(lambda: train_here(data, tmp_path / "out", broken))
    assert message == "step 1: the loss is not finite; there is no checkpoint yet"


def test_out_of_memory_is_one_line_with_advice(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate a lot")

    replace_call(monkeypatch, Trainer, "_compute_losses", 5, fail)
    message = error_of(train)
    for word in ("step 5", "batch_size", "accumulate", "step 3 is kept"):
        assert word in message


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("[enforce fail at inline_container.cc:672] unexpected pos 64 vs 0"),
        SafetensorError("Error while serializing: I/O error: File too large (os error 27)"),
    ],
    ids=["os", "torch", "safetensors"],
)
def test_full_disk_keeps_the_last_checkpoint(
    train: Train, error: Exception, uninterrupted: Path, tmp_path: Path
) -> None:
    """No partial checkpoint is left, and the training can be resumed."""
    out = tmp_path / "out"

    def fail(accelerator: Accelerator, path: str) -> None:
        write_half(accelerator, path)
        raise error

    with pytest.MonkeyPatch.context() as patch:
        replace_call(patch, Accelerator, "save_state", 3, fail)
        message = error_of(lambda: train(**VALIDATED))
    assert "step 9 could not be written" in message
    assert "the checkpoint of step 6 is kept" in message
    assert checkpoints(out) == ["step-3", "step-6"]
    train(resume=True, **VALIDATED)
    assert same_weights(read_weights(out), read_weights(uninterrupted))


# -- DeepSpeed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [0.25, None], ids=["float", "none"])
def test_norm_of_the_gradient_may_be_a_number_or_missing(
    train: Train, norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As DeepSpeed returns it."""
    monkeypatch.setattr(Accelerator, "clip_grad_norm_", lambda *_: norm)
    out = train(max_steps=2)
    assert [line["gradient_norm"] for line in read_metrics(out)] == [norm] * 2


def test_deepspeed_takes_its_settings_from_the_options(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = SimpleNamespace(deepspeed_config={"gradient_clipping": 0.5}, enable_msamp=False)
    monkeypatch.setattr(AcceleratorState, "deepspeed_plugin", plugin)
    train(max_steps=1, accumulate=3, clip=0.25)
    assert plugin.deepspeed_config == {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.25,
    }


# -- batches of tokens -----------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [False, True], ids=["chats", "features"])
def test_batches_never_exceed_the_budget_of_tokens(
    train: Train,
    stored: bool,
    target: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And every epoch has the same number of batches, which hold every chat once."""
    seen: list[tuple[int, int, int, list[int]]] = []
    original = Trainer._compute_losses

    def record(trainer: Trainer, epoch: int, batch: Batch) -> Any:
        seen.append((epoch, *batch.ids.shape, batch.indices))
        return original(trainer, epoch, batch)

    monkeypatch.setattr(Trainer, "_compute_losses", record)
    source: dict[str, Any] = {}
    if stored:
        features = tmp_path / "features"
        request = FeaturesRequest(data=data, out=features, target=target, max_length=128)
        store_features(request)
        source["features"] = features
    train(**TOKENS, **source, max_steps=None, epochs=3)
    assert all(rows * width <= 200 for _, rows, width, _ in seen)
    assert max(rows for _, rows, _, _ in seen) > 2  # batch_size does not limit it
    for epoch in range(3):
        batches = [indices for number, _, _, indices in seen if number == epoch]
        assert sorted(index for batch in batches for index in batch) == list(range(10))
        assert len(batches) == len(seen) // 3


def test_budget_below_the_longest_chat_is_rejected(train: Train, tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match=r"at least max_length \(128\); got 100"):
        train(tokens_per_batch=100, max_length=128)
    assert not (tmp_path / "out").exists()


# -- equivalent trainings --------------------------------------------------------------------------


@pytest.mark.parametrize("count", [4, 3], ids=["full", "not-full"])
def test_accumulated_batches_equal_one_large_batch(
    train: Train, count: int, tmp_path: Path
) -> None:
    """All chats in every step, of different lengths: means are over positions, not over batches."""
    data = write_chats(tmp_path / "chats.jsonl", count)
    settings = {"max_length": 256, "max_steps": 6}
    whole = train("whole", data=data, batch_size=4, **settings)
    parts = train("parts", data=data, accumulate=2, **settings)
    assert read_losses(parts).tolist() == pytest.approx(read_losses(whole).tolist(), rel=1e-4)
    for name, tensor in read_weights(whole).items():
        torch.testing.assert_close(read_weights(parts)[name], tensor, rtol=1e-3, atol=1e-5)


def test_worker_processes_do_not_change_the_weights(train: Train, uninterrupted: Path) -> None:
    """Nor does ``resume`` where there is no training yet."""
    out = train(workers=2, resume=True, **VALIDATED)
    assert same_weights(read_weights(out), read_weights(uninterrupted))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs a C++ compiler")
@HEADS
def test_compiled_layers_train_and_validate(train: Train, options: dict[str, Any]) -> None:
    """Validation decodes with the same layers, uncompiled."""
    options = {**options, "validation": 2, "validate_every": 3}
    plain = train("plain", **options)
    out = train(compile=True, **options)
    assert read_losses(out) == pytest.approx(read_losses(plain), rel=1e-3)
    assert read_metrics(out, "validation")[0]["tau"] >= 1.0
