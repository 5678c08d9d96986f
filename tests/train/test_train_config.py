"""Tests for the options of training, YAML files, the command line, and what may be resumed."""

from __future__ import annotations

import json
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from trainings import Train, command, read_metrics, read_weights, same_weights, train_here

from eagle_fsd import OptionsError
from eagle_fsd.train.config import DivergenceLoss, TrainConfig, TrainRequest, read_config


def test_defaults_are_those_of_eagle() -> None:
    """Defaults follow arXiv 2401.15077 and the authors' script; wider heads learn more slowly."""
    config = TrainConfig()
    for size, rate in ((4096, 3e-5), (8192, 1.5e-5), (128, 3e-5 * 32)):
        assert config.learning_rate(size) == pytest.approx(rate)
        assert TrainConfig(lr=2e-4).learning_rate(size) == 2e-4
    for tokens, epochs in ((0, 20), (600_000, 20), (1_000_000, 12), (10**9, 4)):
        assert config.count_epochs(tokens) == epochs
    assert TrainConfig(epochs=3).count_epochs(1000) == 3


@given(st.integers(1, 300), st.integers(0, 500))
def test_learning_rate_warms_up_and_decays_linearly(total: int, warmup: int) -> None:
    config = TrainConfig(warmup=warmup)
    factors = [config.learning_rate_factor(step, total) for step in range(total)]
    peak = min(warmup, total // 10)
    assert all(0 < factor <= 1 for factor in factors)
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert factors[peak] == max(factors) == 1.0
    assert config.learning_rate_factor(total, total) == 0.0
    for part in (factors[:peak], factors[peak:]):
        steps = [after - before for before, after in pairwise(part)]
        assert max(steps, default=0) - min(steps, default=0) < 1e-9


def test_invalid_values_are_reported_with_what_is_accepted(tmp_path: Path) -> None:
    kinds = ", ".join(get_args(DivergenceLoss))
    with pytest.raises(OptionsError, match=f"^divergence_loss must be .*{kinds}.*; got "):
        TrainConfig.from_dict({"divergence_loss": "hellinger"})
    for sources in ({}, {"data": tmp_path, "features": tmp_path}):
        with pytest.raises(ValueError, match="either --data or --features"):
            TrainRequest(out=tmp_path, **sources)
    with pytest.raises(ValueError, match="--regenerate requires --data"):
        TrainRequest(out=tmp_path, features=tmp_path, regenerate=True)
    with pytest.raises(ValueError, match="--resume and --overwrite exclude each other"):
        TrainRequest(out=tmp_path, data=tmp_path, resume=True, overwrite=True)
    with pytest.raises(ValueError, match="--data must not be in --out, or it would be deleted"):
        TrainRequest(out=tmp_path, data=tmp_path, overwrite=True)
    with pytest.raises(ValueError, match="data must be an existing path; got missing"):
        TrainRequest(out=tmp_path, data="missing")


# -- YAML files ------------------------------------------------------------------------------------


def test_files_set_options(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("# mine\nlr: 1e-3\nunroll: 3\ndivergence_loss: tv\nbias: true\n")
    assert read_config(path) == {"lr": 1e-3, "unroll": 3, "divergence_loss": "tv", "bias": True}
    path.write_text("clip: 1.5e1\nnoise: 2.e0")
    assert read_config(path) == {"clip": 15.0, "noise": 2.0}
    path.write_text("")
    assert read_config(path) == {}
    config = TrainConfig(lr=1e-4, max_steps=7, bias=True)
    path.write_text(yaml.safe_dump(config.model_dump()))
    assert TrainConfig.from_dict(read_config(path)) == config


def test_invalid_files_are_reported_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for text, message in (
        ("learning_rate: 1", "unknown option learning_rate; the options are .*epochs"),
        ("epochs: 0", r"epochs must be an integer in \[1, 10000\]; got 0"),
        ("- epochs", "mapping"),
        ("[]", "mapping"),
        ("1: 2", "unknown option 1; the options are .*epochs"),
        ("epochs: [1", ""),
        ("epochs: !!python/object:os.system x", ""),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: .*{message}") as caught:
            read_config(path)
        assert "\n" not in str(caught.value)


# -- the command line ------------------------------------------------------------------------------


def test_command_line_overrides_the_file(
    succeed: Any, refused: Any, target: Path, data: Path, tmp_path: Path
) -> None:
    path, out = tmp_path / "config.yaml", tmp_path / "out"
    path.write_text("learning_rate: 0.1\n")
    arguments = command(data, out, target, "--config", str(path), "--no-bias", max_steps=2)
    assert "learning_rate" in refused(*arguments)
    assert not out.exists()
    path.write_text("seed: 5\nnoise: 0.5\nmax_steps: 9\nbias: true\n")
    succeed(*arguments)
    saved = json.loads((out / "recipe.json").read_text())["recipe"]
    assert (saved["seed"], saved["noise"], saved["max_steps"], saved["bias"]) == (5, 0.5, 2, False)
    assert TrainConfig.from_dict(saved).model_dump() == saved
    assert json.loads((out / "training.json").read_text())["settings"] == saved
    # Combinations are checked after merging.
    flags = ("--head-type", "eagle3", "--fc-norm")
    for text, more in (("head_type: eagle3", flags[2:]), ("fc_norm: true", flags[:2])):
        path.write_text(text)
        words = ("--config", str(path), "--overwrite", *more)
        succeed(*command(data, out, target, *words, max_steps=1))
        saved = json.loads((out / "recipe.json").read_text())["recipe"]
        assert (saved["head_type"], saved["fc_norm"], saved["unroll"]) == ("eagle3", True, 7)
    assert "fc_norm requires head_type eagle3" in refused(*arguments, "--overwrite", status=2)


def test_updates_leave_other_options_unset() -> None:
    """Unset options follow the type of the head, also of a copy."""
    for config in (TrainConfig(lr=1e-3), TrainConfig().updated(lr=1e-3)):
        changed = config.updated(head_type="eagle3")
        assert (changed.lr, changed.feature_weight, changed.unroll) == (1e-3, 0.0, 7)
        assert config.model_fields_set == {"lr"}


def test_training_is_not_resumed_with_other_options_or_data(
    train: Train, target: Path, data: Path, tmp_path: Path
) -> None:
    """Options that do not affect the steps may change."""
    out = train(max_steps=4)
    before = read_weights(out)
    with pytest.raises(ValueError, match=r"cannot be resumed: .*epochs was 20, is 3; lr was 0.001"):
        train(max_steps=4, resume=True, lr=0.5, epochs=3)
    with pytest.raises(ValueError, match="cannot be resumed: dtype was 'float32', is 'bfloat16'"):
        train(max_steps=4, resume=True, dtype="bfloat16")
    shorter = tmp_path / "chats.jsonl"
    shorter.write_text("".join(data.read_text().splitlines(keepends=True)[:5]))
    with pytest.raises(ValueError, match=r"cannot be resumed: .*bytes was"):
        train_here(shorter, out, target, max_steps=4, resume=True)
    file = out / "recipe.json"
    file.write_text(file.read_text().replace('"processes": 1', '"processes": 2'))
    with pytest.raises(ValueError, match="cannot be resumed: processes was 2, is 1"):
        train(max_steps=4, resume=True)
    assert same_weights(read_weights(out), before)
    shutil.rmtree(out / "checkpoints" / "step-4")
    recipe = json.loads(file.read_text())  # as earlier versions wrote it
    del recipe["recipe"]["norm_before_residual"]
    del recipe["data"]["dtype"], recipe["data"]["processes"]
    file.write_text(json.dumps(recipe))
    changes = {"checkpoint_every": 1, "log_every": 2, "workers": 1, "validate_every": 7}
    train(max_steps=4, resume=True, **changes)
    assert same_weights(read_weights(out), before)


def test_resumed_training_may_have_another_limit(train: Train) -> None:
    """One that is exceeded already ends it at its checkpoint, and a larger one extends it."""
    options = {"validation": 1, "warmup": 0, "lr": 1e-3}
    out = train(max_steps=5, **options)
    shutil.rmtree(out / "checkpoints" / "step-5")
    train(max_steps=2, resume=True, **options)
    assert json.loads((out / "training.json").read_text())["steps"] == 3
    assert "tau" in (out / "README.md").read_text()
    (validation,) = read_metrics(out, "validation")
    assert validation["step"] == 3
    before = read_weights(out)
    train(max_steps=8, resume=True, **options)
    assert not same_weights(read_weights(out), before)
    rates = [line["lr"] / 1e-3 for line in read_metrics(out)]
    assert rates == pytest.approx([1.0, 0.8, 0.6, *(5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8)])


def test_existing_folders_are_kept(
    refused: Any, train: Train, target: Path, data: Path, tmp_path: Path
) -> None:
    """A training needs ``resume`` or ``overwrite``, and other files are never touched."""
    out = train(max_steps=2)
    before = read_weights(out)
    content = json.loads((out / "recipe.json").read_text())
    assert list(content) == ["recipe", "data"]
    assert content["recipe"].keys() == TrainConfig.model_fields.keys()
    assert content["data"] == {
        "data": str(data),
        "bytes": data.stat().st_size,
        "target": str(target),
        "template": None,
        "max_length": 64,
        "dtype": "float32",
        "head": None,
        "processes": 1,
    }
    errors = refused(*command(data, out, target, seed=3, max_steps=2))
    assert "--resume" in errors
    assert "--overwrite" in errors
    with pytest.raises(ValueError, match="exists; add --resume or --overwrite"):
        train_here(data, out, target, regenerate=True)
    assert not out.with_name(f"{out.name}-regenerated.jsonl").exists()  # refused at once
    assert same_weights(read_weights(out), before)
    train(overwrite=True, seed=3, max_steps=2)
    assert not same_weights(read_weights(out), before)
    for file in (tmp_path / "folder" / "thesis.txt", tmp_path / "file"):
        file.parent.mkdir(exist_ok=True)
        file.write_text("ten years of work")
        for options in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(ValueError, match="holds no training; choose another folder"):
                train(file.relative_to(tmp_path).parts[0], **options)
            assert file.read_text() == "ten years of work"
