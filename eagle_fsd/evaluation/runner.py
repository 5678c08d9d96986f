"""Evaluate methods on questions: load the pair, answer, score, judge and report.

:func:`evaluate` is the entry point; sweep and calibration extend it through the hooks of
:func:`run_evaluation`.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from torch import nn

from eagle_fsd.evaluation.answer_store import (
    AnswerStore,
    Record,
    Session,
    folder_lock,
    read_sessions,
)
from eagle_fsd.evaluation.answering import Answerer
from eagle_fsd.evaluation.code_execution.execution import CachedRunner, use_sandbox
from eagle_fsd.evaluation.config import DEFAULT_METHODS, EvaluationConfig, EvaluationRequest
from eagle_fsd.evaluation.judge.client import JudgeEndpoint
from eagle_fsd.evaluation.judge.grading import judge_answers
from eagle_fsd.evaluation.judge.prompts import JudgePrompts
from eagle_fsd.evaluation.judge.scores import judge_summary
from eagle_fsd.evaluation.methods import Method, baseline_methods, find_methods
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.questions.sets import find_questions
from eagle_fsd.evaluation.report import harness_accuracy, score_records, summarize
from eagle_fsd.evaluation.tables import csv_text, report_text
from eagle_fsd.model.config import Settings, settings_dict
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.utils.chat_templates import ChatTemplate, encode_prompt, load_chat_template
from eagle_fsd.utils.files import atomic_write
from eagle_fsd.utils.options import OptionsError
from eagle_fsd.utils.progress import Progress, ProgressFactory, no_progress
from eagle_fsd.utils.provenance import describe_environment

REPORT_FILE = "report.json"
TABLE_FILE = "report.md"
CSV_FILE = "report.csv"
#: In a separate folder, because FastChat reads every .jsonl file beside the answers as answers.
PROGRAMS_FILE = Path("code") / "runs.jsonl"

#: Approximate number of elements per tensor that a fingerprint hashes.
FINGERPRINT_ELEMENTS = 256
#: How long a process may wait for the others to finish.
PROCESS_TIMEOUT = timedelta(days=7)

Report = dict[str, Any]


class Evaluation:
    """Several methods on the same questions, with all results in one folder.

    Every process calls :meth:`open` (the first one before the others) and :meth:`answer`. When all
    have finished, the first one calls :meth:`report` and :meth:`write`.

    Args:
        model: The pair.
        questions: The questions.
        methods: The methods.
        request: The names of questions, target, head and chat template, and whether to run code.
        config: How answers are decoded.
        folder: Folder of the answers (a file per method) and of the report.
        process: Index of this process, which answers every ``processes``-th question.
        processes: Number of processes.

    Raises:
        ValueError: The chat template does not exist.
    """

    def __init__(
        self,
        model: EagleFSD,
        questions: Sequence[Question],
        methods: Sequence[Method],
        request: EvaluationRequest,
        config: EvaluationConfig,
        folder: str | Path,
        process: int = 0,
        processes: int = 1,
    ) -> None:
        self.model, self.questions, self.methods = model, list(questions), list(methods)
        self.config, self.folder = config, Path(folder)
        self.execute_code, self.unsafe = request.execute_code, request.unsafe
        self.process, self.processes = process, processes
        self.chat_template: ChatTemplate = load_chat_template(
            model.tokenizer, request.chat_template
        )
        self.about = {
            "questions": Path(request.questions).name,
            "count": len(questions),
            "target": request.target or "bundled",
            "drafter": request.drafter or "bundled",
            **config.model_dump(),
            "template": request.chat_template,
        }
        self.provenance = {
            "environment": describe_environment(),
            "dtype": str(model.target.dtype),
            "device": str(model.target.device),
        }
        self.stores: dict[str, AnswerStore] = {}

    def open(self) -> None:
        """Read the answers of an earlier run.

        Raises:
            ValueError: The folder holds damaged answers, or answers with other settings.
        """
        model = self.model
        about = {key: value for key, value in self.about.items() if key != "count"}
        inputs = {
            **about,
            "dtype": str(model.target.dtype),
            "device": model.target.device.type,
            **self._fingerprints(),
        }
        questions = {
            question.question_id: _digest(json.dumps(question.turns).encode())
            for question in self.questions
        }
        for method in self.methods:
            store = AnswerStore(
                self.folder,
                method.name,
                {**inputs, **method.describe(model.tree, model.acceptance)},
                questions,
                self.process,
                self.processes,
            )
            self.stores[method.name] = store.open()

    def _fingerprints(self) -> dict[str, str]:
        """Return hashes that tell chat templates and weights from others of the same name."""
        model = self.model
        chat = [{"role": "user", "content": "Hello!"}]
        prompt = encode_prompt(chat, model.tokenizer, self.chat_template)[0].tolist()
        return {
            "fingerprint of the chat template": _digest(json.dumps(prompt).encode()),
            "fingerprint of the target": fingerprint(model.model),
            "fingerprint of the drafter": fingerprint(model.drafter),
        }

    def answer(self, progress: Progress | None = None) -> None:
        """Answer this process's share of the questions, except for those that have answers.

        Args:
            progress: Called with the number of answers so far and the total.
        """
        answerer = Answerer(
            self.model,
            self.chat_template,
            self.methods,
            list(self.stores.values()),
            self.config,
            Session(self.folder, self.provenance),
            self.process,
            self.processes,
        )
        answerer.run(self.questions, progress)

    def merge(self) -> dict[str, list[Record]]:
        """Merge the answers of all processes.

        Returns:
            The answers by method.
        """
        return {name: store.merge() for name, store in self.stores.items()}

    def report(self, progress: Progress | None = None) -> Report:
        """Score the answers and summarize them.

        Args:
            progress: Called with the number of answers processed so far and the total.

        Returns:
            The report as JSON values, with a row per method.
        """
        records = self.merge()
        total, before = sum(map(len, records.values())), 0
        run = CachedRunner(self.folder / PROGRAMS_FILE, self.unsafe) if self.execute_code else None
        scores = {}
        for name, found in records.items():

            def advance(done: int, _: int, before: int = before) -> None:
                if progress is not None:
                    progress(before + done, total)

            scores[name] = score_records(self.questions, found, advance, run)
            before += len(found)
        ids = {record["session"] for found in records.values() for record in found}
        sessions = read_sessions(self.folder, ids)
        newest = list(sessions.values())[-1] if sessions else self.provenance
        rows = summarize(list(self.stores), records, scores)
        tree, acceptance = self.model.tree, self.model.acceptance
        for row, method in zip(rows, self.methods, strict=True):
            row["settings"] = method.describe(tree, acceptance)
            row["harness"] = harness_accuracy(self.questions, records[method.name])
        return {
            "about": self.about,
            "settings": settings_dict(tree, acceptance),
            **newest,
            "sessions": sessions,
            "questions": len(self.questions),
            "unscored": self._unscored(),
            "rows": rows,
            "written": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        }

    def _unscored(self) -> str | None:
        """Return why ``code`` questions have no score; None if they have one."""
        has_code = any(question.scored_by == "code" for question in self.questions)
        if has_code and not self.execute_code:
            return "No accuracy: the answers are code, which runs only with --execute-code."
        return None

    def write(self, report: Report) -> None:
        """Write a report as JSON, and its tables as Markdown and CSV.

        Args:
            report: The report.
        """
        atomic_write(self.folder / REPORT_FILE, json.dumps(report, indent=2) + "\n")
        atomic_write(self.folder / TABLE_FILE, report_text(report))
        atomic_write(self.folder / CSV_FILE, csv_text(report))


def ignore(*_: Any) -> None:
    """Do nothing, whatever the arguments."""


@dataclass(frozen=True)
class Hooks:
    """Functions that :func:`run_evaluation` calls; by default they do nothing.

    Attributes:
        progress: Reports progress.
        on_questions: Called on the first process with the questions, before the model is loaded.
        on_report: Called on the first process with the evaluation and the scored report, which it
            may extend.
        on_finish: Called on the first process with the final report, even if the judge failed.
    """

    progress: ProgressFactory = no_progress
    on_questions: Callable[[Sequence[Question]], None] = ignore
    on_report: Callable[[Evaluation, Report], None] = ignore
    on_finish: Callable[[Report], None] = ignore


def evaluate(
    request: EvaluationRequest,
    config: EvaluationConfig | None = None,
    methods: Sequence[str | Method] = DEFAULT_METHODS,
    *,
    settings: Settings | None = None,
    command: str = "evaluate",
    progress: ProgressFactory = no_progress,
    on_report: Callable[[Report], None] | None = None,
) -> Report | None:
    """Answer questions with several methods, and report speed and quality side by side.

    Answers and report are written to the request's output folder. An interrupted evaluation resumes
    there, and a larger count answers only the new questions; answers with other settings or
    weights are rejected. Under ``accelerate launch`` the
    processes share the questions.

    Args:
        request: What to evaluate.
        config: How answers are decoded; default: ``EvaluationConfig()``.
        methods: Methods, or names from :data:`~eagle_fsd.evaluation.config.METHOD_NAMES`. The
            request's baseline is added.
        settings: Tree and acceptance options that override the head's ``fsd.json``.
        command: Part of the default output folder.
        progress: Reports progress.
        on_report: Called with the report as soon as it is complete, or when the judge has failed.

    Returns:
        The report on the first process, None on the others.

    Raises:
        OptionsError: A method is unknown, or options contradict each other.
        LoadError, CheckpointError: The target or the head cannot be loaded.
        QuestionSetError, QuestionError: The questions cannot be found or read.
        JudgeError: The judge failed; the report is written without its ratings.
        ValueError: The output folder is in use, damaged or holds answers with other settings.
    """
    hooks = Hooks(progress, on_finish=on_report or ignore)
    chosen = find_methods(methods)
    folder = request.output_folder(command)
    return run_evaluation(request, config or EvaluationConfig(), chosen, folder, settings, hooks)


def run_evaluation(
    request: EvaluationRequest,
    config: EvaluationConfig,
    methods: Sequence[Method],
    folder: Path,
    settings: Settings | None,
    hooks: Hooks,
) -> Report | None:
    """Run an evaluation; see :func:`evaluate` for what it raises.

    Args:
        request: What to evaluate; its output folder is ignored.
        config: How answers are decoded.
        methods: The methods, to which the request's baseline is added.
        folder: Folder of the answers and the report.
        settings: Tree and acceptance options that override the head's ``fsd.json``.
        hooks: Functions to call.

    Returns:
        The report on the first process, None on the others.
    """
    if request.assistant and config.batch > 1:
        raise OptionsError("--assistant requires --batch 1: assisted generation has no batches")
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
    state = PartialState(cpu=on_cpu, timeout=PROCESS_TIMEOUT)
    is_first = state.is_main_process
    with state.main_process_first(), hooks.progress("downloading") as progress:
        questions = find_questions(request.questions, request.count, config.seed, progress)
        if request.judge_base_url:  # report missing files before hours of decoding
            JudgePrompts.load(questions)
    if is_first:
        if request.execute_code and any(question.scored_by == "code" for question in questions):
            use_sandbox(request.unsafe)  # raises an exception before hours of decoding
        hooks.on_questions(questions)
    device = request.device or (str(state.device) if state.num_processes > 1 else None)
    model = load_pair(request, device, settings)
    baseline = baseline_methods(model, request.assistant) if request.baseline else []
    evaluation = Evaluation(
        model,
        questions,
        find_methods([*baseline, *methods]),
        request,
        config,
        folder,
        state.process_index,
        state.num_processes,
    )
    with folder_lock(folder) if is_first else nullcontext():
        with state.main_process_first():
            evaluation.open()
        if is_first:
            with hooks.progress("answering") as progress:
                evaluation.answer(progress)
        else:
            evaluation.answer()
        state.wait_for_everyone()
        if not is_first:
            return None
        with hooks.progress("scoring") as progress:
            report = evaluation.report(progress if request.execute_code else None)
        evaluation.write(report)
        hooks.on_report(evaluation, report)
        evaluation.write(report)
        try:
            if request.judge_base_url:
                _add_judgments(request, evaluation, report, hooks.progress)
                evaluation.write(report)
        finally:
            hooks.on_finish(report)
    return report


def load_pair(
    request: EvaluationRequest, device: str | None = None, settings: Settings | None = None
) -> EagleFSD:
    """Load the pair that a request names.

    Args:
        request: The request.
        device: The target's device; default: the GPU if there is one.
        settings: Tree and acceptance options that override the head's ``fsd.json``.
    """
    model = EagleFSD.from_pretrained(
        request.target, request.drafter, dtype=request.dtype, device_map=device
    )
    if settings is not None:
        model.tree = model.tree.updated(**settings.tree)
        model.acceptance = model.acceptance.updated(**settings.acceptance)
    return model


def _add_judgments(
    request: EvaluationRequest, evaluation: Evaluation, report: Report, factory: ProgressFactory
) -> None:
    """Have the answers rated, and add the ratings to the report."""
    endpoint = JudgeEndpoint(request.judge_base_url or "", request.judge_model)
    with factory("judging") as progress:
        judgments = judge_answers(
            endpoint,
            evaluation.questions,
            evaluation.merge(),
            evaluation.folder,
            request.judge_parallel,
            progress,
        )
    found = judge_summary(judgments)
    report["judge"] = {"model": endpoint.model, "base_url": endpoint.redacted_url}
    for row in report["rows"]:
        row["judge"] = found.get(row["method"])


def fingerprint(module: object) -> str:
    """Hash the name, shape, type and some elements of every tensor of a module.

    The hash identifies the weights in memory, whatever files they come from. Of tensors that are
    offloaded to disk, only name, shape and type are hashed.

    Args:
        module: The module. Other objects, such as drafters without weights, have no tensors.

    Returns:
        16 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items() if isinstance(module, nn.Module) else ():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.device.type != "meta" and tensor.numel():
            flat = tensor.detach().flatten()
            sample = flat[:: max(1, len(flat) // FINGERPRINT_ELEMENTS)].cpu().contiguous()
            digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
