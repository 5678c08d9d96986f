"""The recipe: published defaults, one set of names and bounds for files and the command line."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from trainings import command

from eagle_fsd.train.config import DIVERGENCE_LOSSES, TrainRecipe, read_recipe


def test_defaults_are_eagles() -> None:
    """Of arXiv 2401.15077 and of the authors' training script."""
    recipe = TrainRecipe()
    assert recipe.learning_rate(4096) == 3e-5
    assert (recipe.beta1, recipe.beta2) == (0.9, 0.95)
    assert (recipe.clip, recipe.noise, recipe.warmup) == (0.5, 0.1, 2000)
    weights = recipe.losses()
    assert (weights.feature, weights.token) == (1.0, 0.1)
    assert recipe.max_length == 2048


def test_the_learning_rate_falls_with_the_width() -> None:
    recipe = TrainRecipe()
    assert recipe.learning_rate(8192) == pytest.approx(1.5e-5)
    assert recipe.learning_rate(128) == pytest.approx(3e-5 * 32)
    for size in (128, 4096, 8192):
        assert TrainRecipe(lr=2e-4).learning_rate(size) == 2e-4


@given(st.integers(1, 3000), st.integers(0, 5000))
def test_the_rate_goes_up_and_then_down(total: int, warmup: int) -> None:
    """Linearly, never to zero before the end, with its peak at the warm-up's end."""
    recipe = TrainRecipe(warmup=warmup)
    factors = [recipe.factor(step, total) for step in range(total)]
    up = min(warmup, total // 10)
    assert all(0 < factor <= 1 for factor in factors)
    assert factors[: up + 1] == sorted(factors[: up + 1])
    assert factors[up:] == sorted(factors[up:], reverse=True)
    assert factors[up] == max(factors) == 1.0
    assert recipe.factor(total, total) == 0.0
    for part in (factors[:up], factors[up:]):
        steps = [after - before for before, after in pairwise(part)]
        assert max(steps, default=0) - min(steps, default=0) < 1e-9


@pytest.mark.parametrize(
    ("name", "value", "bounds"),
    [
        ("epochs", 0, "between 1 and 10000"),
        ("epochs", 2.5, "a whole number"),
        ("max_steps", 0, "at least 1"),
        ("max_steps", 1.5, "a whole number"),
        ("batch_size", 0, "between 1 and 4096"),
        ("max_length", 7, "at least|between 8"),
        ("lr", -1e-3, "between 0 and 1"),
        ("lr", float("nan"), "between 0 and 1"),
        ("beta2", 1.0, "between 0"),
        ("noise", -0.1, "between 0 and 10"),
        ("unroll", 9, "between 1 and 8"),
        ("unroll_decay", 1.1, "between 0 and 1"),
        ("divergence_loss", "hellinger", ", ".join(DIVERGENCE_LOSSES)),
        ("seed", -1, "between 0"),
        ("validation", -1, "between 0"),
        ("workers", 257, "between 0 and 256"),
    ],
)
def test_bounds_are_stated(name: str, value: Any, bounds: str) -> None:
    with pytest.raises(ValueError, match=bounds) as caught:
        TrainRecipe(**{name: value})
    assert str(caught.value).startswith(f"{name} must be")


@pytest.mark.parametrize(
    ("name", "value"), [("bias", 1), ("compile", "yes"), ("lr", "fast"), ("epochs", True)]
)
def test_types_are_checked(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be"):
        TrainRecipe(**{name: value})


# -- files -----------------------------------------------------------------------------------------


def test_a_file_gives_what_it_names_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("# mine\nlr: 0.001\nunroll: 3\ndivergence_loss: tv\nbias: true\n")
    assert read_recipe(path) == {"lr": 1e-3, "unroll": 3, "divergence_loss": "tv", "bias": True}
    path.write_text("")
    assert read_recipe(path) == {}


def test_every_value_can_be_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    recipe = TrainRecipe(lr=1e-4, max_steps=7, bias=True)
    path.write_text(yaml.safe_dump(recipe.as_dict()))
    assert TrainRecipe.from_dict(read_recipe(path)) == recipe


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epoch: 3\nlearning_rate: 1", ("epoch", "learning_rate", "epochs")),
        ("epochs: 0", ("epochs", "between 1 and 10000")),
        ("lr: fast", ("lr", "a number")),
        ("- epochs", ("mapping",)),
        ("epochs", ("mapping",)),
        ("epochs: [1", ("recipe.yaml",)),
        ("epochs: !!python/object:os.system x", ("recipe.yaml",)),
    ],
)
def test_what_is_wrong_in_a_file_is_named_in_one_line(
    text: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        read_recipe(path)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


# -- the command line ------------------------------------------------------------------------------


def test_every_value_has_an_option_with_help(run) -> None:
    status, out, _ = run("train", "--help")
    assert status == 0
    for item in fields(TrainRecipe):
        assert "--" + item.name.replace("_", "-") in out
        assert item.metadata["help"].split(" (")[0].lower()[:20] in out.lower()


def test_the_command_line_stands_above_the_file(
    run, target: Path, data: Path, tmp_path: Path
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("seed: 5\nnoise: 0.5\nmax_steps: 9\nbias: true\n")
    out = tmp_path / "out"
    arguments = command(data, out, target, "--config", str(path), "--no-bias", max_steps=2)
    status, _, errors = run(*arguments)
    assert status == 0, errors
    kept = json.loads((out / "recipe.json").read_text())["recipe"]
    assert (kept["seed"], kept["noise"], kept["max_steps"], kept["bias"]) == (5, 0.5, 2, False)
    assert TrainRecipe.from_dict(kept).as_dict() == kept
    record = json.loads((out / "training.json").read_text())
    assert record["settings"] == kept


def test_an_unknown_name_in_the_file_ends_in_one_line(
    run, target: Path, data: Path, tmp_path: Path
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("learning_rate: 0.1\n")
    out = tmp_path / "out"
    status, _, errors = run(*command(data, out, target, "--config", str(path)))
    assert status in (1, 2)
    assert errors.count("\n") == 1
    assert "learning_rate" in errors
    assert not out.exists()
