"""Time the phases of a decoding step against its floor.

::

    python benchmarks/step.py
    python benchmarks/step.py --device cuda --shape llama-3.1-8b --tree 60/6/10 --context 1024

``benchmarks/README.md`` defines the floor. On a GPU, steps are replayed as CUDA graphs, which have
no phases: the phases are those of a second run without graphs, in which the GPU often waits for the
host.

Without ``--shape`` the bundled pair answers word problems. With it, a pair with random weights is
timed under forced acceptance, see ``shapes.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from measurement import (
    QUICK,
    Table,
    Timing,
    add_phases,
    contenders,
    copy_bandwidth,
    new_parser,
    parse,
    parse_tree,
    prompt_ids,
    random_prompt,
    save_report,
    step_rows,
    time_steps,
)
from shapes import SHAPES, random_head, random_target
from torch import Tensor

from eagle_fsd import EagleFSD
from eagle_fsd.bundled.problems import chat_messages, problems

COLUMNS = {
    "method": "method",
    "draft_ms": "draft (ms)",
    "target_ms": "target (ms)",
    "verify_ms": "verify (ms)",
    "rest_ms": "rest (ms)",
    "step_ms": "step (ms)",
    "over_floor": "step / floor",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Time the steps, print the table and save it."""
    parser = new_parser("Time the phases of a decoding step against its floor.")
    parser.add_argument("--shape", choices=SHAPES, help="random weights; default: the bundled pair")
    parser.add_argument("--tree", type=parse_tree, help="default: the pair's own trees")
    parser.add_argument("--accepted", type=int, default=3, help="with --shape: tokens to accept")
    parser.add_argument("--context", type=int, help="tokens before the first step; default: 256")
    parser.add_argument("--rows", type=int, default=1, help="rows in the batch; default: 1")
    options = parse(parser, arguments)
    context = options.context or (32 if options.quick else 256)
    timing = Timing() if options.shape else Timing(blocks=16)
    if options.quick:
        timing = QUICK
    bandwidth = copy_bandwidth(torch.device(options.device), options.quick)
    if options.shape:
        shape = "tiny" if options.quick else options.shape
        target = random_target(SHAPES[shape], options.device, options.dtype)
        model = EagleFSD(target, random_head(target), options.tree)
        ids = random_prompt(model, options.rows, context)
        accepted = options.accepted
    else:
        model = EagleFSD.from_pretrained(
            dtype=options.dtype, device_map=options.device, tree=options.tree
        )
        ids = problem_prompt(model, options.rows, context)
        accepted = None
    model.compile = options.compile
    ways = contenders(model)
    name = options.shape or "bundled pair"

    def results() -> list[dict[str, Any]]:
        return step_rows(ways, times, context, rows=options.rows, bandwidth=bandwidth)

    times = time_steps(ways, ids, timing, label=name, accepted=accepted)
    _save(options, name, results(), context=context, bandwidth=bandwidth, finished=False)
    add_phases(times, ways, ids, timing, label=name, accepted=accepted)
    _save(options, name, results(), context=context, bandwidth=bandwidth)


def _save(
    options: argparse.Namespace,
    name: str,
    rows: list[dict[str, Any]],
    context: int,
    bandwidth: float,
    finished: bool = True,
) -> None:
    """Save the results; the phases of an unfinished report may be missing."""
    trees = ", ".join(f"{row['method']} {row['tree']}" for row in rows if row["tree"])
    note = (
        f'Trees: {trees}; building them is part of "draft". Context {context}, batch'
        f" {options.rows}; copy bandwidth {bandwidth / 1e9:.0f} GB/s."
    )
    if finished and any(row["captured"] for row in rows):
        whole = ", ".join(f"{row['method']} {row['phased_ms']:.2f} ms" for row in rows)
        note += (
            " Steps are replayed as CUDA graphs; draft, target, verify and rest are the parts of"
            f" steps that run without them: {whole}."
        )
    table = Table(f"One step, {name}", COLUMNS, rows, note)
    file = f"step-{options.shape or 'bundled'}{'-compiled' if options.compile else ''}"
    save_report(options, file, [table], finished=finished)


def problem_prompt(model: EagleFSD, rows: int, length: int) -> Tensor:
    """Return chats about word problems, the last of which is to be answered, cut at the beginning.

    Returns ``[B, S]`` token ids on the target's device.
    """
    turns = 2 + length // 64  # a problem and its answer have more tokens than that
    found = problems("test", rows * turns)
    chats = []
    for row in range(rows):
        turn = found[row * turns : (row + 1) * turns]
        messages = chat_messages(*((item.question, item.answer) for item in turn))[:-1]
        chats.append(prompt_ids(model.tokenizer, messages)[-length:])
    return torch.tensor(chats, device=model.target.device)


if __name__ == "__main__":
    main()
