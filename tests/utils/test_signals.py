"""Signals that stop a process."""

from __future__ import annotations

import signal
import threading

from eagle_fsd.utils.signals import StopSignals


def test_outside_the_main_thread_handlers_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    requested: list[bool] = []

    def use() -> None:
        with StopSignals("this one") as stop:
            requested.append(stop.requested.is_set())

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert requested == [False]
    assert signal.getsignal(signal.SIGINT) is before
