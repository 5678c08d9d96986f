"""Stop a process on SIGINT or SIGTERM."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)


class StopSignals:
    """Turn SIGINT and SIGTERM into a request to stop while the context is active.

    The first signal sets the event ``requested``: ``work``, which a log message names, is to be
    completed. The second one raises KeyboardInterrupt. Outside the main thread, where Python allows
    no signal handlers, the context does nothing.
    """

    def __init__(self, work: str) -> None:
        self.requested = threading.Event()
        self._work = work
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested.is_set():
            raise KeyboardInterrupt
        self.requested.set()
        log.warning("stopping after %s; press Ctrl-C again to stop at once", self._work)
