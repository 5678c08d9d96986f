"""Stop a process on SIGINT or SIGTERM."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)


class StopSignals:
    """Turn SIGINT and SIGTERM into a request to stop while the context is active.

    ``on_request`` is called with the signal number; the event ``requested`` is set. Outside the
    main thread, where Python allows no signal handlers, the context does nothing.
    """

    def __init__(self, on_request: Callable[[int], None] | None = None) -> None:
        self.requested = threading.Event()
        self._on_request = on_request
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.requested.set()
        if self._on_request is not None:
            self._on_request(number)


def interrupt_on_second_signal(work: str) -> Callable[[int], None]:
    """Return a handler for :class:`StopSignals` that raises KeyboardInterrupt at the second signal.

    ``work`` is completed after the first signal, which the handler logs.
    """
    signals: list[int] = []

    def handle(number: int) -> None:
        signals.append(number)
        if len(signals) > 1:
            raise KeyboardInterrupt
        log.warning("stopping after %s; press Ctrl-C again to stop at once", work)

    return handle
