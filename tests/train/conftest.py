"""A tiny target and a few chats that every training test may read."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainings import write_chats, write_target


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten chats: five batches of two an epoch, and the last of three batches of four not full."""
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl")
