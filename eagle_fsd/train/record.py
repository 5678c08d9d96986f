"""What is kept of a finished training: settings, effort, machine, versions."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle_fsd.utils.provenance import describe_environment

RECORD_FILE = "training.json"


def write_record(folder: Path, recipe: Any, steps: int, tokens: int, seconds: float) -> None:
    """Write ``training.json``: the recipe (a dataclass), steps, tokens seen and seconds spent."""
    environment = describe_environment()
    machine = environment["machine"]
    record = {
        "settings": asdict(recipe),
        "steps": steps,
        "tokens": tokens,
        "seconds": round(seconds),
        "machine": machine.get("gpu") or f"{machine['threads']} threads of {machine['cpu']}",
        "date": environment["date"][:10],
        "versions": environment["versions"],
    }
    (folder / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n")
