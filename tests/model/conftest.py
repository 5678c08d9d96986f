"""Tests of decoding look up names that are not folders in the local cache of the Hub only."""

from __future__ import annotations

import huggingface_hub.constants
import pytest


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connect to nothing."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
