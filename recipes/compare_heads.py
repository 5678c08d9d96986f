"""Compare the bundled heads: ``python -m recipes.compare_heads``.

Prints tau of exact decoding with the EAGLE-2 and the EAGLE-3 head on the same unseen problems, for
several trees. The model card of the EAGLE-3 head holds this table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from eagle_fsd.bundled import BUNDLED
from eagle_fsd.evaluation.tables import markdown
from eagle_fsd.train.record import read_record
from recipes.measure import describe_versions, measure

#: Name and folder of each head.
HEADS = (("EAGLE-2", "head"), ("EAGLE-3", "eagle3"))
#: The trees: total_tokens, depth and top_k. The last one is a chain.
TREES = ((16, 8, 2), (60, 6, 10), (10, 8, 1))
PROBLEMS = 200
TREE_OPTIONS = ("--total-tokens", "--depth", "--tree-top-k")


def main() -> None:
    """Measure the heads, and print a table."""
    parser = argparse.ArgumentParser(description="Compare tau of the bundled heads.")
    parser.add_argument("--pair", type=Path, default=BUNDLED, help="folder of the pair")
    parser.add_argument("--problems", type=int, default=PROBLEMS, help="problems to measure on")
    parser.add_argument(
        "--head", type=Path, action="append", default=[], help="folder of another head for a column"
    )
    options = parser.parse_args()
    sys.stdout.write(compare_heads(options.pair, options.problems, options.head) + "\n")


def compare_heads(pair: Path, problems: int = PROBLEMS, others: Sequence[Path] = ()) -> str:
    """Measure tau of exact decoding with both heads and others; return a Markdown table by tree."""
    heads = [(name, pair / folder) for name, folder in HEADS]
    heads += [(folder.name, folder) for folder in others]
    tokens = [f"{read_record(folder)['tokens'] / 1e6:.2f} M" for _, folder in heads]
    rows = []
    for tree in TREES:
        options = [word for option in zip(TREE_OPTIONS, tree, strict=True) for word in option]
        cells = ["/".join(map(str, tree))]
        for _, folder in heads:
            found = measure(pair / "target", folder, problems, ("exact",), *options)
            cells.append(f"{found['exact']['tau']:.2f}")
        rows.append(cells)
    table = markdown(["tree", *(name for name, _ in heads)], [*rows, ["training tokens", *tokens]])
    return (
        f"Tau of exact decoding on {problems} unseen problems, greedy, float32, by tree"
        f" (total_tokens/depth/top_k), {describe_versions()}:\n\n{table}"
    )


if __name__ == "__main__":
    main()
