"""A picture of how a training went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: Panels: title, axis label, and the metrics drawn, each from the kind of line that holds it.
PANELS = (
    ("loss", "loss", (("train", "loss"), ("validation", "loss"))),
    ("agreement with the target", "share", (("train", "top1"), ("train", "top3"))),
    ("exact decoding of held-out chats", "tau", (("validation", "tau"),)),
    ("learning rate", "rate", (("train", "lr"),)),
)


def draw_curves(metrics: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG with a panel for each of :data:`PANELS`, and one of JS by accepted depth."""
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
                marker = "o" if kind == "validation" else ""
                steps, values = [line["step"] for line in lines], [line[name] for line in lines]
                axis.plot(steps, values, marker=marker, markersize=4, label=f"{kind} {name}")
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(frameon=False)
    _depth_panel(axes[len(PANELS)], metrics)
    axes[-1].axis("off")
    figure.savefig(path, dpi=110)


def _depth_panel(axis: Any, metrics: Sequence[dict[str, Any]]) -> None:
    lines = [line for line in metrics if line.get("js_by_depth")]
    shown = lines[:: max(1, len(lines) // 4)][-4:] + lines[-1:]
    for line in {line["step"]: line for line in shown}.values():
        values = line["js_by_depth"]
        axis.plot(
            range(len(values)), values, marker="o", markersize=4, label=f"step {line['step']}"
        )
    axis.set_title("JS between target and draft at accepted nodes")
    axis.set_xlabel("depth in the tree")
    axis.set_ylabel("nats")
    axis.grid(alpha=0.3)
    if axis.lines:
        axis.legend(frameon=False)
