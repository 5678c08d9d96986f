"""Connect the rejection sampler to vLLM, and refuse what would not work as intended.

vLLM loads plugins before it reads its configuration, so its classes are extended in place: a
configuration with settings is checked when it is made, in the first process, and the rejection
sampler of a worker takes the rule when it is made.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from vllm import __version__ as vllm_version
from vllm.config import VllmConfig
from vllm.config.vllm import get_current_vllm_config_or_none
from vllm.v1.sample.rejection_sampler import RejectionSampler

from eagle_fsd.engines.settings import (
    changed_signatures,
    check_weights,
    describe,
    find_settings,
    reads_draft,
)
from eagle_fsd.engines.vllm.runner import extend_runner
from eagle_fsd.engines.vllm.sampler import RelaxedSampler
from eagle_fsd.model.acceptance import rule_for
from eagle_fsd.utils.options import OptionsError

#: The versions of vLLM that this plugin was read and tested with.
VERSIONS = ("0.32.",)
#: Parameters of what the plugin calls or overrides, by module and name.
SIGNATURES = {
    "vllm.v1.sample.rejection_sampler:RejectionSampler.__init__": "sampler spec_config device",
    "vllm.v1.sample.rejection_sampler:RejectionSampler.forward": (
        "metadata draft_probs logits sampling_metadata"
    ),
    "vllm.v1.sample.rejection_sampler:RejectionSampler.apply_logits_processors": (
        "logits sampling_metadata metadata"
    ),
    "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p": "logits k p",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample": "logits spec_decode_metadata",
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer._sample_draft_tokens": (
        "hidden_states sampling_metadata"
    ),
}
log = logging.getLogger("vllm.eagle_fsd")


def install() -> None:
    """Extend vLLM's configuration and rejection sampler; a second call changes nothing."""
    if getattr(VllmConfig, "_eagle_fsd", False):
        return
    VllmConfig._eagle_fsd = True
    _after(VllmConfig, "__post_init__", _check)
    _after(RejectionSampler, "__init__", relax)


def _after(cls: type, name: str, function: Callable[[Any], None]) -> None:
    """Call a function with the instance after a method of a class."""
    original = getattr(cls, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        function(self)

    setattr(cls, name, wrapped)


def _check(config: VllmConfig) -> None:
    """Refuse a configuration in one line: pydantic would wrap a ``ValueError`` in several."""
    try:
        check_config(config)
    except OptionsError as error:
        raise RuntimeError(str(error)) from None


def check_config(config: VllmConfig) -> None:
    """Refuse a configuration whose settings would be ignored or applied to other models.

    Raises ``OptionsError``, which ends vLLM's start.
    """
    settings = find_settings(config.additional_config)
    if settings is None or config.model_config is None:
        return
    if settings.lossless:
        log.info("eagle_fsd: the settings are lossless; vLLM is unchanged")
        return
    _check_version()
    speculative = config.speculative_config
    if speculative is None:
        raise OptionsError("settings for eagle_fsd need a --speculative-config: nothing is drafted")
    if speculative.rejection_sample_method != "standard":
        raise OptionsError(
            "settings for eagle_fsd need rejection_sample_method standard; got"
            f" {speculative.rejection_sample_method}"
        )
    if config.model_config.logprobs_mode.startswith("processed"):
        raise OptionsError(
            "log-probabilities after vLLM's processors would show eagle_fsd's rule: use"
            f" --logprobs-mode raw_logprobs or raw_logits; got {config.model_config.logprobs_mode}"
        )
    rule = rule_for(settings)
    if config.use_v2_model_runner:
        raise OptionsError(
            "eagle_fsd supports vLLM's first model runner: set VLLM_USE_V2_MODEL_RUNNER=0"
        )
    if reads_draft(rule) and speculative.method not in ("eagle", "eagle3", "draft_model"):
        raise OptionsError(
            "a rule that compares distributions needs an EAGLE head or a draft model; got the"
            f" method {speculative.method}"
        )
    for option in ("use_local_argmax_reduction", "parallel_drafting", "use_heterogeneous_vocab"):
        if reads_draft(rule) and getattr(speculative, option):
            raise OptionsError(f"a rule that compares distributions does not support {option}")
    folders = {"target": config.model_config.model, "drafter": str(speculative.model)}
    check_weights(settings, folders, log)
    log.info("%s", describe(settings, "vLLM"))


def _check_version() -> None:
    changed = changed_signatures(SIGNATURES)
    if changed or not vllm_version.startswith(VERSIONS):
        raise OptionsError(
            f"this version of eagle_fsd supports vLLM {', '.join(VERSIONS)}x; got {vllm_version}"
            + (f", in which {changed[0]} is another" if changed else "")
        )


def relax(sampler: RejectionSampler) -> None:
    """Give the rejection sampler of a worker the rule of its configuration, if there is one."""
    config = get_current_vllm_config_or_none()
    if config is None:
        raise OptionsError("eagle_fsd: vLLM makes a rejection sampler without a configuration")
    settings = find_settings(config.additional_config)
    if settings is not None and not settings.lossless:
        RelaxedSampler.take(sampler, rule_for(settings))
        extend_runner()
