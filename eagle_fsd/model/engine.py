"""Rows that are decoded together: their memory, their prompts, and their steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eagle_fsd.model import memory
from eagle_fsd.model.attention import query_groups
from eagle_fsd.model.cache import TreeCache, cache_slots
from eagle_fsd.model.compilation import BackgroundCompiler, has_graphs, upload, using_device
from eagle_fsd.model.config import TreeConfig
from eagle_fsd.model.description import describe_modules
from eagle_fsd.model.drafters.interface import Drafter
from eagle_fsd.model.execution import Execution, ExecutionOptions, LaunchedStep, StepResult
from eagle_fsd.model.prefix_cache import RowCaches
from eagle_fsd.model.request import Answer, Decision, Request
from eagle_fsd.model.stats import PhaseClock
from eagle_fsd.model.step import RowGroup, StepState
from eagle_fsd.model.target import Target
from eagle_fsd.model.tree import Draw

#: Maximum number of tokens of a prompt that the target processes in one pass.
PREFILL_CHUNK = 512
#: Tokens below which moving or separating cached rows does not pay.
MIN_REUSED = 32
#: Prompt tokens and new tokens of the steps that are compiled in the background.
COMPILED_PROMPT, COMPILED_TOKENS = 32, 48


@dataclass
class _Prompts:
    """Prompts in consecutive rows from ``first`` on, processed up to position ``start``."""

    first: int
    rows: list[Answer]
    start: int


def by_length(rows: Sequence[Answer]) -> list[Answer]:
    """Order rows so that :meth:`Engine.admit` finds groups of similar lengths, long prompts last.

    Prompts of at most :data:`PREFILL_CHUNK` tokens keep their order.
    """
    return sorted(
        rows, key=lambda row: max(len(row.request.tokens) + len(row.tokens), PREFILL_CHUNK)
    )


class _RowTensors(NamedTuple):
    """The tensors of all rows that there is room for, named as in :class:`StepState`."""

    roots: Tensor
    lengths: Tensor
    rule_state: Tensor
    keys: Tensor

    @classmethod
    def new(cls, device: torch.device, rows: int, width: int) -> _RowTensors:
        """Allocate tensors for rules whose states have at most ``width`` values."""
        roots, lengths, keys = (
            torch.zeros(rows, dtype=torch.long, device=device) for _ in range(3)
        )
        state = torch.zeros(rows, width, dtype=torch.float32, device=device)
        return cls(roots, lengths, rule_state=state, keys=keys)


class Engine:
    """Rows that are decoded together, and their state on the device.

    :meth:`admit` adds prompts, which :meth:`prefill` processes chunk by chunk; then they take part
    in every :meth:`step` until :meth:`drop` removes them. The rows being decoded come first in all
    tensors, in the order of :attr:`rows`. The target's device must be torch's current one.
    """

    reuse_key: Hashable = None  # engines with equal keys are interchangeable; None if not reused
    cache: TreeCache
    state: StepState

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        tree: TreeConfig,
        draw: Draw | None = None,
        caches: RowCaches | None = None,
        execution: ExecutionOptions | None = None,
        batch_trees: Mapping[int, TreeConfig] | None = None,
    ) -> None:
        self.target, self.drafter, self.tree = target, drafter, tree
        self._trees = {0: tree, **(batch_trees or {})}
        self.caches = caches or RowCaches()
        self.execution = Execution(target, execution or ExecutionOptions())
        self._draw = draw
        self.rows: list[Answer] = []
        trees = self._trees.values()
        self.draft = drafter.start(max(trees, key=lambda item: item.depth), draw)
        self.draft.use(tree)
        self._nodes = max(map(drafter.max_nodes, trees))
        self.width = max(item.depth for item in trees) + 2  # most tokens of a step per row
        draft = max(drafter.cache_length(self._extra - self._nodes, tree) for tree in trees)
        self._margin = max(self._extra, draft)  # slots beyond a row's tokens that steps may write
        self.reserved = 0, 0  # rows, and tokens in a row, that there is memory for
        self._tensors = _RowTensors.new(target.device, 0, 0)
        self._prompts: deque[_Prompts] = deque()
        self._ahead: LaunchedStep | None = None

    @property
    def clock(self) -> PhaseClock:
        """Measures the phases of steps."""
        return self.execution.clock

    @property
    def reusable(self) -> bool:
        """Whether steps are, or can soon be, captured, and :meth:`reset` forgets all rows."""
        return len(self.execution.graphs) > 0 and not self.draft.waits

    @property
    def joining(self) -> int:
        """Number of prompts that are being processed."""
        return sum(len(prompts.rows) for prompts in self._prompts)

    # -- memory ----------------------------------------------------------------------------------

    def row_bytes(self, max_length: int) -> memory.Bytes:
        """Return the memory that a row of at most ``max_length`` tokens takes."""
        target, (length, draft_length) = self.target, self._slots(max_length)
        captured = self.execution.options.capture and has_graphs(target.device)
        needed = (
            memory.row_bytes(target, self.drafter, tree, length, draft_length, captured)
            for tree in self._trees.values()
        )
        return max(needed, key=memory.Bytes.total)

    def fitting_rows(self, max_length: int) -> int:
        """Return how many rows of at most ``max_length`` tokens fit in caches or free memory."""
        allocated = self.caches.fitting_rows(*self._slots(max_length))
        return self.target.agree(max(allocated, memory.fitting_rows(self.row_bytes(max_length))))

    def reserve(self, rows: int, max_length: int) -> None:
        """Make room for rows of ``max_length`` tokens, on CUDA more: see :func:`cache_slots`."""
        rows, max_length = max(rows, self.reserved[0]), max(max_length, self.reserved[1])
        if (rows, max_length) == self.reserved:
            return
        length, draft_length = self._slots(max_length)
        self.reserved = rows, length - self._extra
        caches = self.caches
        caches.reserve(
            self.target, self.drafter, rows=rows, length=length, draft_length=draft_length
        )
        assert caches.target_cache is not None
        self.cache = caches.target_cache
        self._drafts_from_cache = draft_length > 0
        self._resize(rows, self._tensors.rule_state.shape[1])
        longest = min(self.reserved[1], self.target.stable_length)
        self.draft.reserve(rows, longest, caches.draft_cache if draft_length else None)

    @property
    def _extra(self) -> int:
        """Slots of the target's cache beyond a row's tokens."""
        ahead = self.width if self.target.device.type == "cuda" else 0  # see `step`
        return ahead + self._nodes

    def _slots(self, max_length: int) -> tuple[int, int]:
        """Return the slots per row of the target's cache and of the drafter's."""
        slots = cache_slots(max_length + self._extra, self.target.device)
        longest = slots - self._nodes
        draft = max(self.drafter.cache_length(longest, tree) for tree in self._trees.values())
        return slots, cache_slots(draft, self.target.device)

    def _resize(self, rows: int, width: int) -> None:
        """Reallocate the rows' tensors."""
        before, self._tensors = self._tensors, _RowTensors.new(self.target.device, rows, width)
        for new, old in zip(self._tensors, before, strict=True):
            new[tuple(map(slice, old.shape))] = old
        self.execution.graphs.clear()  # they read and write the old tensors
        self._set_rows(self.rows)

    # -- rows join -------------------------------------------------------------------------------

    def admit(self, rows: Sequence[Answer]) -> None:
        """Add rows, and reuse what the caches hold of their prompts."""
        self._renew()
        first = len(self.rows)
        for group in self._prompts:  # fill the gap that dropped rows left
            self._swap((first + at, group.first + at) for at in range(len(group.rows)))
            group.first, first = first, first + len(group.rows)
        self.reserve(first + len(rows), max(row.request.max_length for row in rows))
        width = max(row.request.decision.rule.state_size for row in rows)
        if width > self._tensors.rule_state.shape[1]:
            self._resize(self.reserved[0], width)
        groups: list[_Prompts] = []
        cached = any(row.tokens for row in self.caches.rows[first:])
        for place, row in enumerate(rows, first):
            row.start()
            start = self._reuse(place, row.prompt) if cached else 0
            self.caches.clear(place, start)
            self.caches.rows[place].epoch = self.caches.epoch
            if (
                groups
                and abs(groups[-1].start - start) < MIN_REUSED
                and row.length <= max(2 * groups[-1].rows[0].length, PREFILL_CHUNK)
            ):
                groups[-1].rows.append(row)
                groups[-1].start = min(groups[-1].start, start)
            else:
                groups.append(_Prompts(place, [row], start))
        self._prompts += groups
        self._fill(first, rows)
        self.draft.admit(first, [row.prompt for row in rows])

    def _fill(self, first: int, rows: Sequence[Answer]) -> None:
        """Set the tensors of new rows."""
        device = self.target.device
        own = slice(first, first + len(rows))
        self._tensors.roots[own] = upload([row.root for row in rows], device)
        self._tensors.lengths[own] = upload([row.length for row in rows], device)
        self._tensors.keys[own] = upload([row.key for row in rows], device)
        for place, row in enumerate(rows, first):
            rule, state = row.request.decision.rule, row.rule_state
            if state is None:
                state = rule.start([upload(row.prompt, device)])[0]
            self._tensors.rule_state[place, : rule.state_size] = state[: rule.state_size]

    def _renew(self) -> None:
        """Forget what was computed or captured with the modules if they have changed since."""
        self.target.renew(self.drafter.reads)  # hooks are among the things that are compared
        self.drafter.renew()
        modules = [item for item in (self.target.model, self.drafter.network) if item is not None]
        described = describe_modules(*modules)
        changed = self.caches.renew(described, keep=bool(self.rows or self._prompts))
        if changed:
            self.draft.renew(self.tree)
        if changed and self.caches.target_cache is None:
            self.reserved = self.reserved[0], 0  # other tensors keep their rows
        self.execution.renew(modules, described, changed)

    def prefill(self) -> None:
        """Process the next chunk of the prompts that were added first, if there are any."""
        if not self._prompts:
            return
        self.clock.enter("prefill")
        group = self._prompts[0]
        longest = max(row.length for row in group.rows)
        stop = min(group.start + PREFILL_CHUNK, longest)
        for place, row in enumerate(group.rows, group.first):
            row.stats.prefilled += max(0, min(stop, row.length) - group.start)
            self.caches.rows[place].truncate(group.start)  # what follows is overwritten
            self._mark_written(place, stop)
        if group.start < stop:
            prompts = [torch.tensor(row.prompt, device="cpu") for row in group.rows]
            ids = upload(pad_sequence(prompts, batch_first=True), self.target.device)
            chunk = ids[:, group.start : stop]
            with self.cache.from_row(group.first):
                features = self.target.prefill(chunk, group.start, self.cache, self.drafter.reads)
            self.draft.prefill(group.first, ids, start=group.start, stop=stop, features=features)
            group.start = stop
        if stop < longest:
            return
        self._prompts.popleft()
        live = len(self.rows)
        self._swap((live + at, group.first + at) for at in range(len(group.rows)))
        for place, row in enumerate(group.rows):
            if self._drafts_from_cache and row.length:
                self.caches.rows[live + place].entries = row.length - 1
        self._set_rows([*self.rows, *group.rows])
        if self._ahead:
            self._ahead.order += [None] * len(group.rows)

    # -- rows leave ------------------------------------------------------------------------------

    def drop(self, rows: Sequence[int]) -> list[int]:
        """Remove rows; return the previous index of every remaining row, in the new order.

        Groups of prompts whose rows have all been cancelled are removed, too.
        """
        self._prompts = deque(
            group for group in self._prompts if not all(row.finished for row in group.rows)
        )
        order = list(range(len(self.rows)))
        swapped = []
        for row in sorted(rows, reverse=True):
            swapped.append((row, len(order) - 1))
            order[row] = order[-1]
            order.pop()
        self._swap(swapped)
        for _, row in swapped:
            self.caches.touch(row)
        self._set_rows([self.rows[row] for row in order])
        if self._ahead:
            self._ahead.order = [self._ahead.order[row] for row in order]
        return order

    def reset(self) -> None:
        """Remove all rows, and forget what the caches hold and how long steps took."""
        self._prompts.clear()
        self._ahead = None
        self._set_rows([])
        for row in self.caches.rows:
            row.truncate(0)
        self.execution.clock = PhaseClock(self.target.device)

    def _mark_written(self, place: int, length: int) -> None:
        """Note that passes write up to ``_margin`` slots beyond a row's first ``length``."""
        cached = self.caches.rows[place]
        cached.written = max(cached.written, length + self._margin)

    def _swap(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Swap rows, one pair after the other, by one copy of all rows that move."""
        places: dict[int, int] = {}  # what each row is overwritten with
        for one, other in pairs:
            places[one], places[other] = places.get(other, other), places.get(one, one)
        moved = {place: source for place, source in places.items() if place != source}
        if moved:
            self._copy_rows(list(moved.values()), list(moved))

    def _copy_rows(self, source: list[int], target: list[int]) -> None:
        self.caches.copy_rows(source, target)
        self.draft.copy_rows(source, target)
        device = self.target.device
        read, written = (upload(rows, device) for rows in (source, target))
        for tensor in self._tensors:
            tensor[written] = tensor[read]

    def _reuse(self, place: int, ids: list[int]) -> int:
        """Move the row with the longest prefix of a prompt to a place; return the prefix's length.

        A row whose prefix is only a little longer is not moved. If the row in the place has many
        other tokens, a copy of it replaces the least recently used row.
        """
        caches, drafter = self.caches, self.drafter if self._drafts_from_cache else None
        places = range(place, len(caches.rows))
        shared = [caches.shared(row, ids, drafter) for row in places]
        best = max(range(len(shared)), key=shared.__getitem__)
        if shared[best] < shared[0] + MIN_REUSED:
            best = 0  # moving a row costs more than processing a few tokens
        self._swap([(place, place + best)])
        oldest = min(places, key=lambda row: caches.rows[row].used)
        if oldest != place and len(caches.rows[place].tokens) >= shared[best] + MIN_REUSED:
            self._copy_rows([place], [oldest])
        caches.touch(place)
        return shared[best]

    # -- steps -----------------------------------------------------------------------------------

    def _set_rows(self, rows: list[Answer]) -> None:
        """Set the rows that steps decode."""
        self.rows = rows
        self._choose_tree(len(rows))
        self.draft.show(len(rows))
        groups, order = self._group(rows)
        self.state = StepState(
            target=self.target,
            drafter=self.drafter,
            draft=self.draft,
            cache=self.cache,
            groups=groups,
            order=order,
            folds=query_groups(self.target.model),  # the check of its first use decides
            **{name: item[: len(rows)] for name, item in self._tensors._asdict().items()},
        )
        self.execution.plan(self.state)

    def _choose_tree(self, rows: int) -> None:
        """Use the tree for a number of rows."""
        tree = self._trees[max(least for least in self._trees if least <= rows)]
        if tree != self.tree:
            self.tree = tree
            self.draft.use(tree)

    def _group(self, rows: list[Answer]) -> tuple[list[RowGroup], Tensor | None]:
        """Group rows by decision; see :class:`StepState`."""
        groups: list[RowGroup] = []
        for place, row in enumerate(rows):
            decision = row.request.decision
            for group in groups:
                if group.decision is decision or group.decision == decision:
                    group.answers.append(row)
                    group.places.append(place)
                    break
            else:
                groups.append(RowGroup(decision, [row], [place], None))
        if len(groups) < 2:
            return groups, None
        device = self.target.device
        for group in groups:
            group.index = upload(group.places, device)
        order = [place for group in groups for place in group.places]
        return groups, upload(order, device).argsort()

    def step(self) -> StepResult:
        """Emit at least one token for each of :attr:`rows`, except for rows that joined during it.

        On CUDA, the device may run the next step while the host reads the tokens of this one.
        """
        begin, execution = time.perf_counter(), self.execution
        launched = self._ahead or execution.launch(self.state, self.tree, *self._visible_slots())
        self._ahead = None
        rule_state = self.state.rule_state.clone()
        # Unless every row has room for two more tokens at most, which this step is likely to emit.
        if execution.overlaps and any(row.request.max_length - row.length > 2 for row in self.rows):
            self._ahead = execution.launch(self.state, self.tree, *self._visible_slots(unread=1))
        result = self._read(launched)
        for row, state in zip(self.rows, rule_state, strict=True):
            row.rule_state = state
        background = execution.background
        if background is not None and len(self.rows) == 1:
            self._count(background, len(result.tokens[0]), time.perf_counter() - begin)
        return result

    def _visible_slots(self, unread: int = 0) -> tuple[Tensor | None, Tensor]:
        """Return the slots of both caches that a step reads, after ``unread`` unread steps."""
        longest = max(row.length for row in self.rows) + unread * self.width
        keys = self.cache.keys(longest + self._nodes, self.target.device)
        return self.draft.keys(longest), keys

    def _read(self, launched: LaunchedStep) -> StepResult:
        """Read a step's tokens, which waits for the device."""
        result = launched.read()
        for place, (row, new) in enumerate(zip(self.rows, result.tokens, strict=True)):
            if not new:
                continue
            cached = self.caches.rows[place]
            # A prompt's tokens count once its logits are known; until then, entries may be NaN.
            cached.tokens += [*row.prompt[len(cached.tokens) : row.length], row.root, *new[:-1]]
            if self._drafts_from_cache and len(row.prompt) > 1:
                # The drafter has not processed the new tokens. After a prompt of one token, a
                # head's pairs are shifted by one slot.
                cached.entries = row.length
            row.length, row.root = row.length + len(new), new[-1]
            self._mark_written(place, row.length)
        self.draft.observe(result.tokens)
        return result

    def _count(self, background: BackgroundCompiler, tokens: int, seconds: float) -> None:
        """Count a step of a single row toward background compilation of its kind."""
        decision = self.rows[0].request.decision
        if not decision.on_device:
            decision = Decision.of()  # verification is not compiled
        tree = self._trees[0]
        work = partial(
            compile_steps, self.target, self.drafter, tree, draw=self._draw, decision=decision
        )
        kind = type(self.drafter), tree, self._draw is None, decision
        background.count(kind, tokens, seconds, work)


@torch.inference_mode()
def compile_steps(
    target: Target, drafter: Drafter, tree: TreeConfig, draw: Draw | None, decision: Decision
) -> None:
    """Compile the steps of a single row by decoding a few tokens of an arbitrary prompt."""
    length = min(COMPILED_PROMPT, target.stable_length // 2)
    limit = min(COMPILED_TOKENS, target.stable_length - length)
    options = ExecutionOptions(compiled_rows=1, capture=False)
    with using_device(target.device):
        engine = Engine(target, drafter.fresh().attach(target), tree, draw, execution=options)
        prompt = [token % target.vocab_size for token in range(length)]
        engine.admit([Answer(Request(prompt, limit, decision))])
        engine.prefill()
        emitted = 0
        while emitted < limit:
            emitted += len(engine.step().tokens[0])
