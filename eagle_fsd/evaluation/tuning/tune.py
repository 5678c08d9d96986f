"""Tune the draft trees of a pair: one for lossless decoding, one for its acceptance settings."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from eagle_fsd.bundled import BUNDLED_HEAD
from eagle_fsd.evaluation.answer_store import folder_lock
from eagle_fsd.evaluation.config import EvaluationConfig, EvaluationRequest
from eagle_fsd.evaluation.methods import EXACT, FSD, PLAIN
from eagle_fsd.evaluation.questions.sets import requested_questions
from eagle_fsd.evaluation.runner import load_pair
from eagle_fsd.evaluation.tables import Table
from eagle_fsd.evaluation.tuning.candidates import PLAIN_TREE, recorded_trees, shortlist
from eagle_fsd.evaluation.tuning.costs import StepCosts, measure_costs
from eagle_fsd.evaluation.tuning.lengths import LengthRecorder
from eagle_fsd.evaluation.tuning.race import Runner, race
from eagle_fsd.evaluation.tuning.search import TreeRace, open_workload, predict_trees, shape
from eagle_fsd.evaluation.tuning.workload import Workload
from eagle_fsd.model.config import SETTINGS_FILE, Settings, TreeConfig
from eagle_fsd.model.identity import identify
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.utils.files import atomic_write
from eagle_fsd.utils.options import OptionsError
from eagle_fsd.utils.progress import Progress, ProgressFactory, no_progress
from eagle_fsd.utils.provenance import describe_environment

RESULT_FILE, LENGTHS_FILE = "tune.json", "lengths.jsonl"
#: Default number of prompts.
DEFAULT_COUNT = 32
#: Numbers of prompts, decoded at once, for which lossless trees are chosen; the number of times
#: that their costs are measured; and the predicted speed-up with which a tree replaces that of
#: fewer prompts.
BATCHES, BATCH_ROUNDS, MIN_BATCH_GAIN = (4, 16), 3, 1.02
#: Trees that are also measured in bfloat16.
BFLOAT16_TREES = 3
#: Speed-up of a matrix product in bfloat16 above which decoding in bfloat16 is measured, and the
#: number of products that are timed.
NATIVE_SPEEDUP, PRODUCTS = 1.2, 20


@dataclass(frozen=True)
class BatchTree:
    """The lossless tree for several prompts at once.

    Attributes:
        tree: The tree; plain decoding if speculation would lose.
        tokens_per_second: Predicted speed of all prompts together.
        over_plain: Predicted speed relative to plain decoding of as many prompts.
    """

    tree: TreeConfig
    tokens_per_second: float
    over_plain: float

    def sentence(self, rows: int) -> str:
        """Return the outcome.

        Args:
            rows: Number of prompts.
        """
        return (
            f"For {rows} prompts at once, lossless decoding with the tree {shape(self.tree)} is"
            f" predicted to be {self.over_plain:.2f} times as fast as plain decoding."
        )


@dataclass
class Tuning:
    """The result of :func:`tune`, as far as it has got.

    Attributes:
        about: What was tuned, and how.
        methods: The methods, exact decoding first.
        costs: The time of a step; None if it was not measured yet.
        batch: For numbers of prompts that are decoded at once, the predictions for lossless trees.
        bfloat16: The methods in bfloat16, if that was tried.
        settings: The contents of ``fsd.json``; None if the trees are not known yet.
        complete: Whether no measurement is missing.
    """

    about: dict[str, Any]
    methods: list[TreeRace]
    costs: StepCosts | None = None
    batch: dict[int, BatchTree] = field(default_factory=dict)
    bfloat16: list[TreeRace] = field(default_factory=list)
    settings: dict[str, Any] | None = None
    complete: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the result as JSON values; times are in seconds."""
        costs = self.costs
        return {
            "complete": self.complete,
            "conclusions": self.conclusions(),
            "costs": None
            if costs is None
            else {"nodes": costs.nodes, "draft": costs.draft, "level": costs.level},
            "methods": {item.method.name: item.as_dict() for item in self.methods},
            "batch": {
                str(rows): {**asdict(found), "tree": found.tree.model_dump()}
                for rows, found in self.batch.items()
            },
            "bfloat16": {item.method.name: item.as_dict() for item in self.bfloat16},
            "settings": self.settings,
            **self.about,
        }

    def conclusions(self) -> list[str]:
        """Return the outcome in sentences."""
        found = [item.sentence() for item in self.methods if item.finalists]
        found += [item.sentence(rows) for rows, item in self.batch.items()]
        found += [f"In bfloat16, {item.sentence()}" for item in self.bfloat16 if item.finalists]
        if self.bfloat16:
            found.append(
                "Answers in bfloat16 can differ from those in float32, and no bound on the loss"
                " covers that; --dtype bfloat16 selects it, also for calibrate."
            )
        return found

    def tables(self) -> list[Table]:
        """Return tables of the parts of a step and of the finalists."""
        if self.costs is None:
            return []
        costs = self.costs
        parts = [[f"step over {n} nodes", _ms(value)] for n, value in costs.nodes.items()]
        parts[0][0] = "step of plain decoding"
        parts += [[f"draft level of {k} nodes", _ms(value)] for k, value in costs.level.items()]
        found: list[Table] = [(["part of a step", "ms"], parts)]
        headers = ["method", "tree", "tokens/s", "predicted", "tau", "predicted", "x plain"]
        cells = []
        for dtype, races in (("", self.methods), (" bfloat16", self.bfloat16)):
            for item in races:
                for row in item.as_dict()["finalists"]:
                    tree = row["tree"] and TreeConfig(**row["tree"])
                    over = row["over"].get("plain")
                    cells.append(
                        [
                            row["name"] + (dtype if row["name"] == item.method.name else ""),
                            shape(tree) if tree else "",
                            f"{row['tokens_per_second']:.1f}",
                            _number(row["predicted_tokens_per_second"], ".1f"),
                            _number(row["tau"], ".2f"),
                            _number(row["predicted_tau"], ".2f"),
                            _number(over and over["value"], ".2f"),
                        ]
                    )
        return [*found, (headers, cells)] if cells else found


def tune(
    request: EvaluationRequest,
    config: EvaluationConfig | None = None,
    *,
    settings: Settings | None = None,
    install: bool = False,
    progress: ProgressFactory = no_progress,
    on_result: Callable[[Tuning], None] | None = None,
) -> Tuning:
    """Find the fastest tree for lossless decoding and for the pair's acceptance settings.

    Writes ``tune.json`` and ``fsd.json`` to the output folder. Accepted lengths are kept there, so
    that an interrupted run does not record them again.

    Args:
        request: The pair, the prompts and the output folder. Without a count,
            :data:`DEFAULT_COUNT` prompts are used.
        config: How answers are decoded; default: ``EvaluationConfig()``.
        settings: Tree and acceptance options that override the drafter's ``fsd.json``.
        install: Also write ``fsd.json`` beside the drafter, where every command reads it. A bound
            on the loss that was certified for another tree is removed.
        progress: Reports progress.
        on_result: Called with the result; with what is known on KeyboardInterrupt.

    Raises:
        OptionsError: ``install`` is set, but the head is not a local folder; or the request asks
            for compiled passes.
        LoadError, CheckpointError, QuestionSetError, ValueError: As in
            :func:`~eagle_fsd.evaluation.runner.evaluate`.
        KeyboardInterrupt: Once the results so far have been written.
    """
    head = Path(request.drafter) if request.drafter else BUNDLED_HEAD
    if install and not head.is_dir():
        raise OptionsError(f"--install requires a drafter in a local folder; got {head}")
    if request.compile:
        raise OptionsError(
            "--compile is not supported by tune: every tree that it tries would be compiled"
        )
    config, folder = config or EvaluationConfig(), request.output_folder("tune")
    request = request.updated(count=request.count or DEFAULT_COUNT)
    with progress("downloading") as advance:
        questions = requested_questions(request, config.seed, advance)
    model = load_pair(request, request.device, settings)
    workload = open_workload(model, questions, request, config)
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
    tuning = Tuning(about, list(map(TreeRace, methods)))
    with folder_lock(folder):
        try:
            _race_trees(tuning, workload, folder / LENGTHS_FILE, progress)
            _choose_batch_trees(tuning, workload, progress)
            tuning.settings = tuned_settings(tuning, model, request)
            if tries_bfloat16(model):
                _race_bfloat16(tuning, workload, request, settings, progress)
            tuning.complete = True
        finally:  # also after Ctrl-C
            atomic_write(folder / RESULT_FILE, json.dumps(tuning.as_dict(), indent=2) + "\n")
            if tuning.settings is not None:
                text = json.dumps(tuning.settings, indent=2) + "\n"
                for place in (folder, head) if install else (folder,):
                    atomic_write(place / SETTINGS_FILE, text)
            if on_result is not None:
                on_result(tuning)
    return tuning


def _race_trees(
    tuning: Tuning, workload: Workload, lengths_file: Path, progress: ProgressFactory
) -> None:
    """Measure costs and lengths, and race the trees of every method."""
    with progress("measuring steps") as advance:
        tuning.costs = measure_costs(workload, advance)
    methods = [item.method for item in tuning.methods]
    recorder = LengthRecorder(workload, lengths_file)
    predicted = predict_trees(recorder, tuning.costs, methods, recorded_trees(), progress)
    for item in tuning.methods:
        item.predicted = predicted[item.method.name]
        item.references = {"plain": Runner(PLAIN, workload)}
        trees = shortlist(item.predicted, item.method.pair_for(workload.model).tree)
        with progress(f"racing trees of {item.method.name}") as advance:
            item.run(workload, trees, advance)
    for other in tuning.methods[1:]:
        with progress("racing the best trees") as advance:
            race_again(tuning.methods[0], other, advance)


def race_again(exact: TreeRace, other: TreeRace, advance: Progress) -> None:
    """Race the best trees of exact decoding and of another method once more, in turn.

    If another program disturbed the race of exact decoding, a slower tree may have won it, and the
    other method would look faster relative to exact decoding than it is.

    Args:
        exact: The race of exact decoding, with its finalists. Their timings are measured again.
        other: That of the other method; exact decoding becomes one of its references.
        advance: Reports progress.
    """
    plain = exact.references["plain"]
    finalists = [(item, item.trees) for item in (exact, other)]
    runners = [plain, *(runner for _, trees in finalists for runner in trees)]
    ranked = race(runners, advance, keep=runners)
    for item, trees in finalists:
        item.references = {"plain": plain}
        item.finalists = [runner for runner in ranked if runner is plain or runner in trees]
    if exact.tree != PLAIN_TREE:
        best = other.references["exact"] = exact.trees[0]
        other.finalists = [item for item in ranked if item is best or item in other.finalists]


def _choose_batch_trees(tuning: Tuning, workload: Workload, progress: ProgressFactory) -> None:
    """Predict the best lossless trees for several prompts at once, by measured costs.

    Accepted lengths do not depend on the number of prompts.
    """
    if workload.config.batch != 1:
        return
    item = tuning.methods[0]
    tree = item.tree
    for rows in BATCHES:
        with progress(f"measuring steps of {rows} prompts") as advance:
            costs = measure_costs(workload.with_batch(rows), advance, BATCH_ROUNDS)
        speeds = {
            guess.tree: rows * guess.tau / costs.seconds(guess.tree) for guess in item.predicted
        }
        plain = speeds[PLAIN_TREE] = rows / costs.nodes[1]
        best = max(speeds, key=speeds.__getitem__)
        if tree not in speeds or speeds[best] > MIN_BATCH_GAIN * speeds[tree]:
            tree = best
        tuning.batch[rows] = BatchTree(tree, speeds[tree], speeds[tree] / plain)


def tries_bfloat16(model: EagleFSD) -> bool:
    """Return whether bfloat16 may be faster: float32 on a CPU, with fast products in bfloat16.

    The products that are measured are those of the target's largest matrix with one and with 16
    tokens.

    Args:
        model: The pair.
    """
    if model.target.device.type != "cpu" or model.target.dtype != torch.float32:
        return False
    matrices = [item for item in model.model.parameters() if item.ndim == 2]
    size = max((tuple(item.shape) for item in matrices), key=math.prod)
    return any(_product_speedup(rows, size) > NATIVE_SPEEDUP for rows in (1, 16))


def _product_speedup(rows: int, size: tuple[int, ...]) -> float:
    """Return how many times as fast a product with a matrix is in bfloat16 as in float32."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        tokens, weights = torch.ones(rows, size[1], dtype=dtype), torch.ones(size, dtype=dtype)
        times = []
        for _ in range(PRODUCTS):
            begin = time.perf_counter()
            torch.nn.functional.linear(tokens, weights)
            times.append(time.perf_counter() - begin)
        seconds[dtype] = min(times)
    return seconds[torch.float32] / seconds[torch.bfloat16]


def _race_bfloat16(
    tuning: Tuning,
    workload: Workload,
    request: EvaluationRequest,
    settings: Settings | None,
    progress: ProgressFactory,
) -> None:
    """Race the best trees in bfloat16 against the best ones in float32."""
    model = load_pair(request.updated(dtype="bfloat16"), request.device, settings)
    other = workload.with_model(model)
    with progress("measuring steps in bfloat16") as advance:
        costs = measure_costs(other, advance)
    for own in tuning.methods:
        best = PLAIN if own.tree == PLAIN_TREE else replace(own.method, tree=own.tree)
        item = TreeRace(own.method, references={"float32": Runner(best, workload)})
        item.predicted = [
            replace(guess, tokens_per_second=guess.tau / costs.seconds(guess.tree))
            for guess in own.predicted
        ]
        item.predicted.sort(key=lambda guess: -guess.tokens_per_second)
        trees = [own.tree, *(guess.tree for guess in item.predicted)]
        with progress(f"racing trees of {own.method.name} in bfloat16") as advance:
            item.run(other, list(dict.fromkeys(trees))[:BFLOAT16_TREES], advance)
        tuning.bfloat16.append(item)


def tuned_settings(tuning: Tuning, model: EagleFSD, request: EvaluationRequest) -> dict[str, Any]:
    """Return the contents of ``fsd.json``.

    A lossless tree that was found for several prompts at once is stored for that number. The pair's
    trees for other numbers are kept.

    Args:
        tuning: The result.
        model: The pair.
        request: The names of target and drafter.
    """
    dtype = model.target.dtype
    rows, exact = tuning.about["about"]["batch"], tuning.methods[0].tree
    found = {rows: exact, **{number: item.tree for number, item in tuning.batch.items()}}
    trees = {1: model.exact_tree, **model.batch_trees, **found}
    identities = {
        "target": identify(request.target or "bundled", model.model, dtype),
        "drafter": identify(request.drafter or "bundled", model.drafter, dtype),
    }
    return {
        **model.acceptance.model_dump(),
        **tuning.methods[-1].tree.model_dump(),
        "exact": trees.pop(1).model_dump(),
        "batch": {str(number): trees[number].model_dump() for number in sorted(trees)},
        **{name: identity.model_dump() for name, identity in identities.items()},
        "about": {
            "made_by": "eagle-fsd tune",
            "conclusions": tuning.conclusions(),
            **{name: tuning.about[name] for name in ("about", "environment", "dtype", "device")},
        },
    }


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
