"""The memory that the test process uses."""

from __future__ import annotations

import ctypes
import gc

import psutil


def resident_memory() -> int:
    """Return the bytes in use, without what has been freed but not returned to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss
