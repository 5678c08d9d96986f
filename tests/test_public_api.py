"""``from eagle_fsd import ...``: the public names, imported when they are first used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import eagle_fsd


def test_public_names_are_available() -> None:
    assert set(eagle_fsd.__all__) <= set(dir(eagle_fsd))
    for name in eagle_fsd.__all__:
        assert getattr(eagle_fsd, name).__name__ == name


def test_unknown_name_raises() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        eagle_fsd.nonsense  # noqa: B018


def test_import_is_cheap() -> None:
    program = (
        "import sys, eagle_fsd; eagle_fsd.TreeConfig, eagle_fsd.SamplingConfig\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
