"""Preallocated key-value caches with a length per row.

:class:`TreeCache` is an ordinary Hugging Face ``Cache`` whose layers write to given slots. From a
model's second cache on, all keys and values of one shape are in one tensor, so two operations move
the slots that verification kept, whatever the number of layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from eagle_fsd.model.compilation import upload, using_device

#: Minimum step between the numbers of slots that passes read, see :meth:`TreeCache.keys`. It is
#: larger on CUDA, where every number takes a graph of its own and unused slots cost less.
VIEW_STEP, CUDA_VIEW_STEP = 16, 256


class PlaneKind(NamedTuple):
    """Device, data type and shape of a layer's keys, or of its values."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    head_size: int


#: Number of planes of each kind that the layers of a model use.
Layout = Counter[PlaneKind]


def cache_slots(needed: int, device: torch.device) -> int:
    """Return the number of slots to allocate: on CUDA rounded up, for few different sizes."""
    step = CUDA_VIEW_STEP if device.type == "cuda" else 1
    return -(-needed // step) * step


def _separate(plane: Tensor) -> Tensor:
    """Return a tensor on the same memory; on CPUs and CUDA no view: compiled code copies views."""
    if plane.device.type in ("cpu", "cuda"):
        with using_device(plane.device):  # torch exports tensors of the current device only
            plane = torch.from_dlpack(plane)
    torch._dynamo.maybe_mark_dynamic(plane, 1)
    return plane


class TreeCache(Cache):
    """Keys and values of several sequences, each with its own length.

    A pass over the model is :meth:`place` followed by an ordinary forward call: every layer writes
    to the given slots and attends to the first ``L`` slots; the caller's mask hides those that
    belong to no sequence. The first pass allocates the memory; with ``layout``, what earlier caches
    of the same model allocated, all planes of a kind together.
    """

    def __init__(self, rows: int, length: int, layout: Layout | None = None) -> None:
        super().__init__(layers=[])
        self.rows = rows
        self.length = length
        self.layout = Layout() if layout is None else layout
        # Keys and values of each layer: [rows, length, heads, head size], so a slot is contiguous.
        self._planes: dict[int, tuple[Tensor, Tensor]] = {}
        self._stores: list[Tensor] = []  # [planes, rows, length, heads, head size]
        self._free: dict[PlaneKind, list[Tensor]] = {}
        self._used = Layout()
        self._positions: Tensor | None = None  # [length]
        self._row_offsets: Tensor | None = None  # [rows, 1] where each row begins among all slots
        self._first = 0  # row that the first sequence of a pass belongs to
        self._view: Tensor  # [L] the slots that the next pass reads, see place
        self._slots: dict[torch.device, Tensor] = {}  # [B * S] where to write, among all slots

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(store.nbytes for store in self._stores)

    @contextmanager
    def from_row(self, first: int) -> Iterator[None]:
        """Let passes write and read rows ``first`` and after it, instead of row 0 and after it."""
        self._first = first
        try:
            yield
        finally:
            self._first = 0

    def keys(self, needed: int, device: torch.device) -> Tensor:
        """Return the slots ``[L]`` that a pass reads: ``needed``, rounded up to one of few shapes.

        All results share their memory, which CUDA graphs read.
        """
        step = CUDA_VIEW_STEP if device.type == "cuda" else VIEW_STEP
        step = max(step, 1 << max(0, (needed - 1).bit_length() - 4))
        view = min(-(-needed // step) * step, self.length)
        if self._positions is None:
            self._positions = torch.arange(self.length, device=device)
        keys = self._positions[:view]
        torch._dynamo.maybe_mark_dynamic(keys, 0)
        return keys

    def place(self, slots: Tensor, keys: Tensor) -> None:
        """Set the slots ``[B, S]`` that the next forward call writes, and those that it reads."""
        self._view = keys
        if self._row_offsets is None:
            self._row_offsets = torch.arange(self.rows, device=slots.device)[:, None] * self.length
        first = self._row_offsets[self._first :][: slots.shape[0]]
        self._slots = {slots.device: (first + slots).flatten()}

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values ``[B, heads, S, head size]`` and return all visible ones."""
        return self.write(key_states.transpose(1, 2), value_states.transpose(1, 2), layer_idx)

    def write(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Write new keys and values ``[B, S, heads, head size]``; see :meth:`update`."""
        planes = self._planes.get(layer)
        if planes is None:
            planes = self._allocate(_kind(keys)), self._allocate(_kind(values))
            self._planes[layer] = planes
        device = keys.device
        if device not in self._slots:
            self._slots[device] = next(iter(self._slots.values())).to(device)
        slots, view = self._slots[device], self._view.shape[0]
        rows = slice(self._first, self._first + keys.shape[0])
        planes[0].flatten(0, 1).index_copy_(0, slots, keys.flatten(0, 1))
        planes[1].flatten(0, 1).index_copy_(0, slots, values.flatten(0, 1))
        return planes[0][rows, :view].transpose(1, 2), planes[1][rows, :view].transpose(1, 2)

    def _allocate(self, kind: PlaneKind) -> Tensor:
        """Return an unused plane ``[rows, length, heads, head size]``."""
        if kind not in self.layout:  # the model may have changed: forget what it used before
            for other in self.layout.keys() - self._used.keys():
                del self.layout[other]
        free = self._free.setdefault(kind, [])
        if not free:
            count = max(1, self.layout[kind] - self._used[kind])
            shape = (count, self.rows, self.length, kind.heads, kind.head_size)
            store = torch.zeros(shape, dtype=kind.dtype, device=kind.device)
            torch._dynamo.maybe_mark_dynamic(store, 2)
            self._stores.append(store)
            free.extend(_separate(plane) for plane in store)
        self._used[kind] += 1
        self.layout[kind] = max(self.layout[kind], self._used[kind])
        return free.pop(0)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots ``[B, A]`` within each row, in every layer, reading all before writing any."""
        rows = torch.arange(source.shape[0], device=source.device)[:, None]
        for store in self._stores:
            # Whole slots of a flat store, so that a single index selects them.
            flat = store.flatten(1, 2).flatten(2)
            first = rows * store.shape[2]
            read, written = ((first + index).flatten() for index in (source, target))
            slots = flat.index_select(1, read.to(store.device))
            flat.index_copy_(1, written.to(store.device), slots)

    def copy_rows(self, source: Sequence[int], target: Sequence[int], length: int) -> None:
        """Copy the first slots of rows to others, in every layer; read all before writing any."""
        for store in self._stores:
            # Indices that are lists would be sent to the device for every plane.
            read, written = (upload(rows, store.device) for rows in (source, target))
            for plane in store[:, :, :length]:  # one at a time: the rows that are read are copied
                plane.index_copy_(0, written, plane.index_select(0, read))

    def clear(self, row: int, start: int, stop: int) -> None:
        """Overwrite slots ``[start, stop)`` of a row with zeros, in every layer."""
        for store in self._stores:
            store[:, row, start:stop] = 0

    def enlarged(self, rows: int, length: int) -> TreeCache:
        """Return a cache of at least as many rows and slots that starts with these contents."""
        larger = TreeCache(rows, length, self.layout)
        for layer, planes in self._planes.items():
            keys, values = (larger._allocate(_kind(plane)) for plane in planes)
            larger._planes[layer] = keys, values
            for new, old in zip((keys, values), planes, strict=True):
                new[: self.rows, : self.length] = old
        return larger

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of visible slots and the offset of the first."""
        return self._view.shape[0], 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0, because callers pass positions, which do not follow from slots."""
        return 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return the number of slots."""
        return self.length


def _kind(states: Tensor) -> PlaneKind:
    """Describe keys or values ``[..., ..., heads, head size]``."""
    return PlaneKind(states.device, states.dtype, *states.shape[2:])


def additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean mask ``[B, S, L]`` of visible keys to an additive one, ``[B, 1, S, L]``."""
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]
