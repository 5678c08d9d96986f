"""Time many prompts in batches of 1 to 32.

::

    python benchmarks/batches.py --threads 2

The bundled pair answers the same word problems at every batch size, greedily, each way with its own
trees; rows that end are replaced. Every way is measured once at each batch size.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from measurement import (
    PLAIN,
    Contender,
    Table,
    contenders,
    new_parser,
    parse,
    progress,
    save_report,
    synchronize,
    word_problems,
)

from eagle_fsd import EagleFSD

SIZES = (1, 2, 4, 8, 16, 32)
MAX_NEW_TOKENS = 256
COLUMNS = {
    "rows": "prompts at once",
    "method": "method",
    "tokens_per_second": "tokens/s",
    "over_one": "relative to one prompt",
    "over_plain": "relative to plain",
    "tau": "tau",
    "identical": "same answer (%)",
    "cache_mib": "caches (MiB)",
}


@dataclass(frozen=True)
class Run:
    """All prompts answered in batches: tokens per second, tau, memory of the caches, and tokens."""

    speed: float
    tau: float
    cache_mib: float
    answers: list[list[int]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and save it."""
    parser = new_parser("Time many prompts in batches.")
    parser.add_argument("--count", type=int, default=200, help="problems to answer")
    options = parse(parser, arguments)
    sizes, new_tokens = SIZES, MAX_NEW_TOKENS
    if options.quick:
        options.count, sizes, new_tokens = 4, (1, 3), 12
    model = EagleFSD.from_pretrained(dtype=options.dtype, device_map=options.device)
    tasks = word_problems(model.tokenizer, options.count + max(sizes))
    prompts: list[Any] = [task.ids for task in tasks]
    ways = contenders(model)
    model.compile = options.compile
    runs: dict[tuple[int, str], Run] = {}
    for size, way in progress([(size, way) for size in sizes for way in ways], "answering"):
        warm_up, timed = prompts[options.count :][:size], prompts[: options.count]
        runs[size, way.name] = answer(way, warm_up, timed, new_tokens)
        _save(options, ways, runs, new_tokens, finished=False)
    _save(options, ways, runs, new_tokens)


def _save(
    options: argparse.Namespace,
    ways: Sequence[Contender],
    runs: Mapping[tuple[int, str], Run],
    new_tokens: int,
    finished: bool = True,
) -> None:
    """Save the results so far, by number of prompts at once and method."""
    rows = []
    for (size, name), run in runs.items():
        one, plain = runs[min(runs)[0], name], runs[size, PLAIN]
        same = sum(own == other for own, other in zip(run.answers, one.answers, strict=True))
        rows.append(
            {
                "rows": size,
                "method": name,
                "tokens_per_second": run.speed,
                "over_one": run.speed / one.speed,
                "over_plain": run.speed / plain.speed,
                "tau": run.tau,
                "identical": 100 * same / len(run.answers),
                "cache_mib": run.cache_mib,
            }
        )
    trees = ", ".join(f"{way.name} {way.tree.shape}" for way in ways if way.tree)
    note = f"{options.count} problems, greedy, at most {new_tokens} new tokens. Trees: {trees}."
    if others := ways[0].model.batch_trees:
        trees = ", ".join(f"{tree.shape} from {size} on" for size, tree in others.items())
        note += f" Exact decoding of several prompts: {trees}."
    if options.compile:
        note += " Only the steps of full batches are compiled."
    table = Table("Many prompts at once", COLUMNS, rows, note)
    save_report(options, "batches", [table], finished=finished)


def answer(way: Contender, warm_up: Sequence[Any], prompts: Sequence[Any], new_tokens: int) -> Run:
    """Answer ``warm_up``, untimed, then the prompts, in a batch of ``len(warm_up)`` rows."""
    before, requests = (
        [way.model.request(ids, new_tokens, **way.options()) for ids in part]
        for part in (warm_up, prompts)
    )
    longest = max(request.max_length for request in (*before, *requests))
    batch = way.model.batch(len(warm_up), longest, len(warm_up))
    for part in (before, requests):  # answers and seconds of the last part are kept
        synchronize()
        begin = time.perf_counter()
        answers = [batch.add(request) for request in part]
        while len(batch):
            batch.step()
        synchronize()
        seconds = time.perf_counter() - begin
    steps = sum(answer.stats.steps for answer in answers)
    found = [answer.tokens for answer in answers]
    tokens = sum(map(len, found))
    return Run(tokens / seconds, tokens / steps, batch.nbytes / 2**20, found)


if __name__ == "__main__":
    main()
