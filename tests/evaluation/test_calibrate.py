"""Calibration: which settings are certified, which is chosen, and the file that is written."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_fsd import AcceptanceConfig, EagleFSD, OptionsError, TreeConfig
from eagle_fsd.bundled import BUNDLED_HEAD, BUNDLED_TARGET
from eagle_fsd.evaluation import calibration
from eagle_fsd.evaluation.calibration import (
    Setting,
    add_rows,
    calibrate,
    candidate_methods,
    certify,
    check_accuracy,
    check_questions,
    conclude,
    drop_settings,
    plan_settings,
    remove_questions,
    select,
)
from eagle_fsd.evaluation.config import (
    CalibrationConfig,
    CalibrationGrid,
    EvaluationRequest,
    LossBounds,
)
from eagle_fsd.evaluation.methods import Method, fsd_series
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.statistics import is_loss_below, loss_bound
from eagle_fsd.evaluation.tuning.candidates import Candidate
from eagle_fsd.evaluation.tuning.search import TreePlan
from eagle_fsd.model.config import read_settings

Run = Callable[..., tuple[int, str, str]]


def row(method: str, speed: float, lost: int = 0, gained: int = 0) -> dict[str, Any]:
    return {
        "method": method,
        "tokens_per_second": speed,
        "speed_over_exact": speed / 100,
        "speed_over_exact_interval": [speed / 100 - 0.01, speed / 100 + 0.01],
        "against_exact": {"lost": lost, "gained": gained, "paired": 1000},
    }


SERIES = list(
    fsd_series(CalibrationGrid(thresholds=(0.1, 0.2, 0.3), min_ratios=(0.0, 0.3))).values()
)
EXACT = {
    "method": "exact",
    "tokens_per_second": 100.0,
    "speed_over_exact": 1.0,
    "speed_over_exact_interval": None,
    "accuracy": 0.9,
    "cut_off": 0,
}


def test_the_first_failure_ends_a_series() -> None:
    """T = 0.2 loses too much, so T = 0.3 is not tested, however harmless it looks."""
    rows = [
        EXACT,
        row("T=0.1", 110, 1, 1),
        row("T=0.2", 120, 30, 1),
        row("T=0.3", 150, 0, 0),
        row("T=0.1 r=0.3", 105),
        row("T=0.2 r=0.3", 115),
        row("T=0.3 r=0.3", 118, 1, 2),
    ]
    verdicts = certify(rows, SERIES, 1.0, 0.95)
    assert [verdict.certified for verdict in verdicts] == [True, False, None, True, True, True]
    # The two series share the error of 5%.
    assert verdicts[0].drop == pytest.approx(100 * loss_bound(1, 1, 1000, 0.975))


def test_the_fastest_setting_that_is_likely_to_be_certified_is_selected() -> None:
    """T = 0.3 loses too much. T = 0.2 loses 3 of 1,000: about 12 of 3,000 fresh questions."""
    rows = [EXACT, row("T=0.1", 120), row("T=0.2", 150, 3, 0), row("T=0.3", 200, 30, 1)]
    assert select(rows, 1.0, 0.95, 3000)["method"] == "T=0.2"
    assert select(rows, 5.0, 0.95, 3000)["method"] == "T=0.3"
    assert select(rows, 0.3, 0.95, 3000)["method"] == "T=0.1"


def test_the_smallest_loss_wins_among_equal_speeds() -> None:
    rows = [EXACT, row("T=0.1", 149, 0, 0), row("T=0.2", 150, 2, 0), row("T=0.3", 151, 3, 0)]
    assert select(rows, 2.0, 0.95, 3000)["method"] == "T=0.1"


@pytest.mark.parametrize(
    "others",
    [
        [row("T=0.1", 90), row("T=0.2", 95), row("T=0.3", 96)],
        [row("T=0.1", 190, 9), row("T=0.2", 195, 9), row("T=0.3", 196, 9)],
        [{**row(f"T=0.{n}", 120), "speed_over_exact_interval": [0.9, 1.5]} for n in (1, 2, 3)],
    ],
    ids=["slower", "lossy", "noisy"],
)
def test_exact_decoding_is_selected_if_nothing_else_qualifies(
    others: list[dict[str, Any]],
) -> None:
    assert select([EXACT, *others], 0.5, 0.95, 3000) is EXACT


def test_gains_that_exceed_the_fresh_questions_are_allowed() -> None:
    all_gained = {**row("T=0.1", 150), "against_exact": {"lost": 0, "gained": 4, "paired": 4}}
    assert select([EXACT, all_gained], 40.0, 0.95, 12)["method"] == "T=0.1"


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


def test_the_conclusion_states_the_bound() -> None:
    bounds = LossBounds(max_drop=1.0)
    (good,) = certify([EXACT, row("T=0.1", 150, 2, 1)], [SERIES[0][:1]], 1.0, 0.95)
    (bad,) = certify([EXACT, row("T=0.1", 150, 12, 1)], [SERIES[0][:1]], 1.0, 0.95)
    assert conclude(good, bounds, 9) == (
        "T=0.1, 1.50 times exact decoding: on 1000 questions that had no part in its selection, it"
        " lost 2 answers and gained 1, so that with 95% confidence it loses at most"
        f" {good.drop:.2f} points of accuracy relative to exact decoding."
    )
    assert good.drop < 1.0 < bad.drop
    assert conclude(bad, bounds, 9).startswith("Exact decoding: T=0.1 is not certified; on 1000")
    assert conclude(bad, bounds, 9).endswith(
        f"{bad.drop:.2f} points of accuracy relative to exact decoding, not 1 points."
    )
    assert "none of 9 settings" in conclude(None, bounds, 9)


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
    """Settings, fastest first."""
    return [Setting(Method(name), 1000.0 - at) for at, name in enumerate(names)]


def test_settings_that_clearly_lose_too_much_are_dropped() -> None:
    """Of 50 questions, 4 losses may be bad luck at a bound of 5 points, 12 are not."""
    rows = {
        name: {"against_exact": {"lost": lost, "gained": 0, "paired": 50}}
        for name, lost in (("a", 12), ("b", 4), ("c", 0), ("d", 0))
    }
    bounds = LossBounds(max_drop=5.0)

    def kept(count: int) -> list[str]:
        return [item.name for item in drop_settings(plan(*"abcd"), rows, bounds, 1500, count)]

    assert kept(4) == ["b", "c", "d"]
    # Those that are likely to be certified come first, then the fastest.
    assert kept(2) == ["c", "d"]
    assert kept(1) == ["c"]


def test_dropping_settings_early_does_not_affect_the_certificate() -> None:
    """Settings lose 4 points, the bound is 1: the luckiest survivor fails on fresh questions.

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
        (verdict,) = certify([EXACT, fresh], [[item.method]], 1.0, 0.95)
        assert not verdict.certified


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
    assert [item.name for item in plan_settings(*found, None)] == names
    chains = [item.name for item in plan_settings(*found, "tensorrt-llm")]
    assert chains == ["a tree 28-26-1", "b tree 12-10-1"]


def test_candidates_include_priced_paths_or_are_an_engines() -> None:
    grid = CalibrationGrid(thresholds=(0.05, 0.1), min_ratios=(0.3,))
    names = [method.name for method in candidate_methods(grid, None, 0.0)]
    assert names == ["T=0.05 r=0.3", "T=0.1 r=0.3", "price 1.5", "price 0.75"]
    assert len(candidate_methods(grid, "tensorrt-llm", 0.0)) == 15
    with pytest.raises(OptionsError, match="set a --temperature above 0; got 0"):
        candidate_methods(grid, "sglang", 0.0)


def test_rows_without_a_score_are_rejected() -> None:
    rows = [EXACT, {**row("T=0.1", 120), "against_exact": {}}]
    with pytest.raises(ValueError, match="have no score"):
        certify(rows, [SERIES[0][:1]], 0.5, 0.95)


def test_questions_are_checked_before_they_are_answered() -> None:
    scored = [Question(number, "c", ("?",), "number", "1") for number in range(100)]
    assert check_questions(3.0, 0.95, scored, False) is None
    warning = check_questions(0.5, 0.95, scored, False)
    assert warning is not None
    assert "100 fresh questions cannot show a loss below 2.96 points" in warning
    with pytest.raises(ValueError, match="have no score"):
        check_questions(0.5, 0.95, [Question(0, "c", ("?",))], False)
    code = [Question(0, "c", ("?",), "code", "")]
    with pytest.raises(ValueError, match="--execute-code"):
        check_questions(0.5, 0.95, code, False)
    assert check_questions(100.0, 0.95, code, True) is None


def test_used_questions_are_removed_whatever_their_ids() -> None:
    questions = [Question(number, "c", (text,)) for number, text in enumerate("abcad")]
    used = [Question(7, "c", ("a",)), Question(8, "c", ("c",))]
    assert [item.question_id for item in remove_questions(questions, used)] == [1, 4]


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
    monkeypatch.setattr(TreePlan, "make", lambda *_: TreePlan(EXACT_TREE, {}))
    monkeypatch.setattr(calibration, "plan_settings", lambda *_: [Setting(method, 1000.0)])
    monkeypatch.setattr(calibration, "select", lambda rows, *_: rows[1])
    monkeypatch.setattr(calibration, "RACE_GROUPS", 2)


@pytest.mark.usefixtures("fresh_accelerator", "planned")
def test_calibrate_writes_settings_that_the_pair_loads(tmp_path: Path) -> None:
    """Four questions select the setting, and twelve others certify it."""
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
    assert "on 12 questions that had no part in its selection" in found.conclusion
    assert [item["method"] for item in report["selection"]] == ["exact", found.chosen]
    assert [item["answers"] for item in report["selection"]] == [4, 4]
    assert [item["answers"] for item in report["rows"]] == [12, 12]
    assert [item["settings"]["depth"] for item in report["rows"]] == [8, 10]
    speeds = [item["speed_over_exact"] for item in report["selection"]]
    assert speeds == [item["speed_over_exact"] for item in report["rows"]]
    assert speeds[0] == 1.0
    assert found.conclusion in (out / "report.md").read_text()
    about = written["about"]
    assert (about["max_drop_points"], about["tested"]) == (37.0, found.chosen)
    assert about["certified_on"]["paired"] == 12
    assert 0 < about["drop_is_below_points"] <= 37.0
    assert (about["confidence"], about["count"], about["seed"]) == (0.95, 12, 1)
    assert about["environment"]["revision"]
    settings = read_settings(out / "fsd.json")
    model = EagleFSD.from_pretrained(BUNDLED_TARGET, head)
    assert (model.tree, model.exact_tree) == (TREE, EXACT_TREE)
    assert model.acceptance == AcceptanceConfig(threshold=0.05, min_ratio=0.3)
    assert settings.drafter is not None
    assert settings.drafter.name == str(head)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerator", "planned")
def test_exact_decoding_is_saved_if_nothing_is_selected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calibration, "select", lambda rows, *_: rows[0])
    request = EvaluationRequest(count=8, out=tmp_path)
    with caplog.at_level(logging.WARNING):
        found = calibrate(request, LossBounds(max_drop=0.0), CONFIG, GRID)
    assert found is not None
    assert found.chosen == "exact"
    assert read_settings(tmp_path / "fsd.json").acceptance["threshold"] == 0.0
    assert "6 fresh questions cannot show a loss" in caplog.text
    assert "none of 3 settings" in found.conclusion
    assert found.conclusion in (tmp_path / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerator", "planned")
def test_settings_for_another_engine_are_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file is written: fsd.json cannot hold the rule."""
    method = replace(candidate_methods(GRID, "tensorrt-llm", 0.0)[0], tree=TREE)
    monkeypatch.setattr(calibration, "plan_settings", lambda *_: [Setting(method, 1000.0)])
    request = EvaluationRequest(count=16, out=tmp_path)
    found = calibrate(request, LossBounds(max_drop=37.0), CONFIG, GRID, engine="tensorrt-llm")
    assert found is not None
    assert found.files == []
    assert "relaxed_topk: 2" in found.report["flags"]
    assert "max_draft_len: 11" in found.report["flags"]
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
        *("exact", "T=0.05 r=0.3", "price 1.5", "price 0.75")
    }
