"""Statistics of scores: intervals, paired tests, bounds of a loss."""

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
    """``right`` of ``count``, with a 95 % interval (Wilson's score interval)."""

    right: int
    count: int

    @property
    def value(self) -> float:
        return self.right / self.count if self.count else math.nan

    @property
    def interval(self) -> Interval:
        if not self.count:
            return math.nan, math.nan
        found = stats.binomtest(self.right, self.count).proportion_ci(0.95, method="wilson")
        return float(found.low), float(found.high)


@dataclass(frozen=True)
class Mean:
    """A mean with a 95 % interval (Student's t); one value alone has none."""

    value: float
    count: int
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        count = len(values)
        if not count:
            return cls(math.nan, 0, math.nan)
        deviation = float(np.std(values, ddof=1)) if count > 1 else math.nan
        return cls(float(np.mean(values)), count, deviation)

    @property
    def interval(self) -> Interval | None:
        if self.count < 2:
            return None
        half = float(stats.t.ppf(0.975, self.count - 1)) * self.deviation / math.sqrt(self.count)
        return self.value - half, self.value + half


def normal_quantile(confidence: float) -> float:
    """How many standard deviations leave ``1 - confidence`` of a normal law above them."""
    return NormalDist().inv_cdf(confidence)


def loss_bound(lost: int, gained: int, count: int, confidence: float = 0.95) -> float:
    """How large the loss may be: an upper bound of ``P(lost) - P(gained)``, from paired answers.

    One-sided. It inverts Tango's score test for paired proportions (Statistics in Medicine 17,
    1998), which is sound where few pairs differ, or none: with no loss among 100 it is 0.026.

    Args:
        lost, gained: Right before and wrong now, and the other way, of ``count`` pairs.
    """
    if not count:
        return 1.0
    z = normal_quantile(confidence)

    def too_large(loss: float) -> bool:
        """Whether so large a loss would be seen this small more rarely than the test allows."""
        # The likeliest P(gained) if the loss is that: the positive root of a quadratic.
        linear = (2 * count - lost + gained) * loss - lost - gained
        constant = -gained * loss * (1 - loss)
        root = math.sqrt(max(0.0, linear * linear - 8 * count * constant))
        likeliest = (root - linear) / (4 * count)
        variance = count * (2 * likeliest + loss * (1 - loss))
        return lost - gained - count * loss < -z * math.sqrt(max(0.0, variance))

    low, high = max(-1.0, (lost - gained) / count), 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if too_large(middle) else (middle, high)
    return high


#: Fewer questions say too little of how skewed their losses are.
FEWEST_LOSSES = 30
FEWEST_THAT_LOSE = 5
#: Nats a token: less is rounding.
NOTHING = 1e-4


def mean_loss_bound(losses: Sequence[float], confidence: float = 0.95) -> float:
    """How large the mean of ``losses`` may be: an upper bound, one-sided.

    Losses of log-probability are skewed: most questions lose nothing, a few lose much, and a sample
    that happens to miss those few looks better than it is. The bound is the larger of Student's t
    and of Hall's transformation of t, which takes out its skewness (Hall, "On the removal of
    skewness by transformation", JRSS B 54, 1992). It stays an approximation: of 200 questions of
    which one in twenty loses an exponentially distributed amount, it holds 97 times in 100 at 95 %,
    where t alone holds 85 times (the test of this function counts them). What is too rare for the
    sample cannot be bounded by it: with fewer than :data:`FEWEST_THAT_LOSE` questions that lose
    anything there is no bound, which is infinity.

    Raises:
        ValueError: There are fewer than :data:`FEWEST_LOSSES`.
    """
    count = len(losses)
    if count < FEWEST_LOSSES:
        raise ValueError(
            f"a bound on nats a token needs {FEWEST_LOSSES} questions at least; there are {count}"
        )
    values = np.asarray(losses, dtype=float)
    if (values > NOTHING).sum() < FEWEST_THAT_LOSE:
        return math.inf
    mean, deviation = float(values.mean()), float(values.std(ddof=1))
    if deviation == 0.0:
        return mean
    student = -float(stats.t.ppf(1 - confidence, count - 1)) / math.sqrt(count)
    skew = float(stats.skew(values, bias=False))
    # The w, in deviations, whose transform w + skew w^2 / 3 + skew^2 w^3 / 27 + skew / 6n is the
    # lower quantile of t; a negative w is a mean above the sample's.
    aim = 1 - skew * (student + skew / (6 * count))
    hall = (
        -3 * (math.copysign(abs(aim) ** (1 / 3), aim) - 1) / skew if abs(skew) > 1e-6 else student
    )
    return mean + deviation * max(student, hall)


@dataclass(frozen=True)
class McNemar:
    """Two methods on the same questions: how often just one of them was right.

    Attributes:
        lost: Right under the first, wrong under the second. gained: The other way.
        p_value: Two-sided and exact: how likely so uneven a split is where neither is better.
    """

    lost: int
    gained: int
    p_value: float

    @classmethod
    def of(cls, first: Sequence[bool], second: Sequence[bool]) -> McNemar:
        pairs = list(zip(first, second, strict=True))
        lost = sum(a and not b for a, b in pairs)
        gained = sum(b and not a for a, b in pairs)
        total = lost + gained
        return cls(lost, gained, float(stats.binomtest(lost, total).pvalue) if total else 1.0)


@dataclass(frozen=True)
class Ratio:
    """How many times as much, from paired sums, with a 95 % interval (the delta method on its log).

    Attributes:
        value: NaN where there is nothing to compare.
    """

    value: float
    interval: Interval | None

    @classmethod
    def of_speeds(cls, own: np.ndarray, other: np.ndarray) -> Ratio:
        """Speed over speed.

        Args:
            own, other: ``[N, 2]`` seconds and tokens of the same N questions.
        """
        sums = own.sum(0), other.sum(0)
        if len(own) == 0 or not all(part.all() for part in sums):
            return cls(math.nan, None)
        (seconds, tokens), (other_seconds, other_tokens) = sums
        value = float(tokens / seconds * other_seconds / other_tokens)
        if len(own) < 2:
            return cls(value, None)
        # What each question does to the logarithm of the ratio.
        parts = own / sums[0], other / sums[1]
        moved = parts[0][:, 1] - parts[0][:, 0] - parts[1][:, 1] + parts[1][:, 0]
        deviation = float(np.std(moved, ddof=1)) * math.sqrt(len(own))
        half = float(stats.t.ppf(0.975, len(own) - 1)) * deviation
        return cls(value, (value * math.exp(-half), value * math.exp(half)))
