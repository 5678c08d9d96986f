"""Format reports as tables, Markdown and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any

from eagle_fsd.evaluation.samples import sample_table

Row = dict[str, Any]
#: Headers and rows of cells.
Table = tuple[list[str], list[list[str]]]

#: Phases of decoding shown in tables, apart from the prefill.
PHASE_COLUMNS = ("target", "draft", "verify", "cache", "host")
#: Maximum number of categories in a table.
MAX_CATEGORIES = 6


def speed_table(rows: Sequence[Row]) -> Table:
    """Return a table of speed, accepted length, latency and memory.

    Args:
        rows: Rows of a report.

    Returns:
        The table, without columns that are empty in every row. Trees are shown if there are
        several.
    """
    headers = ["method", "tokens/s", "x plain", "x exact", "x hf", "tau"]
    headers += ["median s", "p95 s", "MiB", "tree"]
    trees = [tree_text(row) for row in rows]
    several = len({tree for tree in trees if tree}) > 1
    cells = []
    for row, tree in zip(rows, trees, strict=True):
        latency = row["latency"] or {}
        cells.append(
            [
                row["method"],
                _number(row["tokens_per_second"], ".1f"),
                _number(row["speedup"], ".2f"),
                _speed_over_exact(row),
                _number(row.get("speed_over_hf"), ".2f"),
                _number(row["tau"], ".2f"),
                _number(latency.get("median"), ".3f"),
                _number(latency.get("p95"), ".3f"),
                _number(row["memory"] and row["memory"] / 2**20, ".0f"),
                tree if several else "",
            ]
        )
    return _without_empty_columns(headers, cells)


def quality_table(rows: Sequence[Row]) -> Table:
    """Return a table of accuracy and log-probability, with the changes from exact decoding.

    Args:
        rows: Rows of a report.

    Returns:
        The table, without columns that are empty in every row.
    """
    headers = ["quality", "n", "accuracy", "lost/gained", "loss <=", "nats/token", "vs exact"]
    cells = []
    for row in rows:
        against = row.get("against_exact", {})
        limit = against.get("loss_limit")
        cells.append(
            [
                row["method"],
                str(row["scored"] or row["answers"]),
                _with_interval(row, "accuracy", ".1%"),
                f"{against['lost']}/{against['gained']}" if "lost" in against else "",
                "" if limit is None else f"{100 * max(0.0, limit):.1f} points",
                _number(row["log_likelihood"], ".3f"),
                _with_interval(against, "log_likelihood_change", "+.3f"),
            ]
        )
    return _without_empty_columns(headers, cells)


def agreement_table(rows: Sequence[Row], sampled: bool = False) -> Table:
    """Return a table of the agreement with exact decoding's answers, and the price of fuzzy tokens.

    Args:
        rows: Rows of a report.
        sampled: Whether answers are sampled: then even lossless answers differ.
    """
    headers = ["against exact", "identical", "first change", "fuzzy", "nats/fuzzy token"]
    headers += ["length", "repetition"]
    cells = []
    for row in rows:
        found = row.get("against_exact", {}).get("agreement", {})
        if not found.get("answers"):
            continue
        first, regret = found["first_difference"], row["regret"] or {}
        cells.append(
            [
                row["method"],
                "" if sampled else f"{found['identical']}/{found['answers']}",
                "" if sampled or not first else f"token {first[1] + 1:.0f}",
                _number(row["origins"]["fuzzy"], ".1%"),
                _number(regret.get("mean"), ".3f"),
                _with_interval(found, "length_change", "+.1f"),
                _with_interval(found, "repetition_change", "+.1%"),
            ]
        )
    return _without_empty_columns(headers, cells)


def judge_table(rows: Sequence[Row]) -> Table:
    """Return a table of a judge's ratings, or of its comparisons with exact decoding.

    Args:
        rows: Rows of a report.
    """
    headers = ["judge", "rating", "rating vs exact", "better/equal/worse", "net loss <="]
    cells = []
    for row in rows:
        judge = row.get("judge") or {}
        pairs = judge.get("pairs") or {}
        if judge:
            cells.append(
                [
                    row["method"],
                    _with_interval(judge, "score", ".2f"),
                    _with_interval(judge.get("against_exact", {}), "score_change", "+.2f"),
                    f"{pairs['won']}/{pairs['tied']}/{pairs['lost']}" if pairs else "",
                    _number(pairs.get("loss_limit"), ".1%"),
                ]
            )
    return _without_empty_columns(headers, cells)


def _without_empty_columns(headers: list[str], cells: list[list[str]]) -> Table:
    """Return a table without columns that are empty in every row."""
    kept = [at for at in range(len(headers)) if any(line[at] for line in cells)]
    return [headers[at] for at in kept], [[line[at] for at in kept] for line in cells]


def tree_text(row: Row) -> str:
    """Format the draft tree of a method as ``total_tokens/depth/top_k``; "" if it has none.

    Args:
        row: The method's row of a report.
    """
    settings = row.get("settings") or {}
    names = ("total_tokens", "depth", "tree_top_k")
    return "/".join(str(settings[name]) for name in names) if names[0] in settings else ""


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
    headers = ["phases", "ms/pass", "x exact", *PHASE_COLUMNS]
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
            ]
        )
    return headers, cells


def category_tables(rows: Sequence[Row]) -> list[Table]:
    """Return tables of tau by category, of at most :data:`MAX_CATEGORIES` categories each.

    Args:
        rows: Rows of a report.
    """
    names = sorted({name for row in rows for name in row["tau_by_category"]})
    known = [row for row in rows if row["tau_by_category"]]
    found = []
    for start in range(0, len(names), MAX_CATEGORIES):
        part = names[start : start + MAX_CATEGORIES]
        cells = [
            [row["method"], *(_number(row["tau_by_category"].get(name), ".2f") for name in part)]
            for row in known
        ]
        found.append((["tau", *part], cells))
    return found


def position_table(rows: Sequence[Row]) -> Table:
    """Return a table of the share of target passes that emit at least 1, 2, 4, 8, ... tokens.

    Args:
        rows: Rows of a report.
    """
    shown = [row for row in rows if len(row["reach"]) > 1]
    longest = max((len(row["reach"]) for row in shown), default=0)
    counts = [2**power for power in range(longest.bit_length())]
    cells = []
    for row in shown:
        reach = row["reach"] + [0.0] * (longest - len(row["reach"]))
        cells.append([row["method"], *(f"{reach[count - 1]:.0%}" for count in counts)])
    return ["tokens per pass", *(f">= {count}" for count in counts)], cells


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


def tables(report: dict[str, Any]) -> list[Table]:
    """Return the tables of a report, without empty ones.

    Args:
        report: The report.
    """
    rows, categories = report["rows"], category_tables(report["rows"])
    several = len(categories) > 1 or any(len(headers) > 2 for headers, _ in categories)
    filters = filter_table(rows)
    found = [
        speed_table(rows),
        quality_table(rows),
        sample_table(rows),
        agreement_table(rows, sampled=bool(report["about"]["temperature"])),
        judge_table(rows),
        *([filters] if any(len(set(line[1:])) > 1 for line in filters[1]) else []),
        phase_table(rows),
        *(categories if several else []),
        position_table(rows),
    ]
    return [table for table in found if table[1]]


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
    "latency_median": ("latency", "median"),
    "latency_p95": ("latency", "p95"),
    "accuracy_change": ("against_exact", "accuracy_change"),
    "loss_limit": ("against_exact", "loss_limit"),
    **{
        name: ("against_exact", "agreement", name)
        for name in ("identical", "length_change", "repetition_change")
    },
    "regret_mean": ("regret", "mean"),
    "regret_per_token": ("regret", "per_token"),
    "lost": ("against_exact", "lost"),
    "gained": ("against_exact", "gained"),
    "mcnemar_p": ("against_exact", "mcnemar_p"),
    "judge_score": ("judge", "score"),
    "judge_low": ("judge", "score_interval", "0"),
    "judge_high": ("judge", "score_interval", "1"),
    "judge_rated": ("judge", "rated"),
    "judge_unrated": ("judge", "unrated"),
    "judge_change": ("judge", "against_exact", "score_change"),
    **{f"judge_{name}": ("judge", "pairs", name) for name in ("won", "tied", "lost")},
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


def measurement(report: dict[str, Any]) -> str:
    """Describe in one sentence what was measured, where and when.

    Args:
        report: The report.
    """
    environment, about = report["environment"], report["about"]
    machine, versions = environment["machine"], environment["versions"]
    sessions = [item["environment"] for item in report["sessions"].values()] or [environment]
    dates = sorted({item["date"][:10] for item in sessions})
    revisions = list(dict.fromkeys(str(item["revision"]) for item in sessions))
    trees = list(dict.fromkeys(tree for row in report["rows"] if (tree := tree_text(row))))
    shape = f"; tree {trees[0]}" if len(trees) == 1 else ""
    repeats = f", each decoded {about['repeats']} times" if about.get("repeats", 1) > 1 else ""
    threads = f"{machine['threads']} thread{'' if machine['threads'] == 1 else 's'}"
    return (
        f"{report['questions']} questions of {about['questions']}, batch size {about['batch']}"
        f"{repeats}; {_describe_sampling(about)}, {str(report['dtype']).removeprefix('torch.')} on"
        f" {_machine(report)}, {threads}{shape}; torch {versions['torch']},"
        f" transformers {versions['transformers']}; {' to '.join(dates[:1] + dates[1:][-1:])},"
        f" revision {', '.join(revisions)}. Intervals are 95%."
    )


def footnote(report: dict[str, Any]) -> str:
    """Describe how a report was measured, in a few sentences.

    Args:
        report: The report.
    """
    about, sentences = report["about"], [measurement(report)]
    if about["template"]:
        sentences.append(f"FastChat template {about['template']}.")
    if about["system"]:
        sentences.append(f"System prompt: {about['system']!r}.")
    if about["few_shot"]:
        sentences.append(f"{about['few_shot']} worked examples before every question.")
    if about["grader"]:
        sentences.append(f"Graded by {about['grader']}.")
    if about["samples"] * about["seeds"] > 1:
        sentences.append("Lost and gained are counted on the first sample of each question.")
    fsd = next((row["settings"] for row in report["rows"] if row["method"] == "fsd"), None)
    if fsd is not None and fsd["method"] == "fsd":
        names = ("divergence", "threshold", "min_ratio", "fallback", "selection", "divergence_on")
        sentences.append(f"fsd: {', '.join(f'{name} {fsd[name]}' for name in names)}.")
    elif fsd is not None:
        sentences.append("fsd: the threshold is 0, which is exact decoding.")
    if len(report["sessions"]) > 1:
        sentences.append(
            f"The answers come from {len(report['sessions'])} sessions; x compares within a"
            " session, tokens/s is over all of them."
        )
    if any(row["memory"] for row in report["rows"]):
        sentences.append("MiB is the process's peak memory.")
    sentences.append("Seconds (s) are per answer.")
    if any("loss_limit" in row.get("against_exact", {}) for row in report["rows"]):
        sentences.append(
            "Limits on the loss of accuracy are exact, at 95% confidence for all methods at once."
        )
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
    seeds, samples = about["seeds"], about["samples"]
    several = f"seeds {about['seed']} to {about['seed'] + seeds - 1}"
    parts.append(several if seeds > 1 else f"seed {about['seed']}")
    return ", ".join([*parts, *([f"{samples} samples of each answer"] if samples > 1 else [])])


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
    if abs(interval[0] + interval[1] - 2 * value) < 1e-9:
        half = (interval[1] - interval[0]) / 2
        return f"{format(value, form)} ± {format(half, form.lstrip('+'))}"
    low, high = (format(end, form).removesuffix("%") for end in interval)
    return f"{format(value, form)} ({low} to {high})"
