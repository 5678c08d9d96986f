"""Confidence intervals, tests and bounds."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from eagle_fsd.evaluation.statistics import (
    McNemar,
    Mean,
    Proportion,
    Ratio,
    loss_bound,
    mean_loss_bound,
    normal_quantile,
)


def test_proportion_interval_equals_tabulated_values() -> None:
    """Wilson (1927) gives 0.490 to 0.943 for 8 of 10 at 95 %."""
    low, high = Proportion(8, 10).interval
    assert low == pytest.approx(0.4902, abs=5e-4)
    assert high == pytest.approx(0.9433, abs=5e-4)
    assert Proportion(0, 20).interval[0] == 0.0
    assert Proportion(20, 20).interval[1] == 1.0
    assert math.isnan(Proportion(0, 0).value)


def test_mean_interval() -> None:
    mean = Mean.of([1.0, 2.0, 3.0, 4.0])
    assert mean.value == 2.5
    half = 3.182446 * math.sqrt(5 / 3) / 2  # Student's t at 3 degrees of freedom
    assert mean.interval == pytest.approx((2.5 - half, 2.5 + half), abs=1e-5)
    assert Mean.of([2.0]).interval is None
    assert Mean.of([2.0]).value == 2.0
    assert Mean.of([]).interval is None


def test_mcnemar_equals_enumeration() -> None:
    """The p-value is the share of splits of the discordant pairs that are at least as uneven."""
    first = [True] * 7 + [False] * 1 + [True] * 5 + [False] * 3
    second = [False] * 7 + [True] * 1 + [True] * 5 + [False] * 3
    found = McNemar.of(first, second)
    assert (found.lost, found.gained) == (7, 1)
    splits = [sum(bits) for bits in itertools.product((0, 1), repeat=8)]
    expected = sum(min(bits, 8 - bits) <= 1 for bits in splits) / len(splits)
    assert found.p_value == pytest.approx(expected)
    assert McNemar.of([True], [True]).p_value == 1.0


@pytest.mark.parametrize(
    ("lost", "gained", "count", "confidence"),
    [(0, 0, 100, 0.95), (5, 2, 500, 0.95), (3, 3, 200, 0.99), (0, 7, 300, 0.9)],
)
def test_loss_bound_inverts_tangos_test(
    lost: int, gained: int, count: int, confidence: float
) -> None:
    """At the bound the score statistic equals the normal quantile.

    The nuisance parameter's maximum-likelihood estimate is found by a grid search here.
    """
    bound = loss_bound(lost, gained, count, confidence)

    def log_likelihood(gain: float) -> float:
        same = 1 - 2 * gain - bound
        if gain < 0 or gain + bound < 0 or same <= 0:
            return -math.inf
        value = (count - lost - gained) * math.log(same)
        for pairs, probability in ((lost, gain + bound), (gained, gain)):
            if pairs:
                value += pairs * math.log(probability) if probability > 0 else -math.inf
        return value

    grid = [step / 400_000 for step in range(200_000)]
    gain = max(grid, key=log_likelihood)
    statistic = (lost - gained - count * bound) / math.sqrt(
        count * (2 * gain + bound * (1 - bound))
    )
    assert statistic == pytest.approx(-normal_quantile(confidence), rel=2e-3)


def test_loss_bound_in_closed_form() -> None:
    """Without discordant pairs it is z^2 / (n + z^2)."""
    z = 1.6448536269514722
    assert loss_bound(0, 0, 100) == pytest.approx(z * z / (100 + z * z))
    assert loss_bound(0, 0, 1000, 0.99) > loss_bound(0, 0, 1000, 0.9)
    assert loss_bound(0, 0, 0) == 1.0
    assert loss_bound(100, 0, 100) == pytest.approx(1.0)
    assert loss_bound(0, 50, 100) < 0


@pytest.mark.parametrize(
    ("count", "lose", "gain"), [(200, 0.01, 0.005), (500, 0.01, 1e-9), (300, 0.05, 0.03)]
)
def test_loss_bound_has_its_nominal_coverage(count: int, lose: float, gain: float) -> None:
    """The probability of all outcomes whose bound holds is 95 % within two points."""
    covered = total = 0.0
    for lost in range(50):
        for gained in range(40):
            same = count - lost - gained
            probability = math.exp(
                math.lgamma(count + 1)
                - sum(math.lgamma(part + 1) for part in (lost, gained, same))
                + lost * math.log(lose)
                + gained * math.log(gain)
                + same * math.log(1 - lose - gain)
            )
            if probability > 1e-9:
                total += probability
                covered += probability * (loss_bound(lost, gained, count) >= lose - gain)
    assert total == pytest.approx(1.0, abs=1e-5)
    assert 0.94 <= covered <= 0.97


def coverage(count: int, share: float, samples: int = 4000) -> tuple[float, float]:
    """Return how often the bound, and Student's t alone, hold for exponential losses of a share."""
    random = np.random.default_rng(0)
    held = student = 0
    for _ in range(samples):
        losses = np.where(random.random(count) < share, random.exponential(0.3, count), 0.0)
        held += mean_loss_bound(losses) >= share * 0.3
        half = stats.t.ppf(0.95, count - 1) * losses.std(ddof=1) / math.sqrt(count)
        student += losses.mean() + half >= share * 0.3
    return held / samples, student / samples


def test_mean_loss_bound_holds_for_rare_losses() -> None:
    """Its docstring states these figures. Student's t alone falls short."""
    held, student = coverage(200, 0.05)
    assert round(100 * held) == 97
    assert round(100 * student) == 85


@pytest.mark.slow
@pytest.mark.parametrize(("count", "share"), [(100, 0.05), (500, 0.05), (200, 0.5)])
def test_mean_loss_bound_has_about_its_nominal_coverage(count: int, share: float) -> None:
    """With 4,000 samples, a coverage of 94 % is below 92.5 % with probability below 1e-4."""
    assert coverage(count, share)[0] >= 0.925


def test_mean_loss_bound_of_special_cases() -> None:
    symmetrical = [float(value) for value in range(-20, 21)]
    deviation = np.std(symmetrical, ddof=1)
    student = stats.t.ppf(0.95, 40) * deviation / math.sqrt(41)
    assert mean_loss_bound(symmetrical) == pytest.approx(student)
    gains = [*[0.1] * 38, -5.0, -9.0]
    half = stats.t.ppf(0.95, 39) * np.std(gains, ddof=1) / math.sqrt(40)
    assert mean_loss_bound(gains) >= np.mean(gains) + half - 1e-12
    assert mean_loss_bound([0.25] * 30) == 0.25
    assert mean_loss_bound([0.0] * 500) == math.inf  # losses may be too rare for the sample
    assert mean_loss_bound([0.0] * 496 + [0.5] * 4) == math.inf
    assert mean_loss_bound([0.0] * 495 + [0.5] * 5) < 0.05
    assert mean_loss_bound(symmetrical, 0.99) > mean_loss_bound(symmetrical, 0.9)
    with pytest.raises(ValueError, match="at least 30 questions; got 29"):
        mean_loss_bound([0.0] * 29)


def test_speed_ratio_and_its_coverage() -> None:
    other = np.array([[1.0, 10.0], [2.0, 20.0], [3.0, 33.0]])
    twice = Ratio.of_speeds(other * [0.5, 1.0], other)
    assert twice.value == pytest.approx(2.0)
    assert twice.interval == pytest.approx((2.0, 2.0))
    assert Ratio.of_speeds(other[:1], other[:1]).interval is None
    assert math.isnan(Ratio.of_speeds(other[:0], other[:0]).value)
    random, covered = np.random.default_rng(0), 0
    for _ in range(2000):
        tokens = random.integers(20, 120, 60).astype(float)
        plain = np.stack([tokens / 300 * random.lognormal(0, 0.1, 60), tokens], 1)
        fast = np.stack([tokens / 450 * random.lognormal(0, 0.1, 60), tokens], 1)
        low, high = Ratio.of_speeds(fast, plain).interval
        covered += low <= 1.5 <= high
    # With 2,000 samples the standard deviation of the coverage is 0.5 points.
    assert 0.925 <= covered / 2000 <= 0.975
