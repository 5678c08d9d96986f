"""One evaluation: questions, methods, answers, scores and a report, whatever the command."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eagle_fsd.evaluation.answer_store import (
    AnswerStore,
    Record,
    Session,
    read_sessions,
    write_whole,
)
from eagle_fsd.evaluation.answering import Answerer
from eagle_fsd.evaluation.code_execution.sandbox import Runs
from eagle_fsd.evaluation.config import Decoding
from eagle_fsd.evaluation.methods import EXACT, Method
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.report import likelihoods, score_records, summarise
from eagle_fsd.evaluation.tables import csv_text, report_text
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.utils.chat_templates import chat_format, encode_prompt
from eagle_fsd.utils.provenance import describe_environment

REPORT_FILE = "report.json"
TABLE_FILE = "report.md"
CSV_FILE = "report.csv"
#: Not beside the answers: FastChat reads every .jsonl there as answers.
RUNS_FILE = Path("code") / "runs.jsonl"

#: Numbers of every tensor that a fingerprint looks at.
FINGERPRINT = 256


class Evaluation:
    """Several methods on the same questions, in one folder.

    Every process calls :meth:`answer`; when all have, the first calls :meth:`report` and
    :meth:`write`. The first process has to be made before the others.

    Args:
        folder: For the answers, a file a method, and the report. What is there is not done again.
        about: Names of the questions, the target and the head.
        template: A FastChat template; default: the tokenizer's own.
        execute_code: Run the code in answers to HumanEval's questions.
        process, processes: Which share of the questions this process answers.

    Raises:
        ValueError: The folder holds answers of other settings, or what is no answer.
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
        self.model, self.questions, self.methods = model, list(questions), list(methods)
        self.folder, self.decoding = Path(folder), decoding
        self.about = {**about, **decoding.as_dict(), "template": template}
        self.execute_code = execute_code
        self.wording = chat_format(model.tokenizer, template)
        self.provenance = {
            "environment": describe_environment(),
            "dtype": str(model.target.dtype),
            "device": str(model.target.device),
        }
        made_from = {
            **self.about,
            "dtype": str(model.target.dtype),
            "device": model.target.device.type,
            **self._fingerprints(),
        }
        order = [question.question_id for question in questions]
        self.stores = {
            method.name: AnswerStore(
                self.folder,
                method.name,
                {**made_from, **method.describe(model.settings)},
                order,
                process,
                processes,
            )
            for method in methods
        }
        self.answerer = Answerer(
            model,
            self.wording,
            methods,
            list(self.stores.values()),
            decoding,
            Session(self.folder, self.provenance),
            process,
            processes,
        )

    def _fingerprints(self) -> dict[str, str]:
        """Tell what answers depend on from something else of the same name."""
        model = self.model
        said = [(item.question_id, item.turns) for item in self.questions]
        chat = [{"role": "user", "content": self.questions[0].turns[0]}]
        prompt = encode_prompt(chat, model.tokenizer, self.wording)[0].tolist()
        return {
            "fingerprint of the questions": _digest(json.dumps([said, prompt]).encode()),
            "fingerprint of the target": fingerprint(model.model),
            "fingerprint of the head": fingerprint(model.head),
        }

    def answer(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Answer what has no answer yet."""
        self.answerer.run(self.questions, progress)

    def merge(self) -> dict[str, list[Record]]:
        """The answers by method; all processes' are put into one file each."""
        return {name: store.merge() for name, store in self.stores.items()}

    def report(self, progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
        """Everything known, in plain values: a row a method.

        Args:
            progress: Called with the answers scored and all of them.
        """
        records = self.merge()
        total, before = sum(map(len, records.values())), 0
        scores, run = {}, Runs(self.folder / RUNS_FILE)
        for name, found in records.items():

            def advance(done: int, _: int, before: int = before) -> None:
                if progress is not None:
                    progress(before + done, total)

            scores[name] = score_records(self.questions, found, self.execute_code, advance, run)
            before += len(found)
        ids = {record["session"] for found in records.values() for record in found}
        sessions = read_sessions(self.folder, ids)
        newest = list(sessions.values())[-1] if sessions else self.provenance
        rows = summarise(list(self.stores), records, scores)
        for row, method in zip(rows, self.methods, strict=True):
            row["settings"] = method.describe(self.model.settings)
        return {
            "about": self.about,
            "settings": self.model.settings.as_dict(),
            **newest,
            "sessions": sessions,
            "questions": len(self.questions),
            "unscored": self._unscored(),
            "rows": rows,
            "written": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        }

    def _unscored(self) -> str | None:
        """Why questions that could have a score have none."""
        coded = any(question.scored_by == "code" for question in self.questions)
        if coded and not self.execute_code:
            return "No accuracy: the answers are code, which is run with --execute-code only."
        return None

    def losses(self, name: str) -> list[float]:
        """What a method gave up against exact decoding, nats a token, by question."""
        found = {
            method: likelihoods(self.stores[method].records.values())
            for method in (EXACT.name, name)
        }
        exact, relaxed = found[EXACT.name], found[name]
        return [exact[key] - relaxed[key] for key in exact if key in relaxed]

    def write(self, report: dict[str, Any]) -> None:
        """``report.json``, and its tables as Markdown and CSV."""
        write_whole(self.folder / REPORT_FILE, json.dumps(report, indent=2) + "\n")
        write_whole(self.folder / TABLE_FILE, report_text(report))
        write_whole(self.folder / CSV_FILE, csv_text(report))


def fingerprint(module: nn.Module | None) -> str:
    """Tells one set of weights from another: of some numbers of every tensor, and the shapes.

    Files may be renamed or lie on the Hub; what is in memory is what decodes. Tensors that are not
    there (offloaded to disk) count by their shape.
    """
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items() if module is not None else ():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.device.type != "meta" and tensor.numel():
            flat = tensor.detach().flatten()
            some = flat[:: max(1, len(flat) // FINGERPRINT)].cpu().contiguous()
            digest.update(some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]
