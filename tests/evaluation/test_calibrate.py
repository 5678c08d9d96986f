"""Calibration: which settings are certified, which is chosen, and the file that is written."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sample_report import make_report, make_row
from stub_judge import StubJudge, pairwise_request

from eagle_fsd import AcceptanceConfig, EagleFSD, OptionsError, Origin, TreeConfig
from eagle_fsd.bundled import BUNDLED_HEAD, BUNDLED_TARGET
from eagle_fsd.evaluation import calibration, engines, methods
from eagle_fsd.evaluation.calibration import (
    MAX_TESTS,
    SPEED_FIELDS,
    Setting,
    add_rows,
    calibrate,
    candidate_methods,
    certify,
    chance,
    check_accuracy,
    check_folder,
    check_questions,
    choose_tests,
    conclude,
    count_unscored_as_wrong,
    drop_settings,
    exact_tree,
    plan_settings,
    race_settings,
    read_tests,
    remove_questions,
    split_questions,
)
from eagle_fsd.evaluation.config import (
    CalibrationConfig,
    CalibrationGrid,
    EvaluationRequest,
    LossBounds,
)
from eagle_fsd.evaluation.markdown_report import report_text
from eagle_fsd.evaluation.methods import Method, rule_method
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.statistics import confidence_per_test, is_loss_below, loss_bound
from eagle_fsd.evaluation.tables import footnote, points_text
from eagle_fsd.evaluation.tuning.candidates import Candidate
from eagle_fsd.evaluation.tuning.search import TreePlan
from eagle_fsd.evaluation.tuning.workload import Workload
from eagle_fsd.model.acceptance import MarginRule
from eagle_fsd.model.config import Settings, read_settings
from eagle_fsd.utils.chat_templates import encode_prompt, load_chat_template
from eagle_fsd.utils.progress import no_progress

Run = Callable[..., tuple[int, str, str]]
QUESTION = "Mia has 8 apples at home. Then she gives 3 apples to Tom. How many apples are left?"


def row(method: str, speed: float, lost: int = 0, gained: int = 0) -> dict[str, Any]:
    return {
        "method": method,
        "tokens_per_second": speed,
        "speed_over_exact": speed / 100,
        "speed_over_exact_interval": [speed / 100 - 0.01, speed / 100 + 0.01],
        "against_exact": {"lost": lost, "gained": gained, "paired": 1000},
    }


BOUNDS = LossBounds(max_drop=1.0)
EXACT = {
    "method": "exact",
    "tokens_per_second": 100.0,
    "speed_over_exact": 1.0,
    "speed_over_exact_interval": None,
    "accuracy": 0.9,
    "cut_off": 0,
}


@pytest.mark.slow
@pytest.mark.parametrize("answers", [(0, 0, 400), (2, 1, 400), (0, 0, 16), (9, 7, 200)])
def test_chances_agree_with_the_certificate(answers: tuple[int, int, int]) -> None:
    """The estimate is the share of 200 draws, whose standard error is below 3.6 points."""
    lost, gained, paired = answers
    random = np.random.default_rng(5)
    shares = random.dirichlet([lost + 0.5, gained + 0.5, paired - lost - gained + 0.5], 1000)
    passed = [
        is_loss_below(0.01, int(b), int(c), 1500, 0.975)
        for b, c, _ in random.multinomial(1500, shares)
    ]
    found = {"against_exact": {"lost": lost, "gained": gained, "paired": paired}}
    assert chance(found, BOUNDS, 1500, 2) == pytest.approx(np.mean(passed), abs=0.2)


def test_chances_decrease_with_losses_and_with_the_number_of_tests() -> None:
    rows = [row("", 150, lost) for lost in range(0, 20, 4)]
    single = [chance(item, BOUNDS, 1500) for item in rows]
    assert single == sorted(single, reverse=True)
    assert single[0] > 0.9 > 0.1 > single[-1]
    assert all(chance(item, BOUNDS, 1500, 2) <= chance(item, BOUNDS, 1500) for item in rows)
    assert chance(rows[0], BOUNDS, 0) == 0.0


def chosen(rows: list[dict[str, Any]], max_drop: float = 1.0) -> list[str]:
    found = choose_tests(rows, LossBounds(max_drop=max_drop), 3000)
    return [item["method"] for item in found]


def test_the_series_with_the_largest_expected_speed_is_tested() -> None:
    """T = 0.3 loses too much. T = 0.2 may be certified, and if it is not, T = 0.1 will be."""
    rows = [row("T=0.1", 120), row("T=0.2", 150, 6), row("T=0.3", 200, 30, 1)]
    assert chosen(rows) == ["T=0.2", "T=0.1"]
    assert chosen(rows, 0.1) == ["T=0.1"]
    assert chosen(rows[:2], 5.0) == ["T=0.2"]
    assert chosen([*rows, row("T=0.15", 140)]) == ["T=0.2", "T=0.15"]


def test_a_slower_setting_without_a_better_chance_is_not_tested() -> None:
    """The error probability would be divided for nothing."""
    assert chosen([row("T=0.1", 149), row("T=0.2", 150)]) == ["T=0.2"]
    assert chosen([row("T=0.1", 149), row("T=0.2", 150, 5)])[-1] == "T=0.1"


@pytest.mark.parametrize(
    "others",
    [
        [],
        [row("T=0.1", 90), row("T=0.2", 95), row("T=0.3", 96)],
        [row("T=0.1", 190, 90), row("T=0.2", 195, 90), row("T=0.3", 196, 90)],
        [{**row(f"T=0.{n}", 120), "speed_over_exact_interval": [0.9, 1.5]} for n in (1, 2, 3)],
    ],
    ids=["none", "slower", "lossy", "noisy"],
)
def test_nothing_is_tested_if_nothing_qualifies(others: list[dict[str, Any]]) -> None:
    assert chosen(others, 0.5) == []


@pytest.mark.parametrize("levels", [(0.8, 200, 8), (0.95, 400, 20)])
def test_certificates_of_selected_settings_err_as_stated(levels: tuple[float, int, int]) -> None:
    """Of many settings that lose exactly the bound, the luckiest is selected, then certified.

    With 3,000 samples the standard deviation of the share is below 0.75 points; a share above the
    stated error plus five of them has a probability below 1e-6. On the questions for the selection
    themselves, the same test would err almost always.
    """
    confidence, count, settings = levels
    random = np.random.default_rng(0)
    loss, samples = 0.05, 3000
    lost = random.multinomial(count, [loss + 0.01, 0.01, 0.98 - loss], (samples, settings))[..., :2]
    luckiest = (lost[..., 0] - lost[..., 1]).argmin(1)
    fresh = random.multinomial(count, [loss + 0.01, 0.01, 0.98 - loss], samples)[:, :2]
    reused = lost[np.arange(samples), luckiest]

    def share(outcomes: np.ndarray) -> float:
        found, counts = np.unique(outcomes, axis=0, return_counts=True)
        passed = [is_loss_below(loss, int(b), int(c), count, confidence) for b, c in found]
        return float(counts[np.array(passed)].sum()) / samples

    assert share(fresh) <= 1 - confidence + 5 * 0.0075
    assert share(reused) > 0.5


@pytest.mark.parametrize("level", [(0.8, 300), (0.95, 400)])
def test_a_series_of_tests_errs_as_stated(level: tuple[float, int]) -> None:
    """All settings lose exactly the bound, so that certifying any of them is an error.

    The samples and the tolerance are those of the test above. Without dividing the error
    probability, independent tests would err almost twice as often.
    """
    confidence, count = level
    random = np.random.default_rng(2)
    loss, samples = 0.05, 3000
    lost = random.multinomial(count, [loss + 0.01, 0.01, 0.98 - loss], (samples, MAX_TESTS))

    def share(tests: int) -> float:
        level = confidence_per_test(confidence, tests)
        found, index = np.unique(lost[..., :2].reshape(-1, 2), axis=0, return_inverse=True)
        passed = [is_loss_below(loss, int(b), int(c), count, level) for b, c in found]
        return float(np.array(passed)[index].reshape(samples, MAX_TESTS).any(1).mean())

    assert share(MAX_TESTS) <= 1 - confidence + 5 * 0.0075
    assert share(1) > 1.2 * share(MAX_TESTS)


def test_the_conclusion_states_the_bound() -> None:
    good, bad = (
        certify(row(name, 150, lost, 1), BOUNDS, 1) for name, lost in (("a", 2), ("b", 12))
    )
    assert conclude([good], BOUNDS, 1, 9) == (
        "a, 1.50 times exact decoding: on 1000 questions that had no part in its selection, it"
        " lost 2 answers and gained 1, so that with 95% confidence it loses at most"
        f" {points_text(good.drop / 100)} points of accuracy relative to exact decoding."
    )
    assert good.certified
    assert not bad.certified
    assert good.drop < 1.0 < bad.drop
    assert conclude([bad], BOUNDS, 1, 9) == (
        "Exact decoding: nothing is certified to lose at most 1 points of accuracy relative to"
        " exact decoding. On 1000 questions that had no part in the selection, with 95%"
        " confidence: b lost 12 answers and gained 1, so that it loses at most"
        f" {points_text(bad.drop / 100)} points."
    )
    assert "none of 9 settings" in conclude([], BOUNDS, 0, 9)


def test_the_conclusion_of_several_tests_states_the_confidence_of_each() -> None:
    bad, good, worse = (
        certify(row(name, 150, lost, 1), BOUNDS, 2)
        for name, lost in (("fast", 12), ("slow", 2), ("lossy", 20))
    )
    assert good.drop == pytest.approx(100 * loss_bound(2, 1, 1000, 0.975))
    found = conclude([bad, good], BOUNDS, 2, 9)
    assert found.startswith("slow, 1.50 times exact decoding: on 1000 questions")
    assert (
        "fast was tested before and is not certified: it lost 12 answers and gained 1, which shows"
        f" at most {points_text(bad.drop / 100)} points, not 1 points."
    ) in found
    assert "Each of up to 2 tests has a confidence of 97.5%" in found
    found = conclude([bad, worse], BOUNDS, 2, 9)
    assert found.startswith("Exact decoding: nothing is certified")
    bound = points_text(bad.drop / 100)
    assert f"gained 1, so that it loses at most {bound} points; lossy lost 20" in found
    assert "97.5%" in found


@pytest.mark.parametrize(
    ("exact", "words"),
    [
        ({"tokens": 0}, "no question was answered"),
        (
            {"accuracy": 0.02, "cut_off": 280},
            r"accuracy of exact decoding is only 2\.0%.*280 answers were cut off",
        ),
    ],
    ids=["unanswered", "inaccurate"],
)
def test_exact_decoding_without_accuracy_to_lose_is_rejected(
    exact: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        check_accuracy({**EXACT, "tokens": 9, **exact}, 0.5)


def plan(*names: str) -> list[Setting]:
    """Settings with different trees, fastest first."""
    return [
        Setting(Method(name), name.partition("-")[0], 1.5 - 0.01 * at)
        for at, name in enumerate(names)
    ]


def outcomes(paired: int, **lost: int) -> dict[str, dict[str, Any]]:
    return {
        name.replace("_", "-"): {"against_exact": {"lost": count, "gained": 0, "paired": paired}}
        for name, count in lost.items()
    }


def test_settings_with_the_largest_expected_gain_remain() -> None:
    """Of 50 questions, 4 losses may be bad luck at a bound of 5 points, 12 are not."""
    rows = outcomes(50, a=12, b=4, c=0, d=0)
    bounds = LossBounds(max_drop=5.0)

    def kept(count: int) -> list[str]:
        return [item.name for item in drop_settings(plan(*"abcd"), rows, bounds, 1500, count)]

    assert kept(4) == ["b", "c", "d"]
    assert kept(2) == ["c", "d"]
    assert kept(1) == ["c"]


def test_one_tree_of_each_acceptance_setting_remains() -> None:
    """The fastest one, unless another is likelier to be certified."""
    settings = plan("a-chain", "b-chain", "a-bushy", "b-bushy")
    rows = outcomes(100, a_chain=0, b_chain=2, a_bushy=0, b_bushy=0)
    found = drop_settings(settings, rows, BOUNDS, 1500, 4)
    assert [item.name for item in found] == ["a-chain", "b-bushy"]


def test_dropping_settings_early_does_not_affect_the_certificate() -> None:
    """Settings lose 4 points, the bound is 1: the luckiest survivors fail on fresh questions.

    Of 1,500 fresh questions, 60 are lost on average; at most 20 of them, which would be certified,
    have a probability below 1e-9.
    """
    random = np.random.default_rng(1)
    rows: dict[str, dict[str, Any]] = {}
    settings, bounds = plan(*map(str, range(40))), LossBounds(max_drop=1.0)
    for count, kept in ((48, 8), (96, 4), (356, 4)):
        new = []
        for item in settings:
            outcome = {"lost": int(random.binomial(count, 0.04)), "gained": 0, "paired": count}
            values = {"scored": count, "accuracy": 0.9, "tokens": 1, "cut_off": 0}
            new.append({"method": item.name, "against_exact": outcome, **values})
        add_rows(rows, new)
        settings = drop_settings(settings, rows, bounds, 1500, kept)
    assert len(settings) <= 4
    for item in settings or plan("none"):
        fresh = row(item.name, 150)
        fresh["against_exact"] = {
            "lost": int(random.binomial(1500, 0.04)),
            "gained": 0,
            "paired": 1500,
        }
        assert not certify(fresh, bounds, 2).certified


def test_results_of_rounds_add_up() -> None:
    rows: dict[str, dict[str, Any]] = {}
    values = {"tokens": 10, "cut_off": 1, "tau": 2.0}
    for scored, accuracy, lost in ((10, 0.9, 1), (30, 0.7, 2)):
        against = {"lost": lost, "gained": 0, "paired": scored}
        add_rows(
            rows,
            [
                {"method": "exact", "scored": scored, "accuracy": 1.0, **values},
                {
                    **{"method": "a", "scored": scored, "accuracy": accuracy, **values},
                    "against_exact": against,
                },
            ],
        )
    assert rows["a"]["against_exact"] == {"lost": 3, "gained": 0, "paired": 40}
    assert rows["a"]["accuracy"] == pytest.approx(0.75)
    assert (rows["a"]["scored"], rows["exact"]["cut_off"]) == (40, 2)


def test_each_method_is_combined_with_a_chain_and_a_bushy_tree() -> None:
    """Those that are predicted to be slower than exact decoding are left out."""
    bushy, chain, long = (
        TreeConfig(total_tokens=n, depth=depth, top_k=k)
        for n, depth, k in ((16, 8, 2), (12, 10, 1), (28, 26, 1))
    )
    candidates = {
        "exact": [Candidate(bushy, 6.0, 700.0)],
        "a": [
            Candidate(long, 20.0, 1200.0),
            Candidate(chain, 9.0, 900.0),
            Candidate(bushy, 8.0, 800.0),
        ],
        "b": [Candidate(chain, 7.0, 750.0), Candidate(bushy, 6.0, 690.0)],
    }
    found = TreePlan(bushy, candidates), [Method("a"), Method("b")]
    names = ["a tree 28-26-1", "a tree 16-8-2", "b tree 12-10-1"]
    settings = plan_settings(*found, None)
    assert [item.name for item in settings] == names
    assert [item.acceptance for item in settings] == ["a", "a", "b"]
    assert settings[0].speed == pytest.approx(1200 / 700)


def test_methods_that_accept_the_same_numbers_of_tokens_are_tried_once() -> None:
    """A floor that changes nothing: the highest one is kept."""
    exact = TreeConfig(total_tokens=16, depth=8, top_k=2)
    same, less = (
        Candidate(TreeConfig(total_tokens=12, depth=10, top_k=1), tau, 100 * tau)
        for tau in (9.0, 8.0)
    )
    grid = CalibrationGrid(thresholds=(0.05, 0.4), min_ratios=(0.1, 0.3))
    methods = candidate_methods(grid, None, 0.0, False)[:4]
    found = {"T=0.05 r=0.1": same, "T=0.05 r=0.3": same, "T=0.4 r=0.1": same, "T=0.4 r=0.3": less}
    plan = TreePlan(
        exact,
        {
            "exact": [Candidate(exact, 6.0, 700.0)],
            **{method.name: [found[method.name]] for method in methods},
        },
    )
    names = [item.acceptance for item in plan_settings(plan, methods, None)]
    assert names == ["T=0.05 r=0.3", "T=0.4 r=0.3"]


def test_an_engine_without_trees_is_compared_along_chains() -> None:
    """Exact decoding has a chain as well, which others need not beat by as much."""
    bushy, chain, long = (
        TreeConfig(total_tokens=n, depth=depth, top_k=k)
        for n, depth, k in ((16, 8, 2), (12, 10, 1), (28, 26, 1))
    )
    plan = TreePlan(
        bushy,
        {
            "exact": [Candidate(bushy, 6.0, 700.0), Candidate(chain, 5.0, 600.0)],
            "a": [Candidate(long, 7.0, 650.0), Candidate(bushy, 8.0, 800.0)],
        },
    )
    (setting,) = plan_settings(plan, [Method("a")], "tensorrt-llm")
    assert (setting.name, setting.speed) == ("a tree 28-26-1", pytest.approx(650 / 600))
    assert exact_tree(plan, "tensorrt-llm") == chain
    assert exact_tree(plan, "sglang") == exact_tree(plan, None) == bushy
    assert plan_settings(plan, [Method("a")], "sglang") == []  # its bushy trees verify otherwise
    assert [item.name for item in plan_settings(plan, [Method("a")], None)] == ["a tree 16-8-2"]


@pytest.mark.parametrize("rules", [False, True])
def test_candidates_include_other_rules_or_are_an_engines(rules: bool) -> None:
    grid = CalibrationGrid(thresholds=(0.05, 0.1), min_ratios=(0.3,))
    names = [method.name for method in candidate_methods(grid, None, 0.0, rules)]
    others = calibration.CALIBRATED_RULES if rules else ()
    assert names == ["T=0.05 r=0.3", "T=0.1 r=0.3", "price 1.5", "price 0.75", *others]
    assert len(candidate_methods(grid, "tensorrt-llm", 0.0, rules)) == 15
    with pytest.raises(OptionsError, match="set a --temperature above 0; got 0"):
        candidate_methods(grid, "sglang", 0.0, rules)


def test_rows_without_a_score_are_rejected() -> None:
    rows = [EXACT, {**row("T=0.1", 120), "against_exact": {}}]
    with pytest.raises(ValueError, match="have no score"):
        certify(rows[1], BOUNDS, 1)


def test_questions_are_checked_before_they_are_answered() -> None:
    scored = [Question(number, "c", ("?",), "number", "1") for number in range(100)]
    assert check_questions(3.0, 0.95, scored, False) is None
    assert check_questions(0.5, 0.95, scored, False) == (
        "100 fresh questions cannot show a loss below 2.97 points even if nothing is lost; 600 can,"
        " 745 if two settings are tested; use a larger --count, or a --max-drop above 0.5"
    )
    assert loss_bound(0, 0, 744, 0.975) > 0.005 >= loss_bound(0, 0, 745, 0.975)
    assert "; use a --max-drop above 0" in str(check_questions(0.0, 0.95, scored, False))
    with pytest.raises(ValueError, match="have no score"):
        check_questions(0.5, 0.95, [Question(0, "c", ("?",))], False)
    code = [Question(0, "c", ("?",), "code", "")]
    with pytest.raises(ValueError, match="--execute-code"):
        check_questions(0.5, 0.95, code, False)
    assert check_questions(100.0, 0.95, code, True) is None


def test_tests_are_fixed_before_fresh_questions_are_answered(tmp_path: Path) -> None:
    bounds = LossBounds(max_drop=1.0)
    assert not read_tests(tmp_path, bounds)
    fixed = {"bounds": bounds.model_dump(), "exact": TREE.model_dump(), "tests": ["b", "a"]}
    (tmp_path / "tests.json").write_text(json.dumps(fixed))
    assert read_tests(tmp_path, bounds) == fixed
    with pytest.raises(ValueError, match="other bounds: choose another output folder, and with -"):
        read_tests(tmp_path, LossBounds(max_drop=2.0))


def test_the_fastest_tree_of_exact_decoding_is_the_reference() -> None:
    """Whichever tree won the race at the beginning of the search."""
    seconds = {48: 1.07, 24: 1.0, None: 4.0, 12: 0.5}
    raced: list[int | None] = []

    def decode(_: object, method: Method, *__: int) -> tuple[list[Any], float]:
        size = method.tree.total_tokens if method.tree else None
        raced.append(size)
        answer = SimpleNamespace(tokens=[0], stats=SimpleNamespace(steps=1))
        return [answer], seconds[size]

    config = SimpleNamespace(batch=1)
    prompts: Any = SimpleNamespace(groups=8, config=config, pair=lambda: None, decode=decode)
    slow, fast = (TreeConfig(total_tokens=n, depth=8, top_k=4) for n in (48, 24))
    setting = Setting(Method("a", tree=TREE), "a", 2.0)
    best, found = race_settings(prompts, [slow, fast, slow], [setting], no_progress)
    assert best.tree == fast
    assert found["a"]["speed_over_exact"] == pytest.approx(2.0)
    assert found["exact"]["speed_over_exact_interval"] is None
    assert raced[4:8] == [48, 24, 12, None]  # in turn, after each has warmed up
    assert raced.count(48) == raced.count(12) == 9


def test_used_questions_are_removed_whatever_their_ids() -> None:
    questions = [Question(number, "c", (text,)) for number, text in enumerate("abcad")]
    used = [Question(7, "c", ("a",)), Question(8, "c", ("c",))]
    assert [item.question_id for item in remove_questions(questions, used)] == [1, 4]


@pytest.mark.parametrize("order", ["sorted", "interleaved"])
def test_both_stages_have_the_same_categories(order: str) -> None:
    """A small category is certified too, and a rare one is neither lost nor repeated."""
    sizes = {"large": 1000, "small": 40, "rare": 1}
    names = [name for name, size in sizes.items() for _ in range(size)]
    if order == "interleaved":
        np.random.default_rng(0).shuffle(names)
    questions = [Question(at, name, (f"{at}?",)) for at, name in enumerate(names)]
    used, fresh = split_questions(questions)
    assert len(used) == 208
    for name, size in sizes.items():
        counts = [sum(item.category == name for item in part) for part in (used, fresh)]
        assert sum(counts) == size
        assert counts[0] == pytest.approx(0.2 * size, abs=1)
    ids = [item.question_id for item in used]
    assert ids == sorted(ids)


@pytest.mark.parametrize("count", [1, 2, 3, 16])
def test_a_category_is_split_into_a_fifth_and_the_rest(count: int) -> None:
    questions = [Question(at, "c", (f"{at}?",)) for at in range(count)]
    used, fresh = split_questions(questions)
    assert used == questions[: max(1, round(0.2 * count))]
    assert [*used, *fresh] == questions


def test_unscored_answers_count_as_wrong() -> None:
    """They are part of the certificate, whichever method gave them."""
    outcomes = {"right": True, "wrong": False, "strange": None}
    question = Question(0, "c", ("?",), "function", grade=lambda answer, _: outcomes[answer])
    counted = count_unscored_as_wrong(question)
    assert counted.grade is not None
    assert [counted.grade(answer, counted) for answer in outcomes] == [True, False, False]
    number = Question(0, "c", ("?",), "number", "1")
    assert count_unscored_as_wrong(number) is number


def test_a_folder_holds_one_calibration(tmp_path: Path) -> None:
    """More questions would move some from one stage to the other."""
    questions = [Question(at, "c", (f"{at}?",)) for at in range(40)]
    folder = tmp_path / "out"
    names = ["T=0.1", "acc 0.5"]
    check_folder(folder, *split_questions(questions[:8]), names, None)
    check_folder(folder, *split_questions(questions[:20]), names, False)  # nothing measured so far
    (folder / "trees.json").touch()
    check_folder(folder, *split_questions(questions[:20]), names, False)
    for count, settings, compiled in (
        (40, names, False),
        (20, names[:1], False),
        (20, names, True),
    ):
        words = r"another --count.* output folder, and with --skip or --seed other questions"
        with pytest.raises(ValueError, match=words):
            check_folder(folder, *split_questions(questions[:count]), settings, compiled)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_drop": 101.0}, r"max_drop must be a number in \[0, 100\]; got 101.0"),
        ({"max_drop": 1.0, "confidence": 1.0}, r"confidence must be a number in \[0.5, 0.9999\]"),
        ({"max_drop": 1.0, "confidence": float("nan")}, "confidence must be"),
    ],
)
def test_invalid_bounds_are_rejected(values: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionsError, match=words):
        LossBounds.from_dict(values)


def test_a_grid_requires_a_threshold_above_zero() -> None:
    with pytest.raises(OptionsError, match="threshold above 0"):
        CalibrationGrid.from_dict({"thresholds": (0.0,)})


def test_install_requires_a_local_head() -> None:
    with pytest.raises(OptionsError, match="--install requires a drafter in a local folder"):
        calibrate(EvaluationRequest(drafter="nowhere"), LossBounds(max_drop=1.0), install=True)


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (("--for", "sglang"), 2, "set a --temperature above 0; got 0"),
        (("--for", "vllm"), 2, "vllm"),
        (("--for", "tensorrt-llm", "--install"), 2, "cannot hold tensorrt-llm's settings"),
        (("--max-drop", "-1"), 2, "--max-drop must be a number in [0, 100]; got -1"),
    ],
)
def test_invalid_options_are_reported_in_one_line(
    options: tuple[str, ...], status: int, words: str, run: Run
) -> None:
    found, _, err = run("calibrate", *options)
    assert found == status
    assert words in err
    assert len(err.splitlines()) == 1


# -- runs on the bundled pair ----------------------------------------------------------------------

CONFIG = CalibrationConfig(max_new_tokens=200, answer_batch=12)
GRID = CalibrationGrid(thresholds=(0.05,), min_ratios=(0.3,))
TREE, EXACT_TREE = (
    TreeConfig(total_tokens=12, depth=10, top_k=1),
    TreeConfig(total_tokens=16, depth=8, top_k=2),
)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """One setting, which is selected however its speed is measured."""
    method = Method("T=0.05 r=0.3 tree 12-10-1", {"threshold": 0.05, "min_ratio": 0.3}, tree=TREE)
    monkeypatch.setattr(TreePlan, "make", lambda *_, **__: TreePlan(EXACT_TREE, {"exact": []}))
    settings = [Setting(method, "T=0.05 r=0.3", 1.5)]
    monkeypatch.setattr(calibration, "plan_settings", lambda *_: settings)
    monkeypatch.setattr(calibration, "choose_tests", lambda rows, *_: rows)
    monkeypatch.setattr(calibration, "RACE_GROUPS", 2)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerator", "planned")
def test_calibrate_writes_settings_that_the_pair_loads(tmp_path: Path) -> None:
    """Three questions select the setting, and thirteen others certify it."""
    out, head = tmp_path / "out", tmp_path / "head"
    shutil.copytree(BUNDLED_HEAD, head)
    request = EvaluationRequest(count=16, out=out, drafter=str(head), target=str(BUNDLED_TARGET))
    found = calibrate(request, LossBounds(max_drop=37.0), CONFIG, GRID, install=True)
    assert found is not None
    assert found.files == [out / "fsd.json", head / "fsd.json"]
    assert found.chosen == "T=0.05 r=0.3 tree 12-10-1"
    written, installed = (json.loads(file.read_text()) for file in found.files)
    report = json.loads((out / "report.json").read_text())
    assert written == installed == report["calibration"]
    assert report["conclusions"] == [found.conclusion]
    assert "on 13 questions that had no part in its selection" in found.conclusion
    assert [item["method"] for item in report["selection"]] == ["exact", found.chosen]
    assert [item["answers"] for item in report["selection"]] == [3, 3]
    assert [item["answers"] for item in report["rows"]] == [13, 13]
    assert [item["settings"]["depth"] for item in report["rows"]] == [8, 10]
    speeds = [item["speed_over_exact"] for item in report["selection"]]
    assert speeds == [item["speed_over_exact"] for item in report["rows"]]
    assert speeds[0] == pytest.approx(1.0)
    assert found.conclusion in (out / "report.md").read_text()
    about = written["about"]
    (test,) = about["tested"]
    assert (about["max_drop_points"], test["method"]) == (37.0, found.chosen)
    assert (test["paired"], test["certified"]) == (13, True)
    assert 0 < test["drop_is_below_points"] <= 37.0
    assert (about["confidence"], about["count"], about["seed"]) == (0.95, 13, 1)
    assert (about["batch"], about["answer_batch"]) == (1, 12)
    assert (report["about"]["batch"], report["about"]["answer_batch"]) == (1, 12)
    assert about["environment"]["revision"]
    settings = read_settings(out / "fsd.json")
    model = EagleFSD.from_pretrained(BUNDLED_TARGET, head)
    assert (model.tree, model.exact_tree) == (TREE, EXACT_TREE)
    assert model.acceptance == AcceptanceConfig(threshold=0.05, min_ratio=0.3)
    assert settings.drafter is not None
    assert settings.drafter.name == str(head)


@pytest.mark.usefixtures("fresh_accelerator", "planned")
def test_speeds_are_those_of_compiled_passes_if_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers, which are decoded in batches, are not."""
    raced: list[bool] = []

    def race_settings(workload: Workload, *_: object) -> tuple[Method, dict[str, Any]]:
        raced.append(workload.model.compile is True)
        workload.model.compile = False  # nothing is compiled in this test
        return replace(methods.EXACT, tree=EXACT_TREE), {}

    monkeypatch.setattr(calibration, "race_settings", race_settings)
    request = EvaluationRequest(count=5, out=tmp_path, compile=True)
    found = calibrate(request, LossBounds(max_drop=50.0), CONFIG, GRID, rules=False)
    assert found is not None
    assert raced == [True]
    assert {item["compiled"] for item in found.report["sessions"].values()} == {False}
    assert found.report["calibration"]["about"]["compiled"] is True
    assert ", compiled (answers: not compiled);" in footnote(found.report)


@pytest.mark.usefixtures("fresh_accelerator", "planned")
def test_a_report_shows_one_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the confidence of each of two tests, the second of which is not necessary."""

    def run_evaluation(*arguments: Any) -> dict[str, Any]:
        rows = [make_row(method.name, 1.0, lost=1) for method in arguments[2]]
        report = make_report(rows)
        arguments[5].on_report(None, report)
        return report

    settings = [Setting(Method(name, tree=TREE), name, 1.5) for name in ("a", "b")]
    speeds = {name: {key: make_row(name, 1.5)[key] for key in SPEED_FIELDS} for name in ("a", "b")}
    exact = replace(methods.EXACT, tree=EXACT_TREE)
    monkeypatch.setattr(calibration, "plan_settings", lambda *_: settings)
    monkeypatch.setattr(calibration, "race_settings", lambda *_: (exact, speeds))
    monkeypatch.setattr(calibration, "run_evaluation", run_evaluation)
    request = EvaluationRequest(count=10, out=tmp_path)
    found = calibrate(request, LossBounds(max_drop=20.0, confidence=0.8), CONFIG, GRID)
    assert found is not None
    assert found.chosen == "a"
    text, bound = report_text(found.report), f"{points_text(loss_bound(1, 0, 100, 0.9))} points"
    assert f"loses at most {bound} of accuracy" in found.conclusion
    assert re.findall(r"[0-9.]+ points", text) == [bound, bound]  # sentence and table
    assert "at 80% confidence for all methods at once (90% for each)." in text


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerator", "planned")
def test_a_chosen_rule_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pair decodes by it wherever no threshold is given."""
    method = replace(rule_method("margin"), name="margin tree 12-10-1", tree=TREE)
    monkeypatch.setattr(calibration, "plan_settings", lambda *_: [Setting(method, "margin", 1.5)])
    request = EvaluationRequest(count=16, out=tmp_path)
    found = calibrate(request, LossBounds(max_drop=37.0), CONFIG, GRID)
    assert found is not None
    assert found.chosen == method.name
    settings = read_settings(tmp_path / "fsd.json")
    assert settings.acceptance["rule"] == "margin"
    model = EagleFSD.from_pretrained()
    model.configure(settings)
    assert model.acceptance == AcceptanceConfig(rule="margin")
    assert (model.tree_for(model.acceptance), model.exact_tree) == (TREE, EXACT_TREE)
    messages = [{"role": "user", "content": QUESTION}]
    prompt = encode_prompt(messages, model.tokenizer, load_chat_template(model.tokenizer))
    own, same, exact = (
        model.generate(prompt, max_new_tokens=96, **options)
        for options in ({}, {"rule": MarginRule()}, {"threshold": 0.0})
    )
    assert torch.equal(own.sequences, same.sequences)
    assert int(Origin.FUZZY) in own.origins
    assert int(Origin.FUZZY) not in exact.origins


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerator", "planned")
def test_the_next_setting_is_tested_if_the_first_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the same questions, at the confidence of each of two tests; a third one is not reached."""
    names = ["fast", "slow", "unused"]
    settings = [
        Setting(Method(name, {"threshold": 0.05 - 0.01 * at}, tree=TREE), name, 1.5)
        for at, name in enumerate(names)
    ]
    monkeypatch.setattr(calibration, "plan_settings", lambda *_: settings)
    monkeypatch.setattr(
        calibration,
        "certify",
        lambda row, bounds, tests: replace(
            certify(row, bounds, tests), certified=row["method"] != "fast"
        ),
    )
    request = EvaluationRequest(count=8, out=tmp_path)
    found = calibrate(request, LossBounds(max_drop=50.0), CONFIG, GRID)
    assert found is not None
    assert found.chosen == "slow"
    assert [row["answers"] for row in found.report["rows"]] == [6, 6, 6]
    tests = found.report["calibration"]["about"]["tested"]
    assert [(item["method"], item["certified"]) for item in tests] == [
        ("fast", False),
        ("slow", True),
    ]
    assert tests[0]["drop_is_below_points"] == pytest.approx(
        100 * loss_bound(0, 0, 6, confidence_per_test(0.95, 3))
    )
    assert "fast was tested before and is not certified" in found.conclusion
    assert read_settings(tmp_path / "fsd.json").acceptance["threshold"] == pytest.approx(0.04)
    assert not (tmp_path / "unused.jsonl").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerator", "planned", "judge_data")
def test_a_calibration_for_several_prompts_is_judged_in_pairs(
    stub: StubJudge, tmp_path: Path
) -> None:
    """Its lossless tree is for that number of prompts, and what it had for others is kept."""
    stub.reply_with(lambda _: "[[C]]")
    request = pairwise_request(stub, 8, tmp_path / "out")
    single, eight = TREE.updated(total_tokens=8, depth=6), TREE.updated(total_tokens=4, depth=2)
    settings = Settings(exact=single, batch={"2": single, "8": eight})
    config = CONFIG.updated(batch=2)
    found = calibrate(request, LossBounds(max_drop=50.0), config, GRID, settings=settings)
    assert found is not None
    exact, fuzzy = found.report["rows"]
    assert exact["judge"] is None
    assert fuzzy["judge"]["pairs"]["tied"] == fuzzy["judge"]["pairs"]["questions"] == 6
    written = read_settings(tmp_path / "out" / "fsd.json")
    assert written.exact == single
    assert written.batch == {"2": EXACT_TREE, "8": eight}
    about = found.report["calibration"]["about"]
    assert (about["batch"], about["answer_batch"]) == (2, 12)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerator", "planned")
def test_exact_decoding_is_saved_if_nothing_is_selected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calibration, "choose_tests", lambda *_: [])
    request = EvaluationRequest(count=8, out=tmp_path)
    with caplog.at_level(logging.WARNING):
        found = calibrate(request, LossBounds(max_drop=0.0), CONFIG, GRID)
    assert found is not None
    assert found.chosen == "exact"
    assert read_settings(tmp_path / "fsd.json").acceptance["threshold"] == 0.0
    assert "6 fresh questions cannot show a loss" in caplog.text
    assert "none of 9 settings" in found.conclusion
    assert found.conclusion in (tmp_path / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerator", "planned")
def test_settings_for_another_engine_are_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file is written: fsd.json cannot hold the rule. The target thinks in its own words."""
    monkeypatch.setattr(engines, "THINKING", ("Step", "####"))
    candidates = {"exact": [Candidate(EXACT_TREE, 6.0, 700.0), Candidate(TREE, 5.0, 600.0)]}
    monkeypatch.setattr(TreePlan, "make", lambda *_, **__: TreePlan(EXACT_TREE, candidates))
    method = replace(candidate_methods(GRID, "tensorrt-llm", 0.0, False)[0], tree=TREE)
    monkeypatch.setattr(calibration, "plan_settings", lambda *_: [Setting(method, "relaxed", 1.5)])
    request = EvaluationRequest(count=16, out=tmp_path)
    found = calibrate(request, LossBounds(max_drop=37.0), CONFIG, GRID, engine="tensorrt-llm")
    assert found is not None
    assert found.files == []
    assert "relaxed_topk: 2" in found.report["flags"]
    assert "max_draft_len: 11" in found.report["flags"]
    assert "begin_thinking_phase_token: " in found.report["flags"]
    assert "TensorRT-LLM itself did not run, so the bound does not hold" in found.conclusion
    assert found.conclusion in (tmp_path / "report.md").read_text()
    assert {item["settings"]["depth"] for item in found.report["rows"]} == {TREE.depth}
    assert not (tmp_path / "fsd.json").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerator")
def test_calibrate_searches_settings_and_trees(tmp_path: Path) -> None:
    """All stages, on few questions; which setting wins depends on the machine."""
    request = EvaluationRequest(count=40, out=tmp_path)
    found = calibrate(request, LossBounds(max_drop=30.0), CONFIG, GRID)
    assert found is not None
    assert (tmp_path / "fsd.json").exists()
    assert {item["method"].partition(" tree ")[0] for item in found.report["selection"]} <= {
        *("exact", "T=0.05 r=0.3", "price 1.5", "price 0.75", *calibration.CALIBRATED_RULES)
    }
