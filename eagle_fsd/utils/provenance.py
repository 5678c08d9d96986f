"""Describe the machine and the software versions that produced a result."""

from __future__ import annotations

import platform
import subprocess
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("eagle-fsd", "torch", "transformers", "tokenizers", "accelerate", "numpy")


def describe_environment() -> dict[str, Any]:
    """Describe the environment, to be saved with a result.

    The result has ``date`` (UTC, ISO 8601), ``machine`` (CPU, torch threads and GPU), ``python``,
    ``versions`` of :data:`PACKAGES` (None if not installed), and ``revision``: the Git revision of
    the checkout that contains this package, with ``-dirty`` appended if tracked files have changed;
    None outside a checkout.
    """
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": _machine(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "revision": _revision(),
    }


def _version(name: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _machine() -> dict[str, Any]:
    """Describe the CPU and, if there is one, the GPU."""
    machine: dict[str, Any] = {"cpu": _cpu_name(), "threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
        machine["cuda"] = torch.version.cuda
    return machine


def _cpu_name() -> str:
    """Return the CPU's model name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@cache
def _revision() -> str | None:
    """Return the Git revision of the checkout when first asked for; None if there is none."""
    try:
        # Fails where the package is installed inside another repository, such as in its .venv.
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        return _git("describe", "--always", "--dirty", "--abbrev=12")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    """Return the output of a Git command in this package's folder."""
    folder = Path(__file__).parent
    command = ["git", *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()
