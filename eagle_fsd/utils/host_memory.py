"""The memory of the machine, or of the container or job that limits it."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path
from typing import NamedTuple

import psutil

#: Where Linux shows the limits of control groups, and which of them are this process's.
CONTROL_GROUP, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
#: Controllers with files for the limit, the use and its parts, and the key of the file cache:
#: versions 2 and 1.
FILES = (
    ("", "memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "memory.stat",
        "total_inactive_file",
    ),
)


class HostMemory(NamedTuple):
    """Bytes of main memory."""

    total: int
    available: int


def host_memory() -> HostMemory:
    """Return the memory that programs may use here, which control groups may limit."""
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    for controller, *names, key in FILES:
        for group in _control_groups(controller):
            folder = CONTROL_GROUP / controller / group
            try:
                limit, used, parts = ((folder / name).read_text() for name in names)
                free = int(limit) - int(used)
            except (OSError, ValueError):  # another version or no such folder, or "max"
                continue
            cached = int(dict(map(str.split, parts.splitlines())).get(key, 0))  # freed if needed
            total, available = min(total, int(limit)), min(available, max(0, free + cached))
    return HostMemory(total, available)


def trim_heap() -> None:
    """Return freed memory to the system, where the C library is glibc.

    glibc keeps what lies between blocks that are in use, which is much where sizes vary.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _control_groups(controller: str) -> list[Path]:
    """Return this process's control group and those around it, as relative paths."""
    with contextlib.suppress(OSError):
        for line in OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                own = Path(path.lstrip("/"))
                return [own, *own.parents]
    return [Path()]
