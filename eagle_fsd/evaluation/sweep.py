"""Sweep over a grid of acceptance settings: tables, conclusions, and figures.

Every method decodes with its own best tree: the trees of all methods are predicted from recorded
accepted lengths (see :mod:`eagle_fsd.evaluation.search`). A method whose predicted speed is below
:data:`MIN_SPEED` times that of exact decoding is not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from eagle_fsd.evaluation.config import EvaluationConfig, EvaluationRequest, GridConfig
from eagle_fsd.evaluation.methods import (
    EXACT,
    PLAIN,
    fsd_series,
    given_acceptance,
    rule_methods,
)
from eagle_fsd.evaluation.processes import on_first_process
from eagle_fsd.evaluation.questions.sets import balanced_subset
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
    TREES_FILE,
    TreePlan,
    measure_speeds,
    plan_trees,
)
from eagle_fsd.evaluation.search.workload import Workload
from eagle_fsd.evaluation.verdict import conclusions
from eagle_fsd.model.config import Settings
from eagle_fsd.model.probe import DivergenceProbe
from eagle_fsd.utils.options import OptionsError
from eagle_fsd.utils.progress import ProgressFactory, no_progress

#: Maximum number of groups of prompts on which the trees of exact decoding are raced, and on which
#: speeds are measured where answers are decoded in other batches.
RACE_GROUPS = 32
#: A setting is not measured if its predicted speed, relative to exact decoding, is below this.
MIN_SPEED = 0.9
#: Maximum number of questions whose divergences are recorded.
MAX_PROBED_QUESTIONS = 50


def sweep(
    request: EvaluationRequest,
    config: EvaluationConfig | None = None,
    grid: GridConfig | None = None,
    *,
    rules: bool = True,
    answer_batch: int | None = None,
    settings: Settings | None = None,
    progress: ProgressFactory = no_progress,
    on_report: Callable[[Report], None] | None = None,
) -> Report | None:
    """Evaluate every setting of a grid, and draw quality against speed.

    Writes the figures of :mod:`~eagle_fsd.evaluation.plots` beside the report. If the settings of
    the pair's ``fsd.json``, which those given here override, are measured, a ring marks them.

    Arguments, exceptions and report are as in :func:`~eagle_fsd.evaluation.runner.evaluate`; with
    ``rules``, the acceptance rules from the literature are evaluated, too. With ``answer_batch``,
    that many questions are answered at once, and speeds are measured afterwards: at the batch size
    of ``config``, on the first turns of :data:`RACE_GROUPS` batches of questions. In the report,
    ``divergences`` summarizes the divergences at the nodes that exact decoding visits, ``omitted``
    says what was not measured, and ``conclusions`` names the fastest settings.
    """
    config, grid = config or EvaluationConfig(), grid or GridConfig()
    answered = config if answer_batch is None else config.updated(batch=answer_batch)
    if answer_batch is not None and request.baseline is not None:
        raise OptionsError("--baseline is timed with all answers: omit --answer-batch")
    fuzzy = [method for group in fsd_series(grid).values() for method in group]
    methods = [*fuzzy, *(rule_methods() if rules else ())]
    folder = request.output_folder("sweep")
    questions = checked_questions(request, config, progress)
    model = load_share(request, settings)
    stored, model.acceptance = model.acceptance, given_acceptance(settings)
    raced = balanced_subset(questions, RACE_GROUPS * config.batch)
    workload = Workload.of(model, raced, request, config)
    compiled, file = bool(request.compile), folder / TREES_FILE
    with exclusive(folder):
        plan = on_first_process(
            lambda: plan_trees(workload, methods, file, progress, compiled=compiled, last_race=True)
        )
    exact, *planned = plan.with_trees([EXACT, *methods])
    omitted = slow_methods(plan)
    kept = {method.name: method for method in planned if method.name not in omitted}

    def extend(report: Report) -> None:
        probed = balanced_subset(questions, MAX_PROBED_QUESTIONS)
        prompts = Workload.of(exact.pair_for(model), probed, request, answered)
        report |= {"divergences": probe_divergences(prompts, grid.divergences), "omitted": omitted}
        if answer_batch is not None:
            _, speeds = measure_speeds(workload, [plan.exact], list(kept.values()), progress)
            for row in report["rows"]:
                row |= speeds[row["method"]]
            batches = {"batch": config.batch, "answer_batch": answer_batch}
            report["about"] = {**report["about"], **batches}
        report["conclusions"] = conclusions(report)
        if omitted:
            report["tables"] = [(["not measured", "because"], list(map(list, omitted.items())))]
        own = [
            name
            for name, item in kept.items()
            if item.rule is None and item.pair_for(model).acceptance == stored
        ]
        report["calibrated"] = own[0] if own else None

    hooks = Hooks(progress, on_report=extend, on_finish=on_report or ignore)
    measured = [PLAIN, exact, *kept.values()]
    return run_evaluation(
        model, questions, measured, request, config=answered, folder=folder, hooks=hooks
    )


def slow_methods(plan: TreePlan) -> dict[str, str]:
    """Return the methods that are predicted to be too slow to measure, with the reason for each."""
    exact = plan.speed(EXACT.name)
    ratios = {name: plan.speed(name) / exact for name in plan.candidates}
    return {
        name: f"predicted to be {ratio:.2f} times as fast as exact decoding"
        for name, ratio in ratios.items()
        if ratio < MIN_SPEED
    }


def probe_divergences(workload: Workload, names: Sequence[str]) -> dict[str, Any]:
    """Decode the prompts of a workload exactly, and summarize divergences at the visited nodes.

    Of the nodes with children, return how many have the target's choice among them (``drafted``),
    and quartiles of each divergence by whether they do.
    """
    probe = DivergenceProbe(names)
    seed, batch = workload.config.seed, workload.config.batch
    workload.generate(workload.model, workload.prompts, seed, max_batch=batch, rule=probe)
    empty, levels = torch.zeros(0), torch.tensor([0.25, 0.5, 0.75])
    drafted = torch.cat([empty.bool(), *(item.cpu() for item in probe.drafted)])
    found: dict[str, Any] = {
        "drafted": int(drafted.sum()),
        "not_drafted": int((~drafted).sum()),
        "questions": len(workload.prompts),
    }
    for name in names:
        values = torch.cat([empty, *(item.cpu() for item in probe.divergences[name])])
        sides = {"drafted": values[drafted], "not_drafted": values[~drafted]}
        found[name] = {
            side: part.quantile(levels).tolist() for side, part in sides.items() if len(part)
        }
    return found
