"""Decode with a target on two simulated devices, for test_sharded_target.py.

Run as ``sharded_worker.py RESULTS`` in a process of its own, because it registers devices.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from pairs import ACCEPT_ALL, aligned_pair, batch, prompt, small_tree
from placed_tensors import DEVICES, placed_tensors

from eagle_fsd import EagleFSD
from eagle_fsd.model.prefix_cache import PrefixCache

FIRST, SECOND = DEVICES
#: Devices of embedding, two layers, norm and output projection.
PLACEMENTS = {
    "one": [FIRST] * 5,
    "two": [FIRST, FIRST, SECOND, SECOND, SECOND],
    "back": [FIRST, FIRST, SECOND, SECOND, FIRST],  # as with tied weights
}
PARTS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head")
CALLS: dict[str, dict[str, Any]] = {
    "plain": {"method": "ar"},
    "exact": {},
    "fsd": {"threshold": 0.2},
    "all": {"threshold": ACCEPT_ALL},
}


def spread(pair: EagleFSD, devices: list[str]) -> EagleFSD:
    """Place a copy of a pair's target as ``device_map="auto"`` would, and attach its head."""
    device_map = dict(zip(PARTS, devices, strict=True)) | {"model.rotary_emb": devices[0]}
    model = dispatch_model(copy.deepcopy(pair.model), device_map, force_hooks=True)
    head = copy.deepcopy(pair.drafter)
    return EagleFSD(model, head, small_tree())


def results(pair: EagleFSD) -> dict[str, Any]:
    """Return sequences, origins and tau of every call, and what a second turn of a chat decodes."""
    found: dict[str, Any] = {}
    for name, options in CALLS.items():
        out = pair.generate(*batch(), 12, **options)
        found[name] = out.sequences.cpu(), out.origins.cpu(), out.stats.tau
    cache = PrefixCache()
    first = pair.generate(prompt(8), None, 8, prefix_cache=cache).sequences.cpu()
    second = torch.cat([first, prompt(5)], 1)
    found["turns"] = pair.generate(second, None, 8, prefix_cache=cache).sequences.cpu()
    return found


def main(out: str) -> None:
    found = {}
    with placed_tensors():
        one, other = (torch.ones(2, device=device) for device in DEVICES)
        with pytest.raises(RuntimeError, match="mixes tensors on"):
            one + other
        for name, devices in PLACEMENTS.items():
            placed = spread(aligned_pair(), devices)
            found[name] = results(placed)
            stores = placed.target.new_cache(1, 4)
            placed.target.prefill(prompt(3).to(placed.target.device), 0, stores)
            found[name]["devices"] = {
                "target": str(placed.target.device),
                "drafter": str(placed.drafter.device),
                "cache": sorted({str(store.device) for store in stores._stores}),
            }
    torch.save(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
