"""What ``evaluate``, ``sweep`` and ``calibrate`` have in common: questions, a pair, a folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from eagle_fsd.cli.console import ProgressBar, err, out
from eagle_fsd.cli.options import (
    Device,
    Dtype,
    Head,
    Json,
    Target,
    Template,
    load_pair,
    with_group,
    with_options,
    with_settings,
)
from eagle_fsd.evaluation.config import Decoding

Questions = Annotated[
    str,
    typer.Argument(
        help="bundled, mt-bench, spec-bench, gsm8k, commonsense-qa, mmlu, humaneval, or a file."
    ),
]
Count = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="So many questions: as many of each category (MMLU's subjects, MT-bench's kinds) as"
        " of the others; of a set of one category, the first.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder for answers and report; a run that was stopped goes on there.",
        show_default="runs/COMMAND/QUESTIONS",
    ),
]
ExecuteCode = Annotated[
    bool, typer.Option("--execute-code", help="Run the code in answers to humaneval.")
]
Baseline = Annotated[
    str | None,
    typer.Option(help="'hf': also Hugging Face's own generate, and its assisted generation."),
]
Assistant = Annotated[
    str | None,
    typer.Option(help="Draft model of that assisted generation: a folder or Hub name."),
]
JudgeURL = Annotated[
    str | None,
    typer.Option(
        "--judge-base-url",
        help="Have answers judged at this OpenAI-compatible endpoint, in FastChat's words; its key"
        " is the environment's OPENAI_API_KEY.",
    ),
]
JudgeModel = Annotated[str, typer.Option(help="The judge's name at that endpoint.")]
JudgeParallel = Annotated[int, typer.Option(min=1, help="Requests to the judge at a time.")]


@dataclass(frozen=True)
class Run:
    """One evaluation as its options describe it; the fields are the options."""

    questions: Questions = "bundled"
    target: Target = None
    head: Head = None
    dtype: Dtype = None
    device: Device = None
    count: Count = None
    out: Out = None
    template: Template = None
    baseline: Baseline = None
    assistant: Assistant = None
    execute_code: ExecuteCode = False
    judge_base_url: JudgeURL = None
    judge_model: JudgeModel = "gpt-4"
    judge_parallel: JudgeParallel = 4
    as_json: Json = False
    settings: Any = None
    decoding: Any = None

    def __post_init__(self) -> None:
        if self.baseline not in (None, "hf"):
            raise typer.BadParameter("--baseline knows only 'hf'")
        if self.assistant and not self.baseline:
            raise typer.BadParameter("--assistant belongs to --baseline hf")
        if self.assistant and (self.decoding or {}).get("batch", 1) > 1:
            raise typer.BadParameter("Hugging Face's assisted generation takes --batch 1 only")

    def counting(self, count: int) -> Run:
        """The same with so many questions."""
        return replace(self, count=count)

    def folder(self, command: str) -> Path:
        """Where results go."""
        return self.out or Path("runs") / command / Path(self.questions).name.split(".")[0]

    def evaluate(
        self,
        command: str,
        methods: Sequence[Any],
        seed: int = 0,
        begin: Callable[[Sequence[Any]], None] = lambda _: None,
        finish: Callable[..., None] = lambda *_: None,
        show: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> dict[str, Any] | None:
        """Answer the questions with ``methods`` (and the baseline), and report.

        Args:
            command: Names the folder.
            seed: Where none was given.
            begin: Called with the questions before anything is decoded; it may raise.
            finish: Called on the first process with the evaluation and the report, before the
                report is written.
            show: Called on the first process with the report, however the judge fared.

        Returns:
            The report, on the first process of several.
        """
        from datetime import timedelta

        import torch
        from accelerate import PartialState
        from accelerate.utils import parse_flag_from_env

        from eagle_fsd.evaluation.answer_store import folder_lock
        from eagle_fsd.evaluation.judge.prompts import JudgePrompts
        from eagle_fsd.evaluation.methods import hugging_face
        from eagle_fsd.evaluation.questions.sets import find_questions
        from eagle_fsd.evaluation.runner import Evaluation

        decoding = Decoding.from_dict({"seed": seed, **self.decoding})
        on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
        # A process may have to wait for the others as long as their shares take.
        state = PartialState(cpu=on_cpu, timeout=timedelta(days=7))
        loading = ProgressBar("downloading", at_once=False)
        with state.main_process_first(), loading as progress:
            questions = find_questions(self.questions, self.count, decoding.seed, progress)
            if self.judge_base_url:  # what cannot be had is told before hours of decoding
                JudgePrompts.find(questions)
        if state.is_main_process:
            begin(questions)
        device = self.device
        if device is None and state.num_processes > 1:
            device = str(state.device)
        model = load_pair(self.target, self.head, self.dtype, device, self.settings)
        if self.baseline:
            methods = [*hugging_face(model, self.assistant), *methods]
        methods = list({method.name: method for method in methods}.values())
        folder = self.folder(command)
        with folder_lock(folder) if state.is_main_process else nullcontext():
            with state.main_process_first():
                evaluation = Evaluation(
                    model,
                    questions,
                    methods,
                    folder,
                    decoding,
                    {
                        "questions": Path(self.questions).name,
                        "count": len(questions),
                        "target": self.target or "bundled",
                        "head": self.head or "bundled",
                    },
                    self.template,
                    self.execute_code,
                    state.process_index,
                    state.num_processes,
                )
            with ProgressBar("answering") as progress:
                evaluation.answer(progress if state.is_main_process else None)
            state.wait_for_everyone()
            if not state.is_main_process:
                return None
            with ProgressBar("scoring", at_once=False) as progress:
                report = evaluation.report(progress if self.execute_code else None)
            evaluation.write(report)
            finish(evaluation, report)
            evaluation.write(report)
            try:
                if self.judge_base_url:
                    self._judge(evaluation, report)
                    evaluation.write(report)
            finally:
                show(report)
        return report

    def _judge(self, evaluation: Any, report: dict[str, Any]) -> None:
        """Have the answers judged, and add what the judge thinks to the report's rows."""
        from eagle_fsd.evaluation.judge.client import JudgeEndpoint
        from eagle_fsd.evaluation.judge.judging import judge_answers
        from eagle_fsd.evaluation.judge.scores import judge_summary

        endpoint = JudgeEndpoint(self.judge_base_url or "", self.judge_model)
        with ProgressBar("judging") as progress:
            judgments = judge_answers(
                endpoint,
                evaluation.questions,
                evaluation.merge(),
                evaluation.folder,
                self.judge_parallel,
                progress,
            )
        found = judge_summary(judgments)
        report["judge"] = {"model": endpoint.model, "base_url": endpoint.shown_url}
        for row in report["rows"]:
            row["judge"] = found.get(row["method"])


def with_run(leave_out: Collection[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Give a command the options of :class:`Run`, in its first parameter.

    Args:
        leave_out: Fields of FSD's settings that the command sets itself.
    """

    def decorate(command: Callable[..., Any]) -> Any:
        return with_settings(leave_out)(
            with_options(Decoding, "decoding")(with_group(Run)(command))
        )

    return decorate


def print_report(report: dict[str, Any], as_json: bool, folder: Path, what: str) -> None:
    """Its tables and sentences, and where they are; or all of it as JSON."""
    if as_json:
        typer.echo(json.dumps(report))
        return
    from eagle_fsd.evaluation.tables import footnote, tables

    for table in tables(report["rows"]):
        print_table(*table)
        out.print()
    for sentence in report.get("conclusions", []):
        out.print(sentence, soft_wrap=True)
    out.print(footnote(report), style="dim", soft_wrap=True)
    err.print(f"{what} are in {folder}.", style="dim", soft_wrap=True)


def print_table(headers: list[str], cells: list[list[str]]) -> None:
    """As wide as it needs: a file or a pipe has no width to fit."""
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for at, header in enumerate(headers):
        shown.add_column(header, justify="right" if at else "left", no_wrap=True)
    for line in cells:
        shown.add_row(*line)
    Console(width=max(out.width, 180), highlight=False, markup=False).print(shown)
