"""Run the passes of a decoding step faster: compiled by ``torch.compile``, replayed by CUDA graphs.

Both rest on the same property: the shapes in a step depend only on the number of rows, the number
of visible slots (:meth:`~eagle_fsd.model.cache.TreeCache.keys`) and the tree, and nothing in it
reads from the device.
"""

from __future__ import annotations

import logging
import os
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache, wraps
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from eagle_fsd.utils.text import one_line

log = logging.getLogger(__name__)

Result = TypeVar("Result")

#: Parts of the names of guards on what modules consist of.
MODULE_PARTS = "_modules[", "_parameters[", "_buffers[", "_hooks"
#: Kinds of guards on classes, functions and the names of their attributes.
CODE_GUARDS = (
    *("BUILTIN_MATCH", "CLASS_MATCH", "CLOSURE_MATCH", "DICT_NOT_CONTAINS", "HASATTR"),
    *("MODULE_MATCH", "NOT_PRESENT_IN_GENERIC_DICT"),
)
#: Compiled versions of a function: for one row and for several, and for every tree.
RECOMPILE_LIMIT = 128
#: Types of devices on which steps are captured in graphs.
GRAPH_DEVICES = ("cuda",)
#: CUDA graphs that an engine keeps, those used last, and shapes of eager steps that it remembers.
MAX_GRAPHS, MAX_SEEN = 64, 256
#: Steps with the same shapes that run before one is captured.
EAGER_STEPS = 3
#: Measurements of a trial, each of both kinds of decoding.
TRIAL_BLOCKS = 3
#: Smallest gain of a trial, as a factor, with which compiled passes are used.
MIN_GAIN = 1.03
#: Compilation is tried where eager decoding would take at least as many seconds, which is measured
#: for at least as many tokens.
MIN_SECONDS, MIN_TOKENS = 120.0, 2000


def compiled(
    function: Callable[..., Result], module: nn.Module | None = None
) -> Callable[..., Result]:
    """Return the compiled version of a function, a single graph that is made when it is called.

    The shapes of its arguments are constants, except for those that
    :class:`~eagle_fsd.model.cache.TreeCache` and :meth:`DraftTree.mark_dynamic
    <eagle_fsd.model.tree.DraftTree.mark_dynamic>` mark as dynamic: one version serves sequences of
    any length, and trees of any size. Where compilation fails, a warning is logged and the function
    runs as it is.

    Args:
        function: A function without data-dependent control flow.
        module: The module that the function runs, if any. Its version is for this module only, and
            does not notice changes inside of it, see :func:`renew_compiled`.
    """
    if module is None:
        return _compile_once(function)
    versions = _versions.setdefault(module, (None, {}))[1]
    if function not in versions:
        # torch finds compiled versions by the code of a function.
        code, names = function.__code__.replace(), function.__globals__
        own = FunctionType(code, names, function.__name__, function.__defaults__)
        versions[function] = _compile(own, _module_options(module))
    return versions[function]


def renew_compiled(*modules: nn.Module) -> None:
    """Forget what was compiled for modules if they have changed since the last call.

    Checking before every step whether each layer is what it was takes a notable part of a small
    model's step.

    Args:
        *modules: The modules; the compiled functions of each also run those before it.
    """
    described = [describe_modules(module) for module in modules]
    for count, module in enumerate(modules, 1):
        if _versions.get(module, (None,))[0] != described[:count]:
            _versions[module] = described[:count], {}


def _compile(
    function: Callable[..., Result], options: dict[str, Any] | None = None
) -> Callable[..., Result]:
    """Compile a function with options of ``torch.compile``."""
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, RECOMPILE_LIMIT)
    chosen = compile_graph(function, options)

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


_compile_once = cache(_compile)


def compile_graph(
    function: Callable[..., Result],
    options: dict[str, Any] | None = None,
    backend: str | Callable[..., Any] = "inductor",
) -> Callable[..., Result]:
    """Call ``torch.compile`` as :func:`compiled` needs it.

    Args:
        function: A function without data-dependent control flow.
        options: Options of the backend.
        backend: Compiles the graph.
    """
    return torch.compile(function, fullgraph=True, backend=backend, options=options)


def _module_options(module: nn.Module) -> dict[str, Any]:
    """Return the options for functions that run a module."""
    # On a CPU, small kernels take less time than Python code that calls them.
    options: dict[str, Any] = {
        "cpp_wrapper": all(weight.device.type == "cpu" for weight in module.parameters())
    }
    if hasattr(torch.compiler, "keep_tensor_guards_unsafe"):  # older versions have no filters
        options["guard_filter_fn"] = lambda guards: list(map(_is_about_calls, guards))
    return options


def _is_about_calls(guard: Any) -> bool:
    """Whether a guard is about what differs between calls, not about modules and code."""
    if any(part in guard.name for part in MODULE_PARTS) or guard.is_global:
        return False
    # The code of a rule may be an attribute of it.
    return guard.guard_type not in CODE_GUARDS or ".decision." in guard.name


def is_compilation_faster(
    seconds_per_token: Callable[[bool], float], tokens: float, trees: int = 1
) -> bool:
    """Compare compiled decoding with eager decoding, in turn.

    Args:
        seconds_per_token: Decodes a little, compiled or not, and returns the time that it took.
        tokens: Number of tokens to be decoded.
        trees: Number of shapes of trees among them; of each, drafting and verification are
            compiled, which is assumed to take as long as compiling all for the first one.

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
    others = (trees - 1) * (time.perf_counter() - begin)  # seconds for the other trees, at most
    ratios = [seconds_per_token(False) / seconds_per_token(True) for _ in range(TRIAL_BLOCKS)]
    gain = statistics.median(ratios)
    return gain >= MIN_GAIN and others <= eager * (1.0 - 1.0 / gain)


def describe_modules(*modules: nn.Module) -> tuple[object, ...]:
    """Describe modules as far as CUDA graphs and compiled functions depend on them.

    Args:
        *modules: The modules.

    Returns:
        Values that compare equal as long as the modules are in the same mode and have the same
        parts, hooks, active adapters, and addresses of weights. Changes in other attributes are not
        seen.
    """
    found: list[object] = []
    for module in (item for root in modules for item in root.modules()):
        found.append((type(module), module.training))
        for tensors in (module._parameters, module._buffers):
            found += [_addresses(item) for item in tensors.values() if item is not None]
        found.append((*module._forward_pre_hooks, -1, *module._forward_hooks))
        names = "_active_adapter", "_disable_adapters", "merged_adapters"  # of PEFT's layers
        found.append([str(module.__dict__.get(name)) for name in names])
    return tuple(found)


def _addresses(tensor: Tensor) -> tuple[int, ...]:
    """Return the addresses of a tensor's memory, or of that of its parts if it is quantized."""
    if is_traceable_wrapper_subclass(tensor):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return tuple(address for part in parts for address in _addresses(part))
    return (tensor.data_ptr(),)


def using_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a device torch's current one, whose streams CUDA events, graphs and kernels use.

    Args:
        device: Any device; those of other types than CUDA need nothing.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def has_graphs(device: torch.device) -> bool:
    """Return whether steps on a device can be captured in graphs.

    Args:
        device: The device.
    """
    return device.type in GRAPH_DEVICES


class StepGraphs:
    """CUDA graphs of decoding steps, one for each combination of shapes.

    The first :data:`EAGER_STEPS` with new shapes run eagerly, because a capture takes as long as
    several steps and many shapes of a batch whose rows end one by one do not recur. The next one is
    captured, and all others are replayed. Where a step cannot be captured, a warning is logged, and
    from then on all steps of that target run eagerly.

    Args:
        target: The model whose passes the steps contain.
    """

    def __init__(self, target: nn.Module) -> None:
        self._target = target
        self._graphs: dict[Hashable, tuple[Any, Any]] = {}  # the last ones were used last
        self._seen: dict[Hashable, int] = {}  # number of eager steps
        self._pool: Any = None  # the memory that all graphs share; only one of them runs at a time
        self._failed = False

    def __len__(self) -> int:
        """Return the number of shapes that are captured, or will be when they occur again."""
        return len(self._graphs) + len(self._seen)

    def clear(self) -> None:
        """Drop all graphs, because the tensors that they read have been replaced."""
        self._graphs.clear()
        self._seen.clear()

    def run(
        self,
        shapes: Hashable,
        step: Callable[[], Result],
        eager: Callable[[], Result] | None = None,
    ) -> Result:
        """Run a step on torch's current device.

        Args:
            shapes: Everything that the shapes in the step depend on.
            step: The step to capture; it keeps its state in tensors that it updates in place.
            eager: The same step for eager runs, which may do more on the host; default: ``step``.

        Returns:
            The result of the step. A replayed step overwrites the tensors that it returned before.
        """
        eager = eager or step
        if self._failed or self._target in _not_capturable:
            return eager()
        found = self._graphs.pop(shapes, None)
        if found is None:
            count = self._seen.pop(shapes, 0)
            if count < EAGER_STEPS:
                self._seen[shapes] = count + 1
                _drop_first(self._seen, MAX_SEEN)
                return eager()
            found = self._capture(step)
            if found is None:
                return eager()
        self._graphs[shapes] = found
        _drop_first(self._graphs, MAX_GRAPHS)
        graph, result = found
        graph.replay()
        return result

    def _capture(self, step: Callable[[], Result]) -> tuple[Any, Result] | None:
        """Capture a step; return None, and leave torch as it was, if that fails."""
        with _capturing:
            graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            if not self._graphs:  # the memory of graphs that are gone cannot be used again
                self._pool = torch.cuda.graph_pool_handle()
            try:
                with self._captured(graph, before.device):
                    result = step()
            except Exception as error:  # an error of the step itself is raised by its eager run
                if isinstance(error, torch.OutOfMemoryError):
                    self._failed = True  # another engine may have enough memory
                else:
                    _not_capturable.add(self._target)
                log.warning("decoding without CUDA graphs: %s", one_line(error))
                self.clear()
                self._recover(graph, before)
                return None
            return graph, result

    def _captured(self, graph: Any, device: torch.device) -> Any:
        # In its default mode, a capture fails if another thread allocates memory meanwhile.
        stream, mode = _capture_stream(device), "thread_local"
        return torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode=mode)

    def _recover(self, graph: Any, before: Any) -> None:
        """Undo what torch leaves behind where the end of a capture raises an exception.

        The thread stays on the stream of the capture, the allocator takes the capture to be in
        progress and refuses to release memory, and up to torch 2.11, the device's random number
        generator does so, too, and refuses to be used.
        """
        _abandoned.append(graph)
        names = "_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"  # until torch 2.7
        end = next(getattr(torch._C, name) for name in names if hasattr(torch._C, name))
        with suppress(RuntimeError):  # the allocator knows that the capture has ended
            end(before.device.index, self._pool)
            torch._C._cuda_releasePool(before.device.index, self._pool)
        torch.cuda.set_stream(before)
        self._pool = torch.cuda.graph_pool_handle()
        with suppress(RuntimeError), self._captured(torch.cuda.CUDAGraph(), before.device):
            torch.zeros(1, device=before.device)  # the end of a capture resets the generator
        torch.cuda.set_stream(before)


#: What the modules were like that functions have been compiled for, and these, by module.
_versions: weakref.WeakKeyDictionary[
    nn.Module, tuple[object, dict[Callable[..., Any], Callable[..., Any]]]
] = weakref.WeakKeyDictionary()
#: Models whose steps cannot be captured.
_not_capturable: weakref.WeakSet[nn.Module] = weakref.WeakSet()
#: Graphs whose capture failed: torch's allocator of pinned memory may refer to them forever.
_abandoned: list[Any] = []
#: Held during a capture: a process can have one at a time.
_capturing = threading.Lock()


@cache
def _capture_stream(device: torch.device) -> Any:
    """Return the stream of all captures on a device: each takes memory for matrix products."""
    return torch.cuda.Stream(device)


def _drop_first(items: dict[Hashable, Any], most: int) -> None:
    """Drop the first item of a dictionary that has more than so many."""
    if len(items) > most:
        del items[next(iter(items))]
