"""Write the results of the benchmarks on a CPU into ``benchmarks/README.md``.

::

    python benchmarks/summary.py

The part of the page below :data:`MARK` is replaced by the tables in ``--out``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from measurement import RESULTS

from eagle_fsd.utils.files import atomic_write

README = Path(__file__).with_name("README.md")
MARK = "## Results"
#: Reports in the order of the page; names of files without ``-cpu.md``.
REPORTS = (
    "compare",
    "batches",
    "drafters",
    "step-bundled",
    "step-bundled-compiled",
    "revisions",
    "serving",
    "shapes-bfloat16",
    "shapes-float32",
    "vocabulary-float32",
    "vocabulary-bfloat16",
    "attention",
    "growth",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Rewrite the page.

    Args:
        arguments: The command line; default: that of the process.
    """
    parser = argparse.ArgumentParser(description="Write the results into the README.")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--readme", type=Path, default=README, help="page to rewrite")
    options = parser.parse_args(arguments)
    head = options.readme.read_text(encoding="utf-8").partition(MARK)[0]
    parts = [f"{MARK}\n"]
    for name in REPORTS:
        paths = (options.out / f"{name}-cpu.md", options.out / f"{name}.md")
        for path in filter(Path.exists, paths):
            # The titles of the tables are one level below this section's.
            parts.append(path.read_text(encoding="utf-8").replace("## ", "### "))
    atomic_write(options.readme, head + "\n".join(parts))


if __name__ == "__main__":
    main()
