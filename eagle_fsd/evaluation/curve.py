"""Draw quality against speed as SVG, for pages with a light and a dark color scheme.

The page's style sheet defines the classes ``exact`` (the reference), ``main`` (the method that the
page is about) and ``other``, and draws points of class ``beaten`` hollow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from markupsafe import Markup

from eagle_fsd.evaluation.frontier import Point, pareto_front, quality_range, speed_range
from eagle_fsd.evaluation.labels import LabelPlacer
from eagle_fsd.evaluation.statistics import Interval
from eagle_fsd.utils.text import escape_control_chars

#: Margins of the plot in pixels: right, top, bottom.
MARGINS = (18, 12, 48)
#: Width of the vertical axis's title and distance of its tick labels from the plot, in pixels.
TITLE, GAP = 24, 7
#: Approximate width of a character, height of a line and radius of a marker, in pixels.
CHARACTER, LINE, RADIUS = 7.3, 15, 5
#: Number of methods above which only exact decoding, the main method and, on a wide plot, the
#: Pareto front are labeled; width of a wide plot in pixels.
MAX_LABELS, WIDE = 8, 600
#: Classes of points; those of the first are labeled first and drawn last.
KINDS = ("exact", "main", "other", "other beaten")
#: Distance of ticks in pixels, at least.
TICK_DISTANCE = (90, 55)


@dataclass(frozen=True)
class _Axes:
    """Maps speed and quality to pixels."""

    x_range: Interval
    y_range: Interval
    size: tuple[int, int]

    @cached_property
    def y_ticks(self) -> list[tuple[float, str]]:
        """The ticks of the vertical axis, with their text."""
        _, top, bottom = MARGINS
        return _ticks(self.y_range, (self.size[1] - top - bottom) / TICK_DISTANCE[1])

    @cached_property
    def frame(self) -> tuple[float, float, float, float]:
        """The plot's left, top, right and bottom edge; ticks and title fit at the left."""
        right, top, bottom = MARGINS
        left = TITLE + CHARACTER * max((len(text) for _, text in self.y_ticks), default=0) + GAP
        return left, top, self.size[0] - right, self.size[1] - bottom

    def x(self, value: float) -> float:
        (low, high), (left, _, right, _) = self.x_range, self.frame
        inside = min(max(value, low), high)
        return left + (inside - low) / (high - low) * (right - left)

    def y(self, value: float) -> float:
        (low, high), (_, top, _, bottom) = self.y_range, self.frame
        inside = min(max(value, low), high)
        return bottom - (inside - low) / (high - low) * (bottom - top)


def curve_svg(found: Sequence[Point], main: str | None, width: int, height: int) -> Markup:
    """Draw methods with their intervals.

    Labels are placed where there is room: first that of exact decoding, then of the main method, of
    the Pareto front and of the others; of many methods, only some are labeled. Points far below the
    front are drawn at the lower edge.

    Args:
        found: The methods, see :func:`~eagle_fsd.evaluation.frontier.points`.
        main: Name of the method to highlight.
        width: Width in pixels.
        height: Height in pixels.
    """
    front = pareto_front(found)
    scored = found[0].row["accuracy"] is not None
    axes = _Axes(speed_range(found), quality_range(found), (width, height))
    left, top, right, bottom = axes.frame
    unit = "accuracy (%)" if scored else "log-probability (nats/token)"
    parts = [
        Markup('<svg class="curve" viewBox="0 0 {} {}" role="img" aria-label="{}">').format(
            width, height, f"{unit} against tokens per second of {len(found)} methods"
        )
    ]
    for value, text in _ticks(axes.x_range, (right - left) / TICK_DISTANCE[0]):
        x = axes.x(value)
        parts.append(_line("grid", x, top, x, bottom))
        parts.append(_text("tick", x, bottom + 17, text, "middle"))
    for value, text in axes.y_ticks:
        y = axes.y(value)
        parts.append(_line("grid", left, y, right, y))
        parts.append(_text("tick", left - GAP, y + 4, text, "end"))
    parts.append(_text("axis", (left + right) / 2, height - 10, "tokens/s", "middle"))
    parts.append(
        Markup('<text class="axis" transform="translate(14 {}) rotate(-90)" {}>{}</text>').format(
            round((top + bottom) / 2), Markup('text-anchor="middle"'), unit
        )
    )
    kinds = {point.name: _kind(point, main, front) for point in found}
    ordered = sorted(found, key=lambda point: KINDS.index(kinds[point.name]))
    labels = LabelPlacer(axes.frame, CHARACTER, LINE, RADIUS)
    for point in reversed(ordered):
        labels.reserve(axes.x(point.speed), axes.y(point.quality))
        parts.append(_marker(axes, point, kinds[point.name]))
    crowded = len(found) > MAX_LABELS
    for point in ordered:
        if crowded and (point not in front or width < WIDE) and point.name not in ("exact", main):
            continue
        place = labels.place(axes.x(point.speed), axes.y(point.quality), point.name)
        if place is not None:
            x, y = place[0], place[1] + LINE / 3
            name = escape_control_chars(point.name)
            parts.append(_text(f"label {kinds[point.name]}", x, y, name, "middle"))
    parts.append(Markup("</svg>"))
    return Markup("\n").join(parts)


def _kind(point: Point, main: str | None, front: Sequence[Point]) -> str:
    """Return the classes of a point."""
    if point.name in ("exact", main):
        return "exact" if point.name == "exact" else "main"
    return "other" if point in front else "other beaten"


def _ticks(limits: Interval, count: float) -> list[tuple[float, str]]:
    """Return round numbers within the limits, with their text."""
    from matplotlib.ticker import MaxNLocator

    values = MaxNLocator(max(2, int(count)), steps=[1, 2, 2.5, 5, 10]).tick_values(*limits)
    values = [float(value) for value in values if limits[0] <= value <= limits[1]]
    return [(value, f"{round(value, 6):g}") for value in values]


def _marker(axes: _Axes, point: Point, kind: str) -> Markup:
    """Draw a point with its intervals and a tooltip."""
    x, y = axes.x(point.speed), axes.y(point.quality)
    (slow, fast), (low, high) = point.speed_interval, point.quality_interval
    name = escape_control_chars(point.name)
    tip = f"{name}: {point.speed:.1f} tokens/s, {point.quality:.4g}"
    return Markup('<g class="{}"><title>{}</title>{}{}{}</g>').format(
        kind,
        tip,
        _line("error", axes.x(slow), y, axes.x(fast), y),
        _line("error", x, axes.y(low), x, axes.y(high)),
        Markup('<circle cx="{:.1f}" cy="{:.1f}" r="{}"/>').format(x, y, RADIUS),
    )


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> Markup:
    return Markup('<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>').format(
        kind, x1, y1, x2, y2
    )


def _text(kind: str, x: float, y: float, text: str, anchor: str) -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(
        kind, x, y, anchor, text
    )
