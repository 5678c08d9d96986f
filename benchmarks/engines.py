"""Measure rules in vLLM on the CPU: plain decoding, exact speculation, FSD and regret.

::

    python benchmarks/engines.py --vllm-python .venv/vllm/bin/python
    python benchmarks/engines.py --vllm-python .venv/vllm/bin/python --target smollm2 \\
        --head eagle_fsd/bundled/smollm2_eagle3 --method eagle3 --chain 3

Each method decodes the same word problems, greedily, one after the other and 16 at once, in a
process of its own; ``make .venv/.vllm`` installs the interpreter. The drafter is exported to vLLM's
layout first.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from measurement import EXACT, PLAIN, Table, new_parser, parse, progress, save_report, word_problems

from eagle_fsd import EagleFSD
from eagle_fsd.bundled import BUNDLED_EAGLE3, BUNDLED_HEAD, BUNDLED_TARGET
from eagle_fsd.model.gguf import locate_model
from eagle_fsd.model.loading import load_tokenizer
from eagle_fsd.train.config import ExportRequest
from eagle_fsd.train.export import export_head

WORKER = Path(__file__).with_name("engines_worker.py")
HEADS = {"eagle": BUNDLED_HEAD, "eagle3": BUNDLED_EAGLE3}
#: Settings of the methods that relax acceptance, by name.
RULES: dict[str, dict[str, Any]] = {
    "FSD, T = 0.05": {"threshold": 0.05, "min_ratio": 0.3},
    "regret": {"rule": "regret"},
    "regret, exact_first 4": {"rule": "regret", "exact_first": 4},
}
COLUMNS = {
    "method": "method",
    "requests": "requests at once",
    "tokens_per_second": "tokens/s",
    "speed": "speed, plain = 1",
    "tau": "tau",
    "sampler_share": "rejection sampler (%)",
    "rule_share": "of which the rule (%)",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = new_parser(__doc__.splitlines()[0], compiles=False)
    parser.add_argument("--vllm-python", required=True, help="interpreter with vLLM")
    parser.add_argument("--target", default=BUNDLED_TARGET, help="folder or name of the target")
    parser.add_argument("--head", help="its EAGLE head; default: the bundled one")
    parser.add_argument("--method", default="eagle", choices=HEADS, help="kind of the head")
    parser.add_argument("--chain", type=int, default=5, help="drafted tokens per step")
    parser.add_argument("--count", type=int, default=32, help="number of problems")
    parser.add_argument("--max-tokens", type=int, default=200, help="tokens per answer")
    options = parse(parser, arguments, device="cpu", dtype="float32")
    count, concurrency = (2, [1, 2]) if options.quick else (options.count, [1, 16])
    target = locate_model(options.target)
    prompts = [task.ids for task in word_problems(load_tokenizer(target), count)]
    length = 20 if options.quick else options.max_tokens
    library = own_answers(target, prompts, length)
    table, report = Table("Rules in vLLM", COLUMNS, []), f"engines-{options.method}"
    if options.target != BUNDLED_TARGET:
        report += f"-{Path(options.target).name}"
    with tempfile.TemporaryDirectory() as folder:
        head = Path(folder, "head")
        request = ExportRequest(
            head=Path(options.head or HEADS[options.method]),
            format="vllm",
            out=head,
            target=target,
        )
        export_head(request)
        speculative = {
            "method": options.method,
            "model": str(head),
            "num_speculative_tokens": options.chain,
        }
        methods: dict[str, dict[str, Any]] = {PLAIN: {}}
        methods[EXACT] = {"speculative_config": speculative}
        for name, values in list(RULES.items())[: 1 if options.quick else None]:
            methods[name] = {"speculative_config": speculative, "settings": values}
        shared = {
            "target": target,
            "prompts": prompts,
            "max_tokens": length,
            "concurrency": concurrency,
        }
        plain: dict[int, tuple[list[list[int]], float]] = {}  # answers and speed
        for name, values in progress(methods.items(), "methods"):
            printed = run_worker(name, options.vllm_python, shared | values, options.threads)
            versions = ", ".join(map(" ".join, printed["versions"].items()))
            for row in printed["rows"]:
                found, speed = row.pop("answers"), row["tokens_per_second"]
                plain_answers, plain_speed = plain.setdefault(row["requests"], (found, speed))
                row["equal_answers"] = count_equal(found, plain_answers)
                row["library_answers"] = count_equal(found, library)
                row["speed"] = speed / plain_speed
                table.rows.append({"method": name, **row})
            exact = [row for row in table.rows if row["method"] == EXACT]
            equal, own = (
                ", ".join(f"{row[name]} at {row['requests']}" for row in exact)
                for name in ("equal_answers", "library_answers")
            )
            table.note = (
                f"{count} problems, chains of {options.chain}. Answers of exact speculation that"
                f" equal plain decoding's in vLLM: {equal}; in this library: {own}. The first model"
                f" runner of vLLM, with {versions}."
            )
            save_report(options, report, [table], finished=False)
    save_report(options, report, [table])


def run_worker(name: str, python: str, request: dict[str, Any], threads: int) -> dict[str, Any]:
    """Run ``engines_worker.py`` for a method in a process, and return what it prints."""
    environment = {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "request.json")
        file.write_text(json.dumps(request))
        done = subprocess.run(
            [python, WORKER, file],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{name} failed in vLLM:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def count_equal(answers: list[list[int]], others: list[list[int]]) -> int:
    """Return how many answers are equal to the others in the same places."""
    return sum(one == other for one, other in zip(answers, others, strict=True))


def own_answers(target: str, prompts: Sequence[list[int]], length: int) -> list[list[int]]:
    """Return the tokens of this library's answers, by plain decoding."""
    model = EagleFSD.from_pretrained(target, "ngram", dtype=torch.float32, device_map="cpu")
    answers = []
    for ids in progress(prompts, "answering here"):
        found = model.generate(torch.tensor([ids]), max_new_tokens=length, method="ar")
        answers.append(found.sequences[0, len(ids) :].tolist())
    return answers


if __name__ == "__main__":
    main()
