"""The rejection sampler of vLLM's Model Runner V2 with an acceptance rule.

It verifies a batch in chunks of whole requests, with a row of logits for each drafted token and
one more for each request. After vLLM has processed the logits of a chunk, and before its kernels
verify them, the drafted tokens that the rule accepts become certain, as in
:mod:`~eagle_fsd.engines.vllm.sampler`.

Shape letters: ``B`` requests of a chunk, ``T`` their drafted tokens, ``R = T + B`` rows of logits,
``K`` maximum number of drafted tokens per request, ``S`` request slots of the runner, ``V``
vocabulary, ``W`` numbers in a rule's state.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from eagle_fsd.engines.chains import ChainVerifier, Layout
from eagle_fsd.engines.settings import reads_draft, rule_of
from eagle_fsd.engines.vllm.sampler import log
from eagle_fsd.model.verify import AcceptanceRule, VerificationInputs
from eagle_fsd.model.vocabulary import Distributions, arg_max
from eagle_fsd.utils.options import OptionsError


class RelaxedSamplerV2(RejectionSampler):
    """The rejection sampler of vLLM's Model Runner V2, with a rule."""

    verifier: ChainVerifier

    @classmethod
    def convert(cls, sampler: RejectionSampler, rule: AcceptanceRule) -> None:
        """Turn a rejection sampler of vLLM, in place, into one that applies a rule."""
        sampler.__class__ = cls
        sampler.verifier = ChainVerifier(rule, log)

    def _verify_in_chunks(self, *args: Any) -> Any:
        """Verify in chunks whose ``[B, K + 1, V]`` tensors fit vLLM's limit on rows of logits."""
        *before, limit, max_num_logprobs, drafted = args
        limit = max(1, limit // (self.num_speculative_steps + 1))
        return super()._verify_in_chunks(*before, limit, max_num_logprobs, drafted)

    def _verify(self, logits: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Verify a chunk, given raw logits ``[R, V]`` and vLLM's other arguments.

        Among these, ``draft_logits`` are ``[S, K, V]``, ``drafted`` ``[R]`` are the tokens before
        the rows, -1 if they must not be accepted, and ``pos`` ``[R]`` their positions.
        """
        verify = functools.partial(super()._verify, logits, *args)
        draft_logits, _, pos, cu_num_logits, idx_mapping, idx_mapping_np, _, _, _, drafted = args
        total = len(logits) - len(idx_mapping)
        if not total:
            return verify()
        ends = cu_num_logits[1:] - torch.arange(1, len(idx_mapping) + 1, device=logits.device)
        layout = Layout.of(ends, total, self.num_speculative_steps)
        rows = torch.arange(total, device=logits.device) + layout.rows  # of the drafted tokens
        drafts = None
        if reads_draft(self.verifier.rule):
            assert draft_logits is not None  # checked when vLLM starts
            drafts = draft_logits[idx_mapping[layout.rows], layout.nodes - 1].float()
        tree = layout.tree(drafted[rows + 1], drafts)
        state = None
        if self.verifier.rule.state_size:
            state = self._state(pos[cu_num_logits[:-1].long()], idx_mapping, idx_mapping_np)

        def at_nodes(values: Tensor) -> Distributions:
            return Distributions.of(values[rows].float()[layout.index])

        sampling = self.sampler.sampling_states
        process, scale = self.sampler.apply_sampling_params, sampling.apply_temperature
        unscaled: list[Tensor] = []

        def recorded(values: Tensor, *options: Any) -> None:
            unscaled.append(values.clone())
            scale(values, *options)

        def relaxed(values: Tensor, *options: Any) -> Tensor:
            warped = process(values, *options)
            raw = at_nodes(values)
            processed = at_nodes(unscaled[0]) if unscaled else raw
            inputs = VerificationInputs(
                tree,
                raw=raw,
                processed=processed,
                warped=processed if warped is values else at_nodes(warped),
                warped_draft=None,
                sampled=arg_max(processed.logits),
                state=state,
            )
            target, greedy = warped[rows].float(), sampling.temperature.gpu[idx_mapping] == 0.0
            self.verifier.relax(target, layout, inputs, greedy)
            return warped.float().index_copy(0, rows, target)

        # Both are called by vLLM's method only, and are methods again afterwards.
        self.sampler.apply_sampling_params = relaxed
        sampling.apply_temperature = recorded
        try:
            processed_logits, sampled, count = verify()
        finally:
            del self.sampler.apply_sampling_params
            del sampling.apply_temperature
        steps = torch.arange(sampled.shape[1], device=sampled.device)
        self.verifier.finish(torch.where(steps < count[:, None], sampled, -1))
        return processed_logits, sampled, count

    def _state(self, roots: Tensor, idx_mapping: Tensor, idx_mapping_np: np.ndarray) -> Tensor:
        """Return the rule's states ``[B, W]``, given the positions ``[B]`` of the trees' roots."""
        requests = self.sampler.req_states
        names = [requests.index_to_req_id[index] for index in idx_mapping_np.tolist()]
        return self.verifier.states.of(
            names, lambda: roots + 1 - requests.prompt_len.gpu[idx_mapping], roots.device
        )


def extend_runner_v2() -> None:
    """Extend the model runner; a second call changes nothing."""
    if getattr(GPUModelRunner, "_eagle_fsd", False):
        return
    GPUModelRunner._eagle_fsd = True
    load, finish = GPUModelRunner.load_model, GPUModelRunner.finish_requests

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        load(self, *args, **kwargs)
        rule, sampler = rule_of(self.vllm_config.additional_config), self.rejection_sampler
        if rule is None or sampler is None:  # other stages of a pipeline have none
            return
        if type(sampler) is not RejectionSampler:
            raise OptionsError(f"eagle_fsd does not support a {type(sampler).__name__}")
        RelaxedSamplerV2.convert(sampler, rule)

    def finish_requests(self: Any, scheduler_output: Any) -> None:
        finish(self, scheduler_output)  # also of preempted requests, which keep their states
        if isinstance(self.rejection_sampler, RelaxedSamplerV2):
            self.rejection_sampler.verifier.states.forget(scheduler_output.finished_req_ids)

    GPUModelRunner.load_model = load_model
    GPUModelRunner.finish_requests = finish_requests
