"""Where and with what a figure was measured; saved beside every result."""

from __future__ import annotations

import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("eagle-fsd", "torch", "transformers", "tokenizers", "accelerate", "numpy")


def describe_environment() -> dict[str, Any]:
    """Date (UTC), machine, package versions and, in a checkout, the git revision."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": _machine(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "revision": _revision(),
    }


def _machine() -> dict[str, Any]:
    machine: dict[str, Any] = {"cpu": _cpu_name(), "threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
        machine["cuda"] = torch.version.cuda
    return machine


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _revision() -> str | None:
    """The commit of the checkout this package lies in, ``-dirty`` where files were changed."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
