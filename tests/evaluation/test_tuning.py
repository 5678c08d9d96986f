"""Tuning draft trees: predicted costs and lengths, races, and the files that are written."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from eagle_fsd import EagleFSD, OptionsError, TreeConfig
from eagle_fsd.bundled import BUNDLED_HEAD
from eagle_fsd.evaluation import tune as tune_module
from eagle_fsd.evaluation.config import EvaluationConfig, EvaluationRequest
from eagle_fsd.evaluation.methods import (
    EXACT,
    PLAIN,
    PRICED,
    Method,
    fsd_method,
    rule_method,
)
from eagle_fsd.evaluation.questions.formats import bundled_questions
from eagle_fsd.evaluation.search import search
from eagle_fsd.evaluation.search.prediction import (
    PLAIN_TREE,
    Candidate,
    LengthRecorder,
    Lengths,
    ObservingRule,
    StepCosts,
    candidate_trees,
    capacity,
    measured_trees,
    rank,
    recorded_trees,
    shortlist,
)
from eagle_fsd.evaluation.search.search import (
    Runner,
    TreePlan,
    TreeRace,
    TreeSearch,
    measure_speeds,
    plan_rounds,
    plan_trees,
    race,
)
from eagle_fsd.evaluation.search.workload import Workload
from eagle_fsd.evaluation.sweep import slow_methods
from eagle_fsd.evaluation.tune import race_sentence, race_values, tune
from eagle_fsd.model.config import read_settings
from eagle_fsd.utils.files import read_jsonl
from eagle_fsd.utils.progress import no_progress


def tree(nodes: int, depth: int, top_k: int) -> TreeConfig:
    return TreeConfig(total_tokens=nodes, depth=depth, top_k=top_k)


def workload(model: EagleFSD, count: int = 4, **options: Any) -> Workload:
    config = EvaluationConfig(**{"max_new_tokens": 48, **options})
    return Workload.of(model, bundled_questions(count, 3), EvaluationRequest(), config)


# -- costs -----------------------------------------------------------------------------------------


def linear_seconds(shape: TreeConfig) -> float:
    """A machine whose steps cost 1 ms, 0.1 ms per node, and 0.2 ms and 0.05 ms K per level."""
    nodes = 0.0001 * (capacity(shape) - 1)
    return 0.001 + nodes + shape.depth * (0.0002 + 0.00005 * shape.top_k)


def linear_costs(noise: Callable[[TreeConfig], float] = lambda _: 1.0) -> StepCosts:
    seconds = {shape: linear_seconds(shape) * noise(shape) for shape in measured_trees()}
    return StepCosts.fit(0.001, seconds)


def test_costs_predict_the_steps_of_other_trees() -> None:
    costs = linear_costs()
    assert costs.nodes[1] == 0.001
    assert costs.level[4] == pytest.approx(0.0004)
    for shape in (*candidate_trees(), tree(100, 20, 8)):
        assert costs.seconds(shape) == pytest.approx(linear_seconds(shape))
    # Noise does not make parts of a step cheaper than nothing.
    fast = linear_costs(lambda shape: shape.depth**-2)
    assert (min(fast.level.values()), min(fast.nodes.values())) == (0.0, 0.001)
    slow = linear_costs(lambda shape: shape.depth**2)
    assert set(slow.draft.values()) == {0.0}
    assert all(slow.seconds(shape) >= 0.001 for shape in candidate_trees())


# -- lengths and candidates ------------------------------------------------------------------------


def test_tau_is_predicted_from_recordings_with_larger_trees() -> None:
    chain = Lengths({tree(64, 62, 1): [12, 5, 3]})
    # Of runs of 12, 5 and 3 tokens, steps of at most 5 tokens need 3, 1 and 1.
    for shape, tau in (((64, 62, 1), 20 / 3), ((5, 3, 1), 20 / 5), ((20, 3, 1), 20 / 5)):
        assert chain.tau(tree(*shape)) == pytest.approx(tau)
    bushy = Lengths({tree(8, 6, 2): [2, 4], tree(32, 20, 2): [4, 12], tree(8, 6, 1): [4]})
    for shape, tau in (
        ((8, 6, 2), 3.0),
        ((32, 20, 2), 8.0),
        ((16, 14, 2), (3.0 + 8.0) / 2),  # interpolated
        ((32, 6, 2), (4 + 8) / 2),  # cut at its depth
    ):
        assert bushy.tau(tree(*shape)) == pytest.approx(tau)
    for shape in ((64, 30, 2), (4, 2, 2), (32, 21, 2), (16, 4, 4), (16, 14, 1)):
        assert bushy.tau(tree(*shape)) is None  # no recording covers it


def test_all_methods_are_recorded_in_one_pass(model: EagleFSD, tmp_path: Path) -> None:
    """Exact decoding's lengths are its own; those of the others are theirs in the first step."""
    names = ("acc 0.2", "mixture 0.5", "regret 0.2", "deferred 0.1")
    methods = [EXACT, fsd_method(0.4), *map(rule_method, names), *PRICED]
    methods.append(
        replace(fsd_method(0.4), name="late", acceptance={"threshold": 0.4, "exact_first": 3})
    )
    shape = tree(12, 10, 1)
    for temperature in (0.0, 1.0):
        prompts = workload(model, temperature=temperature, max_new_tokens=16)
        path = tmp_path / f"{temperature}.jsonl"
        found = LengthRecorder(prompts, methods, path).record(shape)
        for method, lengths in zip(methods, found, strict=True):
            own = replace(method, tree=shape)
            answers, _ = prompts.decode(prompts.pair(), own, 0, 4)
            steps = [answer.stats.accepted[0] for answer in answers]
            assert lengths[:4] == [accepted[0] for accepted in steps], method.name
            if method is EXACT:  # the last step of an answer may emit more than its limit
                whole = Counter(itertools.chain(*(accepted[:-1] for accepted in steps)))
                assert (Counter(lengths) - whole).total() == len(steps)
    assert sum(found[1]) > sum(found[0]) > 0


def test_recordings_are_kept(model: EagleFSD, tmp_path: Path) -> None:
    """They belong to the prompts, the options and the methods that they were made with."""
    path, shape = tmp_path / "lengths.jsonl", tree(8, 2, 2)
    prompts = workload(model, max_new_tokens=8)
    found = LengthRecorder(prompts, [EXACT], path).record(shape)
    first = replace(prompts, prompts=prompts.prompts[:1])
    others = (prompts, [EXACT]), (workload(model, max_new_tokens=4), [EXACT]), (first, [EXACT])
    for lines, (other, methods) in enumerate((*others, (prompts, [EXACT, fsd_method(0.1)])), 1):
        LengthRecorder(other, methods, path).record(shape)
        assert len(read_jsonl(path)) == lines
    with path.open("a") as file:
        file.write('{"key": "ab')  # an interrupted run
    assert LengthRecorder(prompts, [EXACT], path).record(shape) == found


def test_larger_trees_are_not_recorded_where_they_are_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of a slow target cost about as much as their nodes; steps of a fast one do not."""
    chains = [item for item in recorded_trees() if item.top_k == 1]
    monkeypatch.setattr(search, "recorded_trees", lambda: chains)
    # Every step emits six tokens if its tree has room for them.
    recorder: Any = SimpleNamespace(methods=[EXACT], record=lambda _: [[6] * 10])
    prompts: Any = SimpleNamespace(config=SimpleNamespace(batch=1))
    for seconds, largest in ((0.1, 12), (0.0001, 64)):
        search_ = TreeSearch(prompts, recorder, no_progress, [])
        nodes = {count: 0.01 + seconds * count for count in (1, 4, 16, 64)}
        search_.costs = replace(linear_costs(), nodes=nodes)
        found = search_.predict()["exact"]
        assert max(item.tree.total_tokens for item in found) == largest


def test_ranking_weighs_lengths_against_costs() -> None:
    """Short runs need no long chain. The shortlist holds every width and the current tree."""
    for length, largest in ((3, 8), (40, 48)):
        ranked = rank(linear_costs(), Lengths({tree(64, 62, 1): [length] * 10}))
        speeds = [item.tokens_per_second for item in ranked]
        assert speeds == sorted(speeds, reverse=True)
        best = ranked[0]
        assert best.tree.total_tokens <= largest
        assert best.tokens_per_second == pytest.approx(best.tau / linear_seconds(best.tree))
    recorded = {(64, 62, 1): 60, (6, 4, 2): 2, (64, 30, 2): 3, (12, 10, 4): 2, (64, 16, 4): 3}
    lengths = Lengths({tree(*shape): [length] * 10 for shape, length in recorded.items()})
    trees = shortlist(rank(linear_costs(), lengths), tree(17, 5, 3))
    assert {item.top_k for item in trees} == {1, 2, 3, 4}
    assert trees[-1] == tree(17, 5, 3)
    assert len(set(trees)) == len(trees) <= 12


# -- races -----------------------------------------------------------------------------------------


class Prompts:
    """Prompts that every tree takes a given time per token for, but for noise."""

    groups, config = 32, SimpleNamespace(batch=1)

    def __init__(self, seconds: dict[TreeConfig | None, float]) -> None:
        self.seconds, self.random = seconds, np.random.default_rng(0)

    def pair(self) -> None:
        return None

    def decode(self, _: None, method: Method, *__: int) -> tuple[list[Any], float]:
        answer = SimpleNamespace(tokens=[0], stats=SimpleNamespace(steps=1))
        return [answer], self.seconds[method.tree] * self.random.uniform(0.95, 1.05)


def chain(nodes: int) -> TreeConfig:
    return tree(nodes, nodes - 2, 1)


def test_race_finds_the_fastest_and_keeps_references() -> None:
    prompts: Any = Prompts({chain(8 + at): 1.0 + 0.1 * ((5 * at) % 9) for at in range(9)})
    runners = [Runner(Method("a", tree=item), prompts) for item in prompts.seconds]
    prompts.seconds[None] = 5.0
    plain = Runner(PLAIN, prompts)
    done: list[tuple[int, int]] = []
    finalists = race([*runners, plain], lambda *at: done.append(at), keep=[plain])
    assert finalists[::2] == [runners[0], plain]
    assert len(finalists) == 3
    assert all(len(item.timings) == 32 for item in finalists)
    # 10 candidates on 4 prompts, 6 on the next 4, 4 on the next 8, and 3 on the other 16.
    assert done[-1] == (len(done), len(done)) == (40 + 24 + 32 + 48,) * 2
    ratio = finalists[0].over(plain)
    assert ratio.interval[0] < 5.0 < ratio.interval[1]
    for candidates, total, rounds in (
        (9, 32, [(4, 9), (8, 5), (16, 3), (32, 2)]),
        (2, 32, [(32, 2)]),
        (9, 3, [(3, 9)]),
        (5, 6, [(4, 5), (6, 3)]),
        (0, 4, [(4, 0)]),
    ):
        assert plan_rounds(candidates, total) == rounds


def raced(method: Method, prompts: Any, *trees: TreeConfig) -> TreeRace:
    found = TreeRace(method, references={"plain": Runner(PLAIN, prompts)})
    found.run(prompts, trees, lambda *_: None)
    return found


def test_plain_decoding_is_chosen_where_speculation_loses() -> None:
    trees = chain(8), chain(12)
    lost = raced(EXACT, Prompts({None: 1.0, trees[0]: 1.5, trees[1]: 2.0}), *trees)
    assert lost.tree == PLAIN_TREE
    assert race_sentence(lost).startswith("exact: plain decoding; the best tree, 8/6/1, is 0.6")
    assert race_values(lost)["tree"]["total_tokens"] == 1
    won = raced(EXACT, Prompts({None: 2.0, trees[0]: 1.0, trees[1]: 1.5}), *trees)
    assert won.tree == trees[0]
    assert race_sentence(won).startswith("exact: tree 8/6/1, 2.0")
    rows = race_values(won)["finalists"]
    assert [row["name"] for row in rows] == ["exact", "exact", "plain"]
    assert set(rows[0]["over"]) == {"plain", "next"}
    assert json.dumps(race_values(won))


# -- plans -----------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure nothing, and predict from one recording."""
    for module in (search, tune_module):
        monkeypatch.setattr(module, "measure_costs", lambda *_: linear_costs())
    monkeypatch.setattr(search, "recorded_trees", lambda: [tree(12, 10, 1)])


def test_the_best_trees_are_chosen_by_measured_steps(
    model: EagleFSD, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled passes, which shorten steps with deep trees, change the choice of trees."""
    short, long, slow = chain(4), chain(16), tree(8, 2, 2)
    guesses = [Candidate(short, 3.0, 300.0), Candidate(long, 9.0, 290.0)]
    guesses += [Candidate(slow, 3.0, 100.0)] * 2
    prompts, rounds = workload(model, 2, max_new_tokens=8), Counter[TreeConfig]()

    def seconds(load: Workload, method: Method, round_: int) -> float:
        """Exact for a single round; the others are disturbed."""
        rounds[method.tree] += 1
        deep = 0.04 if load.model.compile else 0.09
        own = {4: 0.02, 16: deep}.get(method.tree.total_tokens, 1.0)
        return own if round_ == 2 else 10 * own

    monkeypatch.setattr(search, "step_seconds", seconds)
    plan = TreePlan(exact=short, candidates={"exact": guesses, "T=0.1": guesses})
    eager = plan.timed(prompts, no_progress).candidates["T=0.1"]
    assert [item.tree for item in eager][:2] == [short, long]
    assert eager[0].tokens_per_second == pytest.approx(150.0)
    monkeypatch.setattr(prompts.model, "compile", True)
    compiled = plan.timed(prompts, no_progress).candidates["T=0.1"]
    assert [item.tree for item in compiled][:2] == [long, short]
    assert rounds[long] == 2 * search.TIMED_ROUNDS


@dataclass(frozen=True, eq=False)
class Simulated(Workload):
    """Prompts that are answered with one step of four tokens, which takes a given time."""

    seconds: Callable[[TreeConfig | None], float]

    def decode(self, _: Any, method: Method, __: int, count: int) -> tuple[list[Any], float]:
        if isinstance(method.rule, ObservingRule):
            method.rule.lengths = [[4] * count for _ in method.rule.lengths]
        answers = [SimpleNamespace(tokens=[0] * 4, stats=SimpleNamespace(steps=1))] * count
        return answers, count * self.seconds(method.tree)


@pytest.mark.usefixtures("quick")
def test_exact_decoding_has_the_tree_that_won_the_last_race(
    model: EagleFSD, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It did not win the first race, which was disturbed.

    A plan is resumed without decoding, also after another one has been made in the same folder.
    """
    decoded = Counter[TreeConfig | None]()

    def seconds(shape: TreeConfig | None) -> float:
        decoded[shape] += 1
        is_disturbed = shape == chain(4) and decoded[shape] <= 3
        return 9.0 if shape is None or is_disturbed else linear_seconds(shape)

    monkeypatch.setattr(search, "step_seconds", lambda _, method, __: linear_seconds(method.tree))
    monkeypatch.setattr(model, "compile", False)
    prompts = Simulated(**vars(workload(model, 2)), seconds=seconds)
    file, methods = tmp_path / "trees.json", [fsd_method(0.1)]
    plan = plan_trees(prompts, methods, file, no_progress, last_race=True)
    assert decoded[chain(4)] > 3
    assert set(plan.candidates) == {"exact", "T=0.1"}
    assert (plan.exact, plan.candidates["T=0.1"][0].tree) == (chain(4), chain(4))
    other = plan_trees(prompts, [fsd_method(0.2)], file, no_progress, compiled=True)
    assert set(other.candidates) == {"exact", "T=0.2"}
    assert model.compile is True
    total = sum(decoded.values())
    assert plan_trees(prompts, methods, file, no_progress, last_race=True) == plan
    assert sum(decoded.values()) == total
    assert not list(tmp_path.glob("*.jsonl"))  # FastChat would read them as answers


@pytest.mark.usefixtures("quick")
def test_plain_decoding_may_be_the_fastest_exact_decoding(
    model: EagleFSD, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other methods are compared with it. Speeds, also predicted ones, are of both prompts."""

    def seconds(shape: TreeConfig | None) -> float:
        return 0.0001 if shape in (None, PLAIN_TREE) else linear_seconds(shape)

    monkeypatch.setattr(search, "step_seconds", lambda _, method, __: seconds(method.tree))
    prompts = Simulated(**vars(workload(model, 4, batch=2)), seconds=seconds)
    plan = plan_trees(prompts, [fsd_method(0.1)], tmp_path / "trees.json", no_progress)
    assert plan.exact == PLAIN_TREE
    assert plan.speed("exact") == pytest.approx(2 / 0.0001)
    best, *_, last = plan.candidates["T=0.1"]
    for item in (best, last):  # timed, and predicted only
        expected = 2 * item.tau / linear_seconds(item.tree)
        assert item.tokens_per_second == pytest.approx(expected)
    assert set(slow_methods(plan)) == {"T=0.1"}
    exact, measured = measure_speeds(prompts, [chain(4)], [], no_progress)
    assert exact.tree == chain(4)
    assert measured["exact"]["latency"] is None  # answers were timed together


# -- the command -----------------------------------------------------------------------------------

CONFIG = EvaluationConfig(max_new_tokens=8)


@pytest.mark.usefixtures("quick")
def test_tune_writes_trees_that_the_pair_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted, it keeps what it measured, and resumes."""
    head, out = tmp_path / "head", tmp_path / "out"
    shutil.copytree(BUNDLED_HEAD, head)
    request = EvaluationRequest(count=1, out=out, drafter=str(head))
    shown: list[Any] = []

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TreeRace, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tune(request, CONFIG, on_result=shown.append)
    written = json.loads((out / "tune.json").read_text())
    assert not written["complete"]
    assert written["costs"]["nodes"]["1"] == 0.001
    assert written["methods"]["exact"]["predicted"]
    assert shown.pop().conclusions() == []
    assert not (out / "fsd.json").exists()
    recorded = (out / "lengths.jsonl").read_bytes()

    tuning = tune(request, CONFIG, install=True, on_result=shown.append)
    assert (out / "lengths.jsonl").read_bytes() == recorded
    assert shown == [tuning]
    assert [item.method.name for item in tuning.search.races] == ["exact", "fsd"]
    written = json.loads((out / "tune.json").read_text())
    assert written["complete"]
    assert len(written["conclusions"]) == 4
    assert list(written["batch"]) == ["4", "16"]
    assert all(item["over_plain"] >= 1.0 for item in written["batch"].values())
    assert next(len(cells) for _, cells in tuning.tables()) == 11
    settings = read_settings(head / "fsd.json")
    assert settings == read_settings(out / "fsd.json")
    pair = EagleFSD.from_pretrained(drafter=head)
    exact, fsd = tuning.search.races
    assert (pair.exact_tree, pair.tree) == (exact.tree, fsd.tree)
    assert pair.batch_trees == {rows: item.tree for rows, item in tuning.batch.items()}
    assert pair.acceptance == EagleFSD.from_pretrained().acceptance
    assert settings.about["made_by"] == "eagle-fsd tune"


def test_options_that_tune_does_not_support_are_rejected() -> None:
    with pytest.raises(OptionsError, match="--compile is not supported by tune"):
        tune(EvaluationRequest(compile=True))
