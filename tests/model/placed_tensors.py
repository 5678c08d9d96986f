"""Two simulated devices that compute: tensors on them are CPU tensors with a device of their own.

Unlike ``simulated_accelerator``, numbers are real, so results can be compared with those of one
device. An operation on tensors of two devices raises ``RuntimeError``, as it would on GPUs.

Once the devices are registered, torch takes them for this process's accelerator. Use them in a
process of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

#: The simulated devices.
DEVICES = ("gpu:0", "gpu:1")
#: Operations that may read from one device and write to another.
COPIES = ("aten::copy_", "aten::_to_copy", "aten::to")


class PlacedTensor(Tensor):
    """A CPU tensor that claims to be on another device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> PlacedTensor:
        placed = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            inner.stride(),
            inner.storage_offset(),
            None,
            inner.dtype,
            device=device,
        )
        placed.inner = inner
        return placed

    def tolist(self) -> Any:
        return self.inner.tolist()

    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(self._place_lists(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(self._place_lists(index), value)

    def _place_lists(self, index: Any) -> tuple[Any, ...]:
        """Replace lists, which torch converts without calling operations."""
        items = index if isinstance(index, tuple) else (index,)
        return tuple(_create(i, device=self.device) if isinstance(i, list) else i for i in items)

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), options: Any = None
    ) -> Any:
        return _compute(function, args, options or {})


class _Placement(TorchDispatchMode):
    """Place what is created on a simulated device, which has no placed arguments."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), options: Any = None
    ) -> Any:
        return _compute(function, args, options or {})


def _compute(function: Any, args: Any, options: dict[str, Any]) -> Any:
    """Run an operation on the CPU, and place its results."""
    flat, _ = tree_flatten((args, options))
    tensors = [item for item in flat if isinstance(item, Tensor)]
    found = {item.device for item in tensors if item.ndim or isinstance(item, PlacedTensor)}
    name = function._schema.name
    given = [item for item in flat if isinstance(item, torch.device)]
    if len(found) > 1 and name not in COPIES:
        raise RuntimeError(f"{name} mixes tensors on {sorted(map(str, found))}")
    device = given[0] if given else tensors[0].device if tensors else torch.device("cpu")
    if not given and name not in COPIES:
        device = next(iter(found), device)
    wrappers = {id(item.inner): item for item in tensors if isinstance(item, PlacedTensor)}
    inner_args, inner_options = tree_map(_unplace, (args, options))
    result = function(*inner_args, **inner_options)

    def place(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        if (argument := wrappers.get(id(item))) is not None:
            if argument.device == device:  # an operation in place
                return argument
            item = item.clone()  # a copy to another device
        return item if device.type == "cpu" else PlacedTensor(item, device)

    return tree_map(place, result)


def _unplace(item: Any) -> Any:
    if isinstance(item, PlacedTensor):
        return item.inner
    return torch.device("cpu") if isinstance(item, torch.device) else item


def _create(data: Any, *args: Any, device: Any = None, **options: Any) -> Tensor:
    made = _tensor(data, *args, **options)  # it creates tensors without calling operations
    return made if device is None else made.to(device)


_tensor = torch.tensor


@contextlib.contextmanager
def placed_tensors() -> Iterator[None]:
    """Place everything that is created on :data:`DEVICES`."""
    _setup_privateuseone_for_python_backend("gpu")
    mode = torch.inference_mode
    with pytest.MonkeyPatch.context() as patch, _Placement():
        patch.setattr(torch, "tensor", _create)
        patch.setattr(mode, "__enter__", lambda self: torch.set_grad_enabled(False))
        patch.setattr(mode, "__exit__", lambda self, *_: None)
        yield
