"""The tables of a report, its rows as CSV, and a description of how they were measured."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from eagle_fsd.evaluation.config import MeasureConfig

Row = dict[str, Any]
#: Headers and rows of cells.
Table = tuple[list[str], list[list[str]]]

#: Phases of decoding shown in tables, apart from the prefill.
PHASE_COLUMNS = ("graph", "target", "draft", "verify", "cache", "host")
#: Maximum number of categories in a table.
MAX_CATEGORIES = 6


def tables(report: dict[str, Any]) -> list[Table]:
    """Return the tables of a report, without empty ones."""
    rows, sampled = report["rows"], bool(report["about"]["temperature"])
    reference = report.get("reference", "exact")
    measure = report["about"].get("measure", "accuracy")
    unit = "word" if report["about"].get("servers") else "token"
    several_trees = len({tree for row in rows if (tree := tree_text(row))}) > 1
    filters = _table("accuracy by scoring", rows, _filters)
    agree = all(len(set(line[1:])) == 1 for line in filters[1])
    names = sorted({name for row in rows for name in row["tau_by_category"]})
    starts = range(0, len(names), MAX_CATEGORIES) if len(names) > 1 else ()
    parts = [names[start : start + MAX_CATEGORIES] for start in starts]
    counts = [
        2**at for at in range(max((len(row["reach"]) for row in rows), default=0).bit_length())
    ]
    found = [
        _table("method", rows, partial(_speed, with_tree=several_trees, reference=reference)),
        _table("quality", rows, partial(_quality, measure=measure)),
        _table("samples", rows, partial(_samples, reference=reference)),
        _table(f"against {reference}", rows, partial(_agreement, sampled=sampled, unit=unit)),
        _table("fuzzy tokens", rows, partial(_fuzzy, comparison=report.get("comparison"))),
        _table("judge", rows, _judge),
        *([] if agree else [filters]),
        _table("phases", rows, _phases),
        *(_table("tau", rows, partial(_tau, categories=part)) for part in parts),
        _table("tokens per pass", rows, partial(_reach, counts=counts)),
        _divergences(report.get("divergences", {})),
    ]
    return [table for table in found if table[1]]


def _table(header: str, rows: Sequence[Row], cells: Callable[[Row], dict[str, str]]) -> Table:
    """Return a table of cells by header, without methods and columns that have no values."""
    lines = {row["method"]: found for row in rows if any((found := cells(row)).values())}
    names = list(dict.fromkeys(name for line in lines.values() for name in line))
    names = [name for name in names if any(line[name] for line in lines.values())]
    body = [[method, *(line[name] for name in names)] for method, line in lines.items()]
    return [header, *names], body


def _speed(row: Row, with_tree: bool, reference: str) -> dict[str, str]:
    latency = row["latency"] or {}
    return {
        "tokens/s": number_text(row["tokens_per_second"], ".1f"),
        "x plain": number_text(row["speedup"], ".2f"),
        f"x {reference}": _with_interval(row, "speed_over_exact", ".2f"),
        "x hf": number_text(row.get("speed_over_hf"), ".2f"),
        "tau": number_text(row["tau"], ".2f"),
        "median s": number_text(latency.get("median"), ".3f"),
        "p95 s": number_text(latency.get("p95"), ".3f"),
        "MiB": number_text(row["memory"] and row["memory"] / 2**20, ".0f"),
        "tree": tree_text(row) if with_tree else "",
    }


def _quality(row: Row, measure: str) -> dict[str, str]:
    against = row.get("against_exact", {})
    limit = against.get("loss_limit")
    return {
        "n": str(row["scored"] or row["answers"]),
        measure: _with_interval(row, "accuracy", ".1%"),
        "lost/gained": "{lost}/{gained}".format(**against) if "lost" in against else "",
        "loss <=": "" if limit is None else f"{points_text(limit)} points",
        "nats/token": number_text(row["log_likelihood"], ".3f"),
        "vs exact": _with_interval(against, "log_likelihood_change", "+.3f"),
    }


def _samples(row: Row, reference: str) -> dict[str, str]:
    found = row.get("samples")
    if not found:
        return {}
    seeds = found["seed_accuracies"]
    mean = {"value": sum(seeds) / len(seeds), "value_interval": found["seed_accuracies_interval"]}
    return {
        "accuracy": _with_interval(found, "accuracy", ".1%"),
        f"vs {reference}": _with_interval(found, "accuracy_change", "+.1%"),
        "seeds": _with_interval(mean, "value", ".1%") if len(seeds) > 1 else "",
        **{f"pass@{k}": f"{value:.1%}" for k, value in found["pass_at"].items()},
    }


def _agreement(row: Row, sampled: bool, unit: str) -> dict[str, str]:
    found = row.get("against_exact", {}).get("agreement", {})
    if not found.get("answers"):
        return {}
    first = found["first_difference"]
    return {
        "identical": "" if sampled else f"{found['identical']}/{found['answers']}",
        "first change": "" if sampled or not first else f"{unit} {first[1] + 1:.0f}",
        "length": _with_interval(found, "length_change", "+.1f"),
        "repetition": _with_interval(found, "repetition_change", "+.1%"),
    }


def _fuzzy(row: Row, comparison: Row | None) -> dict[str, str]:
    regret = row["regret"] or {}
    if not row["origins"]["fuzzy"]:
        return {}
    return {
        "share": number_text(row["origins"]["fuzzy"], ".1%"),
        "nats/fuzzy token": number_text(regret.get("mean"), ".3f"),
        "p95 nats": number_text(regret.get("p95"), ".3f"),
        "divergence": number_text(_mean_divergence(row, comparison), ".3g"),
    }


def _mean_divergence(row: Row, comparison: Row | None) -> float | None:
    """Return the mean divergence at a method's fuzzy tokens; None if it is not known."""
    if not comparison or comparison["method"] != row["method"] or not comparison["tokens"]:
        return None
    values = [divergence for divergence, _ in comparison["tokens"]]
    return float(sum(values) / len(values))


def _judge(row: Row) -> dict[str, str]:
    pairs = (row.get("judge") or {}).get("pairs") or {}
    return {
        "better/equal/worse": "{won}/{tied}/{lost}".format(**pairs) if pairs else "",
        "unclear": str(pairs.get("unclear") or ""),
        "net loss <=": f"{points_text(pairs['loss_limit'])} points" if pairs else "",
    }


def _filters(row: Row) -> dict[str, str]:
    values = dict(row.get("harness") or {})
    if values and "prompt, strict" not in values:  # which is the accuracy itself
        values = {"eagle-fsd": row["accuracy"], **values}
    return {name: number_text(value, ".1%") for name, value in values.items()}


def _phases(row: Row) -> dict[str, str]:
    shares, seconds = row.get("phase_shares"), row.get("seconds_per_step")
    if not shares or not seconds:
        return {}
    return {
        "ms/pass": f"{1000 * seconds:.2f}",
        "x exact": number_text(row["step_over_exact"], ".2f"),
        **{name: f"{shares[name]:.1%}" if shares.get(name) else "" for name in PHASE_COLUMNS},
    }


def _tau(row: Row, categories: Sequence[str]) -> dict[str, str]:
    return {name: number_text(row["tau_by_category"].get(name), ".2f") for name in categories}


def _reach(row: Row, counts: Sequence[int]) -> dict[str, str]:
    if len(row["reach"]) < 2:
        return {}
    reach = dict(enumerate(row["reach"], 1))
    return {f">= {count}": f"{reach.get(count, 0.0):.0%}" for count in counts}


def _divergences(found: dict[str, Any]) -> Table:
    """Return the quartiles of divergences where the target's choice was drafted, and elsewhere."""
    names = [name for name, sides in found.items() if isinstance(sides, dict)]
    body = [
        [name, side.replace("_", " "), str(found[side]), *(f"{value:.3g}" for value in quartiles)]
        for name in names
        for side, quartiles in found[name].items()
    ]
    return ["divergence", "target's choice", "nodes", "25%", "median", "75%"], body


def tree_text(row: Row) -> str:
    """Format the draft tree of a method as ``total_tokens/depth/top_k``; "" if it has none."""
    settings = row.get("settings") or {}
    names = ("total_tokens", "depth", "tree_top_k")
    return "/".join(str(settings[name]) for name in names) if names[0] in settings else ""


def method_text(row: Row) -> str:
    """Return a method's name with its tree and, for ``fsd``, its rule and non-default settings."""
    settings = row.get("settings") or {}
    parts = []
    if row["method"] == "fsd" and settings.get("method") not in (None, "exact", "server"):
        if settings["method"] == "fsd":
            parts.append(f"{settings['divergence']} T={settings['threshold']:g}")
            if settings["min_ratio"]:
                parts.append(f"r={settings['min_ratio']:g}")
            if settings.get("divergence_on", "raw") != "raw":
                parts.append(f"{settings['divergence_on']} distributions")
        else:
            parts.append(settings["method"])
        if settings.get("fallback", "exact") != "exact":
            parts.append(f"fallback {settings['fallback']}")
        selection = settings.get("selection", "longest")
        if selection == "priced":
            parts.append(f"price {settings.get('price', 1.0):g}")
        elif selection != "longest":
            parts.append(f"selection {selection}")
        if settings.get("max_fuzzy_nats") is not None:
            parts.append(f"at most {settings['max_fuzzy_nats']:g} nats")
        if settings.get("exact_first"):
            parts.append(f"first {settings['exact_first']} exact")
    if tree := tree_text(row):
        parts.append(f"tree {tree}")
    return f"{row['method']} ({', '.join(parts)})" if parts else str(row["method"])


def points_text(loss: float) -> str:
    """Format a bound on a loss, as a fraction, in percentage points, rounded up, at least 0."""
    return f"{math.ceil(10000 * max(0.0, loss)) / 100:.2f}"


def number_text(value: float | None, form: str) -> str:
    """Format a number; "" for None and NaN."""
    return "" if value is None or math.isnan(value) else format(value, form)


def _with_interval(values: Row, name: str, form: str) -> str:
    """Format a value with its interval, unless that is missing or has no width."""
    value, interval = values.get(name), values.get(f"{name}_interval")
    if value is None or interval is None or interval[1] - interval[0] < 1e-9:
        return number_text(value, form)
    if abs(interval[0] + interval[1] - 2 * value) < 1e-9:
        half = (interval[1] - interval[0]) / 2
        return f"{format(value, form)} ± {format(half, form.lstrip('+'))}"
    low, high = (format(end, form).removesuffix("%") for end in interval)
    return f"{format(value, form)} ({low} to {high})"


def markdown(headers: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Format a table as Markdown; vertical bars are escaped."""

    def line(items: Iterable[str]) -> str:
        return "| " + " | ".join(item.replace("|", "\\|") for item in items) + " |"

    return "\n".join([line(headers), "|---" * len(headers) + "|", *map(line, cells)])


#: Columns of the CSV file that differ between methods, with the path of each value in a report row.
_CSV_COLUMNS: dict[str, tuple[str, ...]] = {
    "method": ("method",),
    "rule": ("settings", "method"),
    **{name: ("settings", name) for name in ("threshold", "divergence", "min_ratio")},
    **{name: ("settings", name) for name in ("fallback", "selection", "divergence_on")},
    **{name: ("settings", name) for name in ("price", "max_fuzzy_nats", "exact_first")},
    **{name: ("settings", name) for name in ("total_tokens", "depth")},
    "top_k": ("settings", "tree_top_k"),
    "tokens_per_second": ("tokens_per_second",),
    "speedup_over_plain": ("speedup",),
    "speed_over_exact": ("speed_over_exact",),
    "speed_over_exact_low": ("speed_over_exact_interval", "0"),
    "speed_over_exact_high": ("speed_over_exact_interval", "1"),
    "tau": ("tau",),
    "share_fuzzy": ("origins", "fuzzy"),
    "memory_bytes": ("memory",),
    **{name: (name,) for name in ("answers", "cut_off", "scored", "accuracy")},
    "accuracy_low": ("accuracy_interval", "0"),
    "accuracy_high": ("accuracy_interval", "1"),
    "latency_median": ("latency", "median"),
    "latency_p95": ("latency", "p95"),
    **{name: ("against_exact", name) for name in ("accuracy_change", "loss_limit")},
    **{
        name: ("against_exact", "agreement", name)
        for name in ("identical", "length_change", "repetition_change")
    },
    "regret_mean": ("regret", "mean"),
    "regret_per_token": ("regret", "per_token"),
    **{name: ("against_exact", name) for name in ("lost", "gained", "mcnemar_p")},
    **{f"judge_{name}": ("judge", "pairs", name) for name in ("won", "tied", "lost", "unclear")},
    "judge_loss_limit": ("judge", "pairs", "loss_limit"),
    "log_likelihood": ("log_likelihood",),
    "log_likelihood_change": ("against_exact", "log_likelihood_change"),
}


def csv_text(report: dict[str, Any]) -> str:
    """Format a report as CSV, a line per method in full precision, with values of the run."""
    environment, about = report["environment"], report["about"]
    run = ("questions", "count", "target", "drafter", "seed", "template")
    common = {
        **{name: about[name] for name in (*run, "temperature", "top_p", "min_p", "batch")},
        "sampling_top_k": about["top_k"],
        "max_new_tokens": about["max_new_tokens"],
        "dtype": report["dtype"],
        "machine": _machine(report),
        "date": environment["date"],
        "revision": environment["revision"],
        "sessions": len(report["sessions"]),
        **{name: environment["versions"][name] for name in ("torch", "transformers")},
    }
    text = io.StringIO()
    names = [*_CSV_COLUMNS, "divergence_mean", *common]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for row in report["rows"]:
        own = {name: _look_up(row, path) for name, path in _CSV_COLUMNS.items()}
        own["divergence_mean"] = _mean_divergence(row, report.get("comparison"))
        writer.writerow({**own, **common})
    return text.getvalue()


def measurement(report: dict[str, Any]) -> str:
    """Describe in one sentence what was measured, where and when."""
    environment, about = report["environment"], report["about"]
    machine, versions = environment["machine"], environment["versions"]
    sessions = [item["environment"] for item in report["sessions"].values()] or [environment]
    dates = sorted({item["date"][:10] for item in sessions})
    revisions = list(dict.fromkeys(str(item["revision"]) for item in sessions))
    trees = list(dict.fromkeys(tree for row in report["rows"] if (tree := tree_text(row))))
    shape = f"; tree {trees[0]}" if len(trees) == 1 else ""
    repeats = f", each decoded {about['repeats']} times" if about.get("repeats", 1) > 1 else ""
    threads = f"{machine['threads']} thread{'' if machine['threads'] == 1 else 's'}"
    passes = {bool(item.get("compiled")) for item in report["sessions"].values()}
    if about.get("compiled"):
        compiled = ", compiled (answers: not compiled)"
    elif True not in passes:
        compiled = ""
    else:
        compiled = ", partly compiled" if False in passes else ", compiled"
    answers = about.get("answer_batch", about["batch"])
    batch = str(about["batch"]) + (f" (answers: {answers})" if answers != about["batch"] else "")
    first = f" after the first {about['skip']}" if about.get("skip") else ""
    questions = f"{report['questions']} questions of {about['questions']}{first}"
    sampling = _describe_sampling(about)
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    if about.get("servers"):
        return (
            f"{questions}, {batch} at once; {sampling}; servers {', '.join(about['servers'])},"
            f" requested from {machine['cpu']}; {when}, revision {', '.join(revisions)}."
        )
    return (
        f"{questions}, batch size {batch}{repeats}; {sampling},"
        f" {str(report['dtype']).removeprefix('torch.')} on {_machine(report)},"
        f" {threads}{compiled}{shape}; torch {versions['torch']}, transformers"
        f" {versions['transformers']}; {when}, revision {', '.join(revisions)}."
    )


def measured(report: dict[str, Any]) -> str:
    """Return what the accuracies of a report measure, in words."""
    given = {name: report["about"].get(name) for name in MeasureConfig.model_fields}
    return MeasureConfig().updated(**given).measured


def footnote(report: dict[str, Any]) -> str:
    """Describe how a report was measured, in a few sentences."""
    about, sentences = report["about"], [measurement(report), "Intervals are 95%."]
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
    for row in report["rows"]:
        if row["method"] == "fsd" and not about.get("servers"):
            exact = row["settings"]["method"] == "exact"
            sentences.append(f"{method_text(row)}{' is exact decoding' if exact else ''}.")
    if len(report["sessions"]) > 1:
        sentences.append(f"The answers come from {len(report['sessions'])} sessions.")
        if "answer_batch" not in about:  # speeds are those of the answers
            sentences.append("x compares within a session, tokens/s is over all of them.")
    if any(row["memory"] for row in report["rows"]):
        on_gpu = report["device"].startswith("cuda")
        memory = "GPU memory allocated, with that kept for other methods" if on_gpu else "memory"
        sentences.append(f"MiB is the process's peak {memory}.")
    sentences.append("Seconds (s) are per answer.")
    if any("loss_limit" in row.get("against_exact", {}) for row in report["rows"]):
        both, each = (100 * report[name] for name in ("confidence", "limit_confidence"))
        every = f" ({each:.4g}% for each)" if each > both else ""
        sentences.append(
            f"Limits on the loss of {measured(report)} are exact, at {both:.4g}% confidence for all"
            f" methods at once{every}."
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
            f"Turns that were not answered, because their prompts fill the context: {failed}"
            " over all methods."
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
    if about["seeds"] > 1:
        parts.append(f"seeds {about['seed']} to {about['seed'] + about['seeds'] - 1}")
    else:
        parts.append(f"seed {about['seed']}")
    if about["samples"] > 1:
        parts.append(f"{about['samples']} samples of each question")
    return ", ".join(parts)


def _machine(report: dict[str, Any]) -> str:
    """Return the name of the GPU or CPU that decoded, or that requested answers of servers."""
    machine: dict[str, str] = report["environment"]["machine"]
    return machine.get("gpu", "") if report["device"].startswith("cuda") else machine["cpu"]


def _look_up(value: Any, path: Sequence[str]) -> Any:
    """Follow keys and indices into nested values; None where one is missing."""
    for key in path:
        if value is None:
            return None
        value = value[int(key)] if key.isdigit() else value.get(key)
    return value
