"""Compare divergences at equal quality: the same limit on the answers that FSD loses.

::

    python benchmarks/divergences.py

For each head of the bundled target and each divergence, bisection searches for the largest
threshold at which FSD, without a floor, loses no more answers to the bundled problems, less those
it gains, than the limit. Tau at that threshold is compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from drafters import DRAFTERS
from measurement import (
    Table,
    Task,
    mean_ratio,
    new_parser,
    parse,
    parse_tree,
    progress,
    save_report,
    word_problems,
)

from eagle_fsd import AcceptanceConfig, EagleFSD

#: The trees with which FSD is fastest, of those that ``drafters.py`` tries.
TREES = {"EAGLE-2 head": "26/24/1", "EAGLE-3 head": "14/12/1"}
#: Thresholds between which to search, and the number of bisections: 8 of them leave 6.5%.
LOWEST, HIGHEST, BISECTIONS = 1e-3, 1e4, 8
#: Divergence that the others are compared with.
REFERENCE = "js"
SAME: dict[str, Any] = {"ratio": 1.0, "ratio_interval": None}
BATCH = 32
COLUMNS = {
    "drafter": "drafter",
    "divergence": "divergence",
    "threshold": "T",
    "tau": "tau",
    "ratio": f"tau, {REFERENCE} = 1",
    "ratio_interval": "95% interval",
    "lost": "lost, gained",
}


@dataclass(frozen=True)
class Answers:
    """Results of one setting."""

    tokens: list[int]
    steps: list[int]
    right: list[bool]

    @property
    def tau(self) -> float:
        """Tokens per target pass."""
        return sum(self.tokens) / sum(self.steps)

    def changes(self, exact: Answers) -> tuple[int, int]:
        """Count the answers that only exact decoding, and that only this one, has right."""
        pairs = list(zip(exact.right, self.right, strict=True))
        return pairs.count((True, False)), pairs.count((False, True))

    def compared(self, other: Answers) -> dict[str, Any]:
        """Return the mean ratio of the answers' taus, and its interval."""
        taus = (
            [count / passes for count, passes in zip(item.tokens, item.steps, strict=True)]
            for item in (self, other)
        )
        return mean_ratio("ratio", *taus)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and save it."""
    parser = new_parser("Compare divergences at equal quality.", compiles=False)
    parser.add_argument("--count", type=int, default=200, help="problems")
    parser.add_argument("--limit", type=float, default=1.0, help="points of accuracy to lose")
    parser.add_argument(
        "--divergences",
        nargs="+",
        default=("kl", "kl_reversed"),
        help=f"divergences to compare with {REFERENCE}; default: kl kl_reversed",
    )
    options = parse(parser, arguments)
    names = tuple(dict.fromkeys((REFERENCE, *options.divergences)))
    new_tokens, bisections = 256, BISECTIONS
    if options.quick:
        options.count, new_tokens, bisections = 2, 12, 1
    allowed = math.floor(options.limit * options.count / 100.0 + 1e-9)
    note = (
        f"{options.count} problems, greedy, at most {new_tokens} new tokens, no floor; T is the"
        f" largest of those tried that loses at most {allowed} more answers than it gains."
    )
    rows: list[dict[str, Any]] = []
    table = Table("Divergences at equal quality", COLUMNS, rows, note)
    for drafter, tree in TREES.items():
        model = EagleFSD.from_pretrained(
            drafter=DRAFTERS[drafter],
            tree=parse_tree(tree),
            dtype=options.dtype,
            device_map=options.device,
        )
        tasks = word_problems(model.tokenizer, options.count)
        exact = answer(model, tasks, AcceptanceConfig(), new_tokens)
        assert exact is not None
        found: dict[str, Answers] = {}
        for name in names:
            threshold, found[name] = search(
                model,
                tasks,
                name,
                exact=exact,
                allowed=allowed,
                bisections=bisections,
                new_tokens=new_tokens,
            )
            lost, gained = found[name].changes(exact)
            rows.append(
                {
                    "drafter": f"{drafter}, {model.tree.shape}",
                    "divergence": name,
                    "threshold": f"{threshold:.3g}",
                    "tau": found[name].tau,
                    "tau_exact": exact.tau,
                    **(found[name].compared(found[REFERENCE]) if name != REFERENCE else SAME),
                    "lost": f"{lost}, {gained}",
                }
            )
            save_report(options, "divergences", [table], finished=False)
    save_report(options, "divergences", [table])


def search(
    model: EagleFSD,
    tasks: Sequence[Task],
    divergence: str,
    exact: Answers,
    allowed: int,
    bisections: int,
    new_tokens: int,
) -> tuple[float, Answers]:
    """Search for the largest threshold within the limit.

    :data:`LOWEST` is taken to be within it. Returns the threshold and the answers.
    """
    low, high = LOWEST, HIGHEST
    best: Answers | None = None
    for _ in progress(range(bisections), divergence):
        middle = math.sqrt(low * high)
        acceptance = AcceptanceConfig(threshold=middle, divergence=divergence)
        answers = answer(
            model, tasks, acceptance, new_tokens=new_tokens, exact=exact, allowed=allowed
        )
        if answers is None:
            high = middle
        else:
            low, best = middle, answers
    if best is None:
        acceptance = AcceptanceConfig(threshold=low, divergence=divergence)
        best = answer(model, tasks, acceptance, new_tokens)
    assert best is not None
    return low, best


def answer(
    model: EagleFSD,
    tasks: Sequence[Task],
    acceptance: AcceptanceConfig,
    new_tokens: int,
    exact: Answers | None = None,
    allowed: int = 0,
) -> Answers | None:
    """Answer the problems greedily.

    Returns None as soon as the net loss against ``exact`` is certain to exceed ``allowed`` answers.
    """
    prompts = [torch.tensor(task.ids) for task in tasks]
    count = len(tasks)
    found = Answers([0] * count, [0] * count, [False] * count)
    lost, gained = 0, exact.right.count(False) if exact is not None else 0  # at best
    for item in model.generate_many(prompts, new_tokens, max_batch=BATCH, acceptance=acceptance):
        text = model.tokenizer.decode(item.tokens, skip_special_tokens=True)
        right = tasks[item.index].is_solved(text)
        found.tokens[item.index], found.steps[item.index] = len(item.tokens), item.stats.steps
        found.right[item.index] = right
        if exact is not None and not right:
            if exact.right[item.index]:
                lost += 1
            else:
                gained -= 1
            if lost - gained > allowed:
                return None
    return found


if __name__ == "__main__":
    main()
