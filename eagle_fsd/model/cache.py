"""Preallocated key-value caches with a length per row.

All layers on one device share one tensor, so that two operations move the slots that verification
kept, whatever the number of layers. :class:`TreeCache` is an ordinary Hugging Face ``Cache`` whose
layers write to given slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

#: The number of keys that attention reads is a multiple of this, so that kernels see few shapes.
VIEW_STEP = 64


class TreeCache(Cache):
    """Keys and values of several sequences, each with its own length.

    Memory: ``layers x 2 x rows x length x key-value heads x head size`` elements of ``dtype``,
    allocated once (:attr:`nbytes`).

    A pass over the model is :meth:`place` followed by an ordinary forward call: every layer writes
    its new keys and values to the given slots and attends to slots ``0 .. view - 1``. The caller's
    attention mask must exclude slots that do not belong to the sequence.

    Args:
        config: The model's configuration: number of layers, key-value heads and head size.
        rows: Number of sequences.
        length: Slots per sequence.
        dtype: Data type of keys and values.
        devices: One device for all layers, or the device of each layer.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        rows: int,
        length: int,
        dtype: torch.dtype,
        devices: torch.device | Sequence[torch.device],
    ) -> None:
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
        count = config.num_hidden_layers
        devices = [devices] * count if isinstance(devices, torch.device) else list(devices)
        self.rows = rows
        self.length = length
        # [layers on the device, 2, rows, length, kv_heads, head_size]: a slot is contiguous.
        shape = (2, rows, length, kv_heads, head_size)
        self.stores = {
            device: torch.zeros(devices.count(device), *shape, dtype=dtype, device=device)
            for device in dict.fromkeys(devices)
        }
        used = dict.fromkeys(devices, 0)
        layers: list[Any] = []
        for device in devices:
            layers.append(_Layer(self, self.stores[device][used[device]]))
            used[device] += 1
        super().__init__(layers=layers)
        self._slots: dict[torch.device, Tensor] = {}
        self.view = 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(store.nbytes for store in self.stores.values())

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
        self._slots = {device: addresses.to(device) for device in self.stores}

    def addresses(self, positions: Tensor) -> Tensor:
        """Convert slots within rows to indices into the flattened store.

        Args:
            positions: ``[B, ...]`` slots.

        Returns:
            Indices of the same shape.
        """
        first = torch.arange(positions.shape[0], device=positions.device) * self.length
        return positions + first.view(-1, *[1] * (positions.ndim - 1))

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots within each row, in every layer. All slots are read before any is written.

        Args:
            source: ``[B, A]`` slots to read.
            target: ``[B, A]`` slots to write.
        """
        source, target = self.addresses(source).flatten(), self.addresses(target).flatten()
        for device, store in self.stores.items():
            flat = store.view(store.shape[0] * 2, self.rows * self.length, -1)
            flat.index_copy_(1, target.to(device), flat.index_select(1, source.to(device)))

    def move_row(self, source: int, target: int) -> None:
        """Overwrite a row with another, in every layer.

        Args:
            source: Index of the row to copy.
            target: Index of the row to overwrite.
        """
        for store in self.stores.values():
            store[:, :, target].copy_(store[:, :, source])

    def copy_prefix(self, other: TreeCache, length: int) -> None:
        """Copy the first slots of another cache.

        Args:
            other: A cache with the same layers and rows.
            length: Number of slots to copy.
        """
        for device, store in self.stores.items():
            store[:, :, :, :length].copy_(other.stores[device][:, :, :, :length])

    def slots_on(self, device: torch.device) -> Tensor:
        """Return the indices that the current pass writes to.

        Args:
            device: Device of the layer's states.
        """
        return self._slots[device]


class _Layer(CacheLayerMixin):
    """One layer of a :class:`TreeCache`."""

    def __init__(self, cache: TreeCache, store: Tensor) -> None:
        super().__init__()
        self.cache = cache
        self.store = store
        self.device = store.device
        self.keys: Tensor = store[0]  # [rows, length, kv_heads, head_size]
        self.values: Tensor = store[1]
        self.flat_keys, self.flat_values = store.flatten(1, 2)  # [rows * length, ...]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values and return all visible ones; called by the attention layer.

        Args:
            key_states: ``[B, heads, S, head size]``.
            value_states: ``[B, heads, S, head size]``.
            *args: Ignored.
            **kwargs: Ignored.

        Returns:
            Keys and values, both ``[B, heads, view, head size]``.

        Raises:
            ValueError: The states do not have the shape that the configuration describes.
        """
        batch, slots = key_states.shape[0], self.cache.slots_on(self.device)
        if not key_states.shape[1::2] == value_states.shape[1::2] == self.keys.shape[2:]:
            raise ValueError(
                "unsupported architecture: its keys and values have (heads, head size)"
                f" {list(key_states.shape[1::2])} and {list(value_states.shape[1::2])}, but its"
                f" configuration describes {list(self.keys.shape[2:])}"
            )
        self.flat_keys.index_copy_(0, slots, key_states.transpose(1, 2).flatten(0, 1))
        self.flat_values.index_copy_(0, slots, value_states.transpose(1, 2).flatten(0, 1))
        view = self.cache.view
        return self.keys[:batch, :view].transpose(1, 2), self.values[:batch, :view].transpose(1, 2)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the constructor allocates the cache."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of visible slots and the offset of the first; see ``Cache``."""
        return self.cache.view, 0

    def get_seq_length(self) -> int:
        """Return the number of visible slots; see ``Cache``."""
        return self.cache.view

    def get_max_length(self) -> int:
        """Return the number of slots; see ``Cache``."""
        return self.cache.length


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
