"""What a worker tells Prometheus."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

#: Seconds of a decoding step: from a small pair on a GPU to a large one on a CPU.
STEP_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
WAIT_BUCKETS = (0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120)
TAU_BUCKETS = (1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 10, 12)


class WorkerMetrics:
    """Counters of one worker, in a registry of its own.

    tau over any time is ``eagle_fsd_tokens_total / eagle_fsd_steps_total`` (summed over origins),
    the fuzzy share ``eagle_fsd_tokens_total{origin="fuzzy"}`` over all of them.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter(
            "eagle_fsd_requests", "Requests by how they ended.", ["outcome"], registry=registry
        )
        self.queue = Gauge(
            "eagle_fsd_queue", "Requests waiting or being answered.", registry=registry
        )
        self.tokens = Counter(
            "eagle_fsd_tokens", "Emitted tokens by origin.", ["origin"], registry=registry
        )
        self.prompt_tokens = Counter(
            "eagle_fsd_prompt_tokens", "Prompt tokens of answered requests.", registry=registry
        )
        self.steps = Counter("eagle_fsd_steps", "Target passes.", registry=registry)
        self.tau = Histogram(
            "eagle_fsd_tau", "Tokens per target pass, of each answer.", registry=registry,
            buckets=TAU_BUCKETS,
        )  # fmt: skip
        self.step_seconds = Histogram(
            "eagle_fsd_step_seconds", "Time of a decoding step.", registry=registry,
            buckets=STEP_BUCKETS,
        )  # fmt: skip
        self.wait_seconds = Histogram(
            "eagle_fsd_wait_seconds", "Time in the queue.", registry=registry, buckets=WAIT_BUCKETS
        )

    def watch(self, event: str, figures: dict[str, Any]) -> None:
        """Book an event of :class:`~eagle_fsd.chat.decode_queue.DecodeQueue`'s."""
        if event == "begun":
            self.wait_seconds.observe(figures["waited"])
        elif event == "step":
            self.step_seconds.observe(figures["seconds"])
        else:
            self.requests.labels(event).inc()
        if event in ("ended", "cancelled") and figures:  # without any it left before its turn
            self.steps.inc(figures["steps"])
            for origin in ("exact", "fuzzy", "target"):
                self.tokens.labels(origin).inc(figures[f"{origin}_tokens"])
        if event == "ended":
            self.tau.observe(figures["tau"])
            self.prompt_tokens.inc(figures["prompt_tokens"])

    def page(self, queue: int) -> bytes:
        """The text Prometheus reads."""
        self.queue.set(queue)
        return generate_latest(self.registry)
