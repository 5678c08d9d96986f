"""Plots of a training's metrics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

CURVES_FILE = "curves.png"

#: Title, y-axis label and curves of each panel; a curve is a kind of metrics and a metric.
PANELS = (
    ("loss", "loss", (("train", "loss"), ("validation", "loss"))),
    ("agreement with the target", "fraction", (("train", "top1"), ("train", "top3"))),
    ("exact decoding of held-out chats", "tau", (("validation", "tau"),)),
    ("learning rate", "learning rate", (("train", "lr"),)),
)
#: Maximum number of validations in the panel of divergences.
MAX_DEPTH_CURVES = 5


def draw_curves(metrics: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw :data:`PANELS` and the divergence by depth as a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(14, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 3).flatten()
    for axis, (title, label, curves) in zip(axes, PANELS, strict=False):
        for kind, name in curves:
            lines = [line for line in metrics if line["kind"] == kind and line.get(name)]
            if lines:
                steps, values = [line["step"] for line in lines], [line[name] for line in lines]
                marker = "o" if kind == "validation" else ""
                axis.plot(steps, values, marker=marker, markersize=4, label=f"{kind} {name}")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        _finish_panel(axis, title, "step", label)
    _draw_depths(axes[len(PANELS)], metrics)
    axes[-1].axis("off")
    figure.savefig(path, dpi=110)


def _draw_depths(axis: Any, metrics: Sequence[dict[str, Any]]) -> None:
    lines = [line for line in metrics if line.get("js_by_depth")]
    every = max(1, len(lines) // (MAX_DEPTH_CURVES - 1))
    shown = lines[::every][1 - MAX_DEPTH_CURVES :] + lines[-1:]
    for line in {line["step"]: line for line in shown}.values():
        depths = range(len(line["js_by_depth"]))
        label = f"step {line['step']}"
        axis.plot(depths, line["js_by_depth"], marker="o", markersize=4, label=label)
    title = "JS divergence between target and draft at accepted nodes"
    _finish_panel(axis, title, "depth in the tree", "nats")


def _finish_panel(axis: Any, title: str, x_label: str, y_label: str) -> None:
    axis.set(title=title, xlabel=x_label, ylabel=y_label)
    axis.grid(alpha=0.3)
    if axis.lines:
        axis.legend(frameon=False)
