"""Compare drafters on the bundled target, each at the best of a list of trees.

::

    python benchmarks/drafters.py --count 100 --out benchmarks/results

All methods answer the same problems greedily in one process with one thread, problem by problem in
turn, so that changes of the machine's speed affect all of them alike. A few problems select the
best tree of every drafter and setting; the table is measured on others. The first answer of every
method is not counted.

There are two sets: the bundled word problems, and copies, which are word problems that follow two
versions of themselves about other people, with answers.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from measurement import progress
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from eagle_fsd import AcceptanceConfig, EagleFSD, TreeConfig
from eagle_fsd.bundled import (
    BUNDLED_DRAFT_MODEL,
    BUNDLED_EAGLE3,
    BUNDLED_HEAD,
)
from eagle_fsd.bundled.problems import Message, chat_messages, edited_problems, problems
from eagle_fsd.utils.files import atomic_write
from eagle_fsd.utils.provenance import describe_environment

#: The messages of a chat up to a question, and the right result.
Task = tuple[list[Message], int]

DRAFTERS = {
    "EAGLE-2 head": str(BUNDLED_HEAD),
    "EAGLE-3 head": str(BUNDLED_EAGLE3),
    "draft model": str(BUNDLED_DRAFT_MODEL),
    "n-grams of the prompt": "ngram",
    "adaptive n-grams": "adaptive-ngram",
}
#: Nodes, depth and children of each node; the depth is that of :class:`TreeConfig`.
TREES = (
    *((8, 3, 2), (16, 4, 4), (16, 8, 2), (20, 8, 2)),
    *((8, 6, 1), (10, 8, 1), (14, 12, 1), (20, 18, 1), (26, 24, 1)),
)
ACCEPTANCE = {
    "exact": AcceptanceConfig(),
    "FSD": AcceptanceConfig(threshold=0.05, min_ratio=0.3),
}
MAX_NEW_TOKENS = 256


@dataclass
class Method:
    """A way to decode, and its results.

    Attributes:
        drafter: Name of the drafter; empty for plain decoding.
        setting: Key of :data:`ACCEPTANCE`.
        model: The pair, with the tree.
        speeds: Tokens per second of every answer.
        tokens: Number of tokens of all answers.
        steps: Target passes of all answers.
        right: Number of right answers.
    """

    drafter: str
    setting: str
    model: EagleFSD
    speeds: list[float] = field(default_factory=list)
    tokens: int = 0
    steps: int = 0
    right: int = 0

    def answer(self, ids: Tensor, final: int) -> None:
        """Answer a problem.

        Args:
            ids: ``[1, S]`` the prompt.
            final: The right result.
        """
        begin = time.perf_counter()
        out = self.model.generate(
            ids,
            torch.ones_like(ids),
            MAX_NEW_TOKENS,
            acceptance=ACCEPTANCE[self.setting],
            method="fsd" if self.drafter else "ar",
        )
        seconds = time.perf_counter() - begin
        new = out.sequences[0, ids.shape[1] :]
        self.speeds.append(len(new) / seconds)
        self.tokens += len(new)
        self.steps += sum(map(len, out.stats.accepted))
        text = self.model.tokenizer.decode(new, skip_special_tokens=True)
        self.right += text.rpartition("####")[2].strip() == str(final)

    def row(self, plain: Method) -> dict[str, Any]:
        """Summarize the results.

        Args:
            plain: Plain decoding of the same problems.
        """
        ratios = [math.log(a / b) for a, b in zip(self.speeds, plain.speeds, strict=True)]
        error = statistics.stdev(ratios) / math.sqrt(len(ratios))
        mean = statistics.fmean(ratios)
        tree = self.model.tree
        return {
            "drafter": self.drafter or "none",
            "setting": self.setting,
            "tree": f"{tree.total_tokens}/{tree.depth}/{tree.top_k}" if self.drafter else "",
            "tau": self.tokens / self.steps,
            "speedup": math.exp(mean),
            "speedup_interval": [math.exp(mean - 1.96 * error), math.exp(mean + 1.96 * error)],
            "tokens_per_second": self.tokens
            / sum(self.tokens / len(self.speeds) / speed for speed in self.speeds),
            "accuracy": 100.0 * self.right / len(self.speeds),
        }


def main() -> None:
    """Measure and print the table, and save it with its provenance."""
    parser = argparse.ArgumentParser(description="Compare drafters on the bundled target.")
    parser.add_argument("--count", type=int, default=100, help="problems in the table")
    parser.add_argument("--trial", type=int, default=12, help="problems that select the trees")
    parser.add_argument("--out", type=Path, help="folder for drafters.json and drafters.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    target = EagleFSD.from_pretrained(device_map="cpu").model
    report: dict[str, Any] = {"environment": describe_environment(), "tables": {}}
    lines = []
    for name, tasks in task_sets(options.trial + options.count).items():
        rows = compare(target, tasks, options.trial)
        report["tables"][name] = rows
        lines += [f"## {name}", "", *table(rows), ""]
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            atomic_write(options.out / "drafters.md", "\n".join(lines))
            atomic_write(options.out / "drafters.json", json.dumps(report, indent=2) + "\n")
    print("\n".join(lines))


def task_sets(count: int) -> dict[str, list[Task]]:
    """Return the tasks of each set by its name.

    Args:
        count: Number of tasks per set.
    """
    single = [
        (chat_messages((problem.question, ""))[:-1], problem.final)
        for problem in problems("test", count)
    ]
    copies = []
    for versions in edited_problems("test", count):
        chat = chat_messages(*((item.question, item.answer) for item in versions))
        copies.append((chat[:-1], versions[-1].final))
    return {"problems": single, "copies": copies}


def compare(target: torch.nn.Module, tasks: Sequence[Task], trial: int) -> list[dict[str, Any]]:
    """Select the best tree of every drafter and setting, then measure them.

    Args:
        target: The bundled target.
        tasks: The tasks; the first ``trial`` ones select the trees.
        trial: Number of tasks that select.
    """
    plain = Method("", "exact", _pair(target, BUNDLED_HEAD, TREES[0]))
    candidates = [
        Method(drafter, setting, _pair(target, path, tree))
        for drafter, path in DRAFTERS.items()
        if not Path(path).is_absolute() or Path(path).is_dir()
        for setting in ACCEPTANCE
        for tree in TREES
    ]
    _answer_all([plain, *candidates], tasks[: trial + 1])
    best: dict[tuple[str, str], Method] = {}
    for method in candidates:
        key = method.drafter, method.setting
        if key not in best or _speed(method) > _speed(best[key]):
            best[key] = method
    plain = Method("", "exact", plain.model)
    chosen = [Method(item.drafter, item.setting, item.model) for item in best.values()]
    _answer_all([plain, *chosen], tasks[trial:])
    return [method.row(plain) for method in (plain, *chosen)]


def _pair(target: torch.nn.Module, drafter: str | Path, tree: tuple[int, int, int]) -> EagleFSD:
    nodes, depth, top_k = tree
    config = TreeConfig(total_tokens=nodes, depth=depth, top_k=top_k)
    return EagleFSD.from_pretrained(target, drafter, tree=config)


def _answer_all(methods: Sequence[Method], tasks: Sequence[Task]) -> None:
    """Do tasks in turn; the first one is not counted."""
    for index, (messages, final) in enumerate(progress(tasks, f"{len(methods)} methods")):
        ids = methods[0].model.tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )["input_ids"]
        for method in methods:
            method.answer(ids, final)
            if index == 0:
                method.speeds, method.tokens, method.steps, method.right = [], 0, 0, 0


def _speed(method: Method) -> float:
    return statistics.fmean(map(math.log, method.speeds))


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Format rows as a Markdown table.

    Args:
        rows: Results of :meth:`Method.row`.
    """
    lines = [
        "| drafter | setting | tree | tau | speed, plain = 1 | 95% interval | accuracy |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["speedup_interval"]
        lines.append(
            f"| {row['drafter']} | {row['setting']} | {row['tree']} | {row['tau']:.2f} |"
            f" {row['speedup']:.2f} | {low:.2f} to {high:.2f} | {row['accuracy']:.0f} |"
        )
    return lines


if __name__ == "__main__":
    main()
