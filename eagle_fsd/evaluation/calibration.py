"""Calibration: choose the fastest settings for a pair whose loss of accuracy is within a bound.

Every setting is compared with exact decoding, at its fastest tree, on the same questions. A setting
combines an acceptance setting (of FSD's grid, priced paths or rules from the literature) with a
tree, by prediction (see :mod:`eagle_fsd.evaluation.search`) its fastest chain or its fastest bushy
tree. Both are tried, because they can lose different amounts of accuracy at the same threshold.

A fifth of the questions, over all categories, or those of another set, :func:`select` the settings
to test (``selection.py``). They are answered in :data:`ROUNDS`. After each round, the settings with
the largest expected gain remain: the gain in speed times the probability that the setting will be
certified, given its answers so far. The speeds of the last ones are measured, and up to
:data:`~eagle_fsd.evaluation.certificate.MAX_TESTS` of them are chosen.

The other questions, which had no part in that choice, :func:`certify` a setting
(``certificate.py``): an exact upper bound on its loss
(:func:`~eagle_fsd.evaluation.statistics.loss_bound`) must be within the allowed loss. The chosen
settings are tested from the fastest to the slowest, until one of them is certified. Their number
and order are fixed before the first of these questions is answered, and the error probability is
divided among them (Bonferroni). So the probability that a setting which loses more than allowed on
questions like these is certified is at most one minus the stated confidence, however many settings
there are to choose from.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from eagle_fsd.evaluation import engines
from eagle_fsd.evaluation.certificate import (
    certificate_of,
    check_sampling,
    check_scores,
    conclude,
    count_unscored_as_wrong,
    is_certified,
    split_questions,
    warn_of_few,
    without_repeated,
)
from eagle_fsd.evaluation.config import (
    CalibrationConfig,
    CalibrationGrid,
    EngineName,
    EvaluationRequest,
    GridConfig,
    LossBounds,
    MeasureConfig,
    SelectionConfig,
)
from eagle_fsd.evaluation.methods import EXACT, Method, given_acceptance
from eagle_fsd.evaluation.processes import on_first_process
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.questions.sets import interleaved
from eagle_fsd.evaluation.report import limit_losses
from eagle_fsd.evaluation.runner import (
    Hooks,
    Report,
    checked_questions,
    exclusive,
    ignore,
    load_share,
    run_evaluation,
)
from eagle_fsd.evaluation.search.search import (
    SPEED_FIELDS,
    TREES_FILE,
    TreePlan,
    measure_speeds,
    plan_trees,
)
from eagle_fsd.evaluation.search.workload import Workload
from eagle_fsd.evaluation.selection import (
    Setting,
    candidate_methods,
    check_accuracy,
    choose_tests,
    drop_settings,
    engine_plan,
    plan_settings,
)
from eagle_fsd.evaluation.settings_file import settings_files, settings_values
from eagle_fsd.evaluation.tables import Row, Table, number_text
from eagle_fsd.model.config import Settings, TreeConfig
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.utils.files import atomic_write
from eagle_fsd.utils.options import OptionsError
from eagle_fsd.utils.processes import start_processes
from eagle_fsd.utils.progress import ProgressFactory, no_progress

log = logging.getLogger(__name__)

#: Default number of bundled questions.
DEFAULT_COUNT = 2000
#: Questions of each round of the selection (None: all of them), and the settings that remain.
ROUNDS: tuple[tuple[int | None, int], ...] = ((16, 6), (64, 4), (None, 4))
#: Maximum number of groups of prompts on which speeds are measured.
RACE_GROUPS = 24
#: Files with the ids of the questions of both stages, the names of the settings to choose from, and
#: how answers are decoded; and with the bounds, the tree of exact decoding and the settings to
#: test, fixed before a fresh question is answered.
QUESTIONS_FILE, TESTS_FILE = "questions.json", "tests.json"
#: Advice where a calibration cannot be resumed.
OTHER_QUESTIONS = (
    "choose another output folder, and other questions with --skip (bundled ones also with --seed):"
    " those that have tested a setting must not test another"
)


@dataclass
class Task:
    """A calibration: its options, the pair, the questions of both stages, and the results so far.

    ``selecting`` are the options for the questions ``used`` to select settings, the others those
    for the ``fresh`` ones. ``methods`` are the acceptance settings to choose from, see
    :func:`candidate_methods`.
    ``rows`` are the results on the questions for the selection by method, ``exact`` is exact
    decoding with its tree, and ``tests`` are the settings to test, fastest first.
    """

    request: EvaluationRequest
    config: CalibrationConfig
    selecting: tuple[EvaluationRequest, CalibrationConfig]
    bounds: LossBounds
    engine: EngineName | None
    progress: ProgressFactory
    methods: Sequence[Method]
    model: EagleFSD
    used: Sequence[Question]
    fresh: Sequence[Question]
    rows: dict[str, Row] = field(default_factory=dict)
    exact: Method = EXACT
    tests: list[Method] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """The output folder."""
        return self.request.output_folder("calibrate")

    def answer(
        self,
        questions: Sequence[Question],
        methods: Sequence[Method],
        folder: str = "",
        on_report: Callable[[Report], None] = ignore,
        selects: bool = False,
        first: int | None = None,
    ) -> Report | None:
        """Answer the first questions with methods; in a subfolder, without judge."""
        request, config = self.selecting if selects else (self.request, self.config)
        # Answers are decoded without compilation; only speeds are measured with it.
        request = request.model_copy(update={"compile": False})
        return run_evaluation(
            self.model,
            questions,
            methods,
            request.without_judge() if folder else request,
            config=config.updated(batch=config.answer_batch),
            folder=self.folder / folder,
            hooks=Hooks(self.progress, on_report=on_report),
            first=first,
        )


def calibrate(
    request: EvaluationRequest,
    bounds: LossBounds,
    config: CalibrationConfig | None = None,
    grid: GridConfig | None = None,
    selection: SelectionConfig | None = None,
    *,
    engine: EngineName | None = None,
    rules: bool = True,
    install: bool = False,
    settings: Settings | None = None,
    progress: ProgressFactory = no_progress,
) -> Report | None:
    """Find the fastest settings whose loss of accuracy is within a bound, and save them.

    Writes ``fsd.json`` to the output folder and, with ``install``, beside the drafter. For
    another engine, the settings that it has are tried, and the file is written if it reads one.
    Without a count, :data:`DEFAULT_COUNT` of the bundled questions are answered. A warning is
    logged before decoding if there are too few questions to certify any setting. Under several
    processes, all but the first return None.

    The report covers the questions that certify settings or, if no setting was tested, those of the
    first round of the selection. Speeds were measured separately, at the batch size of the options.
    Its ``files`` are the ``fsd.json`` files that were written.

    Besides what :func:`~eagle_fsd.evaluation.runner.evaluate` raises, a ValueError is raised if the
    questions or answers cannot support the bound, or if the output folder holds a calibration on
    other questions or with other settings, and an OptionsError if the engine does not apply its
    rule at this temperature or with this tokenizer.
    """
    config, grid = config or CalibrationConfig(), grid or CalibrationGrid()
    methods = candidate_methods(
        grid,
        engine,
        temperature=config.temperature,
        rules=rules,
        settings=settings,
        drafter=request.drafter,
    )
    files = []
    if engine is None or engines.ENGINES[engine].reads_settings:
        files = settings_files(request, request.output_folder("calibrate"), install)
    elif install:
        raise OptionsError(f"--install writes fsd.json, which cannot hold {engine}'s settings")
    check_sampling(config)
    if request.baseline:
        raise OptionsError("--baseline is not supported by calibrate, which does not time it")
    selection = selection or SelectionConfig()
    if selection.select_regret is not None and config.measure != "accuracy":
        raise OptionsError(f"--select-regret requires --measure accuracy; got {config.measure}")
    if request.questions == "bundled":
        request = request.updated(count=request.count or DEFAULT_COUNT)
    selecting, used, fresh = read_stages(request, config, selection, progress)
    model = load_share(request, settings)
    model.acceptance = given_acceptance(settings)
    task = Task(
        request=request,
        config=config,
        selecting=selecting,
        bounds=bounds,
        engine=engine,
        progress=progress,
        methods=methods,
        model=model,
        used=used,
        fresh=fresh,
    )
    if start_processes().is_main_process:
        warn(task)
    if engine:
        engines.ENGINES[engine].check(model, request)
    with exclusive(task.folder):
        on_first_process(lambda: check_folder(task))
        select(task)
        found = certify(task)
    if found is None:
        return None
    for file in files:
        atomic_write(file, json.dumps(found["calibration"], indent=2) + "\n")
    return {**found, "files": list(map(str, files))}


def read_stages(
    request: EvaluationRequest,
    config: CalibrationConfig,
    selection: SelectionConfig,
    progress: ProgressFactory,
) -> tuple[tuple[EvaluationRequest, CalibrationConfig], list[Question], list[Question]]:
    """Return the options and the questions of the selection, and the questions that certify.

    Raises ValueError if accuracy is measured on questions whose answers have no score.
    """
    at_once, selecting = config.updated(batch=config.answer_batch), (request, config)
    questions = list(map(count_unscored_as_wrong, checked_questions(request, at_once, progress)))
    if selection.select_on is None:
        used, fresh = split_questions(questions)
    else:
        own = {"questions": selection.select_on, "count": None, "skip": 0, "grader": None}
        changed = request.model_copy(update=own)
        used = checked_questions(changed, at_once, progress)
        fresh = without_repeated(questions, used)
        if not fresh:
            raise ValueError(f"{selection.select_on} leaves no other question to certify settings")
        measured = config
        if config.measure == "accuracy" and not all(item.scored_by for item in used):
            regret = selection.select_regret
            measure = "agreement" if regret is None else "regret"
            measured = config.updated(measure=measure, max_regret=regret)
        selecting = changed, measured
    for part, stage in ((used, selecting[1]), (fresh, config)):
        if stage.measure == "accuracy":
            check_scores(part, request.execute_code)
    return selecting, interleaved(used), fresh


def warn(task: Task) -> None:
    """Log what limits the bound that can be certified, and what it holds for."""
    if few := warn_of_few(task.bounds, task.fresh):
        log.warning("%s", few)
    if task.request.draft_vocabulary is not None:
        log.warning("fsd.json cannot state --draft-vocabulary, so it will hold no certificate")
    if task.model.drafter.learns:
        log.warning(
            "the drafter learns from what it decodes: unless decoding is lossless, answers depend"
            " on the questions before, and the bound holds for this order of questions"
        )


def select(task: Task) -> None:
    """Select the settings to test: combinations of acceptance settings with trees."""
    raced = task.used[: RACE_GROUPS * task.config.batch]
    workload = Workload.of(task.model, raced, *task.selecting)
    compiled, file = bool(task.request.compile), task.folder / TREES_FILE
    trees = on_first_process(
        lambda: plan_trees(workload, task.methods, file, task.progress, compiled=compiled)
    )
    trees = engine_plan(trees, task.engine)
    exact = replace(EXACT, tree=trees.exact)
    plan, answered = plan_settings(trees, task.methods), 0
    for end, kept in ROUNDS:
        if answered and (not plan or answered >= len(task.used)):
            break
        methods, answered = [exact, *(item.method for item in plan)], end or len(task.used)
        report = task.answer(task.used, methods, "selection", selects=True, first=end)
        task.rows |= {row["method"]: row for row in (report["rows"] if report is not None else [])}
        on_first_process(lambda: check_accuracy(task.rows[EXACT.name], task.bounds.max_drop))
        drop = partial(
            drop_settings, plan, task.rows, task.bounds, fresh=len(task.fresh), kept=kept
        )
        plan = on_first_process(drop)
    task.exact, task.tests = on_first_process(lambda: fix_tests(task, trees, workload, plan))


def fix_tests(
    task: Task, trees: TreePlan, workload: Workload, plan: Sequence[Setting]
) -> tuple[Method, list[Method]]:
    """Measure speeds, add them to the rows, and choose exact decoding's tree and the tests.

    A calibration that is resumed tests what it has fixed, but measures speeds again.
    """
    rows, fixed = task.rows, read_tests(task.folder, task.bounds)
    task.model.compile = bool(task.request.compile)  # answers are decoded without compilation
    raced = [TreeConfig(**fixed["exact"])] if fixed else trees.exact_trees
    known = {item.name: item.method for item in plan_settings(trees, task.methods)}
    # Scores can change, as those of a grader that asks a model, so the plan may lack a test.
    names = dict.fromkeys([*(item.name for item in plan), *(fixed["tests"] if fixed else ())])
    methods = {name: known[name] for name in names}
    exact, measured = measure_speeds(workload, raced, list(methods.values()), task.progress)
    for name, row in rows.items():
        row |= measured.get(name, dict.fromkeys(SPEED_FIELDS))
    rows[EXACT.name]["settings"] = exact.describe(task.model)
    if not fixed:
        chosen = choose_tests([rows[name] for name in methods], task.bounds, len(task.fresh))
        fixed = {
            "bounds": task.bounds.model_dump(),
            "exact": exact.pair_for(task.model).tree.model_dump(),
            "tests": [row["method"] for row in chosen],
        }
        atomic_write(task.folder / TESTS_FILE, json.dumps(fixed) + "\n")
    return exact, [methods[name] for name in fixed["tests"]]


def certify(task: Task) -> Report | None:
    """Test the selected settings on fresh questions, until one of them is certified.

    If nothing was selected, a report on exact decoding is written. None except on the first
    process.
    """
    tested: list[Method] = []
    found: list[Report] = []

    def finish(report: Report) -> None:
        extend_report(task, tested, report)
        found.append(report)

    if not task.tests:
        task.answer(task.used[: ROUNDS[0][0]], [task.exact], on_report=finish, selects=True)
    for method in task.tests:
        tested.append(method)
        task.answer(task.fresh, [task.exact, *tested], on_report=finish)
        if on_first_process(lambda: found[-1]["calibrated"] != EXACT.name):
            break
    return found[-1] if found else None


def extend_report(task: Task, tested: Sequence[Method], report: Report) -> None:
    """Extend the report on the fresh questions by the selection, verdicts and settings."""
    tests, bounds = len(task.tests), task.bounds
    # Answers were decoded with other batches than those whose speed was measured.
    batches = {"batch": task.config.batch, "answer_batch": task.config.answer_batch}
    report["about"] = {**report["about"], **batches, "compiled": bool(task.request.compile)}
    for row in report["rows"]:
        own = task.rows.get(row["method"], {})
        row |= {name: own.get(name) for name in SPEED_FIELDS}
    by_name = {row["method"]: row for row in report["rows"]}
    report |= limit_losses(report["rows"], tests - len(tested), bounds.confidence)
    rows = [by_name[item.name] for item in tested]
    method = tested[-1] if rows and is_certified(rows[-1], bounds) else task.exact
    report["selection"] = list(task.rows.values())
    report["tables"] = [selection_table(task)]
    conclusion = conclude(
        rows, bounds, tests=tests, choices=len(task.methods), measure=task.config.measured
    )
    report["calibration"] = calibrated_settings(task, method, tested, report=report, rows=by_name)
    report["flags"] = None
    if task.engine:
        conclusion = f"{conclusion} {engines.caveat(task.engine)}"
        tree = method.pair_for(task.model).tree
        report["flags"] = engines.flags(
            task.engine, method, tree, model=task.model, request=task.request
        )
    report["conclusions"] = [conclusion]
    report["calibrated"] = method.name


def calibrated_settings(
    task: Task,
    method: Method,
    tests: Sequence[Method],
    report: Report,
    rows: dict[str, Row],
) -> dict[str, Any]:
    """Return the contents of ``fsd.json``: the settings, and how they were chosen (``about``).

    The lossless tree is stored for the number of prompts that speeds were measured with.
    """
    row, reference, model = rows[method.name], rows[EXACT.name], task.model
    measured = (
        *("tokens_per_second", "speed_over_exact", "speed_over_exact_interval"),
        *("speedup", "speedup_interval", "tau"),
    )
    options = (
        *("questions", "skip", "count", "seed", "temperature", "batch", "answer_batch"),
        *("compiled", "max_new_tokens", "template"),
    )
    tested = []
    for item in tests:
        against = rows[item.name]["against_exact"]
        counts = {name: against[name] for name in ("lost", "gained", "paired")}
        drop = 100 * max(0.0, against["loss_limit"])
        result = {"drop_is_below_points": drop, "certified": item is method}
        tested.append({"method": item.name, **counts, **result})
    about = {
        "made_by": "eagle-fsd calibrate",
        "max_drop_points": task.bounds.max_drop,
        "confidence": task.bounds.confidence,
        "tested": tested,
        "accuracy": row["accuracy"],
        "accuracy_exact": reference["accuracy"],
        **{name: row[name] for name in measured},
        "tau_exact": reference["tau"],
        **{name: report["about"][name] for name in options},
        **{name: getattr(task.config, name) for name in MeasureConfig.model_fields},
        "device": report["device"],
        "environment": report["environment"],
        "sessions": len(report["sessions"]),
    }
    lossless = {task.config.batch: task.exact.pair_for(model).tree}
    values = settings_values(
        model, method.pair_for(model), lossless=lossless, request=task.request, about=about
    )
    # The file can hold neither a rule object nor a draft vocabulary.
    stated = method.rule is None and task.request.draft_vocabulary is None
    if stated and method in tests:
        values["certificate"] = certificate_of(report, row, decoder="eagle-fsd").model_dump()
    return values


def selection_table(task: Task) -> Table:
    """Return a table of the settings on the questions for the selection."""
    measure = task.selecting[1].measure
    headers = ["selection", "n", "tau", measure, "lost/gained", "tokens/s", "x exact"]
    order = {method.name: number for number, method in enumerate(task.tests, 1)}
    cells = []
    for row in task.rows.values():
        against, number = row.get("against_exact", {}), order.get(row["method"])
        cells.append(
            [
                row["method"] + (f" (test {number})" if number else ""),
                str(row["scored"]),
                number_text(row["tau"], ".2f"),
                number_text(row["accuracy"], ".1%"),
                f"{against['lost']}/{against['gained']}" if "lost" in against else "",
                number_text(row["tokens_per_second"], ".1f"),
                number_text(row["speed_over_exact"], ".2f"),
            ]
        )
    return headers, cells


def check_folder(task: Task) -> None:
    """Raise ValueError if the folder holds another calibration; record what this one chooses from.

    A calibration cannot grow: with more questions, some that certified settings would select them,
    and with more settings, the tests that were fixed would not be those of the best ones. Answers
    with other options of decoding are not comparable.
    """
    folder, config, (_, selecting) = task.folder, task.config, task.selecting
    parts = task.used, task.fresh
    plan: dict[str, Any] = {
        "questions or --count": [[item.question_id for item in part] for part in parts],
        "settings to choose from": [method.name for method in task.methods],
        "options of decoding": config.model_dump(exclude=set(MeasureConfig.model_fields)),
        "--compile": bool(task.request.compile),
        "--grader": task.request.grader,
        "--measure": config.measured,
        "--select-regret": selecting.measured,
    }
    file = folder / QUESTIONS_FILE
    if not (file.exists() and (folder / TREES_FILE).exists()):
        atomic_write(file, json.dumps(plan) + "\n")
        return
    before = json.loads(file.read_text(encoding="utf-8"))
    if before.keys() != plan.keys():
        raise ValueError(f"{folder} holds a calibration of another version: {OTHER_QUESTIONS}")
    if changed := [name for name, value in plan.items() if before[name] != value]:
        names = ", ".join(changed)
        raise ValueError(f"{folder} holds a calibration with other {names}: {OTHER_QUESTIONS}")


def read_tests(folder: Path, bounds: LossBounds) -> dict[str, Any]:
    """Return the contents of :data:`TESTS_FILE`, which a resumed calibration keeps, or {}.

    Speeds are measured again on resuming and could select other settings. Certifying those as well
    would add tests that the confidence does not account for. Raises ValueError for other bounds.
    """
    file = folder / TESTS_FILE
    if not file.exists():
        return {}
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if found["bounds"] != bounds.model_dump():
        raise ValueError(f"{folder} holds a calibration with other bounds: {OTHER_QUESTIONS}")
    return found
