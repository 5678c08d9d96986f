"""One decoding step on a batch: draft a tree, score it, keep a path, compact the caches.

All state stays on the device; the host reads only the result of :meth:`Engine.step`.

Shape letters: ``B`` rows, ``S`` tokens, ``N`` tree nodes, ``V`` vocabulary, ``A`` the largest
number of tokens that one step can emit.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessor

from eagle_fsd.model import memory
from eagle_fsd.model.acceptance import ExactRule, FuzzyRule, rule_for
from eagle_fsd.model.acceptance.thresholds import fused_divergences
from eagle_fsd.model.arguments import name_of
from eagle_fsd.model.attention import folded_queries, query_groups
from eagle_fsd.model.cache import TreeCache, cache_slots
from eagle_fsd.model.compilation import (
    BackgroundCompiler,
    StepGraphs,
    compiled,
    has_graphs,
    renew_compiled,
    using_device,
)
from eagle_fsd.model.config import AcceptanceConfig, SamplingConfig, TreeConfig
from eagle_fsd.model.depth import DepthPolicy, levels_of, shapes_of
from eagle_fsd.model.description import describe_modules
from eagle_fsd.model.drafters.interface import Drafter
from eagle_fsd.model.prefix_cache import SPARE, PrefixCache
from eagle_fsd.model.random_numbers import RandomNumbers
from eagle_fsd.model.sampling import Prefix, Sampler
from eagle_fsd.model.stats import PhaseClock
from eagle_fsd.model.target import Target, TargetPass
from eagle_fsd.model.tree import DraftTree, Draw
from eagle_fsd.model.verify import (
    TARGET_FAULT,
    AcceptanceRule,
    Verification,
    VerificationInputs,
    verify,
    verify_root,
)

#: Prompt tokens that the target processes in one pass.
PREFILL_CHUNK = 512
#: Tokens below which moving or separating cached rows does not pay.
MIN_REUSED = 32
#: Decisions for which an engine keeps CUDA graphs.
MAX_DECISIONS = 16
#: Probabilities are read as multiples of this one, among integers.
PROBABILITY_UNIT = 2.0**-30
#: Prompt tokens and new tokens of the steps that are compiled in the background.
COMPILED_PROMPT, COMPILED_TOKENS = 32, 48
#: Slots below which the number of visible slots hardly changes the duration of a step.
MIN_SLOTS = 512
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
AnyEngine = TypeVar("AnyEngine", bound="Engine")
#: Begins a phase of a step, see :meth:`PhaseClock.enter`.
EnterPhase = Callable[[str], None]

#: Message of the error that NaN or infinite logits of the target raise.
BROKEN_LOGITS = (
    "the target produced NaN or infinite logits; check its weights and dtype (some models overflow"
    " in float16: try bfloat16 or float32)"
)


@dataclass(frozen=True)
class TokenDetail:
    """Log-probability, divergence and alternatives of one emitted token.

    Attributes:
        log_prob: The target's log-probability, before processors and sampling options; nats.
        divergence: Between target and draft at the token's parent, by the divergence that the
            acceptance options select; None if the parent is a leaf or was not expanded.
        top: The target's most likely tokens at this position and their log-probabilities, in
            descending order.
    """

    log_prob: float
    divergence: float | None
    top: list[tuple[int, float]]


@dataclass
class StepResult:
    """The tokens that a step emitted, on the host.

    Attributes:
        tokens: For each row, the emitted tokens, at least one; none for a row that joined during
            the step.
        origins: The :class:`~eagle_fsd.model.verify.Origin` of each token.
        faults: For each row, whose logits are NaN or infinite, see
            :meth:`~eagle_fsd.model.verify.VerificationInputs.row_faults`.
        details: The details of each token; None unless requested.
    """

    tokens: list[list[int]]
    origins: list[list[int]]
    faults: list[int]
    details: list[list[TokenDetail] | None] | None = None


@dataclass(frozen=True)
class Decision:
    """How the tokens of a row are decided. Rows with equal decisions are verified together.

    Attributes:
        sampling: Sampling options; the seed does not count.
        acceptance: Acceptance options.
        rule: The acceptance rule.
        processors: See :class:`Sampler`.
        warpers: See :class:`Sampler`.
        details: Number of most likely tokens in the :class:`TokenDetail` of every token; None for
            no details.
        sampler: Processes logits and samples, as the other attributes say.

    Raises:
        ValueError: A processor or warper keeps state or combines rows.
    """

    sampling: SamplingConfig
    acceptance: AcceptanceConfig
    rule: AcceptanceRule
    processors: tuple[LogitsProcessor, ...] = ()
    warpers: tuple[LogitsProcessor, ...] | None = None
    details: int | None = None
    sampler: Sampler = field(init=False, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        sampling: SamplingConfig | None = None,
        acceptance: AcceptanceConfig | None = None,
        rule: AcceptanceRule | None = None,
        processors: Sequence[LogitsProcessor] = (),
        warpers: Sequence[LogitsProcessor] | None = None,
        details: int | None = None,
    ) -> Decision:
        """Return the decision for options that may be missing.

        Args:
            sampling: Default: greedy.
            acceptance: Default: lossless.
            rule: Default: the one that ``acceptance`` selects.
            processors: Default: none.
            warpers: Default: those of ``sampling``.
            details: Default: no details.
        """
        options = (sampling or SamplingConfig()).model_dump(exclude={"seed"})
        acceptance = acceptance or AcceptanceConfig()
        return cls(
            SamplingConfig.from_dict(options),
            acceptance,
            rule or rule_for(acceptance),
            tuple(processors),
            None if warpers is None else tuple(warpers),
            details,
        )

    def __post_init__(self) -> None:
        rule, acceptance = self.rule, self.acceptance
        sampler = Sampler(
            self.sampling,
            self.processors,
            self.warpers,
            draw_from_draft=acceptance.selection == "sample" or rule.needs_drawn,
            # Details report the divergence that the acceptance options select, under any rule.
            warp_draft=rule.needs_warped_draft or acceptance.divergence_on == "warped",
            draw_uniform=rule.needs_uniform,
            block=isinstance(rule, ExactRule),
        )
        object.__setattr__(self, "sampler", sampler)  # the class is frozen

    def describe_fault(self, fault: int) -> str:
        """Return the message of the error that a fault raises.

        Args:
            fault: See :meth:`~eagle_fsd.model.verify.VerificationInputs.row_faults`; not 0.
        """
        if fault == TARGET_FAULT:
            return BROKEN_LOGITS
        item = (*self.processors, *(self.warpers or ()))[fault - TARGET_FAULT - 1]
        return (
            f"no token can be chosen: {name_of(item)} returned NaN or infinite scores, or -inf for"
            " every token"
        )

    @property
    def on_device(self) -> bool:
        """Whether verification consists of tensor operations that never wait for the device."""
        return self.sampler.on_device and self.rule.capturable


@dataclass(eq=False)
class Row:
    """A prompt to be continued.

    Attributes:
        ids: Token ids of the prompt, at least one.
        max_new_tokens: Maximum number of tokens added.
        decision: How tokens are decided.
        key: Key of the row's random numbers, see :mod:`~eagle_fsd.model.random_numbers`.
        prefix: The row's tokens for processors that read them.
        rule_state: The rule's state, of a row that goes on; default: that of a new row.
        length: Number of tokens in the target's cache, once they have been processed.
        root: The last token.
        prefilled: Number of prompt tokens that have been processed, without those that were cached.
    """

    ids: list[int]
    max_new_tokens: int
    decision: Decision
    key: int = 0
    prefix: Prefix | None = None
    rule_state: Tensor | None = None
    length: int = 0
    root: int = 0
    prefilled: int = 0

    @property
    def max_length(self) -> int:
        """Maximum number of tokens in the target's cache."""
        return len(self.ids) - 1 + self.max_new_tokens


@dataclass
class _Prompts:
    """Prompts that are being processed.

    Attributes:
        first: Index of the first row; the others follow it.
        rows: The rows.
        start: Position up to which they have been processed.
    """

    first: int
    rows: list[Row]
    start: int


@dataclass
class _Group:
    """Rows with equal decisions.

    Attributes:
        decision: Their decision.
        places: Their indices.
        index: ``[G]`` the indices on the device; None if these are all rows.
    """

    decision: Decision
    places: list[int]
    index: Tensor | None


@dataclass(frozen=True)
class _Shape:
    """The shape of a step's trees, and what its choice depended on.

    Attributes:
        shapes: The shapes to choose from.
        index: Index of the shape.
        setting: What else the duration of the step depends on.
    """

    shapes: tuple[TreeConfig, ...]
    index: int
    setting: tuple[int, int, bool]


#: Indices of rows, and what :func:`_describe` returned for them.
_Details = tuple[list[int], Tensor, Tensor]


class _Launched:
    """A step that the device has been told to take.

    Args:
        packed: ``[B, 2 + 2 A + P]``, see :meth:`Engine._step`.
        tokens: ``[B, A]`` emitted tokens.
        details: Results of :func:`_describe`, by group of rows.
        shape: Shape of its trees.

    Attributes:
        order: The row of these tensors for each row that is being decoded now; None for rows that
            have joined since.
    """

    def __init__(
        self, packed: Tensor, tokens: Tensor, details: list[_Details], shape: _Shape
    ) -> None:
        self.tokens, self.details, self.shape = tokens, details, shape
        self.order: list[int | None] = list(range(len(packed)))
        self._packed, self._copied = packed, None
        if packed.is_cuda:  # the next step may overwrite the tensors
            self._packed = torch.empty_like(packed, device="cpu", pin_memory=True)
            self._packed.copy_(packed, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(packed.device))

    def read_details(self, tokens: list[list[int]]) -> list[list[TokenDetail] | None] | None:
        """Return the details of every row's tokens.

        Args:
            tokens: The emitted tokens.
        """
        if not self.details:
            return None
        found: dict[int | None, tuple[list[list[float]], list[list[int]]]] = {}
        for places, values, alternatives in self.details:
            own = zip(values.tolist(), alternatives.tolist(), strict=True)
            found.update(zip(places, own, strict=True))
        return [
            _token_details(*found[row], len(new)) if row in found else None
            for row, new in zip(self.order, tokens, strict=True)
        ]

    def read(self) -> list[list[int]]:
        """Wait for the step, and return what it emitted for every row."""
        if self._copied is not None:
            self._copied.synchronize()
        packed = self._packed.tolist()
        return [[0, 0] if row is None else packed[row] for row in self.order]


def _ignore(_: str) -> None:
    """Begin no phase."""


def on_target_device(
    method: Callable[Concatenate[AnyEngine, Arguments], Result],
) -> Callable[Concatenate[AnyEngine, Arguments], Result]:
    """Let a method of an engine run on the target's device, which need not be torch's current one.

    Args:
        method: The method.
    """

    @wraps(method)
    def run(
        engine: AnyEngine, /, *arguments: Arguments.args, **options: Arguments.kwargs
    ) -> Result:
        with using_device(engine.target.device):
            return method(engine, *arguments, **options)

    return run


class Engine:
    """Rows that are decoded together, and their state on the device.

    :meth:`admit` adds prompts, which :meth:`prefill` processes chunk by chunk; then they take part
    in every :meth:`step` until :meth:`drop` removes them. Rows may be added and removed between any
    two steps.

    The rows being decoded come first in all tensors, in the order of :attr:`rows`. The target's
    cache holds all tokens of a row but the last, which is the root of the next tree.

    Args:
        target: The target.
        drafter: Proposes the trees.
        tree: Shape of the draft trees.
        draw: Samples the tokens of chains, see :meth:`Drafter.start`.
        caches: Caches of earlier calls.
        clock: Measures the phases of a step.
        compiled: Number of rows with which steps are compiled, see
            :mod:`~eagle_fsd.model.compilation`: every other number would take a compilation of its
            own. 0 for none. On CUDA, other steps compile the divergence.
        background: Compiles steps with one row when that pays, instead of ``compiled``.
        capture: On CUDA, capture steps in graphs and replay them where possible.
        batch_trees: Trees for so many rows or more, where they differ from ``tree``.
        depths: Chooses the depth of adaptive trees; default: one that has seen no steps.

    Attributes:
        tree: Shape of the next step's trees.
        rows: The rows being decoded.
        reserved: Number of rows, and of tokens in a row, that there is memory for.
        width: The most tokens that a step emits for a row.
        kind: Equal for engines that can decode the same requests; None if they cannot be exchanged.
        made_with: What else the engine depends on, see
            :class:`~eagle_fsd.model.idle_engines.IdleEngines`.
    """

    kind: Hashable = None
    made_with: object = None
    cache: TreeCache
    roots: Tensor  # [B] the last token of each row, not in the target's cache
    lengths: Tensor  # [B] tokens in the target's cache
    rule_state: Tensor  # [B, W] the state of the rows' acceptance rules
    read_state: Tensor  # [B, W] the state after the last step whose tokens have been read
    keys: Tensor  # [B] keys of the rows' random numbers

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        tree: TreeConfig,
        draw: Draw | None = None,
        caches: PrefixCache | None = None,
        clock: PhaseClock | None = None,
        compiled: int = 0,
        background: BackgroundCompiler | None = None,
        capture: bool = True,
        batch_trees: Mapping[int, TreeConfig] | None = None,
        depths: DepthPolicy | None = None,
    ) -> None:
        self.target, self.drafter, self.tree = target, drafter, tree
        self.depths = depths or DepthPolicy()
        self._trees = {0: tree, **(batch_trees or {})}
        self.caches, self._spare = caches or PrefixCache(), SPARE if caches else 0
        self.clock = clock or PhaseClock(target.device)
        self.compiled, self.capture = compiled, capture
        self._background, self._draw = background, draw
        self.rows: list[Row] = []
        trees = self._trees.values()
        self.draft = drafter.start(max(trees, key=lambda item: item.depth), draw)
        self.draft.use(tree)
        self._nodes = max(map(drafter.max_nodes, trees))
        self.width = max(item.depth for item in trees) + 2
        self._shapes = shapes_of(tree)
        self._counted = 0.0  # seconds of the steps that have been read
        self.reserved = 0, 0
        self._state = _new_state(target.device, 0, 0)
        self._prompts: deque[_Prompts] = deque()
        self._abandoned: set[Row] = set()  # rows of these prompts that are not needed any more
        self._groups: list[_Group] = []
        self._graphs = StepGraphs(target.model)
        self._decisions: list[Decision] = []  # those that graphs were captured for
        self._captures = self._overlaps = False
        self._ahead: _Launched | None = None

    @property
    def _compiles(self) -> bool:
        return len(self.rows) == self.compiled

    @property
    def reusable(self) -> bool:
        """Whether the engine has CUDA graphs, and :meth:`reset` makes it as good as new."""
        return len(self._graphs) > 0 and not self.draft.waits

    @property
    def joining(self) -> int:
        """Number of prompts that are being processed."""
        return sum(len(prompts.rows) for prompts in self._prompts)

    # -- rows ------------------------------------------------------------------------------------

    def row_bytes(self, max_length: int) -> memory.Bytes:
        """Return the memory that a row takes.

        Args:
            max_length: Maximum number of tokens in the row.
        """
        slots = self._slots(max_length)
        needed = (
            memory.row_bytes(self.target, self.drafter, tree, *slots)
            for tree in self._trees.values()
        )
        return max(needed, key=memory.Bytes.total)

    def fitting_rows(self, max_length: int) -> int:
        """Return how many rows fit in the free memory.

        Args:
            max_length: Maximum number of tokens in a row.
        """
        return self.target.agree(memory.fitting_rows(self.row_bytes(max_length)))

    @on_target_device
    def reserve(self, rows: int, max_length: int) -> None:
        """Allocate memory; on CUDA for somewhat longer rows, see :func:`cache_slots`.

        Args:
            rows: Number of rows.
            max_length: Maximum number of tokens in a row.

        Raises:
            ValueError: The caches belong to another model.
        """
        rows, max_length = max(rows, self.reserved[0]), max(max_length, self.reserved[1])
        if (rows, max_length) == self.reserved:
            return
        self.reserved = rows, self._room(max_length)
        self._folds = query_groups(self.target.model)  # the check of its first use decides
        length, draft_length = self._slots(max_length)
        caches = self.caches
        caches.reserve(self.target, self.drafter, rows, length, draft_length, self._spare)
        assert caches.target_cache is not None
        self.cache = caches.target_cache
        self._drafts_from_cache = draft_length > 0
        self._grow(rows, self._state[2].shape[1])
        self.draft.reserve(rows, max_length, caches.draft_cache if draft_length else None)

    @property
    def _extra(self) -> int:
        """Slots of the target's cache beyond a row's tokens."""
        ahead = self.width if self.target.device.type == "cuda" else 0  # see `step`
        return ahead + self._nodes

    def _room(self, max_length: int) -> int:
        """Return the tokens for which the slots that are allocated for fewer have room."""
        return cache_slots(max_length + self._extra, self.target.device) - self._extra

    def _slots(self, max_length: int) -> tuple[int, int]:
        """Return the slots per row of the target's cache and of the drafter's."""
        slots = self._room(max_length) + self._extra
        longest = slots - self._nodes
        draft = max(self.drafter.cache_length(longest, tree) for tree in self._trees.values())
        return slots, cache_slots(draft, self.target.device)

    @on_target_device
    def admit(self, rows: Sequence[Row]) -> None:
        """Add rows. What the caches hold of a prompt is not processed again.

        Args:
            rows: The rows.

        Raises:
            ValueError: The caches belong to another model.
        """
        self._renew()
        first = len(self.rows)
        for group in self._prompts:  # fill the gap that dropped rows left
            for place in range(len(group.rows)):
                self._swap(first + place, group.first + place)
            group.first, first = first, first + len(group.rows)
        self.reserve(first + len(rows), max(row.max_length for row in rows))
        width = max(row.decision.rule.state_size for row in rows)
        if width > self._state[2].shape[1]:
            self._grow(self.reserved[0], width)
        groups: list[_Prompts] = []
        cached = any(self.caches.tokens[first:])
        for place, row in enumerate(rows, first):
            start = self._reuse(place, row.ids) if cached else 0
            self.caches.epochs[place] = self.caches.epoch
            row.length, row.root = len(row.ids) - 1, row.ids[-1]
            if groups and abs(groups[-1].start - start) < MIN_REUSED:
                groups[-1].rows.append(row)
                groups[-1].start = min(groups[-1].start, start)
            else:
                groups.append(_Prompts(place, [row], start))
        self._prompts += groups
        roots, lengths, states, keys, read = (tensor[first:] for tensor in self._state)
        count = len(rows)
        roots[:count] = torch.tensor([row.root for row in rows])
        lengths[:count] = torch.tensor([row.length for row in rows])
        keys[:count] = torch.tensor([row.key for row in rows])
        for state, same, row in zip(states, read, rows, strict=False):
            own = row.rule_state
            if own is None:
                prompt = torch.tensor(row.ids, device=state.device)
                own = row.decision.rule.start([prompt])[0]
            state[: len(own)] = same[: len(own)] = own
        self.draft.admit(first, [row.ids for row in rows])

    def _renew(self) -> None:
        """Forget what was computed or captured with the modules if they have changed since."""
        self.target.register(self.drafter.reads)  # hooks are among the things that are compared
        modules = [item for item in (self.target.model, self.drafter.network) if item is not None]
        described = describe_modules(*modules)
        changed = self.caches.renew(described, keep=bool(self.rows or self._prompts))
        if changed:
            self._graphs.clear()
            if self.caches.target_cache is None:
                self.reserved = 0, 0
        if self.compiled or self._background is not None:
            renew_compiled(modules, described)
        if self._background is not None:
            if changed:
                self._background.forget()
            self.compiled = int(self._background.has_compiled(self.target.model))

    @on_target_device
    def prefill(self) -> list[Row]:
        """Process the next chunk of the prompts that were added first.

        Returns:
            The rows whose prompts are complete: the next step decodes them, too.
        """
        if not self._prompts:
            return []
        self.clock.enter("prefill")
        group = self._prompts[0]
        longest = max(row.length for row in group.rows)
        stop = min(group.start + PREFILL_CHUNK, longest)
        if group.start < stop:
            prompts = [torch.tensor(row.ids) for row in group.rows]
            ids = pad_sequence(prompts, batch_first=True).to(self.target.device)
            chunk = ids[:, group.start : stop]
            with self.cache.from_row(group.first):
                features = self.target.prefill(chunk, group.start, self.cache, self.drafter.reads)
            self.draft.prefill(group.first, ids, group.start, stop, features)
            for place, row in enumerate(group.rows, group.first):
                row.prefilled += max(0, min(stop, row.length) - group.start)
                self.caches.tokens[place] = row.ids[: min(stop, row.length)]
            group.start = stop
        if stop < longest:
            return []
        self._prompts.popleft()
        live = len(self.rows)
        for place, row in enumerate(group.rows):
            self._swap(live + place, group.first + place)
            if self._drafts_from_cache and row.length:
                self.caches.entries[live + place] = row.length - 1
        self._set_rows([*self.rows, *group.rows])
        if self._ahead:
            self._ahead.order += [None] * len(group.rows)
        return group.rows

    @on_target_device
    def drop(self, rows: Sequence[int]) -> list[int]:
        """Remove rows.

        Args:
            rows: Indices of the rows to remove.

        Returns:
            The previous index of every remaining row, in the new order.
        """
        order = list(range(len(self.rows)))
        for row in sorted(rows, reverse=True):
            self._swap(row, len(order) - 1)
            order[row] = order[-1]
            order.pop()
            self.caches.touch(len(order))
        self._set_rows([self.rows[row] for row in order])
        if self._ahead:
            self._ahead.order = [self._ahead.order[row] for row in order]
        return order

    def abandon(self, rows: Sequence[Row]) -> None:
        """Stop processing prompts whose rows are not needed any more.

        Args:
            rows: Rows that have been added.
        """
        self._abandoned.update(rows)
        self._prompts = deque(
            group for group in self._prompts if not self._abandoned.issuperset(group.rows)
        )
        self._abandoned.intersection_update(row for group in self._prompts for row in group.rows)

    @on_target_device
    def reset(self) -> None:
        """Remove all rows, and forget what the caches hold and how long steps took."""
        self._prompts.clear()
        self._abandoned.clear()
        self._ahead = None
        self._set_rows([])
        for row in range(self.caches.rows):
            self.caches.truncate(row, 0)
        self.clock, self._counted = PhaseClock(self.target.device), 0.0

    @on_target_device
    def clear(self, row: int) -> None:
        """Overwrite all that the caches hold of a row, even NaN, which no mask hides.

        Args:
            row: Index of the row.
        """
        self.caches.clear(row)

    @on_target_device
    def copy_row(self, source: int, target: int) -> None:
        """Overwrite a row with another.

        Args:
            source: Index of the row to copy.
            target: Index of the row to overwrite.
        """
        self._copy_rows([source], [target])
        self.rows[target].length = self.rows[source].length

    def _swap(self, one: int, other: int) -> None:
        if one != other:
            self._copy_rows([one, other], [other, one])

    def _copy_rows(self, source: list[int], target: list[int]) -> None:
        longest = max(len(self.caches.tokens[row]) for row in (*source, *target))
        longest = max([longest, *(row.length for row in self.rows)])
        self.caches.copy_rows(source, target, longest + self._nodes + self.width)
        self.draft.copy_rows(source, target)
        for tensor in self._state:
            tensor[target] = tensor[source]

    def _reuse(self, place: int, ids: list[int]) -> int:
        """Move the row with the longest prefix of a prompt to a place; return its length.

        If the row has many other tokens, a copy of it replaces the row that has not been used for
        the longest time.
        """
        caches, drafter = self.caches, self.drafter if self._drafts_from_cache else None
        shared = [caches.shared(row, ids, drafter) for row in range(place, caches.rows)]
        best = max(range(len(shared)), key=shared.__getitem__)
        if shared[best] < shared[0] + MIN_REUSED:
            best = 0  # moving a row costs more than processing a few tokens
        self._swap(place, place + best)
        oldest = min(range(place, caches.rows), key=caches.used.__getitem__)
        if oldest != place and len(caches.tokens[place]) >= shared[best] + MIN_REUSED:
            self._copy_rows([place], [oldest])
        caches.truncate(place, shared[best])
        caches.touch(place)
        return shared[best]

    def _grow(self, rows: int, width: int) -> None:
        """Resize the state: roots, lengths, rule states and keys."""
        before = self._state
        self._state = _new_state(self.target.device, rows, width)
        for new, old in zip(self._state, before, strict=True):
            new[tuple(map(slice, old.shape))] = old
        self._graphs.clear()  # they read and write the old tensors
        self._show()

    def _set_rows(self, rows: list[Row]) -> None:
        """Set the rows that steps decode."""
        self.rows = rows
        tree = self._trees[max(least for least in self._trees if least <= len(rows))]
        if tree != self._shapes[0]:
            self._shapes, self._counted = shapes_of(tree), self._spent()
            self._use(tree)
        self.draft.show(len(rows))
        self._show()
        groups: list[tuple[Decision, list[int]]] = []
        for place, row in enumerate(rows):
            for decision, places in groups:
                if decision is row.decision or decision == row.decision:
                    places.append(place)
                    break
            else:
                groups.append((row.decision, [place]))
        device = self.target.device
        self._groups = [_Group(decision, places, None) for decision, places in groups]
        if len(groups) > 1:
            for group in self._groups:
                group.index = torch.tensor(group.places, device=device)
            order = [place for group in self._groups for place in group.places]
            self._order = torch.tensor(order, device=device).argsort()
        on_cuda = device.type == "cuda"
        fixed = not self.draft.waits and not any(
            decision.sampler.needs_prefix for decision, _ in groups
        )
        # Details are read from the device after the tokens, when the next step has replaced them.
        details = any(decision.details is not None for decision, _ in groups)
        self._overlaps = on_cuda and fixed and not details
        self._captures = (
            self.capture
            and has_graphs(device)
            and fixed
            and len(groups) == 1
            and groups[0][0].on_device
            and self.target.one_device
        )
        if self._captures:
            decision = groups[0][0]
            if decision not in self._decisions:
                if len(self._decisions) == MAX_DECISIONS:
                    self._decisions.clear()
                    self._graphs.clear()
                self._decisions.append(decision)
            self._captured = self._decisions.index(decision)

    def _show(self) -> None:
        self.roots, self.lengths, self.rule_state, self.keys, self.read_state = (
            tensor[: len(self.rows)] for tensor in self._state
        )

    def _use(self, tree: TreeConfig) -> None:
        """Change the shape of the next step's trees."""
        if tree != self.tree:
            self.tree = tree
            self.draft.use(tree)

    # -- steps -----------------------------------------------------------------------------------

    @on_target_device
    def step(self) -> StepResult:
        """Emit at least one token for every row, except for rows that joined during the step.

        Returns:
            The tokens of each of :attr:`rows`.
        """
        begin = time.perf_counter()
        launched, self._ahead = self._ahead or self._launch(), None
        state = self.rule_state.clone()
        # The device runs the next step while the host reads the tokens of this one, unless no row
        # has room for more. The root is not part of a row's length.
        if self._overlaps and any(row.max_length - row.length > 2 for row in self.rows):
            self._ahead = self._launch(unread=1)
        result = self._read(launched)
        self.read_state.copy_(state)
        if self._background is not None and len(self.rows) == 1 and not self._compiles:
            self._count(self._background, len(result.tokens[0]), time.perf_counter() - begin)
        return result

    def _count(self, background: BackgroundCompiler, tokens: int, seconds: float) -> None:
        """Count an eager step of a single row, whose like may be compiled."""
        decision = self.rows[0].decision
        if not decision.on_device:
            decision = Decision.of()  # verification is not compiled
        tree = self._trees[0].updated(adaptive=False)
        work = partial(compile_steps, self.target, self.drafter, tree, self._draw, decision)
        background.count((tree, self._draw is None, decision), tokens, seconds, work)

    def _launch(self, unread: int = 0) -> _Launched:
        """Start a step on the device, without waiting for anything.

        Args:
            unread: Number of steps before this one whose tokens have not been read.
        """
        shape = self._choose_shape()
        draft_keys, keys = self._views(unread)
        with self._folded():
            eager = partial(self._step, draft_keys, keys, self.clock.enter)
            if self._captures:
                self.clock.enter("graph")
                step = partial(self._step, draft_keys, keys)
                shapes = len(self.rows), len(keys), 0 if draft_keys is None else len(draft_keys)
                key = *shapes, self._captured, self.tree, self._compiles
                result = self._graphs.run(key, step, eager)
            else:
                result = eager()
        packed, tokens, details = result
        self.clock.enter("host")
        return _Launched(packed, tokens, details, shape)

    def _choose_shape(self) -> _Shape:
        """Set the shape of the next step's trees, from what has been read so far."""
        longest = max(row.length for row in self.rows)
        slots = max(longest, MIN_SLOTS).bit_length()
        setting = len(self.rows).bit_length(), slots, self._compiles
        # Processes that decode together measure different times.
        if len(self._shapes) == 1 or self.target.group is not None:
            return _Shape(self._shapes, 0, setting)
        index = self.depths.choose(self._shapes, setting)
        self._use(self._shapes[index])
        return _Shape(self._shapes, index, setting)

    def _folded(self) -> AbstractContextManager[None]:
        """Select the attention of steps; not a part of :meth:`_step`, because it takes a lock."""
        return folded_queries(self.target.model, self._folds)

    def _step(
        self, draft_keys: Tensor | None, keys: Tensor, enter: EnterPhase = _ignore
    ) -> tuple[Tensor, Tensor, list[_Details]]:
        """Take a step on the device; its state changes in place. Call it inside :meth:`_folded`.

        Args:
            draft_keys: Visible slots of the drafter's cache.
            keys: Visible slots of the target's cache.
            enter: Called at the beginning of every phase.

        Returns:
            What the host reads (``[B, 2 + 2 A + P]``: count, whose logits are broken, tokens,
            origins, and the probabilities of the best path if the tree is adaptive), the emitted
            tokens, and the results of :func:`_describe`.
        """
        tree, scored = self._score_tree(draft_keys, keys, enter)
        enter("verify")
        if self._compiles and len(self._groups) == 1 and self._groups[0].decision.on_device:
            trace = self._background is None
            return compiled(Engine._conclude, self.target.model, trace)(self, tree, scored)
        with fused_divergences(bool(self.compiled) and self._background is None):
            return self._conclude(tree, scored, enter)

    def _conclude(
        self, tree: DraftTree, scored: TargetPass, enter: EnterPhase = _ignore
    ) -> tuple[Tensor, Tensor, list[_Details]]:
        """Verify a tree and keep a path of it, see :meth:`_step`."""
        kept, faults, details = self._judge(tree, scored.logits)
        enter("cache")
        self._commit(tree, scored.features, kept)
        parts = [kept.count[:, None], faults[:, None], kept.tokens, kept.origins]
        if tree.best_path is not None:
            parts.append((tree.best_path / PROBABILITY_UNIT).long())
        return torch.cat(parts, 1), kept.tokens, details

    def _views(self, unread: int = 0) -> tuple[Tensor | None, Tensor]:
        """Return the slots of both caches that a step reads.

        Args:
            unread: Number of earlier steps whose tokens have not been read.
        """
        longest = max(row.length for row in self.rows) + unread * self.width
        keys = self.cache.keys(longest + self._nodes, self.target.device)
        return self.draft.keys(longest), keys

    def _score_tree(
        self, draft_keys: Tensor | None, keys: Tensor, enter: EnterPhase
    ) -> tuple[DraftTree, TargetPass]:
        """Draft a tree for every row, and run the target on it."""
        enter("draft")
        draft, score, network = self.draft.draft, self.target.forward_tree, self.drafter.network
        if self._compiles:  # compiled functions belong to the models, not to engines
            trace = self._background is None
            if self.draft.on_device:
                draft = partial(compiled(type(self.draft).draft, network, trace), self.draft)
            score = partial(compiled(Target.forward_tree, self.target.model, trace), self.target)
        tree = draft(self.roots, draft_keys, RandomNumbers(self.keys, self.lengths))
        if self._compiles:
            tree.mark_dynamic()
        enter("target")
        reads = self.drafter.reads
        return tree, score(tree, self.lengths, keys, self.cache, reads, self._folds)

    def _judge(
        self, tree: DraftTree, logits: Tensor
    ) -> tuple[Verification, Tensor, list[_Details]]:
        """Sample at every node and keep a path of the tree, group by group.

        Returns:
            The kept paths, ``[B]``: whose logits are broken, and the details.
        """
        random = RandomNumbers(self.keys, self.lengths)
        results, faults, details = [], [], []
        for group in self._groups:
            decision, index = group.decision, group.index
            part, state, numbers, scores = tree, self.rule_state, random, logits
            if index is not None:
                part, scores, state = tree.of_rows(index), logits[index], state[index]
                numbers = RandomNumbers(random.keys[index], random.positions[index])
            state = state[:, : decision.rule.state_size]
            prefixes: list[Any] = []
            if decision.sampler.needs_prefix:
                prefixes = [self.rows[place].prefix for place in group.places]
            kept, inputs, keys, state = _judge(decision, part, scores, numbers, prefixes, state)
            if index is None:
                self.keys.copy_(keys)
                self.rule_state[:, : state.shape[1]] = state
            else:
                self.keys[index] = keys
                self.rule_state[index, : state.shape[1]] = state
            results.append(kept)
            faults.append(inputs.row_faults(kept))
            if decision.details is not None:
                details.append((group.places, *_describe(decision, inputs, kept)))
        if len(results) == 1:
            return results[0], faults[0], details
        return Verification.joined(results, self._order), torch.cat(faults)[self._order], details

    def _commit(self, tree: DraftTree, features: Tensor, kept: Verification) -> None:
        """Compact the target's cache to the kept path."""
        if tree.size > 1:
            source = self.lengths[:, None] + kept.path
            slots = torch.arange(kept.path.shape[1], device=source.device)
            # Beyond the path, copy the root's slot onto itself.
            target = torch.where(slots < kept.count[:, None], slots, kept.path)
            self.cache.move(source, self.lengths[:, None] + target)
        self.lengths.add_(kept.count)
        self.roots.copy_(kept.tokens.gather(1, kept.count[:, None] - 1)[:, 0])
        self.draft.commit(features, kept)

    def _read(self, launched: _Launched) -> StepResult:
        """Read a step's tokens, which waits for the device."""
        packed, width = launched.read(), launched.tokens.shape[1]
        tokens = [values[2 : 2 + values[0]] for values in packed]
        origins = [values[2 + width : 2 + width + values[0]] for values in packed]
        for place, (row, new) in enumerate(zip(self.rows, tokens, strict=True)):
            if not new:
                continue
            self.caches.tokens[place] += [row.root, *new[:-1]]
            if self._drafts_from_cache and len(row.ids) > 1:
                # The drafter has not processed the new tokens. After a prompt of one token, a
                # head's pairs are shifted by one slot.
                self.caches.entries[place] = row.length
            row.length, row.root = row.length + len(new), new[-1]
            if row.prefix is not None:
                row.prefix.append(launched.tokens[launched.order[place], : len(new)])
        self.draft.observe(tokens)
        if len(launched.shape.shapes) > 1:
            paths = [values[2 + 2 * width :] for values in packed]
            self._update_depths(launched.shape, tokens, paths)
        faults = [values[1] for values in packed]
        return StepResult(tokens, origins, faults, launched.read_details(tokens))

    def _spent(self) -> float:
        """Return the seconds of the steps that have been read."""
        return sum(self.clock.seconds.values()) - self.clock.seconds["prefill"]

    def _update_depths(
        self, shape: _Shape, tokens: list[list[int]], paths: list[list[int]]
    ) -> None:
        """Tell :attr:`depths` what a step emitted and how long it took."""
        self.clock.collect()
        spent = self._spent()
        if spent > self._counted:  # the device has passed the step's boundaries
            self.depths.add_time(shape.shapes, shape.setting, shape.index, spent - self._counted)
            self._counted = spent
        results = [
            (len(new) - 1, [PROBABILITY_UNIT * value for value in path])
            for new, path in zip(tokens, paths, strict=True)
            if new
        ]
        self.depths.add_step(results, levels_of(shape.shapes[shape.index]))


@torch.inference_mode()
def compile_steps(
    target: Target, drafter: Drafter, tree: TreeConfig, draw: Draw | None, decision: Decision
) -> None:
    """Compile the steps of a single row by decoding a few tokens of an arbitrary prompt."""
    length = min(COMPILED_PROMPT, target.stable_rope_length // 2)
    limit = min(COMPILED_TOKENS, target.stable_rope_length - length)
    drafter = drafter.fresh().attach(target)
    engine = Engine(target, drafter, tree, draw, compiled=1, capture=False)
    engine.admit([Row([token % target.vocab_size for token in range(length)], limit, decision)])
    engine.prefill()
    emitted = 0
    while emitted < limit:
        emitted += len(engine.step().tokens[0])


def _judge(
    decision: Decision,
    tree: DraftTree,
    logits: Tensor,
    random: RandomNumbers,
    prefixes: Sequence[Prefix],
    state: Tensor,
) -> tuple[Verification, VerificationInputs, Tensor, Tensor]:
    """Sample at every node and keep a path.

    Returns:
        The kept path, what it was chosen from, the next keys of random numbers, and the next state
        of the rule.
    """
    inputs = decision.sampler(tree, logits, random, prefixes)
    inputs.state = state
    if tree.size == 1:
        kept = verify_root(inputs)
    else:
        options = decision.acceptance
        kept = verify(inputs, decision.rule, options.fallback, options.selection, options.price)
    keys = random.keys if decision.sampler.greedy else random.advanced(tree, kept)
    return kept, inputs, keys, decision.rule.advance(inputs, kept)


def _describe(
    decision: Decision, inputs: VerificationInputs, kept: Verification
) -> tuple[Tensor, Tensor]:
    """Collect the details of every emitted token.

    Returns:
        ``[B, A, 2 + count]``: log-probability, divergence, and the largest log-probabilities;
        ``[B, A, count]``: the tokens of the latter.
    """
    first = torch.arange(len(kept.path), device=kept.path.device)[:, None] * inputs.tree.size
    rows = inputs.raw.rows((kept.path + first).flatten()).unflatten(0, kept.path.shape)
    own = rows.gather(-1, kept.tokens[:, :, None])
    options = decision.acceptance
    rule = FuzzyRule(0.0, options.divergence, divergence_on=options.divergence_on)
    divergence = rule.divergences(inputs).gather(1, kept.path)[:, :, None]
    assert decision.details is not None
    top = rows.topk(min(decision.details, rows.shape[-1]), -1)
    return torch.cat([own, divergence, top.values], -1), top.indices


def _new_state(device: torch.device, rows: int, width: int) -> tuple[Tensor, ...]:
    """Allocate roots, lengths, rule states, keys, and the rule states that have been read."""
    roots, lengths, keys = (torch.zeros(rows, dtype=torch.long, device=device) for _ in range(3))
    states = [torch.zeros(rows, width, device=device) for _ in range(2)]
    return roots, lengths, states[0], keys, states[1]


def _token_details(
    values: list[list[float]], alternatives: list[list[int]], count: int
) -> list[TokenDetail]:
    """Convert a row of the result of :func:`_describe`."""
    return [
        TokenDetail(
            log_prob,
            None if math.isinf(divergence) else divergence,
            list(zip(tokens, top, strict=True)),
        )
        for (log_prob, divergence, *top), tokens in zip(
            values[:count], alternatives[:count], strict=True
        )
    ]
