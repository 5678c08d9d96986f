"""Write the results of the benchmarks on a CPU into ``benchmarks/README.md``.

::

    python benchmarks/summary.py

The part of the page below :data:`MARK` is replaced by some of the reports in ``--out``, and links
to the others.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from measurement import RESULTS

from eagle_fsd.utils.files import atomic_write

README = Path(__file__).with_name("README.md")
MARK = "## Results"
#: Reports that the page contains, in its order.
REPORTS = (
    "compare-cpu.md",
    "step-bundled-compiled-cpu.md",
    "revisions-cpu.md",
    "serving-cpu.md",
    "operations-float32-cpu.md",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Rewrite the page."""
    parser = argparse.ArgumentParser(description="Write the results into the README.")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--readme", type=Path, default=README, help="page to rewrite")
    options = parser.parse_args(arguments)
    head = options.readme.read_text(encoding="utf-8").partition(MARK)[0]
    parts = [f"{MARK}\n"]
    for path in filter(Path.exists, (options.out / name for name in REPORTS)):
        # The titles of the tables are one level below this section's.
        parts.append(path.read_text(encoding="utf-8").replace("## ", "### "))
    folder = os.path.relpath(options.out, options.readme.parent)
    others = sorted({path.name for path in options.out.glob("*-cpu.md")} - {*REPORTS})
    if others:
        links = (f"- [{name}]({folder}/{name})\n" for name in others)
        parts.append(f"### Further results\n\n{''.join(links)}")
    atomic_write(options.readme, head + "\n".join(parts))


if __name__ == "__main__":
    main()
