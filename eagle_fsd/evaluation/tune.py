"""Tune the draft trees of a pair: one for lossless decoding, one for its acceptance settings."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from eagle_fsd.evaluation.answer_store import folder_lock
from eagle_fsd.evaluation.config import EvaluationConfig, EvaluationRequest
from eagle_fsd.evaluation.methods import EXACT, FSD, PLAIN
from eagle_fsd.evaluation.questions.sets import requested_questions
from eagle_fsd.evaluation.runner import load_share
from eagle_fsd.evaluation.search.prediction import PLAIN_TREE, LengthRecorder, measure_costs
from eagle_fsd.evaluation.search.search import TreeRace, TreeSearch, fastest_first, race_exact
from eagle_fsd.evaluation.search.workload import Workload
from eagle_fsd.evaluation.settings_file import settings_files, settings_values
from eagle_fsd.evaluation.tables import Table, number_text
from eagle_fsd.model.config import Settings, TreeConfig
from eagle_fsd.utils.files import atomic_write
from eagle_fsd.utils.options import OptionsError
from eagle_fsd.utils.progress import ProgressFactory, no_progress
from eagle_fsd.utils.provenance import describe_environment

RESULT_FILE, LENGTHS_FILE = "tune.json", "lengths.jsonl"
#: Default number of prompts.
DEFAULT_COUNT = 32
#: Numbers of prompts, decoded at once, for which lossless trees are chosen; the maximum number of
#: times that their costs are measured; and the predicted speed-up above which a tree replaces that
#: of fewer prompts.
BATCHES, BATCH_ROUNDS, MIN_BATCH_GAIN = (4, 16), 3, 1.02


@dataclass(frozen=True)
class BatchTree:
    """The lossless tree for several prompts at once, plain decoding if speculation would lose.

    The speed is the predicted one of all prompts together, absolute and relative to that of plain
    decoding of as many prompts.
    """

    tree: TreeConfig
    tokens_per_second: float
    over_plain: float


@dataclass
class Tuning:
    """The result of :func:`tune`, which is complete once it has settings.

    ``about`` says what was tuned, and how. ``search`` holds the trees of exact decoding, then those
    of the pair's acceptance settings, ``batch`` the lossless trees by the number of prompts that
    are decoded at once, and ``settings`` the contents of ``fsd.json``.
    """

    about: dict[str, Any]
    search: TreeSearch
    batch: dict[int, BatchTree] = field(default_factory=dict)
    settings: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the result, for ``json.dumps``; times are in seconds."""
        costs = self.search.costs
        return {
            "complete": self.settings is not None,
            "conclusions": self.conclusions(),
            "costs": None if costs is None else asdict(costs),
            "methods": {item.method.name: race_values(item) for item in self.search.races},
            "batch": {
                rows: {**asdict(found), "tree": found.tree.model_dump()}
                for rows, found in self.batch.items()
            },
            "settings": self.settings,
            **self.about,
        }

    def conclusions(self) -> list[str]:
        """Return the outcome in sentences."""
        found = [race_sentence(item) for item in self.search.races if item.trees]
        return found + [batch_sentence(rows, item) for rows, item in self.batch.items()]

    def tables(self) -> list[Table]:
        """Return tables of the parts of a step and of the finalists."""
        costs = self.search.costs
        if costs is None:
            return []
        parts = {"step of plain decoding": costs.nodes[1]}
        parts |= {f"step over {n} nodes": seconds for n, seconds in costs.nodes.items() if n > 1}
        parts |= {f"draft level of {k} nodes": seconds for k, seconds in costs.level.items()}
        cells = [[name, f"{1000 * seconds:.2f}"] for name, seconds in parts.items()]
        rows = [
            [
                row["name"],
                TreeConfig(**row["tree"]).shape if row["tree"] else "",
                number_text(row["tokens_per_second"], ".1f"),
                number_text(row["predicted_tokens_per_second"], ".1f"),
                number_text(row["tau"], ".2f"),
                number_text(row["predicted_tau"], ".2f"),
                number_text(row["over"].get("plain", {}).get("value"), ".2f"),
            ]
            for item in self.search.races
            for row in race_values(item)["finalists"]
        ]
        headers = ["method", "tree", "tokens/s", "predicted", "tau", "predicted", "x plain"]
        return [(["part of a step", "ms"], cells), *([(headers, rows)] if rows else [])]


def race_values(race: TreeRace) -> dict[str, Any]:
    """Return the results as JSON values."""
    predicted = [
        {**item.tree.model_dump(), "tau": item.tau, "tokens_per_second": item.tokens_per_second}
        for item in race.predicted
    ]
    if not race.trees:
        return {"tree": None, "finalists": [], "predicted": predicted}
    names = {runner: name for name, runner in race.references.items()}
    guesses = {item.tree: item for item in race.predicted}
    finalists = fastest_first([*race.trees, *names])
    rows = []
    for runner, following in zip(finalists, [*finalists[1:], None], strict=True):
        tree = runner.method.tree
        guess = guesses.get(runner.tree) if runner not in names else None
        others = {**race.references, **({"next": following} if following else {})}
        ratios = {name: runner.over(other) for name, other in others.items() if other != runner}
        rows.append(
            {
                "name": names.get(runner, race.method.name),
                "tree": tree.model_dump() if tree else None,
                "tau": runner.tau,
                "predicted_tau": guess.tau if guess else None,
                "tokens_per_second": runner.tokens_per_second,
                "predicted_tokens_per_second": guess.tokens_per_second if guess else None,
                "prompts": len(runner.timings),
                "over": {name: asdict(ratio) for name, ratio in ratios.items()},
            }
        )
    return {"tree": race.tree.model_dump(), "finalists": rows, "predicted": predicted}


def batch_sentence(rows: int, found: BatchTree) -> str:
    """Return the prediction for several prompts at once in a sentence."""
    if found.tree == PLAIN_TREE:
        return f"For {rows} prompts at once, plain decoding is predicted to be the fastest."
    return (
        f"For {rows} prompts at once, lossless decoding with the tree {found.tree.shape} is"
        f" predicted to be {found.over_plain:.2f} times as fast as plain decoding."
    )


def race_sentence(race: TreeRace) -> str:
    """Return the outcome in a sentence, with the intervals of all ratios."""
    best, *others = race.trees
    name, own = race.method.name, best.tree.shape
    if race.tree == PLAIN_TREE:
        ratio = best.over(race.references["plain"])
        return f"{name}: plain decoding; the best tree, {own}, is {ratio} as fast."
    compared = dict(race.references)
    if others:
        compared[f"the next best tree, {others[0].tree.shape}"] = others[0]
    parts = [f"{best.over(other)} as fast as {label}" for label, other in compared.items()]
    return f"{name}: tree {own}, {', '.join(parts)}."


def tune(
    request: EvaluationRequest,
    config: EvaluationConfig | None = None,
    *,
    settings: Settings | None = None,
    install: bool = False,
    progress: ProgressFactory = no_progress,
    on_result: Callable[[Tuning], None] | None = None,
) -> Tuning:
    """Find the fastest trees: one for lossless decoding, one for the pair's acceptance settings.

    Writes ``tune.json`` and ``fsd.json`` to the output folder and, with ``install``, also
    ``fsd.json`` beside the drafter, without its certificate: a bound holds for one tree only.
    Accepted lengths are kept, so that an interrupted run does not record them again. ``on_result``
    is called at the end. Before an exception such as KeyboardInterrupt propagates, ``tune.json`` is
    written with the results so far, which are passed to ``on_result``.
    """
    config, folder = config or EvaluationConfig(), request.output_folder("tune")
    files = settings_files(request, folder, install)
    if request.compile:
        raise OptionsError(
            "--compile is not supported by tune: every tree that it tries would be compiled"
        )
    request = request.updated(count=request.count or DEFAULT_COUNT)
    with progress("downloading") as advance:
        questions = requested_questions(request, config.seed, advance)
    model = load_share(request, settings)
    workload = Workload.of(model, questions, request, config)
    about = {
        "acceptance": model.acceptance.model_dump(),
        "about": {
            "questions": Path(request.questions).name,
            "count": len(questions),
            "target": request.target or "bundled",
            "drafter": request.drafter or "bundled",
            **config.model_dump(),
            "template": request.chat_template,
        },
        "environment": describe_environment(),
        "dtype": str(model.target.dtype),
        "device": str(model.target.device),
    }
    methods = [EXACT] if model.acceptance.lossless else [EXACT, FSD]
    with folder_lock(folder):
        recorder = LengthRecorder(workload, methods, folder / LENGTHS_FILE)
        search = TreeSearch(workload, recorder, progress, list(map(TreeRace, methods)))
        tuning = Tuning(about, search)
        try:
            search.run()
            if len(methods) > 1:
                race_finalists(search)
            if config.batch == 1:
                tuning.batch = batch_trees(search)
            tuning.settings = tuned_settings(tuning, request)
        finally:  # also after Ctrl-C
            atomic_write(folder / RESULT_FILE, json.dumps(tuning.as_dict(), indent=2) + "\n")
            if tuning.settings is not None:
                for file in files:
                    atomic_write(file, json.dumps(tuning.settings, indent=2) + "\n")
            if on_result is not None:
                on_result(tuning)
    return tuning


def race_finalists(search: TreeSearch) -> None:
    """Race the best trees of exact decoding and of the other method once more, in turn."""
    exact, other = search.races
    others = [PLAIN, *(runner.method for runner in other.trees)]
    with search.progress("racing the best trees") as advance:
        trees = [runner.tree for runner in exact.trees]
        exact.trees, (plain, *rest) = race_exact(search.workload, trees, others, advance)
    other.trees = fastest_first(rest)
    exact.references = other.references = {"plain": plain}
    if exact.tree != PLAIN_TREE:
        other.references = {"plain": plain, "exact": exact.trees[0]}


def batch_trees(search: TreeSearch) -> dict[int, BatchTree]:
    """Predict the best lossless trees for several prompts at once, by measured costs.

    Accepted lengths are taken to be independent of the number of prompts.
    """
    exact, found = search.races[0], {}
    tree = exact.tree
    for rows in BATCHES:
        config = search.workload.config.updated(batch=rows)
        with search.progress(f"measuring steps of {rows} prompts") as advance:
            costs = measure_costs(replace(search.workload, config=config), advance, BATCH_ROUNDS)
        speeds = {
            guess.tree: rows * guess.tau / costs.seconds(guess.tree) for guess in exact.predicted
        }
        plain = speeds[PLAIN_TREE] = rows / costs.nodes[1]
        best = max(speeds, key=speeds.__getitem__)
        if tree not in speeds or speeds[best] > MIN_BATCH_GAIN * speeds[tree]:
            tree = best
        found[rows] = BatchTree(tree, speeds[tree], speeds[tree] / plain)
    return found


def tuned_settings(tuning: Tuning, request: EvaluationRequest) -> dict[str, Any]:
    """Return the contents of ``fsd.json``; lossless trees are stored by the number of prompts."""
    model, races = tuning.search.workload.model, tuning.search.races
    pair = copy.copy(model)
    pair.tree = races[-1].tree
    batches = {rows: item.tree for rows, item in tuning.batch.items()}
    lossless = {tuning.about["about"]["batch"]: races[0].tree, **batches}
    about = {
        "made_by": "eagle-fsd tune",
        "conclusions": tuning.conclusions(),
        **{name: tuning.about[name] for name in ("about", "environment", "dtype", "device")},
    }
    return settings_values(model, pair, lossless, request, about=about)
