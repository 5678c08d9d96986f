"""Count what a rule accepts, and keep its states, without reads from the device.

Shape letters: ``B`` requests, ``W`` numbers in a rule's state.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from eagle_fsd.model.acceptance import DelayedRule, WrappedRule
from eagle_fsd.model.verify import AcceptanceRule, Origin, Verification, VerificationInputs

#: Seconds between two lines about the tokens that the rule accepted.
REPORT_INTERVAL = 60.0


class Counter:
    """Count tokens on the device, and log the counts once a minute."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._counts: Tensor | None = None
        self._reported = time.monotonic()

    def add(self, origins: Tensor) -> None:
        """Add tokens, given their :class:`Origin` as int64 of any shape."""
        if self._counts is None:
            self._counts = origins.new_zeros(len(Origin))
        self._counts.scatter_add_(0, origins.flatten(), torch.ones_like(origins).flatten())
        if time.monotonic() - self._reported >= REPORT_INTERVAL:
            self.report()

    def report(self) -> None:
        """Log the counts since the last report; this waits for the device."""
        if self._counts is not None:
            counts = self._counts.tolist()
            found, total = counts[Origin.FUZZY], sum(counts) - counts[Origin.PADDING]
            self._log.info("eagle_fsd: the rule accepted %d of %d tokens", found, total)
        self._counts, self._reported = None, time.monotonic()


class RuleStates:
    """The state of a rule for every request, on the device, from one step to the next."""

    def __init__(self, rule: AcceptanceRule) -> None:
        wrappers = []
        while isinstance(rule, WrappedRule):
            wrappers.append(rule)
            rule = rule.rule
        assert not rule.state_size  # every column is that of a wrapper, the innermost one's first
        self._delayed = [isinstance(wrapper, DelayedRule) for wrapper in reversed(wrappers)]
        self._slots: dict[str, int] = {}
        self._values = torch.zeros(0, len(wrappers))
        self._names: tuple[str, ...] = ()
        self._now: Tensor | None = None

    def keep_only(self, requests: Iterable[str]) -> None:
        """Forget all requests but these."""
        self.forget(self._slots.keys() - requests)

    def forget(self, requests: Iterable[str]) -> None:
        """Forget requests that have ended."""
        for name in requests:
            self._slots.pop(name, None)

    def of(
        self, requests: Sequence[str], emitted: Callable[[], Tensor], device: torch.device
    ) -> Tensor:
        """Return the states ``[B, W]`` of a batch's requests; those of new requests are zero.

        ``emitted`` returns ``[B]``, the numbers of tokens that their answers have; it is called if
        a state depends on these.
        """
        taken = set(self._slots.values())
        free = [slot for slot in range(len(taken) + len(requests)) if slot not in taken]
        new = [name for name in requests if name not in self._slots]
        self._slots |= dict(zip(new, free, strict=False))
        if (missing := len(taken) + len(requests) - len(self._values)) > 0:
            more = self._values.new_zeros(len(self._values) + missing, len(self._delayed))
            self._values = torch.cat([self._values, more]).to(device)
        if new:  # in a slot of an earlier request
            slots = torch.tensor([self._slots[name] for name in new])
            self._values.index_fill_(0, slots.to(device, non_blocking=True), 0.0)
        if new or tuple(requests) != self._names:  # otherwise the slots of the last step
            self._names = tuple(requests)
            slots = torch.tensor([self._slots[name] for name in requests])
            self._now = slots.to(device, non_blocking=True)
        state = self._values[self._now]
        for column, delayed in enumerate(self._delayed):
            if delayed:  # the engine also emits tokens without the rule
                state[:, column] = emitted()
        return state

    def store(self, state: Tensor) -> None:
        """Set the states ``[B, W]`` of the requests of the last :meth:`of`."""
        assert self._now is not None
        self._values[self._now] = state


class EngineRule:
    """A rule with what it keeps between the steps of an engine."""

    def __init__(self, rule: AcceptanceRule, log: logging.Logger) -> None:
        self.rule = rule
        self.counter = Counter(log)
        self.states = RuleStates(rule)

    def record(self, inputs: VerificationInputs, found: Verification, kept: bool) -> None:
        """Count the tokens of a step and, if they are ``kept``, advance the rule's states."""
        self.counter.add(found.origins)
        if kept:
            self.states.store(self.rule.advance(inputs, found))
