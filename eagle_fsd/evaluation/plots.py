"""Figures of a sweep, as PNG and SVG, drawn without a display.

At a width of 800 pixels a point of type is 1.4 pixels, so that the smallest type is about 10.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from eagle_fsd.evaluation.analysis import NodeDivergences
from eagle_fsd.evaluation.frontier import (
    Point,
    pareto_front,
    points,
    quality_range,
    speed_range,
)
from eagle_fsd.evaluation.labels import LabelPlacer
from eagle_fsd.evaluation.methods import BASELINES
from eagle_fsd.evaluation.tables import Row, measurement

#: Okabe and Ito's color-blind-safe palette, without black, which is exact decoding, and yellow.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GRAY, LIGHT_GRAY = "#666666", "#b8b8b8"
#: Width in inches, and dots per inch of PNG files: legible at 800 pixels, sharp at 1600.
WIDTH, DPI = 8.0, 200
#: Sizes of type in points.
TITLE, SMALL, TINY = 11, 8, 7
#: Smaller divergences and regrets are drawn at this value.
MIN_DIVERGENCE = 1e-6
MIN_REGRET = 1e-3
#: Maximum number of trees in a heat map.
MAX_TREES = 20


def add_tradeoff(report: dict[str, Any], folder: Path) -> None:
    """Draw quality against speed if a method is compared with exact decoding, for ``report.md``.

    Args:
        report: The report, to which the figure's name is added.
        folder: Its folder.
    """
    if any(point.name not in (*BASELINES, "exact") for point in points(report["rows"])):
        draw_tradeoff(report, {}, folder / "tradeoff.png")
        report["figures"] = ["tradeoff.png"]


def draw_tradeoff(
    report: dict[str, Any],
    series: Mapping[str, Sequence[str]],
    path: Path,
    marked: str | None = None,
) -> None:
    """Draw quality against speed, with 95% intervals and the Pareto front.

    Each color is a series. Methods of the same rule that are in no series form one, whose color is
    gray unless it reaches the Pareto front and a color is left. Filled markers are methods that no
    other one clearly beats (:func:`~eagle_fsd.evaluation.frontier.pareto_front`).

    Args:
        report: The report of a sweep.
        series: Names of the methods on each line, by the line's label.
        path: The PNG file; an SVG file is written beside it.
        marked: Name of the method with the settings of ``fsd.json``, which gets a ring.
    """
    known = {point.name: point for point in points(report["rows"])}
    # Baselines are much slower and would compress the rest of the plot.
    found = {name: point for name, point in known.items() if name not in BASELINES}
    figure, (axis,) = _new_figure(1, 5.6)
    if found:
        scored = next(iter(found.values())).row["accuracy"] is not None
        axis.set_xlim(speed_range(list(found.values())))
        axis.set_ylim(quality_range(list(found.values())))
        axis.set_ylabel("accuracy (%)" if scored else "log-probability (nats/token)")
        _draw_methods(axis, found, series, marked)
    axis.set_xlabel("tokens/s, including the prefill")
    if "plain" in known:
        plain = known["plain"].speed
        times = axis.secondary_xaxis("top", functions=(lambda x: x / plain, lambda x: x * plain))
        times.set_xlabel(f"times plain decoding ({plain:.0f} tokens/s)", fontsize=SMALL)
    axis.set_title(
        "Quality against speed, with 95% intervals relative to exact decoding", fontsize=TITLE
    )
    _save(figure, path, report)


def _draw_methods(
    axis: Any,
    found: Mapping[str, Point],
    series: Mapping[str, Sequence[str]],
    marked: str | None,
) -> None:
    """Draw the methods of :func:`draw_tradeoff`, the Pareto front, and the legend."""
    front = pareto_front(list(found.values()))
    lines, single = _group_series(series, found)
    reaching = [label for label in single if any(point in front for point in single[label])]
    colors = dict(zip([*lines, *reaching], COLORS, strict=False))
    floor = axis.get_ylim()[0]
    labels: list[tuple[Point, str, str]] = []
    for label, members in {**lines, **single}.items():
        color, is_line = colors.get(label, LIGHT_GRAY), label in lines
        layer = 3 if label in colors else 1
        if is_line:
            x, y = [item.speed for item in members], [item.quality for item in members]
            axis.plot(x, y, linewidth=1.5, color=color, zorder=layer)
        for point in members:
            _draw_point(axis, point, color, layer, filled=point in front)
            if label in colors:
                name = f"{point.row['settings']['threshold']:g}" if is_line else point.name
                below = f" ({point.quality:.4g})" if point.quality < floor else ""
                labels.append((point, name + below, color))
        if label in colors:
            name, line = (f"FSD, {label} (labels: T)", "-") if is_line else (label, "")
            axis.plot([], [], marker="o", linestyle=line, color=color, label=name)
    if set(single) - set(colors):
        axis.plot([], [], "o", color=LIGHT_GRAY, label="other rules")
    best = _estimated_front(front)
    x, y = [point.speed for point in best], [point.quality for point in best]
    axis.step(x, y, where="pre", color=GRAY, linewidth=1, linestyle=":", label="Pareto front")
    if "exact" in found:
        exact = found["exact"]
        axis.axhline(exact.quality, color=GRAY, linewidth=0.8, zorder=0)
        style = {"marker": "*", "markersize": 15, "color": "black", "linestyle": ""}
        axis.plot([exact.speed], [exact.quality], label="exact", zorder=5, **style)
    if marked is not None and marked in found:
        ring = {"marker": "o", "markersize": 13, "markerfacecolor": "none", "color": "black"}
        place = [found[marked].speed], [max(found[marked].quality, floor)]
        axis.plot(*place, linestyle="", zorder=5, label=f"fsd.json: {marked}", **ring)
    axis.plot([], [], "o", color=GRAY, markerfacecolor="white", label="hollow: clearly beaten")
    axis.legend(frameon=False, fontsize=SMALL, loc="best")
    labels.sort(key=lambda item: item[0] not in best)
    _label_points(axis, labels, list(found.values()))


def _group_series(
    series: Mapping[str, Sequence[str]], found: Mapping[str, Point]
) -> tuple[dict[str, list[Point]], dict[str, list[Point]]]:
    """Return the points of each series, and those of each rule that is in no series."""
    lines = {
        label: [found[name] for name in members if name in found]
        for label, members in series.items()
    }
    lines = {label: members for label, members in lines.items() if members}
    taken = {point.name for members in lines.values() for point in members} | {"exact"}
    single: dict[str, list[Point]] = {}
    for name, point in found.items():
        if name not in taken:
            single.setdefault(name.split()[0], []).append(point)
    return lines, single


def _draw_point(axis: Any, point: Point, color: str, layer: int, filled: bool) -> None:
    """Draw a method with its intervals; one below the plot as an arrow at its lower edge."""
    floor, _ = axis.get_ylim()
    style = {"color": color, "zorder": layer, "clip_on": False, "linestyle": ""}
    if point.quality < floor:
        axis.plot([point.speed], [floor], marker="v", markersize=7, **style)
        return
    error = {"linewidth": 0.9, "alpha": 0.5, "color": color, "zorder": layer}
    axis.plot(point.speed_interval, [point.quality] * 2, **error)
    axis.plot([point.speed] * 2, point.quality_interval, **error)
    face = color if filled else "white"
    axis.plot([point.speed], [point.quality], "o", markersize=6, markerfacecolor=face, **style)


def _label_points(
    axis: Any, labels: Sequence[tuple[Point, str, str]], found: Sequence[Point]
) -> None:
    """Label points where there is room, the first ones first.

    Args:
        axis: The plot.
        labels: Point, text and color of each label.
        found: All points, which labels must not cover.
    """
    figure = axis.get_figure()
    figure.draw_without_rendering()  # positions are known afterwards
    point_size = figure.dpi / 72
    frame = axis.get_window_extent()
    size = SMALL * point_size
    placer = LabelPlacer(
        (frame.x0, frame.y0, frame.x1, frame.y1), 0.62 * size, 1.2 * size, 4 * point_size
    )
    floor = axis.get_ylim()[0]
    place = axis.transData.transform
    for point in found:
        placer.reserve(*place((point.speed, max(point.quality, floor))))
    legend = axis.get_legend().get_window_extent()
    placer.block((legend.x0, legend.y0, legend.x1, legend.y1))
    for point, text, color in labels:
        x, y = place((point.speed, max(point.quality, floor)))
        at = placer.place(x, y, text)
        if at is not None:
            position = axis.transAxes.inverted().transform(at)
            axis.text(
                *position,
                text,
                transform=axis.transAxes,
                fontsize=SMALL,
                color=color,
                ha="center",
                va="center",
                zorder=6,
            )


def _estimated_front(front: Sequence[Point]) -> list[Point]:
    """Return the methods of a front that none of the others exceeds in both estimates."""
    best: list[Point] = []
    for point in reversed(front):
        if not best or point.quality > best[-1].quality:
            best.append(point)
    return best[::-1]


def draw_trees(rows: Iterable[Row], path: Path, report: dict[str, Any] | None = None) -> None:
    """Draw a heat map of speed by draft tree and threshold.

    Args:
        rows: Mappings with ``total_tokens``, ``depth``, ``top_k``, ``threshold`` (0 is exact
            decoding) and ``speed`` in tokens per second; a cell that has several rows shows the
            fastest. Rows with a true ``predicted`` were not measured, and their numbers are in
            parentheses. The :data:`MAX_TREES` trees with the largest speeds are drawn.
        path: The PNG file; an SVG file is written beside it.
        report: The report whose footnote and provenance to add; default: none.
    """
    from matplotlib.patches import Rectangle

    cells: dict[tuple[tuple[int, int, int], float], Row] = {}
    for row in rows:
        key = (row["total_tokens"], row["depth"], row["top_k"]), float(row["threshold"])
        if key not in cells or row["speed"] > cells[key]["speed"]:
            cells[key] = row
    fastest: dict[tuple[int, int, int], float] = {}
    for (tree, _), row in cells.items():
        fastest[tree] = max(row["speed"], fastest.get(tree, 0.0))
    trees = sorted(sorted(fastest, key=lambda tree: -fastest[tree])[:MAX_TREES])
    thresholds = sorted({threshold for _, threshold in cells})
    grid = [
        [cells[tree, t]["speed"] if (tree, t) in cells else math.nan for t in thresholds]
        for tree in trees
    ]
    figure, (axis,) = _new_figure(1, 1.8 + 0.33 * len(trees))
    axis.grid(False)
    image = axis.imshow(grid, aspect="auto", cmap="viridis")
    figure.colorbar(image, ax=axis, label="tokens/s", shrink=0.9)
    best: dict[float, tuple[int, int, int]] = {}
    for tree, t in sorted(cells, key=lambda key: cells[key]["speed"]):
        if tree in trees:
            best[t] = tree
    low, high = image.get_clim()
    for y, tree in enumerate(trees):
        for x, t in enumerate(thresholds):
            if (tree, t) not in cells:
                continue
            row = cells[tree, t]
            text = f"{row['speed']:.0f}"
            axis.text(
                x,
                y,
                f"({text})" if row.get("predicted") else text,
                ha="center",
                va="center",
                fontsize=SMALL,
                color="black" if row["speed"] > (low + high) / 2 else "white",
                fontweight="bold" if best[t] == tree else "normal",
            )
    for x, t in enumerate(thresholds):
        if t in best:
            box = (x - 0.47, trees.index(best[t]) - 0.47)
            frame = Rectangle(box, 0.94, 0.94, fill=False, edgecolor=COLORS[1], linewidth=2)
            axis.add_patch(frame)
    axis.set_xticks(range(len(thresholds)), [f"{t:g}" if t else "exact" for t in thresholds])
    axis.set_yticks(range(len(trees)), ["/".join(map(str, tree)) for tree in trees])
    axis.set_xlabel("threshold T (fastest tree of each column framed)")
    axis.set_ylabel("total_tokens/depth/top_k")
    axis.set_title("Speed by draft tree and threshold", fontsize=TITLE)
    _save(figure, path, report)


def draw_regrets(
    comparison: Mapping[str, Any],
    path: Path,
    report: dict[str, Any],
    thresholds: Sequence[float] = (),
    floors: Sequence[float] = (),
) -> None:
    """Draw the log-probability that each fuzzy token gave up against the divergence before it.

    Args:
        comparison: The result of :func:`~eagle_fsd.evaluation.agreement.compare_answers` for the
            method whose fuzzy tokens are drawn.
        path: The PNG file; an SVG file is written beside it.
        report: The report, for footnote and provenance.
        thresholds: Thresholds to mark: fuzzy tokens to their right are rejected.
        floors: Values of ``min_ratio`` to mark: fuzzy tokens above ``-ln(min_ratio)`` are rejected.
    """
    figure, (axis,) = _new_figure(1, 5.2)
    tokens = comparison["tokens"]
    x = [max(divergence, MIN_DIVERGENCE) for divergence, _ in tokens]
    y = [max(regret, MIN_REGRET) for _, regret in tokens]
    axis.scatter(x, y, s=10, color=COLORS[0], alpha=0.35, linewidths=0, zorder=2)
    axis.set_xlim(MIN_DIVERGENCE / 1.5, 1.5 * max([1.0, *x]))
    axis.set_ylim(MIN_REGRET / 1.5, 1.5 * max([10.0, *y]))
    axis.set_xscale("log")
    axis.set_yscale("log")
    for at, threshold in enumerate(sorted({item for item in thresholds if item > 0})):
        axis.axvline(threshold, color=GRAY, linewidth=0.8, linestyle=":")
        axis.annotate(
            f"T={threshold:g}",
            (threshold, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 2 + 10 * (at % 2)),
            textcoords="offset points",
            ha="center",
            fontsize=SMALL,
            color=GRAY,
        )
    for floor in sorted({item for item in floors if 0 < item < 1}):
        axis.axhline(-math.log(floor), color=COLORS[1], linewidth=0.8, linestyle="--")
        axis.annotate(
            f"r={floor:g}",
            (1.0, -math.log(floor)),
            xycoords=("axes fraction", "data"),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=SMALL,
            color=COLORS[1],
        )
    axis.set_xlabel(f"divergence of target and draft ({MIN_DIVERGENCE:g} and below at the left)")
    axis.set_ylabel(f"max log p - log p(x) (nats; {MIN_REGRET:g} and below at the bottom)")
    axis.set_title(
        f"What a fuzzy token gives up: {len(tokens)} tokens of {comparison['method']}",
        fontsize=TITLE,
        pad=28 if thresholds else 6,
    )
    _save(figure, path, report)


def draw_divergences(
    found: NodeDivergences, thresholds: Sequence[float], report: dict[str, Any], path: Path
) -> None:
    """Draw histograms of divergences, split by whether the target's choice was drafted.

    Args:
        found: The divergences.
        thresholds: Thresholds to mark.
        report: The report of a sweep.
        path: The PNG file; an SVG file is written beside it.
    """
    figure, axes = _new_figure(len(found.values), 4.2 * len(found.values))
    for axis, (name, values) in zip(axes, found.values.items(), strict=True):
        low, high = math.log10(MIN_DIVERGENCE), math.log10(max([1.0, *values.tolist()]))
        edges = torch.logspace(low, high, 49).tolist()
        for drafted, color in ((True, COLORS[0]), (False, COLORS[1])):
            part = values[found.drafted == drafted]
            if not len(part):
                continue
            where = "in" if drafted else "not in"
            median = float(part.median())
            axis.hist(
                part.clamp(min=MIN_DIVERGENCE).tolist(),
                bins=edges,
                weights=[1 / len(part)] * len(part),
                color=color,
                alpha=0.55,
                label=f"target's choice {where} the tree ({len(part)} nodes, median {median:.3g})",
            )
            axis.axvline(max(median, MIN_DIVERGENCE), color=color, linewidth=1.5)
        for threshold in thresholds:
            if threshold > MIN_DIVERGENCE:
                axis.axvline(threshold, color="black", linewidth=0.7, linestyle=":")
        axis.set_xscale("log")
        axis.set_title(
            f"{name} between target and draft where exact decoding passes"
            f" ({found.questions} answers)",
            fontsize=TITLE,
        )
        unit = "probability mass" if name.endswith("tv") else "nats"
        marks = "; thresholds dotted" if thresholds else ""
        axis.set_xlabel(f"{unit} ({MIN_DIVERGENCE:g} and below at the left{marks})")
        axis.set_ylabel("share of nodes")
        axis.set_ylim(top=1.3 * axis.get_ylim()[1])  # room for the legend
        axis.legend(framealpha=1.0, edgecolor="none", fontsize=SMALL, loc="upper center")
    _save(figure, path, report)


def draw_positions(report: dict[str, Any], path: Path) -> None:
    """Draw the fraction of target passes that emit at least 1, 2, 3, ... tokens.

    Args:
        report: The report of a sweep. Exact decoding and a selection of the other methods are
            drawn.
        path: The PNG file; an SVG file is written beside it.
    """
    figure, (axis,) = _new_figure(1, 4.8)
    rows = [row for row in report["rows"] if len(row["reach"]) > 1]
    exact = [row for row in rows if row["method"] == "exact"]
    others = sorted((row for row in rows if row["method"] != "exact"), key=lambda row: row["tau"])
    if len(others) > len(COLORS):
        last = len(COLORS) - 1
        others = [others[round(at * (len(others) - 1) / last)] for at in range(last + 1)]
    for row, color in zip([*exact, *others], ["black"] * len(exact) + list(COLORS), strict=False):
        axis.plot(
            range(1, len(row["reach"]) + 1),
            [100 * share for share in row["reach"]],
            color=color,
            linewidth=2.5 if row["method"] == "exact" else 1.5,
            label=f"{row['method']}: tau {row['tau']:.2f}",
        )
    axis.set_xlabel("tokens n")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_ylabel("target passes that emit at least n tokens (%)")
    axis.set_ylim(0, 103)
    axis.set_title("Accepted length by position", fontsize=TITLE)
    axis.legend(frameon=False, fontsize=SMALL)
    _save(figure, path, report)


def _new_figure(panels: int, height: float) -> tuple[Any, list[Any]]:
    """Create a figure with panels below each other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(panels, 1, squeeze=False)[:, 0]
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def _save(figure: Any, path: Path, report: dict[str, Any] | None) -> None:
    """Write PNG and SVG with the report's footnote, and its provenance as metadata."""
    description = "{}"
    if report is not None:
        figure.supxlabel(measurement(report), fontsize=TINY, color=GRAY, wrap=True)
        about = {key: report[key] for key in ("about", "settings", "environment")}
        description = json.dumps(about)
    figure.savefig(path, dpi=DPI, metadata={"Description": description})
    figure.savefig(path.with_suffix(".svg"), metadata={"Description": description, "Date": None})
