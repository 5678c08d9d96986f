"""Evaluate methods on questions: load the pair, answer, score, judge and report.

:func:`evaluate` is the entry point; sweep and calibration extend it through the hooks of
:func:`run_evaluation`.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from eagle_fsd.evaluation.agreement import compare_answers, fuzzy_divergences
from eagle_fsd.evaluation.answer_store import (
    AnswerStore,
    Record,
    Session,
    folder_lock,
    read_sessions,
)
from eagle_fsd.evaluation.answering import Answerer, PairAnswerer
from eagle_fsd.evaluation.code_execution.execution import CachedRunner, use_sandbox
from eagle_fsd.evaluation.completion import evaluation_template
from eagle_fsd.evaluation.config import (
    DEFAULT_METHODS,
    BenchConfig,
    EvaluationConfig,
    EvaluationRequest,
    MeasureConfig,
)
from eagle_fsd.evaluation.html_report import html_text
from eagle_fsd.evaluation.judge.judging import judge, judgment_file, pair_summary
from eagle_fsd.evaluation.judge.prompts import JudgePrompts
from eagle_fsd.evaluation.markdown_report import report_text
from eagle_fsd.evaluation.methods import (
    EXACT,
    Method,
    baseline_methods,
    decoded_methods,
    find_methods,
)
from eagle_fsd.evaluation.plots import draw_figures
from eagle_fsd.evaluation.processes import from_first, load_models
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.questions.sets import requested_questions
from eagle_fsd.evaluation.report import (
    harness_accuracy,
    limit_losses,
    preserved_answers,
    sample_records,
    score_records,
    summarize,
    summarize_samples,
)
from eagle_fsd.evaluation.scoring import score
from eagle_fsd.evaluation.tables import csv_text
from eagle_fsd.evaluation.verdict import SKIPPED, main_row
from eagle_fsd.model.config import PairOptions, Settings, settings_dict
from eagle_fsd.model.identity import configuration, fingerprint, json_digest
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.utils.chat_api import Endpoint
from eagle_fsd.utils.chat_templates import encode_prompt
from eagle_fsd.utils.files import atomic_write
from eagle_fsd.utils.options import OptionsError
from eagle_fsd.utils.processes import start_processes
from eagle_fsd.utils.progress import Progress, ProgressFactory, no_progress
from eagle_fsd.utils.provenance import describe_environment

log = logging.getLogger(__name__)

REPORT_FILE = "report.json"
#: In a separate folder, because FastChat reads every .jsonl file beside the answers as answers.
PROGRAMS_FILE = Path("code") / "runs.jsonl"

Report = dict[str, Any]


def ignore(*_: Any) -> None:
    """Do nothing, whatever the arguments."""


class Evaluation(ABC):
    """Several methods on the same questions, with all results in one folder.

    Every process calls :meth:`open` (the first one before the others) and :meth:`answer`. When all
    have finished, the first one calls :meth:`report` and :meth:`write`. ``source`` names what
    answers, for the report and for :meth:`inputs`.
    """

    #: The method that the others are compared with.
    reference = EXACT.name
    #: Tree and acceptance options of the run.
    settings: Mapping[str, Any] = {}
    #: Number of questions to answer so far, the first ones; None: all.
    first: int | None = None

    def __init__(
        self,
        names: Sequence[str],
        questions: Sequence[Question],
        request: EvaluationRequest,
        config: EvaluationConfig,
        folder: str | Path,
        source: Mapping[str, Any],
    ) -> None:
        self.names, self.questions = list(names), list(questions)
        self.config, self.folder = config, Path(folder)
        self.execute_code, self.unsafe = request.execute_code, request.unsafe
        state = start_processes()
        self.process, self.processes = state.process_index, state.num_processes
        self.about = {
            "questions": Path(request.questions).name,
            "skip": request.skip,
            "count": len(questions),
            **source,
            **config.model_dump(),
            "template": request.chat_template,
            "system": request.system,
            "few_shot": request.few_shot,
            "grader": request.grader,
        }
        self.provenance: dict[str, Any] = {"environment": describe_environment()}
        self.stores: dict[str, AnswerStore] = {}
        self.scores: dict[str, dict[int | str, bool]] = {}

    @property
    def share(self) -> list[Question]:
        """The questions that this process answers."""
        return self.questions[: self.first][self.process :: self.processes]

    @property
    def scored(self) -> bool:
        """Whether answers are scored as right or wrong, not by their agreement or regret."""
        return not isinstance(self.config, MeasureConfig) or self.config.measure == "accuracy"

    @abstractmethod
    def describe(self, name: str, rows: int = 1) -> dict[str, Any]:
        """Return the settings of a method that its answers depend on, as JSON values.

        They may depend on ``rows``, the number of prompts decoded at once.
        """

    def inputs(self) -> dict[str, Any]:
        """Return everything that all answers depend on, as JSON values.

        The grader and where servers are do not change answers. Nor does the count, but it is
        included: a bound does not hold for a run that is enlarged after its results were seen.
        """
        return {key: self.about[key] for key in self.about.keys() - {"grader", "servers"}}

    @abstractmethod
    def answerer(self, **shared: Any) -> Answerer[Any]:
        """Create the answerer; ``shared`` are the arguments that all answerers take."""

    def open(self) -> None:
        """Open the store of each method, with the answers of an earlier run."""
        inputs = self.inputs()
        questions = {
            question.question_id: json_digest([*question.context, *question.turns])
            for question in self.questions
        }
        for name in self.names:
            store = AnswerStore(
                self.folder,
                name,
                fingerprint_inputs={**inputs, **self.describe(name)},
                questions=questions,
                process=self.process,
                processes=self.processes,
            )
            self.stores[name] = store.open()

    def answer(self, progress: Progress = ignore) -> None:
        """Answer this process's share of the questions, except for those that have answers."""
        answerer = self.answerer(
            config=self.config,
            session=Session(self.folder, self.provenance),
            stores=list(self.stores.values()),
        )
        answerer.run(self.share, progress)

    def merge(self) -> dict[str, list[Record]]:
        """Merge the answers of all processes, and return those to the first questions."""
        asked = {question.question_id for question in self.questions[: self.first]}
        return {
            name: [record for record in store.merge() if record["question_id"] in asked]
            for name, store in self.stores.items()
        }

    def report(self, progress: Progress = ignore) -> Report:
        """Score the answers and summarize them in a row per method."""
        records, count = self.merge(), self.config.answers
        samples = {
            name: [sample_records(found, sample) for sample in range(count)]
            for name, found in records.items()
        }
        scores = self._score(samples, progress)
        ids = {record["session"] for found in records.values() for record in found}
        sessions = read_sessions(self.folder, ids)
        newest = list(sessions.values())[-1] if sessions else self.provenance
        self.scores = {name: found[0] for name, found in scores.items()}
        rows = summarize(list(self.stores), records, self.scores, self.reference)
        filled = min(self.config.batch, count * len(self.share))
        # Users' own questions do not ask for the marker that the harness's filters look for.
        published = [item for item in self.questions if not item.own]
        for row in rows:
            name = row["method"]
            row["settings"] = self.describe(name, filled)
            every = list(itertools.chain.from_iterable(samples[name]))
            row["harness"] = harness_accuracy(published, every) if self.scored else None
            exact = None if name == self.reference else scores.get(self.reference)
            found = summarize_samples(scores[name], self.config.seeds, exact)
            if count > 1 and found is not None:
                row |= {"samples": found, "accuracy": found["accuracy"]}
                row["accuracy_interval"] = found["accuracy_interval"]
        return {
            "about": self.about,
            "settings": dict(self.settings),
            **newest,
            "sessions": sessions,
            "questions": len(self.questions[: self.first]),
            "unscored": self._unscored(),
            **limit_losses(rows),
            "rows": rows,
            "written": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        }

    def _score(
        self, samples: Mapping[str, Sequence[Sequence[Record]]], progress: Progress
    ) -> dict[str, list[dict[int | str, bool]]]:
        """Return the scores of each sample of every method's answers."""
        if isinstance(self.config, MeasureConfig) and not self.scored:
            config, exact = self.config, samples[self.reference]
            return {
                name: [preserved_answers(*pair, config) for pair in zip(own, exact, strict=True)]
                for name, own in samples.items()
            }
        run = CachedRunner(self.folder / PROGRAMS_FILE, self.unsafe) if self.execute_code else None
        total = sum(len(sample) for own in samples.values() for sample in own)
        done = itertools.count(1)

        def advance() -> None:
            progress(next(done), total)

        return {
            name: [score_records(self.questions, sample, run, advance) for sample in own]
            for name, own in samples.items()
        }

    def _unscored(self) -> str | None:
        """Return why the questions allow no accuracy; None if they do, or if it is not measured."""
        if not self.scored:
            return None
        kinds = {question.scored_by for question in self.questions}
        if "code" in kinds and not self.execute_code:
            return "No accuracy: the answers are code, which runs only with --execute-code."
        if kinds == {""}:
            return "No accuracy: the questions come without correct answers."
        return None

    def compare(self, report: Report) -> None:
        """Add the changed answers of a report's main method to it, as ``comparison``."""
        row = main_row(report)
        if row is not None:
            report["comparison"] = self.changed_answers(row["method"])

    def changed_answers(self, name: str, **options: Any) -> dict[str, Any]:
        """Return the changed answers of a method, see :func:`compare_answers`."""
        records = self.merge()
        scores = self.scores if self.scored else {}
        return compare_answers(
            self.questions, records, scores, method=name, reference=self.reference, **options
        )

    def write(self, report: Report) -> None:
        """Write a report as JSON, HTML and Markdown, and its rows as CSV."""
        atomic_write(self.folder / REPORT_FILE, json.dumps(report, indent=2) + "\n")
        atomic_write(self.folder / "report.html", html_text(report, self.folder))
        atomic_write(self.folder / "report.md", report_text(report))
        atomic_write(self.folder / "report.csv", csv_text(report))


class PairEvaluation(Evaluation):
    """An evaluation of methods that decode with a pair in this process."""

    def __init__(
        self,
        model: EagleFSD,
        questions: Sequence[Question],
        methods: Sequence[Method],
        request: EvaluationRequest,
        config: EvaluationConfig,
        folder: str | Path,
    ) -> None:
        source = {
            "target": request.target or "bundled",
            "drafter": request.drafter or "bundled",
            "draft_vocabulary": request.draft_vocabulary,
        }
        names = [method.name for method in methods]
        super().__init__(names, questions, request, config, folder=folder, source=source)
        self.model, self.methods = model, {method.name: method for method in methods}
        self.chat_template = evaluation_template(
            model.tokenizer, request.chat_template, request.few_shot
        )
        self.settings = settings_dict(model.tree, model.acceptance)
        self.provenance |= {
            "dtype": str(model.target.dtype),
            "device": str(model.target.device),
            "compiled": bool(model.compile),
        }

    def describe(self, name: str, rows: int = 1) -> dict[str, Any]:
        return self.methods[name].describe(self.model, rows)

    def inputs(self) -> dict[str, Any]:
        """See :meth:`Evaluation.inputs`; hashes distinguish weights of the same name."""
        model = self.model
        chat = [{"role": "user", "content": "Hello!"}]
        prompt = encode_prompt(chat, model.tokenizer, self.chat_template)[0].tolist()
        return {
            **super().inputs(),
            "dtype": str(model.target.dtype),
            "device": model.target.device.type,
            "fingerprint of the chat template": json_digest(prompt),
            "fingerprint of the target": fingerprint(model.model),
            "fingerprint of the drafter": fingerprint(model.drafter),
            "configuration of the target": configuration(model.model),
            "configuration of the drafter": configuration(model.drafter),
        }

    def open(self) -> None:
        """Check that the chat template accepts all first turns; see :meth:`Evaluation.open`."""
        for question in self.questions:
            try:
                self.chat_template.render(question.first_chat(), add_generation_prompt=True)
            except ValueError as error:
                raise ValueError(f"question {question.question_id!r}: {error}") from error
        super().open()

    def answerer(self, **shared: Any) -> PairAnswerer:
        methods, template = list(self.methods.values()), self.chat_template
        return PairAnswerer(model=self.model, chat_template=template, methods=methods, **shared)

    def report(self, progress: Progress = ignore) -> Report:
        """See :meth:`Evaluation.report`; processes that share a target have the same report."""
        make = partial(super().report, progress)
        report, self.scores = from_first(self.model.target, lambda: (make(), self.scores))
        return report

    def changed_answers(self, name: str, **options: Any) -> dict[str, Any]:
        """Return the changed answers of a method, with the divergences of greedy ones."""
        options["tokenizer"] = self.model.tokenizer
        if not self.config.temperature:
            options["find_divergences"] = partial(
                fuzzy_divergences, self.model, self.methods[name], max_batch=self.config.batch
            )
        return super().changed_answers(name, **options)


@dataclass(frozen=True)
class Hooks:
    """Functions that :func:`run_evaluation` calls; by default they do nothing."""

    progress: ProgressFactory = no_progress
    on_report: Callable[[Report], None] = ignore  # may extend the scored report
    on_finish: Callable[[Report], None] = ignore  # also if the judge failed


def evaluate(
    request: EvaluationRequest,
    config: EvaluationConfig | None = None,
    methods: Sequence[str | Method] = DEFAULT_METHODS,
    *,
    settings: Settings | None = None,
    progress: ProgressFactory = no_progress,
    on_report: Callable[[Report], None] | None = None,
) -> Report | None:
    """Answer questions with several methods, and report speed and quality side by side.

    Answers and report are written to the request's output folder. An interrupted evaluation resumes
    there; another count, and answers with other settings or weights are rejected. Under
    ``accelerate launch`` the processes share the questions.

    Args:
        request: What to evaluate.
        config: How answers are decoded; default: ``EvaluationConfig()``.
        methods: Methods, or names from :data:`~eagle_fsd.evaluation.config.METHOD_NAMES`. The
            request's baseline is added. ``fsd`` is skipped if ``exact`` has the same settings.
        settings: Tree and acceptance options that override the drafter's ``fsd.json``.
        progress: Reports progress.
        on_report: Called with the report as soon as it is complete, or when the judge has failed.

    Returns:
        The report on the first process, None on the others.

    Raises:
        OptionsError: A name is unknown, options contradict each other, or a sandbox is missing.
        LoadError, CheckpointError: The target or the drafter cannot be loaded.
        QuestionSetError, QuestionError: The questions cannot be found or read.
        GraderError, SandboxError: A user's grader or the sandbox failed; the answers are kept.
        JudgeError: The judge failed; the report is written without its ratings.
        ValueError: The chat template is missing or rejects a question, the assistant's vocabulary
            differs, or the output folder is in use, damaged or holds answers with other settings.
        FloatingPointError, MemoryError: See :meth:`EagleFSD.generate`; unsaved answers are lost.
    """
    config, chosen = config or EvaluationConfig(), find_methods(methods)
    folder, names = request.output_folder("evaluate"), [method.name for method in chosen]
    questions = checked_questions(request, config, progress, names)
    model = load_share(request, settings)
    hooks = Hooks(progress, on_finish=on_report or ignore)
    return run_evaluation(
        model, questions, chosen, request, config=config, folder=folder, hooks=hooks
    )


def run_evaluation(
    model: EagleFSD,
    questions: Sequence[Question],
    methods: Sequence[Method],
    request: EvaluationRequest,
    *,
    config: EvaluationConfig,
    folder: Path,
    hooks: Hooks,
    first: int | None = None,
) -> Report | None:
    """Run an evaluation in ``folder``; see :func:`evaluate` for what it returns and raises.

    The pair and the questions are those given, whatever the request names. ``first`` is the number
    of questions to answer now; a later run in the same folder may answer more of them.
    """
    if isinstance(config, BenchConfig) and config.repeats > 1 and model.drafter.learns:
        raise OptionsError(
            "--repeats must be 1 with a drafter that learns: the second answer would be drafted"
            " from the first"
        )
    model.compile = bool(request.compile)
    decoded = decoded_methods(methods, model)
    skipped = [method.name for method in methods if method not in decoded]
    if skipped and start_processes().is_main_process:
        log.warning("%s", SKIPPED)
    baseline = baseline_methods(model, request.assistant) if request.baseline else []
    compared = find_methods([*baseline, *decoded])
    evaluation = PairEvaluation(model, questions, compared, request, config=config, folder=folder)
    evaluation.first = first
    return conduct(evaluation, request, hooks, skipped)


def conduct(
    evaluation: Evaluation, request: EvaluationRequest, hooks: Hooks, skipped: Sequence[str] = ()
) -> Report | None:
    """Answer the questions, and write the report; None except on the first process."""
    state = start_processes()
    is_first = state.is_main_process
    with exclusive(evaluation.folder):
        with state.main_process_first():
            evaluation.open()
        factory = hooks.progress if is_first else no_progress
        with factory("answering") as progress:
            evaluation.answer(progress)
        state.wait_for_everyone()
        if not is_first:
            return None
        with hooks.progress("scoring") as progress:
            report = evaluation.report(progress if request.execute_code else ignore)
        report["skipped"] = list(skipped)
        evaluation.write(report)
        hooks.on_report(report)
        draw_figures(report, evaluation.folder)
        evaluation.compare(report)
        evaluation.write(report)
        try:
            if request.judge_base_url:
                _add_judgments(request, evaluation, report, hooks.progress)
                evaluation.write(report)
        finally:
            hooks.on_finish(report)
    return report


def exclusive(folder: Path) -> AbstractContextManager[None]:
    """Lock a folder against other runs; the first process does so for all of this run."""
    return folder_lock(folder) if start_processes().is_main_process else nullcontext()


def checked_questions(
    request: EvaluationRequest,
    config: EvaluationConfig,
    progress: ProgressFactory,
    methods: Collection[str] = (EXACT.name,),
) -> list[Question]:
    """Read the requested questions.

    An exception is raised, before hours of decoding, where a later stage would fail: for options
    that contradict each other, the grader (on an empty answer), the judge's prompts, which are
    downloaded if necessary, and the sandbox.
    """
    if request.assistant and config.batch > 1:
        raise OptionsError("--assistant requires --batch 1: assisted generation has no batches")
    if request.compile == "auto":
        raise OptionsError("evaluations must not depend on timing: --compile auto is not supported")
    if request.judge_mode == "pair" and EXACT.name not in methods:
        raise OptionsError("--judge-mode pair compares with exact decoding: add the method exact")
    with start_processes().main_process_first(), progress("downloading") as advance:
        questions = requested_questions(request, config.seed, advance)
        score(questions[0], "")
        if request.judge_base_url:
            JudgePrompts.load(questions)
        if request.execute_code and any(question.scored_by == "code" for question in questions):
            use_sandbox(request.unsafe)
    return questions


def load_share(request: PairOptions, settings: Settings | None = None) -> EagleFSD:
    """Load the pair that a request names, on the device of this process."""
    state = start_processes()
    device = request.device or (str(state.device) if state.num_processes > 1 else None)
    model = load_models(request.model_copy(update={"device": device}))
    if settings is not None:
        model.configure(settings)
    return model


def _add_judgments(
    request: EvaluationRequest, evaluation: Evaluation, report: Report, factory: ProgressFactory
) -> None:
    """Have the answers judged, and add the outcomes of comparisons to the report."""
    endpoint = Endpoint(request.judge_base_url or "", request.judge_model)
    folder = evaluation.folder
    with factory("judging") as progress:
        arguments = endpoint, evaluation.questions, evaluation.merge(), folder
        options: dict[str, Any] = {"parallel": request.judge_parallel, "progress": progress}
        if request.judge_mode == "pair":
            comparisons = judge(*arguments, reference=evaluation.reference, **options)
            pairs = pair_summary(comparisons, report["limit_confidence"])
            for row in report["rows"]:
                found = pairs.get(row["method"])
                row["judge"] = found and {"pairs": found}
        else:
            judge(*arguments, **options)
            file = judgment_file(folder, endpoint.model, "single")
            show = f"python -m fastchat.llm_judge.show_result --input-file '{file}'"
            log.warning("the ratings are in %s; tables of them, with pandas: %s", file, show)
    report["judge"] = {"model": endpoint.model, "base_url": endpoint.redacted_url}
