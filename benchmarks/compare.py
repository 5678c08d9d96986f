"""Compare Hugging Face's ways to generate with this project's, on the bundled target.

::

    python benchmarks/compare.py --count 100

All answer the same word problems greedily with the same weights, problem by problem in turn, each
call timed as a whole. FSD uses the settings and the tree of the bundled ``fsd.json``. Prompt lookup
and assisted generation (with the bundled draft model) use the number of drafted tokens, and exact
verification the tree, that is fastest on a few other problems. With ``--compile``, this project's
methods are measured both with and without compilation. The first answer of every method is not
counted.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from measurement import (
    COLORS,
    EXACT,
    Table,
    contenders,
    mean_ratio,
    new_figure,
    new_parser,
    parse,
    progress,
    save_report,
    synchronize,
    tree_name,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.bundled import BUNDLED_DRAFT_MODEL
from eagle_fsd.bundled.problems import Problem, chat_messages, problems

#: The method that speeds are relative to.
GREEDY = "Hugging Face greedy"
#: Numbers of drafted tokens to choose from.
LOOKUP_TOKENS = (2, 4, 8)
ASSISTANT_TOKENS = (2, 4, 8)
#: Trees of exact verification to choose from, besides that of ``fsd.json``.
EXACT_TREES = (TreeConfig(total_tokens=16, depth=8, top_k=2),)
MAX_NEW_TOKENS = 256
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

    Attributes:
        name: Shown in the table.
        setting: Tree, or number of drafted tokens.
        generate: Takes a prompt ``[1, S]`` and returns ``[1, S + new]``.
        seconds: Seconds of each answer.
        answers: New tokens of each answer.
    """

    name: str
    setting: str
    generate: Callable[[Tensor], Tensor]
    seconds: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)

    def answer(self, ids: Tensor) -> None:
        """Answer a prompt, and note the time.

        Args:
            ids: ``[1, S]``.
        """
        synchronize()
        begin = time.perf_counter()
        sequences = self.generate(ids)
        synchronize()
        self.seconds.append(time.perf_counter() - begin)
        self.answers.append(sequences[0, ids.shape[1] :].tolist())

    def forget(self) -> None:
        """Discard the results."""
        self.seconds, self.answers = [], []

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of each answer."""
        return [len(new) / s for new, s in zip(self.answers, self.seconds, strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and save it.

    Args:
        arguments: The command line; default: that of the process.
    """
    parser = new_parser("Compare Hugging Face's ways to generate with this project's.")
    parser.add_argument("--count", type=int, default=100, help="problems in the table")
    parser.add_argument("--trial", type=int, default=8, help="problems that select settings")
    options = parse(parser, arguments)
    new_tokens = MAX_NEW_TOKENS
    if options.quick:
        options.count, options.trial, new_tokens = 2, 1, 16
    model = EagleFSD.from_pretrained(dtype=options.dtype, device_map=options.device)
    tasks = problems("test", options.trial + options.count)
    candidates = [*hugging_face_methods(model, new_tokens), *own_methods(model, new_tokens)]
    if options.compile:
        candidates += own_methods(model, new_tokens, compiled=True)
    _answer_all(candidates, model, tasks[: options.trial], "selecting settings")
    best: dict[str, Method] = {}
    for method in candidates:
        name = method.name
        if name not in best or _mean_log(method.speeds) > _mean_log(best[name].speeds):
            best[name] = method
    methods, tasks = list(best.values()), tasks[options.trial :]
    note = f"greedy, at most {new_tokens} new tokens, batch 1."

    def save(answered: int) -> None:
        if 1 < answered < len(tasks):  # an interval takes two answers
            rows = [summarize(method, best[GREEDY], model, tasks[:answered]) for method in methods]
            _save(options, rows, f"{answered} of {len(tasks)} problems, {note}", finished=False)

    _answer_all(methods, model, tasks, "answering", save)
    rows = [summarize(method, best[GREEDY], model, tasks) for method in methods]
    _save(options, rows, f"{options.count} problems, {note}")


def _save(
    options: argparse.Namespace, rows: list[dict[str, Any]], note: str, finished: bool = True
) -> None:
    """Save the results so far."""
    figure, (axis,) = new_figure()
    speeds = [row["speedup"] for row in rows]
    errors = [abs(row["speedup"] - end) for row in rows for end in row["speedup_interval"]]
    axis.barh(
        [row["method"] for row in rows], speeds, color=COLORS[0], xerr=[errors[::2], errors[1::2]]
    )
    axis.invert_yaxis()
    axis.set_xlabel("speed, Hugging Face's greedy generate = 1 (95% interval)")
    table = Table("Methods on the bundled target", COLUMNS, rows, note)
    save_report(options, "compare", [table], figure, finished)


def hugging_face_methods(model: EagleFSD, new_tokens: int) -> list[Method]:
    """Return greedy, prompt lookup and assisted generation, each with all its settings.

    Args:
        model: The bundled pair, whose target generates.
        new_tokens: Maximum number of new tokens.
    """
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
) -> Callable[[Tensor], Tensor]:
    call: Any = target.generate
    options = {"max_new_tokens": new_tokens, "do_sample": False, **options}
    return lambda ids: call(ids, attention_mask=torch.ones_like(ids), **options)


def own_methods(model: EagleFSD, new_tokens: int, compiled: bool = False) -> list[Method]:
    """Return plain decoding, exact verification with all its trees, and FSD.

    Args:
        model: The bundled pair.
        new_tokens: Maximum number of new tokens.
        compiled: Whether the models' passes are compiled.
    """
    methods = []
    for way in contenders(model):
        options = way.options()
        trees = [way.tree, *(EXACT_TREES if way.name == EXACT else ())]
        for tree in dict.fromkeys(trees):
            pair = copy.copy(model)
            pair.compile = compiled
            if tree is not None:
                pair.tree = tree

            def generate(
                ids: Tensor, pair: EagleFSD = pair, options: dict[str, Any] = options
            ) -> Tensor:
                return pair.generate(ids, torch.ones_like(ids), new_tokens, **options).sequences

            name = f"{way.name}, compiled" if compiled else way.name
            methods.append(Method(name, "" if tree is None else tree_name(tree), generate))
    return methods


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

    Args:
        method: The method.
        greedy: Hugging Face's greedy generation of the same problems.
        model: The pair, for its tokenizer.
        tasks: The problems.

    Returns:
        A row of the table. The speed is the geometric mean over the problems.
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
        "tokens_per_second": sum(map(len, method.answers)) / sum(method.seconds),
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
