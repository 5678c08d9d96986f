"""Targets with quantized weights, and what is reported where the package is missing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pairs import tiny_target

from eagle_fsd.model.loading import load_target

#: Where ``make slow`` installs torchao: transformers imports it wherever it finds it.
TORCHAO = Path(sys.prefix) / "torchao"


@pytest.mark.slow
@pytest.mark.skipif(not TORCHAO.exists(), reason="torchao is not installed")
def test_quantized_targets_decode_like_their_own_generate() -> None:
    """Run a file of tests, in a new process that can import torchao."""
    tests = Path(__file__).with_name("quantized_targets.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    environment = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    environment["PYTHONPATH"] = str(TORCHAO)
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    found = re.search(r"(\d+) passed", run.stdout)
    assert found is not None
    assert int(found[1]) >= 7


def test_types_that_cannot_be_used_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_target().save_pretrained(tmp_path)
    monkeypatch.setattr("eagle_fsd.model.loading.find_spec", lambda name: None)
    packages = {"int8": "torchao", "int4": "torchao", "fp8": "torchao", "nf4": "bitsandbytes"}
    for kind, package in packages.items():
        with pytest.raises(ValueError, match=f"^quantize={kind} requires {package}; install it"):
            load_target(tmp_path, quantize=kind)  # type: ignore[arg-type]
    unknown: Any = "int3"
    with pytest.raises(ValueError, match="must be one of int8, int4, fp8, nf4; got 'int3'"):
        load_target(tmp_path, quantize=unknown)
