"""Reports made by hand."""

from __future__ import annotations

from typing import Any


def make_row(
    method: str,
    ratio: float,
    lost: int = 0,
    gained: int = 0,
    *,
    scored: bool = True,
    threshold: float = 0.1,
) -> dict[str, Any]:
    """Return the row of a method with 100 answers, of which exact decoding has 90 right."""
    row: dict[str, Any] = {
        "method": method,
        "answers": 100,
        "tokens": 1000,
        "scored": 100 if scored else 0,
        "failed": 0,
        "cut_off": 0,
        "tokens_per_second": 100 * ratio,
        "speedup": ratio / 0.4,
        "speedup_interval": [ratio / 0.4 - 0.01, ratio / 0.4 + 0.01],
        "speed_over_exact": ratio,
        "speed_over_exact_interval": [ratio - 0.01, ratio + 0.01],
        "latency": {"median": 0.1, "p95": 0.2},
        "tau": 4.0,
        "tau_by_category": {"c": 4.0},
        "reach": [1.0, 0.5],
        "memory": 2**20,
        "origins": {"exact": 0.7, "fuzzy": 0.1, "target": 0.2},
        "accuracy": 0.9 + (gained - lost) / 100 if scored else None,
        "accuracy_interval": [0.8, 0.95] if scored else None,
        "log_likelihood": -0.5,
        "log_likelihood_interval": [-0.6, -0.4],
        "regret": {"fuzzy_tokens": 10, "mean": 0.25, "p95": 1.0, "max": 2.0, "per_token": 0.02},
        "settings": {
            "method": "fsd",
            "threshold": threshold,
            "divergence": "js",
            "min_ratio": 0.1,
            "fallback": "exact",
            "selection": "longest",
            "divergence_on": "raw",
            "price": 1.0,
            "max_fuzzy_nats": None,
            "total_tokens": 16,
            "depth": 8,
            "tree_top_k": 2,
        },
    }
    if method == "exact":
        row["speed_over_exact_interval"] = [1.0, 1.0]
        return row
    row["against_exact"] = {
        "agreement": {
            "answers": 100,
            "identical": 60,
            "changed_limit": 0.48,
            "first_difference": [3.0, 9.0, 20.0],
            "length_change": 1.0,
            "length_change_interval": [0.5, 1.5],
            "repetition": 0.1,
            "repetition_change": 0.01,
            "repetition_change_interval": [-0.01, 0.03],
        },
        "log_likelihood_change": -0.1,
        "log_likelihood_change_interval": [-0.15, -0.05],
    }
    if scored:
        row["against_exact"] |= {"lost": lost, "gained": gained, "paired": 100}
        row["against_exact"] |= {"accuracy_change": (gained - lost) / 100, "loss_limit": 0.031}
    return row


def make_report(rows: list[dict[str, Any]], **values: Any) -> dict[str, Any]:
    """Return a report with the given rows."""
    versions = {"torch": "2.0", "transformers": "5.0"}
    environment = {
        "date": "2026-01-02T03:04:05+00:00",
        "machine": {"cpu": "CPU", "threads": 1},
        "python": "3.11",
        "versions": versions,
        "revision": "abc",
    }
    return {
        "about": {
            "questions": "bundled",
            "skip": 0,
            "count": 100,
            "target": "bundled",
            "drafter": "bundled",
            "temperature": 0.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "batch": 1,
            "seed": 0,
            "max_new_tokens": 512,
            "template": None,
            "system": None,
            "few_shot": None,
            "grader": None,
            "samples": 1,
            "seeds": 1,
        },
        "settings": {"total_tokens": 16, "depth": 8, "top_k": 2},
        "environment": environment,
        "dtype": "torch.float32",
        "device": "cpu",
        "sessions": {"a": {"environment": environment}},
        "questions": 100,
        "unscored": None,
        "confidence": 0.95,
        "limit_confidence": 0.95,
        "rows": rows,
        "written": "2026-01-02 03:04:05",
        **values,
    }
