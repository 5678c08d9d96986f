"""Calibration: which settings are certified, which is chosen, and the file that is written."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock
from sample_report import make_report, make_row
from stub_judge import StubJudge, pairwise_request, write_lines

from eagle_fsd import AcceptanceConfig, EagleFSD, TreeConfig
from eagle_fsd.bundled import BUNDLED_HEAD, BUNDLED_TARGET
from eagle_fsd.evaluation import calibration, engines, methods
from eagle_fsd.evaluation import sweep as sweep_module
from eagle_fsd.evaluation.calibration import (
    SPEED_FIELDS,
    Task,
    calibrate,
    check_folder,
    read_stages,
    read_tests,
)
from eagle_fsd.evaluation.certificate import (
    MAX_TESTS,
    check_scores,
    conclude,
    count_unscored_as_wrong,
    is_certified,
    outcomes,
    split_questions,
    warn_of_few,
)
from eagle_fsd.evaluation.config import (
    CalibrationConfig,
    CalibrationGrid,
    EngineName,
    EvaluationRequest,
    LossBounds,
    SelectionConfig,
)
from eagle_fsd.evaluation.markdown_report import report_text
from eagle_fsd.evaluation.methods import Method, find_methods, given_acceptance
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.questions.sets import requested_questions
from eagle_fsd.evaluation.runner import Hooks
from eagle_fsd.evaluation.search.prediction import Candidate
from eagle_fsd.evaluation.search.search import TreePlan
from eagle_fsd.evaluation.search.workload import Workload
from eagle_fsd.evaluation.selection import (
    CALIBRATED_RULES,
    Setting,
    candidate_methods,
    chance,
    check_accuracy,
    choose_tests,
    drop_settings,
    engine_plan,
    plan_settings,
)
from eagle_fsd.evaluation.statistics import confidence_per_test, is_loss_below, loss_bound
from eagle_fsd.evaluation.tables import points_text
from eagle_fsd.model.config import Settings, read_settings
from eagle_fsd.utils.files import read_jsonl
from eagle_fsd.utils.progress import no_progress

Run = Callable[..., tuple[int, str, str]]
Row = dict[str, Any]
BOUNDS = LossBounds(max_drop=1.0)
#: A loss, and shares of lost, gained and other questions with that loss.
LOSS, SHARES = 0.05, (0.06, 0.01, 0.93)
TREE, EXACT_TREE, LONG_TREE = (
    TreeConfig(total_tokens=n, depth=depth, top_k=k)
    for n, depth, k in ((12, 10, 1), (16, 8, 2), (28, 26, 1))
)


def row(method: str, speed: float, lost: int = 0, gained: int = 0, paired: int = 1000) -> Row:
    """Return the row of a method whose speed is relative to 100 tokens/s of exact decoding."""
    against = {"lost": lost, "gained": gained, "paired": paired}
    counts = {"against_exact": against, "answers": paired, "scored": paired, "tokens": 1}
    return make_row(method, speed / 100) | counts


def questions(count: int, **values: Any) -> list[Question]:
    return [Question(at, "c", (f"{at}?",), **values) for at in range(count)]


def certified(outcomes: np.ndarray, loss: float, count: int, confidence: float) -> np.ndarray:
    """Whether the losses and gains, ``[..., 2]``, certify a loss, ``[...]``."""
    found, index = np.unique(outcomes.reshape(-1, 2), axis=0, return_inverse=True)
    passed = [is_loss_below(loss, int(b), int(c), count, confidence) for b, c in found]
    return np.array(passed)[index].reshape(outcomes.shape[:-1])


# -- what is tested --------------------------------------------------------------------------------


def test_the_series_with_the_largest_expected_speed_is_tested() -> None:
    """A setting without a better chance would divide the error probability for nothing."""
    rows = [row("", 150, lost) for lost in range(0, 20, 4)]
    single = [chance(item, BOUNDS, 600) for item in rows]
    assert single == sorted(single, reverse=True)
    assert single[0] > 0.9 > 0.1 > single[-1]
    assert all(chance(item, BOUNDS, 600, 2) <= chance(item, BOUNDS, 600) for item in rows)
    assert chance(rows[0], BOUNDS, 0) == 0.0
    sure, risky, lossy = row("sure", 120), row("risky", 150, 6), row("lossy", 200, 30, 1)
    noisy = {**row("noisy", 120), "speed_over_exact_interval": [0.9, 1.5]}
    for rows, max_drop, expected in (
        ([sure, risky, lossy], 1.0, ["risky", "sure"]),
        ([sure, risky], 5.0, ["risky"]),
        ([row("slower", 149), row("faster", 150)], 2.0, ["faster"]),
        ([row("slower", 149), row("faster", 150, 5)], 1.0, ["faster", "slower"]),
        ([row("slow", 90), row("lossy", 190, 90), noisy], 0.5, []),
    ):
        found = choose_tests(rows, LossBounds(max_drop=max_drop), 1500)
        assert [item["method"] for item in found] == expected


def test_settings_with_the_largest_expected_gain_remain() -> None:
    """The fastest tree of each acceptance setting, unless another is likelier to be certified.

    Of settings with equal answers, one.
    """

    def kept(
        count: int, max_drop: float, paired: int, equal: bool = False, **lost: int
    ) -> list[str]:
        names = [name.replace("_", "-") for name in lost]
        plan = [
            Setting(Method(name), name.partition("-")[0], 1.5 - 0.01 * at)
            for at, name in enumerate(names)
        ]
        rows = {
            name: {**row(name, 150, number, 0, paired), "tau": 1.0 if equal else 1.0 + at}
            for at, (name, number) in enumerate(zip(names, lost.values(), strict=True))
        }
        found = drop_settings(plan, rows, LossBounds(max_drop=max_drop), 200, count)
        return [item.name for item in found]

    # Of 50 questions, 4 losses may be bad luck at a bound of 5 points, 12 are not.
    losses = {"a": 12, "b": 4, "c": 0, "d": 0}
    for count, expected in ((4, "bcd"), (2, "cd"), (1, "c")):
        assert kept(count, 5.0, 50, **losses) == list(expected)
    trees = {"a_chain": 0, "b_chain": 2, "a_bushy": 0, "b_bushy": 0}
    assert kept(4, 1.0, 100, **trees) == ["a-chain", "b-bushy"]
    assert kept(4, 5.0, 50, equal=True, a=0, b=0, c=1) == ["a", "c"]
    # b decodes as a's tree that was dropped, not as the one that remains.
    assert kept(4, 5.0, 50, equal=True, a_chain=0, a_bushy=1, b=1) == ["a-chain", "b"]


def tree_plan(**trees: Sequence[tuple[TreeConfig, float]]) -> TreePlan:
    candidates = {
        name: [Candidate(tree, speed / 100, speed) for tree, speed in found]
        for name, found in trees.items()
    }
    return TreePlan(exact=EXACT_TREE, candidates=candidates)


def test_each_method_is_combined_with_a_chain_and_a_bushy_tree() -> None:
    """Engines decode as we do along chains only, and one of them has chains only."""
    whole = tree_plan(
        exact=[(EXACT_TREE, 700.0), (TREE, 600.0)],
        a=[(LONG_TREE, 1200.0), (TREE, 900.0), (EXACT_TREE, 800.0)],
        b=[(TREE, 750.0), (EXACT_TREE, 690.0)],
        c=[(TREE, 750.0)],  # accepts the same numbers of tokens as b
        d=[(LONG_TREE, 650.0)],
    )
    long, short = "a tree 28-26-1", "b tree 12-10-1"
    cases: tuple[tuple[EngineName | None, TreeConfig, dict[str, float]], ...] = (
        (None, EXACT_TREE, {long: 1200 / 700, "a tree 16-8-2": 800 / 700, short: 750 / 700}),
        ("sglang", EXACT_TREE, {long: 1200 / 700, short: 750 / 700}),
        ("tensorrt-llm", TREE, {long: 2.0, short: 1.25, "d tree 28-26-1": 650 / 600}),
    )
    for engine, exact, expected in cases:
        plan = engine_plan(whole, engine)
        found = plan_settings(plan, list(map(Method, "abcd")))
        assert {item.name: item.speed for item in found} == pytest.approx(expected)
        assert list(expected) == [item.name for item in found]
        assert plan.exact == exact
    grid = CalibrationGrid(thresholds=(0.05, 0.1), min_ratios=(0.3, 0.1))
    fsd = [f"T={threshold:g} r={ratio:g}" for ratio in (0.3, 0.1) for threshold in (0.05, 0.1)]
    for rules in (False, True):
        names = [method.name for method in candidate_methods(grid, None, 0.0, rules)]
        assert names == [*fsd, "price 1.5", "price 0.75", *(CALIBRATED_RULES if rules else ())]
    settings = Settings(exact_first=8, max_fuzzy_nats=2.0)
    shared, found = given_acceptance(settings), candidate_methods(grid, None, 0.0, True, settings)
    assert [item.name for item in found] == names[:-1]  # the cost of a mixture has no limit
    for method in [*found, *find_methods(["rules"])]:
        if method.name.startswith("mixture"):
            continue
        acceptance = shared.overridden(method.acceptance)
        assert (acceptance.exact_first, acceptance.max_fuzzy_nats) == (8, 2.0)


# -- the certificate -------------------------------------------------------------------------------


def test_certificates_err_as_stated() -> None:
    """All settings lose exactly the bound, so that certifying any of them is an error.

    With 3,000 samples, a share above the stated error plus five standard deviations has a
    probability below 1e-6. Three ways: the luckiest setting is certified on fresh questions; on
    those that selected it, which errs almost always; or as a series of tests.
    """
    confidence, count, settings = 0.95, 200, 20
    random = np.random.default_rng(0)
    lost = random.multinomial(count, SHARES, (3000, settings))[..., :2]
    luckiest = (lost[..., 0] - lost[..., 1]).argmin(1)
    fresh = random.multinomial(count, SHARES, 3000)[:, :2]
    reused = lost[np.arange(3000), luckiest]
    level = 1 - confidence + 5 * 0.004
    assert certified(fresh, LOSS, count, confidence).mean() <= level
    assert certified(reused, LOSS, count, confidence).mean() > 0.5
    divided, whole = (
        certified(lost[:, :MAX_TESTS], LOSS, count, confidence_per_test(confidence, tests))
        for tests in (MAX_TESTS, 1)
    )
    assert divided.any(1).mean() <= level
    assert whole.any(1).mean() > 1.2 * divided.any(1).mean()


def test_the_conclusion_states_the_bounds_and_the_confidence_of_each_test() -> None:
    def tested(level: float, **lost: int) -> list[Row]:
        """Return rows with limits of some confidence on their losses."""
        rows = [row(name, 150, number, 1) for name, number in lost.items()]
        for item in rows:
            item["against_exact"]["loss_limit"] = loss_bound(*outcomes(item), level)
        return rows

    good, bad = tested(0.95, a=2, b=12)
    limit = good["against_exact"]["loss_limit"]
    assert (is_certified(good, BOUNDS), is_certified(bad, BOUNDS)) == (True, False)
    edge = LossBounds(max_drop=100 * limit - 1e-7)  # the stated bound is within the allowed one
    assert not is_certified(good, edge)
    assert conclude([good], BOUNDS, 1, 9) == (
        "a, 1.50 times exact decoding: on 1000 questions that had no part in its selection, it"
        " lost 2 answers and gained 1, so with 95% confidence it loses at most"
        f" {points_text(limit)} points of accuracy relative to exact decoding."
    )
    assert "none of 9 settings" in conclude([], BOUNDS, 0, 9)
    fast, slow, lossy = tested(0.975, fast=12, slow=2, lossy=20)
    found = conclude([fast, slow], BOUNDS, 2, 9)
    assert found.startswith("slow, 1.50 times exact decoding: on 1000 questions")
    assert "fast was tested before and is not certified: it lost 12 answers and gained 1" in found
    assert "Each of up to 2 tests has a confidence of 97.5%" in found
    found = conclude([fast, lossy], BOUNDS, 2, 9)
    assert found.startswith("Exact decoding: nothing is certified to lose at most 1 point")
    bound = points_text(fast["against_exact"]["loss_limit"])
    assert f"gained 1, so it loses at most {bound} points; lossy lost 20" in found
    with pytest.raises(ValueError, match="have no score"):
        outcomes({**row("T=0.1", 120), "against_exact": {}})


# -- questions and folders -------------------------------------------------------------------------


def test_what_cannot_be_calibrated_is_rejected_early(run: Run) -> None:
    for values, words in (
        ({"tokens": 0}, "no question was answered"),
        (
            {"accuracy": 0.02, "cut_off": 280},
            r"accuracy of exact decoding is only 2\.0%.*280 answers were cut off",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            check_accuracy({**row("exact", 100), **values}, 0.5)
    scored = questions(100, scored_by="number", answer="1")
    for max_drop, warning in (
        (3.0, "None"),
        (
            0.5,
            "100 fresh questions cannot show a loss within --max-drop 0.5 even if nothing is lost;"
            " 600 can, 869 if 3 settings are tested; use more questions, or a --max-drop of at"
            " least 2.97",
        ),
        (0.0, "; use a --max-drop of at least 2.97"),
    ):
        assert str(warn_of_few(LossBounds(max_drop=max_drop), scored)).endswith(warning)
    for asked, words in (
        (questions(1), "have no score.*--measure agreement"),
        ([Question(0, "c", ("?",), "code", "")], "--execute-code"),
    ):
        with pytest.raises(ValueError, match=words):
            check_scores(asked, False)
    for options, words in (
        (("--for", "sglang"), "set a --temperature above 0; got 0"),
        (("--for", "tensorrt-llm", "--install"), "cannot hold tensorrt-llm's settings"),
        (("--drafter", "nowhere", "--install"), "requires a drafter in a writable folder"),
        (("--thresholds", "0"), "--thresholds must include a value above 0"),
        (("--measure", "regret"), "--max-regret require each other"),
        (("--temperature", "0.8", "--top-p", "0.9"), "--top-p is not supported"),
    ):
        status, _, errors = run("calibrate", *options)
        assert (status, words in errors, len(errors.splitlines())) == (2, True, 1)


def test_both_stages_have_the_same_categories_and_no_common_question() -> None:
    """A small category is certified too, and a rare one is neither lost nor repeated."""
    sizes = {"large": 1000, "small": 40, "rare": 1}
    names = [name for name, size in sizes.items() for _ in range(size)]
    order = np.random.default_rng(0).permutation(names).tolist()
    used, fresh = split_questions(
        [Question(at, name, (f"{at}?",)) for at, name in enumerate(order)]
    )
    assert len(used) == 208
    for name, size in sizes.items():
        counts = [sum(item.category == name for item in part) for part in (used, fresh)]
        assert sum(counts) == size
        assert counts[0] == pytest.approx(0.2 * size, abs=1)
    for count in (1, 3, 16):
        asked = questions(count)
        used, fresh = split_questions(asked)
        assert used == asked[: max(1, round(0.2 * count))]
        assert [*used, *fresh] == asked
    repeated = [Question(at, "c", (text,)) for at, text in enumerate("abcad")]
    assert [item.question_id for item in split_questions(repeated)[1]] == [1, 2, 4]
    # Answers without a score count as wrong, whichever method gave them.
    scores = {"right": True, "wrong": False, "strange": None}
    question = Question(0, "c", ("?",), "function", grade=lambda answer, _: scores[answer])
    counted = count_unscored_as_wrong(question)
    assert [counted.grade(answer, counted) for answer in scores] == [True, False, False]


def test_a_folder_holds_one_calibration(tmp_path: Path) -> None:
    """More questions would move some from one stage to the other, and other bounds test others."""
    asked, folder = questions(40), tmp_path / "out"
    names = [Method("T=0.1"), Method("acc 0.5")]

    def check(
        count: int,
        chosen: Sequence[Method] = names,
        config: CalibrationConfig = CONFIG,
        selecting: CalibrationConfig | None = None,
        **options: Any,
    ) -> None:
        request = EvaluationRequest(out=folder, **options)
        used, fresh = split_questions(asked[:count])
        model: Any = None
        check_folder(
            Task(
                request=request,
                config=config,
                selecting=(request, selecting or config),
                bounds=BOUNDS,
                engine=None,
                progress=no_progress,
                methods=chosen,
                model=model,
                used=used,
                fresh=fresh,
            )
        )

    check(8)
    check(20)  # nothing is measured so far
    (folder / "trees.json").touch()
    check(20)
    for arguments, options, words in (
        ((40, names), {}, "questions or --count"),
        ((20, names[:1]), {}, "settings to choose from"),
        ((20, names), {"compile": True}, "--compile"),
        ((20, names), {"grader": "number"}, "--grader"),
    ):
        with pytest.raises(ValueError, match=f"other {words}: .* other questions with --skip "):
            check(*arguments, **options)
    agreement = CONFIG.updated(measure="agreement")
    for config, words in ((agreement, "--measure, --select-regret"), (CONFIG, "--select-regret")):
        with pytest.raises(ValueError, match=f"other {words}: "):
            check(20, config=config, selecting=agreement)
    for changes in ({"batch": 4}, {"temperature": 1.0}, {"answer_batch": 32}):
        with pytest.raises(ValueError, match="other options of decoding"):
            check(20, config=CONFIG.updated(**changes))
    assert not read_tests(folder, BOUNDS)
    fixed = {"bounds": BOUNDS.model_dump(), "exact": TREE.model_dump(), "tests": ["b", "a"]}
    (folder / "tests.json").write_text(json.dumps(fixed))
    assert read_tests(folder, BOUNDS) == fixed
    with pytest.raises(ValueError, match="other bounds: choose another output folder, and other"):
        read_tests(folder, LossBounds(max_drop=2.0))


# -- the command -----------------------------------------------------------------------------------

CONFIG = CalibrationConfig(max_new_tokens=200, answer_batch=12)
GRID = CalibrationGrid(thresholds=(0.05,), min_ratios=(0.3,))
CHOSEN = "T=0.05 r=0.3 tree 12-10-1"


def calibrated(
    request: EvaluationRequest, max_drop: float, config: CalibrationConfig = CONFIG, **options: Any
) -> dict[str, Any]:
    found = calibrate(request, LossBounds(max_drop=max_drop), config, GRID, **options)
    assert found is not None
    return found


@pytest.fixture
def predict(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let some methods be predicted to be faster than exact decoding."""

    def predict(*names: str, exact: Sequence[TreeConfig] = (EXACT_TREE,)) -> None:
        def plan(_: object, candidates: Sequence[Method], *__: object, **___: object) -> TreePlan:
            speeds = {name: 1500.0 - at for at, name in enumerate(names)}
            trees = {item.name: [(TREE, speeds.get(item.name, 500.0))] for item in candidates}
            return tree_plan(exact=[(tree, 1000.0) for tree in exact], **trees)

        monkeypatch.setattr(calibration, "plan_trees", plan)

    predict("T=0.05 r=0.3")
    return predict


class Machine:
    """Answers and measures in no time; :attr:`lost` is the losses of 100 fresh questions."""

    def __init__(self) -> None:
        self.lost: dict[str, int] = {}
        #: The methods of each evaluation, and whether passes were compiled.
        self.answered: list[tuple[list[str], bool]] = []
        self.raced_compiled: bool | None = None

    def run_evaluation(
        self,
        _: object,
        __: object,
        compared: Sequence[Method],
        request: EvaluationRequest,
        config: object,
        folder: Path,
        hooks: Hooks,
        first: int | None,
    ) -> dict[str, Any]:
        names = [method.name for method in compared]
        self.answered.append((names, bool(request.compile)))
        in_round = folder.name == "selection"
        rows = [
            make_row(name, 1, lost=3 if in_round else self.lost.get(name, 1))
            | {"tokens": 100 + at}  # no two decode the same
            for at, name in enumerate(names)
        ]
        report = make_report(rows)
        hooks.on_report(report)
        return report

    def measure_speeds(
        self, workload: Workload, trees: Sequence[TreeConfig], raced: Sequence[Method], _: object
    ) -> tuple[Method, dict[str, Any]]:
        self.raced_compiled = workload.model.compile is True
        speeds = {"exact": 1.0, **{item.name: 1.5 - at / 1000 for at, item in enumerate(raced)}}
        measured = {
            name: {key: make_row(name, speed).get(key) for key in SPEED_FIELDS}
            for name, speed in speeds.items()
        }
        return replace(methods.EXACT, tree=trees[0]), measured


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, model: EagleFSD, no_figures: None) -> Machine:
    found = Machine()
    monkeypatch.setattr(calibration, "load_share", lambda *_: copy.copy(model))
    for name in ("run_evaluation", "measure_speeds"):
        monkeypatch.setattr(calibration, name, getattr(found, name))
    return found


def test_the_next_setting_is_tested_if_the_first_one_fails(
    machine: Machine, tmp_path: Path, predict: Callable[..., None]
) -> None:
    """A report shows one bound of each, at the confidence of each of two tests."""
    predict("T=0.05 r=0.3", "price 1.5")
    next_ = "price 1.5 tree 12-10-1"
    bounds = LossBounds(max_drop=5.0, confidence=0.8)
    for lost, chosen, certified_ in ((1, CHOSEN, [True]), (30, next_, [False, True])):
        machine.lost = {CHOSEN: lost}
        request = EvaluationRequest(count=250, out=tmp_path / f"{lost}")
        found = calibrate(request, bounds, CONFIG, GRID)
        assert found["calibrated"] == chosen
        last, _ = machine.answered[-1]
        assert last == ["exact", CHOSEN, next_][: 2 + (chosen == next_)]
        shown = f"{points_text(loss_bound(1, 0, 100, 0.9))} points"
        assert f"loses at most {shown} of accuracy" in found["conclusions"][0]
        text = report_text(found)
        assert "at 80% confidence for all methods at once (90% for each)." in text
        assert text.count(shown) == 2  # sentence and table
        tests = found["calibration"]["about"]["tested"]
        assert [item["certified"] for item in tests] == certified_
    assert read_settings(tmp_path / "30" / "fsd.json").acceptance["selection"] == "priced"


def test_settings_for_other_engines(
    machine: Machine,
    predict: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """fsd.json holds vLLM's; others get flags only. The target thinks in its own words."""
    monkeypatch.setattr(engines, "THINKING", ("Step", "####"))
    cases: tuple[tuple[EngineName, str, str], ...] = (
        ("tensorrt-llm", "top 2 gap 0.1", "relaxed_topk: 2"),
        ("vllm", "top-ratio", '"num_speculative_tokens": 11'),
    )
    for engine, name, flag in cases:
        predict(name, exact=(EXACT_TREE, TREE))
        folder = tmp_path / engine
        found = calibrated(EvaluationRequest(count=100, out=folder), 20.0, engine=engine)
        assert found["calibrated"] == f"{name} tree 12-10-1"
        assert found["files"] == ([str(folder / "fsd.json")] if engine == "vllm" else [])
        assert (folder / "fsd.json").exists() is bool(found["files"])
        assert flag in found["flags"]
        stored = found["calibration"]  # which cannot hold the rule of TensorRT-LLM
        assert ("certificate" in stored) == (engine == "vllm")
        assert "itself did not run, so the bound does not hold" in found["conclusions"][0]
        exact = found["selection"][0]["settings"]
        assert (exact["method"], exact["depth"]) == ("exact", TREE.depth)
    settings = read_settings(tmp_path / "vllm" / "fsd.json")
    assert (settings.rule, settings.top_k) == ("top-ratio", 1)
    assert settings.certificate.decoder == "eagle-fsd"


def test_a_chosen_rule_is_stored(
    machine: Machine, predict: Callable[..., None], tmp_path: Path
) -> None:
    predict("margin")
    found = calibrated(EvaluationRequest(count=100, out=tmp_path, compile=True), 20.0)
    assert found["calibrated"] == "margin tree 12-10-1"
    model = EagleFSD.from_pretrained(settings=tmp_path / "fsd.json")
    assert model.acceptance == AcceptanceConfig(rule="margin")
    assert (model.tree_for(model.acceptance), model.exact_tree) == (TREE, EXACT_TREE)
    # Speeds are those of compiled passes; answers, which are decoded in batches, are not compiled.
    assert machine.raced_compiled
    assert not any(compiled for _, compiled in machine.answered)
    assert found["calibration"]["about"]["compiled"] is True


# -- runs on the bundled pair ----------------------------------------------------------------------


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch, predict: Callable[..., None]) -> None:
    """Test the predicted setting, however its speed is measured."""
    monkeypatch.setattr(calibration, "choose_tests", lambda rows, *_: rows)
    monkeypatch.setattr(calibration, "RACE_GROUPS", 2)


@pytest.mark.usefixtures("tested", "no_figures")
def test_questions_without_references_certify_agreement_and_regret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(calibration, "measure_speeds", Machine().measure_speeds)
    file = tmp_path / "questions.jsonl"
    asked = requested_questions(EvaluationRequest(count=15), seed=1)
    write_lines(file, [{"question_id": item.question_id, "turns": item.turns} for item in asked])
    request = EvaluationRequest(questions=str(file), out=tmp_path / "agreement")
    with caplog.at_level(logging.WARNING):
        found = calibrated(request, 20.0, CONFIG.updated(measure="agreement", max_new_tokens=32))
    against = found["selection"][1]["against_exact"]
    changed = against["agreement"]["answers"] - against["agreement"]["identical"]
    assert (against["lost"], against["gained"], against["paired"]) == (changed, 0, 3)
    assert changed == 3  # which is too many
    check_accuracy(found["selection"][0], 60.0)  # a loss beyond half of the answers is possible
    assert (found["calibrated"], found["unscored"]) == ("exact", None)
    assert "none of 9 settings" in found["conclusions"][0]
    assert found["tables"][0][0][3] == "agreement"
    assert read_settings(tmp_path / "agreement" / "fsd.json").acceptance["threshold"] == 0.0
    assert "12 fresh questions cannot show a loss" in caplog.text
    out = tmp_path / "regret"
    config = CONFIG.updated(measure="regret", max_regret=0.013, max_new_tokens=64)
    found = calibrated(request.updated(out=out), 50.0, config)
    choices = [item["choices"][0] for item in read_jsonl(out / f"{CHOSEN}.jsonl")]
    lost = sum(sum(item["regrets"][0]) > 0.013 * item["new_tokens"][0] for item in choices)
    assert 0 < lost < len(choices) == 12
    settings = read_settings(out / "fsd.json")
    assert settings.certificate is not None
    certificate = settings.certificate
    assert (certificate.lost, certificate.gained, certificate.questions) == (lost, 0, 12)
    name = "answers with a regret of at most 0.013 nats per token"
    assert certificate.measure == f"{name} on questions.jsonl"
    assert f"points of {name} relative" in found["conclusions"][0]
    assert f"Limits on the loss of {name} are exact" in report_text(found)
    assert found["calibration"]["about"]["accuracy_exact"] == 1.0
    # They select by regret a setting that scored questions certify.
    few = tmp_path / "few.jsonl"
    write_lines(few, read_jsonl(file)[:5])
    request = EvaluationRequest(count=8, skip=15, out=tmp_path / "accuracy", grader="number")
    selection = SelectionConfig(select_on=str(few), select_regret=0.5)
    short = CONFIG.updated(max_new_tokens=32)
    found = calibrated(request, 80.0, short, selection=selection)
    assert [item["scored"] for item in found["selection"]] == [5, 5]
    assert found["tables"][0][0][3] == "regret"
    certificate = read_settings(tmp_path / "accuracy" / "fsd.json").certificate
    assert (certificate.measure, certificate.questions) == ("accuracy on bundled", 8)
    selection = SelectionConfig(select_on=str(file), select_regret=0.5)
    with pytest.raises(ValueError, match="leaves no other question"):
        calibrated(EvaluationRequest(count=10, out=tmp_path), 50.0, selection=selection)
    write_lines(file, [{"task_id": "f", "prompt": "def f():", "entry_point": "f", "test": "t"}])
    with pytest.raises(ValueError, match="use --execute-code"):
        calibrated(request, 50.0, selection=selection)


def test_the_first_questions_and_prompts_are_of_all_categories(
    model: EagleFSD, tmp_path: Path
) -> None:
    """On the first questions of a sorted set, settings are dropped and trees chosen."""
    file = tmp_path / "questions.jsonl"
    write_lines(file, [{"prompt": f"{at}?", "category": f"{at // 20}"} for at in range(160)])
    request, config = EvaluationRequest(questions=str(file)), CONFIG.updated(measure="agreement")
    _, used, _ = read_stages(request, config, SelectionConfig(), no_progress)
    assert len({item.category for item in used[:8]}) == 8
    in_order = sorted(used, key=lambda item: item.category)
    prompts = Workload.of(model, in_order, request, config).prompts
    first = Workload.of(model, used[:8], request, config).prompts
    assert {tuple(ids.tolist()) for ids in prompts[:8]} == {tuple(ids.tolist()) for ids in first}


def test_a_run_locks_its_folder_before_it_searches_trees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two calibrations could each fix tests of their own on the same fresh questions."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("trees are searched")

    for module in (calibration, sweep_module):
        monkeypatch.setattr(module, "plan_trees", fail)
    request = EvaluationRequest(count=8, out=tmp_path)
    with FileLock(tmp_path / ".lock"):
        for run in (sweep_module.sweep, partial(calibrate, bounds=LossBounds(max_drop=50.0))):
            with pytest.raises(ValueError, match="another run is writing"):
                run(request)
    assert [file.name for file in tmp_path.iterdir()] == [".lock"]


@pytest.mark.slow
@pytest.mark.usefixtures("tested")
def test_calibrate_writes_settings_that_the_pair_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three questions select the setting, and thirteen others certify it."""
    out, head = tmp_path / "out", tmp_path / "head"
    shutil.copytree(BUNDLED_HEAD, head)
    request = EvaluationRequest(count=16, out=out, drafter=str(head), target=str(BUNDLED_TARGET))
    found = calibrated(request, 37.0, install=True)
    assert found["files"] == [str(out / "fsd.json"), str(head / "fsd.json")]
    assert found["calibrated"] == CHOSEN
    written, installed = (json.loads(Path(file).read_text()) for file in found["files"])
    report = json.loads((out / "report.json").read_text())
    assert written == installed == report["calibration"]
    assert report["conclusions"] == found["conclusions"]
    assert "on 13 questions that had no part in its selection" in found["conclusions"][0]
    assert found["conclusions"][0] in (out / "report.md").read_text()
    assert [item["method"] for item in report["selection"]] == ["exact", CHOSEN]
    assert [item["answers"] for item in report["selection"]] == [3, 3]
    assert [item["answers"] for item in report["rows"]] == [13, 13]
    assert [item["settings"]["depth"] for item in report["rows"]] == [8, 10]
    speeds = [item["speed_over_exact"] for item in report["selection"]]
    assert speeds == [item["speed_over_exact"] for item in report["rows"]]
    assert speeds[0] == pytest.approx(1.0)
    about = written["about"]
    (test,) = about["tested"]
    assert (about["max_drop_points"], test["method"]) == (37.0, CHOSEN)
    assert (test["paired"], test["certified"]) == (13, True)
    assert 0 < test["drop_is_below_points"] <= 37.0
    assert (about["confidence"], about["count"], about["seed"]) == (0.95, 13, 1)
    for values in (about, report["about"]):
        assert (values["batch"], values["answer_batch"]) == (1, 12)
    assert about["environment"]["revision"]
    certificate = read_settings(out / "fsd.json").certificate
    assert (certificate.decoder, certificate.confidence) == ("eagle-fsd", 0.95)
    assert (certificate.questions, certificate.bound) == (13, test["drop_is_below_points"])
    assert (certificate.lost, certificate.gained) == (test["lost"], test["gained"])
    assert certificate.revision == about["environment"]["revision"]
    model = EagleFSD.from_pretrained(BUNDLED_TARGET, head)
    assert (model.tree, model.exact_tree) == (TREE, EXACT_TREE)
    assert model.acceptance == AcceptanceConfig(threshold=0.05, min_ratio=0.3)
    identity = read_settings(out / "fsd.json").drafter
    assert identity is not None
    assert identity.name == str(head)
    # It resumes with the same tests and answers, and measures speeds again; scores may change, so
    # that they would select other settings.
    monkeypatch.setattr(calibration, "drop_settings", lambda *_, **__: [])
    assert calibrated(request, 37.0)["calibration"]["about"]["tested"] == [test]


@pytest.mark.slow
@pytest.mark.usefixtures("judge_data", "tested")
def test_a_calibration_for_several_prompts_is_judged_in_pairs(
    stub: StubJudge, tmp_path: Path
) -> None:
    """Its lossless tree is for that number of prompts, and what it had for others is kept."""
    stub.reply_with(lambda _: "[[C]]")
    request = pairwise_request(stub, 8, tmp_path / "out")
    single, eight = TREE.updated(total_tokens=8, depth=6), TREE.updated(total_tokens=4, depth=2)
    settings = Settings(exact=single, batch={"2": single, "8": eight})
    found = calibrated(request, 45.0, CONFIG.updated(batch=2), settings=settings)
    exact, fuzzy = found["rows"]
    assert exact["judge"] is None
    assert fuzzy["judge"]["pairs"]["tied"] == fuzzy["judge"]["pairs"]["questions"] == 6
    written = read_settings(tmp_path / "out" / "fsd.json")
    assert written.exact == single
    assert written.batch == {"2": EXACT_TREE, "8": eight}
    about = found["calibration"]["about"]
    assert (about["batch"], about["answer_batch"]) == (2, 12)
