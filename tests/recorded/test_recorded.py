"""The package behaves as it did when the files beside this module were recorded."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from behavior import AREAS, HERE


def differences(recorded: Any, found: Any, where: str = "") -> list[str]:
    """Where two JSON values differ; fractions may differ as rounding of float32 does."""
    if isinstance(recorded, float) and isinstance(found, (int, float)):
        same = math.isclose(recorded, found, rel_tol=1e-5, abs_tol=2e-5)
        return [] if same else [f"{where}: {recorded} became {found}"]
    if isinstance(recorded, dict) and isinstance(found, dict):
        changed = [f"{where}.{key}: only one side" for key in recorded.keys() ^ found.keys()]
        for key in recorded.keys() & found.keys():
            changed += differences(recorded[key], found[key], f"{where}.{key}")
        return sorted(changed)
    if isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        pairs = enumerate(zip(recorded, found, strict=True))
        return [item for at, pair in pairs for item in differences(*pair, f"{where}[{at}]")]
    return [] if recorded == found else [f"{where}: {recorded!r} became {found!r}"]


@pytest.mark.parametrize(
    "area",
    [pytest.param(area, marks=[] if area == "decoding" else [pytest.mark.slow]) for area in AREAS],
)
def test_behavior_is_unchanged(area: str) -> None:
    recorded = json.loads((HERE / f"{area}.json").read_text())
    found = json.loads(json.dumps(AREAS[area]()))
    changes = differences(recorded, found)
    assert not changes, "\n".join(changes[:20])


def test_a_changed_token_is_a_difference() -> None:
    recorded = json.loads((HERE / "decoding.json").read_text())
    changed = json.loads((HERE / "decoding.json").read_text())
    changed["exact"][0]["tokens"][0][3] += 1
    changed["plain"][0]["tau"] += 0.01
    assert len(differences(recorded, changed)) == 2
