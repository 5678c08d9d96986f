"""Provide the rejection sampler with inputs that vLLM's Model Runner V1 does not pass to it.

Rules with a state need to know which requests a batch holds and how long their answers are. Rules
that compare distributions need the draft's raw logits, which vLLM does not keep.

Shape letters: ``B`` requests, ``T`` drafted tokens of all requests, ``K`` drafted tokens of a
request, ``V`` vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from eagle_fsd.engines.settings import reads_draft, rule_of
from eagle_fsd.engines.vllm.sampler import RelaxedSampler


def extend_runner() -> None:
    """Patch model runner and proposer to call :func:`prepare` and :func:`keep_logits`, once."""
    if getattr(GPUModelRunner, "_eagle_fsd", False):
        return
    GPUModelRunner._eagle_fsd = True
    sample, propose = GPUModelRunner._sample, GPUModelRunner.propose_draft_token_ids
    draft = SpecDecodeBaseProposer._sample_draft_tokens

    def _sample(self: Any, logits: Tensor | None, spec_decode_metadata: Any) -> Any:
        if spec_decode_metadata is not None:
            prepare(self, spec_decode_metadata)
        return sample(self, logits, spec_decode_metadata)

    def propose_draft_token_ids(self: Any, *args: Any, **kwargs: Any) -> Any:
        sampler = getattr(self, "rejection_sampler", None)
        if isinstance(sampler, RelaxedSampler) and reads_draft(sampler.verifier.rule):
            self.drafter._eagle_fsd_logits = []
        found = propose(self, *args, **kwargs)
        self._eagle_fsd_requests = list(self.input_batch.req_ids)
        return found

    def _sample_draft_tokens(self: Any, hidden_states: Tensor, sampling_metadata: Any) -> Any:
        if not hasattr(self, "_eagle_fsd_logits"):
            return draft(self, hidden_states, sampling_metadata)
        compute = self.model.compute_logits

        def compute_and_keep(states: Tensor) -> Tensor:
            logits = compute(states)
            keep_logits(self, logits)
            return logits

        self.model.compute_logits = compute_and_keep
        try:
            return draft(self, hidden_states, sampling_metadata)
        finally:
            del self.model.compute_logits

    GPUModelRunner._sample = _sample
    GPUModelRunner.propose_draft_token_ids = propose_draft_token_ids
    SpecDecodeBaseProposer._sample_draft_tokens = _sample_draft_tokens


def keep_logits(drafter: Any, logits: Tensor) -> None:
    """Keep the draft's raw logits ``[requests, V]`` of a level for the next step."""
    drafter._eagle_fsd_logits.append(logits.to(torch.float32, copy=True))


def prepare(runner: Any, metadata: Any) -> None:
    """Give the sampler the states of a step's requests, and the logits of their drafted tokens."""
    sampler = runner.rejection_sampler
    if not isinstance(sampler, RelaxedSampler):
        if rule_of(runner.vllm_config.additional_config) is not None:
            raise RuntimeError("eagle_fsd: the rejection sampler was made without the rule")
        return  # another engine of this process
    verifier, state, draft_logits = sampler.verifier, None, None
    if verifier.rule.state_size:
        verifier.states.keep_only(runner.requests)
        state = verifier.states.of(
            runner.input_batch.req_ids,
            emitted=lambda: _emitted_before(runner, metadata),
            device=metadata.logits_indices.device,
        )
    if reads_draft(verifier.rule):
        draft_logits = _draft_logits(runner, metadata)
    sampler.prepare(state, draft_logits)


def _emitted_before(runner: Any, metadata: Any) -> Tensor:
    """Return ``[B]``: the number of tokens of each request's answer before this step.

    The first row of a request's logits belongs to its last token, of the prompt or the answer.
    """
    counts = metadata.cu_num_sampled_tokens
    firsts = torch.cat([counts.new_zeros(1), counts[:-1]]).long()
    positions = runner.positions[metadata.logits_indices.long()[firsts]]
    prompts = torch.from_numpy(runner.input_batch.num_prompt_tokens[: len(counts)].copy())
    return positions + 1 - prompts.to(positions.device, non_blocking=True)


def _draft_logits(runner: Any, metadata: Any) -> Tensor | None:
    """Return ``[T, V]``: the draft's raw logits that a step's drafted tokens were chosen from.

    None if there are none: without room in the drafter, vLLM schedules placeholders. They are NaN,
    which closes gates, for a request that vLLM left out of the step before: it was drafted earlier.
    """
    drafted = getattr(runner.drafter, "_eagle_fsd_logits", [])
    runner.drafter._eagle_fsd_logits = []
    scheduled = zip(runner.input_batch.req_ids, metadata.num_draft_tokens, strict=False)
    counts = {name: count for name, count in scheduled if count}
    if not drafted or not counts:
        return None
    rows = {name: row for row, name in enumerate(runner._eagle_fsd_requests)}
    steps = torch.stack(drafted, 1)  # [requests of the step before, K, V]
    unknown = steps.new_full(steps.shape[1:], torch.nan)
    return torch.cat(
        [(steps[rows[name]] if name in rows else unknown)[:count] for name, count in counts.items()]
    )
