"""Engines of calls that have ended, kept for the CUDA graphs of their steps."""

from __future__ import annotations

import threading
from collections.abc import Hashable

from eagle_fsd.model.engine import Engine

#: Engines that are kept, those used last.
MAX_ENGINES = 4


class IdleEngines:
    """Engines without rows, for later calls with the same options.

    Capturing a step takes longer than many steps, and a graph reads and writes the tensors of its
    engine. An engine is in use by one call or it is here, never both. Threads may share an object.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the garbage collector may end a call within one of these
        self._engines: list[Engine] = []
        self._made_with: object = None

    def __reduce__(self) -> tuple[type[IdleEngines], tuple[()]]:
        """Make a copy empty: engines refer to the modules of the original."""
        return IdleEngines, ()

    def __len__(self) -> int:
        """Return the number of engines."""
        return len(self._engines)

    def take(self, kind: Hashable, made_with: object) -> Engine | None:
        """Remove an engine, and return it.

        Args:
            kind: The :attr:`Engine.kind` of the engine.
            made_with: What all engines depend on. If it has changed, all of them are dropped.

        Returns:
            The engine; None if there is none.
        """
        with self._lock:
            if made_with != self._made_with:
                self._engines, self._made_with = [], made_with
            for engine in reversed(self._engines):
                if engine.kind == kind:
                    self._engines.remove(engine)
                    return engine
        return None

    def put(self, engine: Engine) -> None:
        """Keep an engine that is not used any more, if it can be used again.

        Args:
            engine: The engine; with rows, if a call was abandoned.
        """
        if engine.kind is None or not engine.reusable or engine.made_with != self._made_with:
            return
        engine.reset()
        with self._lock:
            self._engines = [*self._engines, engine][-MAX_ENGINES:]

    def clear(self) -> bool:
        """Drop all engines, which frees their memory.

        Returns:
            Whether there were any.
        """
        with self._lock:
            found, self._engines = self._engines, []
        return bool(found)
