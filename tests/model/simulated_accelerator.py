"""Run code for an accelerator without one: shapes and devices are real, numbers are not.

The device ``gpu`` is a ``PrivateUse1`` backend whose tensors are fake. Nothing is computed, but
torch checks every operation as it would on a real accelerator: reading a number from the device
raises ``DataDependentOutputException`` or ``DynamicOutputShapeException``, where a GPU would stall,
and an operation on tensors of two devices raises as it would on GPUs.

Once the device is registered, torch takes it for this process's accelerator, which changes autocast
and checkpointing on the CPU as well. Use it in a process of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

#: The simulated devices.
DEVICES = ("gpu:0", "gpu:1")


@contextlib.contextmanager
def simulated_accelerator() -> Iterator[None]:
    """Simulate everything that is created on :data:`DEVICES`."""
    _register()
    tensor = torch.tensor

    def fake(data: Any, *args: Any, device: Any = None, **options: Any) -> Tensor:
        made = tensor(data, *args, **options)  # from a list it has no fake kernel
        if device is None:
            return made
        return torch.empty(made.shape, dtype=made.dtype, device=device)

    torch.tensor = fake
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
            yield
    finally:
        torch.tensor = tensor


class HostCopyError(RuntimeError):
    """Code copied something from the host to a simulated device."""


class _WithoutHostCopies(TorchDispatchMode):
    """Raise an exception where an operation reads the host's memory and writes the device's."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name in ("copy_", "to", "_to_copy") and isinstance(result, Tensor):
            source = args[1] if name == "copy_" else args[0]
            target = args[0] if name == "copy_" else result
            if source.device.type == "cpu" != target.device.type:
                raise HostCopyError(f"{name} of {tuple(source.shape)} from the host")
        return result


@contextlib.contextmanager
def without_host_copies() -> Iterator[None]:
    """Reject copies from the host inside :func:`simulated_accelerator`.

    A CUDA graph would read the host's memory again in every replay, where something else may be by
    then, and torch refuses to capture such copies.
    """
    tensor = torch.tensor

    def refuse(data: Any, *args: Any, device: Any = None, **options: Any) -> Tensor:
        if device is not None and torch.device(device).type != "cpu":
            raise HostCopyError("torch.tensor copies from the host")
        return tensor(data, *args, **options)

    torch.tensor = refuse
    try:
        with _WithoutHostCopies():
            yield
    finally:
        torch.tensor = tensor


@cache
def _register() -> None:
    _setup_privateuseone_for_python_backend("gpu")


def move(module: nn.Module, device: str = DEVICES[0]) -> nn.Module:
    """Replace all parameters and buffers by simulated ones."""
    for part in module.modules():
        for name, value in part._parameters.items():
            if value is not None:
                empty = torch.empty_like(value, device=device)
                part._parameters[name] = nn.Parameter(empty, requires_grad=False)
        for name, value in part._buffers.items():
            if value is not None:
                part._buffers[name] = torch.empty_like(value, device=device)
    return module


def receive_inputs(module: nn.Module, device: str) -> None:
    """Move a module's inputs to its device, as accelerate's hooks do."""

    def send(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(
            lambda item: item.to(device) if isinstance(item, Tensor) else item, (args, kwargs)
        )

    module.register_forward_pre_hook(send, with_kwargs=True)
