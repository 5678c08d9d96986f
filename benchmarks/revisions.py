"""Compare the speed of two revisions of this project: the working tree and an older one.

::

    python benchmarks/revisions.py --stories ../shared/models/stories260k

Both answer the same prompts greedily with the same weights and the same trees, on the CPU in
float32 with one thread, prompt by prompt in turn: with plain decoding, exact verification, and FSD
on chains. The older revision is unpacked into a temporary folder.

There are two pairs: the bundled pair on word problems, and, with ``--stories``, the TinyStories
model of 260 k parameters with a head that ``recipes/stories.py`` trains into ``--stories-out``
unless it is there.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from measurement import (
    Answer,
    Method,
    Table,
    Task,
    answer_in_turn,
    mean_ratio,
    new_parser,
    parse,
    parse_tree,
    save_report,
    word_problems,
)

from eagle_fsd import TreeConfig
from eagle_fsd.bundled import BUNDLED_HEAD, BUNDLED_TARGET
from eagle_fsd.model.config import SETTINGS_FILE
from eagle_fsd.model.loading import load_tokenizer

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # the recipes are not installed

from recipes.stories import TEST_OPENINGS, openings, train_stories_head  # noqa: E402

REVISION = "68e5df3"
OLD, NEW = "old", "new"
TREES = ("60/6/10", "16/8/2", "12/4/4")
#: Trees and options of FSD: a chain that revision 68e5df3 was measured with, and a longer one.
CHAINS = ("20/18/1", "26/24/1")
FSD = {"threshold": 0.05, "min_ratio": 0.3}
#: Answers a prompt of token ids, given the other values of a request to a process.
Worker = Callable[[dict[str, Any], list[int]], Answer]
COLUMNS = {
    "method": "method",
    "tau": "tau",
    "old": "old (tokens/s)",
    "new": "new (tokens/s)",
    "ratio": "new / old",
    "ratio_interval": "95% interval",
    "identical": "same answer (%)",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables and save them."""
    parser = new_parser("Compare the speed of the working tree with that of an older revision.")
    parser.add_argument("--revision", default=REVISION, help="the older one; default: %(default)s")
    parser.add_argument("--count", type=int, default=40, help="prompts per pair and tree")
    parser.add_argument(
        "--tree", type=parse_tree, nargs="+", help="trees of exact verification: nodes/depth/top_k"
    )
    parser.add_argument("--stories", type=Path, help="folder of the TinyStories model")
    parser.add_argument(
        "--stories-out", type=Path, default=Path("runs/stories"), help="folder of its head"
    )
    options = parse(parser, arguments, device="cpu", dtype="float32", threads=1)
    count, new_tokens = (2, 16) if options.quick else (options.count, 192)
    first = 1 if options.quick else None
    trees = options.tree or list(map(parse_tree, TREES[:first]))
    cases: list[tuple[str, TreeConfig, dict[str, Any]]] = [
        ("plain", trees[0], {"method": "ar"}),
        *((f"exact {tree.shape}", tree, {"threshold": 0.0}) for tree in trees),
        *((f"FSD {tree.shape}", tree, FSD) for tree in map(parse_tree, CHAINS[:first])),
    ]
    tasks = word_problems(load_tokenizer(BUNDLED_TARGET), count)
    pairs = {"bundled pair": (BUNDLED_TARGET, BUNDLED_HEAD, tasks)}
    if options.stories:
        head = options.stories_out / "head"
        if not (head / "model.safetensors").exists():
            train_stories_head(options.stories, options.stories_out)
        tokenizer = load_tokenizer(options.stories)
        chosen = openings()[: min(count, TEST_OPENINGS)]
        tasks = [Task(tokenizer(text).input_ids, 0) for text in chosen]
        pairs["stories260k"] = (options.stories, head, tasks)
    tables = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        unpack(options.revision, folder / "revision")
        roots = {OLD: folder / "revision", NEW: ROOT}
        workers = {name: stack.enter_context(start_worker(root)) for name, root in roots.items()}
        for name, (target, head, tasks) in pairs.items():
            # Without checkpoints, and the settings beside it, whose format has changed.
            weights = folder / name
            shutil.copytree(head, weights, ignore=shutil.ignore_patterns(SETTINGS_FILE, "check*"))
            request = {
                "target": str(target),
                "head": str(weights),
                "compile": options.compile,
            }
            note = (
                f"{len(tasks)} prompts, greedy, at most {new_tokens} new tokens, whole calls; old"
                f" is revision {options.revision}. FSD: T = {FSD['threshold']},"
                f" r = {FSD['min_ratio']}."
            )
            tables.append(Table(name, COLUMNS, [], note))
            for method, tree, given in cases:
                own = {
                    **request,
                    "tree": [tree.total_tokens, tree.depth, tree.top_k],
                    "options": {"max_new_tokens": new_tokens, **given},
                }
                old, new = (
                    Method(key, method, partial(worker, own)) for key, worker in workers.items()
                )
                answer_in_turn([old, new], tasks, f"{name}, {method}")
                row = {
                    "method": method,
                    "tau": new.tau,
                    **{item.name: item.tokens_per_second for item in (old, new)},
                    **mean_ratio("ratio", new.speeds, old.speeds),
                    "identical": new.identical(old),
                    "seconds": {
                        item.name: [answer.seconds for answer in item.answers]
                        for item in (old, new)
                    },
                }
                tables[-1].rows.append(row)
                save_report(options, "revisions", tables, finished=False)
    save_report(options, "revisions", tables)


def unpack(revision: str, folder: Path) -> None:
    """Extract the package as of a revision."""
    command = ["git", "archive", "--format=tar", revision, "eagle_fsd"]
    archive = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")


@contextmanager
def start_worker(
    root: Path,
    script: str = "revision_worker.py",
    python: str = sys.executable,
    threads: int = 1,
) -> Iterator[Worker]:
    """Start a process that decodes with one revision, or with the official EAGLE code."""
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [python, str(Path(__file__).with_name(script))],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None

    def read() -> Any:
        line = stdout.readline()
        if not line:
            raise RuntimeError("a worker ended; see its error above")
        return json.loads(line)

    def answer(request: dict[str, Any], ids: list[int]) -> Answer:
        stdin.write(json.dumps({**request, "ids": ids}) + "\n")
        stdin.flush()
        return Answer(**read())

    with process:
        try:
            found = Path(read()).resolve()
            if found.parent != root.resolve():
                raise RuntimeError(f"expected the package in {root}; found {found}")
            yield answer
        finally:
            stdin.close()


if __name__ == "__main__":
    main()
