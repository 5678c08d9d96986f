"""How the steps of an engine run: eagerly, compiled, replayed from CUDA graphs, one step ahead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from eagle_fsd.model.attention import folded_queries
from eagle_fsd.model.compilation import (
    BackgroundCompiler,
    StepGraphs,
    compiled,
    has_graphs,
    renew_compiled,
)
from eagle_fsd.model.config import TreeConfig
from eagle_fsd.model.description import Description
from eagle_fsd.model.request import Decision
from eagle_fsd.model.stats import PhaseClock
from eagle_fsd.model.step import StepOutput, StepState, TokenDetail, decoding_step, token_details
from eagle_fsd.model.target import Target
from eagle_fsd.model.tree import DraftTree


@dataclass(frozen=True)
class ExecutionOptions:
    """How steps may run."""

    #: The only number of rows with which steps are compiled; 0 for none.
    compiled_rows: int = 0
    #: Compiles steps with one row when that pays, instead of ``compiled_rows``.
    background: BackgroundCompiler | None = None
    #: On CUDA, capture steps in graphs and replay them where possible.
    capture: bool = True


class Execution:
    """Runs the steps of one engine; :meth:`plan` decides how, whenever the rows change."""

    def __init__(self, target: Target, options: ExecutionOptions) -> None:
        self.target, self.options, self.clock = target, options, PhaseClock(target.device)
        self.background = options.background
        self.compiled_rows = options.compiled_rows  # 0 or 1 with `background`, see `renew`
        self.overlaps = False  # whether the next step may start before this one has been read
        self.graphs = StepGraphs(target.model)
        self.compiles = False  # whether the steps of the present rows are compiled
        self._captured_decision: Decision | None = None  # of all rows, if steps are captured

    def renew(self, modules: list[nn.Module], described: Description, changed: bool) -> None:
        """Drop what belongs to modules that have changed; use what has been compiled meanwhile."""
        if changed:
            self.graphs.clear()
        if self.compiled_rows or self.background is not None:
            renew_compiled(modules, described)
        if self.background is not None:
            if changed:
                self.background.forget()
            self.compiled_rows = int(self.background.has_compiled(self.target.model))

    def plan(self, state: StepState) -> None:
        """Decide how the steps of the rows run."""
        decisions = [group.decision for group in state.groups]
        device = self.target.device
        # Caches cannot be allocated in compiled passes.
        self.compiles = len(state.roots) == self.compiled_rows and state.cache.nbytes > 0
        fixed = not state.draft.waits and not any(
            decision.sampler.needs_prefix for decision in decisions
        )
        # Details are read from the device after the tokens, when another step could replace them.
        details = any(decision.details is not None for decision in decisions)
        # A rule that the host takes part in must not see rows that turn out to have ended.
        reads = details or not state.verifies_on_device
        self.overlaps = device.type == "cuda" and fixed and not reads
        captures = (
            self.options.capture
            and has_graphs(device)
            and fixed
            and state.verifies_on_device
            and self.target.one_device
            # Autocast frees its converted weights, which a graph would read, when it ends.
            and not torch.is_autocast_enabled(device.type)
        )
        self._captured_decision = decisions[0] if captures else None

    def launch(
        self, state: StepState, tree: TreeConfig, draft_keys: Tensor | None, keys: Tensor
    ) -> LaunchedStep:
        """Start a step; the shapes in it follow from the rows, the tree and the visible slots."""
        step = partial(decoding_step, state, draft_keys, keys, prepare=self.prepare)
        # Outside of the step, because it takes a lock.
        with folded_queries(self.target.model, state.folds):
            if self._captured_decision is not None:
                self.clock.enter("graph")
                sizes = len(state.roots), len(keys), 0 if draft_keys is None else len(draft_keys)
                key = *sizes, self._captured_decision, tree, self.compiles
                output = self.graphs.run(key, step, partial(step, enter=self.clock.enter))
            else:
                output = step(enter=self.clock.enter)
        self.clock.enter("host")
        return LaunchedStep(output)

    def prepare(
        self, part: Callable[..., Any], module: nn.Module | None, static: bool
    ) -> Callable[..., Any]:
        """Return a part of a step as it is, or compiled; see :data:`~.step.Prepare`."""
        if not (self.compiles and static) or module is None:
            return part
        version = compiled(part, module, trace=self.background is None)

        def run(*arguments: Any) -> Any:
            for argument in arguments:
                if isinstance(argument, DraftTree):
                    argument.mark_dynamic()
            return version(*arguments)

        return run


@dataclass
class StepResult:
    """The tokens of each row on the host; none for a row that joined during the step."""

    tokens: list[list[int]]
    origins: list[list[int]]
    faults: list[int]  # see VerificationInputs.row_faults
    details: list[list[TokenDetail] | None]  # None for rows that do not ask for them


class LaunchedStep:
    """A step that has been launched on the device."""

    def __init__(self, output: StepOutput) -> None:
        packed, self._details = output.packed, output.details
        # The row of its tensors for each row that is being decoded now; None if it joined since.
        self.order: list[int | None] = list(range(len(packed)))
        self._packed, self._copied = packed, None
        if packed.is_cuda:  # the next step may overwrite the tensors
            self._packed = torch.empty_like(packed, device="cpu", pin_memory=True)
            self._packed.copy_(packed, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(packed.device))

    def read(self) -> StepResult:
        """Wait for the step, and return what it emitted for every row."""
        if self._copied is not None:
            self._copied.synchronize()
        packed, width = self._packed.tolist(), (self._packed.shape[1] - 2) // 2
        rows = [[0, 0] if row is None else packed[row] for row in self.order]
        tokens = [values[2 : 2 + values[0]] for values in rows]
        return StepResult(
            tokens=tokens,
            origins=[values[2 + width : 2 + width + values[0]] for values in rows],
            faults=[values[1] for values in rows],
            details=self._read_details(tokens),
        )

    def _read_details(self, tokens: list[list[int]]) -> list[list[TokenDetail] | None]:
        """Return the details of every row's tokens, see :class:`StepResult`."""
        found: dict[int | None, tuple[list[list[float]], list[list[int]]]] = {}
        for places, values, alternatives in self._details:
            own = zip(values.tolist(), alternatives.tolist(), strict=True)
            found.update(zip(places, own, strict=True))
        return [
            token_details(*found[row], len(new)) if row in found else None
            for row, new in zip(self.order, tokens, strict=True)
        ]
