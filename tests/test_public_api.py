"""``from eagle_fsd import ...``: the public names, imported when they are first used."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import eagle_fsd


def test_public_names_are_available() -> None:
    assert set(eagle_fsd.__all__) <= set(dir(eagle_fsd))
    for name in eagle_fsd.__all__:
        assert getattr(eagle_fsd, name).__name__ == name


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(eagle_fsd.__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {alias.asname: node.module for node in imports for alias in node.names if alias.asname}
    assert names == {name: f"eagle_fsd.{module}" for name, module in eagle_fsd._MODULES.items()}


def test_unknown_name_raises() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        eagle_fsd.nonsense  # noqa: B018
