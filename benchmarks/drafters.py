"""Compare drafters on the bundled target, each at the best of a list of trees.

::

    python benchmarks/drafters.py --count 60 --trial 24

All methods answer the same problems greedily, problem by problem in turn, so that changes of the
machine's speed affect all of them alike. A few problems select the best tree of every drafter and
setting; the table is measured on others. The first answer of every method is not counted.

There are two sets: the bundled word problems, and copies: word problems, each preceded by two
solved versions of itself about other people.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from measurement import (
    EXACT,
    FSD,
    FSD_ACCEPTANCE,
    PLAIN,
    Contender,
    Table,
    Task,
    answer_in_turn,
    fastest,
    mean_ratio,
    new_parser,
    pair_method,
    parse,
    parse_tree,
    prompt_ids,
    save_report,
    word_problems,
)

from eagle_fsd import AcceptanceConfig, EagleFSD
from eagle_fsd.bundled import BUNDLED_DRAFT_MODEL, BUNDLED_EAGLE3, BUNDLED_HEAD
from eagle_fsd.bundled.problems import chat_messages, edited_problems

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
ACCEPTANCE = {EXACT: AcceptanceConfig(), FSD: FSD_ACCEPTANCE}
COLUMNS = {
    "drafter": "drafter",
    "setting": "setting",
    "tree": "tree",
    "tau": "tau",
    "speedup": "speed, plain = 1",
    "speedup_interval": "95% interval",
    "accuracy": "accuracy (%)",
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
    bundled = EagleFSD.from_pretrained(dtype=options.dtype, device_map=options.device)
    plain = pair_method("none, exact", Contender(PLAIN, bundled), None, new_tokens)
    candidates = []
    for drafter, path in DRAFTERS.items():
        for setting, acceptance in ACCEPTANCE.items():
            for tree in map(parse_tree, trees):
                # A drafter of its own: the adaptive one learns from all answers.
                pair = EagleFSD.from_pretrained(bundled.model, path)
                way, name = Contender(setting, pair, acceptance), f"{drafter}, {setting}"
                candidates.append(pair_method(name, way, tree, new_tokens))
    tables: list[Table] = []
    number = 1 + options.trial + options.count
    # The adaptive drafter must not have answered a counted task before.
    for name, (warm_up, *tasks) in task_sets(bundled.tokenizer, number).items():
        trial, counted = tasks[: options.trial], tasks[options.trial :]
        answer_in_turn(candidates, trial, "selecting trees", warm_up=warm_up)
        methods = [plain, *fastest(candidates).values()]
        answer_in_turn(methods, counted, "answering", warm_up=warm_up)
        rows = []
        for method in methods:
            drafter, _, setting = method.name.partition(", ")
            rows.append(
                {
                    "drafter": drafter,
                    "setting": setting,
                    "tree": method.setting,
                    "tau": method.tau,
                    **mean_ratio("speedup", method.speeds, plain.speeds),
                    "accuracy": method.accuracy(counted, bundled.tokenizer),
                }
            )
        note = (
            f"{options.count} tasks, greedy, at most {new_tokens} new tokens;"
            f" {options.trial} others selected each tree among {', '.join(trees)}."
        )
        tables.append(Table(f"Drafters on {name}", COLUMNS, rows, note))
        save_report(options, "drafters", tables, finished=False)
    save_report(options, "drafters", tables)


def task_sets(tokenizer: Any, count: int) -> dict[str, list[Task]]:
    """Return the tasks of each set by its name."""
    copies = []
    for versions in edited_problems("test", count):
        chat = chat_messages(*((item.question, item.answer) for item in versions))
        copies.append(Task(prompt_ids(tokenizer, chat[:-1]), versions[-1].final))
    return {"problems": word_problems(tokenizer, count), "copies": copies}


if __name__ == "__main__":
    main()
