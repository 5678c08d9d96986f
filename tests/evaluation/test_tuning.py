"""Tuning draft trees: predicted costs and lengths, races, and the files that are written."""

from __future__ import annotations

import copy
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from eagle_fsd import EagleFSD, OptionsError, TreeConfig
from eagle_fsd.bundled import BUNDLED_DRAFT_MODEL, BUNDLED_EAGLE3, BUNDLED_HEAD
from eagle_fsd.evaluation.config import EvaluationConfig, EvaluationRequest
from eagle_fsd.evaluation.methods import EXACT, PLAIN, Method, fsd_method
from eagle_fsd.evaluation.questions.formats import bundled_questions
from eagle_fsd.evaluation.tuning import costs as costs_module
from eagle_fsd.evaluation.tuning import search
from eagle_fsd.evaluation.tuning import tune as tune_module
from eagle_fsd.evaluation.tuning.candidates import (
    PLAIN_TREE,
    Candidate,
    candidate_trees,
    rank,
    recorded_trees,
    shortlist,
)
from eagle_fsd.evaluation.tuning.costs import (
    NODES,
    WIDTHS,
    StepCosts,
    measure_costs,
    measured_trees,
    step_seconds,
)
from eagle_fsd.evaluation.tuning.lengths import LengthRecorder, Lengths, capacity, max_emitted
from eagle_fsd.evaluation.tuning.race import Runner, race, round_sizes
from eagle_fsd.evaluation.tuning.search import TreePlan, TreeRace, open_workload
from eagle_fsd.evaluation.tuning.tune import (
    BatchTree,
    Tuning,
    _product_speedup,
    race_again,
    tries_bfloat16,
    tune,
    tuned_settings,
)
from eagle_fsd.evaluation.tuning.workload import Workload
from eagle_fsd.model import cache, stats
from eagle_fsd.model.config import Settings, read_settings
from eagle_fsd.model.drafters import ngram
from eagle_fsd.model.drafters.loading import WITHOUT_FILES
from eagle_fsd.model.engine import Engine
from eagle_fsd.model.execution import Execution
from eagle_fsd.model.tree import DraftTree
from eagle_fsd.utils.files import read_jsonl
from eagle_fsd.utils.progress import no_progress


def tree(nodes: int, depth: int, top_k: int) -> TreeConfig:
    return TreeConfig(total_tokens=nodes, depth=depth, top_k=top_k)


def workload(model: EagleFSD, count: int = 4, **options: Any) -> Workload:
    config = EvaluationConfig(**{"max_new_tokens": 48, **options})
    return open_workload(model, bundled_questions(count, 3), EvaluationRequest(), config)


# -- costs -----------------------------------------------------------------------------------------


def linear_seconds(shape: TreeConfig) -> float:
    """A machine whose steps cost 1 ms, 0.1 ms per node, and 0.2 ms and 0.05 ms K per level."""
    nodes = 0.0001 * (capacity(shape) - 1)
    return 0.001 + nodes + shape.depth * (0.0002 + 0.00005 * shape.top_k)


def linear_costs() -> StepCosts:
    return StepCosts.fit(0.001, {shape: linear_seconds(shape) for shape in measured_trees()})


def test_costs_predict_the_steps_of_other_trees() -> None:
    costs = linear_costs()
    assert costs.nodes[1] == 0.001
    assert costs.level[4] == pytest.approx(0.0004)
    for shape in (*candidate_trees(), tree(100, 20, 8)):
        assert costs.seconds(shape) == pytest.approx(linear_seconds(shape))


def test_noise_does_not_make_parts_of_a_step_cheaper_than_nothing() -> None:
    """Steps with deep trees are measured as too fast, or as too slow."""
    seconds = {shape: linear_seconds(shape) / shape.depth**2 for shape in measured_trees()}
    costs = StepCosts.fit(0.001, seconds)
    assert min(costs.level.values()) == 0.0
    assert min(costs.nodes.values()) == 0.001
    seconds = {shape: linear_seconds(shape) * shape.depth**2 for shape in measured_trees()}
    costs = StepCosts.fit(0.001, seconds)
    assert set(costs.draft.values()) == {0.0}
    assert all(costs.seconds(shape) >= 0.001 for shape in candidate_trees())


def test_interrupted_measurements_of_costs_do_not_count(
    model: EagleFSD, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but one of the repetitions of every tree are disturbed by other processes."""
    machine = linear_costs()

    def seconds(_: Workload, method: Method, repetition: int) -> float:
        shape = method.tree
        own = linear_seconds(shape) if shape is not None else 0.001
        quiet = repetition == (shape.depth if shape is not None else 0) % costs_module.ROUNDS
        return own if quiet else 3 * own

    monkeypatch.setattr(costs_module, "step_seconds", seconds)
    assert measure_costs(workload(model), lambda *_: None) == machine


def test_steps_are_measured_without_the_prefill(model: EagleFSD) -> None:
    """Also those of a batch, whose rows share a step."""
    single, pairs = workload(model), workload(model, batch=2)
    for prompts in (single, pairs):
        seconds = step_seconds(prompts, replace(EXACT, tree=tree(8, 2, 2)), 0)
        assert 0.0 < seconds < 10.0


def test_steps_are_measured_after_their_shapes_have_been_captured(
    model: EagleFSD, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA, steps take long the first two times that their shapes occur in an engine."""
    clock, seen, launch = {"now": 0.0}, Counter[Any](), Execution.launch

    def slow_at_first(execution: Execution, state: Any, tree: Any, *slots: Any) -> Any:
        shapes = id(execution), len(state.roots), len(slots[1]), tree
        seen[shapes] += 1
        launched = launch(execution, state, tree, *slots)
        clock["now"] += 0.01 if seen[shapes] > 2 else 1.0
        return launched

    monkeypatch.setattr(Execution, "launch", slow_at_first)
    monkeypatch.setattr(cache, "VIEW_STEP", 16)
    monkeypatch.setattr(stats, "time", SimpleNamespace(perf_counter=lambda: clock["now"]))
    prompts, method = workload(model), replace(EXACT, tree=tree(48, 46, 1))
    assert step_seconds(prompts, method, 0) > 0.1
    monkeypatch.setitem(costs_module.WARM_UPS, "cpu", 2)
    for prompt in range(3):
        assert step_seconds(prompts, method, prompt) == pytest.approx(0.01)


@pytest.fixture
def counting_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose steps cost 10 ms, and 1 ms for every node below the root."""
    clock, launch, draft = {"now": 0.0}, Execution.launch, ngram._CountingState.draft

    def launch_10_ms(*inputs: Any) -> Any:
        launched = launch(*inputs)
        clock["now"] += 0.01
        return launched

    def draft_1_ms(state: Any, *arguments: Any) -> DraftTree:
        found = draft(state, *arguments)
        clock["now"] += 0.001 * (found.size - 1)
        return found

    monkeypatch.setattr(Execution, "launch", launch_10_ms)
    monkeypatch.setattr(ngram._CountingState, "draft", draft_1_ms)
    monkeypatch.setattr(stats, "time", SimpleNamespace(perf_counter=lambda: clock["now"]))


@pytest.mark.slow
@pytest.mark.usefixtures("counting_clock")
@pytest.mark.parametrize("name", sorted(WITHOUT_FILES))
def test_costs_for_ngrams_are_those_of_full_trees(name: str) -> None:
    """The prompts let these drafters propose little."""
    prompts = workload(EagleFSD.from_pretrained(drafter=name), batch=2)
    costs = measure_costs(prompts, lambda *_: None, 1)
    assert costs.nodes == pytest.approx({n: 0.01 + 0.001 * (n - 1) for n in costs.nodes})
    assert set(costs.nodes) == {1, *NODES}
    assert [*costs.level.values(), *costs.draft.values()] == pytest.approx([0.0] * 2 * len(WIDTHS))


@pytest.mark.parametrize("folder", [BUNDLED_HEAD, BUNDLED_EAGLE3, BUNDLED_DRAFT_MODEL])
def test_networks_draft_their_own_trees_when_steps_are_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, starts = workload(EagleFSD.from_pretrained(drafter=folder)), Counter[type]()
    engine = Engine.__init__

    def record(self: Engine, target: Any, drafter: Any, *arguments: Any, **options: Any) -> None:
        starts[type(drafter)] += 1
        engine(self, target, drafter, *arguments, **options)

    monkeypatch.setattr(Engine, "__init__", record)
    assert step_seconds(prompts, replace(EXACT, tree=tree(8, 2, 2)), 0) > 0.0
    assert starts == {type(prompts.model.drafter): 1}


@pytest.mark.slow
def test_measured_costs_increase_with_the_tree(model: EagleFSD) -> None:
    done: list[tuple[int, int]] = []
    costs = measure_costs(workload(model), lambda *at: done.append(at))
    assert done[-1][0] == done[-1][1] == len(done)
    assert costs.nodes[64] > costs.nodes[1]
    assert costs.seconds(tree(62, 60, 1)) > costs.seconds(tree(10, 8, 1)) > costs.nodes[1]


# -- lengths ---------------------------------------------------------------------------------------


def test_tau_of_a_chain_divides_long_runs() -> None:
    """Of runs of 12, 5 and 3 tokens, steps of at most 5 tokens need 3, 1 and 1."""
    lengths = Lengths({tree(64, 62, 1): [[12, 5], [3]]})
    assert lengths.tau(tree(64, 62, 1)) == pytest.approx(20 / 3)
    assert lengths.tau(tree(5, 3, 1)) == pytest.approx(20 / 5)
    assert lengths.tau(tree(20, 3, 1)) == pytest.approx(20 / 5)


def test_tau_of_a_bushy_tree_is_cut_at_its_depth_and_interpolated() -> None:
    lengths = Lengths({tree(8, 6, 2): [[2, 4]], tree(32, 20, 2): [[4, 12]]})
    assert lengths.tau(tree(8, 6, 2)) == 3.0
    assert lengths.tau(tree(32, 20, 2)) == 8.0
    assert lengths.tau(tree(16, 14, 2)) == pytest.approx((3.0 + 8.0) / 2)
    assert lengths.tau(tree(32, 6, 2)) == (4 + 8) / 2


@pytest.mark.parametrize("shape", [(64, 30, 2), (4, 2, 2), (32, 21, 2), (16, 4, 4), (16, 14, 1)])
def test_trees_that_no_recording_covers_have_no_tau(shape: tuple[int, int, int]) -> None:
    lengths = Lengths({tree(8, 6, 2): [[2]], tree(32, 20, 2): [[4]], tree(8, 6, 1): [[4]]})
    assert lengths.tau(tree(*shape)) is None


def test_recordings_are_kept(model: EagleFSD, tmp_path: Path) -> None:
    """They belong to the prompts and the options that they were made with."""
    path, method = tmp_path / "lengths.jsonl", replace(EXACT, tree=tree(8, 2, 2))
    prompts = workload(model)
    found = LengthRecorder(prompts, path).record(method)
    assert [sum(answer) for answer in found] == [48] * 4
    for other, lines in (
        (prompts, 1),
        (workload(model, max_new_tokens=8), 2),
        (prompts.subset(1), 3),
    ):
        recorder = LengthRecorder(other, path)
        recorder.record(method)
        assert len(read_jsonl(path)) == lines
    with path.open("a") as file:
        file.write('{"key": "ab')  # an interrupted run
    assert LengthRecorder(prompts, path).record(method) == found


@pytest.mark.slow
@pytest.mark.parametrize("method", [EXACT, fsd_method(0.1, 0.3)], ids=["exact", "fsd"])
def test_predicted_lengths_agree_with_measured_ones(
    method: Method, model: EagleFSD, tmp_path: Path
) -> None:
    """With 12 answers, the standard error of tau is about 4%."""
    prompts = workload(model, 12, max_new_tokens=128)
    recorder = LengthRecorder(prompts, tmp_path / "lengths.jsonl")
    trees = recorded_trees(quick=True)
    lengths = Lengths({item: recorder.record(replace(method, tree=item)) for item in trees})
    for shape in (tree(12, 10, 1), tree(20, 18, 1), tree(16, 8, 2), tree(24, 6, 2)):
        measured = recorder.record(replace(method, tree=shape))
        tau = sum(map(sum, measured)) / sum(map(len, measured))
        assert lengths.tau(shape) == pytest.approx(tau, rel=0.15)


# -- candidates ------------------------------------------------------------------------------------


def test_candidates_are_different_complete_trees() -> None:
    trees = candidate_trees()
    assert len(set(trees)) == len(trees) > 100
    assert all(capacity(item) == item.total_tokens for item in trees)
    assert all(max_emitted(item) == item.depth + 2 for item in trees)
    assert max(item.depth for item in trees) == 62


@pytest.mark.parametrize(("length", "expected"), [(3, 8), (40, 48)])
def test_ranking_weighs_lengths_against_costs(length: int, expected: int) -> None:
    """Short runs need no long chain."""
    lengths = Lengths({tree(64, 62, 1): [[length] * 10]})
    ranked = rank(linear_costs(), lengths)
    speeds = [item.tokens_per_second for item in ranked]
    assert speeds == sorted(speeds, reverse=True)
    assert ranked[0].tree.total_tokens <= expected
    assert ranked[0].tau == length or length == 40
    assert ranked[0].tokens_per_second == pytest.approx(
        ranked[0].tau / linear_seconds(ranked[0].tree)
    )


def test_shortlist_holds_every_width_and_the_current_tree() -> None:
    lengths = Lengths(
        {
            tree(64, 62, 1): [[60] * 10],
            tree(6, 4, 2): [[2]],
            tree(64, 30, 2): [[3]],
            tree(12, 10, 4): [[2]],
            tree(64, 16, 4): [[3]],
        }
    )
    current = tree(17, 5, 3)
    trees = shortlist(rank(linear_costs(), lengths), current)
    assert {item.top_k for item in trees} == {1, 2, 3, 4}
    assert trees[-1] == current
    assert len(set(trees)) == len(trees) <= 12


# -- races -----------------------------------------------------------------------------------------


class TimedRunner(Runner):
    """A candidate that takes a given time per token, the same on every prompt but for noise."""

    def __init__(self, name: str, seconds: float, groups: int = 32) -> None:
        self.seconds, self.random = seconds, np.random.default_rng(len(name))
        shape = None if name == "plain" else tree(8, 6, 1)
        prompts: Any = SimpleNamespace(groups=groups, pair=lambda: None)
        super().__init__(Method(name, tree=shape), prompts)

    def warm_up(self) -> None:
        self.timings.clear()

    def answer(self, group: int) -> None:
        assert group == len(self.timings)
        self.timings.append((self.seconds * self.random.uniform(0.95, 1.05), 1))
        self.steps += 1


def test_race_finds_the_fastest_and_keeps_references() -> None:
    runners = [TimedRunner(f"{at}", 1.0 + 0.1 * ((5 * at) % 9)) for at in range(9)]
    plain = TimedRunner("plain", 5.0)
    done: list[tuple[int, int]] = []
    finalists = race([*runners, plain], lambda *at: done.append(at), keep=[plain])
    assert [item.method.name for item in finalists][::2] == ["0", "plain"]
    assert len(finalists) == 3
    assert all(len(item.timings) == 32 for item in finalists)
    # 10 candidates on 4 prompts, 6 on the next 4, 4 on the next 8, and 3 on the other 16.
    assert done[-1] == (len(done), len(done)) == (40 + 24 + 32 + 48,) * 2
    ratio = finalists[0].over(plain)
    assert ratio.interval is not None
    assert ratio.interval[0] < 5.0 < ratio.interval[1]


@pytest.mark.parametrize(
    ("candidates", "total", "sizes"),
    [(9, 32, [4, 8, 16, 32]), (2, 32, [32]), (9, 3, [3]), (5, 6, [4, 6]), (0, 4, [4])],
)
def test_rounds_double_until_two_candidates_remain(
    candidates: int, total: int, sizes: list[int]
) -> None:
    assert round_sizes(candidates, total) == sizes


def finished_race(plain: float, best: float, next_best: float) -> TreeRace:
    runners = [TimedRunner("exact", best), TimedRunner("exact", next_best)]
    references = {"plain": TimedRunner("plain", plain)}
    found = TreeRace(EXACT, references=references)
    kept = list(references.values())
    found.finalists = race([*runners, *kept], lambda *_: None, keep=kept)
    return found


def test_plain_decoding_is_chosen_where_speculation_loses() -> None:
    lost = finished_race(1.0, 1.5, 2.0)
    assert lost.tree == PLAIN_TREE
    assert lost.sentence().startswith("exact: plain decoding; the best tree, 8/6/1, is 0.6")
    assert lost.as_dict()["tree"]["total_tokens"] == 1
    won = finished_race(2.0, 1.0, 1.5)
    assert won.tree == tree(8, 6, 1)
    assert won.sentence().startswith("exact: tree 8/6/1, 2.0")
    rows = won.as_dict()["finalists"]
    assert [row["name"] for row in rows] == ["exact", "exact", "plain"]
    assert set(rows[0]["over"]) == {"plain", "next"}
    assert json.dumps(won.as_dict())


def test_the_best_trees_of_exact_decoding_are_raced_once_more() -> None:
    """In turn with those of FSD: the first race was disturbed, and a slower tree won it."""
    exact, fsd = finished_race(2.0, 1.0, 1.1), finished_race(2.0, 0.5, 0.6)
    disturbed, best = exact.trees
    disturbed.seconds, best.seconds = 1.1, 1.0
    assert {"exact", "plain"} == {item.method.name for item in exact.finalists}
    turns: list[tuple[int, int]] = []
    race_again(exact, fsd, lambda *at: turns.append(at))
    assert turns[-1] == (5 * 32, 5 * 32)
    assert exact.trees == [best, disturbed]
    assert [fsd.references["exact"], fsd.references["plain"]] == [best, exact.finalists[-1]]
    assert fsd.finalists[2:] == [best, exact.finalists[-1]]
    assert "2.0" in fsd.sentence().partition(" as fast as exact")[0]


def test_a_tree_of_one_node_is_plain_decoding(model: EagleFSD) -> None:
    prompts = workload(model, 1, max_new_tokens=12)
    pair = prompts.pair()
    (alone,), _ = prompts.decode(pair, replace(EXACT, tree=PLAIN_TREE), 0, 1)
    (plain,), _ = prompts.decode(pair, PLAIN, 0, 1)
    assert alone.stats.accepted == [[1] * 12]
    assert alone.tokens == plain.tokens


@pytest.mark.slow
def test_a_plan_is_resumed(
    model: EagleFSD, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same methods; the trees of others are found anew."""
    prompts = workload(model, 2, max_new_tokens=8)
    monkeypatch.setattr(search, "measure_costs", lambda *_: linear_costs())
    monkeypatch.setattr(search, "recorded_trees", lambda quick=False: [tree(8, 6, 1)])
    arguments = tmp_path / "trees.json", no_progress
    plan = TreePlan.make(prompts, [fsd_method(0.1)], *arguments)
    assert set(plan.candidates) == {"exact", "T=0.1"}
    assert plan.exact in candidate_trees() or plan.exact in (PLAIN_TREE, model.exact_tree)
    with monkeypatch.context() as patch:
        patch.setattr(search, "measure_costs", None)
        assert TreePlan.make(prompts, [fsd_method(0.1)], *arguments) == plan
    other = TreePlan.make(prompts, [fsd_method(0.2)], *arguments)
    assert set(other.candidates) == {"exact", "T=0.2"}


def test_the_best_trees_are_chosen_by_measured_steps(
    model: EagleFSD, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled passes, which shorten steps with deep trees, change the choice of trees."""
    short, long = Candidate(tree(4, 2, 1), 3.0, 300.0), Candidate(tree(16, 14, 1), 9.0, 290.0)
    slow = Candidate(tree(8, 2, 2), 3.0, 100.0)
    prompts, rounds = workload(model, 2, max_new_tokens=8), Counter[TreeConfig]()

    def predicted(*arguments: Any) -> dict[str, list[Candidate]]:
        return {method.name: [short, long, slow, slow] for method in arguments[2]}

    def seconds(load: Workload, method: Method, round_: int) -> float:
        """Exact for a single round; the others are disturbed."""
        assert method.tree is not None
        rounds[method.tree] += 1
        deep = 0.04 if load.model.compile else 0.09
        own = {4: 0.02, 16: deep}.get(method.tree.total_tokens, 1.0)
        return own if round_ == 2 else 10 * own

    monkeypatch.setattr(search, "measure_costs", lambda *_: linear_costs())
    monkeypatch.setattr(search, "predict_trees", predicted)
    monkeypatch.setattr(search, "step_seconds", seconds)
    monkeypatch.setattr(TreeRace, "run", lambda *_: None)
    monkeypatch.setattr(TreeRace, "tree", short.tree)
    eager = TreePlan.make(prompts, [fsd_method(0.1)], tmp_path / "eager.json", no_progress)
    assert [item.tree for item in eager.candidates["T=0.1"]][:2] == [short.tree, long.tree]
    assert eager.candidates["T=0.1"][0].tokens_per_second == pytest.approx(150.0)
    assert eager.exact == short.tree
    monkeypatch.setattr(prompts.model, "compile", False)
    file = tmp_path / "compiled.json"
    plan = TreePlan.make(prompts, [fsd_method(0.1)], file, no_progress, compiled=True)
    assert [item.tree for item in plan.candidates["T=0.1"]][:2] == [long.tree, short.tree]
    assert plan.exact == long.tree
    assert rounds[long.tree] == 3 * search.TIMED_ROUNDS
    again = TreePlan.make(prompts, [fsd_method(0.1)], file, no_progress, compiled=True)
    assert again == plan  # from the file


def test_trees_of_exact_decoding_are_raced_again_after_all_trees_are_known(
    model: EagleFSD, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, rival, fast = tree(48, 8, 4), tree(24, 10, 2), tree(12, 10, 1)
    likely = {"exact": (rival, 200.0), "a": (fast, 300.0), "b": (fast, 250.0)}
    plan = {name: [Candidate(item, 3.0, speed)] for name, (item, speed) in likely.items()}
    raced: list[tuple[str, TreeConfig | None]] = []

    def race_exact(_: Workload, trees: Any, others: Sequence[Method], *__: Any) -> list[Any]:
        raced.extend([*(("exact", item) for item in trees), *((m.name, m.tree) for m in others)])
        return [SimpleNamespace(method=replace(EXACT, tree=rival)), None]

    monkeypatch.setattr(search, "measure_costs", lambda *_: linear_costs())
    monkeypatch.setattr(search, "predict_trees", lambda *_: plan)
    monkeypatch.setattr(search, "step_seconds", lambda *_: 0.01)
    monkeypatch.setattr(search, "race_exact", race_exact)
    monkeypatch.setattr(TreeRace, "run", lambda *_: None)
    monkeypatch.setattr(TreeRace, "tree", first)
    methods = Method("a"), Method("b")
    arguments = workload(model, 2), methods, tmp_path / "trees.json", no_progress
    found = [TreePlan.make(*arguments, race_again=True) for _ in range(2)]
    assert [item.exact for item in found] == [rival, rival]
    assert raced == [("exact", first), ("exact", rival), ("a", fast)]  # not when it is resumed


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def bundled_copy(tmp_path: Path) -> Path:
    """A copy of the bundled head."""
    shutil.copytree(BUNDLED_HEAD, tmp_path / "head")
    return tmp_path / "head"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure nothing, and predict from two recordings."""
    monkeypatch.setattr(tune_module, "measure_costs", lambda *_: linear_costs())
    monkeypatch.setattr(tune_module, "recorded_trees", lambda: [tree(12, 10, 1)])
    monkeypatch.setattr(tune_module, "tries_bfloat16", lambda _: False)


CONFIG = EvaluationConfig(max_new_tokens=16)


@pytest.mark.usefixtures("quick")
def test_tune_writes_trees_that_the_pair_loads(tmp_path: Path, bundled_copy: Path) -> None:
    request = EvaluationRequest(count=2, out=tmp_path / "out", drafter=str(bundled_copy))
    shown: list[Any] = []
    tuning = tune(request, CONFIG, install=True, on_result=shown.append)
    assert shown == [tuning]
    assert [item.method.name for item in tuning.methods] == ["exact", "fsd"]
    written = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert written["complete"]
    assert len(written["conclusions"]) == 4
    assert list(written["batch"]) == ["4", "16"]
    assert all(item["over_plain"] >= 1.0 for item in written["batch"].values())
    assert next(len(cells) for _, cells in tuning.tables()) == 11
    settings = read_settings(bundled_copy / "fsd.json")
    assert settings == read_settings(tmp_path / "out" / "fsd.json")
    pair = EagleFSD.from_pretrained(drafter=bundled_copy)
    exact, fsd = tuning.methods
    assert (pair.exact_tree, pair.tree) == (exact.tree, fsd.tree)
    assert pair.batch_trees == {rows: item.tree for rows, item in tuning.batch.items()}
    assert pair.acceptance == EagleFSD.from_pretrained().acceptance
    assert settings.about["made_by"] == "eagle-fsd tune"


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_bfloat16_is_reported_but_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_module, "tries_bfloat16", lambda _: True)
    settings = Settings(threshold=0.0)
    tuning = tune(EvaluationRequest(count=2, out=tmp_path), CONFIG, settings=settings)
    ((own,), (found,)) = tuning.methods, tuning.bfloat16
    assert own.trees[0].workload.model.target.dtype == torch.float32
    assert {item.workload.model.target.dtype for item in found.trees} == {torch.bfloat16}
    assert found.references["float32"].method.tree in (None, own.tree)
    *_, sentence, advice = tuning.conclusions()
    assert sentence.startswith("In bfloat16, exact: tree ")
    assert "as fast as float32" in sentence
    assert "--dtype bfloat16" in advice
    assert read_settings(tmp_path / "fsd.json").target.dtype == "float32"


@pytest.mark.parametrize(
    ("speedups", "dtype", "expected"),
    [
        ((1.0, 1.5), torch.float32, True),
        ((1.1, 1.1), torch.float32, False),
        ((2.0, 2.0), torch.bfloat16, False),
    ],
)
def test_bfloat16_is_tried_where_products_are_faster(
    speedups: tuple[float, float],
    dtype: torch.dtype,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair: Any = SimpleNamespace(
        target=SimpleNamespace(device=torch.device("cpu"), dtype=dtype),
        model=torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)),
    )
    found = dict(zip((1, 16), speedups, strict=True))
    assert _product_speedup(1, (8, 4)) > 0

    def speedup(rows: int, size: tuple[int, ...]) -> float:
        assert size == (8, 4)
        return found[rows]

    monkeypatch.setattr(tune_module, "_product_speedup", speedup)
    assert tries_bfloat16(pair) == expected


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_interrupted_tuning_keeps_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = EvaluationRequest(count=2, out=tmp_path)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    shown: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(TreeRace, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tune(request, CONFIG, on_result=shown.append)
    written = json.loads((tmp_path / "tune.json").read_text())
    assert not written["complete"]
    assert written["costs"]["nodes"]["1"] == 0.001
    assert written["methods"]["exact"]["predicted"]
    assert shown[0].conclusions() == []
    assert not (tmp_path / "fsd.json").exists()
    recorded = (tmp_path / "lengths.jsonl").read_bytes()
    assert tune(request, CONFIG).complete
    assert (tmp_path / "lengths.jsonl").read_bytes() == recorded


def test_compiled_passes_are_rejected_when_tuning() -> None:
    with pytest.raises(OptionsError, match="--compile is not supported by tune"):
        tune(EvaluationRequest(compile=True))


@pytest.mark.parametrize("rows", [1, 4])
def test_a_tree_for_several_prompts_is_stored_for_that_number(rows: int, model: EagleFSD) -> None:
    """Trees for other numbers are kept."""
    pair = copy.copy(model)
    old, new, fuzzy, other = (tree(nodes, nodes - 2, 1) for nodes in (8, 12, 24, 4))
    pair.tree = fuzzy
    pair.exact_tree, pair.batch_trees = old, {4: old, 8: other}
    config = EvaluationConfig(batch=rows).model_dump()
    about = {"about": config, "environment": {}, "dtype": "", "device": ""}
    races = [SimpleNamespace(tree=found, finalists=[]) for found in (new, fuzzy)]
    batch = {16: BatchTree(other, 1.0, 1.0)} if rows == 1 else {}
    found = tuned_settings(Tuning(about, races, batch=batch), pair, EvaluationRequest())
    settings = Settings(**{name: found[name] for name in ("exact", "batch")})
    trees = {1: settings.exact, **{int(number): item for number, item in settings.batch.items()}}
    expected = {1: old, 4: old, 8: other} | ({1: new, 16: other} if rows == 1 else {4: new})
    assert trees == expected


def test_install_requires_a_local_head() -> None:
    with pytest.raises(OptionsError, match="--install requires a drafter in a local folder"):
        tune(EvaluationRequest(drafter="nowhere"), install=True)
