"""Calibration: which settings are certified, which is chosen, and the file that comes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle_fsd.evaluation.calibration import Allowed, certify, fastest
from eagle_fsd.evaluation.methods import fsd_groups
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.statistics import loss_bound, mean_loss_bound
from eagle_fsd.model.config import FSDSettings, read_settings

Command = Callable[..., tuple[int, str, str]]


def row(method: str, speed: float, lost: int = 0, gained: int = 0, **more: Any) -> dict[str, Any]:
    against = {"lost": lost, "gained": gained, "paired": 1000, **more}
    return {
        "method": method,
        "tokens_per_second": speed,
        "speed_over_exact": speed / 100,
        "speed_over_exact_interval": [speed / 100 - 0.01, speed / 100 + 0.01],
        "against_exact": against,
    }


def nothing(_: str) -> list[float]:
    return [0.0] * 100


SERIES = list(fsd_groups([0.1, 0.2, 0.3], [0.0, 0.3], ["js"]).values())
EXACT = {
    "method": "exact",
    "tokens_per_second": 100.0,
    "speed_over_exact": 1.0,
    "speed_over_exact_interval": None,
    "accuracy": 0.9,
    "cut_off": 0,
}


def test_a_series_ends_at_its_first_failure() -> None:
    """T = 0.2 loses too much; T = 0.3 looks harmless but is not tried any more."""
    rows = [
        EXACT,
        row("T=0.1", 110, 1, 1),
        row("T=0.2", 120, 30, 1),
        row("T=0.3", 150, 0, 0),
        row("T=0.1 r=0.3", 105),
        row("T=0.2 r=0.3", 115),
        row("T=0.3 r=0.3", 118, 1, 2),
    ]
    verdicts = certify(rows, SERIES, Allowed(max_drop=1.0), nothing)
    assert [verdict.certified for verdict in verdicts] == [True, False, None, True, True, True]
    # Two series share the error of five per cent.
    assert verdicts[0].drop == pytest.approx(100 * loss_bound(1, 1, 1000, 0.975))
    assert fastest(rows, verdicts)["method"] == "T=0.3 r=0.3"


def test_among_equal_speeds_the_smallest_bound_wins() -> None:
    rows = [EXACT]
    rows += [row("T=0.1", 149, 0, 0), row("T=0.2", 150, 2, 0), row("T=0.3", 151, 3, 0)]
    verdicts = certify(rows, SERIES[:1], Allowed(max_drop=2.0), nothing)
    assert all(verdict.certified for verdict in verdicts)
    assert fastest(rows, verdicts)["method"] == "T=0.1"


def test_exact_decoding_where_nothing_is_certified_or_faster() -> None:
    slower = [EXACT, row("T=0.1", 90), row("T=0.2", 95), row("T=0.3", 96)]
    assert fastest(slower, certify(slower, SERIES[:1], Allowed(), nothing)) is EXACT
    lossy = [EXACT, row("T=0.1", 190, 9), row("T=0.2", 195, 9), row("T=0.3", 196, 9)]
    assert fastest(lossy, certify(lossy, SERIES[:1], Allowed(), nothing)) is EXACT


def test_nats_are_bounded_too_and_both_bounds_share_the_error() -> None:
    losses = [0.01 * (at % 3) for at in range(300)]
    rows, series = [EXACT, row("T=0.1", 120)], [SERIES[0][:1]]
    bound = mean_loss_bound(losses)
    (verdict,) = certify(rows, series, Allowed(None, bound + 1e-9), lambda _: losses)
    assert verdict.nats == bound
    assert verdict.drop is None
    assert verdict.certified
    (both,) = certify(rows, series, Allowed(1.0, bound + 1e-9), lambda _: losses)
    assert both.nats == mean_loss_bound(losses, 0.975)
    assert not both.certified
    (less,) = certify(rows, series, Allowed(None, bound - 1e-9), lambda _: losses)
    assert not less.certified


def test_speeds_of_different_runs_are_not_compared() -> None:
    rows = [EXACT, {**row("T=0.1", 120), "speed_over_exact": None}]
    with pytest.raises(ValueError, match="not answered in one run"):
        certify(rows, [SERIES[0][:1]], Allowed(), nothing)


def test_faster_is_faster_by_more_than_chance() -> None:
    noisy = {**row("T=0.1", 120), "speed_over_exact_interval": [0.9, 1.5]}
    verdicts = certify([EXACT, noisy], [SERIES[0][:1]], Allowed(max_drop=2.0), nothing)
    assert verdicts[0].certified
    assert fastest([EXACT, noisy], verdicts) is EXACT


def test_where_there_is_little_to_lose_nothing_is_certified() -> None:
    """Answers in another format, or cut off: whatever is tried loses nothing then."""
    lost = {**EXACT, "accuracy": 0.02, "cut_off": 280}
    with pytest.raises(ValueError, match=r"right in 2\.0 % of.*280 answers were cut"):
        certify([lost, row("T=0.1", 120)], [SERIES[0][:1]], Allowed(max_drop=1.0), nothing)


def test_questions_are_looked_at_before_they_are_answered() -> None:
    numbered = [Question(at, "c", ("?",), "number", "1") for at in range(100)]
    assert Allowed(max_drop=4.0).check(numbered, 2, False) is None
    warning = Allowed(max_drop=0.5).check(numbered, 2, False)
    assert "100 questions cannot show a loss below 3.70 points" in warning
    with pytest.raises(ValueError, match="no score of their own"):
        Allowed().check([Question(0, "c", ("?",))], 2, False)
    code = [Question(0, "c", ("?",), "code", "")]
    with pytest.raises(ValueError, match="--execute-code"):
        Allowed().check(code, 2, False)
    assert Allowed(max_drop=100.0).check(code, 2, True) is None
    with pytest.raises(ValueError, match="30 questions at least; there are 29"):
        Allowed(None, 0.1).check(numbered[:29], 2, False)


def test_a_drop_needs_a_score() -> None:
    unscored = {**row("T=0.1", 120), "against_exact": {}}
    with pytest.raises(ValueError, match=r"no score of their own.*--max-nats"):
        certify([EXACT, unscored], [SERIES[0][:1]], Allowed(), nothing)


@pytest.mark.parametrize(
    "values", [{"max_drop": None}, {"confidence": 1.0}, {"confidence": float("nan")}]
)
def test_bounds_are_checked(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"calibration needs|confidence must"):
        Allowed(**values)


GRID = ("--thresholds", "0.05", "0.2", "--min-ratio", "0.3")


def test_the_command_writes_settings_that_every_command_takes(tmp_path: Path, run: Command) -> None:
    """So small a sample certifies what a bound of 40 points allows."""
    out = tmp_path / "out"
    command = ("calibrate", "--max-drop", 40, "--count", 8, "--batch", 8, *GRID, "--out", out)
    status, printed, told = run(*command)
    assert status == 0
    assert "within the bound" in printed
    assert f"{out}/fsd.json" in told.replace("\n", "")
    found = json.loads((out / "fsd.json").read_text())
    about = found["about"]
    assert about["max_drop_points"] == 40.0
    assert about["confidence"] == 0.95
    assert about["count"] == 8
    assert about["seed"] == 1
    assert about["environment"]["revision"]
    assert about["batch"] == 8
    assert about["sessions"] == 1
    tree = {name: found[name] for name in ("total_tokens", "depth", "top_k")}
    report = json.loads((out / "report.json").read_text())
    assert tree == {name: report["settings"][name] for name in tree}
    settings = read_settings(out / "fsd.json")
    FSDSettings.from_dict(settings)
    assert settings["threshold"] in (0.0, 0.05, 0.2)
    told = run("generate", "--settings", out / "fsd.json", "--json", "Hello!")[1]
    assert json.loads(told)["settings"]["threshold"] == settings["threshold"]
    assert json.loads((out / "report.json").read_text())["calibration"] == found
    assert "within the bound" in (out / "report.md").read_text()


def test_what_cannot_be_certified_is_exact_decoding(tmp_path: Path, run: Command) -> None:
    command = ("calibrate", "--max-drop", 0.5, "--count", 4, "--batch", 4, *GRID)
    status, printed, _ = run(*command, "--out", tmp_path)
    assert status == 0
    assert "Chosen: exact." in printed
    assert read_settings(tmp_path / "fsd.json")["threshold"] == 0.0


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ((), 2, "--max-drop"),
        (("--max-drop", "0.5", "--head", "nowhere", "--install"), 2, "--install needs a head"),
        (("--max-drop", "0.5", "-T", "-1"), 2, "threshold must be at least 0"),
        (("--max-drop", "0.5", "-d", "nonsense"), 2, "divergence must be one of"),
        (("--max-drop", "0.5", "-r", "2"), 2, "min_ratio must be between 0 and 1"),
        (("--max-drop", "101"), 2, "max-drop"),
        (("--max-drop", "1", "-T", "0"), 2, "nothing to choose from"),
        (("--max-nats", "1", "--count", "10"), 1, "30 questions at least"),
        (("--max-drop", "0.5", "no-such-set"), 1, "neither a file nor a known set"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], status: int, words: str, tmp_path: Path, run: Command
) -> None:
    found, _, errors = run("calibrate", *arguments, "--out", tmp_path / "out")
    assert found == status
    assert len(errors.splitlines()) == 1
    assert words in errors
