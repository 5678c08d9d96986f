"""Measure a pair with ``eagle-fsd evaluate``, in a subprocess."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_fsd.utils.provenance import describe_environment

MAX_NEW_TOKENS = 256


def measure(
    target: str | Path,
    head: Path,
    count: int,
    methods: Sequence[str],
    *options: object,
    questions: str | Path = "bundled",
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> dict[str, dict[str, Any]]:
    """Answer questions greedily in float32, and return the report's row of each method.

    The questions are by default unseen problems; ``options`` are further options of ``eagle-fsd
    evaluate``.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "eagle_fsd.cli", "evaluate", str(questions), "--json"]
        arguments = {
            "--target": target,
            "--head": head,
            "--count": count,
            "--out": folder,
            "--dtype": "float32",
            "--batch": 1,  # larger batches may have trees of their own
            "--max-new-tokens": max_new_tokens,
        }
        for option, value in arguments.items():
            command += [option, str(value)]
        command += ["--method", *methods, *map(str, options)]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return {row["method"]: row for row in json.loads(output)["rows"]}


def describe_versions() -> str:
    """Return the date and the versions with which something is measured."""
    environment = describe_environment()
    versions = environment["versions"]
    return (
        f"on {environment['date'][:10]} with torch {versions['torch']}, transformers"
        f" {versions['transformers']}"
    )
