"""Large weights in the layout that oneDNN prefers, for a handful of tokens on an x86 CPU.

There, torch rearranges a weight in most calls, which can take longer than the multiplication. Here
it is rearranged once and kept. Small weights are not, because a call of oneDNN costs more
(``benchmarks/operations.py``).
"""

from __future__ import annotations

import platform
import threading
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from eagle_fsd.utils.host_memory import host_memory

#: Whether weights are packed on this machine.
SUPPORTED = torch.backends.mkldnn.is_available() and platform.machine() in ("x86_64", "AMD64")


class Minimum(NamedTuple):
    """Numbers of values of a weight, and of tokens, from which on packing pays."""

    values: int
    tokens: int


#: By data type.
MINIMA = {torch.float32: Minimum(values=2**19, tokens=2)}
if SUPPORTED and torch.ops.mkldnn._is_mkldnn_bf16_supported():
    MINIMA[torch.bfloat16] = Minimum(values=2**18, tokens=1)
#: Maximum number of tokens for which packing pays.
MAX_TOKENS = 64
#: Share of the machine's memory that packed weights may take.
MEMORY_SHARE = 0.25
#: Values of a weight that are compared to find out whether it has changed.
SAMPLES = 64


@dataclass(frozen=True)
class _Packed:
    """A packed weight, and what the weight was like: its address, version and some values."""

    weight: Tensor
    address: int
    version: int
    sample: Tensor

    def is_current(self, weight: Tensor) -> bool:
        """Whether a weight was neither replaced nor changed, other than in place by ``.data``."""
        return (self.address, self.version) == (weight.data_ptr(), weight._version)


_packed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_lock = threading.Lock()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``F.linear(x, weight, bias)``, up to rounding, for ``x`` ``[..., n]``."""
    if (
        should_pack(weight)
        and MINIMA[weight.dtype].tokens <= x.numel() // x.shape[-1] <= MAX_TOKENS
        and x.dtype is weight.dtype
        and not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"))
    ):
        product: Tensor = torch.ops.eagle_fsd.packed_linear.default(x, weight, bias)
        return product
    return F.linear(x, weight, bias)


def should_pack(weight: Tensor) -> bool:
    """Whether products with a weight use a packed copy, if oneDNN and memory allow it."""
    return (
        SUPPORTED
        # Other types, such as quantized weights, may know torch's own operators only.
        and type(weight) in (Tensor, nn.Parameter)
        and weight.device.type == "cpu"
        and weight.dtype in MINIMA
        and weight.numel() >= MINIMA[weight.dtype].values
    )


def _packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``F.linear(x, weight, bias)`` by the packed weight, if it can be packed."""
    packed = _find(weight)
    if packed is None:
        return F.linear(x, weight, bias)
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
    return product


# An operator of torch, because the compiler cannot trace how packed weights are found. Registered
# without `torch.library.custom_op`, whose wrapper takes time in every call.
_library = torch.library.Library("eagle_fsd", "DEF")
_library.define("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.impl("packed_linear", _packed_linear, "CPU")
torch.library.register_fake("eagle_fsd::packed_linear", F.linear, lib=_library)


def packed_bytes() -> int:
    """Return the memory that packed weights take, in bytes."""
    return sum(weight.nbytes for weight in _packed)


def forget_changed() -> None:
    """Drop packed weights that have changed; through ``.data``, only some values are compared."""
    with _lock:
        for weight, packed in list(_packed.items()):
            if not (packed.is_current(weight) and torch.equal(_sample(weight), packed.sample)):
                del _packed[weight]


def forget_packed(*modules: nn.Module) -> None:
    """Drop the packed weights of modules."""
    with _lock:
        for module in modules:
            for weight in (*module.parameters(), *module.buffers()):
                _packed.pop(weight, None)


def _find(weight: Tensor) -> Tensor | None:
    """Return the packed weight; None if it cannot be packed."""
    found: _Packed | None = _packed.get(weight)
    if found is not None and found.is_current(weight):
        return found.weight
    with _lock:
        _packed.pop(weight, None)
        if not _can_pack(weight):
            return None
        rearranged: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        _packed[weight] = _Packed(rearranged, weight.data_ptr(), weight._version, _sample(weight))
    return rearranged


def _can_pack(weight: Tensor) -> bool:
    """Whether oneDNN can multiply by it, changes of it are noticed, and memory is left."""
    return (
        weight.is_contiguous()
        and not weight.is_inference()
        and packed_bytes() + weight.nbytes <= MEMORY_SHARE * _total_memory()
    )


@cache
def _total_memory() -> int:
    """Return the machine's total memory in bytes."""
    return host_memory().total


def _sample(weight: Tensor) -> Tensor:
    """Return some of a weight's values, evenly spread."""
    values = weight.detach().flatten()
    return values[:: max(1, len(values) // SAMPLES)].clone()
