"""Plots of a sweep, drawn without a display."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from eagle_fsd.evaluation.analysis import (
    NodeDivergences,
    comparable_rows,
    pareto_front,
    quality,
)
from eagle_fsd.evaluation.methods import BASELINES
from eagle_fsd.evaluation.tables import footnote

#: Okabe and Ito's color-blind-safe palette.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")
MARKERS = "osD^vP<>"
GRAY = "#777777"
#: Smaller divergences are drawn at this value.
MIN_DIVERGENCE = 1e-6
#: Maximum number of lines in the plot of tokens per target pass.
MAX_LINES = 7


def draw_tradeoff(report: dict[str, Any], series: Mapping[str, Sequence[str]], path: Path) -> None:
    """Draw quality against speed, with the Pareto front.

    Args:
        report: The report of a sweep.
        series: Names of the methods on each line, by the line's label. Other methods are single
            points.
        path: The PNG file.
    """
    figure, (axis,) = _new_figure(1, (10.5, 6))
    known = {row["method"]: row for row in comparable_rows(report["rows"])}
    # Baselines are much slower and would compress the rest of the plot.
    rows = {name: row for name, row in known.items() if name not in BASELINES}
    # Speeds are comparable only within a session: scale the ratios by the speed of exact decoding.
    pace = known["exact"]["tokens_per_second"] if "exact" in known else 0.0
    speeds = {name: row["speed_over_exact"] * pace for name, row in known.items()}
    scored = any(row["accuracy"] is not None for row in rows.values())
    scale = 100.0 if scored else 1.0
    qualities = {name: scale * quality(row) for name, row in known.items()}
    styles = [(color, marker) for marker in MARKERS for color in COLORS]
    for (color, marker), (label, members) in zip(styles, series.items(), strict=False):
        names = [name for name in members if name in rows]
        _plot_methods(axis, names, speeds, qualities, color=color, marker=marker, label=label)
    in_series = {name for members in series.values() for name in members}
    single = [name for name in rows if name not in in_series and name != "exact"]
    for (color, marker), name in zip(styles[len(COLORS) :], single, strict=False):
        style = {"color": color, "marker": marker, "linestyle": "none"}
        _plot_methods(axis, [name], speeds, qualities, label=name, **style)
    front = [row["method"] for row in pareto_front(list(rows.values()))]
    for name in front:
        if name in in_series:  # single points are named in the legend
            axis.annotate(
                name,
                (speeds[name], qualities[name]),
                xytext=(2, 5),
                textcoords="offset points",
                fontsize=7,
                rotation=30,
            )
    axis.step(
        [speeds[name] for name in front],
        [qualities[name] for name in front],
        where="pre",
        color="black",
        linewidth=1,
        linestyle="--",
        label="Pareto front",
        zorder=1,
    )
    if "exact" in rows:
        _mark_exact(axis, rows["exact"], speeds["exact"], scale)
    axis.margins(y=0.1)
    axis.set_xlabel("tokens/s, including the prefill")
    axis.set_ylabel("accuracy (%)" if scored else "log-probability under the target (nats/token)")
    title = "Quality against speed"
    if "plain" in known:
        plain = speeds["plain"]
        times = axis.secondary_xaxis("top", functions=(lambda x: x / plain, lambda x: x * plain))
        times.set_xlabel("times plain decoding")
        unit = "%" if scored else ""
        title += f" (plain decoding: {plain:.0f} tokens/s, {qualities['plain']:.4g}{unit})"
    axis.set_title(title)
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _save(figure, path, report)


def _plot_methods(
    axis: Any,
    names: Sequence[str],
    speeds: Mapping[str, float],
    qualities: Mapping[str, float],
    **style: Any,
) -> None:
    """Draw methods as one line."""
    x, y = [speeds[name] for name in names], [qualities[name] for name in names]
    axis.plot(x, y, **{"linestyle": "-", "markersize": 6, **style})


def _mark_exact(axis: Any, row: dict[str, Any], speed: float, scale: float) -> None:
    """Draw exact decoding as a star, with its quality and interval as a horizontal band."""
    level, label = scale * quality(row), "exact"
    axis.axhline(level, color=GRAY, linewidth=0.8, linestyle=":", zorder=0)
    if row["accuracy_interval"] is not None:
        low, high = (scale * end for end in row["accuracy_interval"])
        axis.axhspan(low, high, color=GRAY, alpha=0.1, linewidth=0, zorder=0)
        label = "exact (95% interval in gray)"
    style = {"marker": "*", "markersize": 18, "color": "black", "linestyle": "none"}
    axis.plot([speed], [level], label=label, zorder=5, **style)


def draw_divergences(
    found: NodeDivergences, thresholds: Sequence[float], report: dict[str, Any], path: Path
) -> None:
    """Draw histograms of divergences, split by whether the target's choice was drafted.

    Args:
        found: The divergences.
        thresholds: Thresholds to mark.
        report: The report of a sweep.
        path: The PNG file.
    """
    figure, axes = _new_figure(len(found.values), (5.5 * len(found.values), 4.5))
    for axis, (name, values) in zip(axes, found.values.items(), strict=True):
        low, high = math.log10(MIN_DIVERGENCE), math.log10(max([1.0, *values.tolist()]))
        edges = torch.logspace(low, high, 49).tolist()
        for drafted, color in ((True, COLORS[0]), (False, COLORS[1])):
            part = values[found.drafted == drafted]
            if not len(part):
                continue
            where = "in" if drafted else "not in"
            axis.hist(
                part.clamp(min=MIN_DIVERGENCE).tolist(),
                bins=edges,
                weights=[1 / len(part)] * len(part),
                color=color,
                alpha=0.55,
                label=f"target's choice {where} the tree ({len(part)} nodes)",
            )
            median = float(part.median())
            axis.axvline(median, color=color, linewidth=1.5, label=f"median {median:.3g}")
        for threshold in thresholds:
            if threshold > MIN_DIVERGENCE:
                axis.axvline(threshold, color="black", linewidth=0.7, linestyle=":")
        axis.set_xscale("log")
        axis.set_title(
            f"{name} between target and draft\nat the nodes that exact decoding visits,"
            f" {found.questions} answers"
        )
        unit = "probability mass" if name.endswith("tv") else "nats"
        marks = "; thresholds dotted" if thresholds else ""
        axis.set_xlabel(f"{unit} ({MIN_DIVERGENCE:g} and below at the left{marks})")
        axis.set_ylabel("fraction of nodes")
        axis.set_ylim(top=1.45 * axis.get_ylim()[1])  # room for the legend
        axis.legend(framealpha=1.0, edgecolor="none", fontsize=8, loc="upper center")
    _save(figure, path, report)


def draw_positions(report: dict[str, Any], path: Path) -> None:
    """Draw the fraction of target passes that emit at least 1, 2, 3, ... tokens.

    Args:
        report: The report of a sweep. Exact decoding and a selection of the other methods are
            drawn.
        path: The PNG file.
    """
    figure, (axis,) = _new_figure(1, (9, 5.5))
    rows = [row for row in report["rows"] if len(row["reach"]) > 1]
    rows.sort(key=lambda row: row["tau"])
    if len(rows) > MAX_LINES:
        exact = [row for row in rows if row["method"] == "exact"]
        others = [row for row in rows if row["method"] != "exact"]
        room = MAX_LINES - len(exact)
        selected = {round(at * (len(others) - 1) / (room - 1)) for at in range(room)}
        rows = exact + [others[at] for at in sorted(selected)]
    for row, color in zip(rows, COLORS, strict=False):
        is_exact = row["method"] == "exact"
        axis.plot(
            range(1, len(row["reach"]) + 1),
            [100 * share for share in row["reach"]],
            marker="*" if is_exact else "o",
            markersize=9 if is_exact else 4,
            color="black" if is_exact else color,
            label=f"{row['method']}: tau {row['tau']:.2f}",
        )
    axis.set_xlabel("tokens n")
    axis.set_xticks(range(1, max((len(row["reach"]) for row in rows), default=1) + 1))
    axis.set_ylabel("target passes that emit at least n tokens (%)")
    axis.set_ylim(0, 103)
    axis.set_title("Accepted length by position")
    axis.legend(frameon=False, fontsize=8)
    _save(figure, path, report)


def _new_figure(panels: int, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    """Create a figure with panels side by side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def _save(figure: Any, path: Path, report: dict[str, Any]) -> None:
    """Write the PNG with the report's footnote below it, and its provenance as metadata."""
    figure.supxlabel(footnote(report), fontsize=6, color=GRAY, wrap=True)
    about = {key: report[key] for key in ("about", "settings", "environment")}
    figure.savefig(path, dpi=120, metadata={"Description": json.dumps(about)})
