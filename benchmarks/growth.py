"""Show how a step's time grows with the context, the tree, the vocabulary and the batch.

::

    python benchmarks/growth.py
    python benchmarks/growth.py --device cuda --shape llama-3.1-8b

One of the four varies at a time; the others have the values in :data:`BASE`. The weights are random
and acceptance is forced, see ``shapes.py``.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from measurement import (
    COLORS,
    QUICK,
    Table,
    Timing,
    contenders,
    new_figure,
    new_parser,
    parse,
    random_prompt,
    save_report,
    time_steps,
)
from shapes import SHAPES, random_head, random_target

from eagle_fsd import EagleFSD, TreeConfig

CONTEXT, TREE, VOCABULARY, BATCH = "context", "tree nodes", "vocabulary", "batch"
#: Values of what does not vary; the vocabulary is the shape's.
BASE = {CONTEXT: 512, TREE: 32, BATCH: 1}
RANGES: dict[str, tuple[int, ...]] = {
    CONTEXT: (256, 512, 1024, 2048, 4096, 8192),
    TREE: (8, 16, 32, 64, 128),
    VOCABULARY: (1024, 4096, 16384, 65536, 262144),
    BATCH: (1, 2, 4, 8, 16, 32),
}
QUICK_RANGES: dict[str, tuple[int, ...]] = {
    CONTEXT: (16, 32),
    TREE: (8, 16),
    VOCABULARY: (256, 512),
    BATCH: (1, 2),
}
DEPTH, TOP_K = 4, 8
ACCEPTED = 3


def main(arguments: Sequence[str] | None = None) -> None:
    """Time all points, print a table of each range, and save tables and plots."""
    parser = new_parser("Show how a step grows with context, tree, vocabulary and batch.")
    parser.add_argument("--shape", choices=SHAPES, help="default: small, on a GPU llama-3.1-8b")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="start no point after this time"
    )
    options = parse(parser, arguments)
    end = time.monotonic() + options.seconds
    shape = options.shape or ("small" if options.device == "cpu" else "llama-3.1-8b")
    base, ranges, timing = BASE, RANGES, Timing(blocks=6)
    if options.quick:
        shape, base, ranges, timing = "tiny", {**BASE, CONTEXT: 16, TREE: 8}, QUICK_RANGES, QUICK

    @lru_cache(maxsize=1)
    def new_pair(vocab_size: int) -> tuple[Any, Any]:
        gc.collect()
        config = SHAPES[shape]
        model = random_target(config, options.device, options.dtype, vocab_size=vocab_size)
        return model, random_head(model)

    # A run that is stopped has points of every range. Another vocabulary takes other models.
    points = [
        (name, values[at])
        for at in range(max(map(len, ranges.values())))
        for name, values in ranges.items()
        if name != VOCABULARY and at < len(values)
    ]
    points += [(VOCABULARY, value) for value in ranges[VOCABULARY]]
    rows: dict[str, list[dict[str, Any]]] = {}
    for number, (name, value) in enumerate(points, 1):
        if time.monotonic() > end:
            break
        point = {VOCABULARY: SHAPES[shape].vocab_size, **base, name: value}
        model, head = new_pair(point[VOCABULARY])
        tree = TreeConfig(total_tokens=point[TREE], depth=DEPTH, top_k=TOP_K)
        pair = EagleFSD(model, head, tree)
        pair.compile = options.compile
        ids = random_prompt(pair, point[BATCH], point[CONTEXT])
        label = f"point {number} of {len(points)}: {name} {value}"
        times = time_steps(contenders(pair), ids, timing, label, ACCEPTED)
        milliseconds = {way: 1e3 * steps.seconds for way, steps in times.items()}
        rows.setdefault(name, []).append({name: value, **milliseconds})
        _save(options, shape, base, rows, finished=False)
    _save(options, shape, base, rows)


def _save(
    options: argparse.Namespace,
    shape: str,
    base: Mapping[str, int],
    rows: Mapping[str, list[dict[str, Any]]],
    finished: bool = True,
) -> None:
    """Save the results so far, by range."""
    figure, axes = new_figure(2, 2)
    for axis, (name, found) in zip(axes, rows.items(), strict=False):
        for way, color in zip([key for key in found[0] if key != name], COLORS, strict=False):
            values = [row[name] for row in found]
            axis.plot(values, [row[way] for row in found], "o-", color=color, label=way)
        axis.set_xscale("log", base=2)
        axis.set_xticks(values, list(map(str, values)), minor=False)
        axis.set_ylim(bottom=0)
        axis.set_xlabel(name)
        axis.set_ylabel("ms per step")
    if rows:
        axes[0].legend(frameon=False)
    fixed = {VOCABULARY: SHAPES[shape].vocab_size, **base}
    note = ", ".join(f"{name} {value}" for name, value in fixed.items())
    note = f"Milliseconds per step, {shape} shape; unless it varies, {note}."
    tables = [
        Table(f"Growth with the {name}", {key: key for key in found[0]}, found, note)
        for name, found in rows.items()
    ]
    save_report(options, "growth", tables, figure, finished)


if __name__ == "__main__":
    main()
