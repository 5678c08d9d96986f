"""Sweep over a grid of acceptance settings: tables, conclusions, and figures.

Every method decodes with its own best tree: the trees of all methods are predicted from recorded
accepted lengths (see :mod:`eagle_fsd.evaluation.tuning`). A few questions screen the settings: one
that clearly loses too much is not measured, nor is one that is predicted to be slower than exact
decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eagle_fsd.evaluation.analysis import MAX_PROBED_QUESTIONS, conclusions, probe_divergences
from eagle_fsd.evaluation.config import EvaluationConfig, EvaluationRequest, GridConfig, SweepGrid
from eagle_fsd.evaluation.methods import (
    EXACT,
    PLAIN,
    Method,
    fsd_series,
    given_acceptance,
    rule_methods,
)
from eagle_fsd.evaluation.plots import draw_figures
from eagle_fsd.evaluation.processes import start_processes
from eagle_fsd.evaluation.questions.sets import balanced_subset, requested_questions
from eagle_fsd.evaluation.report import limit_losses
from eagle_fsd.evaluation.runner import (
    Evaluation,
    Hooks,
    Loaded,
    Report,
    check_request,
    ignore,
    load_share,
    on_first_process,
    run_evaluation,
)
from eagle_fsd.evaluation.statistics import loss_bound
from eagle_fsd.evaluation.tables import Row
from eagle_fsd.evaluation.tuning.search import TreePlan, plan_trees
from eagle_fsd.evaluation.tuning.workload import Workload
from eagle_fsd.model.config import Settings
from eagle_fsd.utils.progress import ProgressFactory, no_progress

#: Groups of prompts that the trees of exact decoding are raced on; questions that screen settings,
#: and how many of them are answered at once.
RACE_GROUPS, SCREENING_QUESTIONS, SCREENING_BATCH = 32, 48, 16
#: A setting is not measured if it loses more than this part of the questions, with a confidence.
MAX_LOSS, CONFIDENCE = 0.1, 0.9
#: A setting is not measured if its predicted speed, relative to exact decoding, is below this.
MIN_SPEED = 0.9
#: Trees of each method in the report.
BEST_TREES = 3
#: File with the trees of all methods, and folder with the answers that screen settings.
TREES_FILE, SCREENING_FOLDER = "trees.json", "screening"


def sweep(
    request: EvaluationRequest,
    config: EvaluationConfig | None = None,
    grid: GridConfig | None = None,
    *,
    rules: bool = True,
    settings: Settings | None = None,
    progress: ProgressFactory = no_progress,
    on_report: Callable[[Report], None] | None = None,
) -> Report | None:
    """Evaluate every setting of a grid, and draw quality against speed.

    Writes the figures ``tradeoff`` and ``methods`` beside the report, as PNG and SVG. The settings
    of the pair's ``fsd.json`` have a ring.

    Arguments, exceptions and report are as in :func:`~eagle_fsd.evaluation.runner.evaluate`; with
    ``rules``, the acceptance rules of the literature are evaluated, too. In the report,
    ``divergences`` summarizes the divergences at the nodes that exact decoding visits, ``trees``
    and ``omitted`` say what was predicted and not measured, and ``conclusions`` names the fastest
    settings.
    """
    config, grid = config or EvaluationConfig(), grid or SweepGrid()
    fuzzy = [method for group in fsd_series(grid).values() for method in group]
    methods = [*fuzzy, *(rule_methods() if rules else ())]
    folder = request.output_folder("sweep")
    folder.mkdir(parents=True, exist_ok=True)
    with start_processes().main_process_first():
        questions = requested_questions(request, config.seed)
        check_request(request, config, [EXACT.name], questions)
    model = load_share(request, settings)
    stored, model.acceptance = model.acceptance, given_acceptance(settings)
    raced = balanced_subset(questions, RACE_GROUPS * config.batch)
    workload = Workload.of(model, raced, request, config)
    plan = on_first_process(
        lambda: plan_trees(
            workload,
            methods,
            folder / TREES_FILE,
            progress,
            compiled=bool(request.compile),
            last_race=True,
        )
    )
    exact, *planned = plan.with_trees([EXACT, *methods])
    trees = tree_rows([EXACT, *methods], plan)
    omitted = slow_methods(plan)
    loaded = Loaded(model, questions)
    fast = [method for method in planned if method.name not in omitted]
    screened = screen(loaded, [exact, *fast], request, config, progress)
    omitted |= screened
    kept = {method.name: method for method in planned if method.name not in omitted}

    def extend(evaluation: Evaluation, report: Report) -> None:
        probed = balanced_subset(questions, MAX_PROBED_QUESTIONS)
        found = probe_divergences(Workload.of(model, probed, request, config), grid.divergences)
        report |= {"divergences": found.summary(), "trees": trees, "omitted": omitted}
        report |= limit_losses(report["rows"], len(screened))
        report["conclusions"] = conclusions(report["rows"], dropped=len(screened))
        if omitted:
            report["tables"] = [(["not measured", "because"], list(map(list, omitted.items())))]
        own = [name for name, item in kept.items() if item.pair_for(model).acceptance == stored]
        report["calibrated"] = own[0] if own else None
        draw_figures(report, folder)

    hooks = Hooks(progress, on_report=extend, on_finish=on_report or ignore)
    measured = [PLAIN, exact, *kept.values()]
    return run_evaluation(request, config, measured, folder, None, hooks, loaded)


def tree_rows(methods: Sequence[Method], plan: TreePlan) -> list[Row]:
    """Return predicted speeds of exact decoding and FSD by tree, as JSON values.

    There is a row for each of these methods and each tree that is among the :data:`BEST_TREES` of
    any of them.
    """
    methods = [
        method
        for method in methods
        if method.rule is None
        and "rule" not in method.acceptance
        and method.acceptance.get("selection", "longest") == "longest"
    ]
    best = {item.tree for method in methods for item in plan.candidates[method.name][:BEST_TREES]}
    return [
        {
            "method": method.name,
            **item.tree.model_dump(),
            "threshold": method.acceptance["threshold"],
            "tau": item.tau,
            "speed": item.tokens_per_second,
            "predicted": True,
        }
        for method in methods
        for item in plan.candidates[method.name]
        if item.tree in best
    ]


def slow_methods(plan: TreePlan) -> dict[str, str]:
    """Return, by name, why methods are not measured that are predicted to be slow at their best."""
    speeds = {name: trees[0].tokens_per_second for name, trees in plan.candidates.items()}
    ratios = {name: speed / speeds[EXACT.name] for name, speed in speeds.items()}
    return {
        name: f"predicted to be {ratio:.2f} times as fast as exact decoding"
        for name, ratio in ratios.items()
        if ratio < MIN_SPEED
    }


def screen(
    loaded: Loaded,
    methods: Sequence[Method],
    request: EvaluationRequest,
    config: EvaluationConfig,
    progress: ProgressFactory,
) -> dict[str, str]:
    """Return, by name, why methods are not measured that clearly lose too much on a few questions.

    Exact decoding is the first of the methods. None is dropped if the questions have no score.
    """
    few = Loaded(loaded.model, balanced_subset(loaded.questions, SCREENING_QUESTIONS))
    if not all(question.scored_by for question in few.questions):
        return {}
    unused = {"judge_base_url": None, "baseline": None, "assistant": None, "compile": False}
    found = run_evaluation(
        request.model_copy(update=unused),
        config.updated(batch=SCREENING_BATCH),
        methods,
        request.output_folder("sweep") / SCREENING_FOLDER,
        None,
        Hooks(progress),
        few,
    )

    def lossy() -> dict[str, str]:
        reasons = {}
        for row in found["rows"] if found is not None else []:
            against = row.get("against_exact", {})
            if "lost" in against:
                lost, gained, paired = (against[name] for name in ("lost", "gained", "paired"))
                # Bounds the gain: below -MAX_LOSS, the loss exceeds MAX_LOSS.
                if loss_bound(gained, lost, paired, CONFIDENCE) < -MAX_LOSS:
                    reasons[row["method"]] = f"lost {lost} and gained {gained} of {paired} answers"
        return reasons

    return on_first_process(lossy)
