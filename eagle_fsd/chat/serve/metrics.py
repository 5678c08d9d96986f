"""Prometheus metrics of a server."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

#: How a request ended.
Outcome = Literal["ended", "cancelled", "failed", "refused", "queue_full"]
#: Seconds per decoding step: from a small pair on a GPU to a large one on a CPU.
STEP_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
#: Seconds per token: fractions of a step.
TOKEN_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
WAIT_BUCKETS = (0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120)
TAU_BUCKETS = (1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 10, 12)


class ServerMetrics:
    """Metrics of one server, in a separate registry.

    Tokens and steps are counted when an answer ends or is cancelled. tau of these answers is
    ``eagle_fsd_tokens_total / eagle_fsd_steps_total`` (summed over origins), and the fraction of
    their fuzzy tokens ``eagle_fsd_tokens_total{origin="fuzzy"}`` over that sum.

    Both the decoding thread and the event loop update them.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests = counter("eagle_fsd_requests", "Requests by outcome.", ["outcome"])
        for outcome in get_args(Outcome):
            self.requests.labels(outcome)  # a rate needs a sample before the first one
        self.queue = gauge("eagle_fsd_queue", "Requests waiting or being answered.")
        self.rows = gauge("eagle_fsd_rows", "Requests being decoded: rows in use.")
        self.max_rows = gauge("eagle_fsd_max_rows", "Rows of the batch.")
        self.tokens = counter("eagle_fsd_tokens", "Emitted tokens by origin.", ["origin"])
        self.prompt_tokens = counter(
            "eagle_fsd_prompt_tokens", "Prompt tokens of answered requests."
        )
        self.steps = counter("eagle_fsd_steps", "Target passes, summed over the answers in each.")
        self.tau = histogram(
            "eagle_fsd_tau", "Tokens per target pass in each answer.", buckets=TAU_BUCKETS
        )
        self.step_seconds = histogram(
            "eagle_fsd_step_seconds", "Duration of a decoding step.", buckets=STEP_BUCKETS
        )
        self.wait_seconds = histogram(
            "eagle_fsd_wait_seconds", "Time in the queue.", buckets=WAIT_BUCKETS
        )
        self.first_token_seconds = histogram(
            "eagle_fsd_first_token_seconds",
            "Time from the submission of a request to its first token.",
            buckets=WAIT_BUCKETS,
        )
        self.token_seconds = histogram(
            "eagle_fsd_token_seconds",
            "Time per token after the first step, of each answer.",
            buckets=TOKEN_BUCKETS,
        )

    def request_finished(
        self, outcome: Outcome, stats: Mapping[str, Any], seconds_per_token: float | None = None
    ) -> None:
        """Count a request that ends, is cancelled, fails or is refused.

        ``stats`` are the answer's :meth:`~eagle_fsd.chat.session.ChatAnswer.stats` and, if it
        ended, its usage; empty to count no tokens. ``seconds_per_token`` counts from the end of the
        first step; None if there were no others.
        """
        if seconds_per_token is not None:
            self.token_seconds.observe(seconds_per_token)
        self.requests.labels(outcome).inc()
        if not stats:
            return
        self.steps.inc(stats["steps"])
        for origin in ("exact", "fuzzy", "target"):
            self.tokens.labels(origin).inc(stats[f"{origin}_tokens"])
        if outcome == "ended":
            self.prompt_tokens.inc(stats["prompt_tokens"])
            if stats["steps"]:  # else only a prompt was scored
                self.tau.observe(stats["tau"])

    def page(self, queue_length: int, rows: int, max_rows: int) -> bytes:
        """Return the metrics in Prometheus' text format, with the queue's present state."""
        self.queue.set(queue_length)
        self.rows.set(rows)
        self.max_rows.set(max_rows)
        return generate_latest(self.registry)
