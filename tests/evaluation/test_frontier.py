"""Speed and quality with intervals, and the Pareto front."""

from __future__ import annotations

import pytest
from sample_report import make_row

from eagle_fsd.evaluation.frontier import (
    Point,
    pareto_front,
    points,
)
from eagle_fsd.evaluation.statistics import loss_bound


def point(name: str, speed: float, quality: float, half: float = 1.0) -> Point:
    row = {"method": name, "accuracy": quality / 100}
    return Point(
        row, speed, (speed - half, speed + half), quality, (quality - half, quality + half)
    )


def test_points_are_relative_to_exact_decoding() -> None:
    """Speeds are ratios times exact decoding's speed, and qualities paired differences from it."""
    exact, lossy = make_row("exact", 1.0), make_row("a", 1.5, lost=4, gained=2)
    lossy["tokens_per_second"] = 999.0  # measured in another session
    first, second = points([exact, lossy])
    assert (first.speed, first.speed_interval) == (100.0, (100.0, 100.0))
    assert (first.quality, first.quality_interval) == (90.0, (90.0, 90.0))
    assert second.speed == 150.0
    assert second.speed_interval == pytest.approx((149.0, 151.0))
    assert second.quality == pytest.approx(88.0)
    low, high = second.quality_interval
    assert low == pytest.approx(90 - 100 * loss_bound(4, 2, 100, 0.975))
    assert high == pytest.approx(90 + 100 * loss_bound(2, 4, 100, 0.975))
    assert points([lossy]) == []


def test_points_count_all_samples_of_each_answer() -> None:
    """The first samples lose 8 and gain 2 of 100, all of them together gain half a point."""
    exact, row = make_row("exact", 1.0), make_row("a", 1.5, lost=8, gained=2)
    row["samples"] = {"accuracy_change": 0.005, "accuracy_change_interval": (-0.02, 0.2)}
    _, point = points([exact, row])
    assert point.quality == pytest.approx(90.5)
    assert point.quality_interval == pytest.approx((88.0, 100.0))


def test_points_without_accuracies_are_log_probabilities() -> None:
    rows = [make_row("exact", 1.0, scored=False), make_row("a", 1.5, scored=False)]
    exact, other = points(rows)
    assert exact.quality == -0.5
    assert other.quality == pytest.approx(-0.6)
    assert other.quality_interval == pytest.approx((-0.65, -0.55))


def test_the_front_omits_only_what_is_clearly_beaten() -> None:
    best, near = point("best", 100, 90), point("near", 99, 89.5)
    slow, bad, fast = point("slow", 80, 90), point("bad", 100, 80), point("fast", 120, 70)
    assert pareto_front([best, near, slow, bad, fast]) == [near, best, fast]
    assert not best.dominates(best)
    assert not best.dominates(fast)
    assert best.dominates(slow)
