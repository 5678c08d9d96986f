"""Where things are, and who may know whom."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("model", "train", "evaluation", "chat")


@pytest.mark.parametrize("name", ["model", "train", "evaluation"])
def test_links_at_the_top(name: str) -> None:
    assert (ROOT / name).is_symlink()
    assert (ROOT / name).resolve() == ROOT / "eagle_fsd" / name


@pytest.mark.parametrize("part", PARTS)
def test_parts_know_the_model_alone(part: str) -> None:
    """``model`` knows nobody; the others know ``model``, and not each other or the command line."""
    foreign = {f"eagle_fsd.{name}" for name in (*PARTS, "cli")} - {f"eagle_fsd.{part}"}
    if part != "model":
        foreign.remove("eagle_fsd.model")
    files = sorted((ROOT / "eagle_fsd" / part).rglob("*.py"))
    assert files
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [item.name for item in node.names] if isinstance(node, ast.Import) else []
            known = {".".join(name.split(".")[:2]) for name in names}
            assert not known & foreign, (file, known & foreign)
