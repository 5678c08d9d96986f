"""Accelerators: the state that Accelerate keeps in class attributes, and reads by the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def reset_accelerator_state() -> None:
    """Forget every Accelerate setting, so that one test's training does not configure the next."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


class _Reads(TorchDispatchMode):
    """Lists operations for which the host would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero"):
            self.found.append(name)
        return function(*args, **(kwargs or {}))


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """List the reads of tensors by the host, which on a device would wait for it."""
    reads, tolist = _Reads(), Tensor.tolist

    def listed(tensor: Tensor) -> Any:
        reads.found.append("tolist")
        return tolist(tensor)

    with mock.patch.object(Tensor, "tolist", listed), reads:
        yield reads.found
