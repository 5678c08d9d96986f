"""The most memory that was in use between two moments."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
#: Writing "5" resets the peak that the kernel keeps of this process (Linux, proc(5)).
_CLEAR = Path("/proc/self/clear_refs")
#: Bytes by which a peak may lie above what is in use just after it was reset.
_SLACK = 64 * 2**20


class PeakMemory:
    """Peak memory since :meth:`start`: allocated on a GPU, else of this whole process.

    A process' own peak can be reset on Linux alone; elsewhere nothing is known. No garbage is
    collected first: that takes a quarter of a second, and this is started for every answer.
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
        # Some sandboxes take the write and go on as before.
        peak, now = _of_process("VmHWM"), _of_process("VmRSS")
        self.known = peak is not None and now is not None and peak - now < _SLACK

    def read(self) -> int | None:
        """Bytes; None where the system does not tell."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return _of_process("VmHWM") if self.known else None


def _of_process(name: str) -> int | None:
    """Bytes that the kernel tells of this process by that name; None: it tells of none."""
    with contextlib.suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None
