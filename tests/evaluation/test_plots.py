"""The figures of a report and their labels, the points in them, and the Pareto front."""

from __future__ import annotations

import json
import re
from itertools import combinations, product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from sample_report import make_report, make_row

from eagle_fsd.evaluation.frontier import (
    Point,
    pareto_front,
    points,
)
from eagle_fsd.evaluation.plots import COLORS, draw_figures
from eagle_fsd.evaluation.statistics import loss_bound


def many_rows() -> list[dict[str, Any]]:
    """Baselines, three lines of FSD, and twelve rules, one of which is far below the others."""
    rows = [make_row("hf", 0.4), make_row("plain", 0.4), make_row("exact", 1.0)]
    for ratio in (0, 0.1, 0.3):
        for at, threshold in enumerate((0.05, 0.1, 0.4)):
            name = f"T={threshold:g}" + (f" r={ratio:g}" if ratio else "")
            row = make_row(name, 1.2 + at / 10 + ratio / 10, lost=2 * at, threshold=threshold)
            row["settings"]["min_ratio"] = ratio
            rows.append(row)
    rules = [make_row(f"rule{at}", 1.1 + at / 30, lost=at) for at in range(11)]
    rules.append(make_row("bad", 1.3, lost=60))
    for row in rules:
        row["settings"] = {"method": "Rule()"}
    return [*rows, *rules]


def texts(path: Path) -> list[str]:
    """Return the texts of a figure."""
    tree = ElementTree.parse(path.with_suffix(".svg"))
    return [item.text or "" for item in tree.iter() if item.tag.endswith("text")]


def test_figures_of_a_sweep(tmp_path: Path) -> None:
    """The first one has one line of FSD and the calibrated setting, the second has all methods."""
    report = make_report(many_rows(), calibrated="T=0.1 r=0.3")
    draw_figures(report, tmp_path)
    assert report["figures"] == ["tradeoff.png", "methods.png"]
    for name in report["figures"]:
        with Image.open(tmp_path / name) as picture:  # not blank, and sharp at twice 800 pixels
            assert picture.width == 1600
            assert len(np.unique(np.asarray(picture.convert("L")))) > 20
            assert json.loads(picture.text["Description"])["environment"]["revision"] == "abc"
    found, methods = (texts(tmp_path / name) for name in report["figures"])
    assert {"exact", "Hugging Face", "FSD, r=0.3", "calibrated: T=0.1 r=0.3"} <= set(found)
    assert {"T=0.05", "T=0.1", "T=0.4", "Pareto front of all methods"} <= set(found)
    assert "accuracy (%)" in found
    assert not {"FSD, r=0", "rule5", "plain"} & set(found)
    assert {"FSD, r=0", "FSD, r=0.1", "FSD, r=0.3", "bad (30)"} <= set(methods)
    assert len([text for text in methods if text.startswith("rule")]) >= 6
    colors = set(re.findall(r"#[0-9a-f]{6}", (tmp_path / "methods.svg").read_text()))
    assert colors & {color.lower() for color in COLORS} == {color.lower() for color in COLORS[:3]}


def test_figures_of_small_reports(tmp_path: Path) -> None:
    """Nothing is drawn without comparisons; without scores, log-probabilities are.

    Scores are named by what they measure.
    """
    report = make_report([make_row("plain", 0.4), make_row("exact", 1.0)])
    draw_figures(report, tmp_path)
    assert "figures" not in report
    for scored, label in (
        (False, "log-probability (nats/token)"),
        (True, "answers with a regret of at most 0.1 nats per token (%)"),
    ):
        rows = [make_row("exact", 1.0, scored=scored), make_row("fsd", 1.2, scored=scored)]
        report = make_report(rows)
        report["about"] |= {"measure": "regret", "max_regret": 0.1}
        draw_figures(report, tmp_path)
        assert report["figures"] == ["tradeoff.png"]
        assert label in texts(tmp_path / "tradeoff.png")


def test_labels_cover_neither_points_nor_each_other(tmp_path: Path) -> None:
    """As many of sixty random methods are labeled as have room."""
    generator = np.random.default_rng(0)
    rows = [make_row("exact", 1.0)]
    for at, (ratio, lost) in enumerate(generator.uniform((1, 0), (2, 30), (60, 2))):
        row = make_row(f"rule{at}", ratio, lost=int(lost))
        row["settings"] = {"method": "Rule()"}
        rows.append(row)
    draw_figures(make_report(rows), tmp_path)
    tree = ElementTree.parse(tmp_path / "tradeoff.svg")
    shift = {"start": 0.5, "middle": 0.0, "end": -0.5}
    boxes, centers = [], []
    for item in tree.iter():
        at = float(item.get("x", 0)), float(item.get("y", 0))
        text = item.text or ""
        if item.tag.endswith("use"):
            centers.append(at)
        if item.tag.endswith("text") and text.startswith("rule"):
            anchor = re.findall("text-anchor: ([a-z]+)", item.get("style", ""))[0]
            width = 4.2 * len(text)
            boxes.append((at[0] + shift[anchor] * width, at[1] - 3, width))
    assert len(boxes) >= 20
    for (x, y, width), (other, level, _) in combinations(boxes, 2):
        assert abs(y - level) > 7 or abs(x - other) > width
    for (x, y, width), (other, level) in product(boxes, centers):
        assert abs(y - level) > 5 or abs(x - other) > width / 2


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
    # All samples of each answer gain half a point, although the first ones lose 8 and gain 2.
    row = make_row("a", 1.5, lost=8, gained=2)
    row["samples"] = {"accuracy_change": 0.005, "accuracy_change_interval": (-0.02, 0.2)}
    _, sampled = points([exact, row])
    assert sampled.quality == pytest.approx(90.5)
    assert sampled.quality_interval == pytest.approx((88.0, 100.0))
    # Without accuracies, qualities are log-probabilities.
    first, second = points([make_row(name, 1.0, scored=False) for name in ("exact", "a")])
    assert (first.quality, second.quality) == pytest.approx((-0.5, -0.6))
    assert second.quality_interval == pytest.approx((-0.65, -0.55))


def test_the_front_omits_what_a_faster_method_beats() -> None:
    best, near = point("best", 100, 90), point("near", 99, 89.5)
    slow, bad, fast = point("slow", 80, 90), point("bad", 100, 80), point("fast", 120, 70)
    assert pareto_front([best, near, slow, bad, fast]) == [best, fast]
