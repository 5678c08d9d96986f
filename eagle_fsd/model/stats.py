"""What decoding reports about itself."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from eagle_fsd.model.verify import Origin

PHASES = ("prefill", "draft", "tree", "target", "verify", "cache", "host")


class PhaseClock:
    """Adds up the seconds spent in each phase, without making the device wait.

    On CUDA the boundaries are events in the stream; they are read by :meth:`collect`, once the host
    has waited for the step's tokens anyway. Elsewhere they are the host's own clock.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str | None, Any]] = []

    def enter(self, phase: str | None) -> None:
        """From here on time belongs to ``phase``, or to nobody."""
        if self._cuda:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        else:
            mark = time.perf_counter()
        self._marks.append((phase, mark))

    def collect(self) -> None:
        """Book everything up to the last mark; call only when the device has passed it."""
        for (phase, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            if phase is None:
                continue
            self.seconds[phase] += begin.elapsed_time(end) / 1e3 if self._cuda else end - begin
        self._marks = self._marks[-1:]


@dataclass
class DecodeStats:
    """Figures of one ``generate`` call.

    Attributes:
        accepted: For each row, the tokens each target pass emitted, the bonus token counted.
        origins: For each row, how many tokens came from where.
        seconds: Time by phase, prefill apart.
        passes: Target passes over the batch, prefill apart.
        prefilled: Prompt tokens read; a conversation's earlier ones are not read again.
    """

    accepted: list[list[int]]
    origins: list[Counter[str]]
    seconds: dict[str, float] = field(default_factory=dict)
    passes: int = 0
    prefilled: int = 0

    @classmethod
    def empty(cls, rows: int) -> DecodeStats:
        return cls([[] for _ in range(rows)], [Counter() for _ in range(rows)])

    def add(self, row: int, origins: Iterable[int]) -> None:
        """Book what one target pass emitted for ``row``."""
        names = [Origin(item).name.lower() for item in origins]
        self.accepted[row].append(len(names))
        self.origins[row].update(names)

    @property
    def tokens(self) -> int:
        return sum(map(sum, self.accepted))

    @property
    def steps(self) -> int:
        """Target passes, counted once for each row that was still alive."""
        return sum(map(len, self.accepted))

    @property
    def tau(self) -> float:
        """Mean accepted length: tokens emitted per target pass, prefill not counted."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Over all rows, prefill not counted."""
        spent = sum(value for phase, value in self.seconds.items() if phase != "prefill")
        return self.tokens / spent if spent else 0.0

    def share(self, origin: Origin) -> float:
        """The part of the tokens that came from ``origin``."""
        found = sum(row[origin.name.lower()] for row in self.origins)
        return found / self.tokens if self.tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        total: Counter[str] = sum(self.origins, Counter())
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "passes": self.passes,
            "prefilled": self.prefilled,
            "tau": self.tau,
            "tokens_per_second": self.tokens_per_second,
            "origins": {name: total[name] for name in ("exact", "fuzzy", "target")},
            "seconds": dict(self.seconds),
            "accepted": self.accepted,
        }
