"""vLLM's rejection sampler with an acceptance rule.

Before vLLM's own kernels verify a batch, the drafted tokens that the rule accepts become certain in
the target's distributions, so that the kernels, greedy or sampling, accept them, too. Everything
else remains vLLM's, among it the lossless verification of the other tokens.

Shape letters: ``B`` requests, ``T`` drafted tokens of all requests, ``V`` vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from eagle_fsd.engines.chains import Layout, acceptance, emitted, raise_probability
from eagle_fsd.model.acceptance import CascadeRule, DelayedRule, FuzzyRule, LimitedRule
from eagle_fsd.model.verify import AcceptanceRule, Origin, VerificationInputs
from eagle_fsd.model.vocabulary import Distributions

#: Seconds between two lines about the tokens that the rule accepted.
REPORT_INTERVAL = 60.0
log = logging.getLogger("vllm.eagle_fsd")


def innermost(rule: AcceptanceRule) -> AcceptanceRule:
    """Return the rule that a delayed or limited rule restricts."""
    while isinstance(rule, (LimitedRule, DelayedRule)):
        rule = rule.rule
    return rule


def reads_draft(rule: AcceptanceRule) -> bool:
    """Whether a rule compares the target's distribution with the draft's."""
    return isinstance(innermost(rule), (FuzzyRule, CascadeRule))


class Counter:
    """Count tokens on the device, and report them once a minute."""

    def __init__(self) -> None:
        self._counts: Tensor | None = None
        self._reported = time.monotonic()

    def add(self, fuzzy: Tensor, tokens: Tensor) -> None:
        """Add numbers of fuzzy and of all tokens, as tensors of one element."""
        counts = torch.stack([fuzzy, tokens])
        self._counts = counts if self._counts is None else self._counts.add_(counts)
        if time.monotonic() - self._reported >= REPORT_INTERVAL:
            self.report()

    def report(self) -> None:
        """Log the counts since the last report; this waits for the device."""
        if self._counts is not None:
            found, total = self._counts.tolist()
            log.info("eagle_fsd: the rule accepted %d of %d tokens", found, total)
        self._counts, self._reported = None, time.monotonic()


class Spent:
    """The nats that the fuzzy tokens of every request have given up, on the device."""

    def __init__(self, device: torch.device) -> None:
        self._slots: dict[str, int] = {}
        self._values = torch.zeros(64, device=device)
        self._now: Tensor | None = None

    def of(self, requests: list[str], alive: Collection[str]) -> Tensor:
        """Return ``[B]``: the values of the batch's requests, given the names of all requests."""
        for name in self._slots.keys() - alive:
            del self._slots[name]
        taken = set(self._slots.values())
        free = [slot for slot in range(len(taken) + len(requests)) if slot not in taken]
        new = [name for name in requests if name not in self._slots]
        self._slots |= dict(zip(new, free, strict=False))
        if (missing := len(taken) + len(requests) - len(self._values)) > 0:
            self._values = torch.nn.functional.pad(self._values, (0, len(self._values) + missing))
        device = self._values.device
        slots = torch.tensor([self._slots[name] for name in requests])
        fresh = torch.tensor([name in new for name in requests])
        self._now = slots.to(device, non_blocking=True)
        return self._values[self._now].masked_fill(fresh.to(device, non_blocking=True), 0.0)

    def keep(self, values: Tensor) -> None:
        """Set the values ``[B]`` of the requests of the last :meth:`of`."""
        assert self._now is not None
        self._values[self._now] = values


class RelaxedSampler(RejectionSampler):
    """The rejection sampler of vLLM's first model runner, with a rule.

    :meth:`prepare` gives it what vLLM does not pass to a rejection sampler, before each step.
    """

    rule: AcceptanceRule
    counter: Counter
    #: Set before a step: the rule's state ``[B, W]`` and the draft's raw logits ``[T, V]``.
    state: Tensor | None
    draft_logits: Tensor | None
    #: Between the rule and the kernels: what was verified, and the tokens that the rule accepted.
    step: tuple[VerificationInputs, Tensor] | None

    @classmethod
    def take(cls, sampler: RejectionSampler, rule: AcceptanceRule) -> None:
        """Give a rejection sampler a rule."""
        sampler.__class__ = cls
        sampler.rule = rule
        sampler.counter = Counter()
        sampler.state = sampler.draft_logits = sampler.step = None

    def prepare(self, state: Tensor | None, draft_logits: Tensor | None) -> None:
        """Set the rule's state ``[B, W]`` and the draft's raw logits ``[T, V]`` of a step."""
        self.state, self.draft_logits = state, draft_logits

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: Tensor | None,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> Any:
        self.step = None
        output = super().forward(metadata, draft_probs, logits, sampling_metadata)
        if self.step is not None:
            self._finish(*self.step, output.sampled_token_ids)
        return output

    def apply_logits_processors(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, metadata: SpecDecodeMetadata
    ) -> Tensor:
        """Process the target's raw logits ``[T, V]``, then make accepted tokens certain."""
        total = len(metadata.draft_token_ids)
        if not total:
            return super().apply_logits_processors(logits, sampling_metadata, metadata)
        layout = Layout.of(metadata.cu_num_draft_tokens, total, metadata.max_spec_len)
        raw = Distributions.of(logits[layout.index])
        logits = super().apply_logits_processors(logits, sampling_metadata, metadata)
        processed = raw if _untouched(sampling_metadata) else Distributions.of(logits[layout.index])
        warped, greedy = processed, torch.ones_like(layout.counts, dtype=torch.bool)
        if not sampling_metadata.all_greedy:
            greedy = sampling_metadata.temperature == 0.0
            warped = Distributions.of(_warped(logits, layout.rows, sampling_metadata)[layout.index])
        draft = None if self.draft_logits is None else self.draft_logits.log_softmax(-1)
        tree = layout.tree(metadata.draft_token_ids, draft)
        state = self.state
        if state is None and self.rule.state_size:  # a warm-up of vLLM, which prepares no step
            state = raw.peak.new_zeros(len(greedy), self.rule.state_size)
        inputs, least = acceptance(self.rule, tree, raw, processed, warped, greedy, state)
        flat = least[layout.rows, layout.places]
        raise_probability(logits, metadata.draft_token_ids, flat)
        self.step = inputs, least > 0.0
        return logits

    def _finish(self, inputs: VerificationInputs, accepted: Tensor, tokens: Tensor) -> None:
        """Count fuzzy tokens and advance the rule's state, given what was emitted ``[B, N]``."""
        found = emitted(inputs, tokens, accepted)
        self.counter.add((found.origins == int(Origin.FUZZY)).sum(), found.count.sum())
        if inputs.state is not None:
            self.state = self.rule.advance(inputs, found)


def _warped(logits: Tensor, rows: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Return the logits ``[T, V]`` of requests ``[T]`` after temperature, top-k and top-p."""
    temperature = metadata.temperature[rows, None]
    scaled = logits / torch.where(temperature == 0.0, 1.0, temperature)
    cuts = (None if cut is None else cut[rows] for cut in (metadata.top_k, metadata.top_p))
    return apply_top_k_top_p(scaled, *cuts)


def _untouched(metadata: SamplingMetadata) -> bool:
    """Whether no processor of vLLM changes the logits of this batch."""
    holder = metadata.thinking_budget_state_holder
    return (
        metadata.no_penalties
        and metadata.allowed_token_ids_mask is None
        and not metadata.bad_words_token_ids
        and not metadata.logitsprocs.non_argmax_invariant
        and (holder is None or not holder.has_tracked_requests())
    )
