"""Recognize errors for which torch has no type of its own."""

from __future__ import annotations


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the memory of a device or of the machine was exhausted."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"  # torch's; torch may not be imported
        or "DefaultCPUAllocator: can't allocate memory" in str(error)
        or "DefaultCPUAllocator: not enough memory" in str(error)
    )
