"""State the result of a report in a few sentences, with its bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from eagle_fsd.evaluation.frontier import comparable_rows, is_faster
from eagle_fsd.evaluation.methods import BASELINES, EXACT, FSD
from eagle_fsd.evaluation.statistics import loss_bound
from eagle_fsd.evaluation.tables import Row, method_text, points_text

#: Losses of accuracy, as fractions, for which :func:`conclusions` names the fastest method.
MARGINS = (0.01, 0.02)
#: Estimated loss of accuracy up to which a method may be shown where no bound is small enough.
MAX_SHOWN_LOSS = 0.01
#: States that ``fsd`` was not decoded.
SKIPPED = (
    "Without a threshold, fsd is exact decoding, so it is not decoded a second time: set"
    " --threshold, or calibrate the pair."
)


def main_row(report: dict[str, Any]) -> Row | None:
    """Return the method that a report is about; None if nothing is compared with exact decoding.

    This is FSD with the settings of the command line or of ``fsd.json``, or the settings that a
    calibration certified; where there are none, the method that the first of the
    :func:`conclusions` names; where they name none, the fastest method that is estimated to lose at
    most one point of accuracy, or the fastest of all if none is. Without references, it is the one
    that changes the fewest answers, of the faster methods if there are any.
    """
    rows = [
        row for row in report["rows"] if "against_exact" in row and row["method"] not in BASELINES
    ]
    own = report["calibrated"] if "calibration" in report else FSD.name
    for row in rows:
        if row["method"] == own:
            return row
    if not any("accuracy_change" in row["against_exact"] for row in rows):
        faster = list(filter(is_faster, rows)) or rows
        return max(faster, key=_fidelity, default=None)
    groups = [
        [row for row in rows if is_faster(row) and _compared(row, "loss_limit", 1.0) <= margin]
        for margin in MARGINS
    ]
    likely = [row for row in rows if _compared(row, "accuracy_change", 0.0) >= -MAX_SHOWN_LOSS]
    found = next((group for group in [*groups, likely] if group), rows)
    return max(found, key=_speed_over_exact, default=None)


def _speed_over_exact(row: Row) -> float:
    """Return the speed relative to exact decoding; 0 if they were not timed in one session."""
    return row["speed_over_exact"] or 0.0


def _fidelity(row: Row) -> tuple[float, float]:
    """Return the share of answers that are exact decoding's, then the speed."""
    found = row["against_exact"]["agreement"]
    return found["identical"] / max(1, found["answers"]), _speed_over_exact(row)


def _compared(row: Row, name: str, default: float) -> float:
    """Return a value of the comparison with exact decoding."""
    return float(row["against_exact"].get(name, default))


def verdict(report: dict[str, Any]) -> str | None:
    """Return the result of a report in a few sentences that state its bound; None if there is none.

    This is the first of the report's conclusions if it has any, or else about :func:`main_row`.
    """
    if report.get("conclusions"):
        return str(report["conclusions"][0])
    sentences = []
    if (row := main_row(report)) is not None:
        sentences.append(comparison_text(report, row))
    for row in report["rows"]:
        if row["method"] == EXACT.name and _is_slower_than_plain(row):
            sentences.append(
                "Exact decoding is slower than plain decoding with this pair on this machine"
                f" ({row['speedup']:.2f} times as fast; {_interval(row['speedup_interval'])}):"
                " eagle-fsd doctor looks for the cause."
            )
    if report.get("skipped"):
        sentences.append(SKIPPED)
    return " ".join(sentences) or None


def comparison_text(report: dict[str, Any], row: Row) -> str:
    """Compare a method with the reference in a sentence that bounds the difference."""
    reference = report.get("reference", "exact decoding")
    return f"{_speed(row, reference)}; {_quality(report, row, reference)}."


def conclusions(report: dict[str, Any], margins: Sequence[float] = MARGINS) -> list[str]:
    """Name the fastest method that is not inferior to exact decoding, for each margin.

    A method is not inferior if the report's limit on its loss of accuracy, which holds for all
    methods at once, is at most the margin, so too few questions recommend no method rather
    than a worse one. Without exact decoding or without accuracies, there is no conclusion.
    """
    compared = [
        row
        for row in comparable_rows(report["rows"])
        if "loss_limit" in row.get("against_exact", {})
    ]
    if not compared:
        return []
    settings = f"all {len(compared)} settings" if len(compared) > 1 else "the setting"
    proof = f"(exact paired bound, {100 * report['confidence']:g}% confidence for {settings})"
    sentences = []
    for margin in margins:
        passed = [
            row
            for row in compared
            if is_faster(row) and row["against_exact"]["loss_limit"] <= margin
        ]
        start = f"Fastest within a {100 * margin:g}-point loss of accuracy {proof}:"
        if passed:
            best = max(passed, key=lambda row: row["speed_over_exact"])
            sentences.append(f"{start} {comparison_text(report, best)}")
        else:
            paired = max(row["against_exact"]["paired"] for row in compared)
            least = points_text(loss_bound(0, 0, paired, report["limit_confidence"]))
            sentences.append(
                f"{start} exact decoding; {paired} questions without any difference show a loss of"
                f" at most {least} points."
            )
    return sentences


def _is_slower_than_plain(row: Row) -> bool:
    """Return whether a method is slower than plain decoding; its interval decides if it has one."""
    interval = row["speedup_interval"]
    speed = interval[1] if interval else row["speedup"]
    return speed is not None and speed < 1.0


def _interval(interval: Sequence[float] | None) -> str:
    """Describe the interval of a ratio of speeds."""
    return f"95% interval {interval[0]:.2f} to {interval[1]:.2f}" if interval else "no interval"


def _speed(row: Row, reference: str) -> str:
    """Compare a method's speed with that of the reference and of plain decoding."""
    name, ratio = method_text(row), row["speed_over_exact"]
    between = _interval(row["speed_over_exact_interval"])
    if ratio is None:
        return f"{name} and {reference} were not timed in the same session"
    if not is_faster(row):
        return f"{name} is not measurably faster than {reference} ({ratio:.2f} times; {between})"
    plain = f" and {row['speedup']:.2f} times as fast as plain decoding" if row["speedup"] else ""
    return f"{name} decodes {ratio:.2f} times as fast as {reference} ({between}){plain}"


def _quality(report: dict[str, Any], row: Row, reference: str) -> str:
    """Compare a method's answers with those of the reference, and bound the difference."""
    against, sure = row["against_exact"], f"with {100 * report['confidence']:g}% confidence"
    pairs = (row.get("judge") or {}).get("pairs")
    if "loss_limit" in against:
        return (
            f"of {against['paired']} questions it loses {against['lost']} and gains"
            f" {against['gained']}, so {sure} its loss of accuracy is at most"
            f" {points_text(against['loss_limit'])} points"
        )
    if pairs:
        unclear = ""
        if count := pairs["unclear"]:
            counts = "counts" if count == 1 else "count"
            unclear = f", and is unclear about {count}, which {counts} as worse"
        return (
            f"the judge finds {pairs['lost']} of {pairs['questions']} answers worse and"
            f" {pairs['won']} better{unclear}, so {sure} the share of worse"
            f" answers exceeds that of better ones by at most {points_text(pairs['loss_limit'])}"
            " points"
        )
    found = against["agreement"]
    if report["about"]["temperature"] or not found["answers"]:
        return (
            "nothing bounds its loss of quality: there are no references, and answers cannot be"
            " compared one by one; use a judge"
        )
    regret, change = row["regret"], against.get("log_likelihood_change")
    price = f" (its fuzzy tokens give up {regret['mean']:.2f} nats on average)" if regret else ""
    likelihood = ""
    if change is not None:
        likelihood = (
            f"; their log-probability under the target changes by {change:+.3f} nats per token"
        )
        if interval := against["log_likelihood_change_interval"]:
            likelihood += f" (95% interval {interval[0]:+.3f} to {interval[1]:+.3f})"
    limit = math.ceil(100 * found["changed_limit"])
    bound = ""
    if limit < 100:
        bound = f", so {sure} at most {limit}% of the answers to such prompts change"
    return (
        f"{found['identical']} of {found['answers']} answers are {reference}'s{price}"
        f"{bound}{likelihood}"
    )
