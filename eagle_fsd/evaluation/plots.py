"""Figures of a report, drawn without a display: quality against speed, with 95% intervals.

``tradeoff`` shows what most readers ask for: exact decoding, FSD by threshold, the calibrated
setting, and a baseline. ``methods`` shows all methods but baselines. Both show the Pareto front of
these, and are written as PNG and SVG; pages contain the SVG. At a width of 800 pixels a point of
type is 1.4 pixels, so that the smallest type is about 10.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from eagle_fsd.evaluation.frontier import Point, pareto_front, points, quality_range, speed_range
from eagle_fsd.evaluation.methods import BASELINES, EXACT, HF, PLAIN, format_number
from eagle_fsd.evaluation.tables import Row, measured, measurement
from eagle_fsd.utils.text import escape_control_chars

#: File names of the figures.
TRADEOFF, METHODS = "tradeoff.png", "methods.png"
#: Okabe and Ito's color-blind-safe palette, without black, which is exact decoding, and yellow.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GRAY = "#666666"
#: Size in inches, and dots per inch of PNG files: legible at 800 pixels, sharp at 1600.
SIZE, DPI = (8.0, 5.6), 200
#: Sizes of type in points.
TITLE, SMALL, TINY = 11, 8, 7
#: Where labels are tried: offset from the point in points of type, and alignment.
LABEL_PLACES = [
    (side * x, above * (y + distance), alignment, "bottom" if above > 0 else "top")
    for distance in (0, 8)
    for side, above, alignment, x, y in (
        (1, 1, "left", 6, 3),
        (-1, -1, "right", 6, 3),
        (0, 1, "center", 0, 7),
        (0, -1, "center", 0, 7),
        (1, -1, "left", 6, 3),
        (-1, 1, "right", 6, 3),
    )
]


def draw_figures(report: dict[str, Any], folder: Path) -> None:
    """Draw the figures of a report, and add the names of the PNG files to it as ``figures``.

    :data:`METHODS` is drawn only if :data:`TRADEOFF` leaves out any of its methods. Nothing is
    drawn or added if only baselines, or no method, can be compared with the reference.
    """
    import matplotlib

    found = points(report["rows"], report.get("reference", EXACT.name))
    own = [point for point in found if point.name not in BASELINES]
    if all(point.is_reference for point in own):
        return
    figures = {TRADEOFF: _select_points(found, report.get("calibrated"))}
    if not all(point in figures[TRADEOFF] for point in own):
        figures[METHODS] = own
    report["figures"] = list(figures)
    about = json.dumps({key: report[key] for key in ("about", "settings", "environment")})
    # Keep text as text in SVG files, and do not parse dollar signs as math.
    with matplotlib.rc_context({"svg.fonttype": "none", "text.parse_math": False}):
        for name, shown in figures.items():
            figure, path = _draw(report, found, shown), folder / name
            figure.savefig(path, dpi=DPI, metadata={"Description": about})
            metadata = {"Description": about, "Date": None}
            figure.savefig(path.with_suffix(".svg"), metadata=metadata)


def _series(point: Point) -> str:
    """Return the name of the line of FSD that a method belongs to; empty if there is none."""
    settings: Row = point.row.get("settings") or {}
    if settings.get("method") != "fsd" or settings["selection"] == "priced":
        return ""
    divergence = "" if settings["divergence"] == "js" else f"{settings['divergence']} "
    return f"FSD, {divergence}r={format_number(settings['min_ratio'])}"


def _lines(found: Sequence[Point]) -> dict[str, list[Point]]:
    """Group the FSD methods by line, each in the order of increasing thresholds."""
    lines: dict[str, list[Point]] = {}
    for point in found:
        if (label := _series(point)) and not point.is_reference:
            lines.setdefault(label, []).append(point)
    return {
        label: sorted(members, key=lambda point: point.row["settings"]["threshold"])
        for label, members in lines.items()
    }


def _select_points(found: Sequence[Point], marked: str | None) -> list[Point]:
    """Return the methods that :data:`TRADEOFF` shows.

    The line of FSD is that of the calibrated setting, which is ``marked``, or the one that has most
    methods on the Pareto front. Without such a line, these are all methods but baselines.
    """
    lines = _lines(found)
    if not lines:
        return [point for point in found if point.name not in BASELINES]
    front = pareto_front(found)
    best = max(
        lines.values(),
        key=lambda line: (
            any(point.name == marked for point in line),
            sum(point in front for point in line),
        ),
    )
    known = {point.name for point in found}
    baseline = HF.name if HF.name in known else PLAIN.name
    shown = {baseline, marked, *(point.name for point in best)}
    return [point for point in found if point.is_reference or point.name in shown]


def _draw(report: dict[str, Any], every: Sequence[Point], found: Sequence[Point]) -> Any:
    """Draw a figure that shows some of all methods."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    FigureCanvasAgg(figure)
    ax: Any = figure.subplots()
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    known = {point.name: point for point in every}
    ax.set_xlim(speed_range(found))
    ax.set_ylim(quality_range(found))
    scored = found[0].row["accuracy"] is not None
    ax.set_ylabel(f"{measured(report)} (%)" if scored else "log-probability (nats/token)")
    ax.set_xlabel("tokens/s, including the prefill")
    if PLAIN.name in known:
        plain = known[PLAIN.name].speed
        scales = partial(operator.mul, 1.0 / plain), partial(operator.mul, plain)
        times = ax.secondary_xaxis("top", functions=scales)
        times.set_xlabel(f"times plain decoding ({plain:.0f} tokens/s)", fontsize=SMALL)
    reference = report.get("reference", "exact decoding")
    title = f"Quality against speed, with 95% intervals relative to {reference}"
    ax.set_title(escape_control_chars(title), fontsize=TITLE)
    colors = dict(zip(_lines(every), COLORS, strict=False))  # equal in all figures
    labels = _draw_methods(ax, found, colors, report.get("calibrated"))
    _draw_front(ax, [item for item in every if item.name not in BASELINES])
    ax.legend(frameon=False, fontsize=SMALL, loc="best")
    footnote = escape_control_chars(measurement(report))
    figure.supxlabel(footnote, fontsize=TINY, color=GRAY, wrap=True)
    figure.draw_without_rendering()  # positions are known and final afterwards
    figure.set_layout_engine("none")
    _place_labels(ax, labels)
    return figure


def _draw_front(ax: Any, found: Sequence[Point]) -> None:
    """Draw the Pareto front of the estimates."""
    best = pareto_front(found)
    speeds, qualities = [point.speed for point in best], [point.quality for point in best]
    style = {"color": GRAY, "linewidth": 1.2, "linestyle": ":"}
    ax.step(speeds, qualities, where="pre", label="Pareto front of all methods", **style)


def _draw_methods(
    ax: Any, found: Sequence[Point], colors: dict[str, str], marked: str | None
) -> list[tuple[Point, str, str]]:
    """Draw methods, lines of FSD, and a ring; return point, text and color of each label."""
    lines, floor = _lines(found), ax.get_ylim()[0]
    labels = []
    for label, members in lines.items():
        speeds, qualities = [item.speed for item in members], [item.quality for item in members]
        ax.plot(speeds, qualities, color=colors.get(label, GRAY), label=label)
    for point in found:
        color = "black" if point.is_reference else colors.get(_series(point), GRAY)
        _draw_point(ax, point, color)
        text = escape_control_chars("Hugging Face" if point.name == HF.name else point.name)
        if point.name == marked:
            style = {"markersize": 13, "markerfacecolor": "none", "color": "black"}
            place = [point.speed], [max(point.quality, floor)]
            ax.plot(*place, "o", zorder=5, label=f"calibrated: {text}", **style)
        if color in COLORS and len(lines[_series(point)]) > 1:
            text = f"T={point.row['settings']['threshold']:g}"
        below = f" ({point.quality:.4g})" if point.quality < floor else ""
        labels.append((point, text + below, color))
    return sorted(
        labels,
        key=lambda item: (
            not item[0].is_reference and item[0].name != marked,
            item[2] == GRAY,
        ),
    )


def _draw_point(ax: Any, point: Point, color: str) -> None:
    """Draw a method with its intervals; one below the plot as an arrow at its lower edge."""
    floor = ax.get_ylim()[0]
    shape = {"marker": "*", "markersize": 14} if point.is_reference else {"marker": "o"}
    style = {"color": color, "linestyle": "", "clip_on": False, "zorder": 3, **shape}
    if point.quality < floor:
        ax.plot([point.speed], [floor], **{**style, "marker": "v"})
        return
    bars = {"color": color, "linewidth": 0.9, "alpha": 0.5}
    ax.plot(point.speed_interval, [point.quality] * 2, **bars)
    ax.plot([point.speed] * 2, point.quality_interval, **bars)
    ax.plot([point.speed], [point.quality], **style)


def _place_labels(ax: Any, labels: Sequence[tuple[Point, str, str]]) -> None:
    """Label points in order, where a label covers no point, label or legend; omit the others."""
    from matplotlib.transforms import Bbox

    floor, radius = ax.get_ylim()[0], 5 * ax.get_figure().dpi / 72
    places = [(point.speed, max(point.quality, floor)) for point, _, _ in labels]
    centers = ax.transData.transform(places)
    taken = [Bbox([center - radius, center + radius]) for center in centers]
    taken.append(ax.get_legend().get_window_extent())
    frame = ax.get_window_extent()
    for place, (_, text, color) in zip(places, labels, strict=True):
        style = {"fontsize": SMALL, "color": color, "zorder": 6, "textcoords": "offset points"}
        style["bbox"] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5}
        for x, y, horizontal, vertical in LABEL_PLACES:
            label = ax.annotate(text, place, (x, y), ha=horizontal, va=vertical, **style)
            box = label.get_window_extent()
            if frame.count_contains(box.corners()) == 4 and not box.count_overlaps(taken):
                taken.append(box)
                break
            label.remove()
