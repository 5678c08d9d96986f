"""Measure peak memory."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
#: Writing "5" to this file resets the peak that Linux records for the process, see proc(5).
_CLEAR_REFS = Path("/proc/self/clear_refs")
#: Maximum difference in bytes between the peak and the memory in use right after a reset.
_MAX_EXCESS = 64 * 2**20


class PeakMemory:
    """Peak memory since :meth:`start`: allocated on a CUDA device, else resident in this process.

    Resident memory is measured on Linux only.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_reset = False

    def start(self) -> None:
        """Reset the peak."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        with contextlib.suppress(OSError):
            _CLEAR_REFS.write_text("5")
        # Some sandboxes accept the write and ignore it.
        peak, now = _process_memory("VmHWM"), _process_memory("VmRSS")
        self._is_reset = peak is not None and now is not None and peak - now < _MAX_EXCESS

    def read(self) -> int | None:
        """Return the peak in bytes, or None if the system cannot reset or report it."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return _process_memory("VmHWM") if self._is_reset else None


def _process_memory(name: str) -> int | None:
    """Return a field of ``/proc/self/status`` in bytes, or None if it is not reported."""
    with contextlib.suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None
