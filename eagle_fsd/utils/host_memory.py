"""The memory of the machine, or of the container that limits it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import psutil

#: Where version 2 of Linux's control groups shows a container its own limit.
CONTROL_GROUP = Path("/sys/fs/cgroup")


class HostMemory(NamedTuple):
    """Bytes of main memory."""

    total: int
    available: int


def host_memory() -> HostMemory:
    """Return the memory that programs may use here, which a container may limit."""
    machine = psutil.virtual_memory()
    try:
        limit, used = (
            int((CONTROL_GROUP / name).read_text()) for name in ("memory.max", "memory.current")
        )
        lines = (CONTROL_GROUP / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):  # there are no groups, or the limit is "max"
        return HostMemory(machine.total, machine.available)
    cached = int(dict(map(str.split, lines)).get("inactive_file", 0))  # freed when it is needed
    available = max(0, min(machine.available, limit - used + cached))
    return HostMemory(min(machine.total, limit), available)
