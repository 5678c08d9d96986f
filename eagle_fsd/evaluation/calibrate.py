"""Choosing settings for a pair: the fastest whose loss of quality is surely within a bound.

Every setting is compared with exact decoding on the same questions. A setting is *certified* when
an upper confidence bound of its loss is within what is allowed. Looking at many settings and taking
the best would find one that passed by luck; so for each floor (``min_ratio``) the thresholds are
tried in rising order, the first that fails ends that series, and the series share the error between
them (fixed-sequence testing; Angelopoulos et al., "Learn then Test", arXiv 2110.01052). With the
stated confidence no certified setting loses more than allowed, so any of them may be picked freely:
the fastest, and of those hardly slower the one with the smallest bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_fsd.evaluation.methods import EXACT, Method
from eagle_fsd.evaluation.scoring import loss_bound, mean_loss_bound
from eagle_fsd.evaluation.tables import Row, Table

#: Speeds nearer to each other than this are the same: timings of one setting differ so much.
NOISE = 0.02


@dataclass(frozen=True)
class Allowed:
    """How much may be lost; None: that quality is not asked about.

    Attributes:
        max_drop: Points of accuracy. max_nats: Nats a token of the target's log-probability.
        confidence: That neither bound is broken.
    """

    max_drop: float | None = 0.5
    max_nats: float | None = None
    confidence: float = 0.95

    def __post_init__(self) -> None:
        if self.max_drop is None and self.max_nats is None:
            raise ValueError("calibration needs a bound: --max-drop or --max-nats")
        if not 0.5 <= self.confidence < 1.0:
            raise ValueError(f"confidence must be at least 0.5 and below 1; got {self.confidence}")


@dataclass(frozen=True)
class Verdict:
    """What was found of one setting.

    Attributes:
        row: Its row of the report.
        drop, nats: Upper bounds of the losses, in points and nats a token; None where not asked.
        certified: Whether it is within what is allowed; None: its series had ended before.
    """

    row: Row
    drop: float | None
    nats: float | None
    certified: bool | None


def certify(
    rows: Sequence[Row],
    series: Sequence[Sequence[Method]],
    allowed: Allowed,
    losses: Callable[[str], Sequence[float]],
) -> list[Verdict]:
    """A verdict on every method of every series, each tried in its order.

    Args:
        losses: What a method gave up on each question, nats a token.

    Raises:
        ValueError: The questions have no score, but a loss of accuracy is bounded; none was
            answered, or too few for a bound on nats; or speeds cannot be compared.
    """
    by_name = {row["method"]: row for row in rows}
    if not all(row["tokens_per_second"] for row in rows):
        raise ValueError("no question was answered: there is nothing to calibrate on")
    if not all(row["speed_over_exact"] for row in rows):
        raise ValueError(
            "exact decoding and the others were not answered in one run, so their speeds do not"
            " compare: name another folder"
        )
    # Every series may err once, on each quality that is asked about.
    asked = (allowed.max_drop is not None) + (allowed.max_nats is not None)
    confidence = 1 - (1 - allowed.confidence) / (len(series) * asked)
    verdicts = []
    for methods in series:
        going = True
        for method in methods:
            row = by_name[method.name]
            drop, nats = _bounds(row, allowed, confidence, losses)
            within = (drop is None or drop <= allowed.max_drop) and (
                nats is None or nats <= allowed.max_nats
            )
            verdicts.append(Verdict(row, drop, nats, within if going else None))
            going = going and within
    return verdicts


def _bounds(
    row: Row, allowed: Allowed, confidence: float, losses: Callable[[str], Sequence[float]]
) -> tuple[float | None, float | None]:
    against = row["against_exact"]
    drop = nats = None
    if allowed.max_drop is not None:
        if "lost" not in against:
            raise ValueError(
                "these questions have no score of their own: bound the loss with --max-nats"
            )
        drop = 100 * loss_bound(against["lost"], against["gained"], against["paired"], confidence)
    if allowed.max_nats is not None:
        nats = mean_loss_bound(losses(row["method"]), confidence)
    return drop, nats


def fastest(rows: Sequence[Row], verdicts: Sequence[Verdict]) -> Row:
    """The fastest certified setting; exact decoding where none is faster.

    Of those within :data:`NOISE` of the fastest, the one that is known to lose least.
    """
    exact = next(row for row in rows if row["method"] == EXACT.name)
    found = [(exact, (0.0, 0.0))]
    found += [
        (item.row, (item.drop or 0.0, item.nats or 0.0)) for item in verdicts if item.certified
    ]
    best = max(row["speed_over_exact"] for row, _ in found)
    near = [item for item in found if item[0]["speed_over_exact"] >= (1 - NOISE) * best]
    return min(near, key=lambda item: item[1])[0]


def chosen_settings(
    row: Row,
    methods: Sequence[Method],
    verdicts: Sequence[Verdict],
    allowed: Allowed,
    report: dict[str, Any],
) -> dict[str, Any]:
    """The content of ``fsd.json``: the settings, and under ``about`` why and from what."""
    method = next(method for method in (EXACT, *methods) if method.name == row["method"])
    exact = next(item for item in report["rows"] if item["method"] == EXACT.name)
    verdict = next((item for item in verdicts if item.row is row), None)
    # The tree as well: of another one, nothing was certified.
    shared = ("fallback", "selection", "divergence_on", "total_tokens", "depth", "top_k")
    asked = ("questions", "count", "seed", "temperature", "batch", "max_new_tokens", "template")
    return {
        **(method.options or {}),
        **{name: report["settings"][name] for name in shared},
        "about": {
            "made_by": "eagle-fsd calibrate",
            "max_drop_points": allowed.max_drop,
            "max_nats_a_token": allowed.max_nats,
            "confidence": allowed.confidence,
            "drop_is_below_points": verdict.drop if verdict else 0.0,
            "nats_are_below": verdict.nats if verdict else 0.0,
            "accuracy": row["accuracy"],
            "accuracy_exact": exact["accuracy"],
            "speed_over_exact": row["speed_over_exact"],
            "tau": row["tau"],
            "tau_exact": exact["tau"],
            **{key: report["about"][key] for key in (*asked, "target", "head")},
            "dtype": report["dtype"],
            "device": report["device"],
            "environment": report["environment"],
            "sessions": len(report["sessions"]),
        },
    }


def verdict_table(verdicts: Sequence[Verdict]) -> Table:
    """What was tried, and what came of it."""
    headers = ["setting", "tokens/s", "x exact", "tau", "lost/gained", "points lost <=", "nats <="]
    words = {True: "within the bound", False: "not within it", None: "not tried: after a failure"}
    cells = []
    for verdict in verdicts:
        row, against = verdict.row, verdict.row["against_exact"]
        cells.append(
            [
                row["method"],
                f"{row['tokens_per_second']:.1f}",
                f"{row['speed_over_exact']:.2f}",
                f"{row['tau']:.2f}",
                f"{against['lost']}/{against['gained']}" if "lost" in against else "",
                "" if verdict.drop is None else f"{verdict.drop:.2f}",
                "" if verdict.nats is None else f"{verdict.nats:.4f}",
                words[verdict.certified],
            ]
        )
    return [*headers, ""], cells
