"""The decoding loop: requests join a batch, take part in its steps, and leave it.

:class:`Batch` is the only place where several prompts are decoded at once. A call of ``generate``
is a batch of its prompts; a server keeps one batch, which requests join as they arrive.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from eagle_fsd.model import memory
from eagle_fsd.model.config import TreeConfig
from eagle_fsd.model.engine import Decision, Engine, Row, TokenDetail
from eagle_fsd.model.idle_engines import IdleEngines
from eagle_fsd.model.prefix_cache import PrefixCache
from eagle_fsd.model.random_numbers import token_keys
from eagle_fsd.model.sampling import Prefix
from eagle_fsd.model.stats import DecodeStats
from eagle_fsd.model.verify import TARGET_FAULT, Origin

log = logging.getLogger(__name__)

#: Engines without rows that a batch keeps, for the tokens in their caches.
MAX_IDLE_ENGINES = 2


@dataclass
class GenerateOutput:
    """The result of :meth:`EagleFSD.generate`.

    Attributes:
        sequences: ``[B, prompt + new]``: prompts as given, answers padded on the right.
        origins: ``[B, new]`` uint8 :class:`~eagle_fsd.model.verify.Origin` of each new token.
        stats: Accepted lengths, origins, and seconds by phase.
    """

    sequences: Tensor
    origins: Tensor
    stats: DecodeStats


@dataclass
class StreamChunk:
    """The tokens that one step emitted for one row.

    Attributes:
        row: Index of the prompt.
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


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt, and how it is to be continued.

    Attributes:
        ids: ``[P]`` token ids as the caller passed them, padding included.
        tokens: Token ids without padding.
        max_new_tokens: Number of tokens after which the answer ends.
        eos_token_ids: Tokens that end it.
        criteria: Hugging Face stopping criteria, checked after every token.
        decision: How tokens are decided.
        key: Key of its random numbers.
        tree: Shape of its draft trees.
        drafted: Whether trees are drafted; otherwise decoding is plain.
        varies: Whether the shape of the trees may follow the number of rows.
        draws: Whether its trees are chains that are sampled.
        engine: Equal for requests that one engine can decode.
        row: Index of the prompt in its call.
        rows: Number of prompts in the call.
    """

    ids: Tensor
    tokens: list[int]
    max_new_tokens: int
    eos_token_ids: frozenset[int]
    criteria: StoppingCriteriaList
    decision: Decision
    key: int
    tree: TreeConfig
    drafted: bool
    varies: bool
    draws: bool
    engine: Hashable
    row: int = 0
    rows: int = 1

    @property
    def max_length(self) -> int:
        """Maximum number of tokens in the target's cache."""
        return len(self.tokens) - 1 + self.max_new_tokens


class Answer:
    """A request in progress, and what has been emitted for it.

    Args:
        request: The request.

    Attributes:
        tokens: The new tokens.
        origins: The :class:`~eagle_fsd.model.verify.Origin` of each.
        stats: Statistics; their seconds are those during which the answer was decoded.
        finished: Whether it has ended or was canceled.
        error: Why decoding failed, if it did.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.origins: list[int] = []
        self.stats = DecodeStats.empty(1)
        self.finished = False
        self.error: Exception | None = None

    def add(self, tokens: list[int], origins: list[int]) -> int:
        """Add the tokens that a step emitted, up to the end of the answer.

        Args:
            tokens: Token ids.
            origins: The origin of each.

        Returns:
            The number of tokens added.
        """
        count, self.finished = self._end(tokens)
        self.origins += origins[:count]
        self.stats.add(0, origins[:count])
        self.stats.passes += 1
        return count

    def _end(self, tokens: list[int]) -> tuple[int, bool]:
        request = self.request
        for count, token in enumerate(tokens, 1):
            self.tokens.append(token)
            if (
                token in request.eos_token_ids
                or len(self.tokens) >= request.max_new_tokens
                or self._meets_criteria()
            ):
                return count, True
        return len(tokens), False

    def _meets_criteria(self) -> bool:
        request = self.request
        if not request.criteria:
            return False
        ids = torch.cat([request.ids, request.ids.new_tensor(self.tokens)])
        return bool(request.criteria(ids[None], None).any())


@dataclass(eq=False)
class _Place:
    """An answer that is being decoded.

    Attributes:
        answer: The answer.
        row: Its row.
        engine: The engine of that row.
        began: The engine's seconds by phase when the row was added.
    """

    answer: Answer
    row: Row
    engine: Engine
    began: dict[str, float]

    def measure(self) -> None:
        """Update the answer's statistics."""
        stats, now = self.answer.stats, self.engine.clock.seconds
        stats.prefilled = self.row.prefilled
        stats.seconds = {phase: now[phase] - self.began.get(phase, 0.0) for phase in now}


class Batch:
    """Requests that are decoded together; they join and leave between steps.

    An answer does not depend on the others in the batch. Requests are taken in the order of their
    arrival, and every step advances all of them.

    A request waits until there is memory for it, see :mod:`~eagle_fsd.model.memory`. If memory runs
    out all the same, the number of rows is halved, and the answers go on in smaller batches.

    Args:
        new_engine: Creates an engine without rows that decodes a request.
        max_rows: Maximum number of requests that are decoded at once.
        max_length: Maximum number of tokens that a row is expected to have. Memory for all rows is
            allocated at once; default: as requests arrive, which copies what is cached.
        idle: Receives engines that are not used any more; they are dropped if memory is short.

    Raises:
        ValueError: ``max_rows`` is less than 1.

    Attributes:
        max_rows: As above.
        passes: Number of steps so far.
    """

    def __init__(
        self,
        new_engine: Callable[[Request], Engine],
        max_rows: int,
        max_length: int | None = None,
        idle: IdleEngines | None = None,
    ) -> None:
        if max_rows < 1:
            raise ValueError(f"a batch needs at least one row; got {max_rows}")
        self.max_rows, self.passes = max_rows, 0
        self._new_engine, self._max_length = new_engine, max_length
        self._idle = IdleEngines() if idle is None else idle
        self._failed = False  # an exception has interrupted a step
        self._engines: dict[Hashable, Engine] = {}
        self._waiting: deque[Answer] = deque()
        self._places: dict[Row, _Place] = {}
        self._states: dict[Answer, Tensor] = {}  # of the rules of answers that lost their rows
        self._spent: dict[str, float] = {}  # seconds of engines that lost their rows

    def __len__(self) -> int:
        """Return the number of answers that have not finished."""
        return len(self._waiting) + self.rows

    @property
    def rows(self) -> int:
        """Number of answers that have a row."""
        return len(self._places)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase, see :data:`~eagle_fsd.model.stats.PHASES`."""
        total = dict(self._spent)
        for engine in self._engines.values():
            for phase, spent in engine.clock.seconds.items():
                total[phase] = total.get(phase, 0.0) + spent
        return total

    @property
    def nbytes(self) -> int:
        """Bytes that the caches of all rows take."""
        return sum(engine.caches.nbytes for engine in self._engines.values())

    @property
    def free(self) -> int:
        """Number of requests that can be added and start with the next step."""
        return max(0, self.max_rows - len(self))

    def add(self, request: Request) -> Answer:
        """Add a request.

        Args:
            request: The request.
        """
        answer = Answer(request)
        self._waiting.append(answer)
        return answer

    @torch.inference_mode()
    def cancel(self, answer: Answer) -> None:
        """Remove an answer; the next step decodes the others only.

        Args:
            answer: The answer.
        """
        answer.finished = True
        self._states.pop(answer, None)
        if answer in self._waiting:
            self._waiting.remove(answer)
        for place in list(self._places.values()):
            if place.answer is answer:
                self._remove(place.engine, [place.row])

    @torch.inference_mode()
    def step(self) -> list[tuple[Answer, StreamChunk]]:
        """Give free rows to waiting requests, and take a step with all rows.

        Returns:
            What was emitted for each answer that is being decoded.

        Raises:
            MemoryError: There is not enough memory for one row.
        """
        found: list[tuple[Answer, StreamChunk]] = []
        failed, self._failed = self._failed, True
        try:
            self._step(found)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not _out_of_memory(error):
                raise
            if not self._idle.clear() and self.max_rows <= 1:
                raise MemoryError("there is not enough memory to decode one prompt") from error
            self._halve()
        self._failed = failed
        return found

    @torch.inference_mode()
    def close(self) -> None:
        """Cancel all answers, and let other batches of the same model have the engines."""
        for answer in (*self._waiting, *(place.answer for place in self._places.values())):
            answer.finished = True
        self._spent = self.seconds
        self._waiting.clear()
        self._places.clear()
        self._states.clear()
        engines, self._engines = self._engines, {}
        if not self._failed:
            for engine in engines.values():
                self._idle.put(engine)

    def _step(self, found: list[tuple[Answer, StreamChunk]]) -> None:
        """Take a step, and add what it emitted to a list, even if memory runs out later."""
        self._admit(found)
        advanced: list[_Place] = []
        for engine in self._engines.values():
            while engine.joining:
                engine.prefill()
                if any(other.rows for other in self._engines.values()):
                    break  # rows being decoded must not wait for long prompts
            self._remove(engine, [row for row in engine.rows if row not in self._places])
            if engine.rows:
                self.passes += 1
                advanced += self._advance(engine, found)
            engine.clock.enter(None)  # time spent by the caller is not counted
            engine.clock.collect()
        for place in advanced:
            place.measure()

    def _advance(self, engine: Engine, found: list[tuple[Answer, StreamChunk]]) -> list[_Place]:
        """Take a step of an engine."""
        rows, result = engine.rows, engine.step()
        places, ended = [], []
        for index, row in enumerate(rows):
            answer = self._places[row].answer
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
                engine.clear(index)
            details = result.details[index] if result.details else None
            chunk = StreamChunk(
                answer.request.row,
                tokens[:count],
                origins[:count],
                answer.finished,
                None if details is None else details[:count],
            )
            found.append((answer, chunk))
            places.append(self._places[row])
            if answer.finished:
                ended.append(row)
        self._remove(engine, ended)
        return places

    def _admit(self, found: list[tuple[Answer, StreamChunk]]) -> None:
        """Add waiting requests to engines as long as there are rows for them.

        Args:
            found: Receives the ends of requests for which there will never be enough memory.
        """
        new: dict[Engine, list[Row]] = {}
        freed = False
        while self._waiting and self.rows < self.max_rows:
            answer = self._waiting[0]
            engine = self._engine(answer.request)
            if not self._make_room(engine, len(new.get(engine, ())) + 1, answer.request):
                if self.rows:
                    break  # there is enough memory when other answers have ended
                if not freed:  # the caches hold the tokens of answers that have ended
                    self._engines.clear()
                    freed = True
                    continue
                length = answer.request.max_length
                needed = memory.shortage(engine.row_bytes(length), 1)
                answer.error = MemoryError(f"a row of {length} tokens needs {needed}")
                answer.finished = True
                found.append((answer, StreamChunk(answer.request.row, [], [], True)))
                self._waiting.popleft()
                continue
            row = self._row(self._waiting.popleft(), engine)
            self._places[row] = _Place(answer, row, engine, dict(engine.clock.seconds))
            new.setdefault(engine, []).append(row)
        for engine, rows in new.items():
            engine.admit(rows)

    def _make_room(self, engine: Engine, new: int, request: Request) -> bool:
        """Reserve memory for the last of some new rows; return whether there is enough."""
        rows, length = len(engine.rows) + engine.joining + new, request.max_length
        before, longest = engine.reserved
        least = max(rows, before), max(length, longest)
        if least == engine.reserved:
            return True
        # Make room for those that follow, too, because what is cached is copied.
        others = [item.request for item in itertools.islice(self._waiting, 1, self.max_rows)]
        others = [item for item in others if item.engine == request.engine]
        more = least
        if rows > before:
            most = max([least[1], *(item.max_length for item in others)])
            more = max(rows, min(self.max_rows, max(2 * before, rows + len(others)))), most
        for size in (more, least):
            if self._fits(engine, *size):
                engine.reserve(*size)
                return True
        return False

    def _fits(self, engine: Engine, rows: int, length: int) -> bool:
        """Whether there is memory for rows, if need be instead of engines that are not in use."""
        if rows <= engine.fitting_rows(length):
            return True
        return self._idle.clear() and rows <= engine.fitting_rows(length)

    def _engine(self, request: Request) -> Engine:
        engine = self._engines.pop(request.engine, None)
        if engine is None:
            busy = {place.engine for place in self._places.values()}
            idle = [key for key, other in self._engines.items() if other not in busy]
            for key in idle[: len(idle) + 1 - MAX_IDLE_ENGINES]:  # the least recently used
                self._idle.put(self._engines.pop(key))
            engine = self._new_engine(request)
            if self._max_length is not None:
                fitting = engine.fitting_rows(self._max_length)
                if fitting:
                    engine.reserve(min(self.max_rows, fitting), self._max_length)
        self._engines[request.engine] = engine
        return engine

    def _row(self, answer: Answer, engine: Engine) -> Row:
        """Return a row that goes on where an answer is."""
        request, new = answer.request, answer.tokens
        prefix, device = None, request.ids.device
        if request.decision.sampler.needs_prefix:
            capacity = request.max_new_tokens + engine.width
            prefix = Prefix(request.ids, capacity, request.row, request.rows, request.eos_token_ids)
            prefix.append(torch.tensor(new, dtype=torch.long, device=device))
        key = request.key
        if new:  # the keys of a step are those before its root
            before = torch.tensor([request.tokens[-1], *new[:-1]])
            positions = torch.arange(len(new)) + len(request.tokens) - 1
            key = int(torch.tensor(key) + token_keys(before, positions).sum())
        return Row(
            [*request.tokens, *new],
            request.max_new_tokens - len(new),
            request.decision,
            key,
            prefix,
            self._states.pop(answer, None),
        )

    def _remove(self, engine: Engine, rows: Sequence[Row]) -> None:
        """Remove rows from an engine."""
        if not rows:
            return
        for row in rows:
            self._places.pop(row, None)
        engine.abandon(rows)
        removed = set(rows)
        engine.drop([place for place, row in enumerate(engine.rows) if row in removed])

    def _halve(self) -> None:
        """Let all answers wait again, for half as many rows."""
        self.max_rows = max(1, self.rows // 2)
        log.warning("memory ran out: decoding at most %d prompts at once", self.max_rows)
        for place in self._places.values():
            engine, row = place.engine, place.row
            state = row.rule_state
            if row in engine.rows:
                size = row.decision.rule.state_size
                state = engine.read_state[engine.rows.index(row), :size].clone()
            if state is not None:
                self._states[place.answer] = state
        self._waiting.extendleft([place.answer for place in self._places.values()][::-1])
        self._spent = self.seconds
        self._places.clear()
        self._engines.clear()


def _out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed; on a CPU, torch raises no error of its own for that."""
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)


class Generation:
    """A call in progress, returned by :meth:`EagleFSD.stream`.

    Iterate to decode; the first iteration processes the prompts. :meth:`output` returns everything
    emitted so far, even if the iteration was abandoned. :meth:`close` ends the call and frees its
    caches; leaving a ``with`` block or dropping the last reference does the same.

    Args:
        new_engine: Creates an engine without rows that decodes the requests.
        requests: The requests.
        pad_token_id: Token that fills rows which ended before others.
        prefix_cache: The engine's caches, if they are to be kept.
        idle: See :class:`Batch`.
    """

    def __init__(
        self,
        new_engine: Callable[[Request], Engine],
        requests: Sequence[Request],
        pad_token_id: int,
        prefix_cache: PrefixCache | None = None,
        idle: IdleEngines | None = None,
    ) -> None:
        self._pad_token_id = pad_token_id
        batch = Batch(new_engine, len(requests), idle=idle)
        self._answers = [batch.add(request) for request in requests]
        self.stats = DecodeStats(
            [answer.stats.accepted[0] for answer in self._answers],
            [answer.stats.origins[0] for answer in self._answers],
        )
        # Only the iterator holds the batch, and it does not refer back to this object, so that the
        # caches are freed as soon as the call ends.
        self._steps = _decode(batch, self._answers, self.stats, prefix_cache)

    def __iter__(self) -> Generator[StreamChunk]:
        """Continue decoding: yield one chunk per row and step until every row has ended."""
        return self._steps

    def close(self) -> None:
        """End the call and free its caches; iterating again yields nothing."""
        self._steps.close()

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def finish(self, streamer: BaseStreamer | None = None) -> GenerateOutput:
        """Decode until every row has ended, and return everything emitted.

        Args:
            streamer: A Hugging Face streamer that receives the tokens of each step.
        """
        for chunk in self:
            if streamer is not None:
                streamer.put(torch.tensor(chunk.tokens))
        if streamer is not None:
            streamer.end()
        return self.output()

    def output(self) -> GenerateOutput:
        """Return everything emitted so far."""
        ids = torch.stack([answer.request.ids for answer in self._answers])
        width = max(len(answer.tokens) for answer in self._answers)

        def padded(rows: list[list[int]], fill: int, dtype: torch.dtype) -> Tensor:
            rows = [row + [fill] * (width - len(row)) for row in rows]
            return torch.tensor(rows, dtype=dtype, device=ids.device)

        new = padded([answer.tokens for answer in self._answers], self._pad_token_id, ids.dtype)
        origins = [answer.origins for answer in self._answers]
        return GenerateOutput(
            torch.cat([ids, new], 1), padded(origins, int(Origin.PADDING), torch.uint8), self.stats
        )


def _decode(
    batch: Batch, answers: list[Answer], stats: DecodeStats, prefix_cache: PrefixCache | None
) -> Generator[StreamChunk]:
    """Take steps until every answer has ended, and yield what each step emitted."""
    with prefix_cache.in_use() if prefix_cache is not None else nullcontext(), closing(batch):
        while len(batch):
            found = batch.step()
            stats.passes = batch.passes
            stats.prefilled = sum(answer.stats.prefilled for answer in answers)
            stats.seconds = batch.seconds
            for answer, chunk in found:
                if answer.error is not None:
                    raise answer.error
                yield chunk
