"""The most memory that was in use between two moments."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
#: Writing "5" resets the peak that the kernel keeps of this process (Linux, proc(5)).
_CLEAR = Path("/proc/self/clear_refs")


class PeakMemory:
    """Peak memory since :meth:`start`: allocated on a GPU, else of this whole process.

    A process' own peak can be reset on Linux alone; elsewhere nothing is known.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.known = False

    def start(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        with contextlib.suppress(OSError):
            _CLEAR.write_text("5")
            self.known = True

    def read(self) -> int | None:
        """Bytes; None where the system does not tell."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        if not self.known:
            return None
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return None
