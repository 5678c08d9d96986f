"""Run the passes of a decoding step faster: compiled by ``torch.compile``, replayed by CUDA graphs.

Both rest on the same property: the shapes in a step depend only on the number of rows, the number
of visible slots (:meth:`~eagle_fsd.model.cache.TreeCache.keys`) and the tree, and nothing in it
reads from the device.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable, Hashable
from functools import cache, wraps
from typing import Any, TypeVar

import torch
from torch._dynamo.exc import TorchDynamoException

from eagle_fsd.utils.text import one_line

log = logging.getLogger(__name__)

Result = TypeVar("Result")

#: Compiled versions of a function: for one row and for several, and for every tree.
RECOMPILE_LIMIT = 128
#: CUDA graphs that are kept, the latest ones.
MAX_GRAPHS = 64
#: Measurements of a trial, each of both kinds of decoding.
TRIAL_BLOCKS = 3
#: Smallest gain of a trial, as a factor, with which compiled passes are used.
MIN_GAIN = 1.03
#: Compilation is tried where eager decoding would take at least as many seconds, which is measured
#: for at least as many tokens.
MIN_SECONDS, MIN_TOKENS = 120.0, 2000


@cache
def compiled(function: Callable[..., Result]) -> Callable[..., Result]:
    """Compile a function into a single graph when it is called.

    The shapes of its arguments are constants, except for those that
    :class:`~eagle_fsd.model.cache.TreeCache` marks as dynamic: one version serves sequences of any
    length. Where compilation fails, a warning is logged and the function runs as it is.

    Args:
        function: A function without data-dependent control flow.
    """
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, RECOMPILE_LIMIT)
    chosen = compile_graph(function)

    @wraps(function)
    def run(*arguments: Any) -> Result:
        nonlocal chosen
        try:
            return chosen(*arguments)
        except TorchDynamoException as error:
            if chosen is function:
                raise
            log.warning("not compiled: %s: %s", type(error).__name__, one_line(error))
            chosen = function
            return function(*arguments)

    return run


def compile_graph(function: Callable[..., Result]) -> Callable[..., Result]:
    """Call ``torch.compile`` with the options that :func:`compiled` needs.

    Args:
        function: A function without data-dependent control flow.
    """
    return torch.compile(function, fullgraph=True)


def is_compilation_faster(
    seconds_per_token: Callable[[bool], float], tokens: float, trees: int = 1
) -> bool:
    """Compare compiled decoding with eager decoding, in turn.

    Args:
        seconds_per_token: Decodes a little, compiled or not, and returns the time that it took.
        tokens: Number of tokens to be decoded.
        trees: Number of shapes of trees among them; each takes a compilation of its own.

    Returns:
        False if decoding is too short for the compilations to pay, if they gain nothing, or if
        ``TORCHDYNAMO_DISABLE`` is set.
    """
    if tokens < MIN_TOKENS or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return False
    seconds_per_token(False)  # warms up
    eager = tokens * seconds_per_token(False)
    if eager < MIN_SECONDS:
        return False
    begin = time.perf_counter()
    seconds_per_token(True)  # compiles
    others = (trees - 1) * (time.perf_counter() - begin)  # seconds that the other trees will take
    ratios = [seconds_per_token(False) / seconds_per_token(True) for _ in range(TRIAL_BLOCKS)]
    gain = statistics.median(ratios)
    return gain >= MIN_GAIN and others <= eager * (1.0 - 1.0 / gain)


class StepGraphs:
    """CUDA graphs of decoding steps, one for each combination of shapes.

    The first step with new shapes runs eagerly, which also allocates what libraries need; the
    second one is captured, and all others are replayed. Where a step cannot be captured, a warning
    is logged, and all steps run eagerly.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, tuple[Any, Any]] = {}
        self._seen: set[Hashable] = set()
        self._failed = False

    def run(self, shapes: Hashable, step: Callable[[], Result]) -> Result:
        """Run a step.

        Args:
            shapes: Everything that the shapes in the step depend on.
            step: The step; it keeps its state in tensors that it updates in place.

        Returns:
            The result of the step. A replayed step overwrites the tensors that it returned before.
        """
        if self._failed or shapes not in self._seen:
            self._seen.add(shapes)
            return step()
        if shapes not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self._pool()):
                    result = step()
            except RuntimeError as error:
                log.warning("decoding without CUDA graphs: %s", one_line(error))
                self._failed = True
                return step()
            if len(self._graphs) == MAX_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            self._graphs[shapes] = graph, result
        graph, result = self._graphs[shapes]
        graph.replay()
        return result

    def _pool(self) -> Any:
        """Return the memory that all graphs share; only one of them runs at a time."""
        for graph, _ in self._graphs.values():
            return graph.pool()
        return None
