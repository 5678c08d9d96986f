"""How many rows fit in memory.

With ``L`` slots per row in the target's cache and ``D`` in the drafter's, ``N`` tree nodes and a
vocabulary of ``V`` tokens, ``B`` rows take ::

    B (L l + D d + 4 V (2 N + M))

bytes: ``l`` and ``d`` are the bytes of a slot in all layers, and the last term is for the target's
logits, a copy of them and the draft's distributions at its ``M`` expanded nodes. If layers are on
several devices, each holds the slots of its layers, and that of the output projection the rest.
"""

from __future__ import annotations

from collections import Counter

import torch

from eagle_fsd.model.cache import Layout
from eagle_fsd.model.config import TreeConfig
from eagle_fsd.model.drafters.interface import Drafter
from eagle_fsd.model.target import Target
from eagle_fsd.utils.host_memory import host_memory

#: Share of the free memory that rows may take; allocators lose some of the rest.
USABLE_SHARE = 0.9

#: Bytes by device.
Bytes = Counter[torch.device]


def free_bytes(device: torch.device) -> int:
    """Return the memory that is free on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch holds without using it is free, too.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return host_memory().available


def row_bytes(
    target: Target,
    drafter: Drafter,
    tree: TreeConfig,
    length: int,
    draft_length: int,
    captured: bool = False,
) -> Bytes:
    """Return the memory of a row with ``L`` and ``D`` slots.

    The slots of a model that has not made a pass do not count, because their size is unknown.
    If steps are ``captured``, the last term counts twice: graphs hold that memory, and so do the
    eager steps before a capture.
    """
    found = _slot_bytes(target.layout, length)
    if draft_length:
        found += _slot_bytes(drafter.layout, draft_length)
    nodes = drafter.max_nodes(tree)
    expanded = drafter.max_expanded(tree)
    workspaces = 2 if captured else 1
    found[target.device] += workspaces * 4 * target.vocab_size * (2 * nodes + expanded)
    return found


def fitting_rows(needed: Bytes) -> int:
    """Return how many rows fit in the free memory, from what one of them takes."""
    return min(int(USABLE_SHARE * free_bytes(device) / count) for device, count in needed.items())


def shortage(needed: Bytes) -> str:
    """Return what a row needs and what rows may take, for a message."""
    free = {device: USABLE_SHARE * free_bytes(device) for device in needed}
    device = max(needed, key=lambda item: needed[item] / max(free[item], 1.0))
    wanted, there = needed[device] / 2**30, free[device] / 2**30
    return f"{wanted:.2f} GiB on {device}, where rows may take {there:.2f}"


def _slot_bytes(layout: Layout, slots: int) -> Bytes:
    """Return the bytes of slots in all layers, given what the caches of a model allocated."""
    found = Bytes()
    for kind, count in layout.items():
        found[kind.device] += slots * count * kind.heads * kind.head_size * kind.dtype.itemsize
    return found
