"""A tiny target and a few chats that all training tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainings import write_chats, write_target


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten chats: five batches of two, or three batches of four of which the last is not full."""
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl")


@pytest.fixture(autouse=True)
def fast_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the plots and shorten the decoding of validation, which take longer than the training.

    Fixtures of a larger scope are not affected: their trainings do both in full.
    """
    monkeypatch.setattr("eagle_fsd.train.run.draw_curves", lambda *_: None)
    monkeypatch.setattr("eagle_fsd.train.validation.MAX_NEW_TOKENS", 8)
