"""Analyze a grid of settings: conclusions, and divergences at tree nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle_fsd.evaluation.methods import BASELINES, EXACT
from eagle_fsd.evaluation.statistics import confidence_per_test, loss_bound
from eagle_fsd.evaluation.tables import Row, points_text
from eagle_fsd.evaluation.tuning.workload import Workload
from eagle_fsd.model.probe import DivergenceProbe

#: Maximum number of questions whose divergences are recorded.
MAX_PROBED_QUESTIONS = 50
#: Losses of accuracy, as fractions, for which :func:`conclusions` names the fastest method.
MARGINS = (0.01, 0.02)


def quality(row: Row) -> float:
    """Return a method's accuracy, or its log-probability if it has none; NaN without either."""
    value = row["accuracy"] if row["accuracy"] is not None else row["log_likelihood"]
    return math.nan if value is None else float(value)


def comparable_rows(rows: Sequence[Row]) -> list[Row]:
    """Select the methods with a quality and a speed relative to exact decoding."""
    return [row for row in rows if row["speed_over_exact"] and not math.isnan(quality(row))]


def conclusions(
    rows: Sequence[Row],
    margins: Sequence[float] = MARGINS,
    confidence: float = 0.95,
    dropped: int = 0,
) -> list[str]:
    """Name the fastest method that is not inferior to exact decoding, for each margin.

    A method is not inferior if an exact upper confidence bound on its loss of accuracy is at most
    the margin. The fastest of many methods may pass by chance, so that the error probability is
    divided among the methods that are compared (Bonferroni), including those that were ``dropped``
    after comparing them on the same questions: with the stated confidence, the bounds of all of
    them hold. Too few questions therefore recommend no method rather than a worse one. Without
    exact decoding or without accuracies, there is no conclusion.
    """
    rows = comparable_rows(rows)
    compared = [
        row
        for row in rows
        if "accuracy_change" in row.get("against_exact", {}) and row["method"] not in BASELINES
    ]
    if not compared or all(row["method"] != EXACT.name for row in rows):
        return []
    count = len(compared) + dropped
    level = confidence_per_test(confidence, count)
    faster = [(row, _loss_bound(row, level)) for row in compared if is_faster(row)]
    settings = f"all {count} settings" if count > 1 else "the setting"
    proof = f"(exact paired bound, {100 * confidence:g}% confidence for {settings})"
    sentences = []
    for margin in margins:
        passed = [item for item in faster if item[1] <= margin]
        start = f"Fastest with a loss of accuracy of at most {100 * margin:g} points {proof}:"
        if passed:
            best = max(passed, key=lambda item: item[0]["speed_over_exact"])
            sentences.append(f"{start} {_describe(*best)}.")
        else:
            paired = max(row["against_exact"]["paired"] for row in compared)
            least = points_text(loss_bound(0, 0, paired, level))
            sentences.append(
                f"{start} exact decoding; {paired} questions without any difference show a loss of"
                f" at most {least} points."
            )
    return sentences


def _loss_bound(row: Row, level: float) -> float:
    """Return the upper confidence bound on a method's loss of accuracy, as a fraction."""
    against = row["against_exact"]
    return loss_bound(against["lost"], against["gained"], against["paired"], level)


def _describe(row: Row, bound: float) -> str:
    """Describe a method by its speed, its measured loss and the bound on its loss."""
    against = row["against_exact"]
    plain = f"{row['speedup']:.2f} times plain decoding, " if row["speedup"] else ""
    return (
        f"{row['method']}, {plain}{row['speed_over_exact']:.2f} times exact decoding;"
        f" {100 * against['accuracy_change']:+.1f} points ({against['lost']} lost,"
        f" {against['gained']} gained of {against['paired']}), and the loss is at most"
        f" {points_text(bound)} points"
    )


def is_faster(row: Row) -> bool:
    """Return whether a method is significantly faster than exact decoding."""
    interval = row["speed_over_exact_interval"]
    return interval is not None and interval[0] > 1.0


@dataclass(frozen=True)
class NodeDivergences:
    """Divergences at the ``K`` tree nodes with children that exact decoding visits.

    ``drafted`` tells, ``[K]``, whether the target's choice is among the node's children;
    ``values`` holds ``[K]`` values of each divergence, and ``questions`` the number of questions.
    """

    drafted: Tensor
    values: dict[str, Tensor]
    questions: int = 0

    def summary(self) -> dict[str, Any]:
        """Return counts, and quartiles of each divergence by whether the choice was drafted."""
        levels = torch.tensor([0.25, 0.5, 0.75])
        found: dict[str, Any] = {
            "drafted": int(self.drafted.sum()),
            "not_drafted": int((~self.drafted).sum()),
            "questions": self.questions,
        }
        for name, values in self.values.items():
            sides = {"drafted": values[self.drafted], "not_drafted": values[~self.drafted]}
            found[name] = {
                side: part.quantile(levels).tolist() for side, part in sides.items() if len(part)
            }
        return found


def probe_divergences(workload: Workload, names: Sequence[str]) -> NodeDivergences:
    """Record divergences while decoding the prompts of a workload exactly."""
    probe = DivergenceProbe(names)
    seed, batch = workload.config.seed, workload.config.batch
    workload.generate(workload.model, workload.prompts, seed, max_batch=batch, rule=probe)
    empty = torch.zeros(0)
    return NodeDivergences(
        torch.cat([empty.bool(), *(item.drafted.cpu() for item in probe.records)]),
        {
            name: torch.cat([empty, *(item.divergences[name].cpu() for item in probe.records)])
            for name in names
        },
        len(workload.prompts),
    )
