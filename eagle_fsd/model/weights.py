"""Read weights that are not stored as plain tensors: split over processes, or quantized."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def whole(weight: Tensor) -> Tensor:
    """Return a weight in full if its rows or columns are split over processes, else itself.

    All of these processes must call this.
    """
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def plain_tensors(weight: Tensor) -> list[Tensor]:
    """Return the tensors that a weight consists of: several if it is quantized, such as scales.

    Split weights are gathered as by :func:`whole`.
    """
    weight = whole(weight)
    if not is_traceable_wrapper_subclass(weight):
        return [weight]
    names, _ = weight.__tensor_flatten__()
    return [part for name in names for part in plain_tensors(getattr(weight, name))]
