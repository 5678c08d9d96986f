"""Format reports as tables, Markdown and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]
#: Headers and rows of cells.
Table = tuple[list[str], list[list[str]]]

#: Phases of decoding shown in tables, apart from the prefill.
PHASE_COLUMNS = ("target", "draft", "verify", "cache", "host")


def main_table(rows: Sequence[Row]) -> Table:
    """Return a table of speed and quality.

    Args:
        rows: Rows of a report.

    Returns:
        The table, without columns that are empty in every row.
    """
    headers = ["method", "tokens/s", "x plain", "x exact", "x hf", "tau", "fuzzy", "MiB"]
    headers += ["n", "accuracy", "lost/gained", "p", "nats/token", "nats/token vs exact"]
    headers += ["judge", "judge vs exact"]
    cells = []
    for row in rows:
        quality = row.get("against_exact", {})
        judge = row.get("judge") or {}
        judge_change = judge.get("against_exact", {})
        cells.append(
            [
                row["method"],
                _number(row["tokens_per_second"], ".1f"),
                _number(row["speedup"], ".2f"),
                _speed_over_exact(row),
                _number(row.get("speed_over_hf"), ".2f"),
                _number(row["tau"], ".2f"),
                _number(row["origins"]["fuzzy"], ".1%"),
                _number(row["memory"] and row["memory"] / 2**20, ".0f"),
                str(row["scored"] or row["answers"]),
                _with_interval(row, "accuracy", ".1%"),
                f"{quality['lost']}/{quality['gained']}" if "lost" in quality else "",
                _number(quality.get("mcnemar_p"), ".2g"),
                _number(row["log_likelihood"], ".3f"),
                _with_interval(quality, "log_likelihood_change", "+.3f"),
                _with_interval(judge, "score", ".2f"),
                _with_interval(judge_change, "score_change", "+.2f"),
            ]
        )
    kept = [at for at in range(len(headers)) if any(line[at] for line in cells)]
    return [headers[at] for at in kept], [[line[at] for at in kept] for line in cells]


def _speed_over_exact(row: Row) -> str:
    """Format the speed relative to exact decoding, with half the width of its interval."""
    value, interval = row["speed_over_exact"], row["speed_over_exact_interval"]
    if value is None or interval is None or row["method"] == "exact":
        return _number(value, ".2f")
    return f"{value:.2f} ± {(interval[1] - interval[0]) / 2:.2f}"


def phase_table(rows: Sequence[Row]) -> Table:
    """Return a table of the time per target pass and the share of each phase.

    Args:
        rows: Rows of a benchmark's report.
    """
    headers = ["method", "ms/pass", "x exact", *PHASE_COLUMNS]
    headers += ["exact tokens", "fuzzy tokens", "target tokens"]
    cells = []
    for row in rows:
        seconds, shares = row.get("seconds_per_step"), row.get("phase_shares")
        if not seconds or not shares:
            continue
        cells.append(
            [
                row["method"],
                f"{1000 * seconds:.2f}",
                _number(row["step_over_exact"], ".2f"),
                *(f"{shares.get(phase, 0.0):.1%}" for phase in PHASE_COLUMNS),
                *(_number(row["origins"][name], ".0%") for name in ("exact", "fuzzy", "target")),
            ]
        )
    return headers, cells


def category_table(rows: Sequence[Row]) -> Table:
    """Return a table of tau by category.

    Args:
        rows: Rows of a report.
    """
    names = sorted({name for row in rows for name in row["tau_by_category"]})
    known = [row for row in rows if row["tau_by_category"]]
    cells = [
        [name, *(_number(row["tau_by_category"].get(name), ".2f") for row in known)]
        for name in names
    ]
    return ["tau", *(row["method"] for row in known)], cells


def position_table(rows: Sequence[Row]) -> Table:
    """Return a table of the share of target passes that emit at least 1, 2, 3, ... tokens.

    Args:
        rows: Rows of a report.
    """
    shown = [row for row in rows if len(row["reach"]) > 1]
    longest = max((len(row["reach"]) for row in shown), default=0)
    cells = []
    for row in shown:
        reach = row["reach"] + [0.0] * (longest - len(row["reach"]))
        cells.append([row["method"], *(f"{share:.0%}" for share in reach)])
    return ["tokens per pass", *(f">= {count}" for count in range(1, longest + 1))], cells


def filter_table(rows: Sequence[Row]) -> Table:
    """Return a table of the accuracy under lm-evaluation-harness's filters, beside our own.

    Args:
        rows: Rows of a report.
    """
    known = [row for row in rows if row.get("harness")]
    names = list(known[0]["harness"]) if known else []
    cells = [
        [
            row["method"],
            _number(row["accuracy"], ".1%"),
            *(_number(row["harness"][name], ".1%") for name in names),
        ]
        for row in known
    ]
    return ["accuracy by filter", "eagle-fsd", *names], cells


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return the tables of a report, without empty ones.

    Args:
        rows: Rows of a report.
    """
    found = [main_table(rows)]
    if filter_table(rows)[1]:
        found.append(filter_table(rows))
    if phase_table(rows)[1]:
        found.append(phase_table(rows))
    if len(category_table(rows)[1]) > 1:
        found.append(category_table(rows))
    if position_table(rows)[1]:
        found.append(position_table(rows))
    return found


def report_text(report: dict[str, Any]) -> str:
    """Format a report as Markdown: tables, conclusions, and a footnote on how it was measured.

    Args:
        report: The report.
    """
    found = [*report.get("tables", []), *tables(report["rows"])]
    parts = [markdown(*table) for table in found]
    return "\n\n".join([*parts, *report.get("conclusions", []), footnote(report)]) + "\n"


def markdown(headers: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Format a table as Markdown.

    Args:
        headers: The column headers.
        cells: Lines of cells. Vertical bars are escaped.
    """

    def line(items: Iterable[str]) -> str:
        return "| " + " | ".join(item.replace("|", "\\|") for item in items) + " |"

    return "\n".join([line(headers), "|---" * len(headers) + "|", *map(line, cells)])


#: Columns of the CSV file that differ between methods, with the path of each value in a report row.
_CSV_COLUMNS: dict[str, tuple[str, ...]] = {
    "method": ("method",),
    "rule": ("settings", "method"),
    **{name: ("settings", name) for name in ("threshold", "divergence", "min_ratio")},
    **{name: ("settings", name) for name in ("fallback", "selection", "divergence_on")},
    "tokens_per_second": ("tokens_per_second",),
    "speedup_over_plain": ("speedup",),
    "speed_over_exact": ("speed_over_exact",),
    "speed_over_exact_low": ("speed_over_exact_interval", "0"),
    "speed_over_exact_high": ("speed_over_exact_interval", "1"),
    "tau": ("tau",),
    "share_fuzzy": ("origins", "fuzzy"),
    "memory_bytes": ("memory",),
    "answers": ("answers",),
    "cut_off": ("cut_off",),
    "scored": ("scored",),
    "accuracy": ("accuracy",),
    "accuracy_low": ("accuracy_interval", "0"),
    "accuracy_high": ("accuracy_interval", "1"),
    "accuracy_change": ("against_exact", "accuracy_change"),
    "lost": ("against_exact", "lost"),
    "gained": ("against_exact", "gained"),
    "mcnemar_p": ("against_exact", "mcnemar_p"),
    "judge_score": ("judge", "score"),
    "judge_low": ("judge", "score_interval", "0"),
    "judge_high": ("judge", "score_interval", "1"),
    "judge_rated": ("judge", "rated"),
    "judge_unrated": ("judge", "unrated"),
    "judge_change": ("judge", "against_exact", "score_change"),
    "log_likelihood": ("log_likelihood",),
    "log_likelihood_change": ("against_exact", "log_likelihood_change"),
}


def csv_text(report: dict[str, Any]) -> str:
    """Format a report as CSV: a line per method, in full precision.

    Args:
        report: The report. Values that apply to the whole run are repeated in every line.
    """
    environment, about = report["environment"], report["about"]
    names = ("questions", "count", "target", "drafter", "seed", "template")
    common = {
        **{name: about[name] for name in (*names, "temperature", "top_p", "min_p", "batch")},
        "sampling_top_k": about["top_k"],
        "max_new_tokens": about["max_new_tokens"],
        **{name: report["settings"][name] for name in ("total_tokens", "depth", "top_k")},
        "dtype": report["dtype"],
        "machine": _machine(report),
        "date": environment["date"],
        "revision": environment["revision"],
        "sessions": len(report["sessions"]),
        **{name: environment["versions"][name] for name in ("torch", "transformers")},
    }
    text = io.StringIO()
    writer = csv.DictWriter(text, [*_CSV_COLUMNS, *common], lineterminator="\n")
    writer.writeheader()
    for row in report["rows"]:
        own = {name: _look_up(row, path) for name, path in _CSV_COLUMNS.items()}
        writer.writerow({**own, **common})
    return text.getvalue()


def footnote(report: dict[str, Any]) -> str:
    """Describe how a report was measured, in a few sentences.

    Args:
        report: The report.
    """
    environment, about, tree = report["environment"], report["about"], report["settings"]
    machine, versions = environment["machine"], environment["versions"]
    sessions = [item["environment"] for item in report["sessions"].values()] or [environment]
    dates = sorted({item["date"][:10] for item in sessions})
    revisions = list(dict.fromkeys(str(item["revision"]) for item in sessions))
    batch = "" if about["batch"] == 1 else f", batches of {about['batch']}"
    repeats = f", each decoded {about['repeats']} times" if about.get("repeats", 1) > 1 else ""
    sentences = [
        f"{report['questions']} questions of {about['questions']}{batch}{repeats};"
        f" {_describe_sampling(about)}, {str(report['dtype']).removeprefix('torch.')} on"
        f" {_machine(report)}, {machine['threads']} threads; tree"
        f" {tree['total_tokens']}/{tree['depth']}/{tree['top_k']}; torch {versions['torch']},"
        f" transformers {versions['transformers']}; {' to '.join(dates[:1] + dates[1:][-1:])},"
        f" revision {', '.join(revisions)}. Intervals are 95%."
    ]
    if about["template"]:
        sentences.append(f"FastChat template {about['template']}.")
    fsd = next((row["settings"] for row in report["rows"] if row["method"] == "fsd"), None)
    if fsd is not None and fsd["method"] == "fsd":
        names = ("divergence", "threshold", "min_ratio", "fallback", "selection", "divergence_on")
        sentences.append(f"fsd: {', '.join(f'{name} {fsd[name]}' for name in names)}.")
    elif fsd is not None:
        sentences.append("fsd: the threshold is 0, which is exact decoding.")
    if len(sessions) > 1:
        sentences.append(
            f"The answers come from {len(sessions)} sessions; x compares within a session, tokens/s"
            " is over all of them."
        )
    if any(row["memory"] for row in report["rows"]):
        sentences.append("MiB is the process's peak memory.")
    if any(row.get("phase_shares") for row in report["rows"]):
        sentences.append("Phases are shares of the decoding time, without the prefill.")
    if cut := {row["method"]: row["cut_off"] for row in report["rows"] if row["cut_off"]}:
        most = max(cut, key=lambda name: cut[name])
        sentences.append(
            f"Answers that had not ended by {about['max_new_tokens']} tokens or the context's end:"
            f" up to {cut[most]} ({most})."
        )
    if report["unscored"]:
        sentences.append(report["unscored"])
    if failed := sum(row["failed"] for row in report["rows"]):
        sentences.append(
            f"{failed} turns, over all methods, were not answered: their prompts fill the context."
        )
    return " ".join(sentences)


def _describe_sampling(about: dict[str, Any]) -> str:
    """Describe how tokens were sampled."""
    if not about["temperature"]:
        return "greedy"
    parts = [f"temperature {about['temperature']:g}"]
    if about["top_p"] < 1:
        parts.append(f"top-p {about['top_p']:g}")
    if about["top_k"]:
        parts.append(f"top-k {about['top_k']}")
    if about["min_p"]:
        parts.append(f"min-p {about['min_p']:g}")
    return ", ".join([*parts, f"seed {about['seed']}"])


def _machine(report: dict[str, Any]) -> str:
    """Return the name of the GPU or CPU that decoded."""
    machine: dict[str, str] = report["environment"]["machine"]
    return machine.get("gpu", "") if report["device"].startswith("cuda") else machine["cpu"]


def _look_up(value: Any, path: Sequence[str]) -> Any:
    """Follow keys and indices into nested values; None where one is missing."""
    for key in path:
        if value is None:
            return None
        value = value[int(key)] if key.isdigit() else value.get(key)
    return value


def _number(value: float | None, form: str) -> str:
    return "" if value is None or math.isnan(value) else format(value, form)


def _with_interval(values: dict[str, Any], name: str, form: str) -> str:
    """Format a value with its interval, if it has one."""
    value, interval = values.get(name), values.get(f"{name}_interval")
    if value is None or interval is None:
        return _number(value, form)
    low, high = (format(end, form) for end in interval)
    return f"{format(value, form)} ({low} to {high})"
