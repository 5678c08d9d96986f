"""Concurrent calls. The tests of the judge and of rewriting chats cover the client."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from eagle_fsd.utils.chat_api import map_concurrently

TIMEOUT = 100


def test_items_are_requested_when_a_thread_is_free() -> None:
    """Items are requested late, so the caller can stop them, and by one thread at a time."""
    requested: list[int] = []
    stop = threading.Event()
    busy = threading.Lock()

    def items() -> Iterator[int]:
        for item in range(1000):
            assert busy.acquire(blocking=False)
            if stop.is_set():
                return
            requested.append(item)
            busy.release()
            yield item

    over = threading.Event()

    def work(item: int) -> int:
        if item:
            over.wait(TIMEOUT)
        return item

    results = map_concurrently(work, items(), 3)
    assert next(results) == (0, 0)
    stop.set()
    over.set()
    rest = [item for item, _ in results]
    assert sorted(rest) == requested[1:]
    assert len(requested) <= 4  # three at first, and one after the first


def test_exception_is_raised_after_the_results_in_progress() -> None:
    failed = threading.Event()

    def work(item: int) -> int:
        if item == 1:
            raise ValueError("one")
        failed.wait(TIMEOUT)
        return item

    results = map_concurrently(work, range(100), 2)
    threading.Timer(0.1, failed.set).start()
    assert next(results) == (0, 0)
    with pytest.raises(ValueError, match="one"):
        next(results)


def test_no_call_is_started_after_an_exception() -> None:
    failed = threading.Event()
    called: list[int] = []

    def items() -> Iterator[int]:
        yield 0
        failed.wait(TIMEOUT)
        yield 1

    def work(item: int) -> None:
        called.append(item)
        threading.Timer(0.1, failed.set).start()
        raise ValueError("zero")

    with pytest.raises(ValueError, match="zero"):
        list(map_concurrently(work, items(), 2))
    assert called == [0]


def test_exception_of_the_items_is_raised() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("gone")

    results = map_concurrently(lambda item: item, items(), 3)
    with pytest.raises(OSError, match="gone"):
        list(results)
