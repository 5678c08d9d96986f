"""Write and read ``training.json``, the record of a training up to its newest checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eagle_fsd.utils.files import atomic_write
from eagle_fsd.utils.provenance import describe_environment

RECORD_FILE = "training.json"


def write_record(
    folder: Path,
    settings: dict[str, Any],
    steps: int,
    tokens: int,
    seconds: float,
    data: dict[str, Any] | None = None,
) -> None:
    """Write a training's settings, steps, tokens, seconds, machine and versions.

    ``data`` holds counts of the chats that were read.
    """
    environment = describe_environment()
    machine = environment["machine"]
    cpu, threads = machine["cpu"], machine["threads"]
    plural = "" if threads == 1 else "s"
    record = {
        "settings": settings,
        "steps": steps,
        "tokens": tokens,
        "seconds": round(seconds),
        **({} if data is None else {"data": data}),
        "machine": machine.get("gpu") or f"{cpu}, {threads} thread{plural}",
        "date": environment["date"][:10],
        "versions": environment["versions"],
    }
    atomic_write(folder / RECORD_FILE, json.dumps(record, indent=2) + "\n")


def read_record(folder: Path) -> dict[str, Any]:
    """Read the record of a training."""
    record: dict[str, Any] = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
    return record
