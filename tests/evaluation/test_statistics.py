"""Confidence intervals, tests, and the exact bound on the loss of accuracy, by enumeration."""

from __future__ import annotations

import itertools
import math
from itertools import product

import numpy as np
import pytest
from scipy import stats

from eagle_fsd.evaluation.statistics import (
    is_loss_below,
    least_questions,
    loss_bound,
    mcnemar_p,
    mean,
    proportion_interval,
    speed_ratio,
)


def certified(count: int, loss: float, confidence: float) -> np.ndarray:
    """Return the largest certified number of losses for each number of gains; -1 for none."""
    largest = np.full(count + 1, -1)
    for gained in range(count + 1):
        if gained:
            largest[gained] = min(largest[gained - 1], count - gained)
        while largest[gained] < count - gained and is_loss_below(
            loss, int(largest[gained]) + 1, gained, count, confidence
        ):
            largest[gained] += 1
    return largest


def error(largest: np.ndarray, loss: float) -> float:
    """Return the probability of a set of outcomes at a loss, maximized over P(gained).

    An outcome's probability is that of its gains times that of its losses among the other pairs.
    """
    count = len(largest) - 1
    most, gained = (1 - loss) / 2, np.arange(count + 1)
    grid = np.unique([*np.linspace(0, most, 150), *np.geomspace(1e-3 / count, most, 150)])[:, None]
    lost = np.minimum((grid + loss) / (1 - grid), 1.0)
    inside = stats.binom.cdf(largest, count - gained, lost)
    return float((stats.binom.pmf(gained, count, grid) * inside).sum(1).max())


#: Pairs, loss, confidence, and length of a series, in pairwise combinations.
FAST = [
    *((100, 0.005, 0.8, 1), (100, 0.005, 0.99, 3), (100, 0.02, 0.8, 3), (100, 0.02, 0.95, 1)),
    *((100, 0.05, 0.95, 3), (100, 0.05, 0.99, 1), (200, 0.005, 0.8, 1), (200, 0.03, 0.95, 9)),
]
SLOW = [
    *((300, 0.005, 0.8, 9), (300, 0.02, 0.9, 9), (300, 0.05, 0.95, 9), (300, 0.02, 0.99, 9)),
    *((541, 0.005, 0.95, 4), (541, 0.05, 0.8, 1), (1000, 0.02, 0.8, 9)),
]


@pytest.mark.parametrize("cases", [FAST, pytest.param(SLOW, marks=pytest.mark.slow)])
def test_the_error_never_exceeds_the_stated_level(
    cases: list[tuple[int, float, float, int]],
) -> None:
    """Every series is tested at a share of the error; together they err at most as often."""
    for count, loss, confidence, series in cases:
        largest = certified(count, loss, 1 - (1 - confidence) / series)
        assert series * error(largest, loss) <= 1 - confidence + 1e-9
        assert largest.max() >= 0


def test_tangos_limit_alone_errs_too_often() -> None:
    """It certifies a loss below 0.5 points if nothing is lost; the exact bound does not."""
    for count, confidence, wrong in ((541, 0.95, 0.066), (200, 0.8, 0.367)):
        z = stats.norm.ppf(confidence)
        assert z * z / (count + z * z) < 0.005  # Tango's limit without discordant pairs
        assert (1 - 0.005) ** count == pytest.approx(wrong, abs=5e-4)
        assert not is_loss_below(0.005, 0, 0, count, confidence)


def test_the_bound_is_nearly_the_best_one() -> None:
    """No valid bound can be below the loss at which nothing is lost too rarely."""
    for count, confidence in product((100, 500, 2000), (0.8, 0.95, 0.99)):
        best = 1 - (1 - confidence) ** (1 / count)
        assert best <= loss_bound(0, 0, count, confidence) <= 1.15 * best
    # Clopper and Pearson's limit for the losses alone does not credit gains.
    for lost, gained, count in ((4, 4, 500), (12, 4, 2000), (30, 20, 800)):
        alone = float(stats.beta.ppf(0.95, lost + 1, count - lost))
        assert (lost - gained) / count < loss_bound(lost, gained, count) < 0.9 * alone


def test_both_functions_agree() -> None:
    for lost, gained, count in ((0, 0, 60), (3, 1, 60), (7, 12, 100)):
        bound = loss_bound(lost, gained, count)
        assert is_loss_below(bound, lost, gained, count)
        assert not is_loss_below(bound - 1e-5, lost, gained, count)
    for loss in (0.001, 0.002, 0.01):
        assert loss_bound(0, 0, least_questions(loss)) <= loss


def test_the_bound_is_monotone() -> None:
    bounds = np.array([[loss_bound(b, c, 100) for c in range(5)] for b in range(5)])
    assert (np.diff(bounds, axis=0) > 0).all()
    assert (np.diff(bounds, axis=1) < 0).all()
    by_confidence = [loss_bound(3, 1, 200, level) for level in (0.5, 0.8, 0.95, 0.99, 0.9999)]
    assert by_confidence == sorted(by_confidence)


def test_special_cases() -> None:
    assert loss_bound(0, 0, 0) == 1.0
    assert not is_loss_below(0.5, 0, 0, 0)
    assert loss_bound(100, 0, 100) == 1.0
    assert is_loss_below(1.0, 100, 0, 100)
    assert -0.5 < loss_bound(0, 50, 100) < -0.4
    assert loss_bound(0, 100, 100) == pytest.approx(-1 + 0.06, abs=0.03)
    assert loss_bound(0, 0, 1) == pytest.approx(0.95, abs=0.01)
    assert not math.isnan(loss_bound(1, 0, 1))


def test_proportion_interval_equals_tabulated_values() -> None:
    """Wilson (1927) gives 0.490 to 0.943 for 8 of 10 at 95 %."""
    low, high = proportion_interval(8, 10)
    assert low == pytest.approx(0.4902, abs=5e-4)
    assert high == pytest.approx(0.9433, abs=5e-4)
    assert proportion_interval(0, 20)[0] == 0.0
    assert proportion_interval(20, 20)[1] == 1.0


def test_mean_interval() -> None:
    found = mean([1.0, 2.0, 3.0, 4.0])
    assert found.value == 2.5
    half = 3.182446 * math.sqrt(5 / 3) / 2  # Student's t at 3 degrees of freedom
    assert found.interval == pytest.approx((2.5 - half, 2.5 + half), abs=1e-5)
    assert mean([2.0]).interval is None
    assert mean([2.0]).value == 2.0
    assert mean([]).as_dict("a") == {"a": None, "a_interval": None}


def test_mcnemar_equals_enumeration() -> None:
    """The p-value is the share of splits of the discordant pairs that are at least as uneven."""
    splits = [sum(bits) for bits in itertools.product((0, 1), repeat=8)]
    expected = sum(min(bits, 8 - bits) <= 1 for bits in splits) / len(splits)
    assert mcnemar_p(7, 1) == pytest.approx(expected)
    assert mcnemar_p(0, 0) == 1.0


def test_speed_ratio_and_its_coverage() -> None:
    other = np.array([[1.0, 10.0], [2.0, 20.0], [3.0, 33.0]])
    twice = speed_ratio(other * [0.5, 1.0], other)
    assert twice.value == pytest.approx(2.0)
    assert twice.interval == pytest.approx((2.0, 2.0))
    assert speed_ratio(other[:1], other[:1]).interval is None
    assert math.isnan(speed_ratio(other[:0], other[:0]).value)
    random, covered = np.random.default_rng(0), 0
    for _ in range(2000):
        tokens = random.integers(20, 120, 60).astype(float)
        plain = np.stack([tokens / 300 * random.lognormal(0, 0.1, 60), tokens], 1)
        fast = np.stack([tokens / 450 * random.lognormal(0, 0.1, 60), tokens], 1)
        low, high = speed_ratio(fast, plain).interval
        covered += low <= 1.5 <= high
    # With 2,000 samples the standard deviation of the coverage is 0.5 points.
    assert 0.925 <= covered / 2000 <= 0.975
