"""Published files that tests use where they are available.

Question sets are looked up in ``$EAGLE_FSD_DATA``, by default in the folder ``shared/data`` beside
the checkout; the published model in ``shared/models``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED = Path(__file__).parents[2] / "shared"
DATA = Path(os.environ.get("EAGLE_FSD_DATA", SHARED / "data"))
STORIES = SHARED / "models" / "stories260k"


def published(name: str) -> Path:
    """Return the path of a published file, or skip the test where there is none."""
    if not (DATA / name).exists():
        pytest.skip(f"{name} is not in {DATA}: set EAGLE_FSD_DATA to the folder that holds it")
    return DATA / name
