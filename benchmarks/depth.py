"""Compare fixed depths of the draft tree with ``depth="auto"``.

::

    python benchmarks/depth.py --count 40

The bundled pair and the bundled draft model answer the same prompts greedily and losslessly, prompt
by prompt in turn, so that changes of the machine's speed affect all depths alike. The fixed depths
are those that ``"auto"`` chooses from, and the deepest is that of the settings. The answers to the
first prompts, from which ``"auto"`` learns how long steps take, are not counted.

There are three sets: the bundled word problems, the bundled edits (word problems that follow two
versions of themselves), and a mixture of both with small talk.
"""

from __future__ import annotations

import random
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
    progress,
    save_report,
    synchronize,
    tree_name,
)
from torch import Tensor, nn

from eagle_fsd import EagleFSD
from eagle_fsd.bundled import BUNDLED_DRAFT_MODEL, BUNDLED_HEAD
from eagle_fsd.bundled.problems import (
    Message,
    chat_messages,
    edited_problems,
    problems,
    small_talk,
)
from eagle_fsd.model.config import TreeConfig
from eagle_fsd.model.depth import shapes_of

AUTO = "auto"
DRAFTERS = {"head": BUNDLED_HEAD, "draft model": BUNDLED_DRAFT_MODEL}
MAX_NEW_TOKENS = 256
COLUMNS = {
    "drafter": "drafter",
    "depth": "depth",
    "tree": "tree",
    "tau": "tau",
    "tokens_per_second": "tokens/s",
    "over_auto": "relative to auto",
    "interval": "95% interval",
}


@dataclass
class Way:
    """A depth, and its results.

    Attributes:
        drafter: Key of :data:`DRAFTERS`.
        depth: The depth.
        model: The pair with its tree.
        seconds: Duration of every answer.
        answers: Tokens of every answer.
        steps: Target passes of all answers.
    """

    drafter: str
    depth: int | str
    model: EagleFSD
    seconds: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    steps: int = 0

    def answer(self, ids: Tensor, new_tokens: int, counted: bool) -> None:
        """Answer a prompt.

        Args:
            ids: ``[1, S]`` the prompt.
            new_tokens: Maximum number of new tokens.
            counted: Whether the answer counts.
        """
        synchronize()
        begin = time.perf_counter()
        out = self.model.generate(ids, torch.ones_like(ids), new_tokens, threshold=0.0)
        synchronize()
        if counted:
            self.seconds.append(time.perf_counter() - begin)
            self.answers.append(out.sequences[0, ids.shape[1] :].tolist())
            self.steps += out.stats.steps

    def row(self, auto: Way) -> dict[str, Any]:
        """Summarize the results.

        Args:
            auto: ``"auto"`` on the same prompts.
        """
        over_auto, interval = mean_ratio(auto.seconds, self.seconds)
        tokens = sum(map(len, self.answers))
        return {
            "drafter": self.drafter,
            "depth": self.depth,
            "tree": tree_name(self.model.exact_tree),
            "tau": tokens / self.steps,
            "tokens_per_second": tokens / sum(self.seconds),
            "over_auto": over_auto,
            "interval": interval,
            "identical": self.answers == auto.answers,
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables and save them.

    Args:
        arguments: The command line; default: that of the process.
    """
    parser = new_parser("Compare fixed depths of the draft tree with depth=auto.")
    parser.add_argument("--count", type=int, default=40, help="prompts per set")
    parser.add_argument("--warm-up", type=int, default=4, help="prompts that do not count")
    options = parse(parser, arguments)
    new_tokens = MAX_NEW_TOKENS
    if options.quick:
        options.count, options.warm_up, new_tokens = 2, 1, 12
    loaded = EagleFSD.from_pretrained(dtype=options.dtype, device_map=options.device)
    tables = []
    for name, chats in prompt_sets(options.warm_up + options.count).items():
        rows = []
        for drafter in DRAFTERS:
            ways = ways_of(loaded.model, drafter, loaded.exact_tree, options.compile)
            for index, chat in enumerate(progress(chats, f"{name}, {drafter}")):
                ids = loaded.tokenizer.apply_chat_template(
                    chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
                )["input_ids"].to(loaded.target.device)
                turn = index % len(ways)
                for way in ways[turn:] + ways[:turn]:
                    way.answer(ids, new_tokens, index >= options.warm_up)
            rows += [way.row(ways[0]) for way in ways]
        note = f"{options.count} prompts, greedy and lossless, at most {new_tokens} new tokens."
        tables.append(Table(f"Depths on {name}", COLUMNS, rows, note))
        save_report(options, "depth", tables, finished=False)
    save_report(options, "depth", tables)


def prompt_sets(count: int) -> dict[str, list[list[Message]]]:
    """Return the chats of each set, up to a question, by its name.

    Args:
        count: Number of chats per set.
    """
    generator = random.Random(0)
    single = [chat_messages((problem.question, ""))[:-1] for problem in problems("test", count)]
    edits = [
        chat_messages(*((item.question, item.answer) for item in versions))[:-1]
        for versions in edited_problems("test", count)
    ]
    talk = [chat_messages((small_talk(generator)[0], ""))[:-1] for _ in range(count)]
    mixed = [(single, talk, edits)[index % 3][index] for index in range(count)]
    return {"word problems": single, "edits": edits, "a mixture with small talk": mixed}


def ways_of(target: nn.Module, drafter: str, tree: TreeConfig, compiled: bool) -> list[Way]:
    """Return ``"auto"`` and the fixed depths that it chooses from.

    Args:
        target: The bundled target.
        drafter: Key of :data:`DRAFTERS`.
        tree: The deepest tree.
        compiled: Whether to compile the passes.
    """
    adaptive = tree.updated(depth=AUTO)
    fixed = [shape.updated(depth=shape.depth) for shape in shapes_of(adaptive)]
    ways = []
    for shape in (adaptive, *fixed):
        model = EagleFSD.from_pretrained(target, DRAFTERS[drafter], tree=shape)
        model.compile = compiled
        ways.append(Way(drafter, AUTO if shape.adaptive else shape.depth, model))
    return ways


if __name__ == "__main__":
    main()
