"""Compare Hugging Face's ways to generate with this project's, on the bundled target.

::

    python benchmarks/compare.py --count 100

All answer the same word problems greedily with the same weights, problem by problem in turn, each
call timed as a whole. FSD uses the settings and the tree of the bundled ``fsd.json``. The number of
drafted tokens of prompt lookup and assisted generation (with the bundled draft model), and the tree
of exact verification, are those that are fastest on a few other problems. With ``--compile``, this
project's methods are measured both with and without compilation. The first answer of every method
is not counted.

With ``--eagle`` and ``--eagle-python``, the official EAGLE code decodes too, in a process of its
own, with the bundled head and the trees ``--tree``, and is compared with exact decoding at these
trees; ``benchmarks/README.md`` says how to install it.
"""

from __future__ import annotations

import argparse
import copy
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measurement import (
    EXACT,
    Contender,
    Method,
    Table,
    answer_in_turn,
    contenders,
    fastest,
    mean_ratio,
    new_parser,
    pair_method,
    parse,
    parse_tree,
    save_report,
    timed,
    word_problems,
)
from revisions import Worker, start_worker
from torch import Tensor
from transformers import AutoModelForCausalLM

from eagle_fsd import AcceptanceConfig, EagleFSD, TreeConfig
from eagle_fsd.bundled import BUNDLED_DRAFT_MODEL, BUNDLED_HEAD, BUNDLED_TARGET

#: The method that speeds are relative to.
GREEDY = "Hugging Face greedy"
#: Numbers of drafted tokens to choose from.
DRAFTED_TOKENS = (2, 4, 8)
#: Trees of exact verification to choose from, besides that of ``fsd.json``.
EXACT_TREES = (TreeConfig(total_tokens=16, depth=8, top_k=2),)
MAX_NEW_TOKENS = 256
OFFICIAL = "official EAGLE-2"
#: Version of transformers that the official code runs with.
OFFICIAL_TRANSFORMERS = "4.53.3"
#: Trees at which the official code is compared with exact decoding.
OFFICIAL_TREES = ("16/7/2", "60/5/10")
OFFICIAL_COLUMNS = {
    "method": "method",
    "official": "official (tokens/s)",
    "own": "own (tokens/s)",
    "ratio": "own / official",
    "ratio_interval": "95% interval",
    "identical": "same answer (%)",
}
COLUMNS = {
    "method": "method",
    "setting": "tree or drafted tokens",
    "tokens_per_second": "tokens/s",
    "speedup": "speed, greedy = 1",
    "speedup_interval": "95% interval",
    "identical": "same answer (%)",
    "accuracy": "right (%)",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and save it."""
    parser = new_parser("Compare Hugging Face's ways to generate with this project's.")
    parser.add_argument("--count", type=int, default=100, help="problems in the table")
    parser.add_argument("--trial", type=int, default=8, help="problems that select settings")
    parser.add_argument(
        "--eagle", type=Path, metavar="PATH", help="a checkout of the official EAGLE code"
    )
    parser.add_argument(
        "--eagle-python",
        metavar="PYTHON",
        help=f"its interpreter, with transformers {OFFICIAL_TRANSFORMERS}",
    )
    parser.add_argument(
        "--tree",
        type=parse_tree,
        nargs="+",
        help=f"trees of the official code: nodes/depth/top_k; default: {' '.join(OFFICIAL_TREES)}",
    )
    options = parse(parser, arguments)
    versions = _official_versions(parser, options)
    new_tokens = MAX_NEW_TOKENS
    if options.quick:
        options.count, options.trial, new_tokens = 2, 1, 8
    model = EagleFSD.from_pretrained(dtype=options.dtype, device_map=options.device)
    tasks = word_problems(model.tokenizer, options.trial + options.count)
    candidates = [*hugging_face_methods(model, new_tokens), *own_methods(model, new_tokens)]
    if options.compile:
        candidates += own_methods(model, new_tokens, compiled=True)
    if options.quick:  # one setting of each method
        candidates = list({method.name: method for method in candidates}.values())
    answer_in_turn(candidates, tasks[: options.trial], "selecting settings")
    best = fastest(candidates)
    methods, tasks = list(best.values()), tasks[options.trial :]
    groups: list[list[Method]] = []
    note = f"greedy, at most {new_tokens} new tokens, batch 1."

    def save(answered: int) -> None:
        if answered < 2:  # an interval takes two answers
            return
        finished = answered == len(tasks)
        rows = []
        for method in methods:
            rows.append(
                {
                    "method": method.name,
                    "setting": method.setting,
                    "tokens_per_second": method.tokens_per_second,
                    **mean_ratio("speedup", method.speeds, best[GREEDY].speeds),
                    "identical": method.identical(best[GREEDY]),
                    "accuracy": method.accuracy(tasks[:answered], model.tokenizer),
                    "seconds": [answer.seconds for answer in method.answers],
                }
            )
        count = answered if finished else f"{answered} of {len(tasks)}"
        tables = [
            Table("Methods on the bundled target", COLUMNS, rows, f"{count} problems, {note}")
        ]
        if groups:
            rows = [row for group in groups for row in compare_with_official(*group)]
            title = "Exact decoding against the official code"
            tables.append(Table(title, OFFICIAL_COLUMNS, rows, f"Official: {versions}."))
        save_report(options, "compare-official" if groups else "compare", tables, finished)

    with ExitStack() as stack:
        if versions:
            worker = stack.enter_context(
                start_worker(
                    options.eagle,
                    script="eagle_worker.py",
                    python=options.eagle_python,
                    threads=options.threads,
                )
            )
            trees = options.tree or list(map(parse_tree, OFFICIAL_TREES))
            groups += official_groups(
                worker, model, trees, new_tokens=new_tokens, compiles=options.compile
            )
            methods += [method for group in groups for method in group]
        answer_in_turn(methods, tasks, "answering", save)


def _official_versions(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str | None:
    """Check the options for the official code; return its versions, or None without it."""
    if options.eagle is None and options.eagle_python is None:
        if options.tree is not None:
            parser.error("--tree requires --eagle")
        return None
    if options.eagle is None or options.eagle_python is None:
        parser.error("--eagle and --eagle-python must be given together")
    if options.device != "cpu":
        parser.error(f"--eagle requires --device cpu; got {options.device}")
    if not (options.eagle / "eagle/model/ea_model.py").is_file():
        parser.error(
            "--eagle must be a checkout of the official EAGLE code;"
            f" {options.eagle} has no eagle/model/ea_model.py"
        )
    code = "from importlib.metadata import version as v; print(v('transformers'), v('torch'))"
    try:
        process = subprocess.run([options.eagle_python, "-c", code], capture_output=True, text=True)
    except OSError as error:
        parser.error(f"--eagle-python {options.eagle_python} cannot be run: {error.strerror}")
    if process.returncode:
        parser.error(f"--eagle-python {options.eagle_python} lacks torch or transformers")
    transformers, torch_version = process.stdout.split()
    if transformers != OFFICIAL_TRANSFORMERS:
        parser.error(
            f"--eagle-python must have transformers {OFFICIAL_TRANSFORMERS};"
            f" {options.eagle_python} has {transformers}"
        )
    return f"torch {torch_version}, transformers {transformers}"


def hugging_face_methods(model: EagleFSD, new_tokens: int) -> list[Method]:
    """Return greedy, prompt lookup and assisted generation, each with all its settings."""
    call: Any = model.model.generate

    def method(name: str, setting: str, **options: Any) -> Method:
        options = {"max_new_tokens": new_tokens, "do_sample": False, **options}

        def generate(ids: Tensor) -> tuple[Tensor, int]:
            return call(ids, attention_mask=torch.ones_like(ids), **options), 0

        return Method(name, setting, timed(generate, model.target.device))

    methods = [method(GREEDY, "")]
    for count in DRAFTED_TOKENS:
        name = "Hugging Face prompt lookup"
        methods.append(method(name, str(count), prompt_lookup_num_tokens=count))
    assistant = AutoModelForCausalLM.from_pretrained(BUNDLED_DRAFT_MODEL, dtype=model.target.dtype)
    for count in DRAFTED_TOKENS:
        drafting = copy.copy(assistant.to(model.target.device).eval())
        drafting.generation_config = copy.copy(assistant.generation_config)
        drafting.generation_config.num_assistant_tokens = count
        drafting.generation_config.num_assistant_tokens_schedule = "constant"
        drafting.generation_config.assistant_confidence_threshold = 0.0
        methods.append(method("Hugging Face assisted", str(count), assistant_model=drafting))
    return methods


def own_methods(model: EagleFSD, new_tokens: int, compiled: bool = False) -> list[Method]:
    """Return plain decoding, exact verification with all its trees, and FSD."""
    methods = []
    for way in contenders(model):
        name = f"{way.name}, compiled" if compiled else way.name
        for tree in dict.fromkeys([way.tree, *(EXACT_TREES if way.name == EXACT else ())]):
            methods.append(pair_method(name, way, tree, new_tokens, compiled=compiled))
    return methods


def official_groups(
    worker: Worker,
    model: EagleFSD,
    trees: Sequence[TreeConfig],
    new_tokens: int,
    compiles: bool,
) -> list[list[Method]]:
    """Return, for each tree, the official code followed by this project's exact decoding."""
    exact = Contender(EXACT, model, AcceptanceConfig())
    groups = []
    for tree in trees:
        request = {
            "target": str(BUNDLED_TARGET),
            "head": str(BUNDLED_HEAD),
            "dtype": str(model.target.dtype).removeprefix("torch."),
            "tree": [tree.total_tokens, tree.depth, tree.top_k],
            "options": {"max_new_tokens": new_tokens},
        }
        group = [Method(OFFICIAL, tree.shape, partial(worker, request))]
        group.append(pair_method(EXACT, exact, tree, new_tokens))
        if compiles:
            group.append(pair_method(f"{EXACT}, compiled", exact, tree, new_tokens, compiled=True))
        groups.append(group)
    return groups


def compare_with_official(official: Method, *methods: Method) -> list[dict[str, Any]]:
    """Return a row for each method at the same tree; the ratio is the geometric mean."""
    return [
        {
            "method": f"{method.name} {method.setting}",
            "official": official.tokens_per_second,
            "own": method.tokens_per_second,
            **mean_ratio("ratio", method.speeds, official.speeds),
            "identical": method.identical(official),
        }
        for method in methods
    ]


if __name__ == "__main__":
    main()
