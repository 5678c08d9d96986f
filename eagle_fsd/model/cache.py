"""Preallocated key-value caches with a length per row.

:class:`TreeCache` is an ordinary Hugging Face ``Cache`` whose layers write to given slots. Layers
with keys of the same shape share one tensor, as do their values, so that two operations move the
slots that verification kept, whatever the number of layers.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

#: The number of keys that attention reads is a multiple of this, so that kernels see few shapes.
VIEW_STEP = 64


class PlaneKind(NamedTuple):
    """What a layer's keys, or its values, look like."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    head_size: int


#: Number of planes of each kind that the layers of a model use.
Layout = Counter[PlaneKind]


class _Plane(NamedTuple):
    """The keys or the values of one layer.

    Views of the store are taken in every pass: compiled code cannot write to one of two tensors
    that share memory.
    """

    store: Tensor  # [planes, rows, length, heads, head size]
    number: int

    @property
    def rows(self) -> Tensor:
        """``[rows, length, heads, head size]``: a slot is contiguous."""
        return self.store[self.number]


class TreeCache(Cache):
    """Keys and values of several sequences, each with its own length.

    A pass over the model is :meth:`place` followed by an ordinary forward call: every layer writes
    its new keys and values to the given slots and attends to slots ``0 .. view - 1``. The caller's
    attention mask must exclude slots that do not belong to the sequence. Sliding-window layers keep
    all slots, too.

    The first pass allocates the memory (:attr:`nbytes`) from the keys and values that the layers
    pass, so neither shapes nor dtypes need to be known in advance.

    Args:
        rows: Number of sequences.
        length: Slots per sequence.
        layout: What earlier caches of the same model allocated; updated by this one. With it, all
            planes of a kind are allocated together.
    """

    def __init__(self, rows: int, length: int, layout: Layout | None = None) -> None:
        super().__init__(layers=[])
        self.rows = rows
        self.length = length
        self.layout = Layout() if layout is None else layout
        self.view = 0
        self._planes: dict[int, tuple[_Plane, _Plane]] = {}  # keys and values of each layer
        self._stores: list[Tensor] = []  # [planes, rows, length, heads, head size]
        self._free: dict[PlaneKind, list[_Plane]] = {}
        self._used = Layout()
        self._slots: dict[torch.device, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(store.nbytes for store in self._stores)

    def visible(self, needed: int) -> int:
        """Round a number of slots up to a multiple of :data:`VIEW_STEP`, at most the length.

        Args:
            needed: Slots that a pass must read.
        """
        return min(-(-needed // VIEW_STEP) * VIEW_STEP, self.length)

    def place(self, positions: Tensor, view: int) -> None:
        """Set the slots that the next forward call writes and reads.

        Args:
            positions: ``[B, S]`` slot of each new token in its row.
            view: Number of slots to read.
        """
        self.place_at(self.addresses(positions).flatten(), view)

    def place_at(self, addresses: Tensor, view: int) -> None:
        """Like :meth:`place`, for addresses computed in advance.

        Args:
            addresses: ``[B * S]`` result of :meth:`addresses`, flattened.
            view: Number of slots to read.
        """
        self.view = view
        self._slots = {addresses.device: addresses}

    def addresses(self, positions: Tensor) -> Tensor:
        """Convert slots within rows to indices into the flattened store.

        Args:
            positions: ``[B, ...]`` slots.

        Returns:
            Indices of the same shape.
        """
        first = torch.arange(positions.shape[0], device=positions.device) * self.length
        return positions + first.view(-1, *[1] * (positions.ndim - 1))

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values and return all visible ones; called by the attention layer.

        Args:
            key_states: ``[B, heads, S, head size]``.
            value_states: ``[B, heads, S, head size]``; heads and size may differ from the keys'.
            layer_idx: Index of the layer.
            *args: Ignored.
            **kwargs: Ignored.

        Returns:
            Keys and values, ``[B, heads, view, head size]``.
        """
        planes = self._planes.get(layer_idx)
        if planes is None:
            planes = self._allocate(_kind(key_states, 1)), self._allocate(_kind(value_states, 1))
            self._planes[layer_idx] = planes
        slots = self._slots.get(key_states.device)
        if slots is None:
            slots = next(iter(self._slots.values())).to(key_states.device)
            self._slots[key_states.device] = slots
        return self._write(planes[0], slots, key_states), self._write(
            planes[1], slots, value_states
        )

    def _write(self, plane: _Plane, slots: Tensor, states: Tensor) -> Tensor:
        """Write ``[B, heads, S, head size]``, and return all ``[B, heads, view, head size]``."""
        rows = plane.rows
        rows.flatten(0, 1).index_copy_(0, slots, states.transpose(1, 2).flatten(0, 1))
        return rows[: states.shape[0], : self.view].transpose(1, 2)

    def _allocate(self, kind: PlaneKind) -> _Plane:
        """Return an unused plane."""
        free = self._free.setdefault(kind, [])
        if not free:
            count = max(1, self.layout[kind] - self._used[kind])
            shape = (count, self.rows, self.length, kind.heads, kind.head_size)
            store = torch.zeros(shape, dtype=kind.dtype, device=kind.device)
            self._stores.append(store)
            free.extend(_Plane(store, number) for number in range(count))
        self._used[kind] += 1
        self.layout[kind] = max(self.layout[kind], self._used[kind])
        return free.pop(0)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots within each row, in every layer. All slots are read before any is written.

        Args:
            source: ``[B, A]`` slots to read.
            target: ``[B, A]`` slots to write.
        """
        source, target = self.addresses(source).flatten(), self.addresses(target).flatten()
        for store in self._stores:
            flat = store.view(store.shape[0], self.rows * self.length, -1)
            read = flat.index_select(1, source.to(store.device))
            flat.index_copy_(1, target.to(store.device), read)

    def move_row(self, source: int, target: int) -> None:
        """Overwrite a row with another, in every layer.

        Args:
            source: Index of the row to copy.
            target: Index of the row to overwrite.
        """
        for store in self._stores:
            store[:, target].copy_(store[:, source])

    def enlarged(self, length: int, kept: int) -> TreeCache:
        """Return a longer cache that starts with the first slots of this one.

        Args:
            length: Slots per sequence.
            kept: Number of slots to copy.
        """
        larger = TreeCache(self.rows, length, self.layout)
        for layer, planes in self._planes.items():
            keys, values = (larger._allocate(_kind(plane.rows, 2)) for plane in planes)
            larger._planes[layer] = keys, values
            for new, old in zip((keys, values), planes, strict=True):
                new.rows[:, :kept] = old.rows[:, :kept]
        return larger

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of visible slots and the offset of the first; see ``Cache``.

        Args:
            query_length: Ignored.
            layer_idx: Ignored.
        """
        return self.view, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0, because callers pass positions, which do not follow from slots; see ``Cache``.

        Args:
            layer_idx: Ignored.
        """
        return 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return the number of slots; see ``Cache``.

        Args:
            layer_idx: Ignored.
        """
        return self.length


def _kind(states: Tensor, heads: int) -> PlaneKind:
    """Describe keys or values, given the dimension that counts their heads."""
    return PlaneKind(states.device, states.dtype, states.shape[heads], states.shape[3])


def additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean attention mask to an additive one.

    Args:
        allowed: ``[B, S, L]`` bool, the keys that each query attends to.
        dtype: Data type of the mask.

    Returns:
        ``[B, 1, S, L]``.
    """
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]
