"""Plots of a training's metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_fsd.utils.files import atomic_path

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
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(14, 7), layout="constrained")
    axes = figure.subplots(2, 3).flatten()
    for axis, (title, label, curves) in zip(axes, PANELS, strict=False):
        axis.set(title=title, xlabel="step", ylabel=label)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        for kind, name in curves:
            lines = [
                line for line in metrics if line["kind"] == kind and line.get(name) is not None
            ]
            if lines:
                steps, values = [line["step"] for line in lines], [line[name] for line in lines]
                marker = "o" if kind == "validation" else ""
                axis.plot(steps, values, marker=marker, markersize=4, label=f"{kind} {name}")
    title = "JS divergence between target and draft at accepted nodes"
    axes[len(PANELS)].set(title=title, xlabel="depth in the tree", ylabel="nats")
    lines = [line for line in metrics if line.get("js_by_depth")]
    every = max(1, math.ceil(len(lines) / MAX_DEPTH_CURVES))
    for line in reversed(lines[::-every]):  # up to the last one
        axes[len(PANELS)].plot(
            line["js_by_depth"], marker="o", markersize=4, label=f"step {line['step']}"
        )
    for axis in axes[: len(PANELS) + 1]:
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(frameon=False)
    axes[-1].axis("off")
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
