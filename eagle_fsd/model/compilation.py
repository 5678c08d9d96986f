"""Run the passes of a decoding step faster: compiled by ``torch.compile``, replayed by CUDA graphs.

Both rest on shapes that depend only on the numbers of rows and of visible slots, and on the tree.
"""

from __future__ import annotations

import logging
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from types import FunctionType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch._dynamo import exc

from eagle_fsd.model.description import Description
from eagle_fsd.model.packed_weights import should_pack
from eagle_fsd.utils.errors import is_out_of_memory
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
#: Maximum number of compiled versions of a function: for one row and for several, for every tree.
RECOMPILE_LIMIT = 128
#: Raised beyond this limit; the name depends on the version of torch.
LIMIT_HIT = tuple(item for name, item in vars(exc).items() if name.endswith("LimitHit"))
#: Maximum number of kinds of steps that are compiled in the background.
MAX_KINDS = 16
#: Types of devices on which steps are captured in graphs.
GRAPH_DEVICES = ("cuda",)
#: CUDA graphs that an engine keeps, those used last, and shapes of eager steps that it remembers.
MAX_GRAPHS, MAX_SEEN = 64, 256
#: Steps with the same shapes that run before one is captured.
EAGER_STEPS = 3
#: Steps that run eagerly after a capture ran out of memory.
RETRY_STEPS = 10_000
#: Seconds after which a thread that traces passes yields to those that decode meanwhile, which wait
#: for it at every operation.
SWITCH_INTERVAL = 5e-5
#: Seconds of eager decoding with one row after which passes are compiled in the background: about
#: as long as compiling takes.
BACKGROUND_SECONDS = 60.0
#: Minimum number of tokens until then: on a slow machine, a single short answer does not justify
#: compiling.
BACKGROUND_TOKENS = 500


def compiled(
    function: Callable[..., Result], module: nn.Module, trace: bool = True
) -> Callable[..., Result]:
    """Return the compiled version of a function, a single graph that is made when it is called.

    Shapes of its arguments are constants unless marked as dynamic, or until a call changes them. If
    compilation fails, a warning is logged and the function runs as it is. The version is for the
    module that the function runs, see :func:`renew_compiled`. Without ``trace``, nothing is
    compiled: the result uses versions that exist, else the function.
    """
    versions = _versions.setdefault(module, (None, {}))[1]
    if function not in versions:
        if not trace:
            return function
        # torch keeps compiled versions by the code of a function: a copy has its own.
        code, names = function.__code__.replace(), function.__globals__
        parts: Any = function.__name__, function.__defaults__, function.__closure__
        own = FunctionType(code, names, *parts)
        own.__kwdefaults__ = function.__kwdefaults__
        versions[function] = _Compiled(own, _module_options(module))
    version: _Compiled[Result] = versions[function]
    return version if trace else version.run_existing


def renew_compiled(modules: Sequence[nn.Module], described: Description) -> None:
    """Forget what was compiled for each module if it, or one before it, has changed."""
    for count, module in enumerate(modules, 1):
        if _versions.get(module, (None,))[0] != described.structures[:count]:
            _versions[module] = described.structures[:count], {}


def forget_compiled(*modules: nn.Module) -> None:
    """Drop what was compiled for modules."""
    for module in modules:
        _versions.pop(module, None)


class _Compiled(Generic[Result]):
    """A function and its version compiled with given options of ``torch.compile``."""

    def __init__(self, function: Callable[..., Result], options: dict[str, Any]) -> None:
        config: Any = torch._dynamo.config
        # The name of torch 2.6; later versions call it recompile_limit and accept both.
        config.cache_size_limit = max(config.cache_size_limit, RECOMPILE_LIMIT)
        self._function = function
        self._compiled = compile_graph(function, options)
        self._existing = torch._dynamo.run(self._compiled)
        self._begun = False

    def __call__(self, *arguments: Any) -> Result:
        """Call the version for these arguments; compile it if there is none."""
        if not self._begun and self._compiled is not self._function:
            log.info("compiling %s, which can take a minute", self._function.__name__)
            self._begun = True
        try:
            return self._compiled(*arguments)
        except LIMIT_HIT:
            _warn_once(f"not compiled: {self._function.__name__} has too many compiled versions")
            self._compiled = self._existing  # those that exist are still used
            return self._compiled(*arguments)
        except exc.TorchDynamoException as error:
            if self._compiled is self._function:
                raise
            _warn_once(f"not compiled: {type(error).__name__}: {one_line(error)}")
            self._compiled = self._existing = self._function
            return self._function(*arguments)

    def run_existing(self, *arguments: Any) -> Result:
        """Call the version for these arguments, or the function itself if there is none."""
        # While torch traces in one thread, compiled functions cannot be called in others.
        return (self._function if _tracing.locked() else self._existing)(*arguments)


@cache
def _warn_once(message: str) -> None:
    """Log a warning, unless this process has logged it before."""
    log.warning("%s", message)


def compile_graph(
    function: Callable[..., Result], options: dict[str, Any]
) -> Callable[..., Result]:
    """Call ``torch.compile``; without a compiler, log a warning and return the function itself."""
    missing = missing_compiler()
    if missing is not None:
        _warn_once(f"not compiled: {missing}")
        return function
    return torch.compile(function, fullgraph=True, options=options)


@cache
def missing_compiler() -> str | None:
    """Return what compiling C++ needs and this machine lacks, in words; None if nothing."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "torch.compile needs a C++ compiler: install g++, or set CXX to another one"
    has_headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    if not has_headers and sys.platform != "darwin":  # there, torch also searches the framework
        return "torch.compile needs Python's headers: install python3-dev, or its equivalent"
    return None


class BackgroundCompiler:
    """Compiles a model's passes in a thread once decoding has taken about as long as that takes."""

    def __init__(self) -> None:
        self._decoded: dict[Hashable, tuple[int, float]] = {}  # tokens and seconds
        self._started: set[Hashable] = set()

    def __reduce__(self) -> tuple[type[BackgroundCompiler], tuple[()]]:
        """Let a copy count by itself."""
        return BackgroundCompiler, ()

    def forget(self) -> None:
        """Count from the beginning, and let every kind be compiled again."""
        self._decoded.clear()
        self._started.clear()

    def has_compiled(self, module: nn.Module) -> bool:
        """Whether passes of a module have been compiled, and none are being compiled."""
        return not _tracing.locked() and bool(_versions.get(module, (None, {}))[1])

    def count(
        self, kind: Hashable, tokens: int, seconds: float, compile_steps: Callable[[], None]
    ) -> None:
        """Count an eager step, and compile steps of its kind in the background once that pays.

        ``kind`` is equal for steps that the same versions serve.
        """
        if kind in self._started or len(self._started) == MAX_KINDS:
            return
        before = self._decoded.pop(kind, (0, 0.0))
        now = before[0] + tokens, before[1] + seconds
        pays = now[0] >= BACKGROUND_TOKENS and now[1] >= BACKGROUND_SECONDS
        if pays and (missing := missing_compiler()) is not None:
            self._started.add(kind)
            _warn_once(f"not compiled: {missing}")
        elif pays and _tracing.acquire(blocking=False):  # released by _run
            self._started.add(kind)
            run = partial(self._run, compile_steps)
            threading.Thread(target=run, name="compilation", daemon=True).start()
        else:
            self._decoded[kind] = now
            _drop_first(self._decoded, MAX_SEEN)

    @staticmethod
    def _run(compile_steps: Callable[[], None]) -> None:
        """Compile steps, and release the lock that :meth:`count` acquired."""
        log.info("compiling in the background; meanwhile, answers are decoded without it")
        begin, interval = time.perf_counter(), sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL)
        try:
            compile_steps()
            seconds = time.perf_counter() - begin
            log.info("compiling took %.0f s: the next answers use what was compiled", seconds)
        except Exception as error:
            log.warning("not compiled: %s: %s", type(error).__name__, one_line(error))
        finally:
            sys.setswitchinterval(interval)
            _tracing.release()


def _module_options(module: nn.Module) -> dict[str, Any]:
    """Return the options for functions that run a module."""
    # On a CPU, small kernels take less time than Python code that calls them. But C++ code replaces
    # exceptions of the operator for packed weights, such as KeyboardInterrupt, by an error.
    options: dict[str, Any] = {
        "cpp_wrapper": all(
            weight.device.type == "cpu" and not should_pack(weight)
            for weight in module.parameters()
        )
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


def using_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device torch's current one: events, graphs and kernels use its streams."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def upload(values: Any, device: torch.device) -> Tensor:
    """Copy numbers to a device without waiting for it."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, device="cpu")
    if device.type == "cuda":  # only a copy from pinned memory is asynchronous
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def has_graphs(device: torch.device) -> bool:
    """Return whether steps on a device can be captured in graphs."""
    return device.type in GRAPH_DEVICES


class StepGraphs:
    """CUDA graphs of decoding steps, one for each combination of shapes.

    The first :data:`EAGER_STEPS` with new shapes run eagerly: many shapes of a batch whose rows end
    one by one do not recur. If a capture fails, a warning is logged, and all later steps of the
    target run eagerly; after running out of memory, only the next :data:`RETRY_STEPS` of this
    object.
    """

    def __init__(self, target: nn.Module) -> None:
        self._target = target
        self._graphs: dict[Hashable, tuple[Any, Any]] = {}  # the last ones were used last
        self._seen: dict[Hashable, int] = {}  # number of eager steps
        self._pool: Any = None  # the memory that all graphs share; only one of them runs at a time
        self._eager_steps = 0  # before the next capture, after one ran out of memory

    def __len__(self) -> int:
        """Return the number of shapes that are captured, or have run eagerly."""
        return len(self._graphs) + len(self._seen)

    def clear(self) -> None:
        """Drop all graphs, because the tensors that they read have been replaced."""
        self._graphs.clear()
        self._seen.clear()

    def run(
        self,
        shapes: Hashable,
        step: Callable[[], Result],
        eager: Callable[[], Result],
    ) -> Result:
        """Run a step on torch's current device, replayed from a graph where possible.

        The step keeps its state in tensors. ``shapes`` identifies their shapes and what the step
        does. The next replay overwrites the result. ``eager`` is the same step for eager runs,
        which may do more on the host.
        """
        if self._eager_steps or self._target in _not_capturable:
            self._eager_steps = max(0, self._eager_steps - 1)
            return eager()
        found = self._graphs.pop(shapes, None)
        if found is None:
            count = self._seen.pop(shapes, 0)
            # A capture fails if the compiler synchronizes the device meanwhile.
            if count < EAGER_STEPS or _tracing.locked():
                self._seen[shapes] = min(count + 1, EAGER_STEPS)
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
                if is_out_of_memory(error):
                    self._eager_steps = RETRY_STEPS
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

        The thread stays on the stream of the capture, the allocator refuses to release memory, and
        up to torch 2.11 the device's random number generator refuses to be used.
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


#: For each module, its description when functions were compiled for it, and these functions.
_versions: weakref.WeakKeyDictionary[
    nn.Module, tuple[object, dict[Callable[..., Any], _Compiled[Any]]]
] = weakref.WeakKeyDictionary()
#: Held while passes are compiled in the background. torch traces with state that threads share.
_tracing = threading.Lock()
#: Models whose steps cannot be captured.
_not_capturable: weakref.WeakSet[nn.Module] = weakref.WeakSet()
#: Graphs whose capture failed: torch's allocator of pinned memory may refer to them forever.
_abandoned: list[Any] = []
#: Held during a capture: a process can have one at a time.
_capturing = threading.Lock()


@cache
def _capture_stream(device: torch.device) -> Any:
    """Return the one stream for captures on a device: streams take memory for matrix products."""
    return torch.cuda.Stream(device)


def _drop_first(items: dict[Hashable, Any], limit: int) -> None:
    """Drop the first item of a dictionary that has more than ``limit``."""
    if len(items) > limit:
        del items[next(iter(items))]
