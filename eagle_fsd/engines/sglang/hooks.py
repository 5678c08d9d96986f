"""Connect a rule to SGLang's verification of draft trees, and refuse what would not work.

``eagle_sample`` adds penalties and biases to the target's logits in place, then calls ``apply`` of
the grammar's mask, then verifies the tree. So a mask with the rule behind it sees processed logits,
and what it leaves in them is what SGLang emits.

Shape letters: ``R`` rows of logits, one for each node of each request's tree, ``V`` vocabulary.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from sglang import __version__ as sglang_version
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import Tensor

from eagle_fsd.engines.settings import (
    check_version,
    check_weights,
    describe,
    innermost,
    reads_draft,
)
from eagle_fsd.engines.sglang.trees import RequestSampling, TreeVerifier, linked_tree
from eagle_fsd.model.acceptance import BudgetRule, rule_for
from eagle_fsd.model.config import Settings
from eagle_fsd.model.verify import AcceptanceRule
from eagle_fsd.utils.options import OptionsError

#: The version of SGLang that this plugin was written for.
VERSION = "0.5.23"
EAGLE_SAMPLE = "sglang.srt.speculative.eagle_utils.eagle_sample"
CHECK_ARGUMENTS = "sglang.srt.server_args.ServerArgs.check_server_args"
#: Kinds of speculation whose trees ``eagle_sample`` verifies.
ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")
#: Options that must keep these values: the plugin replaces what others select, rules and draws.
DEFAULTS = {
    "speculative_accept_threshold_single": 1.0,
    "speculative_accept_threshold_acc": 1.0,
    "speculative_use_rejection_sampling": False,
    "enable_deterministic_inference": False,
}
log = logging.getLogger("sglang.eagle_fsd")


def install(settings: Settings) -> None:
    """Register the rule of settings, unless they are lossless.

    Raises ``OptionsError`` for settings or a version of SGLang that are not supported.
    """
    if settings.lossless:
        log.info("eagle_fsd: the settings are lossless; SGLang is unchanged")
        return
    rule = rule_for(settings)
    if reads_draft(rule) or isinstance(innermost(rule), BudgetRule):
        raise OptionsError(
            f"SGLang verifies trees without the draft's distributions; eagle_fsd's {settings.label}"
            " needs them or a random number of its own: set another rule"
        )
    check_version("SGLang", sglang_version, VERSION)
    HookRegistry.register(EAGLE_SAMPLE, RelaxedSample(rule), HookType.AROUND)
    HookRegistry.register(CHECK_ARGUMENTS, partial(check_arguments, settings), HookType.AFTER)


def check_arguments(settings: Settings, result: None, server: Any) -> None:
    """Refuse arguments of a server under which the settings would have no or another effect.

    Called after SGLang's own check, with its ``result``. Raises ``OptionsError``.
    """
    arguments = resolved_view(server)
    algorithm = arguments.speculative_algorithm
    if algorithm not in ALGORITHMS:
        raise OptionsError(
            f"settings for eagle_fsd need --speculative-algorithm {', '.join(ALGORITHMS[:-1])}"
            f" or {ALGORITHMS[-1]}; got {algorithm}"
        )
    for name, default in DEFAULTS.items():
        if (value := getattr(arguments, name)) != default:
            raise OptionsError(f"eagle_fsd needs {name} {default}; got {value}")
    drafter = arguments.speculative_draft_model_path or algorithm  # n-grams have no folder
    check_weights(settings, {"target": arguments.model_path, "drafter": drafter}, log)
    log.info("%s", describe(settings, "SGLang"))


class RelaxedSample:
    """A wrapper of ``eagle_sample`` that applies a rule."""

    def __init__(self, rule: AcceptanceRule) -> None:
        self.verifier = TreeVerifier(rule, log)
        self._requests: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()

    def __call__(
        self,
        original: Callable[..., Any],
        verify_input: Any,
        batch: Any,
        logits_output: Any,
        grammar_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call ``eagle_sample`` with a mask that also applies the rule.

        Batches with watermarked requests are verified without it.
        """
        watermarked = kwargs.get("watermark_state") is not None and (
            batch.sampling_info.has_watermark_candidates
        )
        if batch.forward_mode.is_idle() or watermarked:
            return original(verify_input, batch, logits_output, grammar_mask, *args, **kwargs)
        processed: list[Tensor] = []

        def apply(logits: Tensor) -> None:
            if grammar_mask is not None:
                grammar_mask.apply(logits)
            if batch.return_logprob:
                processed.append(logits.clone())
            self.relax(logits, verify_input, batch)

        mask = SimpleNamespace(apply=apply)
        output = original(verify_input, batch, logits_output, mask, *args, **kwargs)
        if processed:  # SGLang reads log-probabilities from the logits
            logits_output.next_token_logits.copy_(processed[0])
        return output

    def relax(self, logits: Tensor, verify_input: Any, batch: Any) -> None:
        """Apply the rule to processed logits ``[R, V]``, in place."""
        size, info = verify_input.draft_token_num, batch.sampling_info
        tokens = verify_input.draft_token.view(-1, size)
        tree = linked_tree(
            tokens,
            verify_input.retrieve_next_token,
            verify_input.retrieve_next_sibling,
            verify_input.max_tree_depth - 1,
        )
        sampling = None
        if not info.is_all_greedy:
            sampling = RequestSampling(info.temperatures[:, 0], info.top_ks, info.top_ps)
        state = None
        if self.verifier.rule.state_size:
            self.verifier.states.keep_only(self._requests)  # those that SGLang still holds
            self._requests.update((request.rid, request) for request in batch.reqs)
            roots = verify_input.positions.view(-1, size)[:, 0]

            def emitted() -> Tensor:
                prompts = torch.tensor([len(request.origin_input_ids) for request in batch.reqs])
                return roots + 1 - prompts.to(roots.device, non_blocking=True)

            names = [request.rid for request in batch.reqs]
            state = self.verifier.states.of(names, emitted, roots.device)
        self.verifier(
            logits, verify_input.retrieve_index.long(), tree, sampling=sampling, state=state
        )
