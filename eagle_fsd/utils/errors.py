"""Recognize exhausted memory, for which torch raises errors of several types."""

from __future__ import annotations

#: Parts of the messages of those errors whose type also stands for others.
OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the memory of a device or of the machine was exhausted."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"  # torch's; torch may not be imported
        or any(part in str(error) for part in OUT_OF_MEMORY)
    )
