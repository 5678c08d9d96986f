"""Confidence intervals and tests for scores, and bounds on the loss of quality."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from scipy import optimize, special, stats

Interval = tuple[float, float]


def proportion_interval(right: int, count: int) -> Interval:
    """Return the 95% confidence interval of a proportion (Wilson's score interval)."""
    interval = stats.binomtest(right, count).proportion_ci(0.95, method="wilson")
    return float(interval.low), float(interval.high)


@dataclass(frozen=True)
class Estimate:
    """A mean or a ratio with a 95% confidence interval; NaN and None with too few values."""

    value: float = math.nan
    interval: Interval | None = None

    def as_dict(self, name: str) -> dict[str, Any]:
        """Return the value, None for NaN, and its interval as ``{name}_interval``."""
        value = None if math.isnan(self.value) else self.value
        return {name: value, f"{name}_interval": self.interval}

    def __str__(self) -> str:
        """Format a ratio."""
        if self.interval is None:
            return f"{self.value:.2f} times"
        return "{:.2f} times ({:.2f} to {:.2f})".format(self.value, *self.interval)


def mean(values: Sequence[float]) -> Estimate:
    """Estimate a mean from a sample (Student's t)."""
    if len(values) < 2:
        return Estimate(float(values[0]) if values else math.nan)
    value, deviation = float(np.mean(values)), float(np.std(values, ddof=1))
    half = float(stats.t.ppf(0.975, len(values) - 1)) * deviation / math.sqrt(len(values))
    return Estimate(value, (value - half, value + half))


def speed_ratio(own: np.ndarray, other: np.ndarray) -> Estimate:
    """Divide speeds, ``[N, 2]`` seconds and tokens of the same N groups (delta method)."""
    own_sums, other_sums = own.sum(0), other.sum(0)
    if not own_sums.all() or not other_sums.all():
        return Estimate()
    (seconds, tokens), (other_seconds, other_tokens) = own_sums, other_sums
    value = float(tokens / seconds * other_seconds / other_tokens)
    if len(own) < 2:
        return Estimate(value)
    # The influence of each measurement on the logarithm of the ratio.
    own_share, other_share = own / own_sums, other / other_sums
    influence = own_share[:, 1] - own_share[:, 0] - other_share[:, 1] + other_share[:, 0]
    deviation = float(np.std(influence, ddof=1)) * math.sqrt(len(own))
    half = float(stats.t.ppf(0.975, len(own) - 1)) * deviation
    return Estimate(value, (value * math.exp(-half), value * math.exp(half)))


def median_and_p95(values: Sequence[float]) -> dict[str, float] | None:
    """Return the median and the 95th percentile; None without values."""
    if not values:
        return None
    return {"median": float(np.median(values)), "p95": float(np.quantile(values, 0.95))}


#: Points per standard deviation of a proportion at which the nuisance parameter is searched.
NUISANCE_DENSITY = 4
#: Part of the error probability that is spent on an upper limit for the nuisance parameter.
NUISANCE_ERROR = 0.01
#: Rounding error up to which two values of the score statistic count as equal.
STATISTIC_TOLERANCE = 1e-9
#: Absolute error of :func:`loss_bound`, which is rounded up.
BOUND_TOLERANCE = 1e-9


@lru_cache(maxsize=4096)
def loss_bound(lost: int, gained: int, count: int, confidence: float = 0.95) -> float:
    """Return an exact upper confidence bound on the loss of accuracy, from paired answers.

    ``lost`` and ``gained`` of ``count`` questions were answered correctly by the reference method
    only, and by the tested method only. The bound is one-sided, on ``P(lost) - P(gained)``, exact
    and unconditional: whatever the two probabilities are, the loss exceeds it with a probability of
    at most ``1 - confidence``. It is a fraction, 1.0 without questions. The confidence must be at
    least 0.5.

    Outcomes are ordered by the limit that inverts Tango's score test for paired proportions
    (Statistics in Medicine 17, 1998). The bound is Buehler's for this order (Kabaila and Lloyd,
    "Tight upper confidence limits from discrete data", Australian Journal of Statistics 39, 1997):
    the smallest loss under which an outcome ordered no later than the observed one is too
    improbable, in the worst case over the nuisance parameter ``P(gained)``. The worst case is taken
    up to an upper confidence limit of the nuisance parameter, whose error, :data:`NUISANCE_ERROR`
    of the total, is deducted (Berger and Boos, JASA 89, 1994). For 100 pairs that do not differ the
    bound is 0.0296; Tango's own limit, 0.0263, holds with a probability of 93% only.
    """
    if not count:
        return 1.0
    test = _LossTest.of(lost, gained, count, confidence)
    if test.largest[0] == count:
        return 1.0
    # Tango's limit is near the bound.
    step = max(1.0 / count, test.limit - (lost - gained) / count) / 4
    low = high = test.limit
    while test.excess(low) < 0:
        low, step = max(-1.0, low - step), 2 * step
    while test.excess(high) > 0:
        high, step = min(1.0, high + step), 2 * step
    root = optimize.brentq(test.excess, low, high, xtol=BOUND_TOLERANCE / 2)
    return min(1.0, root + BOUND_TOLERANCE)


def is_loss_below(
    loss: float, lost: int, gained: int, count: int, confidence: float = 0.95
) -> bool:
    """Return whether :func:`loss_bound` is at most a given loss, without computing the bound."""
    if loss >= 1.0:
        return True
    return count > 0 and _LossTest.of(lost, gained, count, confidence).excess(loss) <= 0


def least_questions(loss: float, confidence: float = 0.95) -> int:
    """Return how many questions bound the loss by a positive ``loss`` if no answer changes."""

    def suffice(count: int) -> bool:
        return is_loss_below(loss, lost=0, gained=0, count=count, confidence=confidence)

    count = 1
    while not suffice(count):
        count *= 2
    return bisect_left(range(count), True, lo=count // 2, key=suffice)


def confidence_per_test(confidence: float, tests: int) -> float:
    """Return the confidence of each test, so that all together have the stated one (Bonferroni)."""
    return 1 - (1 - confidence) / tests


@dataclass(frozen=True)
class _LossTest:
    """The exact test behind :func:`loss_bound`, for one observed outcome of n pairs."""

    #: ``[n + 1]``; for each number of gains, the largest number of losses of an outcome that is
    #: ordered no later than the observed one, -1 if there is none. Not decreasing, except where
    #: losses and gains add up to n.
    largest: np.ndarray
    #: Tango's limit.
    limit: float
    #: Upper confidence limit of ``P(gained)``.
    max_gain: float
    #: The error probability, less that of ``max_gain``.
    error: float

    @classmethod
    def of(cls, lost: int, gained: int, count: int, confidence: float) -> _LossTest:
        """Prepare the test."""
        z, error = NormalDist().inv_cdf(confidence), 1 - confidence
        limit = _tango_limit(lost, gained, count, z)
        largest = _largest_losses(count, limit, z)
        largest[gained] = max(largest[gained], lost)
        largest = np.minimum(np.maximum.accumulate(largest), count - np.arange(count + 1))
        spent = NUISANCE_ERROR * error
        # Clopper and Pearson's limit
        max_gain = (
            special.betaincinv(gained + 1, count - gained, 1 - spent) if gained < count else 1
        )
        return cls(largest, limit, float(max_gain), error - spent)

    def excess(self, loss: float) -> float:
        """Return by how much the outcomes' worst probability exceeds the error probability.

        It decreases with the loss.
        """
        count = len(self.largest) - 1
        # On the scale of the arcsine, the standard deviation of a proportion is about constant.
        least = max(0.0, -loss)
        most = max(least, min((1 - loss) / 2, self.max_gain))
        low, high = np.arcsin(np.sqrt([least, most]))
        points = 2 + math.ceil((high - low) * NUISANCE_DENSITY * 2 * math.sqrt(count))
        grid, step = np.linspace(low, high, points, retstep=True)
        found = self._probabilities(loss, np.sin(grid) ** 2)
        best = grid[np.argsort(found)[-3:], None]
        finer = np.clip(best + step * np.linspace(-1, 1, 9), low, high)
        refined = self._probabilities(loss, np.sin(finer.ravel()) ** 2)
        return float(max(found.max(), refined.max())) - self.error

    def _probabilities(self, loss: float, gain: np.ndarray) -> np.ndarray:
        """Return the outcomes' ``[G]`` probabilities for ``gain``, values of ``P(gained)``."""
        count = len(self.largest) - 1
        # Numbers of gains within 7.5 standard deviations; others have a probability below 1e-12.
        width = 7.5 * np.sqrt(count * gain * (1 - gain)) + 12
        first = np.maximum(0, np.floor(count * gain - width)).astype(int)
        gained = first[:, None] + np.arange(math.ceil(2 * width.max()) + 2)
        at = np.nonzero((gained <= count) & (self.largest[np.minimum(gained, count)] >= 0))
        row, gained, gain = at[0], gained[at], gain[at[0]]
        weight = np.exp(
            special.gammaln(count + 1)
            - special.gammaln(gained + 1)
            - special.gammaln(count - gained + 1)
            + special.xlogy(gained, gain)
            + special.xlog1py(count - gained, -gain)
        )
        lose = np.clip((gain + loss) / np.maximum(1 - gain, 1e-300), 0.0, 1.0)
        inside = special.bdtr(self.largest[gained].astype(float), count - gained, lose)
        return np.bincount(row, weight * inside, minlength=len(first))


def _tango_statistic(
    lost: np.ndarray | int, gained: np.ndarray | int, count: int, loss: float
) -> Any:
    """Return Tango's score statistic of ``P(lost) - P(gained) = loss`` for ``[...]`` outcomes."""
    # Under the hypothesis the maximum-likelihood estimate of P(gained) is the positive root of a
    # quadratic.
    linear = (2 * count - lost + gained) * loss - lost - gained
    constant = -gained * loss * (1 - loss)
    root = np.sqrt(np.maximum(0.0, linear * linear - 8 * count * constant))
    variance = (root - linear) / 2 + count * loss * (1 - loss)
    difference = lost - gained - count * loss
    return difference / np.sqrt(np.maximum(variance, 1e-30))


def _tango_limit(lost: int, gained: int, count: int, z: float) -> float:
    """Return the loss at which the score statistic of an outcome is ``-z``."""
    low, high = (lost - gained) / count, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if _tango_statistic(lost, gained, count, middle) < -z:
            high = middle
        else:
            low = middle
    return high


def _largest_losses(count: int, loss: float, z: float) -> np.ndarray:
    """Return the largest losses, ``[n + 1]`` by gains, whose score statistic is at most ``-z``."""
    gained = np.arange(count + 1)
    low, high = np.full(count + 1, -1), count - gained  # the statistic increases with the losses
    while (low < high).any():
        middle = (low + high + 1) // 2
        inside = _tango_statistic(middle, gained, count, loss) <= -z + STATISTIC_TOLERANCE
        low, high = np.where(inside, middle, low), np.where(inside, high, middle - 1)
    return low


def mcnemar_p(lost: int, gained: int) -> float:
    """Return the two-sided p-value of McNemar's exact test of equal accuracy."""
    total = lost + gained
    return float(stats.binomtest(lost, total).pvalue) if total else 1.0
