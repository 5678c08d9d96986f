"""Preallocated key-value caches with a length per row.

All layers of one device share one tensor, so the rows that verification kept are moved together in
two operations, whatever the number of layers. Hugging Face models use it through
:class:`TreeCache`, an ordinary ``Cache`` whose layers write where they are told.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

#: Attention reads keys up to a multiple of this, so that kernels see few different shapes.
VIEW_STEP = 64


class TreeCache(Cache):
    """Keys and values of ``rows`` sequences, each with its own length.

    Memory: ``layers x 2 x rows x length x key-value heads x head size`` numbers of ``dtype``,
    allocated once (:meth:`nbytes`); nothing grows afterwards.

    A pass over the model is ``place(positions, view)`` and then an ordinary forward call: every
    layer writes its new keys and values at ``positions`` (``[B, S]``, the slot of each new token
    in its row) and attends to slots ``0 .. view - 1``; the caller's attention mask hides what
    is not to be seen.
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
        layers = []
        for device in devices:
            layers.append(_Layer(self, self.stores[device][used[device]]))
            used[device] += 1
        super().__init__(layers=layers)
        self._slots: dict[torch.device, Tensor] = {}
        self.view = 0

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self.stores.values())

    def visible(self, needed: int) -> int:
        """``needed`` slots rounded up to :data:`VIEW_STEP`, or the whole length if that is less."""
        return min(-(-needed // VIEW_STEP) * VIEW_STEP, self.length)

    def place(self, positions: Tensor, view: int) -> None:
        """Where the next forward call writes and how far it reads."""
        self.place_at(self.addresses(positions).flatten(), view)

    def place_at(self, addresses: Tensor, view: int) -> None:
        """:meth:`place` by :meth:`addresses`, flattened: for passes whose slots are known ahead."""
        self.view = view
        self._slots = {device: addresses.to(device) for device in self.stores}

    def addresses(self, positions: Tensor) -> Tensor:
        """Slots ``[B, ...]`` of each row to places in the whole store, alike."""
        first = torch.arange(positions.shape[0], device=positions.device) * self.length
        return positions + first.view(-1, *[1] * (positions.ndim - 1))

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots ``source`` to slots ``target`` of the same row, both ``[B, A]``, every layer.

        All sources are read before any target is written.
        """
        source, target = self.addresses(source).flatten(), self.addresses(target).flatten()
        for device, store in self.stores.items():
            flat = store.view(store.shape[0] * 2, self.rows * self.length, -1)
            flat.index_copy_(1, target.to(device), flat.index_select(1, source.to(device)))

    def move_row(self, source: int, target: int) -> None:
        """Copy a whole row over another, every layer."""
        for store in self.stores.values():
            store[:, :, target].copy_(store[:, :, source])

    def copy_beginning(self, other: TreeCache, length: int) -> None:
        """Take over the first ``length`` slots of a cache of the same layers and rows."""
        for device, store in self.stores.items():
            store[:, :, :, :length].copy_(other.stores[device][:, :, :, :length])

    def slots_on(self, device: torch.device) -> Tensor:
        return self._slots[device]


class _Layer(CacheLayerMixin):
    """One layer's part of a :class:`TreeCache`."""

    def __init__(self, cache: TreeCache, store: Tensor) -> None:
        super().__init__()
        self.cache = cache
        self.store = store
        self.device = store.device
        self.keys, self.values = store[0], store[1]  # [rows, length, kv_heads, head_size]
        self.flat_keys, self.flat_values = store.flatten(1, 2)  # [rows * length, ...]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write ``[B, heads, S, size]`` states; ``[B, heads, view, size]`` of what is visible."""
        batch, slots = key_states.shape[0], self.cache.slots_on(self.device)
        if not key_states.shape[1::2] == value_states.shape[1::2] == self.keys.shape[2:]:
            raise ValueError(
                f"this architecture keeps keys and values of {list(key_states.shape[1::2])} and"
                f" {list(value_states.shape[1::2])} (heads, head size), not of"
                f" {list(self.keys.shape[2:])} as its configuration says: it is not supported"
            )
        self.flat_keys.index_copy_(0, slots, key_states.transpose(1, 2).flatten(0, 1))
        self.flat_values.index_copy_(0, slots, value_states.transpose(1, 2).flatten(0, 1))
        view = self.cache.view
        return self.keys[:batch, :view].transpose(1, 2), self.values[:batch, :view].transpose(1, 2)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the cache is allocated when it is made."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.view, 0

    def get_seq_length(self) -> int:
        return self.cache.view

    def get_max_length(self) -> int:
        return self.cache.length


def additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """``[B, S, L]`` bool to the ``[B, 1, S, L]`` float mask attention adds to its scores."""
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]
