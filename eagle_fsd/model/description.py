"""Describe what the computation of modules depends on.

Compiled passes, CUDA graphs and caches are valid as long as two descriptions are equal.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import chain
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from eagle_fsd.model.attention import TREE_ATTENTION

#: Types of values that are compared as they are.
PLAIN = frozenset(
    (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
)
#: Attribute of a target for its pairs, see :func:`eagle_fsd.engines.hugging_face.generate`.
PAIRS = "_eagle_fsd_pairs"
#: Attributes that are left out, for gradients, saving, ``generate`` and warnings, and hooks' flags.
UNREAD = nn.Module().__dict__.keys() - {
    *("training", "_parameters", "_buffers", "_modules"),
    *("_forward_hooks", "_forward_pre_hooks"),
} | {"generation_config", "warnings_issued", PAIRS}


@dataclass(frozen=True)
class Description:
    """What modules compute with.

    ``structures`` are each module's data type under autocast, parts, attributes, hooks and
    addresses of weights, without those that it shares with modules before it; ``versions`` count
    changes in place.
    """

    structures: list[list[object]]
    versions: list[int]


def describe_modules(*modules: nn.Module) -> Description:
    """Describe modules.

    Not noticed are, for instance, assignments to global variables and to class attributes other
    than ``forward``, and changes in place of weights through ``.data``, of inference tensors, and
    of what a bound method or closure holds.
    """
    walk, structures = _Walk(), []
    for module in modules:
        device = next((item.device.type for item in module.parameters()), "cpu")
        autocast = torch.is_autocast_enabled(device)
        walk.found = [torch.get_autocast_dtype(device) if autocast else None]
        walk.add(module)
        structures.append(walk.found)
    return Description(structures, walk.versions)


class _Walk:
    """Collects the values that objects hold, each object once."""

    def __init__(self) -> None:
        self.found: list[object] = []
        self.versions: list[int] = []
        self._seen: dict[int, object] = {}  # keeps temporary objects alive, whose ids are its keys

    def add(self, value: Any) -> None:
        """Add a value with everything that it holds."""
        if type(value) in PLAIN:
            self.found.append(value)
            return
        if id(value) in self._seen:
            self._add_identity(value)
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._add_tensor(value)
        elif isinstance(value, (dict, list, tuple, set, frozenset)):
            self.found.append(len(value))
            for item in chain.from_iterable(value.items()) if isinstance(value, dict) else value:
                self.add(item)
        elif isinstance(value, partial):
            self._add_function(value.func)
            self.add(value.args)
            self.add(value.keywords)
        elif isinstance(value, (FunctionType, MethodType)):
            self._add_function(value)
        elif isinstance(value, type) or not hasattr(value, "__dict__"):
            self._add_identity(value)
        else:
            self._add_object(value)

    def _add_object(self, value: Any) -> None:
        """Add an object's type, and its attributes except for those that passes do not read."""
        kind: Any = type(value)
        found = self.found
        found.append(kind)
        if isinstance(value, nn.Module):
            self._add_function(kind.forward)
        unread = _unread(kind)
        for name, item in value.__dict__.items():
            if name in unread:
                continue
            if type(item) in PLAIN:
                # Passes in other threads replace "sdpa" for their duration, see folded_queries.
                found += name, "sdpa" if item == TREE_ATTENTION else item
            elif not isinstance(item, dict) or item:  # modules have many empty dictionaries
                found.append(name)
                self.add(item)

    def _add_function(self, function: Any) -> None:
        """Add which function this is, and its defaults and closure.

        Of objects in them other than functions and plain values, only the identity is added: what
        they hold may change with every call.
        """
        if isinstance(function, MethodType):
            self._add_identity(function.__self__)
            function = function.__func__
        self._add_identity(function)
        if isinstance(function, FunctionType):
            cells = [_contents(cell) for cell in function.__closure__ or ()]
            keywords = (function.__kwdefaults__ or {}).values()
            for item in (*(function.__defaults__ or ()), *keywords, *cells):
                if type(item) in PLAIN or isinstance(item, (FunctionType, MethodType)):
                    self.add(item)
                else:
                    self._add_identity(item)

    def _add_identity(self, value: Any) -> None:
        """Add which object this is. A reference tells it from a later one with the same id."""
        self.found.append(id(value))  # comes first, because comparing references compares tensors
        with suppress(TypeError):
            self.found.append(weakref.ref(value))

    def _add_tensor(self, tensor: Tensor) -> None:
        plain = type(tensor) in (Tensor, nn.Parameter)
        if not plain and is_traceable_wrapper_subclass(tensor):  # quantized, or distributed
            for name in tensor.__tensor_flatten__()[0]:
                self.add(getattr(tensor, name))
            return
        self.found += tensor.data_ptr(), tensor.dtype, tensor.shape
        if not tensor.is_inference():
            self.versions.append(tensor._version)


@cache
def _unread(kind: type) -> set[str]:
    """Return the attributes that passes do not read, or that follow from the other ones."""
    kept = (
        name
        for base in kind.__mro__
        for name, item in vars(base).items()
        if isinstance(item, cached_property)
    )
    # What the caches of a target allocated, and the projection whose rows a head has copied.
    unread = {"layout", "_projection"}
    if kind.__name__ == "MatmulLtState":  # of bitsandbytes, with outliers of the last inputs
        unread |= {"idx", "subB"}
    return unread.union(kept, UNREAD if issubclass(kind, nn.Module) else ())


def _contents(cell: CellType) -> object:
    """Return what a closure's cell holds; None if it is still empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
