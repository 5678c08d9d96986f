"""Confidence intervals and tests."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from eagle_fsd.evaluation.statistics import Mean, Ratio, mcnemar_p, proportion_interval


def test_proportion_interval_equals_tabulated_values() -> None:
    """Wilson (1927) gives 0.490 to 0.943 for 8 of 10 at 95 %."""
    low, high = proportion_interval(8, 10)
    assert low == pytest.approx(0.4902, abs=5e-4)
    assert high == pytest.approx(0.9433, abs=5e-4)
    assert proportion_interval(0, 20)[0] == 0.0
    assert proportion_interval(20, 20)[1] == 1.0


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
    splits = [sum(bits) for bits in itertools.product((0, 1), repeat=8)]
    expected = sum(min(bits, 8 - bits) <= 1 for bits in splits) / len(splits)
    assert mcnemar_p(7, 1) == pytest.approx(expected)
    assert mcnemar_p(0, 0) == 1.0


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
