"""Speed and quality of decoding methods side by side: ``eagle-fsd bench``.

One run, the same prompts, the same machine, the same cache. Speed is measured one prompt at a time,
with the methods interleaved on every prompt, so that a machine that slows down slows them all.
Quality (accepted length, origins, accuracy) does not depend on the batch and is measured on more
problems, in batches.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle_fsd.bundled.problems import Problem, problems
from eagle_fsd.bundled.quality import Quality, decode_answers, encode_problems
from eagle_fsd.evaluation.methods import (
    EXACT,
    HF,
    PLAIN,
    Decoded,
    Method,
    decode,
    fsd_grid,
    synchronise,
)
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.utils.provenance import describe_environment

#: Called after each unit of work with (done, total).
Progress = Callable[[int, int], None]

QUALITY_BATCH = 32


@dataclass
class MethodResult:
    """What was measured of one method.

    Attributes:
        seconds, tokens: Of the timed prompts, prefill included; one entry a prompt and repetition.
        phases: Seconds by phase on the timed prompts.
        steps: Target passes on them, prefill apart.
        quality: On the problems measured for quality.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    phases: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    quality: Quality = field(default_factory=Quality)

    @property
    def tokens_per_second(self) -> float:
        return sum(self.tokens) / sum(self.seconds)

    @property
    def decoding_seconds(self) -> float:
        """Of the timed prompts, prefill apart; 0 where phases are unknown."""
        return sum(value for name, value in self.phases.items() if name != "prefill")

    @property
    def seconds_per_step(self) -> float | None:
        return self.decoding_seconds / self.steps if self.steps else None

    def phase_shares(self) -> dict[str, float]:
        """Share of the decoding time, prefill apart."""
        total = self.decoding_seconds
        shares = {name: value / total for name, value in self.phases.items() if total}
        shares.pop("prefill", None)
        return shares

    def as_dict(
        self, plain: MethodResult, exact: MethodResult, hf: MethodResult | None
    ) -> dict[str, Any]:
        speed, quality = self.tokens_per_second, self.quality
        shares = {name: quality.origins[name] for name in ("exact", "fuzzy", "target")}
        return {
            "method": self.name,
            "tokens_per_second": speed,
            "speedup_over_plain": speed / plain.tokens_per_second,
            "speedup_over_hf": speed / hf.tokens_per_second if hf else None,
            "tau": quality.tau,
            "origins": {name: value / quality.tokens for name, value in shares.items()}
            if quality.tokens
            else None,
            "accuracy": quality.accuracy,
            "correct": quality.correct,
            "problems": quality.problems,
            "timed_tokens": sum(self.tokens),
            "timed_seconds": sum(self.seconds),
            "seconds_per_step": self.seconds_per_step,
            "step_over_exact": self.seconds_per_step / exact.seconds_per_step
            if self.steps
            else None,
            "phase_shares": self.phase_shares(),
        }


def bench_methods(
    thresholds: Sequence[float], min_ratios: Sequence[float], divergence: str, hf: bool
) -> list[Method]:
    """Plain decoding, exact EAGLE-2, and FSD at every threshold with every ``min_ratio``."""
    grid = fsd_grid([item for item in thresholds if item > 0.0], min_ratios, [divergence])
    return [HF] * hf + [PLAIN, EXACT, *grid]


class Bench:
    """Runs methods on the bundled problems.

    Args:
        model: The pair; its tokenizer needs a chat template.
        count: Problems measured for quality. timed: How many of them are timed, one at a time.
        repeats: How often each timed prompt is decoded by each method.
    """

    def __init__(
        self,
        model: EagleFSD,
        methods: Sequence[Method],
        count: int = 100,
        timed: int = 20,
        repeats: int = 1,
        max_new_tokens: int = 256,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.methods = list(methods)
        self.problems = problems("test", count, seed)
        self.timed = self.problems[:timed]
        self.repeats = repeats
        self.max_new_tokens = max_new_tokens
        self.results = {method.name: MethodResult(method.name) for method in methods}

    def run(self, progress: Progress | None = None) -> dict[str, Any]:
        """Measure everything; returns rows and provenance, ready for JSON."""
        batches = [
            self.problems[start : start + QUALITY_BATCH]
            for start in range(0, len(self.problems), QUALITY_BATCH)
        ]
        total = len(self.methods) * (len(self.timed) * self.repeats + len(self.problems))
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress(done, total)

        for method in self.methods:  # warm-up: first calls pay for lazy initialisation
            self._generate(method, self.timed[:1])
        for repeat in range(self.repeats):
            for index, problem in enumerate(self.timed):
                turn = (index + repeat) % len(self.methods)
                for method in self.methods[turn:] + self.methods[:turn]:
                    self._time(method, problem)
                    advance(1)
        for batch in batches:
            for method in self.methods:
                self._judge(method, batch)
                advance(len(batch))
        return self.report()

    def report(self) -> dict[str, Any]:
        hf = self.results.get("hf")
        plain, exact = self.results["plain"], self.results["exact"]
        return {
            "environment": describe_environment(),
            "dtype": str(self.model.target.dtype).removeprefix("torch."),
            "device": str(self.model.target.device),
            "settings": self.model.settings.as_dict(),
            "max_new_tokens": self.max_new_tokens,
            "problems": len(self.problems),
            "timed": len(self.timed),
            "repeats": self.repeats,
            "rows": [result.as_dict(plain, exact, hf) for result in self.results.values()],
        }

    def _time(self, method: Method, problem: Problem) -> None:
        result = self.results[method.name]
        synchronise(self.model)
        begin = time.perf_counter()
        found = self._generate(method, [problem])
        synchronise(self.model)
        result.seconds.append(time.perf_counter() - begin)
        result.tokens.append(len(found.tokens[0]))
        if found.stats is not None:
            result.phases.update(found.stats.seconds)
            result.steps += found.stats.steps

    def _judge(self, method: Method, batch: list[Problem]) -> None:
        quality = self.results[method.name].quality
        found = self._generate(method, batch)
        quality.add_answers(decode_answers(self.model.tokenizer, found.tokens), batch)
        if found.stats is not None:
            quality.add_stats(found.stats)

    def _generate(self, method: Method, batch: list[Problem]) -> Decoded:
        encoded = encode_problems(self.model.tokenizer, batch).to(self.model.target.device)
        ids, mask = encoded["input_ids"], encoded["attention_mask"]
        return decode(self.model, method, ids, mask, self.model.end_tokens, self.max_new_tokens)
