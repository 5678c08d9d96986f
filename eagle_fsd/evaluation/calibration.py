"""Calibration: choose the fastest settings for a pair whose loss of accuracy is within a bound.

Every setting is compared with exact decoding on the same questions, both with the tree that suits
them best. The settings are all combinations of an acceptance setting (FSD's grid, priced paths and
rules from the literature) with a tree: for each of the first, the fastest chain and the fastest
bushy tree by prediction (see :mod:`eagle_fsd.evaluation.tuning`), because a bushy tree loses less
accuracy at the same threshold.

Part of the questions, :data:`SELECTION_SHARE` of every category, select the settings to test. They
are answered in :data:`ROUNDS`. After each round, the settings with the largest expected gain
remain: the gain in speed times the probability that the setting will be certified, given its
answers so far. The speeds of the last ones are measured, and at most :data:`MAX_TESTS` of them are
chosen.

The other questions, which had no part in that choice, *certify* a setting: an exact upper bound on
its loss (:func:`~eagle_fsd.evaluation.statistics.loss_bound`) must be within the allowed loss. The
chosen settings are tested from the fastest to the slowest, until one of them is certified. Their
number and order are fixed before the first of these questions is answered, and the error
probability is divided among them (Bonferroni). So the probability that a setting which loses more
than allowed on questions like these is certified is at most one minus the stated confidence,
however many settings there are to choose from.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from eagle_fsd.bundled import BUNDLED_HEAD
from eagle_fsd.evaluation import engines
from eagle_fsd.evaluation.analysis import is_faster
from eagle_fsd.evaluation.config import (
    CalibrationConfig,
    CalibrationGrid,
    EngineName,
    EvaluationRequest,
    GridConfig,
    LossBounds,
)
from eagle_fsd.evaluation.methods import (
    EXACT,
    PLAIN,
    PRICED,
    Method,
    fsd_series,
    given_acceptance,
    rule_method,
)
from eagle_fsd.evaluation.plots import draw_figures
from eagle_fsd.evaluation.processes import start_processes
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.questions.sets import requested_questions
from eagle_fsd.evaluation.report import limit_losses
from eagle_fsd.evaluation.runner import (
    Evaluation,
    Hooks,
    Loaded,
    Report,
    check_request,
    load_share,
    on_first_process,
    run_evaluation,
)
from eagle_fsd.evaluation.statistics import (
    confidence_per_test,
    is_loss_below,
    least_questions,
    loss_bound,
)
from eagle_fsd.evaluation.tables import Row, Table, points_text
from eagle_fsd.evaluation.tuning.candidates import Candidate
from eagle_fsd.evaluation.tuning.race import race_exact
from eagle_fsd.evaluation.tuning.search import TIMED_TREES, TreePlan, open_workload, shape
from eagle_fsd.evaluation.tuning.workload import Workload
from eagle_fsd.model.config import SETTINGS_FILE, Settings, TreeConfig
from eagle_fsd.model.identity import identify
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.utils.files import atomic_write
from eagle_fsd.utils.options import OptionsError
from eagle_fsd.utils.progress import ProgressFactory, no_progress

log = logging.getLogger(__name__)

#: Default number of bundled questions.
DEFAULT_COUNT = 2000
#: Rules from the literature to choose from.
CALIBRATED_RULES = ("acc 0.5", "budget", "top-ratio", "margin", "cascade", "mixture")
#: Part of the questions on which settings are selected; the others certify them.
SELECTION_SHARE = 0.2
#: Questions of each round of the selection (None: all of them), and the settings that remain.
ROUNDS: tuple[tuple[int | None, int], ...] = ((16, 6), (64, 3), (None, 3))
#: Largest number of settings to test.
MAX_TESTS = 2
#: Probability of being certified below which a setting is dropped, and the number of draws that
#: it is estimated from.
MIN_CHANCE, DRAWS = 0.02, 200
#: Groups of prompts on which speeds are measured.
RACE_GROUPS = 24
#: Minimum accuracy of exact decoding, in percent and as a multiple of the allowed loss. Below it
#: there is little accuracy to lose, usually because answers are cut off or cannot be parsed.
MIN_ACCURACY, MIN_ACCURACY_TO_LOSS = 5.0, 2.0
#: File with the trees of all settings, and with the ids of the questions of both stages, the names
#: of the settings to choose from, and whether passes are compiled.
TREES_FILE, QUESTIONS_FILE = "trees.json", "questions.json"
#: File with the bounds, the tree of exact decoding and the settings to test, fixed before a fresh
#: question is answered.
TESTS_FILE = "tests.json"
#: Advice where a calibration cannot be resumed.
OTHER_QUESTIONS = (
    "choose another output folder, and with --skip or --seed other questions: those that have"
    " tested a setting must not be tested again"
)
#: Values of a row that are measured separately, one batch of questions at a time.
SPEED_FIELDS = (
    *("tokens_per_second", "latency", "speedup", "speedup_interval"),
    *("speed_over_exact", "speed_over_exact_interval"),
)


@dataclass(frozen=True)
class Verdict:
    """The result of testing one setting.

    Attributes:
        row: The setting's row of the report.
        drop: Upper bound on the loss of accuracy in percentage points.
        certified: Whether the loss is within the allowed one.
    """

    row: Row
    drop: float
    certified: bool


@dataclass(frozen=True)
class Setting:
    """A setting to choose from.

    Attributes:
        method: The method, with its tree.
        acceptance: Name of the acceptance setting, which has several trees.
        speed: Predicted speed relative to exact decoding.
    """

    method: Method
    acceptance: str
    speed: float

    @property
    def name(self) -> str:
        """Name of the method."""
        return self.method.name


@dataclass(frozen=True)
class Calibration:
    """The result of :func:`calibrate`.

    Attributes:
        report: The report on the questions that certify settings or, if none was tested, on the
            first ones for the selection. Its speeds were measured separately, at the batch size of
            the options. ``calibration`` holds the chosen settings, ``selection`` the rows that the
            selection is based on, ``tables`` both stages, ``conclusions`` the conclusion, and
            ``flags`` the settings in the form that another engine takes, if one was named.
        chosen: Name of the chosen method.
        table: The selection as a table.
        files: The ``fsd.json`` files that were written.
    """

    report: Report
    chosen: str
    table: Table
    files: list[Path] = field(default_factory=list)

    @property
    def conclusion(self) -> str:
        """A sentence on the chosen method that states its bound."""
        return str(self.report["conclusions"][0])


def calibrate(
    request: EvaluationRequest,
    bounds: LossBounds,
    config: CalibrationConfig | None = None,
    grid: GridConfig | None = None,
    *,
    engine: EngineName | None = None,
    rules: bool = True,
    install: bool = False,
    settings: Settings | None = None,
    progress: ProgressFactory = no_progress,
) -> Calibration | None:
    """Find the fastest settings whose loss of accuracy is within a bound, and save them.

    Writes ``fsd.json`` to the output folder. Logs a warning before decoding if there are too few
    questions to certify any setting.

    Args:
        request: What to evaluate. Without a count, :data:`DEFAULT_COUNT` of the bundled questions
            are answered.
        bounds: The largest loss to accept.
        config: How answers are decoded; default: ``CalibrationConfig()``.
        grid: Acceptance settings to choose from; default: ``CalibrationGrid()``.
        engine: Choose among the settings of another engine's rule instead; no file is written.
        rules: Choose among :data:`CALIBRATED_RULES`, too.
        install: Also save ``fsd.json`` beside the drafter, where every command reads it.
        settings: Tree and acceptance options that override the drafter's ``fsd.json``.
        progress: Reports progress.

    Returns:
        The result on the first process, None on the others.

    Raises:
        OptionsError: ``install`` is set, but the head is not a local folder or an engine is named;
            or the engine does not apply its rule at this temperature or with this tokenizer.
        ValueError: The questions or answers cannot support the bound; or the output folder holds a
            calibration on other questions or with other settings.
        LoadError, QuestionSetError, JudgeError: As in
            :func:`~eagle_fsd.evaluation.runner.evaluate`.
    """
    config = config or CalibrationConfig()
    grid = grid or CalibrationGrid()
    candidates = candidate_methods(grid, engine, config.temperature, rules)
    drafter = Path(request.drafter) if request.drafter else BUNDLED_HEAD
    if install and engine:
        raise OptionsError(f"--install writes fsd.json, which cannot hold {engine}'s settings")
    if install and not drafter.is_dir():
        raise OptionsError(f"--install requires a drafter in a local folder; got {drafter}")
    if request.assistant and config.answer_batch > 1:
        raise OptionsError(
            "--assistant requires --answer-batch 1: assisted generation has no batches"
        )
    if request.questions == "bundled":
        request = request.updated(count=request.count or DEFAULT_COUNT)
    answering = config.updated(batch=config.answer_batch)
    folder = request.output_folder("calibrate")
    state = start_processes()
    with state.main_process_first(), progress("downloading") as advance:
        questions = requested_questions(request, config.seed, advance)
        check_request(request, answering, [EXACT, *candidates], questions)
    used, fresh = split_questions(list(map(count_unscored_as_wrong, questions)))
    warning = check_questions(bounds.max_drop, bounds.confidence, fresh, request.execute_code)
    if warning and state.is_main_process:
        log.warning("%s", warning)
    with state.main_process_first():
        names = [method.name for method in candidates]
        check_folder(folder, used, fresh, names, bool(request.compile))

    model = load_share(request, settings)
    model.acceptance = given_acceptance(settings)
    if model.drafter.learns and state.is_main_process:
        log.warning(
            "the drafter learns from what it decodes: with a threshold above 0, answers depend on"
            " the questions before, and the bound holds for this order of questions"
        )
    if engine == "tensorrt-llm":
        engines.thinking_tokens(model.tokenizer)  # raises an exception before hours of decoding
    raced = used[: RACE_GROUPS * config.batch]
    workload = open_workload(model, raced, request, config)

    trees = on_first_process(
        lambda: TreePlan.make(
            workload, candidates, folder / TREES_FILE, progress, compiled=bool(request.compile)
        )
    )
    exact = replace(EXACT, tree=exact_tree(trees, engine))
    plan = plan_settings(trees, candidates, engine)

    # Only the answers that certify are judged and compared with Hugging Face's.
    rounds = request.model_copy(
        update={"judge_base_url": None, "baseline": None, "assistant": None}
    )

    def answer(
        request: EvaluationRequest,
        questions: Sequence[Question],
        chosen: Sequence[Method],
        folder: Path,
        hooks: Hooks,
    ) -> Report | None:
        loaded, own = Loaded(model, questions), request.updated(compile=False)
        return run_evaluation(own, answering, [exact, *chosen], folder, None, hooks, loaded)

    rows: dict[str, Row] = {}
    start = 0
    for number, (end, kept) in enumerate(ROUNDS, 1):
        part = used[start:end]
        start = len(used) if end is None else end
        if not part or (rows and not plan):
            break
        methods = [item.method for item in plan]
        report = answer(rounds, part, methods, folder / f"round-{number}", Hooks(progress))
        add_rows(rows, report["rows"] if report is not None else [])

        def drop(plan: list[Setting] = plan, kept: int = kept) -> list[Setting]:
            check_accuracy(rows[EXACT.name], bounds.max_drop)
            return drop_settings(plan, rows, bounds, len(fresh), kept)

        plan = on_first_process(drop)

    def choose() -> tuple[Method, list[Method]]:
        fixed = read_tests(folder, bounds)
        model.compile = bool(request.compile)  # answers are decoded without compilation
        likely = [item.tree for item in engine_trees(trees, EXACT, engine)[:TIMED_TREES]]
        raced = [TreeConfig(**fixed["exact"])] if fixed else [exact_tree(trees, engine), *likely]
        best, measured = race_settings(workload, raced, plan, progress)
        for name, row in rows.items():
            row |= measured.get(name, dict.fromkeys(SPEED_FIELDS))
        rows[EXACT.name]["settings"] = best.describe(model)
        methods = {item.name: item.method for item in plan}
        if not fixed:
            found = choose_tests([rows[name] for name in methods], bounds, len(fresh))
            fixed = {
                "bounds": bounds.model_dump(),
                "exact": best.pair_for(model).tree.model_dump(),
                "tests": [row["method"] for row in found],
            }
            atomic_write(folder / TESTS_FILE, json.dumps(fixed) + "\n")
        return best, [methods[name] for name in fixed["tests"]]

    exact, tests = on_first_process(choose)
    tested: list[Method] = []
    result: list[Calibration] = []

    def finish(_: Evaluation, report: Report) -> None:
        # Answers were decoded with other batches than those whose speed was measured.
        batches = {"batch": config.batch, "answer_batch": config.answer_batch}
        report["about"] = {**report["about"], **batches, "compiled": bool(request.compile)}
        for row in report["rows"]:
            own = rows.get(row["method"], {})
            row |= {name: own.get(name) for name in SPEED_FIELDS}
        by_name = {row["method"]: row for row in report["rows"]}
        verdicts = [certify(by_name[item.name], bounds, len(tests)) for item in tested]
        method = tested[-1] if verdicts and verdicts[-1].certified else exact
        table = selection_table(list(rows.values()), tests)
        report |= limit_losses(report["rows"], len(tests) - len(tested), bounds.confidence)
        report["selection"], report["tables"] = list(rows.values()), [table]
        conclusion = conclude(verdicts, bounds, len(tests), len(candidates))
        report["conclusions"] = [f"{conclusion} {engines.caveat(engine)}" if engine else conclusion]
        report["calibration"] = chosen_settings(model, method, exact, verdicts, bounds, report)
        tree = method.pair_for(model).tree
        report["flags"] = (
            engines.settings(engine, method, tree, model.tokenizer) if engine else None
        )
        report["calibrated"] = method.name
        draw_figures(report, folder)
        result.append(Calibration(report, method.name, table))

    hooks = Hooks(progress, on_report=finish)
    if not tests:
        answer(request, used[: ROUNDS[0][0]], [], folder, hooks)
    for method in tests:
        tested.append(method)
        answer(request, fresh, tested, folder, hooks)
        if on_first_process(lambda: result[-1].chosen != EXACT.name):
            break
    if not result:
        return None
    found = result[-1]
    files = [] if engine else [folder / SETTINGS_FILE]
    if install:
        files.append(drafter / SETTINGS_FILE)
    for file in files:
        atomic_write(file, json.dumps(found.report["calibration"], indent=2) + "\n")
    return replace(found, files=files)


def candidate_methods(
    grid: GridConfig, engine: EngineName | None, temperature: float, rules: bool
) -> list[Method]:
    """Return the acceptance settings to choose from, without trees.

    Args:
        grid: FSD's settings, to which priced paths without a gate are added.
        engine: Return the settings of this engine's rule instead.
        temperature: Temperature of the answers.
        rules: Add :data:`CALIBRATED_RULES`.

    Raises:
        OptionsError: The engine does not apply its rule at this temperature.
    """
    if engine:
        groups = list(engines.series(engine, temperature).values())
    else:  # the highest floor first, see :func:`plan_settings`
        groups = list(reversed(fsd_series(grid).values()))
    methods = [method for group in groups for method in group]
    if not engine:
        methods += [*PRICED, *(map(rule_method, CALIBRATED_RULES) if rules else ())]
    return methods


def engine_trees(plan: TreePlan, method: Method, engine: EngineName | None) -> list[Candidate]:
    """Return the trees with which an engine decodes as we do, fastest first.

    Args:
        plan: The trees of every method.
        method: The method.
        engine: The engine that will decode; None: our own.
    """
    found = plan.candidates[method.name]
    if engine in (engines.CHAINS_ONLY if method.name == EXACT.name else engines.CHAIN_RULES):
        return [item for item in found if item.tree.top_k == 1]
    return list(found)


def exact_tree(plan: TreePlan, engine: EngineName | None) -> TreeConfig:
    """Return the tree of exact decoding, with which all settings are compared.

    Args:
        plan: The trees of every method.
        engine: The engine that will decode; None: our own.

    Returns:
        The fastest tree; for an engine without trees, the chain that is predicted to be the fastest
        if the fastest tree is none.
    """
    if engine in engines.CHAINS_ONLY and plan.exact.top_k > 1:
        return engine_trees(plan, EXACT, engine)[0].tree
    return plan.exact


def plan_settings(
    plan: TreePlan, methods: Sequence[Method], engine: EngineName | None
) -> list[Setting]:
    """Combine each method with the trees that may suit it.

    Args:
        plan: The trees of exact decoding and of the methods.
        methods: The methods.
        engine: The engine that will decode; see :data:`~eagle_fsd.evaluation.engines.CHAIN_RULES`.

    Returns:
        The settings that are predicted to be faster than exact decoding, fastest first: each method
        with its fastest chain and with its fastest bushy tree. Of methods that accepted the same
        numbers of tokens, such as FSD with a small threshold under several floors, only the first.
    """
    settings: dict[Candidate, Setting] = {}
    exact = engine_trees(plan, EXACT, engine)[0].tokens_per_second
    for method in methods:
        found = engine_trees(plan, method, engine)
        chains = [item for item in found if item.tree.top_k == 1]
        bushy = [item for item in found if item.tree.top_k > 1]
        for item in (*chains[:1], *bushy[:1]):
            if item.tokens_per_second > exact:
                name = f"{method.name} tree {shape(item.tree, '-')}"
                own = replace(method, name=name, tree=item.tree)
                setting = Setting(own, method.name, item.tokens_per_second / exact)
                settings.setdefault(item, setting)
    return sorted(settings.values(), key=lambda item: -item.speed)


def add_rows(rows: dict[str, Row], new: Sequence[Row]) -> None:
    """Add the results on further questions.

    Args:
        rows: The results so far by method, which are replaced.
        new: Rows of a report on other questions.
    """
    for row in new:
        old = rows.get(row["method"])
        merged = dict(row)
        if old is not None:
            for name in ("scored", "tokens", "cut_off"):
                merged[name] = old[name] + row[name]
            right = sum((item["accuracy"] or 0.0) * item["scored"] for item in (old, row))
            merged["accuracy"] = right / max(1, merged["scored"])
            if "lost" in row.get("against_exact", {}):
                merged["against_exact"] = {
                    name: old["against_exact"][name] + row["against_exact"][name]
                    for name in ("lost", "gained", "paired")
                }
        rows[row["method"]] = merged


def drop_settings(
    plan: Sequence[Setting], rows: Mapping[str, Row], bounds: LossBounds, fresh: int, kept: int
) -> list[Setting]:
    """Keep the settings with the largest expected gain. Nothing here certifies a setting.

    Of the trees of an acceptance setting, only the most promising one remains.

    Args:
        plan: The settings, fastest first.
        rows: Rows of the report by method.
        bounds: The largest loss to accept.
        fresh: Number of fresh questions that will certify a setting.
        kept: Number of settings to keep.

    Returns:
        The remaining settings, fastest first.
    """
    gains = {}
    for item in plan:
        probability = chance(rows[item.name], bounds, fresh)
        if probability >= MIN_CHANCE:
            gains[item.name] = probability * (item.speed - 1)
    promising = [item for item in plan if item.name in gains]
    best: dict[str, str] = {}
    for item in sorted(promising, key=lambda item: -gains[item.name]):
        best.setdefault(item.acceptance, item.name)
    remaining = list(best.values())[:kept]
    return [item for item in plan if item.name in remaining]


def race_settings(
    workload: Workload,
    trees: Sequence[TreeConfig],
    plan: Sequence[Setting],
    progress: ProgressFactory,
) -> tuple[Method, dict[str, Row]]:
    """Measure the speeds of settings, and of exact and plain decoding.

    Args:
        workload: The prompts.
        trees: The best trees of exact decoding.
        plan: The settings.
        progress: Reports progress.

    Returns:
        Exact decoding with the fastest of the trees, with which all are compared, and
        :data:`SPEED_FIELDS` by method.
    """
    others = [*(item.method for item in plan), PLAIN]
    with progress("measuring speeds") as advance:
        runners = race_exact(workload, trees, others, advance)
    reference, *_, plain = runners
    found = {}
    for runner in runners:
        over_exact, over_plain = runner.over(reference), runner.over(plain)
        waits = [seconds for seconds, _ in runner.timings]
        found[runner.method.name] = {
            "tokens_per_second": runner.tokens_per_second,
            "latency": {
                "median": float(np.median(waits)),
                "p95": float(np.quantile(waits, 0.95)),
            },
            "speedup": over_plain.value,
            "speedup_interval": over_plain.interval,
            "speed_over_exact": over_exact.value,
            "speed_over_exact_interval": None if runner is reference else over_exact.interval,
        }
    return reference.method, found


def split_questions(questions: Sequence[Question]) -> tuple[list[Question], list[Question]]:
    """Split questions into those that select settings and those that certify them.

    Both have the same shares of all categories, up to rounding, so that a certificate is about
    questions like all of them.

    Args:
        questions: The questions.

    Returns:
        :data:`SELECTION_SHARE` of the questions, at least one: the first ones of each category. And
        the others, without those that repeat one of the former. Both are in the original order.
    """
    count = max(1, round(SELECTION_SHARE * len(questions)))
    categories = Counter(question.category for question in questions)
    # The category at evenly spaced places, if questions were sorted by category.
    places = list(categories.elements())
    quota = Counter(places[int((at + 0.5) * len(places) / count)] for at in range(count))
    used = []
    for question in questions:
        if quota[question.category]:
            quota[question.category] -= 1
            used.append(question)
    return used, remove_questions(questions, used)


def count_unscored_as_wrong(question: Question) -> Question:
    """Let answers that the user's grader gives no score count as wrong.

    Otherwise they would be missing from the certificate, which must not depend on the answers.

    Args:
        question: The question.

    Returns:
        The question, unchanged unless it has a grader function.
    """
    grade = question.grade
    if grade is None:
        return question
    return replace(question, grade=lambda answer, asked: bool(grade(answer, asked)))


def check_folder(
    folder: Path,
    used: Sequence[Question],
    fresh: Sequence[Question],
    settings: Sequence[str],
    compiled: bool,
) -> None:
    """Check that a folder holds no other calibration, and record what this one chooses from.

    A calibration cannot grow: with more questions, some that certified settings would select them,
    and with more settings, the tests that were fixed would not be those of the best ones.

    Args:
        folder: The output folder, created if missing.
        used: The questions that select settings.
        fresh: The questions that certify settings.
        settings: Names of the acceptance settings to choose from.
        compiled: Whether speeds are measured with compiled passes.

    Raises:
        ValueError: The folder holds a calibration on other questions or with other settings.
    """
    stages = {"selection": used, "certificate": fresh}
    plan: dict[str, Any] = {
        name: [question.question_id for question in part] for name, part in stages.items()
    }
    plan |= {"settings": list(settings), "compiled": compiled}
    file = folder / QUESTIONS_FILE
    if file.exists() and (folder / TREES_FILE).exists():
        if json.loads(file.read_text(encoding="utf-8")) != plan:
            raise ValueError(
                f"{folder} holds a calibration on other questions (or with another --count), with"
                f" other settings to choose from or another --compile: {OTHER_QUESTIONS}"
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(file, json.dumps(plan) + "\n")


def read_tests(folder: Path, bounds: LossBounds) -> dict[str, Any]:
    """Return what a calibration that is resumed has fixed: ``exact``, its tree, and ``tests``.

    Speeds are measured again then, and would choose other settings, whose certificates would add to
    those of the former.

    Args:
        folder: The output folder.
        bounds: The largest loss to accept.

    Returns:
        The contents of :data:`TESTS_FILE`; an empty dictionary if there is none.

    Raises:
        ValueError: The folder holds a calibration with other bounds.
    """
    file = folder / TESTS_FILE
    if not file.exists():
        return {}
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if found["bounds"] != bounds.model_dump():
        raise ValueError(f"{folder} holds a calibration with other bounds: {OTHER_QUESTIONS}")
    return found


def remove_questions(questions: Sequence[Question], used: Sequence[Question]) -> list[Question]:
    """Return the questions that are not in another set; questions are compared by their messages.

    Args:
        questions: The questions.
        used: The questions to remove.
    """
    known = {(question.context, question.turns) for question in used}
    return [item for item in questions if (item.context, item.turns) not in known]


def check_questions(
    max_drop: float, confidence: float, questions: Sequence[Question], execute_code: bool
) -> str | None:
    """Check, before any question is answered, whether the questions can support the bound.

    Args:
        max_drop: The largest loss to accept, in percentage points.
        confidence: Confidence that the loss is within it.
        questions: The questions that will certify a setting.
        execute_code: Whether the code in answers is run.

    Returns:
        A warning if not even a lossless setting could be certified, else None.

    Raises:
        ValueError: Questions have no score.
    """
    kinds = {question.scored_by for question in questions}
    if "" in kinds:
        raise ValueError("these questions have no score, so that a loss cannot be bounded")
    if "code" in kinds and not execute_code:
        raise ValueError("answers with code are scored by running them; use --execute-code")
    least = loss_bound(0, 0, len(questions), confidence)
    if 100 * least <= max_drop:
        return None
    advice = "use"
    if max_drop:
        needed = [
            least_questions(max_drop / 100, confidence_per_test(confidence, tests))
            for tests in range(1, MAX_TESTS + 1)
        ]
        advice = (
            f"{needed[0]} can, {needed[1]} if two settings are tested; use a larger --count, or"
        )
    return (
        f"{len(questions)} fresh questions cannot show a loss below {points_text(least)} points"
        f" even if nothing is lost; {advice} a --max-drop above {max_drop:g}"
    )


def check_accuracy(exact: Row, max_drop: float) -> None:
    """Check whether exact decoding is accurate enough to lose accuracy.

    Args:
        exact: The row of exact decoding.
        max_drop: The largest loss to accept, in percentage points.

    Raises:
        ValueError: Nothing was answered, or the accuracy is too low.
    """
    if not exact["tokens"]:
        raise ValueError("no question was answered, so there is nothing to calibrate on")
    points = 100 * (exact["accuracy"] or 0.0)
    if points < max(MIN_ACCURACY, MIN_ACCURACY_TO_LOSS * max_drop):
        raise ValueError(
            f"the accuracy of exact decoding is only {points:.1f}%, too low for a bound of"
            f" {max_drop:g} points ({exact['cut_off']} answers were cut off); check"
            " --max-new-tokens and the chat template"
        )


def choose_tests(rows: Sequence[Row], bounds: LossBounds, fresh: int) -> list[Row]:
    """Choose the settings to test: the series that has the largest expected speed.

    A series is tested from its fastest setting to its slowest, until one is certified; exact
    decoding remains if none is. The outcomes of its tests are taken to be independent.

    Args:
        rows: Rows of the report on which settings are selected, with measured speeds.
        bounds: The largest loss to accept.
        fresh: Number of fresh questions that will certify a setting.

    Returns:
        The rows of the chosen settings, fastest first; none if no setting is faster than exact
        decoding and may be certified.
    """
    faster = sorted(filter(is_faster, rows), key=lambda row: -row["speed_over_exact"])
    best, chosen = 1.0, []
    for count in range(1, MAX_TESTS + 1):
        for series in combinations(faster, count):
            speed = 1.0
            for row in reversed(series):
                probability = chance(row, bounds, fresh, count)
                speed = probability * row["speed_over_exact"] + (1 - probability) * speed
            if speed > best:
                best, chosen = speed, list(series)
    return chosen


def chance(row: Row, bounds: LossBounds, fresh: int, tests: int = 1) -> float:
    """Estimate the probability that a setting will be certified, given its answers so far.

    The shares of lost and gained answers are drawn from their posterior distribution under
    Jeffreys' prior, and the answers to the fresh questions with these shares.

    Args:
        row: The row of the setting.
        bounds: The largest loss to accept.
        fresh: Number of fresh questions that will certify the setting.
        tests: Number of settings to test.
    """
    level = confidence_per_test(bounds.confidence, tests)
    return _chance(*_outcomes(row), fresh, bounds.max_drop / 100, level)


@lru_cache(maxsize=4096)
def _chance(
    lost: int, gained: int, paired: int, fresh: int, max_loss: float, confidence: float
) -> float:
    random = np.random.default_rng(0)
    counts = np.array([lost, gained, paired - lost - gained])
    drawn = random.multinomial(fresh, random.dirichlet(counts + 0.5, DRAWS))[:, :2]
    # A bound is not below its estimate.
    possible = drawn[drawn[:, 0] - drawn[:, 1] <= max_loss * fresh]
    found, repeats = np.unique(possible, axis=0, return_counts=True)
    passed = [is_loss_below(max_loss, int(b), int(c), fresh, confidence) for b, c in found]
    return float(repeats @ np.array(passed, dtype=float)) / DRAWS


def _outcomes(row: Row) -> tuple[int, int, int]:
    """Return the numbers of lost, gained and paired questions."""
    against = row["against_exact"]
    if "lost" not in against:
        raise ValueError("these questions have no score, so that a loss cannot be bounded")
    return against["lost"], against["gained"], against["paired"]


def certify(row: Row, bounds: LossBounds, tests: int) -> Verdict:
    """Test a setting on questions that had no part in its selection.

    Args:
        row: Row of the report on these questions.
        bounds: The largest loss to accept.
        tests: Number of settings to test, among which the error probability is divided. It must
            not depend on the answers that are tested.

    Raises:
        ValueError: There is no score to bound.
    """
    level = confidence_per_test(bounds.confidence, tests)
    lost, gained, paired = _outcomes(row)
    passed = is_loss_below(bounds.max_drop / 100, lost, gained, paired, level)
    return Verdict(row, 100 * max(0.0, loss_bound(lost, gained, paired, level)), passed)


def conclude(verdicts: Sequence[Verdict], bounds: LossBounds, tests: int, settings: int) -> str:
    """Return sentences on the outcome that state the bound.

    Args:
        verdicts: The verdicts on the tested settings, in their order.
        bounds: The largest loss to accept.
        tests: Number of settings to test, including those after the first certified one.
        settings: Number of settings to choose from.
    """
    allowed = f"{bounds.max_drop:g} points"
    if not verdicts:
        return (
            f"Exact decoding: none of {settings} settings is faster and likely to be certified to"
            f" lose at most {allowed} on this many questions."
        )
    last = verdicts[-1]
    failed = [item for item in verdicts if not item.certified]
    paired = last.row["against_exact"]["paired"]
    confidence = f"with {100 * bounds.confidence:g}% confidence"
    sentences = []
    if last.certified:
        sentences.append(
            f"{last.row['method']}, {last.row['speed_over_exact']:.2f} times exact decoding: on"
            f" {paired} questions that had no part in its selection, it {_changes(last)}, so that"
            f" {confidence} it loses at most {points_text(last.drop / 100)} points of accuracy"
            " relative to exact decoding."
        )
        sentences += [
            f"{item.row['method']} was tested before and is not certified: it {_changes(item)},"
            f" which shows at most {points_text(item.drop / 100)} points, not {allowed}."
            for item in failed
        ]
    else:
        found = "; ".join(
            f"{item.row['method']} {_changes(item)}, so that it loses at most"
            f" {points_text(item.drop / 100)} points"
            for item in failed
        )
        sentences.append(
            f"Exact decoding: nothing is certified to lose at most {allowed} of accuracy relative"
            f" to exact decoding. On {paired} questions that had no part in the selection,"
            f" {confidence}: {found}."
        )
    if tests > 1:
        level = confidence_per_test(bounds.confidence, tests)
        sentences.append(
            f"Each of up to {tests} tests has a confidence of {100 * level:.4g}%, so that the"
            " stated one holds whichever setting is reported."
        )
    return " ".join(sentences)


def _changes(verdict: Verdict) -> str:
    against = verdict.row["against_exact"]
    return f"lost {against['lost']} answers and gained {against['gained']}"


def chosen_settings(
    model: EagleFSD,
    method: Method,
    exact: Method,
    verdicts: Sequence[Verdict],
    bounds: LossBounds,
    report: Report,
) -> dict[str, Any]:
    """Return the contents of ``fsd.json``: the settings, and how they were chosen (``about``).

    If speeds were measured for several prompts at once, the lossless tree is stored for that
    number. The pair's trees for other numbers are kept.

    Args:
        model: The pair.
        method: The chosen method.
        exact: Exact decoding with its tree.
        verdicts: The verdicts on the tested settings; the last one is about the chosen method if
            that is certified.
        bounds: The largest loss to accept.
        report: The report.
    """
    pair, lossless = method.pair_for(model), exact.pair_for(model)
    row, reference = (
        next(item for item in report["rows"] if item["method"] == name)
        for name in (method.name, EXACT.name)
    )
    about, dtype = report["about"], model.target.dtype
    copied = (
        *("questions", "skip", "count", "seed", "temperature", "batch", "answer_batch"),
        *("compiled", "max_new_tokens", "template"),
    )
    trees = {1: model.exact_tree, **model.batch_trees, about["batch"]: lossless.tree}
    return {
        **pair.acceptance.model_dump(),
        **pair.tree.model_dump(),
        "exact": trees.pop(1).model_dump(),
        "batch": {str(rows): trees[rows].model_dump() for rows in sorted(trees)},
        "target": identify(about["target"], model.model, dtype).model_dump(),
        "drafter": identify(about["drafter"], model.drafter, dtype).model_dump(),
        "about": {
            "made_by": "eagle-fsd calibrate",
            "max_drop_points": bounds.max_drop,
            "confidence": bounds.confidence,
            "tested": [
                {
                    "method": item.row["method"],
                    **dict(zip(("lost", "gained", "paired"), _outcomes(item.row), strict=True)),
                    "drop_is_below_points": item.drop,
                    "certified": item.certified,
                }
                for item in verdicts
            ],
            "accuracy": row["accuracy"],
            "accuracy_exact": reference["accuracy"],
            **{
                name: row[name]
                for name in (
                    *("tokens_per_second", "speed_over_exact", "speed_over_exact_interval"),
                    *("speedup", "speedup_interval", "tau"),
                )
            },
            "tau_exact": reference["tau"],
            **{name: about[name] for name in copied},
            "device": report["device"],
            "environment": report["environment"],
            "sessions": len(report["sessions"]),
        },
    }


def selection_table(rows: Sequence[Row], tests: Sequence[Method]) -> Table:
    """Return a table of the settings on the questions for the selection.

    Args:
        rows: Rows of the report. Those whose speed was not measured were dropped before.
        tests: The methods to test, in their order.
    """
    headers = ["selection", "n", "tau", "accuracy", "lost/gained", "tokens/s", "x exact"]
    order = {method.name: number for number, method in enumerate(tests, 1)}
    cells = []
    for row in rows:
        against, number = row.get("against_exact", {}), order.get(row["method"])
        cells.append(
            [
                row["method"] + (f" (test {number})" if number else ""),
                str(row["scored"]),
                f"{row['tau']:.2f}",
                f"{row['accuracy']:.1%}" if row["accuracy"] is not None else "",
                f"{against['lost']}/{against['gained']}" if "lost" in against else "",
                f"{row['tokens_per_second']:.1f}" if row["tokens_per_second"] else "",
                f"{row['speed_over_exact']:.2f}" if row["speed_over_exact"] else "",
            ]
        )
    return headers, cells
