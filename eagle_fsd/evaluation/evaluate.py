"""``eagle-fsd evaluate``: questions, methods, answers, scores and one table, in one program."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle_fsd.evaluation.answers import Answerer, Decoding
from eagle_fsd.evaluation.methods import Method
from eagle_fsd.evaluation.questions import Question
from eagle_fsd.evaluation.report import markdown, score_records, summarise, table
from eagle_fsd.evaluation.store import AnswerStore
from eagle_fsd.model.decode import EagleFSD
from eagle_fsd.model.environment import describe_environment
from eagle_fsd.model.prompts import chat_format

log = logging.getLogger(__name__)

REPORT_FILE = "report.json"
TABLE_FILE = "report.md"


def evaluate(
    model: EagleFSD,
    questions: Sequence[Question],
    methods: Sequence[Method],
    out: str | Path,
    decoding: Decoding,
    about: dict[str, Any],
    template: str | None = None,
    execute_code: bool = False,
    progress: Callable[[int, int], None] | None = None,
    process: int = 0,
    processes: int = 1,
    wait: Callable[[], None] = lambda: None,
) -> dict[str, Any] | None:
    """Answer, score, and write ``report.json`` and ``report.md`` beside the answers.

    Args:
        about: What the answers depend on beside methods and decoding: names of the questions, the
            target and the head.
        template: A FastChat template; default: the tokenizer's own.
        execute_code: Run the code in answers to HumanEval's questions.
        process, processes: Which share of the questions this process answers.
        wait: Returns once every process has called it.

    Returns:
        The report, on the first process.

    Raises:
        ValueError: ``out`` holds answers of other settings.
    """
    out = Path(out)
    environment = describe_environment()
    provenance = {"environment": environment, "dtype": str(model.target.dtype)}
    tree = {name: getattr(model.settings, name) for name in ("total_tokens", "depth", "top_k")}
    stores = [
        AnswerStore(
            out,
            method.name,
            {
                **about,
                **asdict(decoding),
                "template": template,
                **method.describe(model.settings),
            },
            provenance,
            process,
            processes,
        )
        for method in methods
    ]
    wording = chat_format(model.tokenizer, template)
    answerer = Answerer(model, wording, methods, stores, decoding, process, processes)
    answerer.run(questions, progress)
    wait()
    if process:
        return None
    order = [question.question_id for question in questions]
    records = {
        method.name: store.merge(order) for method, store in zip(methods, stores, strict=True)
    }
    scores = {
        name: score_records(questions, found, execute_code) for name, found in records.items()
    }
    report = {
        "about": {**about, **asdict(decoding), "template": template, **tree},
        "settings": model.settings.as_dict(),
        **provenance,
        "device": str(model.target.device),
        "questions": len(questions),
        "rows": summarise([method.name for method in methods], records, scores),
        "written": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
    }
    (out / REPORT_FILE).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (out / TABLE_FILE).write_text(
        markdown(*table(report["rows"])) + "\n\n" + footnote(report) + "\n", encoding="utf-8"
    )
    return report


def footnote(report: dict[str, Any]) -> str:
    """With what and on what a report was made, in a sentence."""
    environment, about = report["environment"], report["about"]
    machine, versions = environment["machine"], environment["versions"]
    failed = sum(row["failed"] for row in report["rows"])
    kind = "greedy" if not about["temperature"] else f"temperature {about['temperature']:g}"
    text = (
        f"{report['questions']} questions of {about['questions']}; {kind},"
        f" {str(report['dtype']).removeprefix('torch.')} on"
        f" {machine.get('gpu') or machine['cpu']}, {machine['threads']} threads; tree"
        f" {about['total_tokens']}/{about['depth']}/{about['top_k']}; torch {versions['torch']},"
        f" transformers {versions['transformers']}; {environment['date'][:10]}, revision"
        f" {environment['revision']}. Intervals are 95 %."
    )
    if failed:
        text += f" {failed} turns were not answered: their prompts fill the context."
    return text
