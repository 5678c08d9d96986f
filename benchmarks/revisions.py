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
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from measurement import (
    Table,
    mean_ratio,
    new_parser,
    parse,
    parse_tree,
    progress,
    save_report,
    tree_name,
)

from eagle_fsd import TreeConfig
from eagle_fsd.bundled import BUNDLED_HEAD, BUNDLED_TARGET
from eagle_fsd.bundled.problems import chat_messages, problems
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
    options = parse(parser, arguments)
    count, new_tokens = (2, 16) if options.quick else (options.count, 192)
    first = 1 if options.quick else None
    trees = options.tree or list(map(parse_tree, TREES[:first]))
    cases: list[tuple[str, TreeConfig, dict[str, Any]]] = [
        ("plain", trees[0], {"method": "ar"}),
        *((f"exact {tree_name(tree)}", tree, {"threshold": 0.0}) for tree in trees),
        *((f"FSD {tree_name(tree)}", tree, FSD) for tree in map(parse_tree, CHAINS[:first])),
    ]
    bundled = load_tokenizer(BUNDLED_TARGET)
    prompts = [
        bundled.apply_chat_template(
            chat_messages((problem.question, ""))[:-1], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for problem in problems("test", count)
    ]
    pairs = {"bundled pair": (BUNDLED_TARGET, BUNDLED_HEAD, prompts)}
    if options.stories:
        head = options.stories_out / "head"
        if not (head / "model.safetensors").exists():
            train_stories_head(options.stories, options.stories_out)
        tokenizer = load_tokenizer(options.stories)
        chosen = openings()[: min(count, TEST_OPENINGS)]
        pairs["stories260k"] = (
            options.stories,
            head,
            [tokenizer(text).input_ids for text in chosen],
        )
    tables = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        unpack(options.revision, folder / "revision")
        roots = {OLD: folder / "revision", NEW: ROOT}
        workers = {name: stack.enter_context(Worker.started(root)) for name, root in roots.items()}
        for name, (target, head, prompts) in pairs.items():
            # Without the settings beside it, whose format has changed.
            weights = folder / name
            shutil.copytree(head, weights, ignore=shutil.ignore_patterns(SETTINGS_FILE, "check*"))
            request = {
                "target": str(target),
                "head": str(weights),
                "compile": options.compile,
            }
            note = (
                f"{len(prompts)} prompts, greedy, at most {new_tokens} new tokens, whole calls; old"
                f" is revision {options.revision}. FSD: T = {FSD['threshold']},"
                f" r = {FSD['min_ratio']}."
            )
            tables.append(Table(name, COLUMNS, [], note))
            rows = tables[-1].rows
            for method, tree, chosen in cases:
                own = {
                    **request,
                    "tree": [tree.total_tokens, tree.depth, tree.top_k],
                    "options": {"max_new_tokens": new_tokens, **chosen},
                }
                row = compare(workers, own, prompts, f"{name}, {method}")
                rows.append({"method": method, **row})
                save_report(options, "revisions", tables, finished=False)
    save_report(options, "revisions", tables)


def unpack(revision: str, folder: Path) -> None:
    """Unpack a revision of this repository."""
    command = ["git", "archive", "--format=tar", revision, "eagle_fsd"]
    archive = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")


class Worker:
    """A process that decodes with one revision, or with the official EAGLE code."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    @classmethod
    @contextmanager
    def started(
        cls,
        root: Path,
        script: str = "revision_worker.py",
        python: str = sys.executable,
        threads: int = 1,
    ) -> Iterator[Worker]:
        """Start a worker, and end it with the context."""
        path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
        process = subprocess.Popen(
            [python, str(Path(__file__).with_name(script))],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            worker = cls(process)
            try:
                found = Path(worker._read()).resolve()
                if found.parent != root.resolve():
                    raise RuntimeError(f"expected the package in {root}; found {found}")
                yield worker
            finally:
                _pipe(process.stdin).close()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Decode one prompt.

        Returns the new tokens, the number of target passes, and the seconds.
        """
        stdin = _pipe(self.process.stdin)
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        result: dict[str, Any] = self._read()
        return result

    def _read(self) -> Any:
        line = _pipe(self.process.stdout).readline()
        if not line:
            raise RuntimeError("a worker ended; see its error above")
        return json.loads(line)


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def compare(
    workers: dict[str, Worker], request: dict[str, Any], prompts: Sequence[list[int]], label: str
) -> dict[str, Any]:
    """Answer prompts with both revisions in turn, after one that is not counted.

    Returns a row of the table. The ratio is the geometric mean over the prompts.
    """
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    for index, ids in enumerate(progress([prompts[0], *prompts], label)):
        for name, worker in workers.items():
            result = worker.answer({**request, "ids": ids})
            if index:
                results[name].append(result)
    speeds = {
        name: [len(item["tokens"]) / item["seconds"] for item in found]
        for name, found in results.items()
    }
    ratio, interval = mean_ratio(speeds[NEW], speeds[OLD])
    pairs = zip(results[OLD], results[NEW], strict=True)
    tokens = {name: sum(len(item["tokens"]) for item in found) for name, found in results.items()}
    return {
        "tau": tokens[NEW] / sum(item["passes"] for item in results[NEW]),
        **{
            name: tokens[name] / sum(item["seconds"] for item in found)
            for name, found in results.items()
        },
        "ratio": ratio,
        "ratio_interval": interval,
        "identical": 100 * statistics.fmean(a["tokens"] == b["tokens"] for a, b in pairs),
        "seconds": {name: [item["seconds"] for item in found] for name, found in results.items()},
    }


if __name__ == "__main__":
    main()
