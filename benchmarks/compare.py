"""Compare Hugging Face's ways to generate with this project's, on the bundled target.

::

    python benchmarks/compare.py --count 100

All answer the same word problems greedily with the same weights, problem by problem in turn, each
call timed as a whole. FSD uses the settings and the tree of the bundled ``fsd.json``. Prompt lookup
and assisted generation (with the bundled draft model) use the number of drafted tokens, and exact
verification the tree, that is fastest on a few other problems. With ``--compile``, this project's
methods are measured both with and without compilation. The first answer of every method is not
counted.

With ``--eagle`` and ``--eagle-python``, the official EAGLE code decodes too, in a process of its
own, with the bundled head and the trees ``--tree``, and is compared with exact decoding at these
trees::

    git clone https://github.com/SafeAILab/EAGLE ../EAGLE
    python -m venv ../eagle-venv
    ../eagle-venv/bin/pip install torch==2.13.0 transformers==4.53.3
    python benchmarks/compare.py --eagle ../EAGLE --eagle-python ../eagle-venv/bin/python
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from measurement import (
    COLORS,
    EXACT,
    Contender,
    Table,
    contenders,
    mean_ratio,
    new_figure,
    new_parser,
    parse,
    parse_tree,
    progress,
    save_report,
    synchronize,
    tree_name,
)
from revisions import Worker
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from eagle_fsd import AcceptanceConfig, EagleFSD, TreeConfig
from eagle_fsd.bundled import BUNDLED_DRAFT_MODEL, BUNDLED_HEAD, BUNDLED_TARGET
from eagle_fsd.bundled.problems import Problem, chat_messages, problems

#: The method that speeds are relative to.
GREEDY = "Hugging Face greedy"
#: Numbers of drafted tokens to choose from.
LOOKUP_TOKENS = (2, 4, 8)
ASSISTANT_TOKENS = (2, 4, 8)
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


@dataclass
class Method:
    """A way to generate, and its results.

    ``generate``: Takes a prompt ``[1, S]`` and returns the new tokens and the seconds.
    ``seconds``: Seconds of each answer.
    """

    name: str
    setting: str
    generate: Callable[[Tensor], tuple[list[int], float]]
    seconds: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)

    def answer(self, ids: Tensor) -> None:
        """Answer a prompt, and note the time.

        ``ids``: ``[1, S]``.
        """
        answer, seconds = self.generate(ids)
        self.answers.append(answer)
        self.seconds.append(seconds)

    def forget(self) -> None:
        """Discard the results."""
        self.seconds, self.answers = [], []

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of each answer."""
        return [len(new) / s for new, s in zip(self.answers, self.seconds, strict=True)]

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all answers."""
        return sum(map(len, self.answers)) / sum(self.seconds)


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
        options.count, options.trial, new_tokens = 2, 1, 16
    model = EagleFSD.from_pretrained(dtype=options.dtype, device_map=options.device)
    tasks = problems("test", options.trial + options.count)
    candidates = [*hugging_face_methods(model, new_tokens), *own_methods(model, new_tokens)]
    if options.compile:
        candidates += own_methods(model, new_tokens, compiled=True)
    if options.quick:  # one setting of each method
        candidates = list({method.name: method for method in candidates}.values())
    _answer_all(candidates, model, tasks[: options.trial], "selecting settings")
    best: dict[str, Method] = {}
    for method in candidates:
        name = method.name
        if name not in best or _mean_log(method.speeds) > _mean_log(best[name].speeds):
            best[name] = method
    methods, tasks = list(best.values()), tasks[options.trial :]
    groups: list[list[Method]] = []
    note = f"greedy, at most {new_tokens} new tokens, batch 1."

    def save(answered: int) -> None:
        if answered < min(2, len(tasks)):  # an interval takes two answers
            return
        finished = answered == len(tasks)
        rows = [summarize(method, best[GREEDY], model, tasks[:answered]) for method in methods]
        count = answered if finished else f"{answered} of {len(tasks)}"
        tables = [
            Table("Methods on the bundled target", COLUMNS, rows, f"{count} problems, {note}")
        ]
        if groups:
            rows = [row for group in groups for row in compare_with_official(*group)]
            title = "Exact decoding against the official code"
            tables.append(Table(title, OFFICIAL_COLUMNS, rows, f"Official: {versions}."))
        _save(options, tables, finished)

    with ExitStack() as stack:
        if versions:
            worker = stack.enter_context(
                Worker.started(
                    options.eagle,
                    script="eagle_worker.py",
                    python=options.eagle_python,
                    threads=options.threads,
                )
            )
            trees = options.tree or list(map(parse_tree, OFFICIAL_TREES))
            groups += official_groups(worker, model, trees, new_tokens, options.compile)
            methods += [method for group in groups for method in group]
        _answer_all(methods, model, tasks, "answering", save)


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


def _save(options: argparse.Namespace, tables: list[Table], finished: bool) -> None:
    """Save the results so far; the first table is drawn."""
    figure, (axis,) = new_figure()
    rows = tables[0].rows
    speeds = [row["speedup"] for row in rows]
    errors = [abs(row["speedup"] - end) for row in rows for end in row["speedup_interval"]]
    axis.barh(
        [f"{row['method']} {row['setting']}".strip() for row in rows],
        speeds,
        color=COLORS[0],
        xerr=[errors[::2], errors[1::2]],
    )
    axis.invert_yaxis()
    axis.set_xlabel("speed, Hugging Face's greedy generate = 1 (95% interval)")
    save_report(options, "compare", tables, figure, finished)


def hugging_face_methods(model: EagleFSD, new_tokens: int) -> list[Method]:
    """Return greedy, prompt lookup and assisted generation, each with all its settings."""
    target = model.model
    methods = [Method(GREEDY, "", _hugging_face(target, new_tokens))]
    for count in LOOKUP_TOKENS:
        generate = _hugging_face(target, new_tokens, prompt_lookup_num_tokens=count)
        methods.append(Method("Hugging Face prompt lookup", str(count), generate))
    assistant = AutoModelForCausalLM.from_pretrained(BUNDLED_DRAFT_MODEL, dtype=target.dtype)
    for count in ASSISTANT_TOKENS:
        drafting = copy.copy(assistant.to(target.device).eval())
        drafting.generation_config = copy.copy(assistant.generation_config)
        drafting.generation_config.num_assistant_tokens = count
        drafting.generation_config.num_assistant_tokens_schedule = "constant"
        drafting.generation_config.assistant_confidence_threshold = 0.0
        generate = _hugging_face(target, new_tokens, assistant_model=drafting)
        methods.append(Method("Hugging Face assisted", str(count), generate))
    return methods


def _hugging_face(
    target: PreTrainedModel, new_tokens: int, **options: Any
) -> Callable[[Tensor], tuple[list[int], float]]:
    call: Any = target.generate
    options = {"max_new_tokens": new_tokens, "do_sample": False, **options}
    return _timed(lambda ids: call(ids, attention_mask=torch.ones_like(ids), **options))


def _timed(
    generate: Callable[[Tensor], Tensor],
) -> Callable[[Tensor], tuple[list[int], float]]:
    """Wrap a function that returns ``[1, S + new]``."""

    def timed(ids: Tensor) -> tuple[list[int], float]:
        synchronize()
        begin = time.perf_counter()
        sequences = generate(ids)
        synchronize()
        seconds = time.perf_counter() - begin
        return sequences[0, ids.shape[1] :].tolist(), seconds

    return timed


def own_methods(model: EagleFSD, new_tokens: int, compiled: bool = False) -> list[Method]:
    """Return plain decoding, exact verification with all its trees, and FSD."""
    methods = []
    for way in contenders(model):
        trees = [way.tree, *(EXACT_TREES if way.name == EXACT else ())]
        for tree in dict.fromkeys(trees):
            methods.append(_own(way, tree, new_tokens, compiled))
    return methods


def _own(way: Contender, tree: TreeConfig | None, new_tokens: int, compiled: bool) -> Method:
    pair = copy.copy(way.model)
    pair.compile = compiled
    if tree is not None:
        pair.tree = tree
    options = way.options()

    def generate(ids: Tensor) -> Tensor:
        return pair.generate(ids, torch.ones_like(ids), new_tokens, **options).sequences

    name = f"{way.name}, compiled" if compiled else way.name
    return Method(name, "" if tree is None else tree_name(tree), _timed(generate))


def official_groups(
    worker: Worker,
    model: EagleFSD,
    trees: Sequence[TreeConfig],
    new_tokens: int,
    compiles: bool,
) -> list[list[Method]]:
    """Return, for each tree, the official code followed by this project's exact decoding."""
    exact = Contender(EXACT, model, AcceptanceConfig())
    return [
        [
            Method(OFFICIAL, tree_name(tree), _official(worker, model, tree, new_tokens)),
            *(
                _own(exact, tree, new_tokens, compiled)
                for compiled in (False, True)[: 1 + compiles]
            ),
        ]
        for tree in trees
    ]


def _official(
    worker: Worker, model: EagleFSD, tree: TreeConfig, new_tokens: int
) -> Callable[[Tensor], tuple[list[int], float]]:
    request = {
        "target": str(BUNDLED_TARGET),
        "head": str(BUNDLED_HEAD),
        "dtype": str(model.target.dtype).removeprefix("torch."),
        "tree": [tree.total_tokens, tree.depth, tree.top_k],
        "options": {"max_new_tokens": new_tokens},
    }

    def generate(ids: Tensor) -> tuple[list[int], float]:
        result = worker.answer({**request, "ids": ids[0].tolist()})
        return result["tokens"], result["seconds"]

    return generate


def compare_with_official(official: Method, *methods: Method) -> list[dict[str, Any]]:
    """Compare methods with the official code at the same tree.

    Returns A row of the table for each method. The ratio is the geometric mean over the problems.
    """
    rows = []
    for method in methods:
        ratio, interval = mean_ratio(method.speeds, official.speeds)
        same = [a == b for a, b in zip(method.answers, official.answers, strict=True)]
        rows.append(
            {
                "method": f"{method.name} {method.setting}",
                "official": official.tokens_per_second,
                "own": method.tokens_per_second,
                "ratio": ratio,
                "ratio_interval": interval,
                "identical": 100 * statistics.fmean(same),
            }
        )
    return rows


def _answer_all(
    methods: Sequence[Method],
    model: EagleFSD,
    tasks: Sequence[Problem],
    label: str,
    after: Callable[[int], None] = lambda _: None,
) -> None:
    """Answer all problems, after one that is not counted, and report the number of answers."""
    for index, task in enumerate(progress([tasks[0], *tasks], label)):
        ids = model.tokenizer.apply_chat_template(
            chat_messages((task.question, ""))[:-1],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )["input_ids"].to(model.target.device)
        for method in methods:
            if index < 2:
                method.forget()
            method.answer(ids)
        after(index)


def summarize(
    method: Method, greedy: Method, model: EagleFSD, tasks: Sequence[Problem]
) -> dict[str, Any]:
    """Summarize a method's results.

    Returns a row of the table. The speed is the geometric mean over the problems.
    """
    speedup, interval = mean_ratio(method.speeds, greedy.speeds)
    texts = [model.tokenizer.decode(new, skip_special_tokens=True) for new in method.answers]
    right = [
        text.rpartition("####")[2].strip() == str(task.final)
        for text, task in zip(texts, tasks, strict=True)
    ]
    same = [a == b for a, b in zip(method.answers, greedy.answers, strict=True)]
    return {
        "method": method.name,
        "setting": method.setting,
        "tokens_per_second": method.tokens_per_second,
        "speedup": speedup,
        "speedup_interval": interval,
        "identical": 100 * statistics.fmean(same),
        "accuracy": 100 * statistics.fmean(right),
        "seconds": method.seconds,
    }


def _mean_log(values: Sequence[float]) -> float:
    return statistics.fmean(map(math.log, values))


if __name__ == "__main__":
    main()
