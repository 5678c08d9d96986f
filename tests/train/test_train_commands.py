"""``eagle-fsd train features``, ``regenerate`` and ``export``, and a training that begins with a
head."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from trainings import (
    command,
    losses,
    metrics,
    same_weights,
    train_here,
    weights,
)

from eagle_fsd.train.chats import ChatFile


def test_features_tell_their_size_first_and_can_be_trained_from(
    run, target: Path, data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "features"
    store = ("train", "features", "--data", data, "--out", folder, "--target", target)
    status, out, errors = run(*store, "--max-length", 64)
    assert status == 0, errors
    assert "10 chats are in" in out
    told = re.search(r"about ([\d.]+) (B|KB) for 10 chats; .* are free", errors)
    assert told is not None
    size = float(told[1]) * {"B": 1, "KB": 1000}[told[2]]
    assert size == pytest.approx((folder / "features-00000.safetensors").stat().st_size, rel=0.05)
    arguments = command(data, tmp_path / "out", target)
    at = arguments.index("--data")
    status, _, errors = run(*arguments[:at], "--features", folder, *arguments[at + 2 :])
    assert status == 0, errors
    assert len(losses(tmp_path / "out")) == 12
    status, _, errors = run(*store, "--max-length", 32)
    assert status == 1
    assert errors.splitlines()[-1].startswith("error: ")
    assert "max_length 64 there, 32 here" in errors


def test_features_that_do_not_fit_on_the_disk_are_refused(
    run, target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    folder = tmp_path / "features"
    status, _, errors = run(
        "train", "features", "--data", data, "--out", folder, "--target", target
    )
    assert status == 1
    assert "has 10.0 B free, and about" in errors.splitlines()[-1]
    assert not any(folder.iterdir())


def test_rewritten_chats_can_be_trained_on(run, data: Path, tmp_path: Path) -> None:
    """With the bundled target, which has something to say."""
    out = tmp_path / "chats.jsonl"
    rewrite = ("train", "regenerate", "--data", data, "--out", out, "--max-new-tokens", 8)
    status, _, errors = run(*rewrite)
    assert status == 0, errors
    assert "10 rewritten chats are in" in errors
    text = out.read_text()
    assert len(ChatFile(out)) == 10
    assert run(*rewrite)[0] == 0
    assert out.read_text() == text  # it was complete


def test_regenerate_comes_before_the_training(
    run, target: Path, data: Path, tmp_path: Path
) -> None:
    """Beside the folder, so that it can be looked at, and gone on with."""
    out = tmp_path / "out"
    arguments = command(data, out, target, "--regenerate", max_steps=2)
    status, _, errors = run(*arguments)
    rewritten = tmp_path / "out-regenerated.jsonl"
    assert status == 0, errors
    assert len(rewritten.read_text().splitlines()) == 10
    assert json.loads((out / "recipe.json").read_text())["data"]["data"] == str(rewritten)
    assert len(losses(out)) == 2


@pytest.mark.parametrize("kind", ["eagle", "sglang", "vllm"])
def test_a_head_is_exported(run, kind: str, target: Path, data: Path, tmp_path: Path) -> None:
    head = train_here(data, tmp_path / "head", target, max_steps=1)
    out = tmp_path / "out"
    export = ("train", "export", "--head", head, "--out", out, "--target", target)
    status, printed, errors = run(*export, "--format", kind)
    assert status == 0, errors
    assert f"as {kind} reads it" in printed
    assert {path.name for path in out.iterdir()} in (
        {"config.json", "model.safetensors"},
        {"config.json", "pytorch_model.bin"},
    )
    status, _, errors = run(*export, "--format", kind)
    assert status == 1
    assert errors.count("\n") == 1
    status, _, errors = run(*export, "--format", "tensorrt")
    assert status == 2
    assert "eagle, sglang, vllm" in errors


def test_a_training_begins_with_a_head(run, target: Path, data: Path, tmp_path: Path) -> None:
    """With all of its numbers: its first loss is better than a fresh one's."""
    first = train_here(data, tmp_path / "first", target, noise=0.0, epochs=100, max_steps=40)
    status, _, errors = run(
        *command(data, tmp_path / "second", target, "--head", str(first), noise=0.0)
    )
    assert status == 0, errors
    fresh = train_here(data, tmp_path / "fresh", target, noise=0.0)
    assert metrics(tmp_path / "second")[0]["loss"] < 0.95 * metrics(fresh)[0]["loss"]
    status, _, errors = run(*command(data, tmp_path / "second", target, "--resume", noise=0.0))
    assert status == 1
    assert "head was" in errors


def test_a_rate_of_nothing_keeps_the_head_it_began_with(
    target: Path, data: Path, tmp_path: Path
) -> None:
    first = train_here(data, tmp_path / "first", target, bias=True)
    second = train_here(data, tmp_path / "second", target, head=first, lr=0.0, weight_decay=0.0)
    assert same_weights(weights(second), weights(first))
    assert "fc.bias" in weights(second)
    assert torch.isfinite(losses(second)).all()


def test_a_head_of_another_target_is_refused(run, target: Path, data: Path, tmp_path: Path) -> None:
    from eagle_fsd.bundled import BUNDLED_HEAD

    head = str(BUNDLED_HEAD)
    status, _, errors = run(*command(data, tmp_path / "out", target, "--head", head))
    assert status == 1
    assert errors.count("\n") == 1
    assert "belongs to another target" in errors
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())
