"""A tiny target and a few chats that all training tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trainings import Train, train_here, write_chats, write_target


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten chats: five batches of two, or three batches of four of which the last is not full."""
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl")


@pytest.fixture
def train(target: Path, data: Path, tmp_path: Path) -> Train:
    """Train a head in a folder of the test, on the target and the chats unless others are given."""

    def call(name: str = "out", **options: Any) -> Path:
        given = {"data": data, "target": target, **options}
        return train_here(given.pop("data"), tmp_path / name, given.pop("target"), **given)

    return call


@pytest.fixture
def succeed(run: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[str, str]]:
    """Call ``eagle-fsd``, which must succeed; returns standard output and standard error."""

    def call(*arguments: object) -> tuple[str, str]:
        status, printed, errors = run(*arguments)
        assert status == 0, errors
        return printed, errors

    return call


@pytest.fixture
def refused(run: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """Call ``eagle-fsd``, which must fail with a single line; returns it."""

    def call(*arguments: object, status: int = 1) -> str:
        found, _, errors = run(*arguments)
        assert found == status, errors
        assert errors.startswith("error: ")
        assert errors.count("\n") == 1
        return errors

    return call


@pytest.fixture(autouse=True)
def fast_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip plots and shorten validation, except in the trainings of fixtures of a larger scope."""
    monkeypatch.setattr("eagle_fsd.train.run.draw_curves", lambda *_: None)
    monkeypatch.setattr("eagle_fsd.train.validation.MAX_NEW_TOKENS", 8)
