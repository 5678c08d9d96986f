"""Choosing settings for a pair: the fastest whose loss of quality is surely within a bound.

Every setting is compared with exact decoding on the same questions. A setting is *certified* when
an upper confidence bound of its loss is within what is allowed. Looking at many settings and taking
the best would find one that passed by luck; so for each floor (``min_ratio``) the thresholds are
tried in rising order, the first that fails ends that series, and the series share the error between
them (fixed-sequence testing; Angelopoulos et al., "Learn then Test", arXiv 2110.01052). With the
stated confidence no certified setting loses more than allowed on questions like these, so any of
them may be picked freely: the fastest, and of those hardly slower the one with the smallest bound.
(For accuracy that is sound; a bound on nats is an approximation, see ``mean_loss_bound``.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_fsd.evaluation.methods import EXACT, Method
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.statistics import FEWEST_LOSSES, loss_bound, mean_loss_bound
from eagle_fsd.evaluation.tables import Row, Table

#: Speeds nearer to each other than this are the same: timings of one setting differ so much.
NOISE = 0.02
#: Exact decoding must be right in so many points, and this many times as often as may be lost: else
#: there is little to lose because answers are cut off, or not read.
LEAST_POINTS, LEAST_TO_LOSE = 5.0, 2.0


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

    def check(self, questions: Sequence[Question], series: int, execute_code: bool) -> str | None:
        """Whether these questions can tell; called before any is answered.

        Args:
            series: How many series of settings share the error.

        Returns:
            A warning where nothing can be certified, however well it does.

        Raises:
            ValueError: They have no score, or are too few for a bound on nats.
        """
        if self.max_drop is not None:
            kinds = {question.scored_by for question in questions}
            if "" in kinds:
                raise ValueError(
                    "these questions have no score of their own: bound the loss with --max-nats"
                )
            if "code" in kinds and not execute_code:
                raise ValueError("code is scored by running it: --execute-code")
            least = 100 * loss_bound(0, 0, len(questions), self.level(series))
            if least > self.max_drop:
                return (
                    f"{len(questions)} questions cannot show a loss below {least:.2f} points even"
                    f" where nothing is lost: take more, or allow more than {self.max_drop:g}"
                )
        elif len(questions) < FEWEST_LOSSES:
            raise ValueError(
                f"a bound on nats a token needs {FEWEST_LOSSES} questions at least; there are"
                f" {len(questions)}"
            )
        return None

    def level(self, series: int) -> float:
        """The confidence of each bound: every series may err once, on each quality asked about."""
        asked = (self.max_drop is not None) + (self.max_nats is not None)
        return 1 - (1 - self.confidence) / (series * asked)

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
    confidence = allowed.level(len(series))
    if allowed.max_drop is not None:
        _check_exact(by_name[EXACT.name], allowed.max_drop)
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


def _check_exact(exact: Row, max_drop: float) -> None:
    """Whether exact decoding has an accuracy that could be lost."""
    points = 100 * (exact["accuracy"] or 0.0)
    if points < max(LEAST_POINTS, LEAST_TO_LOSE * max_drop):
        raise ValueError(
            f"exact decoding is right in {points:.1f} % of the answers, too little to lose for a"
            f" bound of {max_drop:g} points ({exact['cut_off']} answers were cut off; are"
            " --max-new-tokens and the chat template right?)"
        )


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
    found = [found[0], *(item for item in found[1:] if _surely_faster(item[0]))]
    best = max(row["speed_over_exact"] for row, _ in found)
    near = [item for item in found if item[0]["speed_over_exact"] >= (1 - NOISE) * best]
    return min(near, key=lambda item: item[1])[0]


def _surely_faster(row: Row) -> bool:
    """Than exact decoding, by more than chance."""
    return (row["speed_over_exact_interval"] or [0.0])[0] > 1.0


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
    headers = ["setting", "tokens/s", "x exact", "tau", "accuracy", "lost/gained"]
    headers += ["points lost <=", "nats <="]
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
                f"{row['accuracy']:.1%}" if row["accuracy"] is not None else "",
                f"{against['lost']}/{against['gained']}" if "lost" in against else "",
                "" if verdict.drop is None else f"{verdict.drop:.2f}",
                "" if verdict.nats is None else f"{verdict.nats:.4f}",
                words[verdict.certified],
            ]
        )
    return [*headers, ""], cells
