"""Count what a rule accepts, and keep its states; only the log reads from the device.

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

#: Least number of seconds between two lines about the tokens that the rule accepted.
REPORT_INTERVAL = 60.0


class RuleStates:
    """The state of a rule for every request, on the device, from one step to the next."""

    def __init__(self, rule: AcceptanceRule) -> None:
        self._delayed: list[bool] = []  # of each column, the innermost wrapper's first
        while isinstance(rule, WrappedRule):
            self._delayed.insert(0, isinstance(rule, DelayedRule))
            rule = rule.rule
        assert not rule.state_size
        self._values: dict[str, Tensor] = {}  # [W] of each request
        self._names: list[str] = []  # of the last call of `of`

    def keep_only(self, requests: Iterable[str]) -> None:
        """Forget all requests but these."""
        self.forget(self._values.keys() - requests)

    def forget(self, requests: Iterable[str]) -> None:
        """Forget requests that have ended."""
        for name in requests:
            self._values.pop(name, None)

    def of(
        self, requests: Sequence[str], emitted: Callable[[], Tensor], device: torch.device
    ) -> Tensor:
        """Return the states ``[B, W]`` of a batch's requests; those of new requests are zero.

        ``emitted`` returns ``[B]``, the numbers of tokens that their answers have; it is called if
        a state depends on these.
        """
        self._names = list(requests)
        fresh = torch.zeros(len(self._delayed), device=device)
        state = torch.stack([self._values.get(name, fresh) for name in self._names])
        for column, delayed in enumerate(self._delayed):
            if delayed:  # the engine also emits tokens without the rule
                state[:, column] = emitted()
        return state

    def store(self, state: Tensor) -> None:
        """Set the states ``[B, W]`` of the requests of the last :meth:`of`."""
        self._values.update(zip(self._names, state.unbind(), strict=True))


class EngineRule:
    """A rule with what it keeps between the steps of an engine."""

    def __init__(self, rule: AcceptanceRule, log: logging.Logger) -> None:
        self.rule = rule
        self.states = RuleStates(rule)
        self._log = log
        self._counts: Tensor | None = None  # of each Origin, on the device
        self._reported = time.monotonic()

    def record(self, inputs: VerificationInputs, found: Verification, advance: bool) -> None:
        """Count the tokens of a step and, with ``advance``, store the rule's next states."""
        self.count(found.origins)
        if advance:
            self.states.store(self.rule.advance(inputs, found))

    def count(self, origins: Tensor) -> None:
        """Count tokens by their :class:`Origin`, int64 of any shape; log at most once a minute."""
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
