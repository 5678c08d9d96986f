"""Time attention over a draft tree with folded query groups against that of transformers.

::

    python benchmarks/attention.py
    python benchmarks/attention.py --device cuda

One layer of 32 query heads and 8 key heads of size 64 attends from 60 nodes to a context of 1,024
to 8,192 tokens. Both ways get the same masks and run in turn; the best of several times counts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from measurement import Table, new_parser, parse, progress, save_report, synchronize
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from eagle_fsd.model.attention import fold_mask, tree_attention
from eagle_fsd.model.cache import additive_mask

HEADS, KEY_HEADS, SIZE, NODES = 32, 8, 64, 60
COLUMNS = {
    "context": "context",
    "stock_ms": "transformers (ms)",
    "folded_ms": "folded (ms)",
    "ratio": "ratio",
    "difference": "largest difference",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Time both ways, print the table and save it."""
    parser = new_parser("Time attention over a draft tree.", compiles=False)
    options = parse(parser, arguments)
    contexts, repeats = ((64, 128), 2) if options.quick else ((1024, 2048, 4096, 8192), 20)
    layer = nn.Module()
    layer.num_key_value_groups = HEADS // KEY_HEADS
    note = f"One layer, {HEADS} query heads, {KEY_HEADS} key heads of size {SIZE}, {NODES} nodes."
    rows: list[dict[str, Any]] = []
    table = Table("Attention over a draft tree", COLUMNS, rows, note)
    for context in progress(contexts, "contexts"):
        place = {"device": options.device, "dtype": options.dtype}
        query = torch.randn(1, NODES, HEADS, SIZE, **place).transpose(1, 2)
        # A cache stores the heads of a token together.
        key, value = torch.randn(2, 1, context, KEY_HEADS, SIZE, **place).transpose(2, 3)
        allowed = torch.rand(1, NODES, context, device=options.device) < 0.7
        mask = additive_mask(allowed, options.dtype)
        masks = mask, fold_mask(mask, HEADS // KEY_HEADS)
        best = [float("inf")] * 2
        outputs = [torch.empty(0)] * 2
        for _ in range(repeats):
            for way, function in enumerate((sdpa_attention_forward, tree_attention)):
                synchronize()
                start = time.perf_counter()
                outputs[way], _ = function(layer, query, key, value, masks[way])
                synchronize()
                best[way] = min(best[way], time.perf_counter() - start)
        stock, folded = (1e3 * seconds for seconds in best)
        difference = float((outputs[0] - outputs[1]).abs().max())
        rows.append(
            {
                "context": context,
                "stock_ms": stock,
                "folded_ms": folded,
                "ratio": stock / folded,
                "difference": f"{difference:.1e}",
            }
        )
        save_report(options, "attention", [table], finished=False)
    save_report(options, "attention", [table])


if __name__ == "__main__":
    main()
