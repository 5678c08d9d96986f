"""Confidence intervals and tests for scores, and bounds on the loss of quality."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from scipy import stats

Interval = tuple[float, float]


@dataclass(frozen=True)
class Proportion:
    """A proportion with a 95% confidence interval (Wilson's score interval).

    Attributes:
        right: The number of successes.
        count: The number of trials.
    """

    right: int
    count: int

    @property
    def value(self) -> float:
        """The proportion; NaN without trials."""
        return self.right / self.count if self.count else math.nan

    @property
    def interval(self) -> Interval:
        """The lower and upper limit; NaN without trials."""
        if not self.count:
            return math.nan, math.nan
        interval = stats.binomtest(self.right, self.count).proportion_ci(0.95, method="wilson")
        return float(interval.low), float(interval.high)


@dataclass(frozen=True)
class Mean:
    """A mean with a 95% confidence interval (Student's t).

    Attributes:
        value: The mean; NaN without values.
        count: The number of values.
        deviation: The sample standard deviation; NaN below two values.
    """

    value: float
    count: int
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """Compute the mean of a sample.

        Args:
            values: The sample.
        """
        count = len(values)
        if not count:
            return cls(math.nan, 0, math.nan)
        deviation = float(np.std(values, ddof=1)) if count > 1 else math.nan
        return cls(float(np.mean(values)), count, deviation)

    @property
    def interval(self) -> Interval | None:
        """The lower and upper limit; None below two values."""
        if self.count < 2:
            return None
        half = float(stats.t.ppf(0.975, self.count - 1)) * self.deviation / math.sqrt(self.count)
        return self.value - half, self.value + half


def normal_quantile(confidence: float) -> float:
    """Return the quantile of the standard normal distribution.

    Args:
        confidence: The probability below the quantile.
    """
    return NormalDist().inv_cdf(confidence)


def loss_bound(lost: int, gained: int, count: int, confidence: float = 0.95) -> float:
    """Return an upper confidence bound on the loss of accuracy, from paired answers.

    The bound is one-sided, on ``P(lost) - P(gained)``. It inverts Tango's score test for paired
    proportions (Statistics in Medicine 17, 1998), which remains valid when few or no pairs differ:
    for 100 pairs that do not differ it is 0.026.

    Args:
        lost: The number of questions that only the reference method answered correctly.
        gained: The number of questions that only the tested method answered correctly.
        count: The number of paired questions.
        confidence: The confidence level.

    Returns:
        The bound as a fraction; negative if accuracy increased. 1.0 without questions.
    """
    if not count:
        return 1.0
    z = normal_quantile(confidence)

    def is_rejected(loss: float) -> bool:
        # Under the null hypothesis the maximum-likelihood estimate of P(gained) is the positive
        # root of a quadratic.
        linear = (2 * count - lost + gained) * loss - lost - gained
        constant = -gained * loss * (1 - loss)
        root = math.sqrt(max(0.0, linear * linear - 8 * count * constant))
        estimate = (root - linear) / (4 * count)
        variance = count * (2 * estimate + loss * (1 - loss))
        return lost - gained - count * loss < -z * math.sqrt(max(0.0, variance))

    low, high = max(-1.0, (lost - gained) / count), 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if is_rejected(middle):
            high = middle
        else:
            low = middle
    return high


#: Minimum number of losses from which their skewness can be estimated.
MIN_LOSSES = 30
#: Minimum number of losses above :data:`LOSS_TOLERANCE` for a bound on the mean.
MIN_POSITIVE_LOSSES = 5
#: Losses up to this many nats per token are rounding errors.
LOSS_TOLERANCE = 1e-4


def mean_loss_bound(losses: Sequence[float], confidence: float = 0.95) -> float:
    """Return an upper confidence bound on the mean loss of log-probability.

    These losses are skewed: most questions lose nothing and a few lose much, so a sample that
    misses those few underestimates the mean. The bound is the larger of Student's t and Hall's
    transformation of t, which corrects for skewness (Hall, "On the removal of skewness by
    transformation", JRSS B 54, 1992). It is an approximation: if each of 200 questions loses an
    exponentially distributed amount with probability 1/20, a 95% bound holds in 97% of samples,
    compared with 85% for Student's t alone. A sample cannot bound losses that are too rare to
    appear in it, so the bound is infinite if fewer than :data:`MIN_POSITIVE_LOSSES` losses exceed
    :data:`LOSS_TOLERANCE`.

    Args:
        losses: The loss of each question, in nats per token.
        confidence: The confidence level of the one-sided bound.

    Returns:
        The bound in nats per token, possibly infinite.

    Raises:
        ValueError: There are fewer than :data:`MIN_LOSSES` losses.
    """
    count = len(losses)
    if count < MIN_LOSSES:
        raise ValueError(
            f"a bound on nats per token requires at least {MIN_LOSSES} questions; got {count}"
        )
    values = np.asarray(losses, dtype=float)
    if (values > LOSS_TOLERANCE).sum() < MIN_POSITIVE_LOSSES:
        return math.inf
    mean, deviation = float(values.mean()), float(values.std(ddof=1))
    if deviation == 0.0:
        return mean
    student = -float(stats.t.ppf(1 - confidence, count - 1)) / math.sqrt(count)
    skew = float(stats.skew(values, bias=False))
    hall = student
    if abs(skew) > 1e-6:
        # Solve w + skew w^2 / 3 + skew^2 w^3 / 27 + skew / 6n = -student, the lower quantile of t,
        # for w in standard deviations; a negative w is a mean above the sample's.
        target = 1 - skew * (student + skew / (6 * count))
        hall = -3 * (math.copysign(abs(target) ** (1 / 3), target) - 1) / skew
    return mean + deviation * max(student, hall)


@dataclass(frozen=True)
class McNemar:
    """McNemar's exact test of two methods on the same questions.

    Attributes:
        lost: The number of questions that only the first method answered correctly.
        gained: The number of questions that only the second method answered correctly.
        p_value: Two-sided p-value under the hypothesis that both are equally accurate.
    """

    lost: int
    gained: int
    p_value: float

    @classmethod
    def of(cls, first: Sequence[bool], second: Sequence[bool]) -> McNemar:
        """Compare two methods.

        Args:
            first: Whether the first method answered each question correctly.
            second: Whether the second method did, for the same questions in the same order.
        """
        pairs = list(zip(first, second, strict=True))
        lost = sum(a and not b for a, b in pairs)
        gained = sum(b and not a for a, b in pairs)
        total = lost + gained
        return cls(lost, gained, float(stats.binomtest(lost, total).pvalue) if total else 1.0)


@dataclass(frozen=True)
class Ratio:
    """A ratio of paired sums with a 95% confidence interval (delta method on its logarithm).

    Attributes:
        value: The ratio; NaN where there is nothing to compare.
        interval: The lower and upper limit; None below two pairs.
    """

    value: float
    interval: Interval | None

    @classmethod
    def of_speeds(cls, own: np.ndarray, other: np.ndarray) -> Ratio:
        """Divide one speed in tokens per second by another.

        Args:
            own: ``[N, 2]`` seconds and tokens of N questions.
            other: ``[N, 2]`` seconds and tokens of the same questions, to compare with.
        """
        own_sums, other_sums = own.sum(0), other.sum(0)
        if len(own) == 0 or not own_sums.all() or not other_sums.all():
            return cls(math.nan, None)
        (seconds, tokens), (other_seconds, other_tokens) = own_sums, other_sums
        value = float(tokens / seconds * other_seconds / other_tokens)
        if len(own) < 2:
            return cls(value, None)
        # The influence of each question on the logarithm of the ratio.
        own_share, other_share = own / own_sums, other / other_sums
        influence = own_share[:, 1] - own_share[:, 0] - other_share[:, 1] + other_share[:, 0]
        deviation = float(np.std(influence, ddof=1)) * math.sqrt(len(own))
        half = float(stats.t.ppf(0.975, len(own) - 1)) * deviation
        return cls(value, (value * math.exp(-half), value * math.exp(half)))
