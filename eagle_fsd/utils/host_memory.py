"""The memory of the machine, or of the container that limits it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import psutil

#: Where Linux shows a container the limits of its control group.
CONTROL_GROUP = Path("/sys/fs/cgroup")
#: Files with the limit, the use and its parts, and the key of the file cache: versions 2 and 1.
FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        *("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
        "total_inactive_file",
    ),
)


class HostMemory(NamedTuple):
    """Bytes of main memory."""

    total: int
    available: int


def host_memory() -> HostMemory:
    """Return the memory that programs may use here, which a container may limit."""
    machine = psutil.virtual_memory()
    for *names, key in FILES:
        try:
            limit, used, parts = ((CONTROL_GROUP / name).read_text() for name in names)
            free = int(limit) - int(used)
        except (OSError, ValueError):  # another version, or the limit is "max"
            continue
        cached = int(dict(map(str.split, parts.splitlines())).get(key, 0))  # freed if needed
        available = max(0, min(machine.available, free + cached))
        return HostMemory(min(machine.total, int(limit)), available)
    return HostMemory(machine.total, machine.available)
