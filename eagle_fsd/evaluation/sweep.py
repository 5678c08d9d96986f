"""What a grid of settings says: the Pareto front, two sentences, and where the gate would open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle_fsd.evaluation.config import Decoding
from eagle_fsd.evaluation.methods import BASELINES
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.questions.sets import spread
from eagle_fsd.evaluation.statistics import loss_bound
from eagle_fsd.evaluation.tables import Row
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.model.probe import Onlooker
from eagle_fsd.utils.chat_templates import ChatFormat, encode_prompt

#: Answers of exact decoding that divergences are taken from.
WATCHED = 50
#: A change in accuracy less likely than this by chance is measurable.
CHANCE = 0.05


def quality(row: Row) -> float | None:
    """What a method is judged by: accuracy, or where there is none, nats a token."""
    return row["accuracy"] if row["accuracy"] is not None else row["log_likelihood"]


def measured(rows: Sequence[Row]) -> list[Row]:
    """Those that have both a speed that compares with exact decoding's, and a quality."""
    return [row for row in rows if row["speed_over_exact"] and quality(row) is not None]


def pareto_front(rows: Sequence[Row]) -> list[Row]:
    """Methods that no other beats in speed without falling behind in quality; slowest first."""
    front: list[Row] = []
    for row in sorted(measured(rows), key=lambda row: (-row["speed_over_exact"], -quality(row))):
        if not front or quality(row) > quality(front[-1]):
            front.append(row)
    return front[::-1]


def conclusions(rows: Sequence[Row], largest_loss: float = 0.02) -> list[str]:
    """How fast decoding gets at no measurable loss of accuracy, and at ``largest_loss``."""
    rows = measured(rows)
    exact = next((row for row in rows if row["method"] == "exact"), None)
    relaxed = [row for row in rows if "accuracy_change" in row.get("against_exact", {})]
    relaxed = [row for row in relaxed if row["method"] not in BASELINES]
    if exact is None or not relaxed:
        return []
    change = {row["method"]: row["against_exact"]["accuracy_change"] for row in relaxed}
    unharmed = [
        row
        for row in relaxed
        if change[row["method"]] >= 0 or row["against_exact"]["mcnemar_p"] > CHANCE
    ]
    bounded = [row for row in relaxed if change[row["method"]] >= -largest_loss]
    # The best of many is the luckiest as well: the bound holds for all of them at once.
    confidence = 1 - 0.05 / len(relaxed)
    return [
        _sentence(what, found, confidence)
        for what, found in (
            (
                f"Fastest of those whose loss of accuracy is not measurable (p > {CHANCE:g})",
                unharmed,
            ),
            (f"Fastest at a measured loss of {100 * largest_loss:g} points at most", bounded),
        )
    ]


def _sentence(what: str, rows: Sequence[Row], confidence: float) -> str:
    faster = [row for row in rows if (row["speed_over_exact_interval"] or [0.0])[0] > 1.0]
    if not faster:
        return f"{what}: exact decoding."
    best = max(faster, key=lambda row: row["speed_over_exact"])
    against = best["against_exact"]
    bound = loss_bound(against["lost"], against["gained"], against["paired"], confidence)
    plain = f"{best['speedup']:.2f} times plain decoding, " if best["speedup"] else ""
    return (
        f"{what}: {best['method']}, {plain}"
        f"{best['speed_over_exact']:.2f} times exact;"
        f" {100 * against['accuracy_change']:+.1f} points ({against['lost']} lost,"
        f" {against['gained']} gained of {against['paired']}; with 95 % confidence, whichever of"
        f" the settings is looked at, the loss is below {100 * max(0.0, bound):.1f})."
    )


@dataclass(frozen=True)
class Divergences:
    """Divergences at the nodes that exact decoding passes through.

    Attributes:
        drafted: ``[K]`` whether the target's choice was among the node's children. (Leaves have
            none, and no divergence: they are not among the K.)
        values: ``[K]`` by name of the divergence.
        questions: How many answers they are from.
    """

    drafted: Tensor
    values: dict[str, Tensor]
    questions: int = 0

    def summary(self) -> dict[str, Any]:
        """Counts, and for each divergence the quartiles on both sides."""
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


def watch_divergences(
    model: EagleFSD,
    questions: Sequence[Question],
    wording: ChatFormat,
    names: Sequence[str],
    decoding: Decoding,
) -> Divergences:
    """Decode the first turns of some questions exactly, and look at the divergences on the way."""
    watch = Onlooker(names)
    for question in spread(questions, WATCHED):
        chat = [{"role": "user", "content": question.turns[0]}]
        ids = encode_prompt(chat, model.tokenizer, wording).to(model.target.device)
        if ids.shape[1] < model.target.context:
            model.generate(
                ids,
                torch.ones_like(ids),
                max_new_tokens=decoding.max_new_tokens,
                temperature=decoding.temperature,
                top_p=decoding.top_p,
                top_k=decoding.top_k,
                seed=decoding.seed,
                rule=watch,
            )
    empty = torch.zeros(0)
    return Divergences(
        torch.cat([empty.bool(), *(item.drafted.cpu() for item in watch.seen)]),
        {
            name: torch.cat([empty, *(item.divergences[name].cpu() for item in watch.seen)])
            for name in names
        },
        min(len(questions), WATCHED),
    )
