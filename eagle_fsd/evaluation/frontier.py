"""Speed and quality of a report's methods as points with intervals, and their Pareto front."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from eagle_fsd.evaluation.statistics import Interval, loss_bound
from eagle_fsd.evaluation.tables import Row

#: One-sided confidence of each limit of a 95% interval.
ONE_SIDED = 0.975
#: Maximum extension of a plot's range of speeds by intervals, as a fraction of the points' range.
MAX_EXTENSION = 0.3
#: Range below the best quality within which a plot shows every method: nats per token without
#: accuracies, percentage points with them.
VISIBLE_NATS, VISIBLE_POINTS = 0.1, 6.0


def quality(row: Row) -> float:
    """Return a method's accuracy, or its log-probability if it has none; NaN without either."""
    value = row["accuracy"] if row["accuracy"] is not None else row["log_likelihood"]
    return math.nan if value is None else float(value)


def comparable_rows(rows: Sequence[Row]) -> list[Row]:
    """Select the methods with a quality and a speed relative to exact decoding."""
    return [row for row in rows if row["speed_over_exact"] and not math.isnan(quality(row))]


def is_faster(row: Row) -> bool:
    """Return whether a method is significantly faster than exact decoding."""
    interval = row["speed_over_exact_interval"]
    return interval is not None and interval[0] > 1.0


@dataclass(frozen=True)
class Point:
    """A method with its row of a report, its speed in tokens per second, and its quality.

    Quality is accuracy in percent, or log-probability under the target in nats per token. The
    intervals (95%) compare with the reference, such as exact decoding, on the same questions.
    """

    row: Row
    speed: float
    speed_interval: Interval
    quality: float
    quality_interval: Interval
    is_reference: bool = False

    @property
    def name(self) -> str:
        """The method's name."""
        return str(self.row["method"])


def points(rows: Sequence[Row], reference: str = "exact") -> list[Point]:
    """Return the methods whose speed and quality can be compared with the reference's.

    Speeds are comparable within a session only: a method's ratio to the reference is multiplied by
    the reference's overall speed.
    """
    known = comparable_rows(rows)
    exact = next((row for row in known if row["method"] == reference), None)
    if exact is None:
        return []
    pace, scored = exact["tokens_per_second"], exact["accuracy"] is not None
    found = []
    for row in known:
        if scored != (row["accuracy"] is not None):
            continue
        ratio = row["speed_over_exact"]
        low, high = row["speed_over_exact_interval"] or (ratio, ratio)
        level, interval = _quality(row, exact)
        found.append(
            Point(
                row,
                speed=pace * ratio,
                speed_interval=(pace * low, pace * high),
                quality=level,
                quality_interval=interval,
                is_reference=row is exact,
            )
        )
    return found


def _quality(row: Row, exact: Row) -> tuple[float, Interval]:
    """Return a method's quality and its interval."""
    against, scale = row.get("against_exact", {}), 100 if exact["accuracy"] is not None else 1
    level = scale * quality(exact)
    samples = row.get("samples", {})
    if "accuracy_change" in samples:  # over several samples of each question
        change = samples["accuracy_change"]
        low, high = samples["accuracy_change_interval"] or (change, change)
        low, high = (min(max(quality(exact) + limit, 0.0), 1.0) for limit in (low, high))
        return level + scale * change, (scale * low, scale * high)
    if "lost" in against:
        lost, gained, paired = (against[name] for name in ("lost", "gained", "paired"))
        level += scale * (gained - lost) / paired
        low = quality(exact) - loss_bound(lost, gained, paired, ONE_SIDED)
        high = quality(exact) + loss_bound(gained, lost, paired, ONE_SIDED)
        return level, (scale * max(0.0, low), scale * min(1.0, high))
    change = against.get("log_likelihood_change", 0.0)
    low, high = against.get("log_likelihood_change_interval") or (change, change)
    return level + change, (level + low, level + high)


def pareto_front(candidates: Sequence[Point]) -> list[Point]:
    """Select the methods that are estimated to be better than all faster ones, slowest first."""
    front: list[Point] = []
    for point in sorted(candidates, key=lambda item: (-item.speed, -item.quality)):
        if not front or point.quality > front[0].quality:
            front.insert(0, point)
    return front


def speed_range(found: Sequence[Point]) -> Interval:
    """Return the range of speeds that a plot shows.

    Intervals extend the range of the points by at most :data:`MAX_EXTENSION`.
    """
    low, high = min(point.speed for point in found), max(point.speed for point in found)
    room = MAX_EXTENSION * ((high - low) or high)
    low = max(low - room, min(point.speed_interval[0] for point in found))
    high = min(high + room, max(point.speed_interval[1] for point in found))
    margin = 0.04 * (high - low) or 0.1 * high
    return low - margin, high + margin


def quality_range(found: Sequence[Point]) -> Interval:
    """Return the range of qualities that a plot shows.

    It reaches down to the worst method, but at most :data:`VISIBLE_NATS` or :data:`VISIBLE_POINTS`
    below the best, or to the median if that is worse: a few bad settings would compress the rest.
    """
    visible = VISIBLE_NATS if found[0].row["accuracy"] is None else VISIBLE_POINTS
    best = max(point.quality for point in found)
    high = max(point.quality_interval[1] for point in found if point.quality == best)
    least = min(point.quality_interval[0] for point in found)
    middle = median(point.quality_interval[0] for point in found)
    low = max(least, min(best - visible, middle))
    room = 0.06 * ((high - low) or 0.1 * visible)
    return low - room, high + room
