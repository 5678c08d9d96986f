"""Statistics of a decoding call: accepted lengths, origins, and seconds per phase."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from eagle_fsd.model.verify import Origin

#: Phases of a call; all but prefill repeat in every step, "draft" only with a drafter. In a step
#: that a CUDA graph replays, "graph" replaces all but "host". Compiled, "verify" includes "cache".
PHASES = ("prefill", "draft", "target", "verify", "cache", "host")
#: Names of the origins of emitted tokens.
ORIGINS = tuple(item.name.lower() for item in Origin if item != Origin.PADDING)


class PhaseClock:
    """Measure the seconds spent in each phase without synchronizing the device."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._device, self._cuda = device, device.type == "cuda"
        self._marks: list[tuple[str | None, Any]] = []

    def enter(self, phase: str | None) -> None:
        """Begin one of :data:`PHASES` or ``"graph"``; None stops counting."""
        mark: Any
        if self._cuda:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record(torch.cuda.current_stream(self._device))
        else:
            mark = time.perf_counter()
        self._marks.append((phase, mark))

    def collect(self) -> None:
        """Add up the phases that the device has finished."""
        while len(self._marks) > 1:
            (phase, begin), (_, end) = self._marks[:2]
            if self._cuda and not end.query():
                break
            del self._marks[0]
            if phase is not None:
                spent = begin.elapsed_time(end) / 1e3 if self._cuda else end - begin
                self.seconds[phase] = self.seconds.get(phase, 0.0) + spent


@dataclass
class DecodeStats:
    """Statistics of a call, or of one answer of :meth:`EagleFSD.generate_many`.

    Attributes:
        accepted: For each row, the number of tokens that each target pass emitted, bonus token
            included.
        origins: For each row, the number of tokens by lowercase :class:`Origin` name.
        seconds: Seconds by phase, see :data:`PHASES`.
        passes: Target passes over the batch, without prefill.
        prefilled: Prompt tokens processed, without each prompt's last and those found in a cache.
    """

    accepted: list[list[int]]
    origins: list[dict[str, int]]
    seconds: dict[str, float] = field(default_factory=dict)
    passes: int = 0
    prefilled: int = 0

    @classmethod
    def empty(cls, rows: int) -> DecodeStats:
        """Return the statistics of a call with ``rows`` prompts that has emitted nothing yet."""
        return cls([[] for _ in range(rows)], [dict.fromkeys(ORIGINS, 0) for _ in range(rows)])

    def add(self, row: int, origins: Iterable[int]) -> None:
        """Count the tokens that a target pass emitted for ``row``, given their ``origins``."""
        names = [Origin(item).name.lower() for item in origins]
        self.accepted[row].append(len(names))
        for name in names:
            self.origins[row][name] += 1

    @property
    def tokens(self) -> int:
        """Tokens emitted, over all rows."""
        return sum(sum(row.values()) for row in self.origins)  # fewer numbers than `accepted` has

    @property
    def steps(self) -> int:
        """Target passes, summed over the rows that each of them decoded."""
        return sum(map(len, self.accepted))

    @property
    def tau(self) -> float:
        """Mean accepted length: tokens emitted per target pass, without prefill."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens emitted per second over all rows, prefill excluded."""
        spent = sum(value for phase, value in self.seconds.items() if phase != "prefill")
        return self.tokens / spent if spent else 0.0

    @property
    def slower_than_plain(self) -> bool:
        """Whether plain decoding would probably have been faster.

        A plain pass takes at most as long as a pass over a tree, and emits one token per row; the
        rest of a plain step is neglected. False where the phases were not timed apart.
        """
        target = self.seconds.get("target", 0.0)
        apart = self.seconds.get("draft", 0.0) > 0.0 and not self.seconds.get("graph")
        return target > 0.0 and apart and self.tokens_per_second < self.steps / target

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics as JSON-serializable values."""
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "passes": self.passes,
            "prefilled": self.prefilled,
            "tau": self.tau,
            "tokens_per_second": self.tokens_per_second,
            "origins": {name: sum(row[name] for row in self.origins) for name in ORIGINS},
            "seconds": dict(self.seconds),
            "accepted": self.accepted,
        }
