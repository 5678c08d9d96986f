"""Callback types by which long-running functions report progress."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

#: Called with the amount of work done and the total amount.
Progress = Callable[[int, int], None]
#: Called with the label of a stage, such as ``"answering"``; returns a context manager that lasts
#: for the stage and yields its progress callback.
ProgressFactory = Callable[[str], AbstractContextManager[Progress]]


def no_progress(label: str) -> AbstractContextManager[Progress]:
    """Ignore progress; the default :data:`ProgressFactory`."""
    return nullcontext(lambda done, total: None)
