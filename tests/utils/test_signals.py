"""Signals that stop a process."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from eagle_fsd.utils.signals import StopSignals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_requests_a_stop_and_handlers_are_restored(
    number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    before = signal.getsignal(number)
    with StopSignals("this one") as stop:
        assert not stop.requested.is_set()
        os.kill(os.getpid(), number)
        assert stop.requested.wait(10)
        assert caplog.messages == ["stopping after this one; press Ctrl-C again to stop at once"]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(number) is before


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
