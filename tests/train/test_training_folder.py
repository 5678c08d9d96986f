"""Tests for the folder of a training: what can be resumed and overwritten, and what never is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from trainings import Train, command, read_weights, same_weights, train_here

from eagle_fsd.train.config import TrainConfig
from eagle_fsd.train.training_folder import TrainingFolder

#: Keys of recipe.json.
RECIPE_KEYS = """
head_type draft_vocab_size fc_norm norm_output norm_before_residual
epochs max_steps batch_size tokens_per_batch accumulate max_length lr warmup weight_decay
beta1 beta2 clip noise feature_weight token_weight divergence_weight divergence_loss unroll
unroll_decay bias seed
validation validate_every checkpoint_every log_every workers compile
"""


def test_existing_training_needs_resume_or_overwrite(
    refused: Any, succeed: Any, train: Train, target: Path, data: Path
) -> None:
    out = train(max_steps=2)
    before = read_weights(out)
    errors = refused(*command(data, out, target, seed=3, max_steps=2))
    assert "--resume" in errors
    assert "--overwrite" in errors
    assert same_weights(read_weights(out), before)
    printed, _ = succeed(*command(data, out, target, "--overwrite", seed=3, max_steps=2))
    assert str(out) in printed
    assert not same_weights(read_weights(out), before)


def test_training_is_not_resumed_with_other_options_or_data(
    train: Train, target: Path, data: Path, tmp_path: Path
) -> None:
    """Options that do not affect the steps may change."""
    out = train(max_steps=4)
    before = read_weights(out)
    with pytest.raises(ValueError, match=r"cannot be resumed: .*epochs was 20, is 3; lr was 0.001"):
        train(max_steps=4, resume=True, lr=0.5, epochs=3)
    shorter = tmp_path / "chats.jsonl"
    shorter.write_text("".join(data.read_text().splitlines(keepends=True)[:5]))
    with pytest.raises(ValueError, match=r"cannot be resumed: .*bytes was"):
        train_here(shorter, out, target, max_steps=4, resume=True)
    assert same_weights(read_weights(out), before)
    shutil.rmtree(out / "checkpoints" / "step-4")
    changes = {"checkpoint_every": 1, "log_every": 2, "workers": 1, "validate_every": 7}
    train(max_steps=4, resume=True, **changes)
    assert same_weights(read_weights(out), before)


def test_other_files_are_never_touched(tmp_path: Path) -> None:
    for kind in ("folder", "file"):
        out = tmp_path / kind
        file = out / "thesis.txt" if kind == "folder" else out
        file.parent.mkdir(exist_ok=True)
        file.write_text("ten years of work")
        for option in ("resume", "overwrite"):
            with pytest.raises(ValueError, match="holds no training; choose another folder"):
                TrainingFolder(out).prepare(TrainConfig(), {}, **{option: True})
            assert file.read_text() == "ten years of work"
    (tmp_path / "empty").mkdir()
    TrainingFolder(tmp_path / "empty").prepare(TrainConfig(), {"data": "x"})
    content = json.loads((tmp_path / "empty" / "recipe.json").read_text())
    assert content["data"] == {"data": "x"}


def test_recipe_file_keeps_its_format(train: Train, target: Path, data: Path) -> None:
    out = train(max_steps=2)
    content = json.loads((out / "recipe.json").read_text())
    assert list(content) == ["recipe", "data"]
    assert list(content["recipe"]) == RECIPE_KEYS.split()
    assert content["data"] == {
        "data": str(data),
        "bytes": data.stat().st_size,
        "target": str(target),
        "template": None,
        "max_length": 64,
        "head": None,
    }
