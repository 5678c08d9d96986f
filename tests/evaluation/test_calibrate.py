"""Calibration: which settings are certified, which is chosen, and the file that is written."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from eagle_fsd import AcceptanceConfig, EagleFSD, OptionsError
from eagle_fsd.bundled import BUNDLED_HEAD, BUNDLED_TARGET
from eagle_fsd.evaluation.calibration import calibrate, certify, check_questions, fastest
from eagle_fsd.evaluation.config import (
    CalibrationConfig,
    CalibrationGrid,
    EvaluationRequest,
    LossBounds,
)
from eagle_fsd.evaluation.methods import fsd_series
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.statistics import loss_bound, mean_loss_bound
from eagle_fsd.model.config import read_settings


def row(method: str, speed: float, lost: int = 0, gained: int = 0) -> dict[str, Any]:
    return {
        "method": method,
        "tokens_per_second": speed,
        "speed_over_exact": speed / 100,
        "speed_over_exact_interval": [speed / 100 - 0.01, speed / 100 + 0.01],
        "against_exact": {"lost": lost, "gained": gained, "paired": 1000},
    }


def no_losses(_: str) -> list[float]:
    return [0.0] * 100


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
    verdicts = certify(rows, SERIES, LossBounds(max_drop=1.0), no_losses)
    assert [verdict.certified for verdict in verdicts] == [True, False, None, True, True, True]
    # The two series share the error of 5%.
    assert verdicts[0].drop == pytest.approx(100 * loss_bound(1, 1, 1000, 0.975))
    assert fastest(rows, verdicts)["method"] == "T=0.3 r=0.3"


def test_the_smallest_bound_wins_among_equal_speeds() -> None:
    rows = [EXACT, row("T=0.1", 149, 0, 0), row("T=0.2", 150, 2, 0), row("T=0.3", 151, 3, 0)]
    verdicts = certify(rows, SERIES[:1], LossBounds(max_drop=2.0), no_losses)
    assert all(verdict.certified for verdict in verdicts)
    assert fastest(rows, verdicts)["method"] == "T=0.1"


@pytest.mark.parametrize(
    "others",
    [
        [row("T=0.1", 90), row("T=0.2", 95), row("T=0.3", 96)],
        [row("T=0.1", 190, 9), row("T=0.2", 195, 9), row("T=0.3", 196, 9)],
        [{**row(f"T=0.{n}", 120), "speed_over_exact_interval": [0.9, 1.5]} for n in (1, 2, 3)],
    ],
    ids=["slower", "lossy", "noisy"],
)
def test_exact_decoding_is_chosen_if_nothing_certified_is_faster(
    others: list[dict[str, Any]],
) -> None:
    rows = [EXACT, *others]
    verdicts = certify(rows, SERIES[:1], LossBounds(max_drop=0.5), no_losses)
    assert fastest(rows, verdicts) is EXACT


def test_bounds_on_accuracy_and_nats_share_the_error() -> None:
    losses = [0.01 * (index % 3) for index in range(300)]
    rows, series = [EXACT, row("T=0.1", 120)], [SERIES[0][:1]]
    bound = mean_loss_bound(losses)
    (verdict,) = certify(rows, series, LossBounds(max_nats=bound + 1e-9), lambda _: losses)
    assert verdict.nats == bound
    assert verdict.drop is None
    assert verdict.certified
    bounds = LossBounds(max_drop=1.0, max_nats=bound + 1e-9)
    (both,) = certify(rows, series, bounds, lambda _: losses)
    assert both.nats == mean_loss_bound(losses, 0.975)
    assert not both.certified
    (less,) = certify(rows, series, LossBounds(max_nats=bound - 1e-9), lambda _: losses)
    assert not less.certified


@pytest.mark.parametrize(
    ("exact", "other", "words"),
    [
        ({}, {"speed_over_exact": None}, "not answered in one run"),
        ({}, {"tokens_per_second": None}, "no question was answered"),
        ({}, {"against_exact": {}}, r"no score.*--max-nats"),
        (
            {"accuracy": 0.02, "cut_off": 280},
            {},
            r"accuracy of exact decoding is only 2\.0%.*280 answers were cut off",
        ),
    ],
    ids=["sessions", "unanswered", "unscored", "inaccurate"],
)
def test_rows_that_cannot_be_certified_are_rejected(
    exact: dict[str, Any], other: dict[str, Any], words: str
) -> None:
    rows = [{**EXACT, **exact}, {**row("T=0.1", 120), **other}]
    with pytest.raises(ValueError, match=words):
        certify(rows, [SERIES[0][:1]], LossBounds(max_drop=0.5), no_losses)


def test_questions_are_checked_before_they_are_answered() -> None:
    scored = [Question(number, "c", ("?",), "number", "1") for number in range(100)]
    assert check_questions(LossBounds(max_drop=4.0), scored, 2, False) is None
    warning = check_questions(LossBounds(max_drop=0.5), scored, 2, False)
    assert warning is not None
    assert "100 questions cannot show a loss below 3.70 points" in warning
    with pytest.raises(ValueError, match="have no score; use --max-nats"):
        check_questions(LossBounds(max_drop=0.5), [Question(0, "c", ("?",))], 2, False)
    code = [Question(0, "c", ("?",), "code", "")]
    with pytest.raises(ValueError, match="--execute-code"):
        check_questions(LossBounds(max_drop=0.5), code, 2, False)
    assert check_questions(LossBounds(max_drop=100.0), code, 2, True) is None
    with pytest.raises(ValueError, match="at least 30 questions; got 29"):
        check_questions(LossBounds(max_nats=0.1), scored[:29], 2, False)
    with pytest.raises(ValueError, match="at least 30 questions; got 29"):
        check_questions(LossBounds(max_drop=50.0, max_nats=0.1), scored[:29], 2, False)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "requires a bound: --max-drop or --max-nats"),
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


# -- runs on the bundled pair ----------------------------------------------------------------------

CONFIG = CalibrationConfig(max_new_tokens=8, batch=15)


@pytest.mark.usefixtures("fresh_accelerator")
def test_calibrate_writes_settings_that_the_pair_loads(tmp_path: Path) -> None:
    out, head = tmp_path / "out", tmp_path / "head"
    shutil.copytree(BUNDLED_HEAD, head)
    request = EvaluationRequest(count=30, out=out, drafter=str(head), target=str(BUNDLED_TARGET))
    grid = CalibrationGrid(thresholds=(0.4,), min_ratios=(0.0,))
    found = calibrate(request, LossBounds(max_nats=10.0), CONFIG, grid, install=True)
    assert found is not None
    assert found.files == [out / "fsd.json", head / "fsd.json"]
    assert found.chosen in ("exact", "T=0.4")
    assert found.table[1][0][-1] == "within the bound"
    written = json.loads((out / "fsd.json").read_text())
    assert written == json.loads((head / "fsd.json").read_text())
    report = json.loads((out / "report.json").read_text())
    assert report["calibration"] == written
    assert "within the bound" in (out / "report.md").read_text()
    about = written["about"]
    assert (about["max_drop_points"], about["max_nats_a_token"]) == (None, 10.0)
    assert (about["confidence"], about["count"], about["seed"]) == (0.95, 30, 1)
    assert (about["batch"], about["sessions"]) == (15, 1)
    assert about["environment"]["revision"]
    for name in ("total_tokens", "depth", "top_k"):
        assert written[name] == report["settings"][name]
    settings = read_settings(out / "fsd.json")
    model = EagleFSD.from_pretrained(BUNDLED_TARGET, head)
    assert model.acceptance == AcceptanceConfig().updated(**settings.acceptance)
    assert model.tree.model_dump() == settings.tree
    assert settings.acceptance["threshold"] == (0.4 if found.chosen == "T=0.4" else 0.0)


@pytest.mark.usefixtures("fresh_accelerator")
def test_exact_decoding_is_saved_if_nothing_is_certified(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = CalibrationGrid(thresholds=(0.4,), min_ratios=(0.0,))
    request = EvaluationRequest(count=30, out=tmp_path)
    with caplog.at_level(logging.WARNING):
        found = calibrate(request, LossBounds(max_nats=0.0), CONFIG, grid)
    assert found is not None
    assert found.chosen == "exact"
    assert read_settings(tmp_path / "fsd.json").acceptance["threshold"] == 0.0
    assert not caplog.records
