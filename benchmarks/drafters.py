"""Compare drafters on the bundled target, each at the best of a list of trees.

::

    python benchmarks/drafters.py --count 60 --trial 24

All methods answer the same problems greedily, problem by problem in turn, so that changes of the
machine's speed affect all of them alike. A few problems select the best tree of every drafter and
setting; the table is measured on others. The first answer of every method is not counted.

There are two sets: the bundled word problems, and copies, which are word problems that follow two
versions of themselves about other people, with answers.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from measurement import (
    Table,
    mean_ratio,
    new_parser,
    parse,
    parse_tree,
    progress,
    save_report,
    synchronize,
    tree_name,
)
from torch import Tensor

from eagle_fsd import AcceptanceConfig, EagleFSD
from eagle_fsd.bundled import (
    BUNDLED_DRAFT_MODEL,
    BUNDLED_EAGLE3,
    BUNDLED_HEAD,
)
from eagle_fsd.bundled.problems import Message, chat_messages, edited_problems, problems

#: The messages of a chat up to a question, and the right result.
Task = tuple[list[Message], int]

DRAFTERS = {
    "EAGLE-2 head": str(BUNDLED_HEAD),
    "EAGLE-3 head": str(BUNDLED_EAGLE3),
    "draft model": str(BUNDLED_DRAFT_MODEL),
    "n-grams of the prompt": "ngram",
    "adaptive n-grams": "adaptive-ngram",
}
TREES = (
    *("8/3/2", "16/4/4", "16/8/2", "20/8/2"),
    *("8/6/1", "10/8/1", "14/12/1", "20/18/1", "26/24/1"),
)
ACCEPTANCE = {
    "exact": AcceptanceConfig(),
    "FSD": AcceptanceConfig(threshold=0.05, min_ratio=0.3),
}
COLUMNS = {
    "drafter": "drafter",
    "setting": "setting",
    "tree": "tree",
    "tau": "tau",
    "speedup": "speed, plain = 1",
    "speedup_interval": "95% interval",
    "accuracy": "accuracy (%)",
}


@dataclass
class Method:
    """A way to decode, and its results."""

    drafter: str
    setting: str
    model: EagleFSD
    new_tokens: int
    speeds: list[float] = field(default_factory=list)
    tokens: int = 0
    steps: int = 0
    right: int = 0

    def answer(self, ids: Tensor, final: int) -> None:
        """Answer a problem.

        ``ids``: ``[1, S]`` the prompt.
        """
        synchronize()
        begin = time.perf_counter()
        out = self.model.generate(
            ids,
            torch.ones_like(ids),
            self.new_tokens,
            acceptance=ACCEPTANCE[self.setting],
            method="fsd" if self.drafter else "ar",
        )
        synchronize()
        seconds = time.perf_counter() - begin
        new = out.sequences[0, ids.shape[1] :]
        self.speeds.append(len(new) / seconds)
        self.tokens += len(new)
        self.steps += sum(map(len, out.stats.accepted))
        text = self.model.tokenizer.decode(new, skip_special_tokens=True)
        self.right += text.rpartition("####")[2].strip() == str(final)

    def row(self, plain: Method) -> dict[str, Any]:
        """Summarize the results."""
        speedup, interval = mean_ratio(self.speeds, plain.speeds)
        return {
            "drafter": self.drafter or "none",
            "setting": self.setting,
            "tree": tree_name(self.model.tree) if self.drafter else "",
            "tau": self.tokens / self.steps,
            "speedup": speedup,
            "speedup_interval": interval,
            "accuracy": 100.0 * self.right / len(self.speeds),
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables and save them."""
    parser = new_parser("Compare drafters on the bundled target.", compiles=False)
    parser.add_argument("--count", type=int, default=100, help="problems in the table")
    parser.add_argument("--trial", type=int, default=12, help="problems that select the trees")
    options = parse(parser, arguments)
    trees, new_tokens = TREES, 256
    if options.quick:
        options.count, options.trial, trees, new_tokens = 2, 2, TREES[:2], 12
    target = EagleFSD.from_pretrained(dtype=options.dtype, device_map=options.device).model

    def method(drafter: str, setting: str, path: str, tree: str) -> Method:
        pair = EagleFSD.from_pretrained(target, path, tree=parse_tree(tree))
        return Method(drafter, setting, pair, new_tokens)

    plain = method("", "exact", str(BUNDLED_HEAD), trees[0])
    candidates = [
        method(drafter, setting, path, tree)
        for drafter, path in DRAFTERS.items()
        for setting in ACCEPTANCE
        for tree in trees
    ]
    tables: list[Table] = []
    for name, tasks in task_sets(1 + options.trial + options.count).items():
        rows = compare(plain, candidates, tasks, options.trial)
        note = (
            f"{options.count} tasks, greedy, at most {new_tokens} new tokens;"
            f" {options.trial} others selected each tree among {', '.join(trees)}."
        )
        tables.append(Table(f"Drafters on {name}", COLUMNS, rows, note))
        save_report(options, "drafters", tables, finished=False)
    save_report(options, "drafters", tables)


def task_sets(count: int) -> dict[str, list[Task]]:
    """Return the tasks of each set by its name."""
    single = [
        (chat_messages((problem.question, ""))[:-1], problem.final)
        for problem in problems("test", count)
    ]
    copies = []
    for versions in edited_problems("test", count):
        chat = chat_messages(*((item.question, item.answer) for item in versions))
        copies.append((chat[:-1], versions[-1].final))
    return {"problems": single, "copies": copies}


def compare(
    plain: Method, candidates: Sequence[Method], tasks: Sequence[Task], trial: int
) -> list[dict[str, Any]]:
    """Select the best tree of every drafter and setting, then measure them."""
    _answer_all(candidates, tasks[: trial + 1])
    best: dict[tuple[str, str], Method] = {}
    for method in candidates:
        key = method.drafter, method.setting
        if key not in best or _speed(method) > _speed(best[key]):
            best[key] = method
    chosen = [plain, *best.values()]
    _answer_all(chosen, [tasks[0], *tasks[trial + 1 :]])
    return [method.row(plain) for method in chosen]


def _answer_all(methods: Sequence[Method], tasks: Sequence[Task]) -> None:
    """Do tasks in turn; the first one is not counted."""
    for index, (messages, final) in enumerate(progress(tasks, f"{len(methods)} methods")):
        model = methods[0].model
        ids = model.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        for method in methods:
            method.answer(ids.to(model.target.device), final)
            if index == 0:
                method.speeds, method.tokens, method.steps, method.right = [], 0, 0, 0


def _speed(method: Method) -> float:
    return statistics.fmean(map(math.log, method.speeds))


if __name__ == "__main__":
    main()
