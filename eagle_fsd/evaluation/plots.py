"""Pictures of a sweep."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from eagle_fsd.evaluation.methods import BASELINES
from eagle_fsd.evaluation.sweep import Divergences, measured, pareto_front, quality
from eagle_fsd.evaluation.tables import footnote

#: Told apart by readers who do not see all colours (Okabe and Ito's palette).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")
MARKERS = "osD^vP<>"
GREY = "#777777"
#: Divergences spread over many orders of magnitude; below this they are all the same.
LEAST = 1e-6
#: Lines in the picture of accepted lengths: more cannot be told apart.
MOST_LINES = 7


def draw_tradeoff(report: dict[str, Any], groups: dict[str, Sequence[str]], path: Path) -> None:
    """Quality against tokens/s: a line a group, the Pareto front, exact decoding marked.

    Args:
        groups: Methods by the name of their line, in its order; the others stand alone.
    """
    figure, (axis,) = _figure(1, (10.5, 6))
    known = {row["method"]: row for row in measured(report["rows"])}
    # The baselines lie far to the left: they would press the rest together.
    rows = {name: row for name, row in known.items() if name not in BASELINES}
    # What was measured within a session, times how fast exact decoding is over all of them.
    pace = known["exact"]["tokens_per_second"] if "exact" in known else 0.0
    speeds_of = {name: row["speed_over_exact"] * pace for name, row in known.items()}
    scored = any(row["accuracy"] is not None for row in rows.values())
    scale = 100.0 if scored else 1.0
    styles = [(colour, marker) for marker in MARKERS for colour in COLOURS]

    def draw(names: Sequence[str], label: str, style: tuple[str, str], line: str) -> None:
        speeds = [speeds_of[name] for name in names]
        values = [scale * quality(rows[name]) for name in names]
        colour, marker = style
        axis.plot(
            speeds, values, linestyle=line, marker=marker, color=colour, label=label, markersize=6
        )

    for style, (label, names) in zip(styles, groups.items(), strict=False):
        draw([name for name in names if name in rows], label, style, "-")
    alone = [name for name in rows if not any(name in names for names in groups.values())]
    for style, name in zip(styles[len(COLOURS) :], alone, strict=False):
        if name != "exact":
            draw([name], name, style, "none")
    front = pareto_front(list(rows.values()))
    for row in front:
        if row["method"] not in (*alone, "exact"):  # of those the legend tells
            axis.annotate(
                row["method"],
                (speeds_of[row["method"]], scale * quality(row)),
                xytext=(2, 5),
                textcoords="offset points",
                fontsize=7,
                rotation=30,  # beside each other where the points are
            )
    axis.step(
        [speeds_of[row["method"]] for row in front],
        [scale * quality(row) for row in front],
        where="pre",
        color="black",
        linewidth=1,
        linestyle="--",
        label="Pareto front",
        zorder=1,
    )
    if "exact" in rows:
        exact = rows["exact"]
        level = scale * quality(exact)
        axis.axhline(level, color=GREY, linewidth=0.8, linestyle=":", zorder=0)
        if scored:
            low, high = (scale * end for end in exact["accuracy_interval"])
            axis.axhspan(low, high, color=GREY, alpha=0.1, linewidth=0, zorder=0)
        axis.plot(
            [speeds_of["exact"]],
            [level],
            marker="*",
            markersize=18,
            color="black",
            linestyle="none",
            label="exact (95 % interval grey)" if scored else "exact",
            zorder=5,
        )
    axis.margins(y=0.1)  # room for the names
    axis.set_xlabel("tokens/s, prompt's prefill included")
    axis.set_ylabel("accuracy, %" if scored else "the target's log-probability, nats a token")
    title = "Quality against speed"
    if "plain" in known:
        plain = known["plain"]
        speed = speeds_of["plain"]
        times = axis.secondary_xaxis("top", functions=(lambda x: x / speed, lambda x: x * speed))
        times.set_xlabel("times plain decoding")
        level = f"{scale * quality(plain):.4g}" + " %" * scored
        title += f" (plain decoding: {speed:.0f} tokens/s, {level})"
    axis.set_title(title)
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _save(figure, path, report)


def draw_divergences(
    found: Divergences, thresholds: Sequence[float], report: dict[str, Any], path: Path
) -> None:
    """Histograms, split by whether the target's choice was in the tree; thresholds as lines."""
    figure, axes = _figure(len(found.values), (5.5 * len(found.values), 4.5))
    for axis, (name, values) in zip(axes, found.values.items(), strict=True):
        low, high = math.log10(LEAST), math.log10(max([1.0, *values.tolist()]))
        edges = torch.logspace(low, high, 49).tolist()
        for drafted, colour in ((True, COLOURS[0]), (False, COLOURS[1])):
            part = values[found.drafted == drafted]
            if not len(part):
                continue
            label = f"target's choice {'in' if drafted else 'not in'} the tree ({len(part)} nodes)"
            axis.hist(
                part.clamp(min=LEAST).tolist(),
                bins=edges,
                weights=[1 / len(part)] * len(part),
                color=colour,
                alpha=0.55,
                label=label,
            )
            median = float(part.median())
            axis.axvline(median, color=colour, linewidth=1.5, label=f"median {median:.3g}")
        for threshold in thresholds:
            if threshold > LEAST:
                axis.axvline(threshold, color="black", linewidth=0.7, linestyle=":")
        axis.set_xscale("log")
        where = f"where exact decoding goes, in {found.questions} answers"
        axis.set_title(f"{name} between target and draft\n{where}")
        unit = "share of the mass" if name.endswith("tv") else "nats"
        axis.set_xlabel(f"{unit}, {LEAST:g} and less at the left" + "; T dotted" * bool(thresholds))
        axis.set_ylabel("share of the nodes")
        axis.set_ylim(top=1.45 * axis.get_ylim()[1])  # the legend's room
        axis.legend(framealpha=1.0, edgecolor="none", fontsize=8, loc="upper center")
    _save(figure, path, report)


def draw_positions(report: dict[str, Any], path: Path) -> None:
    """How often a target pass emits at least 1, 2, 3, ... tokens."""
    figure, (axis,) = _figure(1, (9, 5.5))
    rows = [row for row in report["rows"] if len(row["reach"]) > 1]
    rows.sort(key=lambda row: row["tau"])
    if len(rows) > MOST_LINES:  # exact decoding, and a spread over the others
        others = [row for row in rows if row["method"] != "exact"]
        exact = [row for row in rows if row["method"] == "exact"]
        room = MOST_LINES - len(exact)
        steps = [round(at * (len(others) - 1) / (room - 1)) for at in range(room)]
        rows = exact + [others[at] for at in sorted(set(steps))]
    for row, colour in zip(rows, COLOURS, strict=False):
        exact_line = row["method"] == "exact"
        axis.plot(
            range(1, len(row["reach"]) + 1),
            [100 * share for share in row["reach"]],
            marker="*" if exact_line else "o",
            markersize=9 if exact_line else 4,
            color="black" if exact_line else colour,
            label=f"{row['method']}: tau {row['tau']:.2f}",
        )
    axis.set_xlabel("tokens")
    axis.set_xticks(range(1, max((len(row["reach"]) for row in rows), default=1) + 1))
    axis.set_ylabel("target passes that emit at least so many, %")
    axis.set_ylim(0, 103)
    axis.set_title("Accepted length by position")
    axis.legend(frameon=False, fontsize=8)
    _save(figure, path, report)


def _figure(panels: int, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    """A figure without a display, and its axes side by side."""
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
    """Write the PNG; how it was made stands below it, and whole in its metadata."""
    figure.supxlabel(footnote(report), fontsize=6, color=GREY, wrap=True)
    about = {key: report[key] for key in ("about", "settings", "environment")}
    figure.savefig(path, dpi=120, metadata={"Description": json.dumps(about)})
