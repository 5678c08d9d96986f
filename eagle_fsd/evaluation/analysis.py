"""Analyze a grid of settings: the Pareto front, conclusions, and divergences at tree nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import StopStringCriteria

from eagle_fsd.evaluation.config import EvaluationConfig
from eagle_fsd.evaluation.methods import BASELINES
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.questions.sets import balanced_subset
from eagle_fsd.evaluation.statistics import loss_bound
from eagle_fsd.evaluation.tables import Row
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.model.probe import DivergenceProbe
from eagle_fsd.utils.chat_templates import ChatTemplate, encode_prompt

#: Maximum number of questions whose divergences are recorded.
MAX_PROBED_QUESTIONS = 50
#: Significance level of the test for a change in accuracy.
SIGNIFICANCE = 0.05


def quality(row: Row) -> float:
    """Return a method's accuracy, or its log-probability if it has none; NaN without either.

    Args:
        row: The method's row of a report.
    """
    value = row["accuracy"] if row["accuracy"] is not None else row["log_likelihood"]
    return math.nan if value is None else float(value)


def comparable_rows(rows: Sequence[Row]) -> list[Row]:
    """Select the methods with a quality and a speed relative to exact decoding.

    Args:
        rows: Rows of a report.
    """
    return [row for row in rows if row["speed_over_exact"] and not math.isnan(quality(row))]


def pareto_front(rows: Sequence[Row]) -> list[Row]:
    """Select the methods that no other method dominates in speed and quality.

    Args:
        rows: Rows of a report.

    Returns:
        The methods, slowest first.
    """
    front: list[Row] = []
    rows = comparable_rows(rows)
    for row in sorted(rows, key=lambda row: (-row["speed_over_exact"], -quality(row))):
        if not front or quality(row) > quality(front[-1]):
            front.append(row)
    return front[::-1]


def conclusions(rows: Sequence[Row], max_loss: float = 0.02) -> list[str]:
    """Name the fastest method without a significant loss, and the fastest within a given loss.

    Args:
        rows: Rows of a report.
        max_loss: Largest measured loss of accuracy for the second conclusion, as a fraction.

    Returns:
        Two sentences; an empty list without exact decoding or without accuracies.
    """
    rows = comparable_rows(rows)
    relaxed = [
        row
        for row in rows
        if "accuracy_change" in row.get("against_exact", {}) and row["method"] not in BASELINES
    ]
    if not relaxed or all(row["method"] != "exact" for row in rows):
        return []

    def change(row: Row) -> float:
        value: float = row["against_exact"]["accuracy_change"]
        return value

    unharmed = [
        row
        for row in relaxed
        if change(row) >= 0 or row["against_exact"]["mcnemar_p"] > SIGNIFICANCE
    ]
    within = [row for row in relaxed if change(row) >= -max_loss]
    # The best of many settings may be best by chance: the bound must hold for all at once.
    confidence = 1 - 0.05 / len(relaxed)
    points = 100 * max_loss
    return [
        f"Fastest without a significant loss of accuracy (p > {SIGNIFICANCE:g}):"
        f" {_describe_fastest(unharmed, confidence)}.",
        f"Fastest with a measured loss of at most {points:g} points:"
        f" {_describe_fastest(within, confidence)}.",
    ]


def _describe_fastest(rows: Sequence[Row], confidence: float) -> str:
    """Describe the fastest of the methods that are faster than exact decoding."""
    faster = [row for row in rows if is_faster(row)]
    if not faster:
        return "exact decoding"
    best = max(faster, key=lambda row: row["speed_over_exact"])
    against = best["against_exact"]
    bound = loss_bound(against["lost"], against["gained"], against["paired"], confidence)
    plain = f"{best['speedup']:.2f} times plain decoding, " if best["speedup"] else ""
    return (
        f"{best['method']}, {plain}{best['speed_over_exact']:.2f} times exact decoding;"
        f" {100 * against['accuracy_change']:+.1f} points ({against['lost']} lost,"
        f" {against['gained']} gained of {against['paired']}); the loss is below"
        f" {100 * max(0.0, bound):.1f} points with 95% confidence over all settings"
    )


def is_faster(row: Row) -> bool:
    """Return whether a method is significantly faster than exact decoding.

    Args:
        row: The method's row of a report.
    """
    interval = row["speed_over_exact_interval"]
    return interval is not None and interval[0] > 1.0


@dataclass(frozen=True)
class NodeDivergences:
    """Divergences at the ``K`` tree nodes with children that exact decoding visits.

    Attributes:
        drafted: ``[K]``; whether the target's choice is among the node's children.
        values: ``[K]`` values for each divergence.
        questions: Number of questions that were selected for recording.
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


def probe_divergences(
    model: EagleFSD,
    questions: Sequence[Question],
    chat_template: ChatTemplate,
    names: Sequence[str],
    config: EvaluationConfig,
) -> NodeDivergences:
    """Record divergences while decoding the first turns of some questions exactly.

    Args:
        model: The pair.
        questions: The questions; at most :data:`MAX_PROBED_QUESTIONS` are selected, and those whose
            prompt fills the context are skipped.
        chat_template: How chats are formatted.
        names: Divergences to record.
        config: How answers are decoded.
    """
    probe = DivergenceProbe(names)
    stop = chat_template.stop
    criteria = [StopStringCriteria(model.tokenizer, list(stop))] if stop else []
    answered = 0
    for question in balanced_subset(questions, MAX_PROBED_QUESTIONS):
        chat = [{"role": "user", "content": question.turns[0]}]
        ids = encode_prompt(chat, model.tokenizer, chat_template).to(model.target.device)
        if ids.shape[1] < model.target.context_length:
            answered += 1
            model.generate(
                ids,
                torch.ones_like(ids),
                config.max_new_tokens,
                sampling=config.sampling(config.seed),
                rule=probe,
                eos_token_id=[*model.eos_token_ids, *chat_template.stop_token_ids],
                stopping_criteria=criteria,
            )
    empty = torch.zeros(0)
    return NodeDivergences(
        torch.cat([empty.bool(), *(item.drafted.cpu() for item in probe.records)]),
        {
            name: torch.cat([empty, *(item.divergences[name].cpu() for item in probe.records)])
            for name in names
        },
        answered,
    )
