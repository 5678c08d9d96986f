"""vLLM's rejection sampler with an acceptance rule.

Before vLLM's own kernels verify a batch, the drafted tokens that the rule accepts become certain in
the target's distributions (``budget`` raises their probabilities), so the kernels, greedy or
sampling, accept them, too. Everything else remains vLLM's, among it the lossless verification of
the other tokens.

Shape letters: ``B`` requests, ``T`` drafted tokens of all requests, ``N`` nodes of a chain, ``V``
vocabulary, ``W`` numbers in a rule's state.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from eagle_fsd.engines.chains import ChainVerifier, Layout
from eagle_fsd.model.verify import AcceptanceRule, VerificationInputs
from eagle_fsd.model.vocabulary import Distributions, arg_max

log = logging.getLogger("vllm.eagle_fsd")


class RelaxedSampler(RejectionSampler):
    """The rejection sampler of vLLM's Model Runner V1, with a rule.

    :meth:`prepare` gives it what vLLM does not pass to a rejection sampler, before each step.
    """

    verifier: ChainVerifier
    #: Raw logits ``[T + B, V]`` of a step.
    raw: Tensor | None
    #: See :meth:`prepare`.
    state: Tensor | None
    draft_logits: Tensor | None

    @classmethod
    def convert(cls, sampler: RejectionSampler, rule: AcceptanceRule) -> None:
        """Turn a rejection sampler of vLLM, in place, into one that applies a rule."""
        sampler.__class__ = cls
        sampler.verifier = ChainVerifier(rule, log)
        sampler.raw = sampler.state = sampler.draft_logits = None

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
        self.raw = logits
        output = super().forward(metadata, draft_probs, logits, sampling_metadata)
        self.verifier.finish(output.sampled_token_ids)
        self.raw = self.state = self.draft_logits = None
        return output

    def apply_logits_processors(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, metadata: SpecDecodeMetadata
    ) -> Tensor:
        """Process the target's raw logits ``[T, V]``, then raise those of accepted tokens."""
        process = super().apply_logits_processors
        if not len(metadata.draft_token_ids):
            return process(logits, sampling_metadata, metadata)
        layout = chain_layout(tuple(metadata.num_draft_tokens), logits.device)
        raw = self._raw_distributions(logits, layout)
        logits = process(logits, sampling_metadata, metadata)
        processed = raw if _untouched(sampling_metadata) else Distributions.of(logits[layout.index])
        warped, greedy, target = processed, None, logits
        if not sampling_metadata.all_greedy:
            greedy = sampling_metadata.temperature == 0.0
            target = _warped(logits, layout.rows, sampling_metadata)
            warped = Distributions.of(target[layout.index])
        inputs = VerificationInputs(
            tree=layout.tree(metadata.draft_token_ids, self.draft_logits),
            raw=raw,
            processed=processed,
            warped=warped,
            warped_draft=None,
            sampled=arg_max(processed.logits),
            state=self.state,
        )
        raised = self.verifier.relax(target, layout, inputs, greedy)
        if target is not logits:  # vLLM divides by the temperature next
            scale = sampling_metadata.temperature[layout.rows, None]
            scale = torch.where(scale == 0.0, 1.0, scale)
            logits = torch.where(raised[:, None], target.mul_(scale), logits)
        return logits

    def _raw_distributions(self, logits: Tensor, layout: Layout) -> Distributions:
        """Return the raw distributions ``[B, N, V]`` of the chains with the logits ``[T, V]``."""
        assert self.raw is not None  # vLLM calls this within forward
        requests, nodes = layout.index.shape
        if len(self.raw) == requests * nodes:  # chains of equal lengths
            return Distributions.of(self.raw.float().view(requests, nodes, -1))
        return Distributions.of(logits[layout.index])


@lru_cache(maxsize=256)
def chain_layout(counts: tuple[int, ...], device: torch.device) -> Layout:
    """Lay out chains with numbers of drafted tokens; most steps have those of an earlier one."""
    ends = torch.tensor(counts).cumsum(0).to(device)
    return Layout.of(ends, sum(counts), max(counts))


def _warped(logits: Tensor, rows: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Return the logits ``[T, V]`` of requests ``[T]`` after temperature, top-k and top-p."""
    temperature = metadata.temperature[rows, None]
    scaled = logits / torch.where(temperature == 0.0, 1.0, temperature)
    cuts = (None if cut is None else cut[rows] for cut in (metadata.top_k, metadata.top_p))
    return apply_top_k_top_p(scaled, *cuts)


def _untouched(metadata: SamplingMetadata) -> bool:
    """Whether vLLM applies no processor to the logits of this batch."""
    holder = metadata.thinking_budget_state_holder
    processors = metadata.logitsprocs.non_argmax_invariant
    return (
        metadata.no_penalties
        and metadata.allowed_token_ids_mask is None
        and not metadata.bad_words_token_ids
        # vLLM always has the processor of min_tokens, without requests in most steps.
        and not any(getattr(item, "min_toks", True) for item in processors)
        and (holder is None or not holder.has_tracked_requests())
    )
