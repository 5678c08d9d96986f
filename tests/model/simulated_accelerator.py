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
