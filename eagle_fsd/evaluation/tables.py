"""Figures as tables: for a terminal, as Markdown, as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
#: Headers, and a line of cells for each method.
Table = tuple[list[str], list[list[str]]]


def main_table(rows: Sequence[Row]) -> Table:
    """Speed and quality; columns that no row fills are left out."""
    headers = ["method", "tokens/s", "x plain", "x exact", "tau", "fuzzy", "MiB"]
    headers += ["n", "accuracy", "lost/gained", "p", "nats a token", "against exact"]
    headers += ["judge", "judge against exact"]
    cells = []
    for row in rows:
        against = row.get("against_exact", {})
        judge = row.get("judge") or {}
        judged = judge.get("against_exact", {})
        split = f"{against['lost']}/{against['gained']}" if "lost" in against else ""
        cells.append(
            [
                row["method"],
                _number(row["tokens_per_second"], ".1f"),
                _number(row["speedup"], ".2f"),
                _times(row),
                _number(row["tau"], ".2f"),
                _number(row["origins"]["fuzzy"], ".1%"),
                _number(row["memory"] and row["memory"] / 2**20, ".0f"),
                str(row["scored"] or row["answers"]),
                _interval(row["accuracy"], row["accuracy_interval"], ".1%"),
                split,
                _number(against.get("mcnemar_p"), ".2g"),
                _number(row["log_likelihood"], ".3f"),
                _interval(
                    against.get("log_likelihood_change"),
                    against.get("log_likelihood_change_interval"),
                    "+.3f",
                ),
                _interval(judge.get("score"), judge.get("score_interval"), ".2f"),
                _interval(judged.get("score_change"), judged.get("score_change_interval"), "+.2f"),
            ]
        )
    kept = [at for at in range(len(headers)) if any(line[at] for line in cells)]
    return [headers[at] for at in kept], [[line[at] for at in kept] for line in cells]


def _times(row: Row) -> str:
    """Speed over exact decoding's, and half of its interval's width."""
    value, interval = row["speed_over_exact"], row["speed_over_exact_interval"]
    if value is None or interval is None or row["method"] == "exact":
        return _number(value, ".2f")
    return f"{value:.2f} ± {(interval[1] - interval[0]) / 2:.2f}"


def category_table(rows: Sequence[Row]) -> Table:
    """Tau by category."""
    names = sorted({name for row in rows for name in row["tau_by_category"]})
    known = [row for row in rows if row["tau_by_category"]]
    cells = [
        [name, *(_number(row["tau_by_category"].get(name), ".2f") for row in known)]
        for name in names
    ]
    return ["tau", *(row["method"] for row in known)], cells


def position_table(rows: Sequence[Row]) -> Table:
    """Accepted length by position: the share of target passes that emit at least so many tokens."""
    shown = [row for row in rows if len(row["reach"]) > 1]
    longest = max((len(row["reach"]) for row in shown), default=0)
    cells = []
    for row in shown:
        reach = row["reach"] + [0.0] * (longest - len(row["reach"]))
        cells.append([row["method"], *(f"{share:.0%}" for share in reach)])
    return ["tokens a pass", *(f">= {at}" for at in range(1, longest + 1))], cells


def tables(rows: Sequence[Row]) -> list[Table]:
    """Those there is something to say in."""
    found = [main_table(rows)]
    if len(category_table(rows)[1]) > 1:
        found.append(category_table(rows))
    if position_table(rows)[1]:
        found.append(position_table(rows))
    return found


def report_text(report: dict[str, Any]) -> str:
    """The tables of a report, and how it was made, in Markdown."""
    found = [*report.get("tables", []), *tables(report["rows"])]
    parts = [markdown(*table) for table in found]
    return "\n\n".join([*parts, *report.get("conclusions", []), footnote(report)]) + "\n"


def markdown(headers: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A table; a bar within a cell does not end it."""

    def line(items: Sequence[str]) -> str:
        return "| " + " | ".join(item.replace("|", "\\|") for item in items) + " |"

    return "\n".join([line(headers), "|---" * len(headers) + "|", *map(line, cells)])


#: A CSV line's own columns: the name, and where in a row of the report the value is.
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
    """A line a method, full precision; what the whole run has in common stands in every line."""
    environment = report["environment"]
    common = {
        **{
            key: report["about"][key]
            for key in ("questions", "count", "target", "head", "seed", "template")
        },
        **{key: report["about"][key] for key in ("temperature", "top_p", "batch")},
        "sampling_top_k": report["about"]["top_k"],
        "max_new_tokens": report["about"]["max_new_tokens"],
        **{key: report["settings"][key] for key in ("total_tokens", "depth", "top_k")},
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
        own = {name: _inside(row, path) for name, path in _CSV_COLUMNS.items()}
        writer.writerow({**own, **common})
    return text.getvalue()


def footnote(report: dict[str, Any]) -> str:
    """With what and on what a report was made, in a few sentences."""
    environment, about, tree = report["environment"], report["about"], report["settings"]
    machine, versions = environment["machine"], environment["versions"]
    sessions = [item["environment"] for item in report["sessions"].values()] or [environment]
    dates = sorted({item["date"][:10] for item in sessions})
    revisions = list(dict.fromkeys(str(item["revision"]) for item in sessions))
    failed = sum(row["failed"] for row in report["rows"])
    fsd = next((row["settings"] for row in report["rows"] if row["method"] == "fsd"), None)
    at_once = "" if about["batch"] == 1 else f", {about['batch']} at once"
    text = (
        f"{report['questions']} questions of {about['questions']}{at_once}; {_sampling(about)},"
        f" {str(report['dtype']).removeprefix('torch.')} on"
        f" {_machine(report)}, {machine['threads']} threads; tree"
        f" {tree['total_tokens']}/{tree['depth']}/{tree['top_k']}; torch {versions['torch']},"
        f" transformers {versions['transformers']}; {' to '.join(dates[:1] + dates[1:][-1:])},"
        f" revision {', '.join(revisions)}. Intervals are 95 %."
    )
    if about["template"]:
        text += f" FastChat's template {about['template']}."
    if fsd is not None and fsd["method"] == "fsd":
        names = ("divergence", "threshold", "min_ratio", "fallback", "selection", "divergence_on")
        text += f" fsd: {', '.join(f'{name} {fsd[name]}' for name in names)}."
    elif fsd is not None:
        text += " fsd: no threshold is set, so it is exact decoding."
    if len(sessions) > 1:
        text += (
            f" The answers were drawn in {len(sessions)} sessions; x compares within a session,"
            " tokens/s is over all of them."
        )
    text += " MiB is the process's peak."
    if cut := {row["method"]: row["cut_off"] for row in report["rows"] if row["cut_off"]}:
        most = max(cut, key=lambda name: cut[name])
        text += (
            f" Answers that had not ended by {about['max_new_tokens']} tokens or the context's end:"
            f" up to {cut[most]} ({most})."
        )
    if report["unscored"]:
        text += f" {report['unscored']}"
    if failed:
        text += f" {failed} turns, over all methods, were not answered: their prompts fill the"
        text += " context."
    return text


def _sampling(about: dict[str, Any]) -> str:
    """How tokens were drawn, in a few words."""
    if not about["temperature"]:
        return "greedy"
    parts = [f"temperature {about['temperature']:g}"]
    parts += [f"top-p {about['top_p']:g}"] * (about["top_p"] < 1)
    parts += [f"top-k {about['top_k']}"] * bool(about["top_k"])
    return ", ".join([*parts, f"seed {about['seed']}"])


def _machine(report: dict[str, Any]) -> str:
    """What decoded: a machine with a GPU can be told to use its CPU."""
    machine = report["environment"]["machine"]
    return machine.get("gpu", "") if report["device"].startswith("cuda") else machine["cpu"]


def _inside(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        if value is None:
            return None
        value = value[int(key)] if key.isdigit() else value.get(key)
    return value


def _number(value: float | None, form: str) -> str:
    return "" if value is None or math.isnan(value) else format(value, form)


def _interval(value: float | None, interval: Sequence[float] | None, form: str) -> str:
    if value is None or interval is None:
        return _number(value, form)  # of a single value there is no interval
    low, high = (format(item, form) for item in interval)
    return f"{format(value, form)} ({low} to {high})"
