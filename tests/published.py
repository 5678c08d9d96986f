"""Published files that lie beside the checkout on some machines."""

from __future__ import annotations

from pathlib import Path

import pytest

DATA = Path(__file__).parents[2] / "shared" / "data"


def published(name: str) -> Path:
    """The file; where it is not there the test is skipped: none needs the network."""
    if not (DATA / name).exists():
        pytest.skip(f"{name} is not beside the project")
    return DATA / name
