"""One evaluation: questions, methods, answers, scores and a report, whatever the command."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eagle_fsd.evaluation.answers import Answerer, Decoding
from eagle_fsd.evaluation.methods import Method
from eagle_fsd.evaluation.questions import Question
from eagle_fsd.evaluation.report import score_records, summarise
from eagle_fsd.evaluation.store import AnswerStore, Record, write_whole
from eagle_fsd.evaluation.tables import csv_text, report_text
from eagle_fsd.model.decode import EagleFSD
from eagle_fsd.model.environment import describe_environment
from eagle_fsd.model.prompts import chat_format

REPORT_FILE = "report.json"
TABLE_FILE = "report.md"
CSV_FILE = "report.csv"


class Evaluation:
    """Several methods on the same questions, in one folder.

    Every process calls :meth:`answer`; when all have, the first calls :meth:`report` and
    :meth:`write`.

    Args:
        folder: For the answers, a file a method, and the report. What is there is not done again.
        about: What the answers depend on beside methods and decoding: names of the questions, the
            target and the head.
        template: A FastChat template; default: the tokenizer's own.
        execute_code: Run the code in answers to HumanEval's questions.
        process, processes: Which share of the questions this process answers.

    Raises:
        ValueError: The folder holds answers of other settings.
    """

    def __init__(
        self,
        model: EagleFSD,
        questions: Sequence[Question],
        methods: Sequence[Method],
        folder: str | Path,
        decoding: Decoding,
        about: dict[str, Any],
        template: str | None = None,
        execute_code: bool = False,
        process: int = 0,
        processes: int = 1,
    ) -> None:
        self.model, self.questions = model, list(questions)
        self.folder, self.decoding = Path(folder), decoding
        self.about = {**about, **decoding.as_dict(), "template": template}
        self.execute_code = execute_code
        self.provenance = {
            "environment": describe_environment(),
            "dtype": str(model.target.dtype),
            "device": str(model.target.device),
        }
        self.wording = chat_format(model.tokenizer, template)
        depends = {"digest of the questions": _digest(questions), "dtype": str(model.target.dtype)}
        self.stores = {
            method.name: AnswerStore(
                self.folder,
                method.name,
                {**self.about, **depends, **method.describe(model.settings)},
                self.provenance,
                process,
                processes,
            )
            for method in methods
        }
        stores = list(self.stores.values())
        self.answerer = Answerer(model, self.wording, methods, stores, decoding, process, processes)

    def answer(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Answer what has no answer yet."""
        self.answerer.run(self.questions, progress)

    def records(self) -> dict[str, list[Record]]:
        """The answers by method, all processes' in one file each."""
        order = [question.question_id for question in self.questions]
        return {name: store.merge(order) for name, store in self.stores.items()}

    def report(self) -> dict[str, Any]:
        """Everything known, in plain values: a row a method."""
        records = self.records()
        scores = {
            name: score_records(self.questions, found, self.execute_code)
            for name, found in records.items()
        }
        return {
            "about": self.about,
            "settings": self.model.settings.as_dict(),
            **self.provenance,
            "questions": len(self.questions),
            "rows": summarise(list(self.stores), records, scores),
            "written": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        }

    def write(self, report: dict[str, Any]) -> None:
        """``report.json``, and its tables as Markdown and CSV."""
        write_whole(self.folder / REPORT_FILE, json.dumps(report, indent=2) + "\n")
        write_whole(self.folder / TABLE_FILE, report_text(report))
        write_whole(self.folder / CSV_FILE, csv_text(report))


def _digest(questions: Sequence[Question]) -> str:
    """Tells one list of questions from another of the same name and length."""
    said = json.dumps([(item.question_id, item.turns) for item in questions])
    return hashlib.sha256(said.encode()).hexdigest()[:16]
