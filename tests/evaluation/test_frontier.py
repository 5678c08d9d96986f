"""Speed and quality with intervals, the Pareto front, figures, and labels."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sample_report import make_report, make_row

from eagle_fsd.evaluation.curve import curve_svg
from eagle_fsd.evaluation.frontier import (
    Point,
    pareto_front,
    points,
    quality_range,
    speed_range,
)
from eagle_fsd.evaluation.labels import LabelPlacer
from eagle_fsd.evaluation.plots import COLORS, draw_regrets, draw_tradeoff, draw_trees
from eagle_fsd.evaluation.statistics import loss_bound


def point(name: str, speed: float, quality: float, half: float = 1.0) -> Point:
    row = {"method": name, "accuracy": quality / 100}
    return Point(
        row, speed, (speed - half, speed + half), quality, (quality - half, quality + half)
    )


# -- points and the front --------------------------------------------------------------------------


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


def test_ranges_ignore_outliers() -> None:
    found = [point(str(at), 100 + at, 95 + at / 10) for at in range(9)]
    low, high = quality_range([*found, point("bad", 100, 10)])
    assert 85 < low < 95 < high < 100
    noisy = point("noisy", 104, 95, half=50)
    assert speed_range([*found, noisy])[0] > 90


# -- labels ----------------------------------------------------------------------------------------


def test_labels_cover_neither_markers_nor_each_other() -> None:
    placer = LabelPlacer((0, 0, 300, 200), 7, 14, 5)
    generator = np.random.default_rng(0)
    centers = generator.uniform((10, 10), (290, 190), (12, 2))
    boxes = []
    for x, y in centers:
        placer.reserve(x, y)
    for x, y in centers:
        at = placer.place(x, y, "label")
        if at is not None:
            boxes.append((at[0] - 17.5, at[1] - 7, at[0] + 17.5, at[1] + 7))
    assert len(boxes) >= 6
    for index, (left, top, right, bottom) in enumerate(boxes):
        assert 0 <= left < right <= 300
        assert 0 <= top < bottom <= 200
        for x, y in centers:
            assert not (left - 5 < x < right + 5 and top - 5 < y < bottom + 5)
        for other in boxes[index + 1 :]:
            assert right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top


def test_a_label_without_room_is_omitted() -> None:
    placer = LabelPlacer((0, 0, 100, 100), 7, 14, 5)
    assert placer.place(50, 50, "a label that is longer than the plot") is None
    placer.block((0, 0, 100, 100))
    assert placer.place(50, 50, "a") is None


# -- figures ---------------------------------------------------------------------------------------


def check_picture(path: Path) -> None:
    """Check that the picture is not blank, sharp at twice 800 pixels, and also an SVG."""
    with Image.open(path) as picture:
        assert picture.width == 1600
        assert len(np.unique(np.asarray(picture.convert("L")))) > 20
    assert "</svg>" in path.with_suffix(".svg").read_text()


def many_rows() -> list[dict[str, Any]]:
    rows = [make_row("plain", 0.4), make_row("exact", 1.0)]
    for ratio in (0, 0.1):
        for at, threshold in enumerate((0.05, 0.1, 0.4)):
            name = f"T={threshold:g}" + (f" r={ratio:g}" if ratio else "")
            rows.append(make_row(name, 1.2 + at / 10 + ratio, lost=2 * at, threshold=threshold))
    return [*rows, *(make_row(f"rule{at}", 1.1 + at / 30, lost=at) for at in range(12))]


def test_tradeoff_highlights_at_most_eight_series(tmp_path: Path) -> None:
    series = {"r=0": ["T=0.05", "T=0.1", "T=0.4"], "r=0.1": ["T=0.05 r=0.1", "T=0.1 r=0.1"]}
    draw_tradeoff(make_report(many_rows()), series, tmp_path / "tradeoff.png")
    check_picture(tmp_path / "tradeoff.png")
    text = (tmp_path / "tradeoff.svg").read_text().lower()
    used = set(re.findall(r"#[0-9a-f]{6}", text))
    highlighted = used & {color.lower() for color in COLORS}
    assert {color.lower() for color in COLORS[:2]} <= highlighted


def test_tradeoff_with_many_series_is_gray_beyond_eight(tmp_path: Path) -> None:
    """Ten series and exact decoding: at most eight colors that are no shade of gray."""
    names = [f"T=0.1 r={at}" for at in range(10)]
    rows = [make_row("plain", 0.4), make_row("exact", 1.0)]
    rows += [make_row(name, 1.2 + at / 20, lost=at) for at, name in enumerate(names)]
    series = {name: [name] for name in names}
    draw_tradeoff(make_report(rows), series, tmp_path / "tradeoff.png")
    text = (tmp_path / "tradeoff.svg").read_text().lower()
    colors = {item[1:] for item in re.findall(r"(?:fill|stroke): #[0-9a-f]{6}", text)}
    channels = {tuple(bytes.fromhex(item[-6:])) for item in colors}
    assert 2 <= len([item for item in channels if max(item) - min(item) > 24]) <= 8


def test_tradeoff_of_a_report_without_comparisons(tmp_path: Path) -> None:
    draw_tradeoff(make_report([make_row("plain", 0.4)]), {}, tmp_path / "tradeoff.png")
    check_picture(tmp_path / "tradeoff.png")


def test_heat_map_of_trees(tmp_path: Path) -> None:
    rows = [
        {"total_tokens": nodes, "depth": depth, "top_k": top, "threshold": t, "speed": 100.0 + t}
        | {"predicted": nodes > 20}
        for nodes, depth, top in ((12, 10, 1), (16, 8, 2), (28, 26, 1))
        for t in (0.0, 0.1, 0.4)
    ]
    rows.append({**rows[0], "speed": 500.0})  # the fastest of a cell counts
    draw_trees(rows[:-2] + rows[-1:], tmp_path / "trees.png", make_report(many_rows()))
    check_picture(tmp_path / "trees.png")
    draw_trees(rows, tmp_path / "trees.png")


def test_regrets_by_divergence(tmp_path: Path) -> None:
    found = {"method": "T=0.4", "tokens": [[0.01, 0.2], [0.3, 1.5], [0.0, 0.0]]}
    path = tmp_path / "regret.png"
    draw_regrets(found, path, make_report(many_rows()), (0.0, 0.1, 0.4), (0.0, 0.1))
    check_picture(path)
    draw_regrets({"method": "T=0.4", "tokens": []}, path, make_report(many_rows()))
    check_picture(path)


def test_svg_of_a_page_has_no_scripts_and_escapes_names() -> None:
    rows = [make_row("exact", 1.0), make_row("<script>x</script>", 1.2)]
    text = curve_svg(points(rows), "<script>x</script>", 860, 380)
    assert "<script" not in text
    assert text.count("<circle") == 2
    assert "&lt;script&gt;" in text
    assert text.count('class="error"') == 4
    (single,) = points(rows[:1])
    assert "<circle" in curve_svg([single], None, 360, 330)
