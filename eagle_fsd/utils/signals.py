"""Stopping processes: with their parent, or on a signal."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time

log = logging.getLogger(__name__)


def exit_with_parent(patience: float = 4.0) -> None:
    """Terminate this process once its standard input is closed.

    A parent that keeps the other end of a pipe open closes it by exiting, however it exits:
    this works on every system, and for a parent that was killed with SIGKILL.

    Args:
        patience: Seconds between SIGTERM to this process and a forced exit.
    """

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1024):
                pass
        log.warning("the parent process exited: stopping this server")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(patience)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
