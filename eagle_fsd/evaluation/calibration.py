"""Calibration: choose the fastest settings for a pair whose loss of accuracy is within a bound.

Every setting is compared with exact decoding on the same questions, both with the tree that suits
them best. The settings are all combinations of an acceptance setting with a tree: for each of the
first, the fastest chain and the fastest bushy tree by prediction (see
:mod:`eagle_fsd.evaluation.tuning`), because a bushy tree loses less accuracy at the same threshold.

Part of the questions, :data:`SELECTION_SHARE`, select a setting: the fastest one that is likely to
be certified. They are answered in :data:`ROUNDS`, beginning with the settings that are predicted to
be the fastest; a setting that clearly loses too much is dropped after a few questions, and so are
those that are slower than enough others. The speeds of the last ones are measured.

The other questions, which had no part in that choice, *certify* it: an exact upper confidence bound
on its loss (:func:`~eagle_fsd.evaluation.statistics.loss_bound`) must be within the allowed loss. A
single setting is tested, so that the error probability need not be divided, however many settings
there are to choose from. With the stated confidence, a certified setting loses no more than allowed
on questions like these.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from eagle_fsd.evaluation.methods import EXACT, PLAIN, PRICED, Method, fsd_series
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.questions.sets import requested_questions
from eagle_fsd.evaluation.runner import (
    Evaluation,
    Hooks,
    Loaded,
    Report,
    load_share,
    on_first_process,
    run_evaluation,
    start_processes,
)
from eagle_fsd.evaluation.statistics import is_loss_below, loss_bound
from eagle_fsd.evaluation.tables import Row, Table
from eagle_fsd.evaluation.tuning.race import Runner, race
from eagle_fsd.evaluation.tuning.search import TreePlan, open_workload, shape
from eagle_fsd.evaluation.tuning.workload import Workload
from eagle_fsd.model.config import SETTINGS_FILE, Settings
from eagle_fsd.model.identity import identify
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.utils.files import atomic_write
from eagle_fsd.utils.options import OptionsError
from eagle_fsd.utils.progress import ProgressFactory, no_progress

log = logging.getLogger(__name__)

#: Default number of bundled questions.
DEFAULT_COUNT = 2000
#: Part of the questions on which a setting is selected; the others certify it.
SELECTION_SHARE = 0.25
#: Questions of each round of the selection (None: all of them), and the settings that remain.
ROUNDS: tuple[tuple[int | None, int], ...] = ((24, 8), (96, 3), (None, 3))
#: Confidence that the loss exceeds the bound, above which a setting is dropped early.
HOPELESS = 0.9
#: Groups of prompts on which speeds are measured.
RACE_GROUPS = 32
#: Relative difference below which two speeds count as equal; repeated timings vary by as much.
SPEED_TOLERANCE = 0.02
#: Minimum accuracy of exact decoding, in percent and as a multiple of the allowed loss. Below it
#: there is little accuracy to lose, usually because answers are cut off or cannot be parsed.
MIN_ACCURACY, MIN_ACCURACY_TO_LOSS = 5.0, 2.0
#: File with the trees of all settings.
TREES_FILE = "trees.json"
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
        certified: Whether the loss is within the allowed one; None if an earlier failure ended the
            series.
    """

    row: Row
    drop: float
    certified: bool | None


@dataclass(frozen=True)
class Setting:
    """A setting to choose from.

    Attributes:
        method: The method, with its tree.
        speed: Predicted tokens per second.
    """

    method: Method
    speed: float

    @property
    def name(self) -> str:
        """Name of the method."""
        return self.method.name


@dataclass(frozen=True)
class Calibration:
    """The result of :func:`calibrate`.

    Attributes:
        report: The report of the last run, on all questions or, if no setting was selected, on
            those for the selection. Its speeds were measured separately, at the batch size of the
            options. ``calibration`` holds the chosen settings, ``selection`` the rows that the
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
        install: Also save ``fsd.json`` beside the head, where every command reads it.
        settings: Tree and acceptance options that override the head's ``fsd.json``.
        progress: Reports progress.

    Returns:
        The result on the first process, None on the others.

    Raises:
        OptionsError: ``install`` is set, but the head is not a local folder or an engine is named;
            or the engine does not apply its rule at this temperature.
        ValueError: The questions or answers cannot support the bound.
        LoadError, QuestionSetError, JudgeError: As in
            :func:`~eagle_fsd.evaluation.runner.evaluate`.
    """
    config = config or CalibrationConfig()
    candidates = candidate_methods(grid or CalibrationGrid(), engine, config.temperature)
    drafter = Path(request.drafter) if request.drafter else BUNDLED_HEAD
    if install and engine:
        raise OptionsError(f"--install writes fsd.json, which cannot hold {engine}'s settings")
    if install and not drafter.is_dir():
        raise OptionsError(f"--install requires a drafter in a local folder; got {drafter}")
    if request.questions == "bundled":
        request = request.updated(count=request.count or DEFAULT_COUNT)
    folder = request.output_folder("calibrate")
    state = start_processes()
    with state.main_process_first(), progress("downloading") as advance:
        questions = requested_questions(request, config.seed, advance)
    count = max(1, round(SELECTION_SHARE * len(questions)))
    used = requested_questions(request.updated(count=count), config.seed)
    fresh = remove_questions(questions, used)
    warning = check_questions(bounds.max_drop, bounds.confidence, fresh, request.execute_code)
    if warning and state.is_main_process:
        log.warning("%s", warning)

    model = load_share(request, settings)
    folder.mkdir(parents=True, exist_ok=True)
    workload = open_workload(model, used[: RACE_GROUPS * config.batch], request, config)
    trees = on_first_process(
        lambda: TreePlan.make(workload, candidates, folder / TREES_FILE, progress)
    )
    exact, plan = replace(EXACT, tree=trees.exact), plan_settings(trees, candidates, engine)
    answering = config.updated(batch=config.answer_batch)

    # Only the final answers are judged and compared with Hugging Face's.
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
        loaded = Loaded(model, questions)
        return run_evaluation(request, answering, [exact, *chosen], folder, None, hooks, loaded)

    rows: dict[str, Row] = {}
    start = 0
    for number, (end, kept) in enumerate(ROUNDS, 1):
        part = used[start:end]
        start = len(used) if end is None else end
        if not part or (rows and not plan):
            break
        methods = [item.method for item in plan]
        found = answer(rounds, part, methods, folder / f"round-{number}", Hooks(progress))
        add_rows(rows, found["rows"] if found is not None else [])

        def drop(plan: list[Setting] = plan, kept: int = kept) -> list[Setting]:
            check_accuracy(rows[EXACT.name], bounds.max_drop)
            return drop_settings(plan, rows, bounds, len(fresh), kept)

        plan = on_first_process(drop)

    def choose() -> Method | None:
        measured = race_settings(workload, exact, plan, progress)
        for name, row in rows.items():
            row |= measured.get(name, dict.fromkeys(SPEED_FIELDS))
        compared = [rows[name] for name in measured if name in rows]
        best = select(compared, bounds.max_drop, bounds.confidence, len(fresh))["method"]
        return next((item.method for item in plan if item.name == best), None)

    chosen = on_first_process(choose)
    result: list[Calibration] = []

    def finish(_: Evaluation, report: Report) -> None:
        for row in report["rows"]:
            own = rows.get(row["method"], {})
            row |= {name: own.get(name) for name in SPEED_FIELDS}
        verdict = None
        if chosen is not None:
            (verdict,) = certify(report["rows"], [[chosen]], bounds.max_drop, bounds.confidence)
        method = chosen if chosen is not None and verdict and verdict.certified else exact
        table = selection_table(list(rows.values()), chosen)
        report["selection"] = list(rows.values())
        report["tables"] = [table, *([verdict_table([verdict])] if verdict else [])]
        report["conclusions"] = [conclude(verdict, bounds, len(candidates))]
        report["calibration"] = chosen_settings(model, method, exact, verdict, bounds, report)
        tree = method.pair_for(model).tree
        report["flags"] = engines.settings(engine, method, tree) if engine else None
        result.append(Calibration(report, method.name, table))

    hooks = Hooks(progress, on_report=finish)
    if chosen is None:
        answer(request, used[: ROUNDS[0][0]], [], folder, hooks)
    else:
        answer(request, fresh, [chosen], folder, hooks)
    if not result:
        return None
    files = [] if engine else [folder / SETTINGS_FILE]
    if install:
        files.append(drafter / SETTINGS_FILE)
    for file in files:
        atomic_write(file, json.dumps(result[0].report["calibration"], indent=2) + "\n")
    return replace(result[0], files=files)


def candidate_methods(
    grid: GridConfig, engine: EngineName | None, temperature: float
) -> list[Method]:
    """Return the acceptance settings to choose from, without trees.

    Args:
        grid: FSD's settings. Priced paths without a gate are added.
        engine: Return the settings of this engine's rule instead.
        temperature: Temperature of the answers.

    Raises:
        OptionsError: The engine does not apply its rule at this temperature.
    """
    series = engines.series(engine, temperature) if engine else fsd_series(grid)
    methods = [method for group in series.values() for method in group]
    return methods if engine else [*methods, *PRICED]


def plan_settings(
    plan: TreePlan, methods: Sequence[Method], engine: EngineName | None
) -> list[Setting]:
    """Combine each method with the trees that may suit it.

    Args:
        plan: The trees of exact decoding and of the methods.
        methods: The methods.
        engine: The engine that will decode; TensorRT-LLM has only chains.

    Returns:
        The settings that are predicted to be faster than exact decoding, fastest first: each method
        with its fastest chain and with its fastest bushy tree.
    """
    settings = []
    exact = plan.candidates[EXACT.name][0].tokens_per_second
    for method in methods:
        found = plan.candidates[method.name]
        chains = [item for item in found if item.tree.top_k == 1]
        bushy = [item for item in found if item.tree.top_k > 1 and engine != "tensorrt-llm"]
        for item in (*chains[:1], *bushy[:1]):
            if item.tokens_per_second > exact:
                name = f"{method.name} tree {shape(item.tree, '-')}"
                own = replace(method, name=name, tree=item.tree)
                settings.append(Setting(own, item.tokens_per_second))
    return sorted(settings, key=lambda item: -item.speed)


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
    """Drop settings that clearly lose too much, and those that are slower than enough others.

    Settings that are likely to be certified come first. Nothing here certifies a setting.

    Args:
        plan: The settings, fastest first.
        rows: Rows of the report by method.
        bounds: The largest loss to accept.
        fresh: Number of fresh questions that will certify the setting.
        kept: Number of settings to keep.

    Returns:
        The remaining settings, fastest first.
    """
    active = []
    for item in plan:
        lost, gained, paired = _outcomes(rows[item.name])
        # Bounds the gain: below -max_drop, the loss exceeds max_drop.
        if loss_bound(gained, lost, paired, HOPELESS) >= -bounds.max_drop / 100:
            active.append(item)
    likely = [
        item
        for item in active
        if is_likely(rows[item.name], bounds.max_drop, bounds.confidence, fresh)
    ]
    names = [item.name for item in likely]
    others = [item for item in active if item.name not in names]
    remaining = {item.name for item in [*likely, *others][:kept]}
    return [item for item in plan if item.name in remaining]


def race_settings(
    workload: Workload, exact: Method, plan: Sequence[Setting], progress: ProgressFactory
) -> dict[str, Row]:
    """Measure the speeds of settings, and of exact and plain decoding.

    Args:
        workload: The prompts.
        exact: Exact decoding with its tree.
        plan: The settings; the race may drop some of them.
        progress: Reports progress.

    Returns:
        :data:`SPEED_FIELDS` by method, exact decoding first.
    """
    reference, plain = Runner(exact, workload), Runner(PLAIN, workload)
    runners = [Runner(item.method, workload) for item in plan]
    with progress("measuring speeds") as advance:
        finalists = race([*runners, reference, plain], advance, keep=[reference, plain])
    found = {}
    for runner in [reference, *(item for item in finalists if item is not reference)]:
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
    least = 100 * loss_bound(0, 0, len(questions), confidence)
    if least <= max_drop:
        return None
    return (
        f"{len(questions)} fresh questions cannot show a loss below {least:.2f} points even if"
        f" nothing is lost; use more questions, or a --max-drop above {max_drop:g}"
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


def select(rows: Sequence[Row], max_drop: float, confidence: float, fresh: int) -> Row:
    """Choose the fastest setting that is likely to be certified, or exact decoding.

    Among settings within :data:`SPEED_TOLERANCE` of the fastest, choose the one with the smallest
    estimate of the loss.

    Args:
        rows: Rows of the report on which settings are selected, with measured speeds.
        max_drop: The largest loss to accept, in percentage points.
        confidence: Confidence of the certificate.
        fresh: Number of fresh questions that will certify the setting.

    Returns:
        The row of the chosen method.
    """
    candidates = [(next(row for row in rows if row["method"] == EXACT.name), 0.0)]
    for row in rows:
        if row["method"] == EXACT.name or not is_faster(row):
            continue
        if is_likely(row, max_drop, confidence, fresh):
            candidates.append((row, loss_bound(*_outcomes(row), 0.5)))
    speed = max(row["speed_over_exact"] for row, _ in candidates)
    near = [
        item for item in candidates if item[0]["speed_over_exact"] >= (1 - SPEED_TOLERANCE) * speed
    ]
    return min(near, key=lambda item: item[1])[0]


def is_likely(row: Row, max_drop: float, confidence: float, fresh: int) -> bool:
    """Return whether a setting is likely to be certified.

    It is if it would be after losing as many of the fresh questions as its median-unbiased estimate
    says.

    Args:
        row: The row of the setting.
        max_drop: The largest loss to accept, in percentage points.
        confidence: Confidence of the certificate.
        fresh: Number of fresh questions that will certify the setting.
    """
    lost, gained, paired = _outcomes(row)
    estimate = loss_bound(lost, gained, paired, 0.5)
    gained = fresh * gained // paired
    lost = max(0, gained + math.ceil(estimate * fresh))
    return is_loss_below(max_drop / 100, lost, gained, max(fresh, lost + gained), confidence)


def _outcomes(row: Row) -> tuple[int, int, int]:
    """Return the numbers of lost, gained and paired questions."""
    against = row["against_exact"]
    if "lost" not in against:
        raise ValueError("these questions have no score, so that a loss cannot be bounded")
    return against["lost"], against["gained"], against["paired"]


def certify(
    rows: Sequence[Row],
    series: Sequence[Sequence[Method]],
    max_drop: float,
    confidence: float,
) -> list[Verdict]:
    """Test every series of methods in order.

    The first failure ends a series, so that its methods share one error probability (fixed-sequence
    testing; Angelopoulos et al., "Learn then Test", arXiv 2110.01052). The error probability is
    divided among the series (Bonferroni). The order must not depend on the answers that are tested.

    Args:
        rows: Rows of the report.
        series: Series of methods; the first failure ends a series.
        max_drop: The largest loss to accept, in percentage points.
        confidence: Confidence that the losses of all certified methods are within it.

    Returns:
        A verdict on every method.

    Raises:
        ValueError: Nothing was answered, or there is no score to bound.
    """
    by_name = {row["method"]: row for row in rows}
    level = 1 - (1 - confidence) / len(series)
    verdicts = []
    for methods in series:
        active = True
        for method in methods:
            row = by_name[method.name]
            lost, gained, paired = _outcomes(row)
            passed = is_loss_below(max_drop / 100, lost, gained, paired, level)
            drop = 100 * loss_bound(lost, gained, paired, level)
            verdicts.append(Verdict(row, drop, passed if active else None))
            active = active and passed
    return verdicts


def conclude(verdict: Verdict | None, bounds: LossBounds, settings: int) -> str:
    """Return a sentence on the outcome that states the bound.

    Args:
        verdict: The verdict on the selected setting; None if none was selected.
        bounds: The largest loss to accept.
        settings: Number of settings to choose from.
    """
    allowed = f"{bounds.max_drop:g} points"
    if verdict is None:
        return (
            f"Exact decoding: none of {settings} settings is faster and likely to be certified to"
            f" lose at most {allowed} on this many questions."
        )
    row, against = verdict.row, verdict.row["against_exact"]
    measured = (
        f"on {against['paired']} questions that had no part in its selection, it lost"
        f" {against['lost']} answers and gained {against['gained']}, so that with"
        f" {100 * bounds.confidence:g}% confidence it loses at most {verdict.drop:.2f} points of"
        " accuracy relative to exact decoding"
    )
    if not verdict.certified:
        return f"Exact decoding: {row['method']} is not certified; {measured}, not {allowed}."
    return f"{row['method']}, {row['speed_over_exact']:.2f} times exact decoding: {measured}."


def chosen_settings(
    model: EagleFSD,
    method: Method,
    exact: Method,
    verdict: Verdict | None,
    bounds: LossBounds,
    report: Report,
) -> dict[str, Any]:
    """Return the contents of ``fsd.json``: the settings, and how they were chosen (``about``).

    Args:
        model: The pair.
        method: The chosen method.
        exact: Exact decoding with its tree.
        verdict: The verdict on the selected setting; None if none was selected.
        bounds: The largest loss to accept.
        report: The report.
    """
    pair, lossless = method.pair_for(model), exact.pair_for(model)
    row, reference = (
        next(item for item in report["rows"] if item["method"] == name)
        for name in (method.name, EXACT.name)
    )
    about, dtype = report["about"], model.target.dtype
    copied = ("questions", "count", "seed", "temperature", "batch", "max_new_tokens", "template")
    return {
        **pair.acceptance.model_dump(),
        **pair.tree.model_dump(),
        "exact": lossless.tree.model_dump(),
        "target": identify(about["target"], model.model, dtype).model_dump(),
        "drafter": identify(about["drafter"], model.drafter, dtype).model_dump(),
        "about": {
            "made_by": "eagle-fsd calibrate",
            "max_drop_points": bounds.max_drop,
            "confidence": bounds.confidence,
            "tested": verdict.row["method"] if verdict is not None else None,
            "drop_is_below_points": verdict.drop if verdict is not None else None,
            "certified_on": _counts(verdict.row) if verdict is not None else None,
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


def _counts(row: Row) -> dict[str, int]:
    return dict(zip(("lost", "gained", "paired"), _outcomes(row), strict=True))


def selection_table(rows: Sequence[Row], chosen: Method | None) -> Table:
    """Return a table of the settings on the questions for the selection.

    Args:
        rows: Rows of the report. Those whose speed was not measured were dropped before.
        chosen: The selected method, if any.
    """
    headers = ["selection", "n", "tau", "accuracy", "lost/gained", "tokens/s", "x exact"]
    cells = []
    for row in rows:
        name, tau, accuracy, changes, speed, over = _cells(row)
        mark = " (selected)" if chosen is not None and row["method"] == chosen.name else ""
        cells.append([name + mark, str(row["scored"]), tau, accuracy, changes, speed, over])
    return headers, cells


def verdict_table(verdicts: Sequence[Verdict]) -> Table:
    """Return a table of the tested settings and their outcomes.

    Args:
        verdicts: The verdicts.
    """
    headers = ["certificate", "tau", "accuracy", "lost/gained", "tokens/s", "x exact"]
    headers += ["points lost <="]
    return headers, [[*_cells(item.row), f"{item.drop:.2f}"] for item in verdicts]


def _cells(row: Row) -> list[str]:
    """Return the cells that both tables share."""
    against = row.get("against_exact", {})
    return [
        row["method"],
        f"{row['tau']:.2f}",
        f"{row['accuracy']:.1%}" if row["accuracy"] is not None else "",
        f"{against['lost']}/{against['gained']}" if "lost" in against else "",
        f"{row['tokens_per_second']:.1f}" if row["tokens_per_second"] else "",
        f"{row['speed_over_exact']:.2f}" if row["speed_over_exact"] else "",
    ]
