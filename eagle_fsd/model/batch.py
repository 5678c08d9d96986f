"""Requests join a batch, take part in its steps, and leave it."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from eagle_fsd.model import memory
from eagle_fsd.model.cache import cache_slots
from eagle_fsd.model.compilation import has_graphs, using_device
from eagle_fsd.model.config import TreeConfig
from eagle_fsd.model.drafters.interface import Drafter, NoDrafter
from eagle_fsd.model.engine import Engine, StepResult, by_length
from eagle_fsd.model.execution import ExecutionOptions
from eagle_fsd.model.prefix_cache import PrefixCache
from eagle_fsd.model.request import Answer, Request
from eagle_fsd.model.self_check import check_target
from eagle_fsd.model.step import TokenDetail
from eagle_fsd.model.target import Target
from eagle_fsd.model.verify import TARGET_FAULT
from eagle_fsd.utils.errors import is_out_of_memory

log = logging.getLogger(__name__)

#: Maximum number of engines without rows when a batch adds one; their caches hold tokens.
MAX_IDLE_ENGINES = 2
#: Maximum number of engines of calls that have ended that a pool keeps, those used last.
MAX_POOLED_ENGINES = 16


@dataclass
class StreamChunk:
    """The tokens that one step emitted for one row.

    Attributes:
        row: Index of the prompt in its call; 0 in a :class:`Batch`.
        tokens: Token ids.
        origins: The :class:`~eagle_fsd.model.verify.Origin` of each token.
        finished: Whether the row has ended.
        details: The details of each token; None unless requested.
    """

    row: int
    tokens: list[int]
    origins: list[int]
    finished: bool
    details: list[TokenDetail] | None = None


class EnginePool:
    """Engines of calls that have ended, kept for the CUDA graphs of their steps. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the garbage collector may end a call while it is held
        self._engines: list[Engine] = []

    def __reduce__(self) -> tuple[type[EnginePool], tuple[()]]:
        """Make a copy empty: engines refer to the modules of the original."""
        return EnginePool, ()

    def take(self, key: Hashable) -> Engine | None:
        """Remove and return an engine with this :attr:`Engine.reuse_key`, if there is one."""
        with self._lock:
            for engine in reversed(self._engines):
                if engine.reuse_key == key:
                    self._engines = [item for item in self._engines if item is not engine]
                    return engine
        return None

    def put(self, engine: Engine) -> None:
        """Keep an engine, even with rows of a call that was abandoned, if it can be used again."""
        if engine.reuse_key is not None and engine.reusable:
            engine.reset()
            with self._lock:
                self._engines = [*self._engines, engine][-MAX_POOLED_ENGINES:]

    def clear(self) -> bool:
        """Drop all engines, which frees their memory; return whether there were any."""
        with self._lock:
            found, self._engines = self._engines, []
        return bool(found)


@dataclass(frozen=True)
class EngineOptions:
    """What the engines of a batch are built from.

    ``batch_trees`` maps the least number of rows to the tree of requests that use batch trees.
    """

    target: Target
    drafter: Drafter
    execution: ExecutionOptions = field(default_factory=ExecutionOptions)
    batch_trees: Mapping[int, TreeConfig] = field(default_factory=dict)
    caches: PrefixCache | None = None
    pool: EnginePool = field(default_factory=EnginePool)

    def engine_for(self, request: Request) -> Engine:
        """Return an engine without rows that decodes requests like this one."""
        target, drafter = self.target, self.drafter if request.drafted else NoDrafter()
        check_target(target, projected=drafter.projects)
        if not self.execution.capture:
            self.pool.clear()  # its graphs are of no use
        key = self._reuse_key(request)
        kept = self.pool.take(key)
        if kept is not None:
            return kept
        engine = Engine(
            target,
            drafter,
            request.tree,
            draw=request.decision.sampler.draw_draft if request.samples_chains else None,
            caches=self.caches,
            execution=self.execution,
            batch_trees=self.batch_trees if request.uses_batch_trees and request.drafted else None,
        )
        engine.reuse_key = key
        return engine

    def _reuse_key(self, request: Request) -> Hashable:
        """Return what a reusable engine depends on; None if this one cannot be used again."""
        target, execution = self.target, self.execution
        device = target.device
        captures = execution.capture and has_graphs(device) and target.one_device
        if not captures or self.caches is not None:
            return None
        # Work on other streams could overlap with that of the calls before.
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        trees = tuple(self.batch_trees.items())
        return request.engine_key, target, self.drafter, execution, trees, stream


class Batch:
    """Requests that are decoded together; they join and leave between steps.

    An answer does not depend on the others in the batch, apart from the exceptions that
    :meth:`EagleFSD.generate_many` names. Requests get rows in order of arrival, and a step
    adds tokens to all answers whose prompts were processed before it.

    A request waits until there is memory for it, see :mod:`~eagle_fsd.model.memory`. If memory runs
    out nevertheless, the pool is cleared or the number of rows is halved, and all answers resume.

    Args:
        options: What its engines are built from. Those in the pool are dropped if memory is short.
        max_rows: Maximum number of requests that are decoded at once.
        max_length: Maximum number of tokens that a row is expected to have. Memory for all rows
            that fit is allocated at once; default: as requests arrive, by copying what is cached.

    Attributes:
        max_rows: As above; reduced where memory has run out.
        passes: Number of target passes so far, without prefill.
        seconds: Seconds by phase so far, see :data:`~eagle_fsd.model.stats.PHASES`.
    """

    def __init__(
        self, options: EngineOptions, max_rows: int, max_length: int | None = None
    ) -> None:
        self.max_rows, self.passes = max_rows, 0
        self.seconds: dict[str, float] = {}
        self._requested_rows = max_rows
        self._options, self._max_length = options, max_length
        self._failed = False  # an exception has interrupted a step
        self._engines: dict[Hashable, Engine] = {}
        self._waiting: deque[Answer] = deque()
        self._places: dict[Answer, Engine] = {}

    def __len__(self) -> int:
        """Return the number of answers that have not finished."""
        return len(self._waiting) + self.rows

    @property
    def rows(self) -> int:
        """Number of answers that have a row."""
        return len(self._places)

    @property
    def nbytes(self) -> int:
        """Bytes that the caches of all engines take."""
        return sum(engine.caches.nbytes for engine in self._engines.values())

    @property
    def free(self) -> int:
        """Number of requests that can be added and start with the next step, memory permitting."""
        return max(0, self.max_rows - len(self))

    def add(self, request: Request) -> Answer:
        """Add ``request``, see :meth:`EagleFSD.request`; the answer says when it is finished."""
        self._options.drafter.attach(self._options.target)  # it may have served another pair
        answer = Answer(request)
        self._waiting.append(answer)
        return answer

    @torch.inference_mode()
    def cancel(self, answer: Answer) -> None:
        """Remove ``answer``; the next step decodes the others only."""
        answer.finished = True
        if answer in self._waiting:
            self._waiting.remove(answer)
        if answer in self._places:
            with using_device(self._options.target.device):
                self._remove(self._places[answer], [answer])

    @torch.inference_mode()
    def step(self) -> list[tuple[Answer, StreamChunk]]:
        """Give free rows to waiting requests, and take a step with all rows.

        Returns what was emitted for each answer that is being decoded, nothing if only prompts were
        processed. An answer that does not fit in memory even by itself ends with an error.
        """
        found: list[tuple[Answer, StreamChunk]] = []  # kept if memory runs out later
        failed, self._failed = self._failed, True
        try:
            with using_device(self._options.target.device):
                self._admit(found)
                for engine in list(self._engines.values()):
                    before = engine.clock.seconds.copy()
                    engine.prefill()  # one chunk, so that other rows need not wait for long prompts
                    self._remove(engine, [row for row in engine.rows if row not in self._places])
                    if engine.rows:
                        self.passes += 1
                        found += self._emit(engine, engine.rows, engine.step())
                    engine.clock.enter(None)  # time spent by the caller is not counted
                    engine.clock.collect()
                    self._count_seconds(engine, before)
                    self._remove(engine, [answer for answer in engine.rows if answer.finished])
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if self._options.pool.clear():
                self._requeue(self.max_rows)
            elif self.max_rows > 1:
                self._requeue(max(1, self.rows // 2))
            else:
                found.append(self._fail(error))
        self._failed = failed
        return found

    @torch.inference_mode()
    def close(self) -> None:
        """Cancel all answers, and return the engines to the pool unless a step has failed."""
        for answer in (*self._waiting, *self._places):
            answer.finished = True
        self._waiting.clear()
        self._places.clear()
        engines = list(self._engines.values())
        self._engines.clear()
        if not self._failed:
            for engine in engines:
                self._options.pool.put(engine)

    def _emit(
        self, engine: Engine, answers: list[Answer], result: StepResult
    ) -> list[tuple[Answer, StreamChunk]]:
        """Add what a step of an engine emitted to its answers."""
        found = []
        for index, answer in enumerate(answers):
            tokens, origins = result.tokens[index], result.origins[index]
            if not tokens:
                continue
            fault = result.faults[index]
            if fault:  # of a processor: at the end of the path, perhaps beyond the answer's end
                valid = len(tokens) - 1 if fault > TARGET_FAULT else 0
                tokens, origins = tokens[:valid], origins[:valid]
            count = answer.add(tokens, origins) if tokens else 0
            if fault and not answer.finished:
                message = answer.request.decision.describe_fault(fault)
                answer.error, answer.finished = FloatingPointError(message), True
                engine.caches.rows[index].truncate(0)
            details = result.details[index]
            chunk = StreamChunk(
                row=answer.request.row,
                tokens=tokens[:count],
                origins=origins[:count],
                finished=answer.finished,
                details=None if details is None else details[:count],
            )
            found.append((answer, chunk))
        return found

    def _count_seconds(self, engine: Engine, before: Mapping[str, float]) -> None:
        """Add the seconds since ``before`` to the batch's and to those of an engine's answers."""
        answers = [item.stats.seconds for item, place in self._places.items() if place is engine]
        for phase, now in engine.clock.seconds.items():
            for total in (self.seconds, *answers):
                total[phase] = total.get(phase, 0.0) + now - before.get(phase, 0.0)

    def _admit(self, found: list[tuple[Answer, StreamChunk]]) -> None:
        """Add waiting requests while there is room; ``found`` gets those that will never fit."""
        new: dict[Engine, list[Answer]] = {}
        freed = False
        while self._waiting and self.rows < self.max_rows:
            answer = self._waiting[0]
            engine = self._engine(answer.request)
            if engine in self._places.values() and self._is_oversized(engine, answer.request):
                break  # it is replaced when its rows have ended
            if not self._make_room(engine, len(new.get(engine, ())) + 1, answer.request):
                if self.rows:
                    break  # memory becomes free when other answers end
                if not freed:  # the caches hold the tokens of answers that have ended
                    self._free()
                    freed = True
                    continue
                length = answer.request.max_length
                needed = memory.shortage(engine.row_bytes(length))
                error = MemoryError(f"a row of {length} tokens needs {needed}")
                found.append(_ended(self._waiting.popleft(), error))
                continue
            self._waiting.popleft()
            self._places[answer] = engine
            new.setdefault(engine, []).append(answer)
        for engine, rows in new.items():
            engine.admit(by_length(rows))

    def _make_room(self, engine: Engine, new: int, request: Request) -> bool:
        """Reserve memory for ``new`` rows to admit, the last one for ``request``, if it fits."""
        rows = len(engine.rows) + engine.joining + new
        reserved_rows, reserved_length = engine.reserved
        needed = max(rows, reserved_rows), max(request.max_length, reserved_length)
        if needed == engine.reserved:
            return True
        # Make room for those that follow, too: the caches are copied when they grow.
        preferred = needed
        if request.max_length > reserved_length:
            room = min(reserved_length * 5 // 4, engine.target.stable_length)
            preferred = needed[0], max(needed[1], room)
        if rows > reserved_rows:
            others = [item.request for item in itertools.islice(self._waiting, 1, self.max_rows)]
            others = [item for item in others if item.engine_key == request.engine_key]
            longest = max([preferred[1], *(item.max_length for item in others)])
            expected_rows = min(self.max_rows, max(2 * reserved_rows, rows + len(others)))
            preferred = max(rows, expected_rows), longest
        for size in (preferred, needed):
            if self._fits(engine, *size):
                engine.reserve(*size)
                return True
        busy = {engine, *self._places.values()}
        idle = [key for key, other in self._engines.items() if other not in busy]
        for key in idle:
            del self._engines[key]
        return bool(idle) and self._make_room(engine, new, request)

    def _fits(self, engine: Engine, rows: int, length: int) -> bool:
        """Return whether rows fit in memory; drop pooled engines if they do not otherwise."""
        if rows <= engine.fitting_rows(length):
            return True
        return self._options.pool.clear() and rows <= engine.fitting_rows(length)

    def _engine(self, request: Request) -> Engine:
        """Return the engine for a request; create it if there is none or only an oversized one."""
        engine, busy = self._engines.pop(request.engine_key, None), set(self._places.values())
        if engine is not None and engine not in busy and self._is_oversized(engine, request):
            engine = None
        if engine is None:
            idle = [key for key, other in self._engines.items() if other not in busy]
            for key in idle[: len(idle) + 1 - MAX_IDLE_ENGINES]:  # the least recently used
                self._options.pool.put(self._engines.pop(key))
            engine = self._options.engine_for(request)
            if self._max_length is not None and request.max_length <= self._max_length:
                fitting = engine.fitting_rows(self._max_length)
                if fitting:
                    engine.reserve(min(self.max_rows, fitting), self._max_length)
        self._engines[request.engine_key] = engine
        return engine

    def _is_oversized(self, engine: Engine, request: Request) -> bool:
        """Whether rows reserved for longer requests leave too little memory for those that wait."""
        if self._max_length is not None or self._options.caches is not None:
            return False
        rows = [item for item, place in self._places.items() if place is engine]
        answers = *rows, *itertools.islice(self._waiting, self.max_rows)
        requests = [item.request for item in answers]
        alike = [item.max_length for item in requests if item.engine_key == request.engine_key]
        wanted = min(len(alike), self.max_rows - self.rows + len(rows))
        length = engine.reserved[1]
        rounding = cache_slots(1, self._options.target.device)
        return length > 2 * max(alike) + rounding and engine.fitting_rows(length) < wanted

    def _remove(self, engine: Engine, answers: Sequence[Answer]) -> None:
        """Remove answers from an engine."""
        if not answers:
            return
        for answer in answers:
            self._places.pop(answer, None)
        engine.drop([index for index, row in enumerate(engine.rows) if row in answers])

    def _requeue(self, max_rows: int) -> None:
        """Drop the engines, requeue all answers, and limit the number of rows."""
        if max_rows < self.max_rows:
            log.warning("memory ran out: reduced the batch size to %d", max_rows)
        self.max_rows = max_rows
        self._waiting.extendleft(reversed(self._places))
        self._places.clear()
        self._engines.clear()

    def _fail(self, cause: Exception) -> tuple[Answer, StreamChunk]:
        """End the answer whose memory ran out although it was the only one; retry the others."""
        answer = next(iter(self._places), None) or self._waiting.popleft()
        error = MemoryError("there is not enough memory to decode one prompt")
        error.__cause__ = cause.with_traceback(None)  # its frames hold tensors
        self._places.clear()
        self._free()
        self.max_rows = self._requested_rows
        return _ended(answer, error)

    def _free(self) -> None:
        """Drop all engines, and the tokens of a prefix cache, which can be processed again."""
        self._engines.clear()
        if self._options.caches is not None:
            self._options.caches.release()


def _ended(answer: Answer, error: Exception) -> tuple[Answer, StreamChunk]:
    """End an answer with an error; return it with its last chunk."""
    answer.error, answer.finished = error, True
    return answer, StreamChunk(answer.request.row, [], [], True)
